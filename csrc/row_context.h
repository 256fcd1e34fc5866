// What the host knows of a row beside its numbers: which tensors were scanned into it, and in which
// order rows were visited.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "row.h"
#include "tensor_view.h"

namespace nanscan {

// Elements of one scan, and how many of them are non-finite.
struct Counts {
  uint64_t elements = 0, nan = 0, posinf = 0, neginf = 0;

  bool is_bad() const { return nan || posinf || neginf; }
};
constexpr Counts counts_of(const Row& scan) {
  return {scan.elements, scan.nan, scan.posinf, scan.neginf};
}

// The tensor that a row's numbers are of.
struct Description {
  DType dtype = DType::kFloat32;
  bool is_complex = false;
  std::vector<int64_t> shape;        // as the user sees it
  uint64_t near_key = ~uint64_t{0};  // from this key on, a magnitude is near the dtype's limit
  Counts counts = {};                // of a bad scan on the host; else all 0

  bool fits(const TensorView& view) const;
};
using DescriptionPtr = std::shared_ptr<const Description>;

// near_limit: the share of the dtype's largest value that counts as near it.
DescriptionPtr make_description(DType dtype, bool is_complex, std::vector<int64_t> shape,
                                double near_limit, const Counts& counts = {});

// Whether all of a row's values are 0. Not known of an empty row.
constexpr bool is_all_zero(const Row& row) {
  constexpr uint64_t kZero = order_key(0);  // the largest key of 0.0 and -0.0, as is its complement
  return row.max_key != 0 && row.max_key <= kZero && row.min_key <= kZero && row.ticket == 0;
}

// Whether a row is non-finite or near its dtype's limit.
bool is_notable(const Row& row, const Description* description);

struct RowContext {
  // Of the latest scan. On the CPU: of the first bad scan since the last reset, if there was one.
  DescriptionPtr description;
  // Scans on a device since the last reset. The host learns only later which of them were bad. So
  // the descriptions before the present one are kept, each with the last call that it is of.
  uint32_t device_calls = 0;
  std::vector<std::pair<uint32_t, DescriptionPtr>> earlier;
  uint32_t batch = 0;  // the latest scan_many on a device that had this row; 0: a single scan
  uint64_t order = 0;  // position among this step's first visits, from 1; 0: not visited
  // The parts of dimension 0 in which NaN or +Inf was found in this step, on the CPU: bit i is part
  // i of 64, or index i of a shorter dimension. So samples of a batch can be told apart.
  uint64_t bad_parts = 0;
  int64_t parts_of = 0;  // size of that dimension; 0: nothing was found, or sizes differ
  // How many steps in a row, of those that visited it, it was not all 0. What turns 0 after so many
  // is notable: an overflow may have wiped it out.
  static constexpr int kSteadySteps = 3;
  int steps_not_zero = 0;
  uint64_t latest_order = 0;  // the order in the last step that visited it; CUDA graphs repeat it

  // `counts`: of the scan, if the host knows them.
  void describe(const TensorView& view, double near_limit, const Counts& counts = {});
  void note_bad_parts(uint64_t parts, int64_t size);
  void describe_on_device(const TensorView& view, double near_limit);
};

}  // namespace nanscan
