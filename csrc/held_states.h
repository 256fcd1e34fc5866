// Which tensors an attribute of a module holds, and how often each was changed in place.
//
// Contract: needs the GIL. A tensor is read by its `_version` alone: nothing of it is copied.
#pragma once

#include <Python.h>

#include <cstdint>
#include <vector>

namespace nanscan {

// Adds id and version of each plain tensor in a value: a tensor, a tuple, list or dict, or an
// object with few fields, at most `depth` deep. The version is -1 where torch counts none.
void add_states(PyObject* value, int depth, std::vector<int64_t>& states);

// The keys of a module's __dict__ under which there are tensors, less those in a set: a new list,
// or null with an error.
PyObject* keys_with_tensors(PyObject* dict, PyObject* less, int depth);

}  // namespace nanscan
