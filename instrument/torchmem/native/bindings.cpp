// What Python sees of the tap: functions on the process's one ledger, the module hook, and groups of owned tensors.
//
// Called with the GIL held; no Python object is made under the ledger's lock (see book_bindings.h).
#include <Python.h>

#include <c10/core/CPUAllocator.h>
#include <torch/version.h>

#include <exception>
#include <new>

#include "book_bindings.h"
#include "held.h"
#include "label_call.h"
#include "tap.h"
#include "test_ledger.h"

namespace torchmem {

namespace {

bool as_unsigned(PyObject* object, uint64_t* value) {
  *value = PyLong_AsUnsignedLongLong(object);
  return !(*value == UINT64_MAX && PyErr_Occurred());
}

bool arguments(PyObject* const* args, Py_ssize_t given, std::initializer_list<uint64_t*> wanted) {
  if (given != static_cast<Py_ssize_t>(wanted.size())) {
    PyErr_Format(PyExc_TypeError, "expected %zu arguments, got %zd", wanted.size(), given);
    return false;
  }
  for (uint64_t* value : wanted) {
    if (!as_unsigned(*args++, value)) return false;
  }
  return true;
}

// A C++ exception of torch's as one of Python's.
template <class Function>
PyObject* guarded(Function function) {
  try {
    return function();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
}

// ---- hook: enters or leaves a module; called around a module's call

struct Hook {
  PyObject_HEAD
  vectorcallfunc call;
  uint32_t owner;
  bool enters;
  uint64_t epoch;
};

PyObject* hook_call(PyObject* self, PyObject* const*, size_t, PyObject*) {
  const Hook* hook = reinterpret_cast<Hook*>(self);
  hook->enters ? enter_module(hook->owner, hook->epoch) : leave_module(hook->owner, hook->epoch);
  Py_RETURN_NONE;
}

PyTypeObject hook_type = {PyVarObject_HEAD_INIT(nullptr, 0)};

PyObject* make_hook(PyObject*, PyObject* const* args, Py_ssize_t given) {
  uint64_t owner, enters;
  if (!arguments(args, given, {&owner, &enters}) || !valid_cell(owner, 0)) return nullptr;
  Hook* hook = PyObject_New(Hook, &hook_type);
  if (hook == nullptr) return nullptr;
  hook->call = hook_call;
  hook->owner = static_cast<uint32_t>(owner);
  hook->enters = enters != 0;
  hook->epoch = epoch();
  return reinterpret_cast<PyObject*>(hook);
}

// ---- owned tensors: a group whose storages, or whose gradients', are relabelled in one call

void group_dealloc(PyObject* self) {
  reinterpret_cast<TensorGroup*>(self)->tensors.~OwnedTensors();
  PyObject_Free(self);
}

// TensorGroup of [(address of a TensorImpl, owner), ...]; holds weak references.
PyObject* make_group(PyObject*, PyObject* list) {
  OwnedTensors tensors;
  PyObject* items = PySequence_Fast(list, "expected a sequence of (tensor address, owner)");
  if (items == nullptr) return nullptr;
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(items); ++i) {
    unsigned long long address;
    unsigned int owner;
    if (!PyArg_ParseTuple(PySequence_Fast_GET_ITEM(items, i), "KI", &address, &owner) || !valid_cell(owner, 0)) {
      Py_DECREF(items);
      return nullptr;
    }
    auto strong = c10::intrusive_ptr<c10::TensorImpl>::reclaim_copy(reinterpret_cast<c10::TensorImpl*>(address));
    tensors.emplace_back(WeakTensor(strong), owner);
  }
  Py_DECREF(items);
  TensorGroup* group = PyObject_New(TensorGroup, &group_type);
  if (group == nullptr) return nullptr;
  new (&group->tensors) OwnedTensors(std::move(tensors));
  return reinterpret_cast<PyObject*>(group);
}

template <size_t (*kRelabel)(const OwnedTensors&, uint32_t)>
PyObject* group_relabel(PyObject* self, PyObject* argument) {
  uint64_t reftype;
  if (!as_unsigned(argument, &reftype) || !valid_cell(0, reftype)) return nullptr;
  return PyLong_FromSize_t(
      kRelabel(reinterpret_cast<TensorGroup*>(self)->tensors, static_cast<uint32_t>(reftype)));
}

PyMethodDef group_methods[] = {{"relabel", group_relabel<&relabel_tensors>, METH_O, nullptr},
                               {"relabel_gradients", group_relabel<&relabel_gradients>, METH_O, nullptr},
                               {nullptr, nullptr, 0, nullptr}};

// ---- functions

PyObject* make_target(PyObject*, PyObject* argument) {
  uint64_t owner;
  if (!as_unsigned(argument, &owner) || !valid_cell(owner, 0)) return nullptr;
  return label_call::new_target(static_cast<uint32_t>(owner));
}

PyObject* py_reset(PyObject*, PyObject* list) {
  PyObject* items = PySequence_Fast(list, "expected a sequence of owners");
  if (items == nullptr) return nullptr;
  std::vector<uint32_t> parents;
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(items); ++i) {
    uint64_t parent;
    if (!as_unsigned(PySequence_Fast_GET_ITEM(items, i), &parent)) break;
    // Every path to the outside must end, or a walk along it would not.
    if (parent > static_cast<uint64_t>(i) || (i > 0 && parent == static_cast<uint64_t>(i))) {
      PyErr_Format(PyExc_ValueError, "owner %zd: its parent must have a smaller index", i);
      break;
    }
    parents.push_back(static_cast<uint32_t>(parent));
  }
  Py_DECREF(items);
  if (PyErr_Occurred()) return nullptr;
  reset(std::move(parents));
  Py_RETURN_NONE;
}

PyObject* py_set_gate(PyObject*, PyObject* open) {
  set_gate(PyObject_IsTrue(open) == 1);
  Py_RETURN_NONE;
}

PyObject* py_attach_cpu(PyObject*, PyObject*) { return PyUnicode_FromString(attach_cpu().c_str()); }
PyObject* py_detach_cpu(PyObject*, PyObject*) { return PyBool_FromLong(detach_cpu()); }
PyObject* py_cpu_allocator(PyObject*, PyObject*) { return PyLong_FromVoidPtr(c10::GetCPUAllocator()); }
PyObject* py_attach_cuda(PyObject*, PyObject*) { return PyUnicode_FromString(attach_cuda().c_str()); }

PyObject* py_cuda_event(PyObject*, PyObject* args) {
  int action, device;
  unsigned long long address;
  long long num_bytes;
  if (!PyArg_ParseTuple(args, "iiKL", &action, &device, &address, &num_bytes)) return nullptr;
  cuda_event(static_cast<CudaAction>(action), device, address, num_bytes);
  Py_RETURN_NONE;
}

PyObject* py_adopt(PyObject*, PyObject* const* args, Py_ssize_t given) {
  uint64_t storage, owner, reftype;
  if (!arguments(args, given, {&storage, &owner, &reftype}) || !valid_cell(owner, reftype)) return nullptr;
  return guarded([&] {
    return PyLong_FromLong(static_cast<long>(adopt(reinterpret_cast<c10::StorageImpl*>(storage),
                                                   static_cast<uint32_t>(owner), static_cast<uint32_t>(reftype))));
  });
}

// The storage of one tensor, by the address of its TensorImpl.
PyObject* py_relabel(PyObject*, PyObject* const* args, Py_ssize_t given) {
  uint64_t tensor, owner, reftype;
  if (!arguments(args, given, {&tensor, &owner, &reftype}) || !valid_cell(owner, reftype)) return nullptr;
  return guarded([&] {
    return PyBool_FromLong(relabel_tensor(reinterpret_cast<c10::TensorImpl*>(tensor), static_cast<uint32_t>(owner),
                                          static_cast<uint32_t>(reftype)));
  });
}

// (a pybind11 object that holds a c10d::Reducer) -> [(address of a StorageImpl, of its memory), ...]
PyObject* py_bucket_storages(PyObject*, PyObject* reducer) {
  // A simple pybind11 instance holds its value's pointer right after the object's header.
  const void* value = *reinterpret_cast<void**>(reinterpret_cast<char*>(reducer) + sizeof(PyObject));
  return guarded([&] {
    PyObject* list = PyList_New(0);
    for (const BucketStorage& one : bucket_storages(value)) {
      if (list == nullptr) break;
      list = append(list, Py_BuildValue("KK", static_cast<unsigned long long>(one.storage),
                                        static_cast<unsigned long long>(one.data)));
    }
    return list;
  });
}

PyObject* py_disown(PyObject*, PyObject* argument) {
  uint64_t storage;
  if (!as_unsigned(argument, &storage)) return nullptr;
  disown(reinterpret_cast<c10::StorageImpl*>(storage));
  Py_RETURN_NONE;
}

PyObject* py_push_label(PyObject*, PyObject* const* args, Py_ssize_t given) {
  uint64_t owner, reftype;
  if (!arguments(args, given, {&owner, &reftype}) || !valid_cell(owner, reftype)) return nullptr;
  return PyLong_FromSize_t(push_label(static_cast<uint32_t>(owner), static_cast<uint32_t>(reftype)));
}

PyObject* py_push_checkpoint(PyObject*, PyObject* argument) {
  uint64_t operation;
  if (!as_unsigned(argument, &operation)) return nullptr;
  if (operation == 0 || operation >= kNumOperations) {
    PyErr_SetString(PyExc_ValueError, "no such operation");
    return nullptr;
  }
  return PyLong_FromSize_t(push_operation(static_cast<uint32_t>(operation)));
}

PyObject* py_push_recomputation(PyObject*, PyObject*) { return PyLong_FromSize_t(push_recomputation()); }

PyObject* py_cut_stack(PyObject*, PyObject* argument) {
  uint64_t depth;
  if (!as_unsigned(argument, &depth)) return nullptr;
  cut_stack(depth);
  Py_RETURN_NONE;
}

PyObject* py_is_lone_trainer(PyObject*, PyObject*) { return PyBool_FromLong(is_lone_trainer()); }

PyObject* py_stack_depth(PyObject*, PyObject*) { return PyLong_FromSize_t(stack_depth()); }

PyObject* py_lookup(PyObject*, PyObject* argument) {
  uint64_t address;
  if (!as_unsigned(argument, &address)) return nullptr;
  Block block{};
  {
    LockedLedger ledger;
    if (const Block* found = ledger->find(address)) block = *found;
  }
  if (block.address == 0) Py_RETURN_NONE;
  return Py_BuildValue("LII", static_cast<long long>(block.num_bytes), block.cell / kNumReftypes,
                       block.cell % kNumReftypes);
}

template <class Function>
PyCFunction as_method(Function function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef functions[] = {{"reset", py_reset, METH_O, nullptr},
                           {"set_gate", py_set_gate, METH_O, nullptr},
                           {"attach_cpu", py_attach_cpu, METH_NOARGS, nullptr},
                           {"detach_cpu", py_detach_cpu, METH_NOARGS, nullptr},
                           {"cpu_allocator", py_cpu_allocator, METH_NOARGS, nullptr},
                           {"attach_cuda", py_attach_cuda, METH_NOARGS, nullptr},
                           {"cuda_event", py_cuda_event, METH_VARARGS, nullptr},
                           {"adopt", as_method(py_adopt), METH_FASTCALL, nullptr},
                           {"relabel", as_method(py_relabel), METH_FASTCALL, nullptr},
                           {"disown", py_disown, METH_O, nullptr},
                           {"make_hook", as_method(make_hook), METH_FASTCALL, nullptr},
                           {"make_group", make_group, METH_O, nullptr},
                           {"make_target", make_target, METH_O, nullptr},
                           {"make_label_call", label_call::make, METH_VARARGS, nullptr},
                           {"push_label", as_method(py_push_label), METH_FASTCALL, nullptr},
                           {"push_checkpoint", py_push_checkpoint, METH_O, nullptr},
                           {"push_recomputation", py_push_recomputation, METH_NOARGS, nullptr},
                           {"bucket_storages", py_bucket_storages, METH_O, nullptr},
                           {"make_held", held_tensors::make, METH_VARARGS, nullptr},
                           {"totals", py_totals, METH_NOARGS, nullptr},
                           {"start_watch", py_start_watch, METH_NOARGS, nullptr},
                           {"read_watch", py_read_watch, METH_O, nullptr},
                           {"stop_watch", py_stop_watch, METH_O, nullptr},
                           {"checkpoint_peaks", py_checkpoint_peaks, METH_NOARGS, nullptr},
                           {"cut_stack", py_cut_stack, METH_O, nullptr},
                           {"is_lone_trainer", py_is_lone_trainer, METH_NOARGS, nullptr},
                           {"stack_depth", py_stack_depth, METH_NOARGS, nullptr},
                           {"lookup", py_lookup, METH_O, nullptr},
                           {"end_step", py_end_step, METH_NOARGS, nullptr},
                           {"read_window", py_read_window, METH_NOARGS, nullptr},
                           {"rotate_windows", py_rotate_windows, METH_NOARGS, nullptr},
                           {"counters", py_counters, METH_NOARGS, nullptr},
                           {"ooms", py_ooms, METH_NOARGS, nullptr},
                           {nullptr, nullptr, 0, nullptr}};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "torchmem_native", nullptr, -1, functions, nullptr, nullptr, nullptr, nullptr};

bool ready_types() {
  hook_type.tp_name = "torchmem_native.Hook";
  hook_type.tp_basicsize = sizeof(Hook);
  hook_type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL;
  hook_type.tp_vectorcall_offset = offsetof(Hook, call);
  hook_type.tp_call = PyVectorcall_Call;
  group_type.tp_name = "torchmem_native.TensorGroup";
  group_type.tp_basicsize = sizeof(TensorGroup);
  group_type.tp_flags = Py_TPFLAGS_DEFAULT;
  group_type.tp_dealloc = group_dealloc;
  group_type.tp_methods = group_methods;
  return PyType_Ready(&hook_type) == 0 && PyType_Ready(&group_type) == 0 && label_call::ready() &&
         held_tensors::ready();
}

}  // namespace

}  // namespace torchmem

PyMODINIT_FUNC PyInit_torchmem_native() {
  if (!torchmem::ready_types()) return nullptr;
  PyObject* module = PyModule_Create(&torchmem::module);
  if (module == nullptr) return nullptr;
  if (PyModule_AddIntConstant(module, "NUM_REFTYPES", torchmem::kNumReftypes) < 0 ||
      PyModule_AddStringConstant(module, "TORCH_VERSION", TORCH_VERSION) < 0 ||
      !torchmem::add_test_ledger(module)) {
    Py_DECREF(module);
    return nullptr;
  }
  return module;
}
