#include "gradients.h"

namespace nanscan {

bool Gradients::visit(Hook& hook, PyObject* gradient) {
  if (!active_ || gradient == Py_None) return true;
  static PyObject* const name_scan_new_gradient = PyUnicode_InternFromString("scan_new_gradient");
  const Stopwatch::Lap lap(stopwatch_);
  // A large scan lets other threads run. One may close the monitor: hence an own reference.
  PyObject* const python_hooks = Py_NewRef(python_hooks_);
  const int row = table_.visit(gradient, hook.rows.own());
  bool done = row != kFailed;
  if (done && !hook.rows.contains(row)) {
    PyObject* number = PyLong_FromLong(hook.number);
    PyObject* status = PyLong_FromLong(row);
    const int own = take_row(
        number && status ? call(python_hooks, name_scan_new_gradient, number, gradient, status)
                         : nullptr);
    Py_XDECREF(number);
    Py_XDECREF(status);
    done = own != -1 || !PyErr_Occurred();
    if (done) hook.rows.add(own, row);
  }
  Py_DECREF(python_hooks);
  return done;
}

}  // namespace nanscan
