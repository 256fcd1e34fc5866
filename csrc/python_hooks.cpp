#include "python_hooks.h"

namespace nanscan {
namespace {

// A function of torch._C._dynamo.eval_frame; null where this torch has none of that name.
PyObject* find_function(const char* name) {
  PyObject* module = PyImport_ImportModule("torch._C._dynamo.eval_frame");
  PyObject* function = module ? PyObject_GetAttrString(module, name) : nullptr;
  Py_XDECREF(module);
  PyErr_Clear();
  return function;
}

PyObject* get_callback() {
  static PyObject* const function = find_function("get_eval_frame_callback");
  return function ? PyObject_CallNoArgs(function) : nullptr;
}

void set_callback(PyObject* callback) {
  static PyObject* const function = find_function("set_eval_frame");
  if (function) Py_XDECREF(PyObject_CallOneArg(function, callback));
  PyErr_Clear();
}

}  // namespace

Uncompiled::Uncompiled() : callback_(get_callback()) {
  if (callback_ == Py_None) Py_CLEAR(callback_);
  if (callback_) set_callback(Py_None);
}

Uncompiled::~Uncompiled() {
  if (!callback_) return;
  PyObject *type, *value, *traceback;
  PyErr_Fetch(&type, &value, &traceback);
  set_callback(callback_);
  Py_DECREF(callback_);
  PyErr_Restore(type, value, traceback);
}

}  // namespace nanscan
