// Floating-point formats as integers: what is finite, and an order-preserving signed key a format.
//
// key(bits) is monotonic in the value, with -0.0 just below +0.0. Finite values have the keys
// [kMinFinite, kMaxFinite]; every NaN and Inf lies outside. So a signed integer min and max over
// keys finds the extremes, and shows any non-finite value, with no floating-point operation at all:
// flush-to-zero modes, NaN rules of min/max and compiler float flags cannot change a result.
#pragma once

#include <cstdint>

namespace nanscan {

enum class DType : uint8_t {
  kFloat16,
  kBFloat16,
  kFloat32,
  kFloat64,
  kFloat8E4M3FN,
  kFloat8E5M2,
  kFloat8E4M3FNUZ,
  kFloat8E5M2FNUZ,
};
constexpr int kDTypeCount = 8;

enum class Family : uint8_t {
  kIeee,  // exponent all ones: Inf and NaN
  kFn,    // no Inf; NaN is the largest magnitude of either sign
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
  static_assert(kExponentBits + kMantissaBits + 1 == kWidth, "sign, exponent and mantissa fill it");

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

  // The float64 bits of a finite value, by integer arithmetic alone (exact, and so independent of
  // denormals-are-zero).
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
template <>
struct FormatOf<DType::kFloat16> : FloatFormat<int16_t, 5, 10, 15, Family::kIeee> {};
template <>
struct FormatOf<DType::kBFloat16> : FloatFormat<int16_t, 8, 7, 127, Family::kIeee> {};
template <>
struct FormatOf<DType::kFloat32> : FloatFormat<int32_t, 8, 23, 127, Family::kIeee> {};
template <>
struct FormatOf<DType::kFloat64> : FloatFormat<int64_t, 11, 52, 1023, Family::kIeee> {};
template <>
struct FormatOf<DType::kFloat8E4M3FN> : FloatFormat<int8_t, 4, 3, 7, Family::kFn> {};
template <>
struct FormatOf<DType::kFloat8E5M2> : FloatFormat<int8_t, 5, 2, 15, Family::kIeee> {};
template <>
struct FormatOf<DType::kFloat8E4M3FNUZ> : FloatFormat<int8_t, 4, 3, 8, Family::kFnuz> {};
template <>
struct FormatOf<DType::kFloat8E5M2FNUZ> : FloatFormat<int8_t, 5, 2, 16, Family::kFnuz> {};

// Calls f with the FormatOf<dtype> that a run-time dtype names.
template <typename F>
constexpr auto with_format(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kFloat16:
      return f(FormatOf<DType::kFloat16>{});
    case DType::kBFloat16:
      return f(FormatOf<DType::kBFloat16>{});
    case DType::kFloat32:
      return f(FormatOf<DType::kFloat32>{});
    case DType::kFloat64:
      return f(FormatOf<DType::kFloat64>{});
    case DType::kFloat8E4M3FN:
      return f(FormatOf<DType::kFloat8E4M3FN>{});
    case DType::kFloat8E5M2:
      return f(FormatOf<DType::kFloat8E5M2>{});
    case DType::kFloat8E4M3FNUZ:
      return f(FormatOf<DType::kFloat8E4M3FNUZ>{});
    case DType::kFloat8E5M2FNUZ:
      break;
  }
  return f(FormatOf<DType::kFloat8E5M2FNUZ>{});
}

constexpr int item_size(DType dtype) {
  return with_format(dtype, [](auto format) { return decltype(format)::kWidth / 8; });
}

}  // namespace nanscan
