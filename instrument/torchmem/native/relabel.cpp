// What blocks turn out to be, told by the tensors whose memory they are; see tap.h.
#include <ATen/core/Tensor.h>

#include "tap_state.h"

namespace torchmem {

namespace {

constexpr uint32_t kGradient = 3;
constexpr uint32_t kGradientBucket = 13;

// 0 where there is no memory, or none to be read: CUDA graphs poison what a replay has overwritten.
uint64_t address_of(const c10::TensorImpl* tensor) {
  if (!tensor->has_storage()) return 0;
  try {
    return reinterpret_cast<uint64_t>(tensor->unsafe_storage().unsafeGetStorageImpl()->data());
  } catch (const std::exception&) {
    return 0;
  }
}

// 0 where there is none; of a sparse one (an embedding's), that of its values.
uint64_t address_of_gradient(const c10::TensorImpl* tensor) {
  const at::Tensor& gradient = const_cast<c10::TensorImpl*>(tensor)->grad();
  if (!gradient.defined()) return 0;
  if (gradient.layout() != at::kSparse) return address_of(gradient.unsafeGetTensorImpl());
  const at::Tensor values = gradient._values();
  return address_of(values.unsafeGetTensorImpl());
}

// Addresses are gathered before the lock is taken: dropping the last reference to a tensor frees it, and that free
// takes the lock.
size_t relabel_all(const OwnedTensors& tensors, uint32_t reftype, uint64_t (*address_of)(const c10::TensorImpl*)) {
  thread_local std::vector<std::pair<uint64_t, uint32_t>> found;
  found.clear();
  for (const auto& [weak, owner] : tensors) {
    if (auto tensor = weak.lock()) {
      if (const uint64_t address = address_of(tensor.get())) found.emplace_back(address, owner);
    }
  }
  Context& c = context();
  Guard guard;
  if (c.in_checkpoint()) return 0;
  size_t num_known = 0;
  for (const auto& [address, owner] : found) num_known += tap().ledger.relabel(address, owner, reftype);
  return num_known;
}

}  // namespace

size_t relabel_tensors(const OwnedTensors& tensors, uint32_t reftype) {
  return relabel_all(tensors, reftype, &address_of);
}

size_t relabel_gradients(const OwnedTensors& tensors, uint32_t reftype) {
  return relabel_all(tensors, reftype, &address_of_gradient);
}

bool relabel_tensor(const c10::TensorImpl* tensor, uint32_t owner, uint32_t reftype) {
  const uint64_t address = address_of(tensor);
  Context& c = context();
  Guard guard;
  if (c.in_checkpoint()) return false;
  const Block* block = tap().ledger.find(address);
  if (block == nullptr || block->cell == owner * kNumReftypes + reftype) return false;
  return tap().ledger.relabel(address, owner, reftype);
}

Held held(const c10::TensorImpl* tensor, uint32_t owner, uint32_t reftype, bool with_gradient) {
  return {address_of(tensor), with_gradient ? address_of_gradient(tensor) : 0, owner, reftype};
}

void relabel_held(const std::vector<Held>& all) {
  Context& c = context();
  Guard guard;
  if (c.in_checkpoint()) return;
  Ledger& ledger = tap().ledger;
  for (const Held& one : all) {
    if (one.tensor != 0) ledger.relabel(one.tensor, one.owner, one.tensor_reftype);
    if (one.gradient == 0) continue;
    const Block* block = ledger.find(one.gradient);
    if (block != nullptr && block->cell % kNumReftypes != kGradientBucket) {
      ledger.relabel(one.gradient, one.owner, kGradient);
    }
  }
}

}  // namespace torchmem
