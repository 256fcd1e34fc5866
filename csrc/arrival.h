// The rows of one snapshot that are still on their way from CUDA devices.
//
// Contract: every member needs the GIL, which `wait` releases. Errors of the driver are thrown.
#pragma once

#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cuda/rows.h"
#include "row_context.h"

namespace nanscan {

class Arrival {
 public:
  // graphs: CUDA graphs may write into the rows, also into those that the host did not visit.
  Arrival(std::vector<std::unique_ptr<cuda::Copy>> copies, bool graphs)
      : copies_(std::move(copies)), graphs_(graphs) {}

  // Notes the context of the next row, as it is at the snapshot.
  void add_row(const RowContext& context);

  bool ready();  // never blocks
  void wait();

  // Once ready: merges what arrived into the rows of the same snapshot. Returns the rows that are
  // non-finite or near their limit.
  std::vector<int> merge_into(Row* rows, uint64_t* order);
  const Description* describe(int row) const { return descriptions_[row].get(); }
  int size() const { return static_cast<int>(descriptions_.size()); }

 private:
  void describe_bad_call(int i, Row& row);

  std::vector<std::unique_ptr<cuda::Copy>> copies_;
  const bool graphs_;
  std::vector<DescriptionPtr> descriptions_;
  std::unordered_map<int, std::vector<std::pair<uint32_t, DescriptionPtr>>> earlier_;
  std::vector<uint32_t> batches_;
  std::vector<uint64_t> graph_order_;  // only with graphs
};

}  // namespace nanscan
