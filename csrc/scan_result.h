// The base class of nanscan.ScanResult: the row of a scan with the shape and dtype of its tensor.
// A number becomes a Python object when it is read, and a scan on a CUDA device is waited for then.
//
// Contract: every function needs the GIL. The row is a copy, so nothing that happens to tensors or
// tables later changes a result.
#pragma once

#include <Python.h>

#include "row.h"
#include "tensor_view.h"

namespace nanscan {

// Makes the class nanscan._C.ResultBase. Null with a Python error set on failure.
PyObject* make_result_base();

// Sets the class of the objects that `new_result` makes, a subclass of ResultBase, and torch's
// dtypes in the order of _C.DTYPES. Called once. False: a Python error is set.
bool initialize_results(PyObject* result_type, PyObject* dtypes);

// The result of a scan. Null with a Python error set on failure.
PyObject* new_result(const TensorView& view, const Row& row, bool moments);

// Gives a new result, in place of its row, the PendingScan that will have it.
void set_pending(PyObject* result, PyObject* pending);

}  // namespace nanscan
