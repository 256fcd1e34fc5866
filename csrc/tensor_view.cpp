#include "tensor_view.h"

namespace nanscan {
namespace {

PyTypeObject* tensor_type = nullptr;
PyTypeObject* parameter_type = nullptr;
const dlpack::ExchangeApi* exchange = nullptr;
PyObject* name_is_neg = nullptr;
PyObject* name_is_conj = nullptr;

constexpr int code_and_bits(int code, int bits) { return code << 8 | bits; }

// The real format of a DLPack type, or a negative Status. A complex number is two floats.
int format_of(dlpack::DataType type, bool& is_complex) {
  is_complex = type.code == dlpack::kComplex;
  if (type.lanes != 1) return kBadFormat;
  switch (is_complex ? code_and_bits(dlpack::kFloat, type.bits / 2)
                     : code_and_bits(type.code, type.bits)) {
#define NANSCAN_CASE(dtype, torch_name, storage, exponent, mantissa, bias, family, dlpack_code) \
  case code_and_bits(dlpack::dlpack_code, 8 * sizeof(storage)):                                 \
    return static_cast<int>(DType::dtype);
    NANSCAN_DTYPES(NANSCAN_CASE)
#undef NANSCAN_CASE
  }
  const bool is_floating = is_complex || type.code == dlpack::kFloat ||
                           type.code == dlpack::kBfloat || type.code >= dlpack::kFirstSmallFloat;
  return is_floating ? kBadFormat : kNotFloat;
}

// The truth of a method without arguments. An exception counts as true: the caller then refuses the
// tensor, and Python looks at it.
bool call_bool(PyObject* object, PyObject* method) {
  PyObject* result =
      PyObject_VectorcallMethod(method, &object, 1 | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr);
  if (!result) {
    PyErr_Clear();
    return true;
  }
  const bool truth = result != Py_False;
  Py_DECREF(result);
  return truth;
}

// The dimensions in memory order, slowest first, without those of size 1 or stride 0.
struct SortedDims {
  int count = 0;
  int dim[kMaxDims];
  uint64_t repeat = 1;  // the product of the sizes of stride-0 dimensions
  bool expanded = false, permuted = false;
};

void sort_dims(const TensorView& view, SortedDims& sorted) {
  const Dims& logical = view.logical;
  for (int i = 0; i < logical.count; ++i) {
    if (logical.size[i] == 1) continue;
    if (logical.stride[i] == 0) {
      sorted.repeat *= static_cast<uint64_t>(logical.size[i]);
      sorted.expanded = true;
      continue;
    }
    int j = sorted.count++;  // insertion sort: few dimensions, mostly in order
    for (; j > 0 && logical.stride[sorted.dim[j - 1]] < logical.stride[i]; --j)
      sorted.dim[j] = sorted.dim[j - 1];
    sorted.permuted |= j != sorted.count - 1;
    sorted.dim[j] = i;
  }
}

}  // namespace

bool initialize_torch(PyObject* tensor, PyObject* parameter, PyObject* capsule) {
  void* pointer = PyCapsule_GetPointer(capsule, dlpack::kExchangeApiName);
  if (!pointer) return false;
  const auto* header = static_cast<const dlpack::ExchangeApiHeader*>(pointer);
  while (header && header->version.major > dlpack::kMajorVersion) header = header->prev_api;
  const auto* api = reinterpret_cast<const dlpack::ExchangeApi*>(header);
  if (!api || api->header.version.major != dlpack::kMajorVersion ||
      !api->tensor_from_py_object_no_sync) {
    PyErr_SetString(
        PyExc_ImportError,
        "nanscan: this torch offers no DLPack 1.x exchange table with non-owning views; "
        "install torch 2.10 or later");
    return false;
  }
  if (!PyType_Check(tensor) || !PyType_Check(parameter)) {
    PyErr_SetString(PyExc_TypeError, "nanscan: expected two types");
    return false;
  }
  // These references are kept for the life of the process.
  tensor_type = reinterpret_cast<PyTypeObject*>(Py_NewRef(tensor));
  parameter_type = reinterpret_cast<PyTypeObject*>(Py_NewRef(parameter));
  name_is_neg = PyUnicode_InternFromString("is_neg");
  name_is_conj = PyUnicode_InternFromString("is_conj");
  exchange = api;
  return name_is_neg && name_is_conj;
}

bool is_plain_tensor(PyObject* object) {
  const PyTypeObject* type = Py_TYPE(object);
  return type == tensor_type || type == parameter_type;
}

Status view_tensor(PyObject* object, TensorView& view, LazyBits lazy_bits) {
  if (!is_plain_tensor(object)) return kNotPlain;
  dlpack::Tensor t;
  if (exchange->tensor_from_py_object_no_sync(object, &t) != 0) {
    PyErr_Clear();
    return kNoView;
  }
  if (t.ndim >= kMaxDims) return kNoView;
  const int format = format_of(t.dtype, view.is_complex);
  if (format < 0) return static_cast<Status>(format);
  view.dtype = static_cast<DType>(format);
  view.device = t.device;
  view.data = static_cast<const char*>(t.data) + t.byte_offset;
  view.elements = 1;
  Dims& dims = view.logical;
  dims.count = t.ndim;
  const int64_t parts = view.is_complex ? 2 : 1;
  bool every_other = true;  // no stride is odd
  for (int i = t.ndim - 1; i >= 0; --i) {
    dims.size[i] = t.shape[i];
    dims.stride[i] = t.strides ? t.strides[i] * parts : static_cast<int64_t>(view.elements) * parts;
    view.elements *= static_cast<uint64_t>(t.shape[i]);
    every_other &= t.shape[i] == 1 || dims.stride[i] % 2 == 0;
  }
  // NOTES: these methods release the GIL and take it again, which costs as much as all else here.
  if (lazy_bits == LazyBits::kAlwaysAsk || view.is_complex || every_other) {
    if (call_bool(object, name_is_neg)) return kLazyBit;
    if (view.is_complex && call_bool(object, name_is_conj)) return kLazyBit;
  }
  if (view.is_complex) {
    dims.size[dims.count] = 2;
    dims.stride[dims.count] = 1;
    ++dims.count;
    view.elements *= 2;
  }
  if (!t.data && view.elements > 0) return kNoData;
  return kOk;
}

void plan_layout(const TensorView& view, MemoryLayout& layout) {
  SortedDims sorted;
  sort_dims(view, sorted);
  Dims& dims = layout.outer;
  layout.repeat = sorted.repeat;
  int last = -1;
  for (int i = 0; i < sorted.count; ++i) {
    const int64_t size = view.logical.size[sorted.dim[i]],
                  stride = view.logical.stride[sorted.dim[i]];
    if (last >= 0 && dims.stride[last] == stride * size) {
      dims.size[last] *= size;
    } else {
      dims.size[++last] = size;
    }
    dims.stride[last] = stride;
  }
  dims.count = 0;
  if (last >= 0) {
    dims.count = last;  // the innermost dimension becomes the run
    layout.run = dims.size[last];
    layout.run_stride = dims.stride[last];
    layout.stored = static_cast<uint64_t>(layout.run);
    for (int i = 0; i < last; ++i) layout.stored *= static_cast<uint64_t>(dims.size[i]);
  }
  layout.row_major_flat = !sorted.expanded && !sorted.permuted && dims.count == 0 &&
                          (layout.run_stride == 1 || layout.run == 1);
}

void plan_index(const TensorView& view, IndexPlan& plan) {
  const Dims& logical = view.logical;
  SortedDims sorted;
  sort_dims(view, sorted);
  uint64_t weight[kMaxDims];
  uint64_t product = 1;
  for (int d = logical.count - 1; d >= 0; --d) {
    weight[d] = product;
    product *= static_cast<uint64_t>(logical.size[d]);
  }
  int last = -1;
  for (int i = 0; i < sorted.count; ++i) {
    const int d = sorted.dim[i];
    const auto size = static_cast<uint64_t>(logical.size[d]);
    if (last >= 0 && plan.weight[last] == weight[d] * size) {
      plan.size[last] *= size;
    } else {
      plan.size[++last] = size;
    }
    plan.weight[last] = weight[d];
  }
  plan.count = last == 0 && plan.weight[0] == 1 ? 0 : last + 1;
}

bool current_stream(const dlpack::Device& device, void*& stream) {
  if (exchange->current_work_stream &&
      exchange->current_work_stream(device.type, device.id, &stream) == 0)
    return true;
  PyErr_Clear();
  return false;
}

}  // namespace nanscan
