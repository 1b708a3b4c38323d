// The books: every live byte by (device, owner, reftype), the composition at each peak, and each module's own peak.
//
// torch-free and lock-free: the caller holds a lock around each call. ``ledger.py`` is the same book in plain Python
// and a property test demands equality event for event.
//
// Invariants: the cells of a device sum to its current bytes at all times; no count is negative; the peak never lies
// below the current bytes; relabelling conserves bytes; freeing an unknown block changes nothing but a counter.
//
// Composition at the peak costs O(1) an event: a new peak only increments the device's generation, and a cell saves
// its value the first time it changes afterwards. A block whose purpose becomes known later (a gradient, optimizer
// state, scratch freed before its module returned) is moved in the saved composition too: it was that all along.
//
// Limits: blocks of devices past the first kMaxDevices are only counted; a module's composition is corrected in hindsight once a step, at its end.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>
#include <vector>

#include "books.h"
#include "live_map.h"

namespace torchmem {

constexpr size_t kMaxCorrections = 1 << 18;  // in one step; a loop that never ends its step must not grow

class Ledger {
 public:
  // Forgets everything; `parents[i]` is the owner that encloses owner i (kOutside for the root and for itself).
  void reset(std::vector<uint32_t> parents) {
    parents_ = std::move(parents);
    live_.clear();
    sequence_ = 0;
    hindsight_.clear();
    watches_.clear();
    num_steps_ = 1;
    num_devices_ = 0;
    slots_.fill(kNoSlot);
    counters = Counters{};
    for (Stack* stack : stacks_) stack->clear();
  }

  void watch(Stack* stack) { stacks_.push_back(stack); }

  uint32_t num_devices() const { return num_devices_; }  // slots in use
  uint32_t num_owners() const { return static_cast<uint32_t>(parents_.size()); }
  size_t num_blocks() const { return live_.size(); }
  const DeviceBooks& device(uint32_t index) const { return devices_[index]; }
  uint64_t num_steps_ended() const { return num_steps_ - 1; }

  // The books of a device, opened where it has none yet; null past the last.
  const DeviceBooks* open(uint32_t id) {
    const uint32_t slot = slot_of(id);
    return slot == kNoSlot ? nullptr : &devices_[slot];
  }

  Block* find(uint64_t address) { return live_.find(address); }

  void allocate(Stack& stack, uint64_t address, int64_t num_bytes, uint32_t device, uint32_t owner, uint32_t reftype) {
    const uint32_t slot = slot_of(device);
    if (slot == kNoSlot) {
      ++counters.num_ignored_devices;
      return;
    }
    if (owner >= parents_.size()) owner = kOutside;  // of earlier books
    ++counters.num_events;
    ++sequence_;
    if (Block* lost = live_.find(address)) {  // its free was never seen
      ++counters.num_double_allocations;
      remove(lost);
    }
    const uint32_t cell = owner * kNumReftypes + reftype;
    Block* block = live_.insert(address);
    block->num_bytes = num_bytes;
    block->birth = sequence_;
    block->cell = cell;
    block->device = slot;
    DeviceBooks& books = devices_[slot];
    touch(books, cell).current += num_bytes;
    books.totals[reftype] += num_bytes;
    books.current += num_bytes;
    if (books.current > books.peak) {
      books.peak = books.current;
      books.peak_sequence = sequence_;
      ++books.generation;
      if (books.peak > books.life_peak) books.life_peak = books.peak;
    }
    if (!stack.empty()) raise(stack.back().marks[slot], books);
    for (auto& [number, marks] : watches_) raise(marks[slot], books);
  }

  // Returns false when the block is unknown.
  bool release(Stack& stack, uint64_t address) {
    Block* block = live_.find(address);
    if (block == nullptr) {
      ++counters.num_unknown_frees;
      return false;
    }
    ++counters.num_events;
    ++sequence_;
    DeviceBooks& books = devices_[block->device];
    const uint32_t cell = block->cell;
    const bool scratch = cell % kNumReftypes == kActivation && freed_before_return(stack, *block);
    const Block gone = *block;
    remove(block);
    if (scratch) rewrite_past(books, gone, cell - kActivation + kTemporary);
    return true;
  }

  // Moves a block to another owner and reftype, back to its birth. Returns false when the block is unknown.
  bool relabel(uint64_t address, uint32_t owner, uint32_t reftype) {
    Block* block = live_.find(address);
    if (block == nullptr) return false;
    if (owner >= parents_.size()) owner = kOutside;  // of earlier books
    const uint32_t cell = owner * kNumReftypes + reftype;
    if (cell == block->cell) return true;
    ++sequence_;
    DeviceBooks& books = devices_[block->device];
    touch(books, block->cell).current -= block->num_bytes;
    books.totals[block->cell % kNumReftypes] -= block->num_bytes;
    touch(books, cell).current += block->num_bytes;
    books.totals[reftype] += block->num_bytes;
    rewrite_past(books, *block, cell);
    block->cell = cell;
    return true;
  }

  void push(Stack& stack, uint32_t owner, FrameKind kind, uint32_t reftype, int32_t task) {
    stack.emplace_back();
    Frame& frame = stack.back();
    frame.owner = owner;
    frame.kind = kind;
    frame.reftype = static_cast<uint8_t>(reftype);
    frame.task = task;
    frame.opened = sequence_;
    for (uint32_t d = 0; d < num_devices_; ++d) restart(frame.marks[d], devices_[d]);
  }

  // A frame around a whole operation on a checkpoint, to which other threads may contribute.
  void push_operation(Stack& stack, uint32_t operation, int32_t task) {
    push(stack, kOutside, FrameKind::kLabel, kCheckpoint, task);
    stack.back().operation = static_cast<uint8_t>(operation);
    stack.back().watch = start_watch();
  }

  void pop(Stack& stack) {
    const size_t top = stack.size() - 1;
    hand_down(stack, top);
    if (stack[top].operation != 0) end_operation(stack[top]);
    stack.pop_back();
  }

  // Makes `owner` the module whose backward runs: the backward frames at the top become the path from the root to it.
  void enter_backward(Stack& stack, uint32_t owner, int32_t task) {
    if (!stack.empty()) {
      const Frame& top = stack.back();
      if (top.kind == FrameKind::kBackward && top.owner == owner && top.task == task) return;
    }
    path_.clear();
    for (uint32_t o = owner; o != kOutside; o = parents_[o]) path_.push_back(o);
    std::reverse(path_.begin(), path_.end());
    size_t first = stack.size();
    while (first > 0 && stack[first - 1].kind == FrameKind::kBackward && stack[first - 1].task == task) --first;
    size_t shared = 0;
    while (first + shared < stack.size() && shared < path_.size() && stack[first + shared].owner == path_[shared]) {
      ++shared;
    }
    while (stack.size() > first + shared) pop(stack);
    for (size_t i = shared; i < path_.size(); ++i) push(stack, path_[i], FrameKind::kBackward, 0, task);
  }

  // Drops backward frames left by a backward pass that is over.
  void settle(Stack& stack, int32_t task) {
    while (!stack.empty() && stack.back().kind == FrameKind::kBackward && stack.back().task != task) pop(stack);
  }

  // Notes the most each device holds from now on, whichever thread allocates; returns the watch's number.
  uint32_t start_watch() {
    watches_.emplace_back(++last_watch_, Marks{});
    for (uint32_t d = 0; d < num_devices_; ++d) restart(watches_.back().second[d], devices_[d]);
    return last_watch_;
  }

  // Its marks so far, by slot; null for a watch that is none.
  const Marks* find_watch(uint32_t number) const {
    for (const auto& [known, marks] : watches_) {
      if (known == number) return &marks;
    }
    return nullptr;
  }

  void stop_watch(uint32_t number) {
    watches_.erase(std::remove_if(watches_.begin(), watches_.end(), [&](const auto& w) { return w.first == number; }),
                   watches_.end());
  }

  // Closes the step on every device: totals, usage and compositions are captured, and a new step begins.
  void end_step() {
    for (Stack* stack : stacks_) {
      while (!stack->empty() && stack->back().kind == FrameKind::kBackward) pop(*stack);
      for (size_t i = stack->size(); i-- > 0;) hand_down(*stack, i);
    }
    for (uint32_t d = 0; d < num_devices_; ++d) {
      correct_modules(d);
      close_step(devices_[d]);
    }
    hindsight_.clear();
    ++num_steps_;
    for (Stack* stack : stacks_) {
      for (Frame& frame : *stack) {
        for (uint32_t d = 0; d < num_devices_; ++d) restart(frame.marks[d], devices_[d]);
      }
    }
  }

  // Starts a new time window; the one before stays readable, so that a maximum is visible for at least one window.
  void rotate_windows() {
    for (uint32_t d = 0; d < num_devices_; ++d) {
      std::swap(devices_[d].windows[0], devices_[d].windows[1]);
      Window& running = devices_[d].windows[0];
      running.peak = 0;
      running.composition.clear();
      for (Mark& mark : running.modules) mark.max = 0;
    }
  }

  Counters counters;

 private:
  // A label that was corrected at `end`: the block had been booked under `from` since `birth`.
  struct Correction {
    uint64_t birth;
    uint64_t end;
    int64_t num_bytes;
    uint32_t device;
    uint16_t from;
    uint16_t to;
  };

  // Where a device's books lie; they are opened when its first block comes.
  uint32_t slot_of(uint32_t id) {
    if (id >= kMaxDeviceIds) return kNoSlot;
    if (slots_[id] == kNoSlot && num_devices_ < kMaxDevices) {
      DeviceBooks& books = devices_[num_devices_];
      books = DeviceBooks{};
      books.id = id;
      books.cells.resize(parents_.size() * kNumReftypes);
      books.used.resize(parents_.size());
      books.modules.resize(parents_.size());
      for (Window& window : books.windows) window.modules.resize(parents_.size());
      slots_[id] = num_devices_++;
    }
    return slots_[id];
  }

  // The cell, its value at the current peak saved.
  static DeviceBooks::Cell& touch(DeviceBooks& books, uint32_t index) {
    DeviceBooks::Cell& cell = books.cells[index];
    if (cell.generation != books.generation) {
      cell.saved = cell.current;
      cell.generation = books.generation;
      books.used[index / kNumReftypes] |= 1u << (index % kNumReftypes);
    }
    return cell;
  }

  void restart(Mark& mark, const DeviceBooks& books) const {
    mark.max = books.current;
    mark.totals = books.totals;
    mark.sequence = sequence_;
  }

  void raise(Mark& mark, const DeviceBooks& books) const {
    if (books.current <= mark.max) return;
    mark.max = books.current;
    mark.totals = books.totals;
    mark.sequence = sequence_;
  }

  void remove(Block* block) {
    DeviceBooks& books = devices_[block->device];
    touch(books, block->cell).current -= block->num_bytes;
    books.totals[block->cell % kNumReftypes] -= block->num_bytes;
    books.current -= block->num_bytes;
    live_.erase(block);
  }

  // True when the forward frame in which the block was made is still open on this thread.
  static bool freed_before_return(const Stack& stack, const Block& block) {
    for (size_t i = stack.size(); i-- > 0;) {
      if (stack[i].opened < block.birth) {
        return stack[i].kind == FrameKind::kForward && stack[i].owner == block.cell / kNumReftypes;
      }
    }
    return false;
  }

  // In the peak's saved composition and in the modules' own, the block becomes what it turned out to be.
  void rewrite_past(DeviceBooks& books, const Block& block, uint32_t to) {
    if (block.birth <= books.peak_sequence) {
      touch(books, block.cell).saved -= block.num_bytes;
      touch(books, to).saved += block.num_bytes;
    }
    const uint16_t old_type = static_cast<uint16_t>(block.cell % kNumReftypes);
    const uint16_t new_type = static_cast<uint16_t>(to % kNumReftypes);
    if (old_type == new_type) return;
    if (hindsight_.size() == kMaxCorrections) {
      ++counters.num_dropped_corrections;
    } else {
      hindsight_.push_back({block.birth, sequence_, block.num_bytes, block.device, old_type, new_type});
    }
  }

  // One checkpoint is several operations in a row (gather, then write): within a step the highest of a kind counts.
  void end_operation(const Frame& frame) {
    if (const Marks* marks = find_watch(frame.watch)) {
      for (uint32_t d = 0; d < num_devices_; ++d) {
        DeviceBooks& books = devices_[d];
        int64_t& peak = books.operation_peaks[frame.operation];
        uint64_t& step = books.operation_steps[frame.operation];
        peak = step == num_steps_ ? std::max(peak, (*marks)[d].max) : (*marks)[d].max;
        step = num_steps_;
      }
    }
    stop_watch(frame.watch);
  }

  // The frame's maxima count for its module and for the frame around it.
  void hand_down(Stack& stack, size_t index) {
    Frame& frame = stack[index];
    for (uint32_t d = 0; d < num_devices_; ++d) {
      const Mark& mark = frame.marks[d];
      if (frame.kind != FrameKind::kLabel) {
        Mark& best = devices_[d].modules[frame.owner];
        if (best.max == 0 && mark.max > 0) devices_[d].touched.push_back(frame.owner);
        if (mark.max > best.max) best = mark;
      }
      if (index > 0 && mark.max > stack[index - 1].marks[d].max) stack[index - 1].marks[d] = mark;
    }
  }

  // Applies the step's corrections to the modules' peaks: each holds for the peaks reached in [birth, end).
  void correct_modules(uint32_t d) {
    DeviceBooks& books = devices_[d];
    std::sort(books.touched.begin(), books.touched.end(), [&](uint32_t a, uint32_t b) {
      return books.modules[a].sequence < books.modules[b].sequence;
    });
    const size_t num_touched = books.touched.size();
    deltas_.assign(num_touched + 1, Totals{});
    auto position = [&](uint64_t sequence) {
      return std::lower_bound(books.touched.begin(), books.touched.end(), sequence,
                              [&](uint32_t owner, uint64_t s) { return books.modules[owner].sequence < s; }) -
             books.touched.begin();
    };
    for (const Correction& c : hindsight_) {
      if (c.device != d) continue;
      const auto begin = position(c.birth);
      const auto end = position(c.end);
      if (begin == end) continue;
      deltas_[begin][c.from] -= c.num_bytes;
      deltas_[begin][c.to] += c.num_bytes;
      deltas_[end][c.from] += c.num_bytes;
      deltas_[end][c.to] -= c.num_bytes;
    }
    Totals running{};
    for (size_t i = 0; i < num_touched; ++i) {
      Mark& mark = books.modules[books.touched[i]];
      for (uint32_t r = 0; r < kNumReftypes; ++r) {
        running[r] += deltas_[i][r];
        mark.totals[r] += running[r];
      }
    }
  }

  void close_step(DeviceBooks& books) {
    Window& window = books.windows[0];
    const bool highest = books.peak > window.peak;
    if (highest) {
      window.peak = books.peak;
      window.composition.clear();
    }
    books.step_peak = books.peak;
    books.step_end = books.current;
    books.step_peak_totals = Totals{};
    books.step_end_totals = books.totals;
    books.usage.clear();
    for (uint32_t owner = 0; owner < books.used.size(); ++owner) {
      for (uint32_t bits = books.used[owner]; bits != 0; bits &= bits - 1) {
        const uint32_t reftype = static_cast<uint32_t>(__builtin_ctz(bits));
        const uint32_t cell = owner * kNumReftypes + reftype;
        const int64_t current = books.cells[cell].current;
        const int64_t peak = books.at_peak(cell);
        books.step_peak_totals[reftype] += peak;
        if (current != 0) books.usage.push_back({owner, reftype, current});
        if (highest && peak != 0) window.composition.push_back({owner, reftype, peak});
      }
    }
    for (uint32_t owner : books.touched) {
      Mark& mark = books.modules[owner];
      if (mark.max > window.modules[owner].max) window.modules[owner] = mark;
      mark.max = 0;
    }
    books.touched.clear();
    books.peak = books.current;
    books.peak_sequence = sequence_;
    ++books.generation;
  }

  LiveMap live_;
  static constexpr uint32_t kNoSlot = UINT32_MAX;

  std::array<DeviceBooks, kMaxDevices> devices_;
  std::array<uint32_t, kMaxDeviceIds> slots_{};
  uint32_t num_devices_ = 0;
  uint64_t sequence_ = 0;
  std::vector<uint32_t> parents_;
  std::vector<uint32_t> path_;
  std::vector<Stack*> stacks_;
  std::vector<Correction> hindsight_;
  std::vector<Totals> deltas_;
  std::vector<std::pair<uint32_t, Marks>> watches_;
  uint32_t last_watch_ = 0;
  uint64_t num_steps_ = 1;  // begun since the reset
};

}  // namespace torchmem
