#include "row_context.h"

#include <algorithm>
#include <cstring>

namespace nanscan {
namespace {

double from_bits(uint64_t bits) {
  double value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

uint64_t to_bits(double value) {
  uint64_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

}  // namespace

bool Description::fits(const TensorView& view) const {
  return dtype == view.dtype && is_complex == view.is_complex &&
         shape.size() == static_cast<size_t>(view.user_dims()) &&
         std::equal(shape.begin(), shape.end(), view.logical.size);
}

DescriptionPtr make_description(DType dtype, bool is_complex, std::vector<int64_t> shape,
                                double near_limit, const Counts& counts) {
  const double largest = with_format(dtype, [](auto format) {
    using Format = decltype(format);
    return from_bits(Format::float64_bits(Format::kMaxFinite));
  });
  return std::make_shared<const Description>(Description{dtype, is_complex, std::move(shape),
                                                         order_key(to_bits(near_limit * largest)),
                                                         counts.is_bad() ? counts : Counts{}});
}

bool is_notable(const Row& row, const Description* description) {
  // min_key is a complement, so it grows with the magnitude of negative values.
  return row.ticket != 0 || (description && (row.max_key >= description->near_key ||
                                             row.min_key >= description->near_key));
}

void RowContext::describe(const TensorView& view, double near_limit, const Counts& counts) {
  const bool is_bad = counts.is_bad() || (description && description->counts.is_bad());
  if (description && !is_bad && description->fits(view)) return;
  const int64_t* sizes = view.logical.size;
  description = make_description(view.dtype, view.is_complex, {sizes, sizes + view.user_dims()},
                                 near_limit, counts);
}

void RowContext::note_bad_parts(uint64_t parts, int64_t size) {
  parts_of = bad_parts == 0 || parts_of == size ? size : 0;
  bad_parts |= parts;
}

void RowContext::describe_on_device(const TensorView& view, double near_limit) {
  if (device_calls > 0 && !description->fits(view)) earlier.emplace_back(device_calls, description);
  ++device_calls;
  describe(view, near_limit);
}

}  // namespace nanscan
