// Scans that belong to no table: of one tensor, or of all tensors of a nesting of containers.
//
// Contract: every function needs the GIL. Errors of the CUDA driver are thrown as cuda::Error,
// those of Python as pybind11::error_already_set.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <vector>

#include "cuda/results.h"
#include "tensor_view.h"

namespace nanscan {

// Whether a scan needs a launch. That of an empty tensor does not.
bool is_launched(const TensorView& view);

// Starts scans on the one device of all views.
std::vector<std::unique_ptr<cuda::PendingScan>> start_scans(const std::vector<TensorView>& views,
                                                            bool moments);

// The ScanResult of a tensor, or a negative Status as an int.
pybind11::object check(PyObject* tensor, bool moments);

// A tree of the same structure with the ScanResult of each tensor. None stays None. Walks lists,
// tuples, dicts and plain tensors itself. For any other object `open(object, moments)` returns its
// result, or a pair: the list of its children, and what `close(results of the children, that)`
// needs to make the like of it. Tensors on one CUDA device share launches.
pybind11::object check_tree(PyObject* tree, bool moments, PyObject* open, PyObject* close);

}  // namespace nanscan
