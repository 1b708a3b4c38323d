// What the ledger writes down: the books of a device, and the frames of what a thread is doing.
//
// A cell is an owner's bytes of one reftype. It saves its value the first time it changes after a peak, so that the
// composition at the peak costs O(1) an event; see ledger.h.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace torchmem {

constexpr uint32_t kNumReftypes = 18;  // torchmem.model.RefType; loading checks that both agree
constexpr uint32_t kActivation = 14;
constexpr uint32_t kTemporary = 16;
constexpr uint32_t kCheckpoint = 17;
constexpr uint32_t kMaxDevices = 9;     // in use by one process: the CPU and eight accelerators
constexpr uint32_t kMaxDeviceIds = 64;  // 0 is the CPU, 1 + i accelerator i
constexpr uint32_t kOutside = 0;      // the owner of what no module made
constexpr uint32_t kNumOperations = 3;  // none, and those of torchmem.model.Operation

using Totals = std::array<int64_t, kNumReftypes>;

// The most a device held during some interval, when that was, and what it was made of.
struct Mark {
  int64_t max = 0;
  uint64_t sequence = 0;
  Totals totals{};
};

enum class FrameKind : uint8_t {
  kForward,   // a watched module's forward (or its recomputation)
  kBackward,  // a watched module's share of the backward pass
  kLabel,     // an explicit (owner, reftype) for whatever is allocated inside
};

struct Frame {
  uint32_t owner;
  FrameKind kind;
  uint8_t reftype;  // of a kLabel frame
  int32_t task;     // autograd's graph task in which it was opened; -1 outside of backward
  uint8_t operation = 0;  // of a checkpoint's frame: a torchmem.model.Operation
  uint32_t watch = 0;     // which notes the most that the devices hold meanwhile
  uint64_t opened;  // sequence number
  std::array<Mark, kMaxDevices> marks;
};

using Marks = std::array<Mark, kMaxDevices>;

// What one thread is doing, innermost last.
using Stack = std::vector<Frame>;

struct CellRow {
  uint32_t owner;
  uint32_t reftype;
  int64_t num_bytes;
};

struct Counters {
  uint64_t num_events = 0;
  uint64_t num_unknown_frees = 0;
  uint64_t num_double_allocations = 0;
  uint64_t num_unmatched_pops = 0;
  uint64_t num_ignored_devices = 0;
  uint64_t num_dropped_corrections = 0;
};

// The highest step peak of a time window, and each module's own highest.
struct Window {
  int64_t peak = 0;
  std::vector<CellRow> composition;
  std::vector<Mark> modules;  // by owner
};

struct DeviceBooks {
  struct Cell {
    int64_t current = 0;
    int64_t saved = 0;
    uint64_t generation = 0;
  };

  uint32_t id = 0;        // 0 is the CPU, 1 + i accelerator i
  int64_t current = 0;
  int64_t peak = 0;       // of the running step
  int64_t life_peak = 0;  // since the ledger was reset
  uint64_t peak_sequence = 0;
  uint64_t generation = 1;
  Totals totals{};
  std::vector<Cell> cells;
  std::vector<uint32_t> used;       // by owner: bit set of the reftypes it ever held
  std::vector<Mark> modules;        // by owner, of the running step
  std::vector<uint32_t> touched;    // owners that ran in this step
  // The most it held during the latest operation of each kind, and in which step that was.
  std::array<int64_t, kNumOperations> operation_peaks{};
  std::array<uint64_t, kNumOperations> operation_steps{};
  // As of the end of the last step.
  Totals step_peak_totals{};
  Totals step_end_totals{};
  int64_t step_peak = 0;
  int64_t step_end = 0;
  std::vector<CellRow> usage;
  std::array<Window, 2> windows;  // the running one and the one before

  int64_t at_peak(uint32_t cell) const {
    return cells[cell].generation == generation ? cells[cell].saved : cells[cell].current;
  }

  size_t num_used() const {
    size_t count = 0;
    for (const uint32_t bits : used) count += static_cast<size_t>(__builtin_popcount(bits));
    return count;
  }

  // What it holds now, appended to `rows`: at most num_used() of them.
  void compose(std::vector<CellRow>& rows) const {
    for (uint32_t owner = 0; owner < used.size(); ++owner) {
      for (uint32_t bits = used[owner]; bits != 0; bits &= bits - 1) {
        const uint32_t reftype = static_cast<uint32_t>(__builtin_ctz(bits));
        const int64_t held = cells[owner * kNumReftypes + reftype].current;
        if (held != 0) rows.push_back({owner, reftype, held});
      }
    }
  }
};

}  // namespace torchmem
