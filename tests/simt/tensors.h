// Tensors for the tests of the kernels: any layout and contents, each in memory of exactly its
// size, with NaNs wherever a scan has nothing to look for.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "oracle.h"
#include "simt.h"

namespace oracle {

class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}
  uint64_t bits() { return engine_(); }
  uint64_t below(uint64_t n) { return engine_() % n; }
  uint64_t between(uint64_t low, uint64_t high) { return low + below(high - low + 1); }
  bool one_in(uint64_t n) { return below(n) == 0; }
  template <typename T>
  const T& of(const std::vector<T>& items) {
    return items[below(items.size())];
  }

 private:
  std::mt19937_64 engine_;
};

struct Dim {
  uint64_t size;
  int64_t stride;  // in elements
};
using Dims = std::vector<Dim>;

enum class Contents {
  kFinite,  // all exponents alike
  kNarrow,  // of about one size, as data is
  kNanFirst,
  kNanMiddle,
  kNanLast,
  kPosInf,
  kNegInf,
  kSomeBad,
  kAnyBits,
  kAllNan,
  kAllBad,
  kZeros,
  kZerosOfOneSign,
  kOnePositiveZero,
  kOneNegativeZero,
  kSubnormals,
  kExtremes,
};
constexpr int kContents = 17;
constexpr const char* kContentsName[kContents] = {
    "finite",     "narrow",  "nan_first",         "nan_middle", "nan_last",
    "posinf",     "neginf",  "some_bad",          "any_bits",   "all_nan",
    "all_bad",    "zeros",   "zeros_of_one_sign", "one_+0",     "one_-0",
    "subnormals", "extremes"};

class Tensor {
 public:
  // The first element lies `skew` elements behind a multiple of 16 bytes.
  Tensor(const Format& format, Dims dims, uint64_t skew = 0)
      : format_(&format), dims_(std::move(dims)), skew_(skew) {
    uint64_t extent = 1;
    for (const Dim& dim : dims_) extent += (dim.size - 1) * dim.stride;
    // AddressSanitizer sees a read past the end by itself; elsewhere a NaN there shows one.
    const uint64_t guard = simt::under_asan() ? 0 : 64 / format.bytes;
    const uint64_t all = skew + extent + guard;
    memory_.reset(static_cast<char*>(malloc(all * format.bytes)));
    for (uint64_t i = 0; i < all; ++i) store(memory_.get() + i * format.bytes, a_nan());
  }

  const Format& format() const { return *format_; }
  const Dims& dims() const { return dims_; }
  const char* data() const { return memory_.get() + skew_ * format_->bytes; }

  uint64_t repeat() const {
    uint64_t product = 1;
    for (const Dim& dim : dims_)
      if (dim.stride == 0) product *= dim.size;
    return product;
  }
  uint64_t elements() const {
    uint64_t product = 1;
    for (const Dim& dim : dims_) product *= dim.size;
    return product;
  }
  bool is_row_major() const {
    int64_t expected = 1;
    for (size_t d = dims_.size(); d-- > 0; expected *= dims_[d].size)
      if (dims_[d].size != 1 && dims_[d].stride != expected) return false;
    return true;
  }

  // Calls f(row-major index, offset in elements) for every stored element, indices ascending; of
  // the elements that a stride of 0 makes of one, the first.
  template <typename F>
  void for_each(F f) const {
    std::vector<uint64_t> position(dims_.size());
    std::vector<uint64_t> weight(dims_.size());
    uint64_t product = 1;
    for (size_t d = dims_.size(); d-- > 0; product *= dims_[d].size) weight[d] = product;
    uint64_t index = 0;
    int64_t offset = 0;
    for (;;) {
      f(index, offset);
      size_t d = dims_.size();
      for (; d > 0; --d) {
        const Dim& dim = dims_[d - 1];
        if (dim.stride == 0) continue;
        index += weight[d - 1];
        offset += dim.stride;
        if (++position[d - 1] < dim.size) break;
        index -= weight[d - 1] * dim.size;
        offset -= dim.stride * dim.size;
        position[d - 1] = 0;
      }
      if (d == 0) return;
    }
  }

  // One scan of this tensor, into `row`.
  void expect(ExpectedRow& row, bool moments) const {
    const uint64_t times = repeat();
    for_each([&](uint64_t index, int64_t offset) {
      row.element(decode(*format_, load(data() + offset * format_->bytes)), index, times, moments);
    });
  }

  void fill(Contents contents, Random& random) {
    std::vector<int64_t> places;
    for_each([&](uint64_t, int64_t offset) { places.push_back(offset); });
    const auto set = [&](size_t i, uint64_t bits) {
      store(memory_.get() + (skew_ + places[i]) * format_->bytes, bits);
    };
    const auto set_all = [&](auto next) {
      for (size_t i = 0; i < places.size(); ++i) set(i, next());
    };
    const auto somewhere = [&] { return random.below(places.size()); };
    const uint64_t sign = format_->kind == Format::kFnuz ? 0 : format_->sign_bit();
    const uint64_t either = random.one_in(2) ? sign : 0;
    const uint64_t largest = format_->largest_finite();

    switch (contents) {
      case Contents::kAllNan:
        return set_all([&] { return nan(random); });
      case Contents::kAllBad:
        return set_all([&] { return bad(random); });
      case Contents::kAnyBits:
        return set_all([&] { return random.bits() & mask(); });
      case Contents::kZeros:
        return set_all([&] { return random.one_in(2) ? sign : 0; });
      case Contents::kZerosOfOneSign:
        return set_all([&] { return either; });
      case Contents::kOnePositiveZero:
        set_all([&] { return sign; });
        return set(somewhere(), 0);
      case Contents::kOneNegativeZero:
        set_all([&] { return 0; });
        return set(somewhere(), sign);
      case Contents::kSubnormals:
        return set_all([&] {
          const uint64_t signs = random.one_in(2) ? format_->sign_bit() : 0;
          return signs | random.between(1, format_->mantissa_ones());
        });
      case Contents::kExtremes:
        set_all([&] { return random.one_in(2) ? sign | 1 : 1; });
        set(somewhere(), largest);
        return set(somewhere(), format_->sign_bit() | largest);
      case Contents::kNarrow:  // an exponent of 0, give or take one, and one outlier
        set_all([&] {
          const uint64_t exponent = format_->bias - 1 + random.below(3);
          return (random.bits() & (format_->sign_bit() | format_->mantissa_ones())) |
                 exponent << format_->mantissa_bits;
        });
        return set(somewhere(), either | (largest - random.below(2)));
      default:
        break;
    }
    set_all([&] { return finite(random); });
    switch (contents) {
      case Contents::kNanFirst:
        return set(0, nan(random));
      case Contents::kNanMiddle:
        return set(places.size() / 2, nan(random));
      case Contents::kNanLast:
        return set(places.size() - 1, nan(random));
      case Contents::kPosInf:
        return set(somewhere(), infinity(false, random));
      case Contents::kNegInf:
        return set(somewhere(), infinity(true, random));
      case Contents::kSomeBad:
        for (uint64_t n = random.between(2, 2 + places.size() / 50); n > 0; --n)
          set(somewhere(), bad(random));
        return;
      default:
        return;
    }
  }

  // A NaN, an Inf or a -Inf at a place of the row-major order.
  void set_bad(uint64_t place, int kind, Random& random) {
    for_each([&](uint64_t index, int64_t offset) {
      if (index != place) return;
      store(memory_.get() + (skew_ + offset) * format_->bytes,
            kind == 0 ? nan(random) : infinity(kind == 2, random));
    });
  }

  std::string describe() const {
    std::string text = std::string(format_->name) + " [";
    for (const Dim& dim : dims_)
      text += (text.back() == '[' ? "" : ", ") + std::to_string(dim.size) + ":" +
              std::to_string(dim.stride);
    return text + "], " + std::to_string(skew_ * format_->bytes) + " bytes off alignment";
  }

 private:
  struct Free {
    void operator()(char* p) const { free(p); }
  };

  uint64_t mask() const { return format_->sign_bit() | (format_->sign_bit() - 1); }

  void store(char* p, uint64_t bits) const { memcpy(p, &bits, format_->bytes); }
  uint64_t load(const char* p) const {
    uint64_t bits = 0;
    memcpy(&bits, p, format_->bytes);
    return bits;
  }

  uint64_t a_nan() const {
    return format_->kind == Format::kFnuz ? format_->sign_bit() : mask() & ~format_->sign_bit();
  }
  uint64_t nan(Random& random) const {
    if (format_->kind == Format::kFnuz) return format_->sign_bit();
    const uint64_t sign = random.one_in(2) ? format_->sign_bit() : 0;
    if (format_->kind == Format::kFn) return sign | a_nan();
    return sign | (format_->infinity() + random.between(1, format_->mantissa_ones()));
  }
  uint64_t infinity(bool negative, Random& random) const {  // a NaN where there is none
    if (format_->kind != Format::kIeee) return nan(random);
    return (negative ? format_->sign_bit() : 0) | format_->infinity();
  }
  uint64_t bad(Random& random) const {
    return random.one_in(3) ? nan(random) : infinity(random.one_in(2), random);
  }
  uint64_t finite(Random& random) const {
    for (;;) {
      const uint64_t bits = random.bits() & mask();
      if (decode(*format_, bits).kind == Value::kFinite) return bits;
    }
  }

  const Format* format_;
  Dims dims_;
  uint64_t skew_;
  std::unique_ptr<char, Free> memory_;
};

// ---- layouts -----------------------------------------------------------------------------------

inline Dims flat(uint64_t n) { return {{n, 1}}; }

// Dense, in the memory order `order` (slowest first, numbers of dimensions), with `gap` elements
// left out after each step of the second fastest, and `spread` between elements.
inline Dims permuted(const std::vector<uint64_t>& sizes, const std::vector<size_t>& order,
                     int64_t gap = 0, int64_t spread = 1) {
  Dims dims(sizes.size());
  int64_t stride = spread;
  for (size_t i = order.size(); i-- > 0;) {
    dims[order[i]] = {sizes[order[i]], stride};
    stride *= sizes[order[i]];
    if (i + 1 == order.size()) stride += gap;
  }
  return dims;
}

inline Dims random_layout(Random& random, uint64_t most_elements) {
  const uint64_t n = random.between(1, 1 + random.below(most_elements));
  if (random.one_in(4)) return flat(n);
  if (random.one_in(12) && n > 3) {  // windows that overlap
    const uint64_t window = random.between(2, std::min<uint64_t>(n, 9));
    return {{n / window, 1}, {window, 1}};
  }
  std::vector<uint64_t> sizes(random.between(1, random.one_in(8) ? 9 : 4));
  uint64_t left = n;
  for (uint64_t& size : sizes) {
    size = random.one_in(5)
               ? 1
               : random.between(1, std::min<uint64_t>(left, random.one_in(3) ? left : 40));
    left = std::max<uint64_t>(left / size, 1);
  }
  std::vector<size_t> order(sizes.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::shuffle(sizes.begin(), sizes.end(), std::mt19937_64(random.bits()));
  if (!random.one_in(3)) std::shuffle(order.begin(), order.end(), std::mt19937_64(random.bits()));
  const int64_t gap = random.one_in(2)   ? 0
                      : random.one_in(2) ? 16 * random.below(3)
                                         : random.below(9);
  const int64_t spread = random.one_in(6) ? random.between(2, 5) : 1;
  Dims dims = permuted(sizes, order, gap, spread);
  for (Dim& dim : dims)  // expanded
    if (random.one_in(10)) dim.stride = 0;
  if (random.one_in(12))
    dims.insert(dims.begin() + random.below(dims.size() + 1),
                {uint64_t{1} << random.between(20, 30), 0});
  return dims;
}

}  // namespace oracle
