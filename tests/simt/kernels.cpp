#include "kernels.h"

#include "simt.h"
//
#include "cuda/scan_kernels.cuh"

namespace simt_test {

void flat_float32(const nanscan::cuda::FlatScan& scan, unsigned block, unsigned blocks) {
  using namespace nanscan::cuda;
  using Float32 = nanscan::FormatOf<nanscan::DType::kFloat32>;
  const Call call{scan.row, scan.tickets, scan.count, 1, block, blocks, scan.mirrored != 0};
  finish(scan_flat<Float32, false>(scan.data, scan.count, SameIndex{}, call), call);
}

template <typename Format>
nanscan::Row scan_vector(const void* vector) {
  using namespace nanscan::cuda;
  const Run<Format> run{static_cast<const typename Format::Int*>(vector), 0};
  Lanes<Format> lanes;
  Found<Format, false> found;
  scan_vectors<Format, false>(static_cast<const uint4*>(vector), 1, 1, run, SameIndex{}, nullptr,
                              lanes, found);
  found.add_key(lanes.max_key(), lanes.min_key());
  const Totals<false>& totals = found.result();
  nanscan::Row row{};
  row.elements = kLoadBytes / sizeof(typename Format::Int);
  row.nan = totals.nan;
  row.posinf = totals.posinf;
  row.neginf = totals.neginf;
  row.max_key = totals.max_key;
  row.min_key = totals.min_key;
  row.first_bad = totals.first;
  row.calls = 1;
  row.first_bad_call = row.ticket = totals.first != 0;
  return row;
}

nanscan::Row scan_vector(nanscan::DType dtype, const void* vector) {
  using namespace nanscan;
  switch (dtype) {
#define SCAN_VECTOR(dtype, ...) \
  case DType::dtype:            \
    return scan_vector<FormatOf<DType::dtype>>(vector);
    NANSCAN_DTYPES(SCAN_VECTOR)
#undef SCAN_VECTOR
  }
  return {};
}

const int kPackedMinMax = NANSCAN_PACKED_MINMAX;

}  // namespace simt_test
