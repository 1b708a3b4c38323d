// See tap.h. The hot path is guard, original, track: `CountingAllocator::allocate` and `counted_delete`.
#include "tap.h"

#include <ATen/SequenceNumber.h>
#include <ATen/record_function.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/GradMode.h>
#include <pthread.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <atomic>
#include <deque>
#include <memory>

#include "context.h"

namespace torchmem {

namespace {

namespace autograd = torch::autograd;

constexpr uint32_t kOther = 0;
constexpr uint32_t kCpu = 0;
constexpr uint32_t kGradient = 3;
constexpr uint32_t kGradientBucket = 13;
constexpr uint32_t kRecomputation = 15;
constexpr int32_t kNoTask = -1;
constexpr size_t kMaxContexts = 256;
// A label's work is up to some hundred blocks: above this it was preempted.
constexpr uint64_t kPreemptedLabelNanoseconds = 1'000'000;

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

Tap& tap() {
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

Context* claim_context() {
  Guard guard;
  Tap& t = tap();
  Context* context;
  if (t.contexts.size() >= kMaxContexts && !t.free_contexts.empty()) {
    context = t.free_contexts.front();  // the one freed longest ago: backward may still ask for a recent one
    t.free_contexts.pop_front();
    context->timeline.clear();
    context->stack.clear();
    context->last_node = NodeKey{};
    context->last_owner = kOutside;
    context->after_forward = false;
    context->checkpoint = 0;
  } else {
    t.contexts.push_back(std::make_unique<Context>());
    context = t.contexts.back().get();
    t.ledger.watch(&context->stack);
  }
  context->thread_id = at::RecordFunction::currentThreadId();
  return context;
}

// A plain pointer, so that reading it costs no check for construction.
thread_local Context* this_thread = nullptr;

struct ReleaseAtThreadExit {
  ~ReleaseAtThreadExit() {
    if (this_thread == nullptr) return;
    Guard guard;
    while (!this_thread->stack.empty()) tap().ledger.pop(this_thread->stack);
    tap().free_contexts.push_back(this_thread);
    this_thread = nullptr;
  }
};

Context& context() {
  if (this_thread == nullptr) {
    this_thread = claim_context();
    static thread_local ReleaseAtThreadExit release;
    (void)release;
  }
  return *this_thread;
}

NodeKey current_node() {
  NodeKey key;
  if (auto node = autograd::get_current_node()) {
    key.thread_id = node->thread_id();
    key.sequence = node->sequence_nr();
  }
  return key;
}

// The module that made the node; the last one again where the node has no number.
uint32_t owner_of(Context& c, const NodeKey& node) {
  if (node.sequence == UINT64_MAX) return c.last_owner;
  if (node.sequence == c.last_node.sequence && node.thread_id == c.last_node.thread_id) return c.last_owner;
  uint32_t owner = kOutside;
  if (node.thread_id == c.thread_id) {
    owner = c.timeline.owner_at(node.sequence);
  } else {
    for (const auto& other : tap().contexts) {
      if (other->thread_id == node.thread_id) owner = other->timeline.owner_at(node.sequence);
    }
  }
  c.last_node = node;
  c.last_owner = owner;
  return owner;
}

struct Label {
  uint32_t owner;
  uint32_t reftype;
};

// Whose is what this thread allocates now, and what for. Under the lock.
Label classify(Context& c, int32_t task, const NodeKey& node) {
  Tap& t = tap();
  t.ledger.settle(c.stack, task);
  if (c.in_checkpoint()) return {kOutside, kCheckpoint};
  if (!c.stack.empty()) {
    const Frame& top = c.stack.back();
    // A backward run inside (by an optimizer's closure, by reentrant checkpointing) has labels of its own.
    if (top.kind == FrameKind::kLabel && top.task == task) return {top.owner, top.reftype};
    if (top.kind == FrameKind::kForward) {
      if (task == kNoTask) return {top.owner, kActivation};
      if (top.task == task) return {top.owner, kRecomputation};
    }
  }
  if (task != kNoTask) {
    c.after_forward = false;
    t.phases |= kPhaseBackward;
    const uint32_t owner = owner_of(c, node);
    t.ledger.enter_backward(c.stack, owner, task);
    return {owner, kTemporary};
  }
  return {kOutside, c.after_forward ? kActivation : kOther};
}

void on_allocate(uint64_t address, int64_t num_bytes, uint32_t device) {
  Context& c = context();
  SampledTimer<64> timer(c.num_events, tap().event_nanoseconds);
  const int32_t task = autograd::get_current_graph_task_id();
  const NodeKey node = task == kNoTask ? NodeKey{} : current_node();
  Guard guard;
  const Label label = classify(c, task, node);
  tap().ledger.allocate(c.stack, address, num_bytes, device, label.owner, label.reftype);
}

void on_release(uint64_t address) {
  Context& c = context();
  SampledTimer<64> timer(c.num_events, tap().event_nanoseconds);
  Guard guard;
  tap().ledger.release(c.stack, address);
}

// What this thread was doing, as one of the kPhase...; the loss counts as forward. Under the lock, after `classify`.
uint32_t phase_of(Context& c, int32_t task) {
  if (c.in_checkpoint()) return kPhaseCheckpoint;
  if (task != kNoTask) return kPhaseBackward;
  for (size_t i = c.stack.size(); i-- > 0;) {
    const Frame& frame = c.stack[i];
    if (frame.kind == FrameKind::kForward) return c10::GradMode::is_enabled() ? kPhaseForward : kPhaseEval;
    // So does the optimizer labeler mark a step.
    if (frame.kind == FrameKind::kLabel && frame.owner == kOutside && frame.reftype == kTemporary) {
      return kPhaseOptimizer;
    }
  }
  return c.after_forward ? kPhaseForward : 0;
}

// Fills in the event and notes it; if the rows of what the device holds would not fit, returns how many those are
// instead. Under the lock.
size_t note_out_of_memory(OutOfMemory& event, Context& c, int32_t task, const NodeKey& node, bool has_memory) {
  Tap& t = tap();
  const DeviceBooks* books = t.ledger.open(event.device);
  const size_t wanted = books == nullptr ? 0 : books->num_used();
  if (has_memory && wanted > event.holders.capacity()) return wanted;
  const Label label = classify(c, task, node);
  event.owner = label.owner;
  event.reftype = label.reftype;
  event.phase = phase_of(c, task);
  event.step = t.ledger.num_steps_ended();
  event.held = books == nullptr ? 0 : books->current;
  if (books != nullptr && has_memory) books->compose(event.holders);
  t.ooms.put(event);
  return 0;
}

bool reserve(std::vector<CellRow>& rows, size_t num_rows) {
  try {
    rows.reserve(num_rows);
  } catch (const std::bad_alloc&) {
    return false;
  }
  return true;
}

// An allocation failed for good: it and what fills the device are noted. Memory for that is taken outside of the lock;
// where even that cannot be had, the failure is noted without what fills the device.
void on_out_of_memory(uint32_t device, uint64_t num_bytes) noexcept {
  if (!tap().open.load(std::memory_order_relaxed)) return;
  try {
    Context& c = context();
    const int32_t task = autograd::get_current_graph_task_id();
    const NodeKey node = task == kNoTask ? NodeKey{} : current_node();
    OutOfMemory event;
    event.device = device;
    event.requested = static_cast<int64_t>(std::min<uint64_t>(num_bytes, INT64_MAX));
    event.time = std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
    size_t wanted = 0;
    do {
      const bool has_memory = reserve(event.holders, wanted);
      Guard guard;
      wanted = note_out_of_memory(event, c, task, node, has_memory);
    } while (wanted != 0);
  } catch (const std::exception&) {
    return;
  }
}

c10::Allocator* original = nullptr;
c10::DeleterFnPtr original_delete = nullptr;
bool in_chain = false;  // attached and never successfully detached: at most covered by somebody's wrapper

void counted_delete(void* data) {
  // Booked before it is freed: afterwards another thread may be given the same address.
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

void lock_before_fork() { tap().lock.lock(); }
void unlock_in_parent() { tap().lock.unlock(); }
void disarm_in_child() {
  new (&tap().lock) Spinlock;
  tap().open.store(false);
}

const c10::TensorImpl* gradient_of(c10::TensorImpl* tensor) {
  const at::Tensor& gradient = tensor->grad();
  return gradient.defined() ? gradient.unsafeGetTensorImpl() : nullptr;
}

// 0 where there is no memory, or none to be read: CUDA graphs poison what a replay has overwritten.
uint64_t address_of(const c10::TensorImpl* tensor) {
  if (tensor == nullptr || !tensor->has_storage()) return 0;
  try {
    return reinterpret_cast<uint64_t>(tensor->unsafe_storage().unsafeGetStorageImpl()->data());
  } catch (const std::exception&) {
    return 0;
  }
}

// Addresses are gathered before the lock is taken: dropping the last reference to a tensor frees it, and that free
// takes the lock.
template <class Select>
size_t relabel_all(const OwnedTensors& tensors, uint32_t reftype, Select select) {
  thread_local std::vector<std::pair<uint64_t, uint32_t>> found;
  found.clear();
  for (const auto& [weak, owner] : tensors) {
    if (auto tensor = weak.lock()) {
      if (const uint64_t address = address_of(select(tensor.get()))) found.emplace_back(address, owner);
    }
  }
  Context& c = context();
  Guard guard;
  if (c.in_checkpoint()) return 0;
  size_t num_known = 0;
  for (const auto& [address, owner] : found) num_known += tap().ledger.relabel(address, owner, reftype);
  return num_known;
}

// What a module's hooks do under the lock, unless the books are closed or newer than the hook.
template <class Action>
void at_module(uint64_t epoch, Action action) {
  Tap& t = tap();
  if (!t.open.load(std::memory_order_relaxed)) return;
  Context& c = context();
  const int32_t task = autograd::get_current_graph_task_id();
  const uint64_t sequence = at::sequence_number::peek();
  Guard guard;
  if (epoch != t.epoch) return;
  ++t.counters.num_hook_calls;
  action(c, task, sequence);
}

uint32_t enclosing_module(const Stack& stack) {
  for (size_t i = stack.size(); i-- > 0;) {
    if (stack[i].kind == FrameKind::kForward) return stack[i].owner;
  }
  return kOutside;
}

}  // namespace

void reset(std::vector<uint32_t> parents) {
  static const bool once = [] {
    pthread_atfork(&lock_before_fork, &unlock_in_parent, &disarm_in_child);
    clock_cost();
    return true;
  }();
  (void)once;
  Guard guard;
  Tap& t = tap();
  t.ledger.reset(std::move(parents));
  ++t.epoch;
  t.counters = TapCounters{};
  t.ooms.clear();
  t.event_nanoseconds = 0;
  t.num_labels = 0;
  t.label_nanoseconds = 0;
  t.phases = 0;
  for (auto& context : t.contexts) {
    context->timeline.clear();
    context->last_node = NodeKey{};
    context->last_owner = kOutside;
    context->after_forward = false;
  }
}

void set_gate(bool open) { tap().open.store(open); }

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

void cuda_event(CudaAction action, int device, uint64_t address, int64_t num_bytes) {
  if (!tap().open.load(std::memory_order_relaxed)) return;
  switch (action) {
    case CudaAction::kAllocate:
      if (address != 0 && num_bytes > 0 && device >= 0) {
        on_allocate(address, num_bytes, 1 + static_cast<uint32_t>(device));
      }
      return;
    case CudaAction::kRelease:
      if (address != 0) on_release(address);
      return;
    case CudaAction::kOutOfMemory:
      if (device >= 0) on_out_of_memory(1 + static_cast<uint32_t>(device), static_cast<uint64_t>(num_bytes));
      return;
  }
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

size_t relabel_tensors(const OwnedTensors& tensors, uint32_t reftype) {
  return relabel_all(tensors, reftype, [](c10::TensorImpl* tensor) -> const c10::TensorImpl* { return tensor; });
}

size_t relabel_gradients(const OwnedTensors& tensors, uint32_t reftype) {
  return relabel_all(tensors, reftype, &gradient_of);
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

Held held(const c10::TensorImpl* tensor, uint32_t owner, uint32_t reftype) {
  const c10::TensorImpl* gradient = gradient_of(const_cast<c10::TensorImpl*>(tensor));
  return {address_of(tensor), address_of(gradient), owner, reftype};
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

uint64_t epoch() {
  Guard guard;
  return tap().epoch;
}

void enter_module(uint32_t owner, uint64_t epoch) {
  at_module(epoch, [owner](Context& c, int32_t task, uint64_t sequence) {
    Tap& t = tap();
    if (owner == 1) t.phases |= c10::GradMode::is_enabled() ? kPhaseForward : kPhaseEval;
    t.ledger.settle(c.stack, task);
    t.ledger.push(c.stack, owner, FrameKind::kForward, 0, task);
    c.timeline.note(sequence, owner);
  });
}

void leave_module(uint32_t owner, uint64_t epoch) {
  at_module(epoch, [owner](Context& c, int32_t task, uint64_t sequence) {
    Tap& t = tap();
    size_t depth = c.stack.size();
    while (depth > 0 && !(c.stack[depth - 1].kind == FrameKind::kForward && c.stack[depth - 1].owner == owner)) --depth;
    if (depth == 0) {
      ++t.ledger.counters.num_unmatched_pops;
      return;
    }
    while (c.stack.size() >= depth) t.ledger.pop(c.stack);
    const uint32_t outer = enclosing_module(c.stack);
    c.timeline.note(sequence, outer);
    if (outer == kOutside && task == kNoTask) c.after_forward = c10::GradMode::is_enabled();
  });
}

size_t push_label(uint32_t owner, uint32_t reftype) {
  Context& c = context();
  const int32_t task = autograd::get_current_graph_task_id();
  Guard guard;
  if (owner >= tap().ledger.num_owners()) owner = kOutside;  // a target made for earlier books
  tap().ledger.settle(c.stack, task);
  const size_t depth = c.stack.size();
  tap().ledger.push(c.stack, owner, FrameKind::kLabel, reftype, task);
  return depth;
}

size_t push_operation(uint32_t operation) {
  Context& c = context();
  const int32_t task = autograd::get_current_graph_task_id();
  Guard guard;
  tap().ledger.settle(c.stack, task);
  const size_t depth = c.stack.size();
  tap().ledger.push_operation(c.stack, operation, task);
  if (!c.in_checkpoint()) c.checkpoint = depth + 1;
  tap().phases |= kPhaseCheckpoint;
  return depth;
}

size_t push_recomputation() {
  Context& c = context();
  const int32_t task = autograd::get_current_graph_task_id();
  const NodeKey node = task == kNoTask ? NodeKey{} : current_node();
  Guard guard;
  tap().ledger.settle(c.stack, task);
  const size_t depth = c.stack.size();
  const uint32_t owner = task == kNoTask ? enclosing_module(c.stack) : owner_of(c, node);
  tap().ledger.push(c.stack, owner, FrameKind::kLabel, kRecomputation, task);
  return depth;
}

void cut_stack(size_t depth) {
  Context& c = context();
  Guard guard;
  while (c.stack.size() > depth) tap().ledger.pop(c.stack);
}

size_t stack_depth() {
  Context& c = context();
  Guard guard;
  return c.stack.size();
}

LabelTimer::LabelTimer() : sampled_((tap().num_labels.fetch_add(1) & 7) == 0) {
  if (sampled_) start_ = Clock::now();
}

LabelTimer::~LabelTimer() {
  if (!sampled_) return;
  const uint64_t taken = nanoseconds_since(start_);
  if (taken > clock_cost() && taken < kPreemptedLabelNanoseconds) {
    tap().label_nanoseconds.fetch_add((taken - clock_cost()) * 8, std::memory_order_relaxed);
  }
}

uint32_t end_step() {
  Guard guard;
  Tap& t = tap();
  t.ledger.end_step();
  const uint32_t phases = t.phases;
  t.phases = 0;
  for (auto& context : t.contexts) {
    context->after_forward = false;
    if (context->in_checkpoint()) t.phases |= kPhaseCheckpoint;  // one that is saved in the background spans steps
  }
  return phases;
}

LockedLedger::LockedLedger() { tap().lock.lock(); }
LockedLedger::~LockedLedger() { tap().lock.unlock(); }
Ledger* LockedLedger::operator->() const { return &tap().ledger; }
const Ooms& LockedLedger::ooms() const { return tap().ooms; }
const TapCounters& LockedLedger::tap_counters() const {
  Tap& t = tap();
  t.counters.event_nanoseconds = t.event_nanoseconds.load();
  t.counters.num_label_calls = t.num_labels.load() / 2;  // one before and one after each call
  t.counters.label_nanoseconds = t.label_nanoseconds.load();
  return t.counters;
}

}  // namespace torchmem
