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

const int kPackedMinMax = NANSCAN_PACKED_MINMAX;

}  // namespace simt_test
