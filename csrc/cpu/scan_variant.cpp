// One instruction-set variant of the block kernels; CMake builds this file once for each.
#include "scan_kernels.h"

#define NANSCAN_STRING_(x) #x
#define NANSCAN_STRING(x) NANSCAN_STRING_(x)
#define NANSCAN_JOIN_(a, b) a##b
#define NANSCAN_JOIN(a, b) NANSCAN_JOIN_(a, b)

namespace nanscan::cpu {

// In the order of DType.
extern const Variant NANSCAN_JOIN(kVariant_, NANSCAN_VARIANT);
const Variant NANSCAN_JOIN(kVariant_, NANSCAN_VARIANT) = {
    NANSCAN_STRING(NANSCAN_VARIANT),
    {
        Kernel<FormatOf<DType::kFloat16>>::scan,
        Kernel<FormatOf<DType::kBFloat16>>::scan,
        Kernel<FormatOf<DType::kFloat32>>::scan,
        Kernel<FormatOf<DType::kFloat64>>::scan,
        Kernel<FormatOf<DType::kFloat8E4M3FN>>::scan,
        Kernel<FormatOf<DType::kFloat8E5M2>>::scan,
        Kernel<FormatOf<DType::kFloat8E4M3FNUZ>>::scan,
        Kernel<FormatOf<DType::kFloat8E5M2FNUZ>>::scan,
    },
    {
        Kernel<FormatOf<DType::kFloat16>>::moments,
        Kernel<FormatOf<DType::kBFloat16>>::moments,
        Kernel<FormatOf<DType::kFloat32>>::moments,
        Kernel<FormatOf<DType::kFloat64>>::moments,
        Kernel<FormatOf<DType::kFloat8E4M3FN>>::moments,
        Kernel<FormatOf<DType::kFloat8E5M2>>::moments,
        Kernel<FormatOf<DType::kFloat8E4M3FNUZ>>::moments,
        Kernel<FormatOf<DType::kFloat8E5M2FNUZ>>::moments,
    },
    read,
};

}  // namespace nanscan::cpu
