// The rows of the sites, and what the host knows of each: fixed addresses, reset once a step. A row
// has memory on the host and on each CUDA device that scanned into any; a snapshot merges them.
//
// Contract: every member needs the GIL. A row never moves; the table grows by chunks. Where the
// CUDA driver refuses, `scan` and `visit` return kFailed, all others throw cuda::Error.
#pragma once

#include <Python.h>

#include <cstdint>
#include <memory>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cuda/rows.h"
#include "row.h"
#include "tensor_view.h"

namespace nanscan {

// What a row's numbers are of.
struct Description {
  DType dtype = DType::kFloat32;
  bool is_complex = false;
  std::vector<int64_t> shape;        // of the tensor as the user sees it
  uint64_t near_key = ~uint64_t{0};  // order key from which a magnitude is near the dtype's limit
};
using DescriptionPtr = std::shared_ptr<const Description>;

// What the host alone can know of a row's scans.
struct RowContext {
  // Of the latest scan; on the CPU, of the first bad one since the last reset, if there was one.
  DescriptionPtr description;
  // Scans on a device since the last reset: a bad one is known only later. So what the first ones
  // were of, where that changed: up to which call.
  uint32_t device_calls = 0;
  std::vector<std::pair<uint32_t, DescriptionPtr>> earlier;
  uint32_t batch = 0;         // the scan_many on a device that it was last in; 0: a single scan
  uint64_t order = 0;         // position among this step's first visits, from 1; 0: not visited
  uint64_t latest_order = 0;  // the same in the last step that had one: what a CUDA graph repeats
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
    // Where it was scanned: a CUDA device and stream; -1: on the CPU. What one stream saw counts
    // for that stream alone: another may be recorded into a CUDA graph, whose replays must scan,
    // too.
    int device;
    void* stream;
  };

  SeenTensors() : entries_(kInitial) {}
  ~SeenTensors() { clear(); }

  Entry* find(PyObject* tensor);  // null: never seen at this address
  void put(const Entry& entry);   // steals weakref
  void clear();

 private:
  static constexpr size_t kInitial = 256;  // a power of two, as every later size

  Entry& slot(PyObject* tensor);
  void grow();

  std::vector<Entry> entries_;
  size_t used_ = 0;
};

// The rows of one step that are on their way from devices.
class Arrival {
 public:
  bool ready();  // never blocks
  void wait();

  // Merges what arrived into the rows of the same snapshot. Returns the rows that are non-finite or
  // near their limit.
  std::vector<int> merge_into(Row* rows, uint64_t* order);
  const Description* describe(int row) const { return descriptions_[row].get(); }
  int size() const { return static_cast<int>(descriptions_.size()); }

 private:
  friend class Table;

  std::vector<std::unique_ptr<cuda::Copy>> copies_;
  std::vector<DescriptionPtr> descriptions_;
  std::unordered_map<int, std::vector<std::pair<uint32_t, DescriptionPtr>>> earlier_;
  std::vector<uint32_t> batches_;
  std::vector<uint64_t> graph_order_;  // empty: no CUDA graph writes into these rows
};

// Tensors in host memory that are to be scanned together. Bounded: a view is a kilobyte.
struct HostBatch {
  static constexpr size_t kMost = 128;

  std::vector<TensorView> views;
  std::vector<int> rows;
  uint64_t bytes = 0;

  void add(const TensorView& view, int row) {
    views.push_back(view);
    rows.push_back(row);
    bytes += view.elements * item_size(view.dtype);
  }
  bool is_full() const { return views.size() == kMost; }
  void clear() {
    views.clear();
    rows.clear();
    bytes = 0;
  }
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

  // Rows on the host that went bad since the last reset, their tickets, and whether by -Inf alone.
  std::vector<std::tuple<int, uint32_t, bool>> bad_rows() const;
  const RowContext& context(int row) const { return contexts_[row]; }

  // Scans into a row. Large tensors release the GIL meanwhile.
  Status scan(PyObject* tensor, int row);

  // The same, unless this very tensor, unchanged, was visited since the last snapshot. Returns the
  // row that holds its values, or a negative Status. `row` may be -1: then only look.
  int visit(PyObject* tensor, int row);

  // Scans each tensor into its row, with few launches a device. `refused` gets what was not
  // scanned.
  void scan_many(const std::vector<std::pair<PyObject*, int>>& tensors,
                 std::vector<std::pair<int, int>>& refused);

  // Whether a step can be ended here: not while a CUDA graph records this thread's stream.
  bool can_snapshot();

  // In a forked child: devices are its parent's alone.
  void abandon_devices();

  bool on_device() const { return !device_rows_.empty(); }

  // Whether CUDA graphs may write into rows at any time.
  bool captured() const;

  // What scans cost on devices, measured by events while `timed`; never blocks, so it comes late.
  void set_timed(bool timed);
  double take_device_seconds();

  // Not where `can_snapshot` says no. Copies rows [0, size) and their order to host memory; with
  // `reset` it then resets both and forgets what was seen. Sets `notable` to the rows that are
  // non-finite or near their limit: mostly none. Rows of devices follow with the Arrival; null
  // where there are none.
  std::unique_ptr<Arrival> snapshot(Row* rows, uint64_t* order, bool reset,
                                    std::vector<int>& notable);

  // Merges a scan made elsewhere, of a tensor whose device has no kernels.
  void merge(int index, const Row& scan, DType dtype, bool is_complex,
             const std::vector<int64_t>& shape);

 private:
  static constexpr int kRowsPerChunk = 512;

  Row& row(int index) const { return chunks_[index / kRowsPerChunk][index % kRowsPerChunk]; }
  void note_visit(int index) {
    if (contexts_[index].order == 0) contexts_[index].order = ++visits_;
  }

  bool is_seen(const SeenTensors::Entry& seen, PyObject* tensor, int64_t version) const;
  DescriptionPtr description_of(DType dtype, bool is_complex, std::vector<int64_t> shape) const;
  void describe(RowContext& context, const TensorView& view) const;
  void describe_on_device(RowContext& context, const TensorView& view) const;
  cuda::Rows& device_rows(int ordinal);
  void note_device_scan(const TensorView& view, int index, uint32_t batch);
  Status scan_or_throw(PyObject* tensor, int index);
  void scan_on_host(const TensorView& view, int index);
  void fold(const TensorView& view, int index, const ScanTotals& totals);
  void fold_all(HostBatch& batch);
  Status scan_on_device(const TensorView& view, int index);
  std::unique_ptr<Arrival> send(bool reset);

  const double near_limit_;
  std::vector<std::unique_ptr<Row[]>> chunks_;
  std::vector<std::unique_ptr<cuda::Rows>> device_rows_;  // by ordinal; null where none was needed
  std::vector<RowContext> contexts_;
  SeenTensors seen_;
  uint64_t visits_ = 0;
  uint32_t last_ticket_ = 0;
  uint32_t last_batch_ = 0;
  int latest_device_ = -1;  // of the latest scan, as in SeenTensors::Entry
  void* latest_stream_ = nullptr;
  bool expect_inference_ = false;
};

// The stream of torch's operations of this thread on a device; throws where torch names none.
void* stream_of(const cuda::Device& device);

// Fills a view that can be scanned: of host memory, or of a device whose kernels are loaded.
Status view_scannable(PyObject* tensor, TensorView& view, LazyBits lazy_bits);

// Says that a CUDA device has no kernels and never will: its tensors are kOtherDevice from now on.
void refuse_device(int ordinal);

// One scan of host memory outside of any table, for nanscan.check.
void scan_once(const TensorView& view, bool moments, Row& row);

}  // namespace nanscan
