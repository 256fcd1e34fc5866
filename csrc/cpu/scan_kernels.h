// The CPU scan over flat memory, in two levels. Level 1 takes the min and max of a chunk's integer
// keys, which show any NaN or Inf. Only then level 2 scans the chunk again and counts.
//
// Compiled once for each instruction set. All is in an unnamed namespace, and no standard header
// with inline functions is included: so the linker cannot pick an AVX-512 copy of a shared function
// for an older machine.
#pragma once

#include "block_scan.h"

namespace nanscan::cpu {
namespace {

constexpr int kVectorBytes = NANSCAN_VECTOR_BYTES;
constexpr int kUnroll = 4;       // independent accumulators, to cover the latency of min and max
constexpr size_t kChunk = 4096;  // bytes of a chunk: still in L1 if level 2 needs it
// No software prefetch: on Zen 4 it lost 20 % of the bandwidth of DRAM at every distance tried.

template <typename Int, int kBytes = kVectorBytes>
struct VectorOf {
  typedef Int type __attribute__((vector_size(kBytes)));
};

constexpr size_t kDoubles = kVectorBytes / sizeof(double);
using Doubles = typename VectorOf<double>::type;
using Floats = typename VectorOf<float>::type;
using Words = typename VectorOf<int32_t>::type;

Floats as_floats(Words words) { return reinterpret_cast<Floats>(words); }
Words as_words(Floats floats) { return reinterpret_cast<Words>(floats); }

// Sums of one run. At most 128 / sizeof(Int) additions in a lane, 5 of the lanes, and one for each
// run lie between an element and the total: that many roundings bound the error.
struct Sums {
  Doubles sum[kUnroll] = {}, sumsq[kUnroll] = {};

  void add(int u, Doubles value) {
    sum[u] += value;
    sumsq[u] += value * value;
  }

  static double total(const Doubles (&v)[kUnroll]) {
    Doubles folded = (v[0] + v[1]) + (v[2] + v[3]);
    for (size_t width = kDoubles / 2; width > 0; width /= 2)
      for (size_t i = 0; i < width; ++i) folded[i] += folded[i + width];
    return folded[0];
  }

  void add_to(BlockTotals& t) const {
    t.sum += total(sum);
    t.sumsq += total(sumsq);
  }
};

// The float32 at p as doubles.
Doubles widen(const int32_t* p) {
  float values[kDoubles];
  __builtin_memcpy(values, p, sizeof values);
  double wide[kDoubles];  // GCC makes one instruction of this, but two of __builtin_convertvector
  for (size_t i = 0; i < kDoubles; ++i) wide[i] = values[i];
  Doubles result;
  __builtin_memcpy(&result, wide, sizeof result);
  return result;
}

// The same where some may be subnormal: exact also in a flush-to-zero mode, as float_bits below.
Doubles widen_subnormals(const int32_t* p) {
  using Wide = VectorOf<int64_t>::type;
  constexpr int64_t kRebias = int64_t{1023 - 127} << 52;
  VectorOf<int32_t, kVectorBytes / 2>::type bits;
  __builtin_memcpy(&bits, p, sizeof bits);
  const Wide wide = __builtin_convertvector(bits, Wide);
  const Doubles smallest = reinterpret_cast<Doubles>(Wide{} + (kRebias + (int64_t{1} << 52)));
  const Doubles biased = reinterpret_cast<Doubles>(((wide & INT32_MAX) << 29) + kRebias);
  const Doubles excess = biased - smallest;
  const Doubles magnitude = biased + (excess < 0 ? excess : Doubles{});
  return reinterpret_cast<Doubles>(reinterpret_cast<Wide>(magnitude) | (wide & INT64_MIN));
}

template <bool kSubnormals>
void add_sums(const int32_t* floats, size_t n, BlockTotals& t) {
  Sums sums;
  for (size_t i = 0; i < n; i += kUnroll * kDoubles) {
#pragma GCC unroll 4
    for (int u = 0; u < kUnroll; ++u) {
      const int32_t* p = floats + i + u * kDoubles;
      sums.add(u, kSubnormals ? widen_subnormals(p) : widen(p));
    }
  }
  sums.add_to(t);
}

template <typename Format>
struct Kernel {
  using Int = typename Format::Int;
  using Vector = typename VectorOf<Int>::type;
  static constexpr size_t kLanes = kVectorBytes / sizeof(Int);
  static constexpr size_t kChunkElements = kChunk / sizeof(Int);
  static constexpr size_t kStep = kUnroll * kLanes;
  static constexpr size_t kRun = 64 * kLanes;  // as many as the 8-bit counters of the lanes hold
  static_assert(kRun % kStep == 0 && 64 < 127, "a run fits the 8-bit counters");

  static Int load(const Int* p) {
    Int bits;
    __builtin_memcpy(&bits, p, sizeof bits);
    return bits;
  }

  static Vector load_bits(const Int* p) {
    Vector bits;
    __builtin_memcpy(&bits, p, sizeof bits);
    return bits;
  }

  static Vector keys(Vector bits) {
    if constexpr (Format::kFamily == Family::kFnuz) {
      const Vector negated = -(bits & Format::kHighest);
      const Vector key = bits < 0 ? negated : bits;
      return bits == Format::kLowest ? bits : key;
    } else if constexpr (sizeof(Int) == 1) {  // x86 shifts no bytes; comparing gives the same mask
      return bits ^ ((bits < 0) & Format::kHighest);
    } else {
      return bits ^ ((bits >> (Format::kWidth - 1)) & Format::kHighest);
    }
  }

  static Vector is_nonfinite(Vector bits) {
    if constexpr (Format::kFamily == Family::kFnuz) return bits == Format::kLowest;
    return (bits & Format::kHighest) > Format::kMaxFinite;
  }

  static void count(Vector& counters, Vector mask) {
#ifdef __AVX512BW__  // a masked add; elsewhere a true lane of a mask is -1
    counters = mask ? counters + 1 : counters;
#else
    counters -= mask;
#endif
  }

  static uint64_t total(Vector counters) {
    uint64_t result = 0;
    for (size_t i = 0; i < kLanes; ++i) result += counters[i];
    return result;
  }

  static Vector min(Vector a, Vector b) { return a < b ? a : b; }
  static Vector max(Vector a, Vector b) { return a > b ? a : b; }
  static Vector fill(Int value) { return Vector{} + value; }

  // Extremes of the keys so far. max starts at the lowest integer and min at the highest, which no
  // finite value has as key: so max shows whether there was a finite key.
  struct Extremes {
    Vector max[kUnroll], min[kUnroll];
  };

  static Int horizontal_max(const Vector (&v)[kUnroll]) {
    Vector m = max(max(v[0], v[1]), max(v[2], v[3]));
    Int result = m[0];
    for (size_t i = 1; i < kLanes; ++i) result = m[i] > result ? m[i] : result;
    return result;
  }

  static Int horizontal_min(const Vector (&v)[kUnroll]) {
    Vector m = min(min(v[0], v[1]), min(v[2], v[3]));
    Int result = m[0];
    for (size_t i = 1; i < kLanes; ++i) result = m[i] < result ? m[i] : result;
    return result;
  }

  static bool any(Vector mask) {
    typedef long long Words __attribute__((vector_size(kVectorBytes)));
    Words words;
    __builtin_memcpy(&words, &mask, sizeof words);
    long long folded = 0;
    for (int i = 0; i < kVectorBytes / 8; ++i) folded |= words[i];
    return folded != 0;
  }

  static bool shows_nonfinite(const Extremes& e) {
    const Vector high = max(max(e.max[0], e.max[1]), max(e.max[2], e.max[3]));
    const Vector low = min(min(e.min[0], e.min[1]), min(e.min[2], e.min[3]));
    return any((high > Format::kMaxFinite) | (low < Format::kMinFinite));
  }

  // Level 1. n is a multiple of kStep. If there is a NaN or Inf, returns false and leaves e as it
  // is.
  static bool scan_clean(const Int* p, size_t n, Extremes& e) {
    Extremes local = e;
    for (size_t i = 0; i < n; i += kStep) {
#pragma GCC unroll 4
      for (int u = 0; u < kUnroll; ++u) {
        const Vector key = keys(load_bits(p + i + u * kLanes));
        local.max[u] = max(local.max[u], key);
        local.min[u] = min(local.min[u], key);
      }
    }
    if (shows_nonfinite(local)) return false;
    e = local;
    return true;
  }

  // Level 2: counts every element, with masks and no branch.
  static void scan_exact(const Int* p, size_t n, Extremes& e, BlockTotals& t) {
    for (size_t begin = 0; begin < n; begin += kRun) {
      const size_t end = n - begin < kRun ? n : begin + kRun;
      Vector bad = {}, posinf = {}, neginf = {};
      for (size_t i = begin; i < end; i += kLanes) {
        const Vector bits = load_bits(p + i);
        const Vector key = keys(bits);
        const Vector nonfinite = is_nonfinite(bits);
        count(bad, nonfinite);
        if constexpr (Format::kHasInf) {
          count(posinf, key == Format::kPosInf);
          count(neginf, key == Format::kNegInf);
        }
        e.max[0] = max(e.max[0], nonfinite ? fill(Format::kLowest) : key);
        e.min[0] = min(e.min[0], nonfinite ? fill(Format::kHighest) : key);
      }
      const uint64_t bad_count = total(bad);
      const uint64_t posinf_count = total(posinf), neginf_count = total(neginf);
      t.nan += bad_count - posinf_count - neginf_count;
      t.posinf += posinf_count;
      t.neginf += neginf_count;
    }
  }

  struct Scalar {
    Int max = Format::kLowest, min = Format::kHighest;
  };

  static void scan_scalar(const Int* p, size_t n, Scalar& s, BlockTotals& t) {
    for (size_t i = 0; i < n; ++i) {
      const Int key = Format::key(load(p + i));
      if (Format::is_finite_key(key)) {
        s.max = key > s.max ? key : s.max;
        s.min = key < s.min ? key : s.min;
      } else if (Format::kHasInf && key == Format::kPosInf) {
        ++t.posinf;
      } else if (Format::kHasInf && key == Format::kNegInf) {
        ++t.neginf;
      } else {
        ++t.nan;
      }
    }
  }

  static void merge(Int max_key, Int min_key, BlockTotals& t) {
    if (max_key == Format::kLowest) return;  // never a finite key
    if (!t.has_finite || max_key > t.max_key) t.max_key = max_key;
    if (!t.has_finite || min_key < t.min_key) t.min_key = min_key;
    t.has_finite = 1;
  }

  // The elements before the next vector boundary: after them, no load touches two cache lines.
  static size_t head(const Int* p, size_t n) {
    const size_t misaligned = reinterpret_cast<uintptr_t>(p) % kVectorBytes;
    if (misaligned == 0 || misaligned % sizeof(Int) != 0) return 0;
    const size_t head = (kVectorBytes - misaligned) / sizeof(Int);
    return head < n ? head : n;
  }

  // Lane i of the 32-bit words holds one of the elements in its upper bits, 0 below.
  static Words element(Words words, int i) {
    if constexpr (sizeof(Int) == 4) return words;
    constexpr int32_t kUpper = static_cast<int32_t>(~uint32_t{0} << (32 - Format::kWidth));
    return (words << (i * Format::kWidth)) & kUpper;
  }

  // float32 bits of a finite value whose own bits are the upper ones of a lane. With its exponent
  // re-biased, a normal value is right. A subnormal one or 0, which is smallest * f, has become
  // smallest / 2 * (1 + f): it gets what it lacks of smallest once more. No operand is subnormal as
  // a float32, so a flush-to-zero mode changes nothing.
  static Words float_bits(Words upper) {
    if constexpr (Format::kExponentBits == 8) {
      return upper;
    } else {
      constexpr int32_t kRebias = (127 - Format::kBias) << 23;
      const Floats smallest = as_floats(Words{} + (kRebias + (1 << 23)));
      const Floats biased =
          as_floats(((upper & INT32_MAX) >> (8 - Format::kExponentBits)) + kRebias);
      const Floats excess = biased - smallest;
      const Words magnitude = as_words(biased + (excess < 0 ? excess : Floats{}));
      return magnitude | (upper & INT32_MIN);
    }
  }

  // Stages the elements as float32, NaN and Inf as 0, and counts zeros and subnormal values. n is a
  // multiple of kStep, and kRun at most.
  static void stage_floats(const Int* p, size_t n, int32_t* floats, BlockTotals& t) {
    Vector zeros = {}, subnormals = {};
    for (size_t i = 0; i < n; i += kLanes) {
      const Vector bits = load_bits(p + i);
      const Vector magnitude = bits & Format::kHighest;
      const Vector zero = (Format::kFamily == Family::kFnuz ? bits : magnitude) == 0;
      count(zeros, zero);
      count(subnormals, (magnitude < Format::kSmallestNormal) & (magnitude != 0));
      const Words words = reinterpret_cast<Words>(is_nonfinite(bits) ? Vector{} : bits);
      for (size_t j = 0; j < 4 / sizeof(Int); ++j) {
        const Words staged = float_bits(element(words, j));
        __builtin_memcpy(floats, &staged, sizeof staged);
        floats += kVectorBytes / 4;
      }
    }
    t.zeros += total(zeros);
    t.subnormals += total(subnormals);
  }

  // Adds the moments of n elements, a multiple of kStep.
  static void add_moments(const Int* p, size_t n, BlockTotals& t) {
    for (size_t begin = 0; begin < n; begin += kRun) {
      const size_t run = n - begin < kRun ? n - begin : kRun;
      if constexpr (Format::kWidth == 64) {
        add_doubles(p + begin, run, t);
      } else {
        alignas(64) int32_t floats[kRun];
        const uint64_t before = t.subnormals;
        stage_floats(p + begin, run, floats, t);
        if (Format::kExponentBits == 8 && t.subnormals > before)
          add_sums<true>(floats, run, t);
        else
          add_sums<false>(floats, run, t);
      }
    }
  }

  static void add_doubles(const Int* p, size_t n, BlockTotals& t) {
    Vector zeros = {}, subnormals = {};
    Sums sums;
    for (size_t i = 0; i < n; i += kStep) {
#pragma GCC unroll 4
      for (int u = 0; u < kUnroll; ++u) {
        const Vector bits = load_bits(p + i + u * kLanes);
        const Vector magnitude = bits & Format::kHighest;
        count(zeros, magnitude == 0);
        count(subnormals, (magnitude < Format::kSmallestNormal) & (magnitude != 0));
        sums.add(u, reinterpret_cast<Doubles>(is_nonfinite(bits) ? Vector{} : bits));
      }
    }
    sums.add_to(t);
    t.zeros += total(zeros);
    t.subnormals += total(subnormals);
  }

  // Adds the moments of fewer elements than kStep. They are padded with zeros.
  static void add_moments_of_rest(const Int* p, size_t n, BlockTotals& t) {
    if (n == 0) return;
    Int padded[kStep] = {};
    __builtin_memcpy(padded, p, n * sizeof(Int));
    add_moments(padded, kStep, t);
    t.zeros -= kStep - n;
  }

  template <bool kMoments>
  static void scan(const void* data, size_t n, BlockTotals* totals) {
    const Int* p = static_cast<const Int*>(data);
    BlockTotals& t = *totals;
    Scalar scalar;
    if (n >= kStep) {
      const size_t skip = head(p, n);
      scan_scalar(p, skip, scalar, t);
      if constexpr (kMoments) add_moments_of_rest(p, skip, t);
      p += skip;
      n -= skip;
      Extremes e;
      for (int u = 0; u < kUnroll; ++u) {
        e.max[u] = fill(Format::kLowest);
        e.min[u] = fill(Format::kHighest);
      }
      bool expect_clean = true;  // bad values come in groups: after one, start with level 2
      while (n >= kStep) {
        const size_t chunk = n < kChunkElements ? n / kStep * kStep : kChunkElements;
        if (!expect_clean || !scan_clean(p, chunk, e)) {
          const uint64_t before = t.nan + t.posinf + t.neginf;
          scan_exact(p, chunk, e, t);
          expect_clean = t.nan + t.posinf + t.neginf == before;
        }
        if constexpr (kMoments) add_moments(p, chunk, t);
        p += chunk;
        n -= chunk;
      }
      merge(horizontal_max(e.max), horizontal_min(e.min), t);
    }
    scan_scalar(p, n, scalar, t);
    if constexpr (kMoments) add_moments_of_rest(p, n, t);
    merge(scalar.max, scalar.min, t);
  }
};

// The read that benchmarks compare scans with: one OR for each load, in the chunks of a scan. Loads
// of 32 bytes read DRAM 10 to 15 % faster than those of 64 on Zen 4; in cache they are slower.
constexpr size_t kReadCached = size_t{16} << 20;
constexpr int kReadBytes = kVectorBytes < 32 ? kVectorBytes : 32;
typedef int64_t ReadVector __attribute__((vector_size(kReadBytes)));

template <typename Vector>
int64_t read_flat(const char* p, size_t n) {
  Vector folded[kUnroll] = {};
  size_t i = 0;
  for (; i + sizeof folded <= n; i += sizeof folded) {
#pragma GCC unroll 4
    for (int u = 0; u < kUnroll; ++u) {
      Vector words;
      __builtin_memcpy(&words, p + i + u * sizeof words, sizeof words);
      folded[u] |= words;
    }
  }
  int64_t result = 0;
  for (; i < n; ++i) result |= p[i];
  for (int u = 0; u < kUnroll; ++u)
    for (size_t j = 0; j < sizeof(Vector) / 8; ++j) result |= folded[u][j];
  return result;
}

// The result goes to max_key, so that the compiler keeps the loads.
void read(const void* data, size_t n, BlockTotals* totals) {
  const char* p = static_cast<const char*>(data);
  if (n < kReadCached) {
    totals->max_key |= read_flat<typename VectorOf<int64_t>::type>(p, n);
    return;
  }
  for (size_t i = 0; i < n; i += kChunk)
    totals->max_key |= read_flat<ReadVector>(p + i, n - i < kChunk ? n - i : kChunk);
}

}  // namespace
}  // namespace nanscan::cpu
