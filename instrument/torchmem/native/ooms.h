// Allocations that failed: who asked for how much, and what the device was filled with at that instant.
//
// torch-free. Invariants: the last kKept failures are kept, all are counted; the caller holds the ledger's lock around
// each call, and `put` allocates nothing.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>
#include <vector>

#include "ledger.h"

namespace torchmem {

struct OutOfMemory {
  uint64_t number = 0;  // from 1
  uint64_t step = 0;    // steps ended before it since the ledger was reset
  double time = 0;      // Unix seconds
  int64_t requested = 0;
  int64_t held = 0;  // on the device; not less than the sum of `holders`
  uint32_t device = 0;
  uint32_t owner = 0;  // who asked, and what for
  uint32_t reftype = 0;
  uint32_t phase = 0;
  std::vector<CellRow> holders;
};

class Ooms {
 public:
  static constexpr size_t kKept = 8;
  static constexpr size_t kHoldersOfOlder = 64;

  uint64_t total() const { return total_; }
  uint64_t of_device(uint32_t id) const { return id < kMaxDeviceIds ? by_device_[id] : 0; }

  // Takes the event; what it pushed out is left in its place, for the caller to free after the lock.
  void put(OutOfMemory& event) {
    event.number = ++total_;
    if (event.device < kMaxDeviceIds) ++by_device_[event.device];
    std::swap(kept_[total_ % kKept], event);
  }

  // Those kept, oldest first.
  std::vector<OutOfMemory> kept() const {
    std::vector<OutOfMemory> events;
    for (uint64_t number = total_ < kKept ? 1 : total_ - kKept + 1; number <= total_; ++number) {
      events.push_back(kept_[number % kKept]);
    }
    return events;
  }

  void clear() { *this = Ooms{}; }

 private:
  uint64_t total_ = 0;
  std::array<uint64_t, kMaxDeviceIds> by_device_{};
  std::array<OutOfMemory, kKept> kept_;
};

// Leaves the largest holders: a record must not grow with each failure that a job survives.
inline void keep_largest(std::vector<CellRow>& holders, size_t num_kept) {
  if (holders.size() <= num_kept) return;
  std::partial_sort(holders.begin(), holders.begin() + static_cast<std::ptrdiff_t>(num_kept), holders.end(),
                    [](const CellRow& a, const CellRow& b) { return a.num_bytes > b.num_bytes; });
  holders.resize(num_kept);
}

}  // namespace torchmem
