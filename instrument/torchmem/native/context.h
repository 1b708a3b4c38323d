// What is remembered of each thread, and the clock that samples what counting costs.
//
// Invariants: a context's stack and timeline are only touched under the ledger's lock; its counts only by its thread.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <utility>
#include <vector>

#include "ledger.h"

namespace torchmem {

constexpr size_t kMaxTimeline = 1 << 16;

// Which module was running when an autograd node was made on a thread: sequence numbers only grow, so the owner of
// a node is that of the last entry at or before its number. Bounded: the older half is dropped when full.
class Timeline {
 public:
  void note(uint64_t sequence, uint32_t owner) {
    if (!entries_.empty() && entries_.back().first == sequence) {
      entries_.back().second = owner;
      return;
    }
    if (entries_.size() == kMaxTimeline) entries_.erase(entries_.begin(), entries_.begin() + kMaxTimeline / 2);
    entries_.emplace_back(sequence, owner);
  }

  uint32_t owner_at(uint64_t sequence) const {
    auto after = std::upper_bound(entries_.begin(), entries_.end(), sequence,
                                  [](uint64_t s, const auto& entry) { return s < entry.first; });
    return after == entries_.begin() ? kOutside : std::prev(after)->second;
  }

  void clear() { entries_.clear(); }

 private:
  std::vector<std::pair<uint64_t, uint32_t>> entries_;
};

struct NodeKey {
  uint64_t thread_id = 0;
  uint64_t sequence = UINT64_MAX;  // AccumulateGrad has no number
};

// One thread's state.
struct Context {
  Stack stack;
  Timeline timeline;
  uint64_t thread_id = 0;
  NodeKey last_node;
  uint32_t last_owner = kOutside;
  bool after_forward = false;  // between the root's forward and backward: the loss
  bool trains = false;         // it has run a watched module's forward of which there is a backward
  size_t checkpoint = 0;       // stack depth with the frame of the running operation on a checkpoint; 0 if there is none

  // True while a checkpoint is saved or loaded on this thread: whatever is allocated then is the checkpoint's.
  bool in_checkpoint() {
    if (checkpoint != 0 && (stack.size() < checkpoint || stack[checkpoint - 1].operation == 0)) checkpoint = 0;
    return checkpoint != 0;
  }
  uint32_t num_events = 0;

  // Whose nodes these were, and who trained, is no more known.
  void forget() {
    timeline.clear();
    last_node = NodeKey{};
    last_owner = kOutside;
    after_forward = false;
    trains = false;
  }
};

using Clock = std::chrono::steady_clock;

inline uint64_t nanoseconds_since(Clock::time_point start) {
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - start).count());
}

// What reading the clock itself adds to a measured interval.
inline uint64_t clock_cost() {
  static const uint64_t cost = [] {
    uint64_t least = UINT64_MAX;
    for (int i = 0; i < 1000; ++i) least = std::min(least, nanoseconds_since(Clock::now()));
    return least;
  }();
  return cost;
}

// A sample above this was preempted: the time went to another process.
constexpr uint64_t kPreemptedNanoseconds = 20'000;

// Times one call in `kEvery` and charges it for all of them.
template <uint32_t kEvery>
class SampledTimer {
 public:
  SampledTimer(uint32_t& count, std::atomic<uint64_t>& total) : total_(total), sampled_(++count % kEvery == 0) {
    if (sampled_) start_ = Clock::now();
  }
  ~SampledTimer() {
    if (!sampled_) return;
    const uint64_t taken = nanoseconds_since(start_);
    if (taken > clock_cost() && taken < kPreemptedNanoseconds) total_.fetch_add((taken - clock_cost()) * kEvery, std::memory_order_relaxed);
  }
  SampledTimer(const SampledTimer&) = delete;
  SampledTimer& operator=(const SampledTimer&) = delete;

 private:
  std::atomic<uint64_t>& total_;
  const bool sampled_;
  Clock::time_point start_;
};

}  // namespace torchmem
