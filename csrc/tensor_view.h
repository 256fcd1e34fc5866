// A view of a torch.Tensor: pointer, dtype, shape and strides. No data is copied, and nothing is
// kept alive.
#pragma once

#include <Python.h>

#include <algorithm>
#include <cstdint>

#include "dlpack_abi.h"
#include "float_format.h"

namespace nanscan {

// Why a Python object cannot be scanned as it is. Zero and positive values mean success. For the
// others, nanscan/_scan/unwrap.py unwraps the tensor or says why it cannot.
enum Status : int {
  kOk = 0,
  kNotPlain = -1,   // not of exactly the type torch.Tensor or Parameter
  kNeedsRow = -2,   // Table.visit: not seen before, and no row given
  kNotFloat = -3,   // integers, booleans: nothing to scan
  kBadFormat = -4,  // a floating-point dtype without a kernel
  kOtherDevice = -5,
  kNoData = -6,       // elements, but a null pointer: freed storage, a fake or wrapper tensor
  kNoView = -7,       // torch refused a view: sparse, meta, quantised, functorch, ...; or > 64 dims
  kLazyBit = -8,      // negative or conjugate bit set
  kUnprepared = -9,   // on a CUDA device whose kernels are not loaded
  kMisaligned = -10,  // on a CUDA device, and not aligned to the size of an element
  kFailed = -11,      // the CUDA driver refused; a Python error is set
};

constexpr int kMaxDims = 65;  // 64, and one more for complex tensors; torch's own limit is higher

struct Dims {
  int count = 0;
  int64_t size[kMaxDims];
  int64_t stride[kMaxDims];  // in elements of the real format

  // Copies only the dimensions in use: all of them take a kilobyte.
  Dims() {}
  Dims(const Dims& other) { *this = other; }
  Dims& operator=(const Dims& other) {
    count = other.count;
    std::copy_n(other.size, count, size);
    std::copy_n(other.stride, count, stride);
    return *this;
  }
};

struct TensorView {
  const char* data = nullptr;
  DType dtype = DType::kFloat32;
  bool is_complex = false;  // viewed as real numbers, with one more dimension of size 2
  dlpack::Device device{};
  uint64_t elements = 0;  // logical, of the real format
  Dims logical;           // the user's dimensions, and that of the pairs of a complex tensor

  int user_dims() const { return logical.count - (is_complex ? 1 : 0); }
};

// Whether torch has complex numbers of two such values.
constexpr bool has_complex(DType dtype) {
  switch (dtype) {
#define NANSCAN_CASE(dtype, torch_name, storage, exponent, mantissa, bias, family, dlpack_code) \
  case DType::dtype:                                                                            \
    return dlpack::dlpack_code == dlpack::kFloat;
    NANSCAN_DTYPES(NANSCAN_CASE)
#undef NANSCAN_CASE
  }
  return false;  // never reached: every dtype has a case
}

// How a scan walks over memory: one run of `run` elements, `run_stride` apart, for each index into
// the dimensions `outer`. Each stored element stands for `repeat` logical ones (stride-0
// dimensions).
struct MemoryLayout {
  Dims outer;              // slowest first
  int64_t run = 1;         // elements of the innermost dimension
  int64_t run_stride = 1;  // 1: the run is contiguous
  uint64_t repeat = 1;
  uint64_t stored = 1;          // elements to read
  bool row_major_flat = false;  // memory order is logical order, and flat
};

// Maps walk order (the memory order of MemoryLayout) to row-major order. Split a position in walk
// order into one index for each `size`, slowest first: the sum of index * weight is its row-major
// index.
struct IndexPlan {
  int count = 0;  // 0: both orders are the same
  uint64_t size[kMaxDims];
  uint64_t weight[kMaxDims];
};

// Sets torch's types and DLPack exchange table. Called once, before all else. False: a Python error
// is set, because this torch does not fit.
bool initialize_torch(PyObject* tensor_type, PyObject* parameter_type, PyObject* exchange_capsule);

// When to ask torch for a tensor's negative or conjugate bit. torch's public functions set a
// negative bit only on the imaginary part of a conjugate, whose strides are even. kByStrides relies
// on that.
enum class LazyBits { kAlwaysAsk, kByStrides };

// Whether an object is exactly a torch.Tensor or Parameter.
bool is_plain_tensor(PyObject* object);

// Fills `view`. Never leaves a Python error set. No synchronisation.
Status view_tensor(PyObject* object, TensorView& view, LazyBits lazy_bits);

// Sorts, drops and joins dimensions, so that a dense tensor in any dimension order is one flat run.
void plan_layout(const TensorView& view, MemoryLayout& layout);

// The row-major index of each element, for the walk of `plan_layout`.
void plan_index(const TensorView& view, IndexPlan& plan);

// torch's current stream of this thread on a device. False if torch has none.
bool current_stream(const dlpack::Device& device, void*& stream);

}  // namespace nanscan
