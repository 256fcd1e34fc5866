// What a row must say, found by plain arithmetic on every element: no key, mask or formula of the
// project is used, only the layout of its Row.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>

#include "float_format.h"
#include "row.h"

namespace oracle {

struct Format {
  const char* name;
  nanscan::DType dtype;
  int bytes, exponent_bits, mantissa_bits, bias;
  enum Kind { kIeee, kFn, kFnuz } kind;

  int exponent_ones() const { return (1 << exponent_bits) - 1; }
  uint64_t mantissa_ones() const { return (uint64_t{1} << mantissa_bits) - 1; }
  uint64_t sign_bit() const { return uint64_t{1} << (8 * bytes - 1); }
  uint64_t infinity() const { return uint64_t(exponent_ones()) << mantissa_bits; }  // kIeee
  uint64_t largest_finite() const {
    const uint64_t magnitudes = sign_bit() - 1;
    return kind == kIeee ? infinity() - 1 : kind == kFn ? magnitudes - 1 : magnitudes;
  }
};

constexpr Format kFormats[] = {
    {"float16", nanscan::DType::kFloat16, 2, 5, 10, 15, Format::kIeee},
    {"bfloat16", nanscan::DType::kBFloat16, 2, 8, 7, 127, Format::kIeee},
    {"float32", nanscan::DType::kFloat32, 4, 8, 23, 127, Format::kIeee},
    {"float64", nanscan::DType::kFloat64, 8, 11, 52, 1023, Format::kIeee},
    {"float8_e4m3fn", nanscan::DType::kFloat8E4M3FN, 1, 4, 3, 7, Format::kFn},
    {"float8_e5m2", nanscan::DType::kFloat8E5M2, 1, 5, 2, 15, Format::kIeee},
    {"float8_e4m3fnuz", nanscan::DType::kFloat8E4M3FNUZ, 1, 4, 3, 8, Format::kFnuz},
    {"float8_e5m2fnuz", nanscan::DType::kFloat8E5M2FNUZ, 1, 5, 2, 16, Format::kFnuz},
};

struct Value {
  enum Kind { kFinite, kNan, kPosInf, kNegInf } kind;
  double value;
  bool subnormal;
};

inline Value decode(const Format& format, uint64_t bits) {
  const bool negative = (bits & format.sign_bit()) != 0;
  const uint64_t mantissa = bits & format.mantissa_ones();
  const int exponent = int(bits >> format.mantissa_bits) & format.exponent_ones();
  const bool top = exponent == format.exponent_ones();
  if (format.kind == Format::kIeee && top) {
    if (mantissa != 0) return {Value::kNan, 0, false};
    return {negative ? Value::kNegInf : Value::kPosInf, 0, false};
  }
  if (format.kind == Format::kFn && top && mantissa == format.mantissa_ones())
    return {Value::kNan, 0, false};
  if (format.kind == Format::kFnuz && negative && exponent == 0 && mantissa == 0)
    return {Value::kNan, 0, false};
  const double magnitude =
      exponent == 0 ? std::ldexp(double(mantissa), 1 - format.bias - format.mantissa_bits)
                    : std::ldexp(double(mantissa) + std::ldexp(1.0, format.mantissa_bits),
                                 exponent - format.bias - format.mantissa_bits);
  return {Value::kFinite, negative ? -magnitude : magnitude, exponent == 0 && mantissa != 0};
}

// -0 is below +0.
inline bool is_above(double a, double b) {
  return a > b || (a == b && std::signbit(b) && !std::signbit(a));
}

// The unsigned number that Row documents for a value.
inline uint64_t key_of(double value) {
  uint64_t bits;
  memcpy(&bits, &value, sizeof bits);
  return std::signbit(value) ? ~bits : bits + (uint64_t{1} << 63);
}

// One row as it must be after what add() was told of.
class ExpectedRow {
 public:
  // An element of the scan that goes on, which stands for `repeat` elements. Indices come in order.
  void element(const Value& v, uint64_t index, uint64_t repeat, bool moments) {
    elements_ += repeat;
    nan_ += v.kind == Value::kNan ? repeat : 0;
    posinf_ += v.kind == Value::kPosInf ? repeat : 0;
    neginf_ += v.kind == Value::kNegInf ? repeat : 0;
    if (v.kind != Value::kFinite) {
      if (!scan_is_bad_) scan_first_bad_ = index;
      scan_is_bad_ = true;
      return;
    }
    if (!has_finite_ || is_above(v.value, max_)) max_ = v.value;
    if (!has_finite_ || is_above(min_, v.value)) min_ = v.value;
    has_finite_ = true;
    if (!moments) return;
    const auto value = static_cast<long double>(v.value), times = static_cast<long double>(repeat);
    sum_ += value * times;
    sum_of_magnitudes_ += std::fabs(value) * times;
    sumsq_ += value * value * times;
    zeros_ += v.value == 0 ? repeat : 0;
    subnormals_ += v.subnormal ? repeat : 0;
  }

  // Ends a scan. Returns whether it takes a ticket.
  bool end_scan() {
    ++calls_;
    const bool first = scan_is_bad_ && !is_bad_;
    if (first) {
      is_bad_ = true;
      first_bad_ = scan_first_bad_;
      first_bad_call_ = calls_;
    }
    scan_is_bad_ = false;
    return first;
  }

  void set_ticket(uint32_t ticket) { ticket_ = ticket; }

  // For scans that raced: takes over which of them was the row's first bad one.
  void forget_first_bad(const nanscan::Row& row) {
    first_bad_ = ~row.first_bad;
    first_bad_call_ = row.first_bad_call;
    ticket_ = row.ticket;
  }

  // Empty, or which fields are wrong.
  std::string differences(const nanscan::Row& row) const {
    Report report;
    report.compare("elements", row.elements, elements_);
    report.compare("nan", row.nan, nan_);
    report.compare("posinf", row.posinf, posinf_);
    report.compare("neginf", row.neginf, neginf_);
    report.compare("max_key", row.max_key, has_finite_ ? key_of(max_) : 0);
    report.compare("min_key", row.min_key, has_finite_ ? ~key_of(min_) : 0);
    report.compare("first_bad", row.first_bad, is_bad_ ? ~first_bad_ : 0);
    report.compare("calls", row.calls, calls_);
    report.compare("pending", static_cast<uint32_t>(row.pending), 0);
    report.compare("first_bad_call", row.first_bad_call, first_bad_call_);
    report.compare("ticket", row.ticket, ticket_);
    report.compare("zeros", row.zeros, zeros_);
    report.compare("subnormals", row.subnormals, subnormals_);
    // Sums of float64 at the end of its range depend on the order: no telling when they overflow.
    if (sum_of_magnitudes_ < kNoOverflow)
      report.compare_sum("sum", row.sum, sum_, sum_of_magnitudes_);
    if (sumsq_ < kNoOverflow)
      report.compare_sum("sumsq", row.sumsq, sumsq_, sumsq_);
    else if (!(row.sumsq >= 1e300))
      report.compare_sum("sumsq", row.sumsq, sumsq_, 0);
    return report.text;
  }

 private:
  static constexpr long double kNoOverflow = 1e307L;

  struct Report {
    std::string text;
    void compare(const char* field, uint64_t got, uint64_t expected) {
      if (got == expected) return;
      char line[128];
      snprintf(line, sizeof line, "\n  %s: expected 0x%llx, got 0x%llx", field,
               static_cast<unsigned long long>(expected), static_cast<unsigned long long>(got));
      text += line;
    }
    void compare_sum(const char* field, double got, long double expected, long double scale) {
      // 1e-307: products below the normal range lose digits.
      if (std::fabs(got - expected) <= scale * 1e-11L + 1e-307L) return;
      char line[128];
      snprintf(line, sizeof line, "\n  %s: expected %.17Lg, got %.17g", field, expected, got);
      text += line;
    }
  };

  uint64_t elements_ = 0, nan_ = 0, posinf_ = 0, neginf_ = 0;
  bool has_finite_ = false;
  double max_ = 0, min_ = 0;
  bool is_bad_ = false;
  uint64_t first_bad_ = 0;
  uint32_t calls_ = 0, first_bad_call_ = 0, ticket_ = 0;
  long double sum_ = 0, sum_of_magnitudes_ = 0, sumsq_ = 0;
  uint64_t zeros_ = 0, subnormals_ = 0;
  bool scan_is_bad_ = false;
  uint64_t scan_first_bad_ = 0;
};

}  // namespace oracle
