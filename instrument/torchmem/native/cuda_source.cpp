// Allocator events of CUDA devices, from the caching allocator's own trace.
//
// Reached through a virtual method of c10::GetAllocator(kCUDA), so that nothing of CUDA is linked. Its slot moves with
// torch's minor version: the loader refuses a binary built for another one. The callback runs under the device's
// allocator lock: no GIL and no torch allocation in it. There is no way to detach, hence the gate in the tap.
#include <c10/core/Allocator.h>
#include <c10/cuda/CUDACachingAllocator.h>

#include <cstdlib>
#include <string>

#include "tap.h"

namespace torchmem {

namespace {

namespace caching = c10::cuda::CUDACachingAllocator;

void on_trace(const caching::TraceEntry& entry) {
  using Action = caching::TraceEntry::Action;
  CudaAction action;
  switch (entry.action_) {
    case Action::ALLOC:
      action = CudaAction::kAllocate;
      break;
    // Not FREE_COMPLETED: a block waiting for other streams is no longer the program's.
    case Action::FREE_REQUESTED:
      action = CudaAction::kRelease;
      break;
    case Action::OOM:
      action = CudaAction::kOutOfMemory;
      break;
    default:  // segments are the allocator's own, snapshots nobody's
      return;
  }
  cuda_event(action, static_cast<int>(entry.device_), static_cast<uint64_t>(entry.addr_),
             static_cast<int64_t>(entry.size_));
}

}  // namespace

bool attached = false;

bool cuda_is_attached() { return attached; }

std::string attach_cuda() {
  if (attached) return "";
  const char* uncached = std::getenv("PYTORCH_NO_CUDA_MEMORY_CACHING");
  if (uncached != nullptr && std::string(uncached) != "0") return "PYTORCH_NO_CUDA_MEMORY_CACHING: nothing is told";
  try {
    auto* allocator = static_cast<caching::CUDAAllocator*>(c10::GetAllocator(c10::DeviceType::CUDA));
    if (allocator == nullptr) return "torch has no CUDA allocator";
    if (!allocator->initialized()) return "CUDA is not initialised yet";
    allocator->attachAllocatorTraceTracker(&on_trace);
  } catch (const c10::Error& error) {
    return std::string("the CUDA allocator takes no trace tracker: ") + error.what_without_backtrace();
  } catch (const std::exception& error) {
    return std::string("the CUDA allocator takes no trace tracker: ") + error.what();
  }
  attached = true;
  return "";
}

}  // namespace torchmem
