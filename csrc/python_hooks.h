// Calls from C++ to nanscan._collect.modules.ModuleCalls, the Python object that handles whatever
// is new: an unknown module, a first argument, a nested structure. C++ calls it `python_hooks`.
#pragma once

#include <Python.h>

namespace nanscan {

// Keeps torch.compile from compiling the Python code that runs meanwhile. Where a compiled model
// begins, Dynamo is about to compile each Python frame that comes next: that is not to be ours.
class Uncompiled {
 public:
  Uncompiled();
  ~Uncompiled();
  Uncompiled(const Uncompiled&) = delete;
  Uncompiled& operator=(const Uncompiled&) = delete;

 private:
  PyObject* callback_;  // Dynamo's; null if it is not at work
};

// Calls object.name(...) with borrowed arguments. Returns a new reference or null.
template <typename... Args>
PyObject* call_method(PyObject* object, PyObject* name, Args... args) {
  PyObject* arguments[] = {object, args...};
  return PyObject_VectorcallMethod(name, arguments,
                                   (1 + sizeof...(args)) | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr);
}

// The same for our own code in Python.
template <typename... Args>
PyObject* call(PyObject* python_hooks, PyObject* name, Args... args) {
  const Uncompiled scope;
  return call_method(python_hooks, name, args...);
}

inline bool succeeded(PyObject* result) {
  Py_XDECREF(result);
  return result != nullptr;
}

// The row index that Python returned. -1: it returned -1, or an error is set.
inline int take_row(PyObject* result) {
  if (!result) return -1;
  const long row = PyLong_AsLong(result);
  Py_DECREF(result);
  return static_cast<int>(row);
}

// The rows in which the tensors of one place (an argument, a gradient) were found lately. As long
// as a visit gives one of them, Python is not called.
class KnownRows {
 public:
  int own() const { return own_; }  // -1: the place has no row of its own

  bool contains(int row) const {
    for (const int known : rows_)
      if (row >= 0 && known == row) return true;
    return false;
  }

  // `visited`: the row that the visit gave, or a negative Status.
  void add(int own, int visited) {
    own_ = own;
    const int row = visited >= 0 ? visited : own;
    if (row >= 0) rows_[next_++ % kCapacity] = row;
  }

 private:
  static constexpr int kCapacity = 4;
  int own_ = -1;
  int rows_[kCapacity] = {-1, -1, -1, -1};
  int next_ = 0;
};

}  // namespace nanscan
