// Which tensors the kernels can read: those in host memory, and those on a CUDA device whose
// kernels are loaded.
//
// Contract: every function needs the GIL.
#pragma once

#include <Python.h>

#include "cuda/scan.h"
#include "tensor_view.h"

namespace nanscan {

// Fills a view of a tensor that can be scanned now. Else returns why it cannot.
Status view_scannable(PyObject* tensor, TensorView& view, LazyBits lazy_bits);

// Records that a CUDA device has no kernels and never will: its tensors are kOtherDevice from now
// on.
void refuse_device(int ordinal);

// torch's current stream of this thread on a device. Throws if torch has none.
void* stream_of(const cuda::Device& device);

}  // namespace nanscan
