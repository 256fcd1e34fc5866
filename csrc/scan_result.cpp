#include "scan_result.h"

#include <pybind11/pybind11.h>

#include <cstring>
#include <type_traits>

#include "cuda/results.h"

namespace py = pybind11;

namespace nanscan {
namespace {

// It refers to no object that could refer back, so the garbage collector need not know it.
struct Result {
  PyObject ob_base;
  PyObject* shape;
  PyObject* dtype;
  PyObject* pending;  // a PendingScan until its row was read; else null
  bool has_moments;
  Row row;
};

PyTypeObject* result_type = nullptr;
PyObject* dtype_objects[2][kDTypeCount];  // by whether it is complex, and DType

Result* as_result(PyObject* self) { return reinterpret_cast<Result*>(self); }

// Waits for the row, if need be. False: a Python error is set.
bool complete(Result* self) {
  if (!self->pending) return true;
  const auto pending = py::reinterpret_borrow<py::object>(self->pending);
  try {
    self->row = pending.cast<cuda::PendingScan&>().wait();
  } catch (const cuda::Error& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return false;
  }
  Py_CLEAR(self->pending);
  return true;
}

template <auto field>
PyObject* get_number(PyObject* self, void*) {
  if (!complete(as_result(self))) return nullptr;
  const auto value = as_result(self)->row.*field;
  if constexpr (std::is_floating_point_v<decltype(value)>)
    return PyFloat_FromDouble(value);
  else
    return PyLong_FromUnsignedLongLong(value);
}

PyObject* get_row(PyObject* self, void*) {
  if (!complete(as_result(self))) return nullptr;
  return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(&as_result(self)->row),
                                   sizeof(Row));
}

template <PyObject* Result::* member>
PyObject* get_object(PyObject* self, void*) {
  PyObject* object = as_result(self)->*member;
  return Py_NewRef(object ? object : Py_None);
}

PyObject* get_has_moments(PyObject* self, void*) {
  return PyBool_FromLong(as_result(self)->has_moments);
}

PyGetSetDef getters[] = {
    {"shape", get_object<&Result::shape>, nullptr, nullptr, nullptr},
    {"dtype", get_object<&Result::dtype>, nullptr, nullptr, nullptr},
    {"numel", get_number<&Row::elements>, nullptr, nullptr, nullptr},
    {"nan_count", get_number<&Row::nan>, nullptr, nullptr, nullptr},
    {"posinf_count", get_number<&Row::posinf>, nullptr, nullptr, nullptr},
    {"neginf_count", get_number<&Row::neginf>, nullptr, nullptr, nullptr},
    {"calls", get_number<&Row::calls>, nullptr, nullptr, nullptr},
    {"_max_key", get_number<&Row::max_key>, nullptr, nullptr, nullptr},
    {"_min_key", get_number<&Row::min_key>, nullptr, nullptr, nullptr},
    {"_first_bad", get_number<&Row::first_bad>, nullptr, nullptr, nullptr},
    {"_sum", get_number<&Row::sum>, nullptr, nullptr, nullptr},
    {"_sumsq", get_number<&Row::sumsq>, nullptr, nullptr, nullptr},
    {"_zeros", get_number<&Row::zeros>, nullptr, nullptr, nullptr},
    {"_subnormals", get_number<&Row::subnormals>, nullptr, nullptr, nullptr},
    {"_has_moments", get_has_moments, nullptr, nullptr, nullptr},
    {"_pending", get_object<&Result::pending>, nullptr, nullptr, nullptr},
    {"_row", get_row, nullptr, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

// Copies a row from any object of 128 bytes. False: a Python error is set.
bool copy_row(PyObject* from, Row& row) {
  Py_buffer bytes;
  if (PyObject_GetBuffer(from, &bytes, PyBUF_SIMPLE) != 0) return false;
  const bool fits = bytes.len == static_cast<Py_ssize_t>(sizeof row);
  if (fits)
    std::memcpy(&row, bytes.buf, sizeof row);
  else
    PyErr_Format(PyExc_ValueError, "nanscan: expected the %zu bytes of a row, got %zd", sizeof row,
                 bytes.len);
  PyBuffer_Release(&bytes);
  return fits;
}

// ResultBase(row, shape, dtype, *, moments=False)
PyObject* make(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  static const char* const names[] = {"row", "shape", "dtype", "moments", nullptr};
  PyObject *row, *shape, *dtype;
  int moments = 0;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOO|$p:ScanResult", const_cast<char**>(names),
                                   &row, &shape, &dtype, &moments))
    return nullptr;
  auto self = py::reinterpret_steal<py::object>(type->tp_alloc(type, 0));
  if (!self) return nullptr;
  Result* result = as_result(self.ptr());
  result->shape = Py_NewRef(shape);
  result->dtype = Py_NewRef(dtype);
  result->has_moments = moments != 0;
  if (py::isinstance<cuda::PendingScan>(row))
    result->pending = Py_NewRef(row);
  else if (!copy_row(row, result->row))
    return nullptr;
  return self.release().ptr();
}

void destroy(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  Py_XDECREF(as_result(self)->shape);
  Py_XDECREF(as_result(self)->dtype);
  Py_XDECREF(as_result(self)->pending);
  type->tp_free(self);
  Py_DECREF(type);
}

PyObject* shape_of(const TensorView& view) {
  PyObject* shape = PyTuple_New(view.user_dims());
  if (!shape) return nullptr;
  for (int i = 0; i < view.user_dims(); ++i) {
    PyObject* size = PyLong_FromLongLong(view.logical.size[i]);
    if (!size) {
      Py_DECREF(shape);
      return nullptr;
    }
    PyTuple_SET_ITEM(shape, i, size);
  }
  return shape;
}

}  // namespace

PyObject* make_result_base() {
  static PyType_Slot slots[] = {
      {Py_tp_new, reinterpret_cast<void*>(make)},
      {Py_tp_dealloc, reinterpret_cast<void*>(destroy)},
      {Py_tp_getset, getters},
      {0, nullptr},
  };
  static PyType_Spec spec = {"nanscan._C.ResultBase", sizeof(Result), 0,
                             Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, slots};
  return PyType_FromSpec(&spec);
}

bool initialize_results(PyObject* type, PyObject* dtypes) {
  if (!PyType_Check(type) || reinterpret_cast<PyTypeObject*>(type)->tp_basicsize <
                                 static_cast<Py_ssize_t>(sizeof(Result))) {
    PyErr_SetString(PyExc_TypeError, "nanscan: expected a subclass of ResultBase");
    return false;
  }
  // These references are kept for the life of the process.
  result_type = reinterpret_cast<PyTypeObject*>(Py_NewRef(type));
  for (int i = 0, next = 0; i < 2 * kDTypeCount; ++i) {
    const bool is_complex = i >= kDTypeCount;
    const int dtype = i % kDTypeCount;
    if (is_complex && !has_complex(static_cast<DType>(dtype))) continue;
    PyObject* object = PySequence_GetItem(dtypes, next++);
    if (!object) return false;
    dtype_objects[is_complex][dtype] = object;
  }
  return true;
}

PyObject* new_result(const TensorView& view, const Row& row, bool moments) {
  PyObject* self = result_type->tp_alloc(result_type, 0);
  if (!self) return nullptr;
  Result* result = as_result(self);
  result->shape = shape_of(view);
  result->dtype = Py_NewRef(dtype_objects[view.is_complex][static_cast<int>(view.dtype)]);
  result->has_moments = moments;
  result->row = row;
  if (result->shape) return self;
  Py_DECREF(self);
  return nullptr;
}

void set_pending(PyObject* result, PyObject* pending) {
  as_result(result)->pending = Py_NewRef(pending);
}

}  // namespace nanscan
