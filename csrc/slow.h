// Calls of the Python side, nanscan/_hooks.py, with what is new.
#pragma once

#include <Python.h>

namespace nanscan {

// Calls slow.name(...) with borrowed arguments. Returns a new reference or null.
template <typename... Args>
PyObject* call(PyObject* slow, PyObject* name, Args... args) {
  PyObject* arguments[] = {slow, args...};
  return PyObject_VectorcallMethod(name, arguments,
                                   (1 + sizeof...(args)) | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr);
}

inline bool succeeded(PyObject* result) {
  Py_XDECREF(result);
  return result != nullptr;
}

// A row index that `slow` returned; -1 with an error set if it is none.
inline int take_row(PyObject* result) {
  if (!result) return -1;
  const long row = PyLong_AsLong(result);
  Py_DECREF(result);
  return static_cast<int>(row);
}

// What is remembered of a place that tensors come to: while nothing is new, Python is not asked.
class Memory {
 public:
  int row() const { return row_; }

  // Whether a visit ended in a row that is known here.
  bool knows(int row) const {
    for (const int source : sources_)
      if (row >= 0 && source == row) return true;
    return false;
  }

  void note(int own, int visited) {
    row_ = own;
    const int source = visited >= 0 ? visited : own;
    if (source >= 0) sources_[next_++ % kSources] = source;
  }

 private:
  static constexpr int kSources = 4;
  int row_ = -1;                              // its own; -1: it never needed one
  int sources_[kSources] = {-1, -1, -1, -1};  // rows in which its tensors were found
  int next_ = 0;
};

}  // namespace nanscan
