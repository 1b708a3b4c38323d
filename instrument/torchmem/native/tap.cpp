// Whose is what a thread allocates, and what for; see tap.h. The hot path is `on_allocate` and `on_release`.
#include <ATen/SequenceNumber.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>
#include <pthread.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>

#include "tap_state.h"

namespace torchmem {

namespace {

namespace autograd = torch::autograd;

constexpr uint32_t kOther = 0;
constexpr uint32_t kRecomputation = 15;
constexpr int32_t kNoTask = -1;
constexpr size_t kMaxContexts = 256;
// A label's work is up to some hundred blocks: above this it was preempted.
constexpr uint64_t kPreemptedLabelNanoseconds = 1'000'000;

Context* claim_context() {
  Guard guard;
  Tap& t = tap();
  Context* context;
  if (t.contexts.size() >= kMaxContexts && !t.free_contexts.empty()) {
    context = t.free_contexts.front();  // the one freed longest ago: backward may still ask for a recent one
    t.free_contexts.pop_front();
    context->forget();
    context->stack.clear();
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
    this_thread->trains = false;
    tap().free_contexts.push_back(this_thread);
    this_thread = nullptr;
  }
};

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

void lock_before_fork() { tap().lock.lock(); }
void unlock_in_parent() { tap().lock.unlock(); }
void disarm_in_child() {
  new (&tap().lock) Spinlock;
  tap().open.store(false);
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

Context& context() {
  if (this_thread == nullptr) {
    this_thread = claim_context();
    static thread_local ReleaseAtThreadExit release;
    (void)release;
  }
  return *this_thread;
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
  for (auto& context : t.contexts) context->forget();
}

void set_gate(bool open) { tap().open.store(open); }

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

uint64_t epoch() {
  Guard guard;
  return tap().epoch;
}

void enter_module(uint32_t owner, uint64_t epoch) {
  at_module(epoch, [owner](Context& c, int32_t task, uint64_t sequence) {
    Tap& t = tap();
    const bool with_gradients = c10::GradMode::is_enabled();
    if (owner == 1) t.phases |= with_gradients ? kPhaseForward : kPhaseEval;
    if (with_gradients && task == kNoTask) c.trains = true;
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

bool is_lone_trainer() {
  const Context& c = context();
  // A device's backward runs on a thread of autograd's, while the one that trains waits.
  const bool is_autograds = !c.trains && autograd::get_current_graph_task_id() != kNoTask;
  size_t num_others = 0;
  Guard guard;
  for (const auto& other : tap().contexts) num_others += other->trains && other.get() != &c;
  return num_others <= (is_autograds ? 1 : 0);
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
