// A CUDA allocator without CUDA, registered where torch's would be: it holds the trace tracker that is attached and
// passes on whatever the test says has happened. Its virtual slots are those of the torch it was compiled against.
#include <c10/core/Allocator.h>
#include <c10/cuda/CUDACachingAllocator.h>

namespace {

namespace caching = c10::cuda::CUDACachingAllocator;
using c10::DeviceIndex;
using c10::MempoolId_t;

class FakeAllocator final : public caching::CUDAAllocator {
 public:
  bool is_initialized = false;
  bool refuses = false;
  std::vector<caching::AllocatorTraceTracker> trackers;

  bool initialized() override { return is_initialized; }
  void attachAllocatorTraceTracker(caching::AllocatorTraceTracker tracker) override {
    TORCH_CHECK(!refuses, "cudaMallocAsync does not support attachAllocatorTraceTracker");
    trackers.push_back(std::move(tracker));
  }
  std::string name() override { return "fake"; }

  c10::DataPtr allocate(size_t) override { return {}; }
  void copy_data(void*, const void*, std::size_t) const override {}
  void emptyCache(MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, c10::cuda::CUDAStream) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex) override { return {}; }
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex) override {}
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex) override { return {0, 0}; }
  void* raw_alloc(size_t) override { return nullptr; }
  void* raw_alloc_with_stream(size_t, cudaStream_t) override { return nullptr; }
  void raw_delete(void*) override {}
  void init(int) override {}
  double getMemoryFraction(DeviceIndex) override { return 1; }
  void setMemoryFraction(double, DeviceIndex) override {}
  std::vector<caching::StreamSegmentSize> getExpandableSegmentSizes(DeviceIndex) override { return {}; }
  void enable(bool) override {}
  bool isEnabled() const override { return true; }
  void cacheInfo(DeviceIndex, size_t*) override {}
  void* getBaseAllocation(void*, size_t*) override { return nullptr; }
  caching::SnapshotInfo snapshot(MempoolId_t, bool) override { return {}; }
  void beginAllocateToPool(DeviceIndex, MempoolId_t, std::function<bool(cudaStream_t)>) override {}
  void endAllocateToPool(DeviceIndex, MempoolId_t) override {}
  void releasePool(DeviceIndex, MempoolId_t) override {}
  caching::ShareableHandle shareIpcHandle(void*) override { return {}; }
  std::shared_ptr<void> getIpcDevPtr(std::string) override { return nullptr; }
  void recordHistory(bool, caching::CreateContextFn, size_t, caching::RecordContext, bool,
                     const std::vector<std::string>&) override {}
  void attachOutOfMemoryObserver(caching::OutOfMemoryObserver) override {}
  void attachOomRejectionObserver(caching::OomRejectionObserver) override {}
  void enablePeerAccess(DeviceIndex, DeviceIndex) override {}
  cudaError_t memcpyAsync(void*, int, const void*, int, size_t, cudaStream_t, bool) override { return cudaSuccess; }
  std::shared_ptr<caching::AllocatorState> getCheckpointState(DeviceIndex, MempoolId_t) override { return nullptr; }
  caching::CheckpointDelta setCheckpointPoolState(DeviceIndex, std::shared_ptr<caching::AllocatorState>) override {
    return {};
  }
};

FakeAllocator& fake() {
  static auto* instance = new FakeAllocator;
  return *instance;
}

}  // namespace

// Named by an inline method of torch's header that nobody calls here.
namespace c10::cuda {
void c10_cuda_check_implementation(int, const char*, const char*, unsigned int, bool) {}
}  // namespace c10::cuda

extern "C" {

cudaError_t cudaMemGetInfo(size_t*, size_t*) { return cudaSuccess; }

void fake_register() { c10::SetAllocator(c10::DeviceType::CUDA, &fake(), 255); }
void fake_initialize(int is_initialized) { fake().is_initialized = is_initialized != 0; }
void fake_refuse(int refuses) { fake().refuses = refuses != 0; }
int fake_num_trackers() { return static_cast<int>(fake().trackers.size()); }

void fake_event(int action, int device, unsigned long long address, unsigned long long num_bytes) {
  caching::TraceEntry entry(static_cast<caching::TraceEntry::Action>(action), static_cast<DeviceIndex>(device), address,
                            num_bytes, nullptr, {0, 0}, {});
  for (auto& tracker : fake().trackers) tracker(entry);
}
}
