// Scans of host memory that let other Python threads run when they take long.
//
// Contract: every function needs the GIL. The caller's references keep the tensors alive.
#pragma once

#include <vector>

#include "row.h"
#include "tensor_view.h"

namespace nanscan {

// Counts, extremes and, if asked for, moments of one scan; all other fields are 0.
Row scan_host(const TensorView& view, bool moments);

// One scan that belongs to no table, as a complete row.
Row scan_once(const TensorView& view, bool moments);

// Tensors that are scanned together, each into its row. Bounded, because a view takes a kilobyte.
class HostBatch {
 public:
  static constexpr size_t kCapacity = 128;

  explicit HostBatch(size_t expected) {
    views_.reserve(expected < kCapacity ? expected : kCapacity);
  }

  void add(const TensorView& view, int row);
  bool is_full() const { return views_.size() == kCapacity; }

  // Scans all, calls merge(view, row, scan) for each in order, and empties the batch.
  template <typename Merge>
  void flush(Merge merge) {
    const std::vector<Row> scans = scan();
    for (size_t i = 0; i < scans.size(); ++i) merge(views_[i], rows_[i], scans[i]);
    clear();
  }

 private:
  std::vector<Row> scan() const;
  void clear();

  std::vector<TensorView> views_;
  std::vector<int> rows_;
  uint64_t bytes_ = 0;
};

}  // namespace nanscan
