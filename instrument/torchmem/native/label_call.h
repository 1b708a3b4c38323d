// A method of torch's replaced by one that labels what it allocates: the path of every FSDP2 unshard and reduction.
//
// Native because caches are cold there (the thread has just waited for other ranks): a wrapper in Python costs about
// ten microseconds then. The original runs exactly once, with its own result or exception; a failure of ours is handed
// to `fail`, which switches the labeler off.
#pragma once

#include <Python.h>
#include <structmember.h>

#include "tap.h"

namespace torchmem {

struct TensorGroup {
  PyObject_HEAD
  OwnedTensors tensors;
};

inline PyTypeObject group_type = {PyVarObject_HEAD_INIT(nullptr, 0)};

// What is known of one parameter group; lies on it as an attribute.
struct LabelTarget {
  PyObject_HEAD
  unsigned int owner;
  PyObject* parameters;  // TensorGroup whose storages are relabelled after the call, or null
  PyObject* unsharded;   // TensorGroup whose gradients are relabelled before it, a callable that does it, or null
};

struct LabelCall {
  PyObject_HEAD
  vectorcallfunc call;
  PyObject* original;
  PyObject* find;   // (group) -> LabelTarget, for a group that has none yet; null once disabled
  PyObject* after;  // (group), or None
  PyObject* fail;   // (exception)
  uint32_t reftype;
  int32_t gradients_before;  // reftype, or -1
  int32_t parameters_after;  // reftype, or -1; `after` is then called only while there are no parameters to relabel
};

namespace label_call {

inline PyTypeObject target_type = {PyVarObject_HEAD_INIT(nullptr, 0)};
inline PyTypeObject call_type = {PyVarObject_HEAD_INIT(nullptr, 0)};
inline PyObject* attribute = nullptr;

// Holds the callable meanwhile: what it does may disable the label that owns it.
inline PyObject* call_one(PyObject* callable, PyObject* argument) {
  Py_INCREF(callable);
  PyObject* result = PyObject_CallOneArg(callable, argument);
  Py_DECREF(callable);
  return result;
}

// Hands the current exception to `fail`; a Ctrl-C that came meanwhile is raised again in the job.
inline void give_up(LabelCall* self) {
  if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_Exception)) {
    // It came while we, not the job, were running: raise it again at the job's next chance.
    if (PyErr_ExceptionMatches(PyExc_KeyboardInterrupt)) PyErr_SetInterrupt();
    PyErr_Clear();
    return;
  }
  PyObject *type, *value, *traceback;
  PyErr_Fetch(&type, &value, &traceback);
  PyErr_NormalizeException(&type, &value, &traceback);
  if (self->fail != nullptr && value != nullptr) Py_XDECREF(call_one(self->fail, value));
  PyErr_Clear();
  Py_XDECREF(type);
  Py_XDECREF(value);
  Py_XDECREF(traceback);
}

// The group's target, a new reference; null when there is none to be had.
inline LabelTarget* target_of(LabelCall* self, PyObject* group) {
  PyObject* found = PyObject_GetAttr(group, attribute);
  if (found == nullptr) {
    PyErr_Clear();
    found = call_one(self->find, group);
  }
  if (found != nullptr && Py_TYPE(found) != &target_type) {
    Py_CLEAR(found);
    PyErr_SetString(PyExc_TypeError, "not a LabelTarget");
  }
  if (found == nullptr) give_up(self);
  return reinterpret_cast<LabelTarget*>(found);
}

inline const OwnedTensors* tensors_of(PyObject* group) {
  return group != nullptr && Py_TYPE(group) == &group_type ? &reinterpret_cast<TensorGroup*>(group)->tensors : nullptr;
}

inline size_t enter(LabelCall* self, LabelTarget* target) {
  LabelTimer timer;
  PyObject* unsharded = self->gradients_before < 0 ? nullptr : target->unsharded;
  if (const OwnedTensors* tensors = tensors_of(unsharded)) {
    relabel_gradients(*tensors, static_cast<uint32_t>(self->gradients_before));
  } else if (unsharded != nullptr && PyCallable_Check(unsharded)) {
    Py_INCREF(unsharded);
    PyObject* done = PyObject_CallNoArgs(unsharded);
    Py_DECREF(unsharded);
    if (done == nullptr) give_up(self);
    Py_XDECREF(done);
  }
  return push_label(target->owner, self->reftype);
}

inline void leave(LabelCall* self, LabelTarget* target, PyObject* group, size_t depth) {
  LabelTimer timer;
  cut_stack(depth);
  const OwnedTensors* parameters = self->parameters_after < 0 ? nullptr : tensors_of(target->parameters);
  if (parameters != nullptr) {
    relabel_tensors(*parameters, static_cast<uint32_t>(self->parameters_after));
  } else if (self->after != nullptr && self->after != Py_None) {
    PyObject* done = call_one(self->after, group);
    if (done == nullptr) give_up(self);
    Py_XDECREF(done);
  }
}

inline PyObject* call(PyObject* object, PyObject* const* args, size_t nargsf, PyObject* names) {
  auto* self = reinterpret_cast<LabelCall*>(object);
  PyObject* group = PyVectorcall_NARGS(nargsf) > 0 ? args[0] : nullptr;
  LabelTarget* target = self->find != nullptr && group != nullptr ? target_of(self, group) : nullptr;
  if (target == nullptr) return PyObject_Vectorcall(self->original, args, nargsf, names);
  Py_INCREF(object);  // the patch may be taken off meanwhile
  const size_t depth = enter(self, target);
  PyObject* result = PyObject_Vectorcall(self->original, args, nargsf, names);
  PyObject *type, *value, *traceback;
  PyErr_Fetch(&type, &value, &traceback);
  leave(self, target, group, depth);
  PyErr_Restore(type, value, traceback);
  Py_DECREF(target);
  Py_DECREF(object);
  return result;
}

inline PyObject* bind(PyObject* self, PyObject* group, PyObject*) {
  return group == nullptr || group == Py_None ? Py_NewRef(self) : PyMethod_New(self, group);
}

// From now on only the original runs; what it held of Python is let go.
inline PyObject* disable(PyObject* object, PyObject*) {
  auto* self = reinterpret_cast<LabelCall*>(object);
  Py_CLEAR(self->find);
  Py_CLEAR(self->after);
  Py_CLEAR(self->fail);
  Py_RETURN_NONE;
}

inline void destroy_call(PyObject* object) {
  Py_XDECREF(disable(object, nullptr));
  Py_XDECREF(reinterpret_cast<LabelCall*>(object)->original);
  PyObject_Free(object);
}

inline void destroy_target(PyObject* object) {
  Py_XDECREF(reinterpret_cast<LabelTarget*>(object)->parameters);
  Py_XDECREF(reinterpret_cast<LabelTarget*>(object)->unsharded);
  PyObject_Free(object);
}

// (original, find, after, fail, reftype, gradients_before, parameters_after)
inline PyObject* make(PyObject*, PyObject* args) {
  PyObject *original, *find, *after, *fail;
  unsigned int reftype;
  int gradients_before, parameters_after;
  if (!PyArg_ParseTuple(args, "OOOOIii", &original, &find, &after, &fail, &reftype, &gradients_before,
                        &parameters_after)) {
    return nullptr;
  }
  const auto limit = static_cast<int64_t>(kNumReftypes);
  if (reftype >= limit || gradients_before >= limit || parameters_after >= limit) {
    PyErr_SetString(PyExc_ValueError, "no such reftype");
    return nullptr;
  }
  auto* self = PyObject_New(LabelCall, &call_type);
  if (self == nullptr) return nullptr;
  self->call = call;
  self->original = Py_NewRef(original);
  self->find = Py_NewRef(find);
  self->after = Py_NewRef(after);
  self->fail = Py_NewRef(fail);
  self->reftype = reftype;
  self->gradients_before = gradients_before;
  self->parameters_after = parameters_after;
  return reinterpret_cast<PyObject*>(self);
}

inline PyMethodDef call_methods[] = {{"disable", disable, METH_NOARGS, nullptr}, {nullptr, nullptr, 0, nullptr}};

inline PyMemberDef call_members[] = {
    {"__wrapped__", T_OBJECT, offsetof(LabelCall, original), READONLY, nullptr}, {nullptr, 0, 0, 0, nullptr}};

inline PyMemberDef target_members[] = {
    {"owner", T_UINT, offsetof(LabelTarget, owner), READONLY, nullptr},
    {"parameters", T_OBJECT, offsetof(LabelTarget, parameters), 0, nullptr},
    {"unsharded", T_OBJECT, offsetof(LabelTarget, unsharded), 0, nullptr},
    {nullptr, 0, 0, 0, nullptr}};

inline PyObject* new_target(uint32_t owner) {
  auto* target = PyObject_New(LabelTarget, &target_type);
  if (target == nullptr) return nullptr;
  target->owner = owner;
  target->parameters = nullptr;
  target->unsharded = nullptr;
  return reinterpret_cast<PyObject*>(target);
}

// A deep copy of a model shares its groups' targets: both book for the same modules.
inline PyObject* share(PyObject* self, PyObject*) { return Py_NewRef(self); }

inline PyMethodDef target_methods[] = {{"__deepcopy__", share, METH_O, nullptr}, {nullptr, nullptr, 0, nullptr}};

inline bool ready() {
  call_type.tp_name = "torchmem_native.LabelCall";
  call_type.tp_basicsize = sizeof(LabelCall);
  call_type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL;
  call_type.tp_vectorcall_offset = offsetof(LabelCall, call);
  call_type.tp_call = PyVectorcall_Call;
  call_type.tp_descr_get = bind;
  call_type.tp_dealloc = destroy_call;
  call_type.tp_methods = call_methods;
  call_type.tp_members = call_members;
  target_type.tp_name = "torchmem_native.LabelTarget";
  target_type.tp_basicsize = sizeof(LabelTarget);
  target_type.tp_flags = Py_TPFLAGS_DEFAULT;
  target_type.tp_dealloc = destroy_target;
  target_type.tp_members = target_members;
  target_type.tp_methods = target_methods;
  attribute = PyUnicode_InternFromString("_torchmem");
  return attribute != nullptr && PyType_Ready(&call_type) == 0 && PyType_Ready(&target_type) == 0;
}

}  // namespace label_call

}  // namespace torchmem
