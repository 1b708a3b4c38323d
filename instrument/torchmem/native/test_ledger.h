// A private Ledger for Python: property tests compare it with ledger.py, benchmarks time it. Never the process's own.
#pragma once

#include <Python.h>

#include <chrono>
#include <memory>
#include <mutex>
#include <random>
#include <thread>

#include "ledger.h"

namespace torchmem {

namespace test_ledger {

struct Object {
  PyObject_HEAD
  Ledger* ledger;
  std::vector<std::unique_ptr<Stack>>* stacks;
};

inline Stack& stack_of(PyObject* self, unsigned index) {
  auto* object = reinterpret_cast<Object*>(self);
  while (object->stacks->size() <= index) {
    object->stacks->push_back(std::make_unique<Stack>());
    object->ledger->watch(object->stacks->back().get());
  }
  return *(*object->stacks)[index];
}

inline Ledger& ledger_of(PyObject* self) { return *reinterpret_cast<Object*>(self)->ledger; }

inline PyObject* create(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject* list;
  if (!PyArg_ParseTuple(args, "O", &list)) return nullptr;
  std::vector<uint32_t> parents;
  for (Py_ssize_t i = 0; i < PySequence_Length(list); ++i) {
    PyObject* item = PySequence_GetItem(list, i);
    parents.push_back(static_cast<uint32_t>(PyLong_AsLong(item)));
    Py_XDECREF(item);
  }
  if (PyErr_Occurred()) return nullptr;
  auto* self = reinterpret_cast<Object*>(type->tp_alloc(type, 0));
  if (self == nullptr) return nullptr;
  self->ledger = new Ledger;
  self->ledger->reset(std::move(parents));
  self->stacks = new std::vector<std::unique_ptr<Stack>>;
  return reinterpret_cast<PyObject*>(self);
}

inline void destroy(PyObject* self) {
  delete reinterpret_cast<Object*>(self)->ledger;
  delete reinterpret_cast<Object*>(self)->stacks;
  Py_TYPE(self)->tp_free(self);
}

inline PyObject* allocate(PyObject* self, PyObject* args) {
  unsigned stack, device, owner, reftype;
  unsigned long long address;
  long long num_bytes;
  if (!PyArg_ParseTuple(args, "IKLIII", &stack, &address, &num_bytes, &device, &owner, &reftype)) return nullptr;
  ledger_of(self).allocate(stack_of(self, stack), address, num_bytes, device, owner, reftype);
  Py_RETURN_NONE;
}

inline PyObject* release(PyObject* self, PyObject* args) {
  unsigned stack;
  unsigned long long address;
  if (!PyArg_ParseTuple(args, "IK", &stack, &address)) return nullptr;
  return PyBool_FromLong(ledger_of(self).release(stack_of(self, stack), address));
}

inline PyObject* relabel(PyObject* self, PyObject* args) {
  unsigned owner, reftype;
  unsigned long long address;
  if (!PyArg_ParseTuple(args, "KII", &address, &owner, &reftype)) return nullptr;
  return PyBool_FromLong(ledger_of(self).relabel(address, owner, reftype));
}

inline PyObject* push(PyObject* self, PyObject* args) {
  unsigned stack, owner, kind, reftype = 0;
  int task = -1;
  if (!PyArg_ParseTuple(args, "III|Ii", &stack, &owner, &kind, &reftype, &task)) return nullptr;
  ledger_of(self).push(stack_of(self, stack), owner, static_cast<FrameKind>(kind), reftype, task);
  Py_RETURN_NONE;
}

inline PyObject* pop(PyObject* self, PyObject* args) {
  unsigned stack;
  if (!PyArg_ParseTuple(args, "I", &stack)) return nullptr;
  ledger_of(self).pop(stack_of(self, stack));
  Py_RETURN_NONE;
}

inline PyObject* enter_backward(PyObject* self, PyObject* args) {
  unsigned stack, owner;
  int task;
  if (!PyArg_ParseTuple(args, "IIi", &stack, &owner, &task)) return nullptr;
  ledger_of(self).enter_backward(stack_of(self, stack), owner, task);
  Py_RETURN_NONE;
}

inline PyObject* settle(PyObject* self, PyObject* args) {
  unsigned stack;
  int task;
  if (!PyArg_ParseTuple(args, "Ii", &stack, &task)) return nullptr;
  ledger_of(self).settle(stack_of(self, stack), task);
  Py_RETURN_NONE;
}

inline PyObject* end_step(PyObject* self, PyObject*) {
  ledger_of(self).end_step();
  Py_RETURN_NONE;
}

inline PyObject* rotate_windows(PyObject* self, PyObject*) {
  ledger_of(self).rotate_windows();
  Py_RETURN_NONE;
}

inline PyObject* counters(PyObject* self, PyObject*) {
  const Counters& c = ledger_of(self).counters;
  return Py_BuildValue("{sKsKsKsK}", "num_events", c.num_events, "num_unknown_frees", c.num_unknown_frees,
                       "num_double_allocations", c.num_double_allocations, "num_blocks",
                       static_cast<unsigned long long>(ledger_of(self).num_blocks()));
}

inline PyObject* cells_as_dict(const std::vector<CellRow>& cells) {
  PyObject* dict = PyDict_New();
  for (const CellRow& row : cells) {
    PyObject* key = Py_BuildValue("II", row.owner, row.reftype);
    PyObject* value = PyLong_FromLongLong(row.num_bytes);
    PyDict_SetItem(dict, key, value);
    Py_DECREF(key);
    Py_DECREF(value);
  }
  return dict;
}

inline PyObject* modules_as_dict(const std::vector<Mark>& modules) {
  PyObject* dict = PyDict_New();
  for (size_t owner = 0; owner < modules.size(); ++owner) {
    if (modules[owner].max == 0) continue;
    PyObject* totals = PyDict_New();
    for (uint32_t r = 0; r < kNumReftypes; ++r) {
      if (modules[owner].totals[r] == 0) continue;
      PyObject* key = PyLong_FromUnsignedLong(r);
      PyObject* value = PyLong_FromLongLong(modules[owner].totals[r]);
      PyDict_SetItem(totals, key, value);
      Py_DECREF(key);
      Py_DECREF(value);
    }
    PyObject* key = PyLong_FromSize_t(owner);
    PyObject* value = Py_BuildValue("LN", static_cast<long long>(modules[owner].max), totals);
    PyDict_SetItem(dict, key, value);
    Py_DECREF(key);
    Py_DECREF(value);
  }
  return dict;
}

// {device: (current, peak, life peak, current cells, cells at the peak, last step's (peak, end, usage),
//           the running window's (peak, composition, modules))}
inline PyObject* state(PyObject* self, PyObject*) {
  const Ledger& ledger = ledger_of(self);
  PyObject* devices = PyDict_New();
  for (uint32_t d = 0; d < ledger.num_devices(); ++d) {
    const DeviceBooks& books = ledger.device(d);
    std::vector<CellRow> current, at_peak;
    books.compose(current);
    for (uint32_t cell = 0; cell < books.cells.size(); ++cell) {
      const uint32_t owner = cell / kNumReftypes, reftype = cell % kNumReftypes;
      if (books.at_peak(cell) != 0) at_peak.push_back({owner, reftype, books.at_peak(cell)});
    }
    const Window& window = books.windows[0];
    PyObject* key = PyLong_FromUnsignedLong(books.id);
    PyObject* value = Py_BuildValue(
        "LLLNN(LLN)(LNN)", static_cast<long long>(books.current), static_cast<long long>(books.peak),
        static_cast<long long>(books.life_peak), cells_as_dict(current), cells_as_dict(at_peak),
        static_cast<long long>(books.step_peak), static_cast<long long>(books.step_end), cells_as_dict(books.usage),
        static_cast<long long>(window.peak), cells_as_dict(window.composition), modules_as_dict(window.modules));
    PyDict_SetItem(devices, key, value);
    Py_DECREF(key);
    Py_DECREF(value);
  }
  return devices;
}

// Times (threads, events per thread): nanoseconds of wall clock per event of one thread, blocks spread over all
// owners, one lock, sizes and lifetimes as in a training step (a rising and falling stack of a few hundred blocks).
inline PyObject* time_events(PyObject* self, PyObject* args) {
  unsigned num_threads, num_events;
  if (!PyArg_ParseTuple(args, "II", &num_threads, &num_events)) return nullptr;
  Ledger& ledger = ledger_of(self);
  Spinlock lock;
  for (unsigned i = 0; i < num_threads; ++i) stack_of(self, i);
  auto work = [&](unsigned thread) {
    Stack& stack = stack_of(self, thread);
    const uint64_t base = (thread + 1ull) << 40;
    const uint32_t num_owners = ledger.num_owners();
    std::minstd_rand random(thread + 1);
    unsigned done = 0;
    while (done < num_events) {
      const unsigned depth = 64 + random() % 448;
      const uint32_t owner = random() % num_owners;
      for (unsigned i = 0; i < depth; ++i) {
        std::lock_guard<Spinlock> guard(lock);
        ledger.allocate(stack, base + i * 64, 64 + (i & 7) * 512, 0, (owner + i / 8) % num_owners, i % kNumReftypes);
      }
      for (unsigned i = depth; i-- > 0;) {
        std::lock_guard<Spinlock> guard(lock);
        ledger.release(stack, base + i * 64);
      }
      done += 2 * depth;
    }
    return done;
  };
  work(0);  // warm
  double nanoseconds = 0;
  Py_BEGIN_ALLOW_THREADS;
  const auto start = std::chrono::steady_clock::now();
  std::vector<std::thread> threads;
  for (unsigned i = 1; i < num_threads; ++i) threads.emplace_back(work, i);
  const unsigned done = work(0);
  for (std::thread& thread : threads) thread.join();
  nanoseconds = std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - start).count() / done;
  Py_END_ALLOW_THREADS;
  return PyFloat_FromDouble(nanoseconds);
}

inline PyMethodDef methods[] = {{"allocate", allocate, METH_VARARGS, nullptr},
                                {"release", release, METH_VARARGS, nullptr},
                                {"relabel", relabel, METH_VARARGS, nullptr},
                                {"push", push, METH_VARARGS, nullptr},
                                {"pop", pop, METH_VARARGS, nullptr},
                                {"enter_backward", enter_backward, METH_VARARGS, nullptr},
                                {"settle", settle, METH_VARARGS, nullptr},
                                {"end_step", end_step, METH_NOARGS, nullptr},
                                {"rotate_windows", rotate_windows, METH_NOARGS, nullptr},
                                {"counters", counters, METH_NOARGS, nullptr},
                                {"state", state, METH_NOARGS, nullptr},
                                {"time_events", time_events, METH_VARARGS, nullptr},
                                {nullptr, nullptr, 0, nullptr}};

inline PyTypeObject type = {PyVarObject_HEAD_INIT(nullptr, 0)};

}  // namespace test_ledger

inline bool add_test_ledger(PyObject* module) {
  PyTypeObject& type = test_ledger::type;
  type.tp_name = "torchmem_native.Ledger";
  type.tp_basicsize = sizeof(test_ledger::Object);
  type.tp_flags = Py_TPFLAGS_DEFAULT;
  type.tp_new = test_ledger::create;
  type.tp_dealloc = test_ledger::destroy;
  type.tp_methods = test_ledger::methods;
  return PyType_Ready(&type) == 0 && PyModule_AddObjectRef(module, "Ledger", reinterpret_cast<PyObject*>(&type)) == 0;
}

}  // namespace torchmem
