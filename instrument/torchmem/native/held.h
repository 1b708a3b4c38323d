// What modules hold: their parameters, gradients and buffers, found through the modules each time, and relabelled at once.
//
// Nothing here holds a tensor, weakly or not: torch refuses to convert a parameter that anybody holds weakly, and a
// parameter that was replaced must be followed. Called with the GIL held; gathers first, then takes the ledger's lock.
#pragma once

#include <Python.h>

#include <vector>

#include "tap.h"

namespace torchmem {

namespace held_tensors {

struct Place {
  PyObject* module;  // weak reference
  PyObject* table;   // "_parameters" or "_buffers"
  PyObject* name;
  uint32_t owner;
  uint32_t reftype;
};

struct HeldTensors {
  PyObject_HEAD
  std::vector<Place> places;
  PyObject* tensor_type;
};

inline PyTypeObject type = {PyVarObject_HEAD_INIT(nullptr, 0)};

inline PyObject* address_name = nullptr;

// What is at the place now; false when there is no tensor. Reading `_cdata` may run Python (a torch function mode), so
// that the tensor is held until its memory has been looked up.
inline bool find(const Place& place, PyObject* tensor_type, bool with_gradient, Held* found) {
  PyObject* module = PyWeakref_GetObject(place.module);  // borrowed
  if (module == nullptr || module == Py_None) return false;
  Py_INCREF(module);
  uint64_t address = 0;
  PyObject* table = PyObject_GetAttr(module, place.table);
  // TorchScript's tables are mappings, but no dicts.
  PyObject* tensor = table != nullptr ? PyObject_GetItem(table, place.name) : nullptr;
  if (tensor != nullptr && PyObject_TypeCheck(tensor, reinterpret_cast<PyTypeObject*>(tensor_type))) {
    PyObject* number = PyObject_GetAttr(tensor, address_name);
    if (number != nullptr) address = PyLong_AsUnsignedLongLong(number);
    Py_XDECREF(number);
    if (PyErr_Occurred()) address = 0;
    if (address != 0) {
      *found = held(reinterpret_cast<const c10::TensorImpl*>(address), place.owner, place.reftype, with_gradient);
    }
  }
  Py_XDECREF(tensor);
  Py_XDECREF(table);
  Py_DECREF(module);
  PyErr_Clear();
  return address != 0;
}

// Of the parameters' gradients too, if that is true: see is_lone_trainer.
inline PyObject* relabel(PyObject* object, PyObject* with_gradients) {
  const int looks = PyObject_IsTrue(with_gradients);
  if (looks < 0) return nullptr;
  auto* self = reinterpret_cast<HeldTensors*>(object);
  std::vector<Held> all;
  all.reserve(self->places.size());
  for (const Place& place : self->places) {
    Held found;
    if (find(place, self->tensor_type, looks == 1, &found)) all.push_back(found);
  }
  relabel_held(all);
  Py_RETURN_NONE;
}

inline void destroy(PyObject* object) {
  auto* self = reinterpret_cast<HeldTensors*>(object);
  for (const Place& place : self->places) {
    Py_XDECREF(place.module);
    Py_XDECREF(place.table);
    Py_XDECREF(place.name);
  }
  self->places.~vector();
  Py_XDECREF(self->tensor_type);
  PyObject_Free(object);
}

// ([(module, "_parameters" or "_buffers", name, owner, reftype), ...], torch.Tensor); holds the modules weakly.
inline PyObject* make(PyObject*, PyObject* args) {
  PyObject *list, *tensor_type;
  if (!PyArg_ParseTuple(args, "O!O!", &PyList_Type, &list, &PyType_Type, &tensor_type)) return nullptr;
  auto* self = PyObject_New(HeldTensors, &type);
  if (self == nullptr) return nullptr;
  new (&self->places) std::vector<Place>();
  self->tensor_type = Py_NewRef(tensor_type);
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); ++i) {
    PyObject *module, *table, *name;
    unsigned int owner, reftype;
    if (!PyArg_ParseTuple(PyList_GET_ITEM(list, i), "OUUII", &module, &table, &name, &owner, &reftype) ||
        !valid_cell(owner, reftype)) {
      Py_DECREF(self);
      return nullptr;
    }
    PyObject* weak = PyWeakref_NewRef(module, nullptr);
    if (weak == nullptr) {
      Py_DECREF(self);
      return nullptr;
    }
    self->places.push_back({weak, Py_NewRef(table), Py_NewRef(name), owner, reftype});
  }
  return reinterpret_cast<PyObject*>(self);
}

inline PyMethodDef methods[] = {{"relabel", relabel, METH_O, nullptr}, {nullptr, nullptr, 0, nullptr}};

inline bool ready() {
  type.tp_name = "torchmem_native.HeldTensors";
  type.tp_basicsize = sizeof(HeldTensors);
  type.tp_flags = Py_TPFLAGS_DEFAULT;
  type.tp_dealloc = destroy;
  type.tp_methods = methods;
  address_name = PyUnicode_InternFromString("_cdata");
  return address_name != nullptr && PyType_Ready(&type) == 0;
}

}  // namespace held_tensors

}  // namespace torchmem
