// The one tap of the process: its ledger, the lock around it, what is remembered of each thread. For the tap's own units.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "context.h"
#include "tap.h"

namespace torchmem {

// Constructed once and never destroyed: frees may come after static destructors have begun.
struct Tap {
  Spinlock lock;
  Ledger ledger;
  TapCounters counters;
  Ooms ooms;
  uint32_t phases = 0;
  uint64_t epoch = 0;  // of the books: counts resets
  std::atomic<bool> open{false};
  std::vector<std::unique_ptr<Context>> contexts;
  std::deque<Context*> free_contexts;
  std::atomic<uint64_t> event_nanoseconds{0};
  std::atomic<uint64_t> num_labels{0};
  std::atomic<uint64_t> label_nanoseconds{0};
};

inline Tap& tap() {
  static Tap* instance = new Tap;
  return *instance;
}

class Guard {
 public:
  Guard() { tap().lock.lock(); }
  ~Guard() { tap().lock.unlock(); }
  Guard(const Guard&) = delete;
  Guard& operator=(const Guard&) = delete;
};

// What is remembered of this thread.
Context& context();

// Book what this thread did, under the lock. A release comes before the memory is freed: afterwards another thread may
// be given the same address.
void on_allocate(uint64_t address, int64_t num_bytes, uint32_t device);
void on_release(uint64_t address);
// An allocation failed for good: it and what fills the device are noted. Memory for that is taken outside of the lock;
// where even that cannot be had, the failure is noted without what fills the device.
void on_out_of_memory(uint32_t device, uint64_t num_bytes) noexcept;

}  // namespace torchmem
