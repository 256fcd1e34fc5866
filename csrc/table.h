// The rows of one device, and what the host knows of each: fixed addresses, reset once a step.
//
// Contract: every member needs the GIL. A row never moves; the table grows by chunks.
#pragma once

#include <Python.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "row.h"
#include "tensor_view.h"

namespace nanscan {

// What the host alone can know of a row's scans. Of the first bad call since the last reset, if
// there was one, else of the latest.
struct RowContext {
  DType dtype = DType::kFloat32;
  bool is_complex = false;
  bool described = false;
  std::vector<int64_t> shape;        // of the tensor as the user sees it
  uint64_t near_key = ~uint64_t{0};  // order key from which a magnitude is near the dtype's limit
  uint64_t order = 0;  // position among this step's first visits, from 1; 0: not visited
};

// Tensors that were visited since the last snapshot, by identity. Holds weak references, so nothing
// stays alive and an address that is used again is not mistaken. Open addressing: one cache line a
// look-up, no allocation but the weak reference.
class SeenTensors {
 public:
  struct Entry {
    PyObject* tensor;  // null: free
    PyObject* weakref;
    int64_t version;
    int row;
  };

  SeenTensors() : entries_(kInitial) {}
  ~SeenTensors() { clear(); }

  Entry* find(PyObject* tensor);  // null: never seen at this address
  void put(PyObject* tensor, PyObject* weakref, int64_t version, int row);  // steals weakref
  void clear();

 private:
  static constexpr size_t kInitial = 256;  // a power of two, as every later size

  Entry& slot(PyObject* tensor);
  void grow();

  std::vector<Entry> entries_;
  size_t used_ = 0;
};

class Table {
 public:
  // near_limit: share of a dtype's largest value from which a finite value makes a row notable.
  explicit Table(double near_limit) : near_limit_(near_limit) {}
  Table(const Table&) = delete;
  Table& operator=(const Table&) = delete;

  int add_row();
  int size() const { return static_cast<int>(contexts_.size()); }
  uint64_t visits() const { return visits_; }
  uint32_t last_ticket() const { return last_ticket_; }
  const RowContext& context(int row) const { return contexts_[row]; }

  // Scans into a row. Large tensors release the GIL meanwhile.
  Status scan(PyObject* tensor, int row);

  // The same, unless this very tensor, unchanged, was visited since the last snapshot. Returns the
  // row that holds its values, or a negative Status. `row` may be -1: then only look.
  int visit(PyObject* tensor, int row);

  // Copies rows [0, size) and their order to host memory; with `reset` it then resets both and
  // forgets what was seen. Returns the rows that are non-finite or near their limit: mostly none.
  std::vector<int> snapshot(Row* rows, uint64_t* order, bool reset);

 private:
  static constexpr int kRowsPerChunk = 512;

  Row& row(int index) { return chunks_[index / kRowsPerChunk][index % kRowsPerChunk]; }
  void note_visit(int index) {
    if (contexts_[index].order == 0) contexts_[index].order = ++visits_;
  }

  void describe(RowContext& context, const TensorView& view) const;

  const double near_limit_;
  std::vector<std::unique_ptr<Row[]>> chunks_;
  std::vector<RowContext> contexts_;
  SeenTensors seen_;
  uint64_t visits_ = 0;
  uint32_t last_ticket_ = 0;
  bool expect_inference_ = false;
};

// One scan outside of any table, for nanscan.check.
Status scan_once(PyObject* tensor, bool moments, Row& row);

}  // namespace nanscan
