// The tap: sees each allocation and each free of every thread, decides whose it is, and books it in the one ledger.
//
// Everything here is safe from any thread and takes the ledger's lock for tens of nanoseconds. With the gate closed
// nothing is counted. In a forked child the gate is closed for good.
#pragma once

#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "ledger.h"
#include "ooms.h"

namespace torchmem {

enum class CudaAction { kAllocate, kRelease, kOutOfMemory };
enum class Adoption { kNothing, kRelabelled, kAdopted, kForeign };

// What happened in a step, as torchmem.model.Phase.
constexpr uint32_t kPhaseForward = 1;
constexpr uint32_t kPhaseBackward = 2;
constexpr uint32_t kPhaseOptimizer = 4;
constexpr uint32_t kPhaseCheckpoint = 8;
constexpr uint32_t kPhaseEval = 16;

struct TapCounters {
  uint64_t num_hook_calls = 0;
  uint64_t event_nanoseconds = 0;  // estimated from a sample of the events
  uint64_t num_label_calls = 0;
  uint64_t label_nanoseconds = 0;  // likewise
};

using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl>;
using OwnedTensors = std::vector<std::pair<WeakTensor, uint32_t>>;

// Forgets all books; `parents` as in Ledger::reset.
void reset(std::vector<uint32_t> parents);
void set_gate(bool open);

// Wraps torch's CPU allocator; returns why not, or "". Detaching puts the original back; returns false when another
// wrapper lies on top, in which case the tap stays in place with its gate closed.
std::string attach_cpu();
bool detach_cpu();
std::string attach_cuda();
bool cuda_is_attached();
// `address` and `num_bytes` as of the allocator's trace entries: of a kOutOfMemory, the size that was asked for.
void cuda_event(CudaAction action, int device, uint64_t address, int64_t num_bytes);

// Books a storage that exists already, and routes its free (and later resizes) through the tap; `disown` undoes that.
Adoption adopt(c10::StorageImpl* storage, uint32_t owner, uint32_t reftype);
void disown(c10::StorageImpl* storage);

// Relabels the storages of the tensors, or of their gradients; returns how many are in the books.
size_t relabel_tensors(const OwnedTensors& tensors, uint32_t reftype);
size_t relabel_gradients(const OwnedTensors& tensors, uint32_t reftype);

// What a module holds now under a name: addresses of the storages of a parameter and its gradient, or of a buffer.
struct Held {
  uint64_t tensor;
  uint64_t gradient;
  uint32_t owner;
  uint32_t tensor_reftype;
};
Held held(const c10::TensorImpl* tensor, uint32_t owner, uint32_t reftype, bool with_gradient);
// Relabels all of it; gradients that lie in a bucket of theirs stay the bucket's.
void relabel_held(const std::vector<Held>& all);

// The storages of a c10d::Reducer's buckets, which live as long as the reducer keeps them.
struct BucketStorage {
  uint64_t storage;  // address of the StorageImpl
  uint64_t data;     // of its memory
};
std::vector<BucketStorage> bucket_storages(const void* reducer);

// Relabels one tensor's storage; returns whether that changed anything.
bool relabel_tensor(const c10::TensorImpl* tensor, uint32_t owner, uint32_t reftype);

// A watched module's forward begins and ends on this thread. A copy of a model may outlive the books that its hooks
// were made for: they then do nothing.
uint64_t epoch();
void enter_module(uint32_t owner, uint64_t epoch);
void leave_module(uint32_t owner, uint64_t epoch);
// Whether no other thread trains watched modules: only then may this one look at their gradients. Freeing a gradient
// gives up the interpreter's lock, and a backward puts them in place without it.
bool is_lone_trainer();
// An explicit label for what this thread allocates until the stack is cut back to the depth returned.
size_t push_label(uint32_t owner, uint32_t reftype);
void cut_stack(size_t depth);
// The same for an operation on a checkpoint (torchmem.model.Operation): all that this thread allocates meanwhile is the
// checkpoint's, whatever labels are pushed on top, and nothing is relabelled by this thread.
size_t push_operation(uint32_t operation);
// What is recomputed in backward outside any module: it belongs to the module whose backward asked for it.
size_t push_recomputation();
size_t stack_depth();

// Counts and times (one in eight) what a label adds before or after a call.
class LabelTimer {
 public:
  LabelTimer();
  ~LabelTimer();
  LabelTimer(const LabelTimer&) = delete;
  LabelTimer& operator=(const LabelTimer&) = delete;

 private:
  std::chrono::steady_clock::time_point start_;
  bool sampled_;
};

// Closes the step; returns the phases it held.
uint32_t end_step();

// The ledger under its lock.
class LockedLedger {
 public:
  LockedLedger();
  ~LockedLedger();
  LockedLedger(const LockedLedger&) = delete;
  LockedLedger& operator=(const LockedLedger&) = delete;
  Ledger* operator->() const;
  const TapCounters& tap_counters() const;
  const Ooms& ooms() const;
};

}  // namespace torchmem
