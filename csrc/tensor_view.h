// A torch.Tensor as nanscan sees it: pointer, format, shape and strides. Nothing is copied or kept.
#pragma once

#include <Python.h>

#include <algorithm>
#include <cstdint>

#include "dlpack_abi.h"
#include "float_format.h"

namespace nanscan {

// Why a Python object cannot be scanned as it is. Zero and positive values are successes; the
// Python side (nanscan/_tensors.py) unwraps what can be unwrapped and names the rest.
enum Status : int {
  kOk = 0,
  kNotPlain = -1,   // not exactly torch.Tensor or Parameter
  kNeedsRow = -2,   // Table.visit: not seen before, and no row given
  kNotFloat = -3,   // integers, booleans: nothing to scan
  kBadFormat = -4,  // a floating format without a kernel
  kOtherDevice = -5,
  kNoData = -6,       // elements, but a null pointer: freed storage, a fake or wrapper tensor
  kNoView = -7,       // torch refused a view: sparse, meta, quantised, functorch, ...; or > 64 dims
  kLazyBit = -8,      // negative or conjugate bit set
  kUnprepared = -9,   // on a CUDA device whose kernels are not loaded
  kMisaligned = -10,  // on a CUDA device, at an address that is no multiple of the element's size
  kFailed = -11,      // the CUDA driver refused; a Python error is set
};

constexpr int kMaxDims = 65;  // 64, and one more for complex tensors; torch's own limit is higher

struct Dims {
  int count = 0;
  int64_t size[kMaxDims];
  int64_t stride[kMaxDims];  // in elements of the real format

  // Only what is used: the whole is a kilobyte.
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
  bool is_complex = false;  // seen as real numbers with one more dimension, of size 2
  dlpack::Device device{};
  uint64_t elements = 0;  // logical, of the real format
  Dims logical;           // as the user sees it, and the pairs of a complex tensor

  int user_dims() const { return logical.count - (is_complex ? 1 : 0); }
};

// What the walk over memory needs: `runs` flat runs of `run` elements, `run_stride` apart when
// there is one outer dimension, at the odometer of `outer` in general. All of it is repeated
// `repeat` times logically (stride-0 dimensions).
struct MemoryLayout {
  Dims outer;              // slowest first
  int64_t run = 1;         // elements of the innermost dimension
  int64_t run_stride = 1;  // their distance; 1 is flat memory
  uint64_t repeat = 1;
  uint64_t stored = 1;          // elements to read
  bool row_major_flat = false;  // memory order is logical order, and flat
};

// From walk order (memory order, as `plan_layout` walks) to row-major order: a place, split by
// `size`, slowest first, has the sum of its parts' `weight` as row-major index.
struct IndexPlan {
  int count = 0;  // 0: both orders are the same
  uint64_t size[kMaxDims];
  uint64_t weight[kMaxDims];
};

// Makes torch's types and exchange table known. Once, before any other call; raises on mismatch.
bool initialize_torch(PyObject* tensor_type, PyObject* parameter_type, PyObject* exchange_capsule);

// When to ask torch for a negative or conjugate bit. torch's public functions set a negative bit
// only on imaginary parts of conjugates, which hold every other element; kByStrides relies on that.
enum class LazyBits { kAlwaysAsk, kByStrides };

// Whether an object is exactly a torch.Tensor or Parameter.
bool is_plain_tensor(PyObject* object);

// Fills `view`. Never leaves a Python error set. No synchronisation.
Status view_tensor(PyObject* object, TensorView& view, LazyBits lazy_bits);

// Sorts, drops and coalesces dimensions, so that dense tensors in any dimension order become flat.
void plan_layout(const TensorView& view, MemoryLayout& layout);

// Where in row-major order the elements are that `plan_layout` walks over.
void plan_index(const TensorView& view, IndexPlan& plan);

// The stream that torch's operations of this thread go to. False where torch knows none.
bool current_stream(const dlpack::Device& device, void*& stream);

}  // namespace nanscan
