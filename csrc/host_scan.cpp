#include "host_scan.h"

#include <optional>

#include "cpu/scan.h"
#include "gil.h"

namespace nanscan {
namespace {

class ReleaseGilIfLong {
 public:
  explicit ReleaseGilIfLong(uint64_t bytes) {
    if (bytes >= cpu::kLongBytes) release_.emplace();
  }

 private:
  std::optional<ReleaseGil> release_;
};

uint64_t bytes_of(const TensorView& view) { return view.elements * item_size(view.dtype); }

}  // namespace

Row scan_host(const TensorView& view, bool moments) {
  const ReleaseGilIfLong release(bytes_of(view));
  return cpu::scan(view, moments);
}

Row scan_once(const TensorView& view, bool moments) {
  Row row{};
  uint32_t last_ticket = 0;
  merge_scan(scan_host(view, moments), row, last_ticket,
             [&] { return cpu::first_nonfinite(view); });
  return row;
}

void HostBatch::add(const TensorView& view, int row) {
  views_.push_back(view);
  rows_.push_back(row);
  bytes_ += bytes_of(view);
}

std::vector<Row> HostBatch::scan() const {
  std::vector<Row> scans(views_.size());
  const ReleaseGilIfLong release(bytes_);
  cpu::scan_many(views_, /*moments=*/false, scans.data());
  return scans;
}

void HostBatch::clear() {
  views_.clear();
  rows_.clear();
  bytes_ = 0;
}

}  // namespace nanscan
