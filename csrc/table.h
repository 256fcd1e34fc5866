// The rows of all sites, with fixed addresses, reset once a step. A row has memory on the host and
// on each CUDA device that scanned into it; a snapshot merges them.
//
// Contract: every member needs the GIL. A row never moves; the table grows by chunks. If the CUDA
// driver fails, `scan` and `visit` return kFailed with a Python error set; all others throw
// cuda::Error.
#pragma once

#include <Python.h>

#include <cstdint>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "arrival.h"
#include "cuda/rows.h"
#include "row.h"
#include "row_context.h"
#include "seen_tensors.h"
#include "tensor_view.h"

namespace nanscan {

class Table {
 public:
  // near_limit: a finite value of at least this share of its dtype's largest makes a row notable.
  explicit Table(double near_limit) : near_limit_(near_limit) {}
  Table(const Table&) = delete;
  Table& operator=(const Table&) = delete;

  int add_row();
  int size() const { return static_cast<int>(contexts_.size()); }
  uint64_t visits() const { return visits_; }
  uint32_t last_ticket() const { return last_ticket_; }
  // Scans of single tensors on the host that found NaN or +Inf: -Inf alone is mostly a mask.
  uint64_t bad_scans() const { return bad_scans_; }

  // Rows on the host that went bad since the last reset: index, ticket, and whether all their
  // non-finite values are -Inf.
  std::vector<std::tuple<int, uint32_t, bool>> bad_rows() const;
  const RowContext& context(int row) const { return contexts_[row]; }

  // Scans into a row. The scan of a large tensor releases the GIL.
  Status scan(PyObject* tensor, int row);

  // Scans, unless this tensor object was visited since the last snapshot and has not changed since.
  // Returns the row that holds its values, or a negative Status. With `row` -1 it never scans.
  int visit(PyObject* tensor, int row);

  // Scans each tensor into its row, with few launches for each device. Adds (position, Status) of
  // each tensor that was not scanned to `refused`.
  void scan_many(const std::vector<std::pair<PyObject*, int>>& tensors,
                 std::vector<std::pair<int, int>>& refused);

  // Whether a snapshot is possible now: not while a CUDA graph records this thread's stream.
  bool can_snapshot();

  // For a forked child, which must not use the devices of its parent.
  void abandon_devices();

  bool on_device() const { return !device_rows_.empty(); }

  // Whether CUDA graphs may write into rows at any time.
  bool captured() const;

  // Whether CUDA events measure the scans on devices from now on, and the seconds of those that
  // have ended since the last call. Never blocks: a scan that still runs is counted later.
  void set_timed(bool timed);
  double take_device_seconds();

  // Only if can_snapshot(). Copies the host's rows [0, size) and their order; with `reset` it then
  // resets both and forgets the seen tensors. Adds the rows that are non-finite or near their limit
  // to `notable`: mostly none. The rows of devices come with the Arrival; null if there are none.
  std::unique_ptr<Arrival> snapshot(Row* rows, uint64_t* order, bool reset,
                                    std::vector<int>& notable);

  // Counts the steps in which a visited row was not all 0, from the complete row of a step. Whether
  // it is, after kSteadySteps in which it was not. `snapshot` asks if nothing comes from devices.
  bool turned_to_zero(int index, const Row& row);

  // Merges one scan that was made elsewhere, because the tensor's device has no kernels.
  void merge(int index, const Row& scan, DType dtype, bool is_complex,
             const std::vector<int64_t>& shape);

 private:
  static constexpr int kRowsPerChunk = 512;

  Row& row(int index) const { return chunks_[index / kRowsPerChunk][index % kRowsPerChunk]; }
  void note_visit(int index) {
    RowContext& context = contexts_[index];
    if (context.order != 0) return;
    context.order = ++visits_;
    context.bad_parts = 0;
  }

  cuda::Rows& device_rows(int ordinal);
  void note_device_scan(const TensorView& view, int index, uint32_t batch);
  Status scan_or_throw(PyObject* tensor, int index);
  void scan_on_host(const TensorView& view, int index);
  void merge_host_scan(const TensorView& view, int index, const Row& scan);
  Status scan_on_device(const TensorView& view, int index);
  std::unique_ptr<Arrival> send_from_devices(bool reset);

  const double near_limit_;
  std::vector<std::unique_ptr<Row[]>> chunks_;
  std::vector<std::unique_ptr<cuda::Rows>> device_rows_;  // by ordinal; null: never used
  std::vector<RowContext> contexts_;
  SeenTensors seen_;
  uint64_t visits_ = 0;
  uint32_t last_ticket_ = 0;
  uint64_t bad_scans_ = 0;
  uint32_t last_batch_ = 0;
  ScanPlace latest_place_;  // of the latest scan
};

}  // namespace nanscan
