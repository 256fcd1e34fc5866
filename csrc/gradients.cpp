#include "gradients.h"

namespace nanscan {

bool Gradients::visit(Hook& hook, PyObject* gradient) {
  if (!active_ || gradient == Py_None) return true;
  static PyObject* const name_gradient = PyUnicode_InternFromString("new_gradient");
  const Stopwatch::Lap lap(stopwatch_);
  PyObject* const slow = Py_NewRef(slow_);  // a large scan lets others run, who may close all
  const int row = table_.visit(gradient, hook.memory.row());
  bool done = row != kFailed;
  if (done && !hook.memory.knows(row)) {
    PyObject* number = PyLong_FromLong(hook.number);
    PyObject* status = PyLong_FromLong(row);
    const int own =
        take_row(number && status ? call(slow, name_gradient, number, gradient, status) : nullptr);
    Py_XDECREF(number);
    Py_XDECREF(status);
    done = own != -1 || !PyErr_Occurred();
    if (done) hook.memory.note(own, row);
  }
  Py_DECREF(slow);
  return done;
}

}  // namespace nanscan
