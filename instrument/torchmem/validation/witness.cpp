// A second opinion on CPU memory: wraps torch's CPU allocator and counts, as plainly as can be, so that torchmem's own
// tap can be checked against something that shares no code with it.
//
// Invariants: every block handed out after install is in `live` until its deleter runs; `current` is their sum; `peak` is
// the largest `current` since the last reset. It stacks with other wrappers in either order: allocation and deletion are
// passed on to whatever allocator was installed before this one.
// Known limits: blocks allocated before install are not counted; there is no uninstall; one lock for all threads.

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <pthread.h>

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <unordered_map>

namespace {

struct Books {
  std::mutex mutex;
  std::unordered_map<void*, std::size_t> live;
  std::int64_t current = 0;
  std::int64_t peak = 0;
  std::int64_t num_events = 0;
};

// Leaked on purpose: tensors are freed after static destructors have run.
Books& books() {
  static Books* const leaked = new Books;
  return *leaked;
}

c10::Allocator* wrapped = nullptr;
c10::DeleterFnPtr wrapped_deleter = nullptr;

void count_allocation(void* block, std::size_t num_bytes) {
  Books& b = books();
  const std::lock_guard<std::mutex> guard(b.mutex);
  ++b.num_events;
  b.live[block] = num_bytes;
  b.current += static_cast<std::int64_t>(num_bytes);
  if (b.current > b.peak) b.peak = b.current;
}

void count_free(void* block) {
  Books& b = books();
  const std::lock_guard<std::mutex> guard(b.mutex);
  const auto found = b.live.find(block);
  if (found == b.live.end()) return;
  ++b.num_events;
  b.current -= static_cast<std::int64_t>(found->second);
  b.live.erase(found);
}

void counting_deleter(void* block) {
  // Counted first: once the memory is given back, another thread may be handed the same address.
  if (block != nullptr) count_free(block);
  wrapped_deleter(block);
}

class CountingAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t num_bytes) override {
    c10::DataPtr inner = wrapped->allocate(num_bytes);
    void* const block = inner.get();
    if (block != nullptr) count_allocation(block, num_bytes);
    const c10::Device device = inner.device();
    void* const context = inner.release_context();
    return {block, context, &counting_deleter, device};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &counting_deleter; }

  void copy_data(void* dest, const void* src, std::size_t num_bytes) const override {
    wrapped->copy_data(dest, src, num_bytes);
  }
};

void lock_before_fork() { books().mutex.lock(); }
void unlock_after_fork() { books().mutex.unlock(); }

constexpr std::uint8_t kOverAnyOther = 255;

}  // namespace

extern "C" {

// 0: installed (or already was); 1: the present allocator has no raw deleter, so it cannot be wrapped.
int witness_install() {
  if (wrapped != nullptr) return 0;
  c10::Allocator* const present = c10::GetCPUAllocator();
  if (present->raw_deleter() == nullptr) return 1;
  wrapped_deleter = present->raw_deleter();
  wrapped = present;
  pthread_atfork(&lock_before_fork, &unlock_after_fork, &unlock_after_fork);
  c10::SetCPUAllocator(new CountingAllocator, kOverAnyOther);
  return 0;
}

std::int64_t witness_current() {
  const std::lock_guard<std::mutex> guard(books().mutex);
  return books().current;
}

std::int64_t witness_peak() {
  const std::lock_guard<std::mutex> guard(books().mutex);
  return books().peak;
}

// 1: the block at this address came from the allocator and is alive, or the witness never came.
int witness_has(void* block) {
  const std::lock_guard<std::mutex> guard(books().mutex);
  return wrapped == nullptr || books().live.count(block) != 0 ? 1 : 0;
}

std::int64_t witness_num_events() {
  const std::lock_guard<std::mutex> guard(books().mutex);
  return books().num_events;
}

void witness_reset_peak() {
  const std::lock_guard<std::mutex> guard(books().mutex);
  books().peak = books().current;
}
}
