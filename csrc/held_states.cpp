#include "held_states.h"

#include <algorithm>

#include "tensor_view.h"

namespace nanscan {
namespace {

constexpr Py_ssize_t kMostItems = 256;
constexpr Py_ssize_t kMostFields = 32;

int64_t version_of(PyObject* tensor) {
  static PyObject* const name_version = PyUnicode_InternFromString("_version");
  static PyObject* const name_is_inference = PyUnicode_InternFromString("is_inference");
  static bool expect_inference = false;  // to ask costs less than an exception
  if (expect_inference) {
    PyObject* inference = PyObject_CallMethodNoArgs(tensor, name_is_inference);
    expect_inference = inference == Py_True;
    Py_XDECREF(inference);
    if (!inference) PyErr_Clear();
    if (expect_inference) return -1;
  }
  PyObject* version = PyObject_GetAttr(tensor, name_version);
  if (!version) {
    PyErr_Clear();
    expect_inference = true;
    return -1;
  }
  const int64_t value = PyLong_AsLongLong(version);
  Py_DECREF(version);
  return value;
}

bool is_number_or_text(PyObject* value) {
  return value == Py_None || PyLong_Check(value) || PyFloat_Check(value) || PyUnicode_Check(value);
}

bool is_empty_dict(PyObject* value) { return PyDict_Check(value) && PyDict_GET_SIZE(value) == 0; }

// Calls f with each of the first items, which stay alive meanwhile: other threads may run.
template <typename F>
void for_each(PyObject* items, F f) {
  const Py_ssize_t count = std::min(PySequence_Fast_GET_SIZE(items), kMostItems);
  for (Py_ssize_t i = 0; i < count && i < PySequence_Fast_GET_SIZE(items); ++i) {
    PyObject* item = Py_NewRef(PySequence_Fast_GET_ITEM(items, i));
    f(item);
    Py_DECREF(item);
  }
}

void add_values(PyObject* dict, int depth, std::vector<int64_t>& states) {
  PyObject* values = PyDict_Values(dict);
  if (values) for_each(values, [&](PyObject* item) { add_states(item, depth, states); });
  Py_XDECREF(values);
  PyErr_Clear();
}

void add_fields(PyObject* object, int depth, std::vector<int64_t>& states) {
  static PyObject* const name_dict = PyUnicode_InternFromString("__dict__");
  PyObject* fields = PyObject_GetAttr(object, name_dict);
  if (fields && PyDict_Check(fields) && PyDict_GET_SIZE(fields) <= kMostFields)
    add_values(fields, depth, states);
  Py_XDECREF(fields);
  PyErr_Clear();
}

}  // namespace

void add_states(PyObject* value, int depth, std::vector<int64_t>& states) {
  if (is_plain_tensor(value)) {
    states.push_back(static_cast<int64_t>(reinterpret_cast<intptr_t>(value)));
    states.push_back(version_of(value));
  } else if (depth == 0 || is_number_or_text(value)) {
    return;
  } else if (PyTuple_Check(value) || PyList_Check(value)) {
    for_each(value, [&](PyObject* item) { add_states(item, depth - 1, states); });
  } else if (PyDict_Check(value)) {
    add_values(value, depth - 1, states);
  } else if (!PyCallable_Check(value)) {  // no module
    add_fields(value, depth - 1, states);
  }
}

PyObject* keys_with_tensors(PyObject* dict, PyObject* less, int depth) {
  PyObject* keys = PyList_New(0);
  PyObject* items = keys ? PyDict_Copy(dict) : nullptr;  // other threads may run
  std::vector<int64_t> states;
  PyObject *key, *value;
  Py_ssize_t position = 0;
  int failed = items ? 0 : -1;
  while (failed == 0 && PyDict_Next(items, &position, &key, &value)) {
    if (is_number_or_text(value) || is_empty_dict(value)) continue;
    const int is_left_out = PySet_Contains(less, key);
    if (is_left_out != 0) {
      failed = is_left_out < 0 ? -1 : 0;
      continue;
    }
    states.clear();
    add_states(value, depth, states);
    if (!states.empty()) failed = PyList_Append(keys, key);
  }
  Py_XDECREF(items);
  if (failed == 0) return keys;
  Py_XDECREF(keys);
  return nullptr;
}

}  // namespace nanscan
