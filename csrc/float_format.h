// The table of dtypes, and each floating-point format as integer arithmetic.
//
// key(bits) orders values: a larger value has a larger key, and -0.0 is just below +0.0. Finite
// values have the keys [kMinFinite, kMaxFinite]; every NaN and Inf lies outside. So an integer min
// and max over keys finds the extremes and shows any NaN or Inf. No floating-point instruction is
// used, so flush-to-zero modes and compiler flags cannot change a result.
#pragma once

#include <cstdint>

namespace nanscan {

// Every dtype that can be scanned. To add one, add a row here.
// X(DType, torch's name, storage, exponent bits, mantissa bits, exponent bias, Family,
//   DLPack type code)
#define NANSCAN_DTYPES(X)                                                      \
  X(kFloat16, float16, int16_t, 5, 10, 15, kIeee, kFloat)                      \
  X(kBFloat16, bfloat16, int16_t, 8, 7, 127, kIeee, kBfloat)                   \
  X(kFloat32, float32, int32_t, 8, 23, 127, kIeee, kFloat)                     \
  X(kFloat64, float64, int64_t, 11, 52, 1023, kIeee, kFloat)                   \
  X(kFloat8E4M3FN, float8_e4m3fn, int8_t, 4, 3, 7, kFn, kFloat8E4M3FN)         \
  X(kFloat8E5M2, float8_e5m2, int8_t, 5, 2, 15, kIeee, kFloat8E5M2)            \
  X(kFloat8E4M3FNUZ, float8_e4m3fnuz, int8_t, 4, 3, 8, kFnuz, kFloat8E4M3FNUZ) \
  X(kFloat8E5M2FNUZ, float8_e5m2fnuz, int8_t, 5, 2, 16, kFnuz, kFloat8E5M2FNUZ)

enum class DType : uint8_t {
#define NANSCAN_ENUMERATOR(dtype, ...) dtype,
  NANSCAN_DTYPES(NANSCAN_ENUMERATOR)
#undef NANSCAN_ENUMERATOR
};

#define NANSCAN_COUNT_ONE(...) +1
constexpr int kDTypeCount = NANSCAN_DTYPES(NANSCAN_COUNT_ONE);
#undef NANSCAN_COUNT_ONE

enum class Family : uint8_t {
  kIeee,  // exponent all ones: Inf and NaN
  kFn,    // no Inf; NaN is the largest magnitude, with either sign
  kFnuz,  // no Inf, no -0.0; the bits of -0.0 are the only NaN
};

template <typename Signed, int kExponent, int kMantissa, int kExponentBias, Family kFamilyOf>
struct FloatFormat {
  using Int = Signed;
  static constexpr Family kFamily = kFamilyOf;
  static constexpr int kExponentBits = kExponent;
  static constexpr int kMantissaBits = kMantissa;
  static constexpr int kBias = kExponentBias;
  static constexpr int kWidth = 8 * sizeof(Signed);
  static_assert(kExponentBits + kMantissaBits + 1 == kWidth,
                "sign, exponent and mantissa fill the storage");

  static constexpr Int kLowest = static_cast<Int>(uint64_t{1} << (kWidth - 1));
  static constexpr Int kHighest = static_cast<Int>(~kLowest);  // also the mask of the magnitude
  static constexpr Int kSmallestNormal = static_cast<Int>(uint64_t{1} << kMantissaBits);

  static constexpr bool kHasInf = kFamily == Family::kIeee;
  static constexpr Int kPosInf =
      static_cast<Int>(((uint64_t{1} << kExponentBits) - 1) << kMantissaBits);
  static constexpr Int kNegInf = static_cast<Int>(~kPosInf);
  static constexpr Int kMaxFinite = kFamily == Family::kIeee ? static_cast<Int>(kPosInf - 1)
                                    : kFamily == Family::kFn ? static_cast<Int>(kHighest - 1)
                                                             : kHighest;
  static constexpr Int kMinFinite =
      kFamily == Family::kFnuz ? static_cast<Int>(-kMaxFinite) : static_cast<Int>(~kMaxFinite);

  static constexpr bool is_finite_key(Int key) { return key >= kMinFinite && key <= kMaxFinite; }

  static constexpr Int key(Int bits) {
    if (kFamily == Family::kFnuz) {
      return bits == kLowest ? kLowest : bits < 0 ? static_cast<Int>(-(bits & kHighest)) : bits;
    }
    return static_cast<Int>(bits < 0 ? bits ^ kHighest : bits);
  }

  static constexpr Int magnitude(Int key) {  // the bits without the sign
    return static_cast<Int>(key >= 0 ? key : kFamily == Family::kFnuz ? -key : ~key);
  }

  // The float64 bits of a finite value. Integer arithmetic alone: exact, also where the processor
  // treats subnormals as zero.
  static constexpr uint64_t float64_bits(Int key) {
    const uint64_t sign = key < 0 ? uint64_t{1} << 63 : 0;
    uint64_t mantissa = static_cast<uint64_t>(magnitude(key));
    if (kWidth == 64) return sign | mantissa;
    if (mantissa == 0) return sign;
    int64_t exponent = static_cast<int64_t>(mantissa >> kMantissaBits);
    mantissa &= (uint64_t{1} << kMantissaBits) - 1;
    if (exponent == 0) {
      exponent = 1;
      for (; !(mantissa >> kMantissaBits); mantissa <<= 1) --exponent;
      mantissa ^= uint64_t{1} << kMantissaBits;
    }
    return sign | static_cast<uint64_t>(exponent - kBias + 1023) << 52 |
           mantissa << ((52 - kMantissaBits) & 63);
  }
};

template <DType>
struct FormatOf;
#define NANSCAN_FORMAT(dtype, torch_name, storage, exponent, mantissa, bias, family, dlpack_code)  \
  template <>                                                                                      \
  struct FormatOf<DType::dtype> : FloatFormat<storage, exponent, mantissa, bias, Family::family> { \
  };
NANSCAN_DTYPES(NANSCAN_FORMAT)
#undef NANSCAN_FORMAT

// Calls f with the FormatOf<dtype> of a dtype known only at run time.
template <typename F>
constexpr auto with_format(DType dtype, F&& f) {
  switch (dtype) {
#define NANSCAN_CASE(dtype, ...) \
  case DType::dtype:             \
    return f(FormatOf<DType::dtype>{});
    NANSCAN_DTYPES(NANSCAN_CASE)
#undef NANSCAN_CASE
  }
  return f(FormatOf<DType{0}>{});  // never reached: every dtype has a case
}

constexpr int item_size(DType dtype) {
  return with_format(dtype, [](auto format) { return decltype(format)::kWidth / 8; });
}

}  // namespace nanscan
