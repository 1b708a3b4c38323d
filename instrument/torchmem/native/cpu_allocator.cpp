// The tap on the CPU: torch's allocator, wrapped. See tap.h. The hot path is `CountingAllocator::allocate` and
// `counted_delete`: gate, original, book.
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include "tap_state.h"

namespace torchmem {

namespace {

constexpr uint32_t kCpu = 0;

c10::Allocator* original = nullptr;
c10::DeleterFnPtr original_delete = nullptr;
bool in_chain = false;  // attached and never successfully detached: at most covered by somebody's wrapper

void counted_delete(void* data) {
  if (data != nullptr && tap().open.load(std::memory_order_relaxed)) on_release(reinterpret_cast<uint64_t>(data));
  original_delete(data);
}

class CountingAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t num_bytes) override {
    c10::DataPtr data = allocate_original(num_bytes);
    if (data.get() == nullptr || !tap().open.load(std::memory_order_relaxed)) return data;
    if (data.get_context() == data.get() && data.compare_exchange_deleter(original_delete, &counted_delete)) {
      on_allocate(reinterpret_cast<uint64_t>(data.get()), static_cast<int64_t>(num_bytes), kCpu);
    }
    return data;
  }
  c10::DeleterFnPtr raw_deleter() const override { return &counted_delete; }
  void copy_data(void* to, const void* from, std::size_t num_bytes) const override {
    original->copy_data(to, from, num_bytes);
  }

 private:
  static c10::DataPtr allocate_original(size_t num_bytes) {
    try {
      return original->allocate(num_bytes);
    } catch (...) {
      on_out_of_memory(kCpu, num_bytes);
      throw;
    }
  }
};

CountingAllocator& counting_allocator() {
  static CountingAllocator* instance = new CountingAllocator;
  return *instance;
}

// The priority with which an allocator was registered cannot be read, and a lower one is ignored: climb.
bool replace_cpu_allocator(c10::Allocator* allocator) {
  for (const uint8_t priority : {0, 1, 100, 255}) {
    c10::SetCPUAllocator(allocator, priority);
    if (c10::GetCPUAllocator() == allocator) return true;
  }
  return false;
}

}  // namespace

std::string attach_cpu() {
  c10::Allocator* current = c10::GetCPUAllocator();
  if (current == &counting_allocator() || (in_chain && current != original)) return "";
  if (original == nullptr) {
    if (current->raw_deleter() == nullptr) return "the CPU allocator in use has no raw deleter";
    original = current;
    original_delete = current->raw_deleter();
  } else if (current != original) {
    return "another CPU allocator was installed since torchmem last ran in this process";
  }
  in_chain = replace_cpu_allocator(&counting_allocator());
  return in_chain ? "" : "the CPU allocator cannot be replaced";
}

bool detach_cpu() {
  if (c10::GetCPUAllocator() != &counting_allocator()) return original == nullptr;
  in_chain = !replace_cpu_allocator(original);
  return !in_chain;
}

Adoption adopt(c10::StorageImpl* storage, uint32_t owner, uint32_t reftype) {
  const bool on_cpu = storage->device_type() == c10::DeviceType::CPU;
  // A storage remembers its allocator: without this a later resize would bypass the tap.
  if (on_cpu && original != nullptr && storage->allocator() == original) storage->set_allocator(&counting_allocator());
  const uint64_t address = reinterpret_cast<uint64_t>(storage->data());
  if (address == 0) return Adoption::kNothing;
  {
    Guard guard;
    if (tap().ledger.relabel(address, owner, reftype)) return Adoption::kRelabelled;
  }
  uint32_t device = 0;
  if (on_cpu) {
    c10::DataPtr& data = storage->_mutable_data_ptr_no_checks();
    const bool ours = data.get_deleter() == &counted_delete;
    if (data.get_context() != data.get()) return Adoption::kForeign;
    if (!ours && !data.compare_exchange_deleter(original_delete, &counted_delete)) return Adoption::kForeign;
  } else if (storage->device_type() == c10::DeviceType::CUDA && cuda_is_attached()) {  // else its free would be missed
    device = 1 + static_cast<uint32_t>(storage->device().index());
  } else {
    return Adoption::kForeign;
  }
  Stack nowhere;
  Guard guard;
  tap().ledger.allocate(nowhere, address, static_cast<int64_t>(storage->nbytes()), device, owner, reftype);
  return Adoption::kAdopted;
}

void disown(c10::StorageImpl* storage) {
  if (storage->device_type() != c10::DeviceType::CPU || original == nullptr) return;
  if (storage->allocator() == &counting_allocator()) storage->set_allocator(original);
  (void)storage->_mutable_data_ptr_no_checks().compare_exchange_deleter(&counted_delete, original_delete);
}

}  // namespace torchmem
