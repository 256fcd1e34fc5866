// The tensors that were visited since the last snapshot, and the row that holds the values of each.
//
// Contract: every member needs the GIL. Holds weak references only, so no tensor is kept alive, and
// an address that Python uses again is noticed. A look-up reads one cache line (open addressing).
#pragma once

#include <Python.h>

#include <cstdint>
#include <vector>

namespace nanscan {

// Where a tensor was scanned: a CUDA device and stream, or -1 for the CPU.
struct ScanPlace {
  int device = -1;
  void* stream = nullptr;
};

class SeenTensors {
 public:
  static constexpr int64_t kNotAsked = -2;

  SeenTensors() : entries_(kInitialSize) {}
  ~SeenTensors() { clear(); }
  SeenTensors(const SeenTensors&) = delete;
  SeenTensors& operator=(const SeenTensors&) = delete;

  // The row of a tensor that was seen, is unchanged, and would be scanned on the same stream; else
  // -1. Sets `version` to the tensor's, or to kNotAsked if it was never seen. May let other threads
  // run.
  int row_of(PyObject* tensor, int64_t& version);

  // Notes a scan. `version` is what row_of gave before the scan. A tensor without a version is not
  // noted.
  void add(PyObject* tensor, int64_t version, int row, const ScanPlace& place);

  void clear();

 private:
  struct Entry {
    PyObject* tensor;  // null: a free entry
    PyObject* weakref;
    int64_t version;
    int row;
    ScanPlace place;
  };
  static constexpr size_t kInitialSize = 256;  // always a power of two

  Entry& slot(PyObject* tensor);
  void put(const Entry& entry);
  void grow();
  int64_t version_of(PyObject* tensor);

  std::vector<Entry> entries_;
  size_t used_ = 0;
  bool expect_inference_ = false;  // the latest tensor had no version
};

}  // namespace nanscan
