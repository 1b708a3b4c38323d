// DDP's gradient buckets: storages that only the C++ reducer holds, and that may be older than the books.
//
// The method is looked up by name when first asked for: a torch built without distributed has none. It waits for the
// reducer's lock, whose holder may be waiting for the GIL (a communication hook in Python): called without the GIL.
#include <Python.h>

#include <dlfcn.h>

#include <torch/csrc/distributed/c10d/comm.hpp>

#include "tap.h"

namespace torchmem {

namespace {

// c10d::Reducer::get_grad_buckets(return_zero_tensors) const, called as the compiler calls a member.
using GetBuckets = std::vector<c10d::GradBucket> (*)(const void* reducer, bool return_zero_tensors);

GetBuckets find_method() {
  return reinterpret_cast<GetBuckets>(dlsym(RTLD_DEFAULT, "_ZNK4c10d7Reducer16get_grad_bucketsEb"));
}

class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  ~WithoutGil() { PyEval_RestoreThread(state_); }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* state_;
};

}  // namespace

std::vector<BucketStorage> bucket_storages(const void* reducer) {
  static const GetBuckets get_buckets = find_method();
  std::vector<BucketStorage> storages;
  if (get_buckets == nullptr || reducer == nullptr) return storages;
  WithoutGil released;
  for (const auto& bucket : get_buckets(reducer, false)) {
    const at::Tensor& buffer = bucket.getBuffer();
    if (!buffer.defined() || !buffer.has_storage()) continue;
    const c10::StorageImpl* storage = buffer.storage().unsafeGetStorageImpl();
    storages.push_back({reinterpret_cast<uint64_t>(storage), reinterpret_cast<uint64_t>(storage->data())});
  }
  return storages;
}

}  // namespace torchmem
