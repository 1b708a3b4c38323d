// What Python reads of the books: copied under the ledger's lock, turned into Python objects after it.
//
// No Python object is made under the lock: making one may collect garbage, which may free a tensor, which takes the
// lock. Books cross as packed rows (owner u32, reftype u32, bytes i64; little-endian), the same bytes that a record
// carries, so that publishing makes no Python object per cell.
#pragma once

#include <Python.h>

#include <array>
#include <new>
#include <utility>
#include <vector>

#include "tap.h"

namespace torchmem {

static_assert(sizeof(CellRow) == 16, "rows are copied as they lie");

inline uint32_t num_owners() {
  LockedLedger ledger;
  return ledger->num_owners();
}

inline bool valid_cell(uint64_t owner, uint64_t reftype) {
  if (owner < num_owners() && reftype < kNumReftypes) return true;
  PyErr_Format(PyExc_ValueError, "no owner %llu or no reftype %llu", owner, reftype);
  return false;
}

inline PyObject* as_bytes(const void* data, size_t num_bytes) {
  return PyBytes_FromStringAndSize(static_cast<const char*>(data), static_cast<Py_ssize_t>(num_bytes));
}

inline PyObject* rows(const std::vector<CellRow>& cells) { return as_bytes(cells.data(), cells.size() * sizeof(CellRow)); }

inline PyObject* append(PyObject* list, PyObject* item) {
  const bool failed = list == nullptr || item == nullptr || PyList_Append(list, item) < 0;
  Py_XDECREF(item);
  if (failed) Py_CLEAR(list);
  return list;
}

struct StepRow {
  uint32_t id;
  int64_t peak;
  int64_t end;
  Totals peak_totals;
  Totals end_totals;
};

// (phases, [(device, step peak, bytes at the step's end, peak by reftype, end by reftype), ...])
inline PyObject* py_end_step(PyObject*, PyObject*) {
  const uint32_t phases = end_step();
  std::array<StepRow, kMaxDevices> steps;
  uint32_t num_devices;
  {
    LockedLedger ledger;
    num_devices = ledger->num_devices();
    for (uint32_t d = 0; d < num_devices; ++d) {
      const DeviceBooks& books = ledger->device(d);
      steps[d] = {books.id, books.step_peak, books.step_end, books.step_peak_totals, books.step_end_totals};
    }
  }
  PyObject* devices = PyList_New(0);
  for (uint32_t d = 0; d < num_devices && devices != nullptr; ++d) {
    const StepRow& step = steps[d];
    devices = append(devices, Py_BuildValue("ILLNN", step.id, static_cast<long long>(step.peak),
                                            static_cast<long long>(step.end),
                                            as_bytes(step.peak_totals.data(), sizeof(Totals)),
                                            as_bytes(step.end_totals.data(), sizeof(Totals))));
  }
  return devices == nullptr ? nullptr : Py_BuildValue("IN", phases, devices);
}

struct WindowCopy {
  uint32_t id;
  int64_t usage_bytes;
  int64_t peak;
  int64_t life_peak;
  std::vector<CellRow> usage;
  std::vector<CellRow> composition;
  std::vector<CellRow> active;
};

inline WindowCopy copy_window(const DeviceBooks& books) {
  const auto& [running, before] = books.windows;
  const Window& highest = running.peak >= before.peak ? running : before;
  WindowCopy copy{books.id, books.step_end, highest.peak, books.life_peak, books.usage, highest.composition, {}};
  for (uint32_t owner = 0; owner < running.modules.size(); ++owner) {
    const Mark& now = running.modules[owner];
    const Mark& then = before.modules[owner];
    const Mark& mark = now.max >= then.max ? now : then;
    if (mark.max == 0) continue;
    for (uint32_t r = 0; r < kNumReftypes; ++r) {
      if (mark.totals[r] != 0) copy.active.push_back({owner, r, mark.totals[r]});
    }
  }
  return copy;
}

// [(device, usage, step peak of the window, peak since reset, usage cells, peak cells, active-peak cells), ...]
inline PyObject* py_read_window(PyObject*, PyObject*) {
  std::vector<WindowCopy> copies;
  {
    LockedLedger ledger;
    for (uint32_t d = 0; d < ledger->num_devices(); ++d) copies.push_back(copy_window(ledger->device(d)));
  }
  PyObject* devices = PyList_New(0);
  for (const WindowCopy& copy : copies) {
    if (devices == nullptr) break;
    devices = append(devices, Py_BuildValue("ILLLNNN", copy.id, static_cast<long long>(copy.usage_bytes),
                                            static_cast<long long>(copy.peak), static_cast<long long>(copy.life_peak),
                                            rows(copy.usage), rows(copy.composition), rows(copy.active)));
  }
  return devices;
}

inline PyObject* py_rotate_windows(PyObject*, PyObject*) {
  LockedLedger ledger;
  ledger->rotate_windows();
  Py_RETURN_NONE;
}

inline PyObject* py_counters(PyObject*, PyObject*) {
  Counters books;
  TapCounters tap;
  size_t num_blocks;
  uint64_t num_ooms;
  {
    LockedLedger ledger;
    num_ooms = ledger.ooms().total();
    books = ledger->counters;
    tap = ledger.tap_counters();
    num_blocks = ledger->num_blocks();
  }
  return Py_BuildValue("{sKsKsKsKsKsKsKsKsKsKsKsK}", "num_label_calls", tap.num_label_calls, "label_nanoseconds",
                       tap.label_nanoseconds, "num_events", books.num_events, "num_dropped_corrections",
                       books.num_dropped_corrections, "num_unknown_frees",
                       books.num_unknown_frees, "num_double_allocations", books.num_double_allocations,
                       "num_unmatched_pops", books.num_unmatched_pops, "num_ignored_devices",
                       books.num_ignored_devices, "num_hook_calls", tap.num_hook_calls, "event_nanoseconds",
                       tap.event_nanoseconds, "num_ooms", num_ooms,
                       "num_live_blocks", static_cast<unsigned long long>(num_blocks));
}

// ([(device, failures), ...], [(number, device, owner, reftype, phase, steps ended, bytes asked for, bytes held, Unix
// seconds, cells), ...]), oldest first; the cells of all but the last are the largest.
inline PyObject* py_ooms(PyObject*, PyObject*) try {
  std::vector<OutOfMemory> events;
  std::vector<std::pair<uint32_t, uint64_t>> counts;
  {
    LockedLedger ledger;
    events = ledger.ooms().kept();
    for (uint32_t id = 0; id < kMaxDeviceIds; ++id) {
      if (const uint64_t number = ledger.ooms().of_device(id)) counts.emplace_back(id, number);
    }
  }
  for (size_t i = 0; i + 1 < events.size(); ++i) keep_largest(events[i].holders, Ooms::kHoldersOfOlder);
  PyObject* by_device = PyList_New(0);
  for (const auto& [id, number] : counts) {
    if (by_device == nullptr) break;
    by_device = append(by_device, Py_BuildValue("IK", id, static_cast<unsigned long long>(number)));
  }
  PyObject* list = PyList_New(0);
  for (const OutOfMemory& event : events) {
    if (list == nullptr) break;
    list = append(list, Py_BuildValue("KIIIIKLLdN", static_cast<unsigned long long>(event.number), event.device,
                                      event.owner, event.reftype, event.phase,
                                      static_cast<unsigned long long>(event.step),
                                      static_cast<long long>(event.requested), static_cast<long long>(event.held),
                                      event.time, rows(event.holders)));
  }
  if (by_device != nullptr && list != nullptr) return Py_BuildValue("NN", by_device, list);
  Py_XDECREF(by_device);
  Py_XDECREF(list);
  return nullptr;
} catch (const std::bad_alloc&) {  // where memory has just run out, it may again
  return PyErr_NoMemory();
}

struct TotalsRow {
  uint32_t id;
  int64_t current;
  int64_t peak;
  Totals totals;
  Totals peak_totals;
};

inline TotalsRow copy_totals(const DeviceBooks& books) {
  TotalsRow row{books.id, books.current, books.peak, books.totals, {}};
  for (uint32_t cell = 0; cell < books.cells.size(); ++cell) row.peak_totals[cell % kNumReftypes] += books.at_peak(cell);
  return row;
}

// [(device, bytes now, by reftype, peak of the running step, by reftype), ...]; the step goes on.
inline PyObject* py_totals(PyObject*, PyObject*) {
  std::vector<TotalsRow> found;
  {
    LockedLedger ledger;
    for (uint32_t d = 0; d < ledger->num_devices(); ++d) found.push_back(copy_totals(ledger->device(d)));
  }
  PyObject* devices = PyList_New(0);
  for (const TotalsRow& row : found) {
    if (devices == nullptr) break;
    devices = append(devices, Py_BuildValue("ILNLN", row.id, static_cast<long long>(row.current),
                                            as_bytes(row.totals.data(), sizeof(Totals)),
                                            static_cast<long long>(row.peak),
                                            as_bytes(row.peak_totals.data(), sizeof(Totals))));
  }
  return devices;
}

inline PyObject* py_start_watch(PyObject*, PyObject*) {
  uint32_t number;
  {
    LockedLedger ledger;
    number = ledger->start_watch();
  }
  return PyLong_FromUnsignedLong(number);
}

// [(device, the most it held since the watch began, by reftype), ...]; empty for a watch that is none.
inline PyObject* read_watch(PyObject* argument, bool stops) {
  const unsigned long number = PyLong_AsUnsignedLong(argument);
  if (PyErr_Occurred()) return nullptr;
  std::vector<std::pair<uint32_t, Mark>> found;
  {
    LockedLedger ledger;
    const Marks* marks = ledger->find_watch(static_cast<uint32_t>(number));
    for (uint32_t d = 0; marks != nullptr && d < ledger->num_devices(); ++d) {
      found.emplace_back(ledger->device(d).id, (*marks)[d]);
    }
    if (stops) ledger->stop_watch(static_cast<uint32_t>(number));
  }
  PyObject* devices = PyList_New(0);
  for (const auto& [id, mark] : found) {
    if (devices == nullptr) break;
    devices = append(devices, Py_BuildValue("ILN", id, static_cast<long long>(mark.max),
                                            as_bytes(mark.totals.data(), sizeof(Totals))));
  }
  return devices;
}

inline PyObject* py_read_watch(PyObject*, PyObject* argument) { return read_watch(argument, false); }
inline PyObject* py_stop_watch(PyObject*, PyObject* argument) { return read_watch(argument, true); }

// [(device, operation, the most the device held during the latest of these operations), ...]
inline PyObject* py_checkpoint_peaks(PyObject*, PyObject*) {
  std::vector<std::pair<uint32_t, std::array<int64_t, kNumOperations>>> found;
  {
    LockedLedger ledger;
    for (uint32_t d = 0; d < ledger->num_devices(); ++d) {
      found.emplace_back(ledger->device(d).id, ledger->device(d).operation_peaks);
    }
  }
  PyObject* rows = PyList_New(0);
  for (const auto& [id, peaks] : found) {
    for (uint32_t operation = 1; operation < kNumOperations && rows != nullptr; ++operation) {
      if (peaks[operation] == 0) continue;
      rows = append(rows, Py_BuildValue("IIL", id, operation, static_cast<long long>(peaks[operation])));
    }
  }
  return rows;
}

}  // namespace torchmem
