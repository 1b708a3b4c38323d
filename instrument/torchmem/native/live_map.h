// The table of live blocks: open addressing by address, and the lock that guards it.
//
// Invariants: at most half full, so a probe is short; erasing shifts later entries back, so there are no tombstones
// and the table never degrades with the number of events; it grows by doubling and never shrinks (no allocation
// once warm).
#pragma once

#include <sched.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace torchmem {

// A spinlock, because the critical section is tens of nanoseconds and is entered under the allocator's own lock;
// after a short spin it yields, so that a preempted holder on a loaded host is waited for politely.
class Spinlock {
 public:
  void lock() {
    int spins = 0;
    while (held_.exchange(1, std::memory_order_acquire)) {
      while (held_.load(std::memory_order_relaxed)) {
        if (++spins == 64) {
          spins = 0;
          sched_yield();
        }
      }
    }
  }
  void unlock() { held_.store(0, std::memory_order_release); }

 private:
  std::atomic<int> held_{0};
};

struct Block {
  uint64_t address;  // 0: the slot is free
  int64_t num_bytes;
  uint64_t birth;  // sequence number of the event that made it
  uint32_t cell;   // owner * kNumReftypes + reftype
  uint32_t device;
};

class LiveMap {
 public:
  LiveMap() : slots_(1 << 11), mask_(slots_.size() - 1) {}

  size_t size() const { return num_blocks_; }

  Block* find(uint64_t address) {
    for (uint64_t i = home(address);; i = (i + 1) & mask_) {
      if (slots_[i].address == 0) return nullptr;  // first, so that nobody finds a block at address 0
      if (slots_[i].address == address) return &slots_[i];
    }
  }

  // The address must not be in the table. The pointer is valid until the next insert.
  Block* insert(uint64_t address) {
    if ((num_blocks_ + 1) * 2 > slots_.size()) grow();
    uint64_t i = home(address);
    while (slots_[i].address != 0) i = (i + 1) & mask_;
    ++num_blocks_;
    slots_[i].address = address;
    return &slots_[i];
  }

  void erase(Block* block) {
    uint64_t hole = static_cast<uint64_t>(block - slots_.data());
    for (uint64_t i = (hole + 1) & mask_; slots_[i].address != 0; i = (i + 1) & mask_) {
      // An entry may fill the hole unless its home lies cyclically after the hole.
      if (((i - home(slots_[i].address)) & mask_) >= ((i - hole) & mask_)) {
        slots_[hole] = slots_[i];
        hole = i;
      }
    }
    slots_[hole].address = 0;
    --num_blocks_;
  }

  void clear() {
    for (Block& slot : slots_) slot.address = 0;
    num_blocks_ = 0;
  }

 private:
  // Addresses are at least 16-byte aligned; Fibonacci hashing spreads the rest.
  uint64_t home(uint64_t address) const { return (((address >> 4) * 0x9E3779B97F4A7C15ull) >> 20) & mask_; }

  void grow() {
    std::vector<Block> old(slots_.size() * 2);
    old.swap(slots_);
    mask_ = slots_.size() - 1;
    num_blocks_ = 0;
    for (const Block& block : old) {
      if (block.address != 0) *insert(block.address) = block;
    }
  }

  std::vector<Block> slots_;
  uint64_t mask_;
  size_t num_blocks_ = 0;
};

}  // namespace torchmem
