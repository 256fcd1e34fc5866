// The kernels under test. They are compiled apart, so that they alone are compiled anew when they
// change.
#pragma once

#include "cuda/scan_args.h"

#define NANSCAN_DECLARE(dtype, suffix, ...)                             \
  extern "C" void nanscan_flat_##suffix(nanscan::cuda::FlatScan);       \
  extern "C" void nanscan_strided_##suffix(nanscan::cuda::StridedScan); \
  extern "C" void nanscan_strided_moments_##suffix(nanscan::cuda::StridedScan);
NANSCAN_DTYPES(NANSCAN_DECLARE)
#undef NANSCAN_DECLARE
extern "C" void nanscan_many(nanscan::cuda::ManyScan);
extern "C" void nanscan_many_moments(nanscan::cuda::ManyScan);

namespace simt_test {

// As nanscan_flat_float32, of the block `block` of `blocks`, wherever it is in the grid.
void flat_float32(const nanscan::cuda::FlatScan& scan, unsigned block, unsigned blocks);

// A row with what one thread finds in one vector of 16 bytes.
nanscan::Row scan_vector(nanscan::DType dtype, const void* vector);

extern const int kPackedMinMax;  // NANSCAN_PACKED_MINMAX

}  // namespace simt_test
