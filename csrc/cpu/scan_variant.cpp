// The block kernels for one CPU instruction set. CMake builds this file once for each set.
#include "scan_kernels.h"

#define NANSCAN_STRING_(x) #x
#define NANSCAN_STRING(x) NANSCAN_STRING_(x)
#define NANSCAN_JOIN_(a, b) a##b
#define NANSCAN_JOIN(a, b) NANSCAN_JOIN_(a, b)

namespace nanscan::cpu {

extern const Variant NANSCAN_JOIN(kVariant_, NANSCAN_VARIANT);
const Variant NANSCAN_JOIN(kVariant_, NANSCAN_VARIANT) = {
    NANSCAN_STRING(NANSCAN_VARIANT),
#define NANSCAN_SCAN(dtype, ...) Kernel<FormatOf<DType::dtype>>::scan<false>,
    {NANSCAN_DTYPES(NANSCAN_SCAN)},
#undef NANSCAN_SCAN
#define NANSCAN_MOMENTS(dtype, ...) Kernel<FormatOf<DType::dtype>>::scan<true>,
    {NANSCAN_DTYPES(NANSCAN_MOMENTS)},
#undef NANSCAN_MOMENTS
    read,
};

}  // namespace nanscan::cpu
