// The CUDA scan, and how it merges into a row. Compiled by nvcc, by NVRTC, and by g++ in
// tests/simt.
//
// Level 1 takes the min and max of the vectors that a thread holds in registers; they show any NaN
// or Inf. Only then level 2 reads these vectors again, from L1 or L2, and counts. The last block of
// a scan, found by a counter in the row, decides whether this call was the row's first bad one.
// Nothing here traps, asserts, allocates or prints.
#ifndef NANSCAN_CUDA_SCAN_KERNELS_CUH_
#define NANSCAN_CUDA_SCAN_KERNELS_CUH_

#include "scan_args.h"

#ifndef NANSCAN_SHARED
#define NANSCAN_SHARED(type, name) __shared__ type name
#endif

#ifndef NANSCAN_PACKED_MINMAX  // min.NaN and max.NaN on 16-bit pairs and on f32
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#define NANSCAN_PACKED_MINMAX 0
#else
#define NANSCAN_PACKED_MINMAX 1
#endif
#endif

namespace nanscan::cuda {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800  // 1024 threads a multiprocessor at most
constexpr int kFlatResident = 4;
#else
constexpr int kFlatResident = kFlatBlocksPerSm;
#endif

constexpr uint32_t kAllLanes = 0xffffffffu;
constexpr int kWarps = kThreads / 32;

// ---- memory ------------------------------------------------------------------------------------

// A read that leaves nothing in L1: the data is needed only once.
__device__ __forceinline__ uint4 load_streaming(const uint4* p) {
#ifdef __CUDA_ARCH__
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
#else
  return *p;
#endif
}

// The same where `wanted`, else zeros. Predicated: no load waits for another's data.
__device__ __forceinline__ uint4 load_streaming_if(bool wanted, const uint4* p) {
#ifdef __CUDA_ARCH__
  uint4 v;
  asm volatile(
      "{\n\t.reg .pred wanted;\n\tsetp.ne.u32 wanted, %5, 0;\n\t"
      "mov.u32 %0, 0;\n\tmov.u32 %1, 0;\n\tmov.u32 %2, 0;\n\tmov.u32 %3, 0;\n\t"
      "@wanted ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];\n\t}"
      : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
      : "l"(p), "r"(static_cast<uint32_t>(wanted)));
  return v;
#else
  return wanted ? *p : uint4{0, 0, 0, 0};
#endif
}

__device__ __forceinline__ uint64_t atomic_add(uint64_t* p, uint64_t value) {
  return atomicAdd(reinterpret_cast<unsigned long long*>(p),
                   static_cast<unsigned long long>(value));
}

__device__ __forceinline__ uint64_t atomic_exchange(uint64_t* p, uint64_t value) {
  return atomicExch(reinterpret_cast<unsigned long long*>(p),
                    static_cast<unsigned long long>(value));
}

__device__ __forceinline__ uint64_t atomic_compare_exchange(uint64_t* p, uint64_t expected,
                                                            uint64_t value) {
  return atomicCAS(reinterpret_cast<unsigned long long*>(p),
                   static_cast<unsigned long long>(expected),
                   static_cast<unsigned long long>(value));
}

__device__ __forceinline__ void atomic_max(uint64_t* p, uint64_t value) {
  atomicMax(reinterpret_cast<unsigned long long*>(p), static_cast<unsigned long long>(value));
}

// NOTES: `calls` and `pending` are one word, changed in one step. Its upper half, `pending`, holds
// the number of blocks that are counted in and not yet out (20 bits, below 0 while block 0 is
// late), and the number of open calls (12 bits): those counted since it was last 0. Block 0 of a
// call counts in all its blocks, and the call; each block counts itself out. So the blocks return
// to 0 in any order of them, also if several scans run into one row, and the block that brings them
// to 0 sees whether its call was the only one: else its number cannot be told, as scans of several
// streams have no order.
constexpr uint64_t kOneBlock = uint64_t{1} << 32;
constexpr uint64_t kOneOpenCall = uint64_t{1} << 52;

__device__ __forceinline__ bool no_blocks(uint64_t calls_and_pending) {
  return (calls_and_pending & (kOneOpenCall - kOneBlock)) == 0;
}

__device__ __forceinline__ uint64_t* calls_and_pending(Row* row) {
  return reinterpret_cast<uint64_t*>(&row->calls);
}

// Called when no block was left, and the word was `seen`: no call is open now. If another scan has
// begun, its last block closes all of them. Returns whether none has.
__device__ inline bool close_calls(Row* row, const uint64_t seen) {
  uint64_t current = seen;
  for (;;) {
    const uint64_t closed = current & (kOneOpenCall - 1);
    const uint64_t found = atomic_compare_exchange(calls_and_pending(row), current, closed);
    if (found == current) return current == seen;
    if (!no_blocks(found)) return false;
    current = found;
  }
}

// Whether no other scan into the row runs: asked by a scan of one block.
__device__ __forceinline__ bool runs_alone(Row* row) {
#ifdef __CUDA_ARCH__
  return no_blocks(*static_cast<const volatile uint64_t*>(calls_and_pending(row)));
#else
  return no_blocks(__atomic_load_n(calls_and_pending(row), __ATOMIC_RELAXED));
#endif
}

// Whether the row went bad in an earlier scan. Other blocks or streams may set it at the same time.
__device__ __forceinline__ bool has_ticket(const Row* row) {
#ifdef __CUDA_ARCH__
  return *static_cast<const volatile uint32_t*>(&row->ticket) != 0;
#else
  return __atomic_load_n(&row->ticket, __ATOMIC_RELAXED) != 0;
#endif
}

template <typename To, typename From>
__device__ __forceinline__ To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "a bit cast keeps the size");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

// ---- level 1 -----------------------------------------------------------------------------------

// The type of one key: at least as wide as a register.
template <typename Format>
struct KeyOf {
  using type = int32_t;
};
template <>
struct KeyOf<FormatOf<DType::kFloat64>> {
  using type = int64_t;
};

// Extremes as signed integer keys, for any format and architecture. An element narrower than a
// register is shifted to the top of it; the bits below do not change the order.
template <typename Format>
struct IntegerLanes {
  using Int = typename Format::Int;
  using Key = typename KeyOf<Format>::type;
  static constexpr int kTop = 8 * sizeof(Key) - Format::kWidth;
  static constexpr int kPerWord = 4 / sizeof(Int) > 0 ? 4 / sizeof(Int) : 1;

  Key max_top = static_cast<Key>(uint64_t{1} << (8 * sizeof(Key) - 1));
  Key min_top = static_cast<Key>(~(uint64_t{1} << (8 * sizeof(Key) - 1)));

  __device__ __forceinline__ void add(Key top) {
    max_top = top > max_top ? top : max_top;
    min_top = top < min_top ? top : min_top;
  }

  __device__ __forceinline__ static uint32_t keys_of_word(uint32_t word) {
    constexpr uint32_t kSigns = Format::kWidth == 8    ? 0x01010101u
                                : Format::kWidth == 16 ? 0x00010001u
                                                       : 1u;
    constexpr uint32_t kMagnitude =
        static_cast<uint32_t>((uint64_t{1} << (Format::kWidth - 1)) - 1);
    return word ^ ((word >> (Format::kWidth - 1)) & kSigns) * kMagnitude;
  }

  __device__ __forceinline__ void fold_word(uint32_t word) {
    if constexpr (Format::kFamily == Family::kFnuz) {  // the only NaN has the bits of -0
#pragma unroll
      for (int i = 0; i < kPerWord; ++i) {
        const Key key = Format::key(static_cast<Int>(word >> (i * Format::kWidth)));
        add(static_cast<Key>(static_cast<uint32_t>(key) << kTop));
      }
    } else {
      const uint32_t keys = keys_of_word(word);
#pragma unroll
      for (int i = 0; i < kPerWord; ++i) add(static_cast<Key>(keys << (i * Format::kWidth)));
    }
  }

  __device__ __forceinline__ void fold(const uint4& v) {
    if constexpr (Format::kWidth == 64) {
      add(Format::key(static_cast<Int>(v.x | static_cast<uint64_t>(v.y) << 32)));
      add(Format::key(static_cast<Int>(v.z | static_cast<uint64_t>(v.w) << 32)));
    } else {
      fold_word(v.x);
      fold_word(v.y);
      fold_word(v.z);
      fold_word(v.w);
    }
  }

  __device__ __forceinline__ void start(const uint4& v) {
    *this = IntegerLanes();
    fold(v);
  }

  __device__ __forceinline__ void merge(const IntegerLanes& other) {
    add(other.max_top);
    add(other.min_top);
  }

  // Without any element: below every finite key, and above every one.
  __device__ __forceinline__ Key max_key() const { return max_top >> kTop; }
  __device__ __forceinline__ Key min_key() const { return min_top >> kTop; }

  __device__ __forceinline__ bool shows_nonfinite() const {
    return max_key() > Format::kMaxFinite || min_key() < Format::kMinFinite;
  }
};

// Extremes by the floating-point instructions min.NaN and max.NaN, from sm_80 on: they propagate a
// NaN, order -0 below +0, and keep subnormals. 16-bit formats are taken two at a time.
template <typename Format>
struct FloatLanes {
  using Int = typename Format::Int;
  using Key = int32_t;
  static constexpr bool kPair = Format::kWidth == 16;
  static constexpr uint32_t kSign = kPair ? 0x80008000u : 0x80000000u;
  static constexpr uint32_t kBoth = kPair ? 0x00010001u : 1u;
  static constexpr uint32_t kPosInf = static_cast<uint32_t>(Format::kPosInf) * kBoth;
  // Carries into the sign bit exactly when the exponent is all ones.
  static constexpr uint32_t kToSign = (static_cast<uint32_t>(uint64_t{1} << (Format::kWidth - 1)) -
                                       static_cast<uint32_t>(Format::kPosInf)) *
                                      kBoth;

  uint32_t min_word = kPosInf;
  uint32_t max_word = kPosInf | kSign;

  template <bool kMax>
  __device__ __forceinline__ static uint32_t pick(uint32_t a, uint32_t b) {
#ifdef __CUDA_ARCH__
    uint32_t r;
    if constexpr (!kPair) {
      float f;
      if constexpr (kMax)
        asm("max.NaN.f32 %0, %1, %2;" : "=f"(f) : "f"(__uint_as_float(a)), "f"(__uint_as_float(b)));
      else
        asm("min.NaN.f32 %0, %1, %2;" : "=f"(f) : "f"(__uint_as_float(a)), "f"(__uint_as_float(b)));
      r = __float_as_uint(f);
    } else if constexpr (Format::kExponentBits == 5) {
      if constexpr (kMax)
        asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
      else
        asm("min.NaN.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    } else {
      if constexpr (kMax)
        asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
      else
        asm("min.NaN.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    }
    return r;
#else  // these instructions, as the PTX ISA defines them
    uint32_t r = 0;
    for (int shift = 0; shift < 32; shift += Format::kWidth) {
      const Int x = static_cast<Int>(a >> shift), y = static_cast<Int>(b >> shift);
      const bool nan =
          (x & Format::kHighest) > Format::kPosInf || (y & Format::kHighest) > Format::kPosInf;
      const bool first = kMax == (Format::key(x) > Format::key(y));
      const Int chosen = nan ? Format::kHighest : first ? x : y;
      r |= (static_cast<uint32_t>(chosen) & (kPair ? 0xffffu : 0xffffffffu)) << shift;
    }
    return r;
#endif
  }

  __device__ __forceinline__ void fold_word(uint32_t word) {
    min_word = pick<false>(min_word, word);
    max_word = pick<true>(max_word, word);
  }

  __device__ __forceinline__ void fold(const uint4& v) {
    fold_word(v.x);
    fold_word(v.y);
    fold_word(v.z);
    fold_word(v.w);
  }

  __device__ __forceinline__ void start(const uint4& v) {
    min_word = max_word = v.x;
    fold_word(v.y);
    fold_word(v.z);
    fold_word(v.w);
  }

  __device__ __forceinline__ void merge(const FloatLanes& other) {
    min_word = pick<false>(min_word, other.min_word);
    max_word = pick<true>(max_word, other.max_word);
  }

  __device__ __forceinline__ bool shows_nonfinite() const {
    return ((((min_word & ~kSign) + kToSign) | ((max_word & ~kSign) + kToSign)) & kSign) != 0;
  }

  __device__ __forceinline__ Key max_key() const {
    const Key key = Format::key(static_cast<Int>(max_word));
    if constexpr (!kPair) return key;
    const Key high = Format::key(static_cast<Int>(max_word >> 16));
    return high > key ? high : key;
  }

  __device__ __forceinline__ Key min_key() const {
    const Key key = Format::key(static_cast<Int>(min_word));
    if constexpr (!kPair) return key;
    const Key high = Format::key(static_cast<Int>(min_word >> 16));
    return high < key ? high : key;
  }
};

// Extremes of 8-bit formats: a byte is compared as the upper byte of a bfloat16. A word has its odd
// bytes there, and shifted by 8 its even ones. The byte below only breaks ties, or makes a bfloat16
// NaN of 0x7f or 0xff: a NaN as 0x7fff, whose upper byte is a NaN of these formats too. In fnuz
// formats 0x7f and 0xff are finite, so there the byte below is cleared; and their only NaN, 0x80,
// is no extreme, so it is looked for by itself.
template <typename Format>
struct ByteLanes {
  using Pair = FloatLanes<FormatOf<DType::kBFloat16>>;
  using Key = int32_t;
  static constexpr bool kFnuz = Format::kFamily == Family::kFnuz;
  // Carries into the sign bit exactly when the upper byte is not finite.
  static constexpr uint32_t kToSign = (0x8000u - ((Format::kMaxFinite + 1u) << 8)) * 0x00010001u;

  Pair pair;
  uint32_t nan_signs = 0;  // fnuz: the sign bits of NaNs; other bits mean nothing

  __device__ __forceinline__ void fold_word(uint32_t word) {
    if constexpr (kFnuz) {
      nan_signs |= word & ~((word & 0x7f7f7f7fu) + 0x7f7f7f7fu);
      pair.fold_word(word & 0xff00ff00u);
      pair.fold_word((word << 8) & 0xff00ff00u);
    } else {
      pair.fold_word(word);
      pair.fold_word(word << 8);
    }
  }

  __device__ __forceinline__ void fold(const uint4& v) {
    fold_word(v.x);
    fold_word(v.y);
    fold_word(v.z);
    fold_word(v.w);
  }

  __device__ __forceinline__ void start(const uint4& v) {
    pair.min_word = pair.max_word = kFnuz ? v.x & 0xff00ff00u : v.x;
    nan_signs = 0;
    fold(v);
  }

  __device__ __forceinline__ void merge(const ByteLanes& other) {
    pair.merge(other.pair);
    nan_signs |= other.nan_signs;
  }

  __device__ __forceinline__ bool shows_nonfinite() const {
    if constexpr (kFnuz) return (nan_signs & 0x80808080u) != 0;
    return ((((pair.min_word & ~Pair::kSign) + kToSign) |
             ((pair.max_word & ~Pair::kSign) + kToSign)) &
            Pair::kSign) != 0;
  }

  // Of a bfloat16 pattern. Without any element these are infinities: the key of -Inf is below every
  // finite one.
  __device__ __forceinline__ static Key key(uint32_t half) {
    const Key bits = static_cast<int16_t>(half);
    return (bits >= 0 ? bits : kFnuz ? -(bits & 0x7fff) : ~(bits & 0x7fff)) >> 8;
  }

  __device__ __forceinline__ Key max_key() const {
    const Key low = key(pair.max_word), high = key(pair.max_word >> 16);
    return high > low ? high : low;
  }

  __device__ __forceinline__ Key min_key() const {
    const Key low = key(pair.min_word), high = key(pair.min_word >> 16);
    return high < low ? high : low;
  }
};

// On packed min and max if the hardware has them.
template <typename Format, int kWidth>
struct LanesOf {
  using type = IntegerLanes<Format>;
};
#if NANSCAN_PACKED_MINMAX
template <typename Format>
struct LanesOf<Format, 8> {
  using type = ByteLanes<Format>;
};
template <typename Format>
struct LanesOf<Format, 16> {
  using type = FloatLanes<Format>;
};
template <typename Format>
struct LanesOf<Format, 32> {
  using type = FloatLanes<Format>;
};
#endif
template <typename Format>
using Lanes = typename LanesOf<Format, Format::kWidth>::type;

// ---- level 2 -----------------------------------------------------------------------------------

template <typename Format>
__device__ __forceinline__ double to_double(typename Format::Int bits) {
  if constexpr (Format::kWidth == 64) {
    return bit_cast<double>(bits);
  } else if constexpr (Format::kWidth == 32) {
    return bit_cast<float>(bits);
  } else if constexpr (Format::kExponentBits == 8) {
    return bit_cast<float>(static_cast<uint32_t>(bits) << 16);
  } else {
#ifdef __CUDA_ARCH__
    if constexpr (Format::kWidth == 16) {
      float value;
      asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
      return value;
    }
#endif
    return bit_cast<double>(Format::float64_bits(Format::key(bits)));
  }
}

// Divides n and returns the remainder. 64-bit division is a long subroutine, so 32-bit division is
// used if possible.
__device__ __forceinline__ uint64_t divide(uint64_t& n, uint64_t divisor) {
  if ((n | divisor) >> 32 == 0) {
    const uint32_t dividend = static_cast<uint32_t>(n);
    n = dividend / static_cast<uint32_t>(divisor);
    return dividend % static_cast<uint32_t>(divisor);
  }
  const uint64_t rest = n % divisor;
  n /= divisor;
  return rest;
}

// The row-major index of an element, from its position in walk order.
struct SameIndex {
  __device__ __forceinline__ bool is_free() const { return true; }
  __device__ __forceinline__ uint64_t operator()(uint64_t place) const { return place; }
};

struct MappedIndex {
  const IndexDim* dims;  // slowest first
  uint32_t count;        // 0: both orders are the same
  __device__ __forceinline__ bool is_free() const { return count == 0; }
  __device__ __forceinline__ uint64_t operator()(uint64_t place) const {
    if (count == 0) return place;
    uint64_t index = 0;
#pragma unroll 1
    for (uint32_t d = count - 1; d > 0; --d) index += divide(place, dims[d].size) * dims[d].weight;
    return index + place * dims[0].weight;
  }
};

// The counts of a thread, then of a warp, then of a block.
template <bool kMoments>
struct Totals {
  uint64_t max_key = 0, min_key = 0;  // as in Row
  uint64_t first = 0;                 // ~(row-major index) of the first non-finite element
  uint32_t nan = 0, posinf = 0, neginf = 0;
  uint32_t zeros = 0, subnormals = 0;
  double sum = 0, sumsq = 0;

  __device__ __forceinline__ void merge(const Totals& other) {
    max_key = other.max_key > max_key ? other.max_key : max_key;
    min_key = other.min_key > min_key ? other.min_key : min_key;
    first = other.first > first ? other.first : first;
    nan += other.nan;
    posinf += other.posinf;
    neginf += other.neginf;
    if constexpr (kMoments) {
      zeros += other.zeros;
      subnormals += other.subnormals;
      sum += other.sum;
      sumsq += other.sumsq;
    }
  }

  // Of the lane `distance` away. Counts are moved only where a lane of the warp has some.
  __device__ __forceinline__ Totals from_lane(int distance, bool warp_is_bad) const {
    Totals other;
    other.max_key = __shfl_xor_sync(kAllLanes, max_key, distance);
    other.min_key = __shfl_xor_sync(kAllLanes, min_key, distance);
    if (warp_is_bad) {
      other.first = __shfl_xor_sync(kAllLanes, first, distance);
      other.nan = __shfl_xor_sync(kAllLanes, nan, distance);
      other.posinf = __shfl_xor_sync(kAllLanes, posinf, distance);
      other.neginf = __shfl_xor_sync(kAllLanes, neginf, distance);
    }
    if constexpr (kMoments) {
      other.zeros = __shfl_xor_sync(kAllLanes, zeros, distance);
      other.subnormals = __shfl_xor_sync(kAllLanes, subnormals, distance);
      other.sum = __shfl_xor_sync(kAllLanes, sum, distance);
      other.sumsq = __shfl_xor_sync(kAllLanes, sumsq, distance);
    }
    return other;
  }

  __device__ __forceinline__ void merge_warp() {
    const bool warp_is_bad = __any_sync(kAllLanes, (nan | posinf | neginf) != 0);
#pragma unroll 1
    for (int distance = 16; distance > 0; distance /= 2) merge(from_lane(distance, warp_is_bad));
  }
};

// The same while a thread scans, with its extremes as keys of the format.
template <typename Format, bool kMoments>
struct Found {
  using Int = typename Format::Int;
  using Key = typename KeyOf<Format>::type;

  Key max = Format::kLowest, min = Format::kHighest;  // of finite keys; none such: not finite
  Totals<kMoments> totals;

  __device__ __forceinline__ void add_key(Key key_max, Key key_min) {
    max = key_max > max ? key_max : max;
    min = key_min < min ? key_min : min;
  }

  template <typename Index>
  __device__ __forceinline__ void element(Int bits, uint64_t place, const Index& index,
                                          const Row* row) {
    const Int key = Format::key(bits);
    if (!Format::is_finite_key(key)) {
      const bool positive = Format::kHasInf && key == Format::kPosInf;
      const bool negative = Format::kHasInf && key == Format::kNegInf;
      totals.posinf += positive;
      totals.neginf += negative;
      totals.nan += !positive && !negative;
      if (index.is_free() || !has_ticket(row)) {  // else it is not needed, and costs divisions
        const uint64_t complement = ~index(place);
        totals.first = complement > totals.first ? complement : totals.first;
      }
      return;
    }
    add_key(key, key);
    if constexpr (kMoments) {
      const double value = to_double<Format>(bits);
      totals.sum += value;
      totals.sumsq += value * value;
      const Int magnitude = Format::magnitude(key);
      totals.zeros += magnitude == 0;
      totals.subnormals += magnitude != 0 && magnitude < Format::kSmallestNormal;
    }
  }

  __device__ __forceinline__ const Totals<kMoments>& result() {
    if (Format::is_finite_key(static_cast<Int>(max))) {
      totals.max_key = order_key(Format::float64_bits(static_cast<Int>(max)));
      totals.min_key = ~order_key(Format::float64_bits(static_cast<Int>(min)));
    }
    return totals;
  }
};

// ---- the row -----------------------------------------------------------------------------------

// A scan, without the description of its memory.
struct Call {
  Row* row;
  uint32_t* tickets;
  uint64_t elements, repeat;
  uint32_t block, blocks;  // of this tensor
  bool mirrored;
};

// Writes the result to host memory and resets the row.
__device__ inline void send_to_mirror(Row* row) {
  volatile uint64_t* mirror = reinterpret_cast<volatile uint64_t*>(row->mirror);
  const uint64_t* source = reinterpret_cast<const uint64_t*>(row);
  for (int i = 0; i < kResultWords; ++i) mirror[i] = source[i];
  Row empty{};
  empty.mirror = row->mirror;
  *row = empty;
  __threadfence_system();  // before the host may use the row again, on any stream
  mirror[kArrivedWord] = 1;
}

// Called when no block was left. `first_bad` is of the calls since this was last so; `call` is 0 if
// they were several.
__device__ inline void conclude(Row* row, uint32_t* tickets, uint64_t first_bad, uint32_t call) {
  if (first_bad == 0 || has_ticket(row)) return;
  uint32_t ticket = atomicAdd(tickets, 1u) + 1;
  if (ticket == 0) ticket = atomicAdd(tickets, 1u) + 1;  // 0 means "none", also after 2^32 of them
  if (atomicCAS(&row->ticket, 0u, ticket) != 0) return;  // another stream also scans into this row
  row->first_bad = first_bad;
  row->first_bad_call = call;
}

// Merges the counts of a block into the row. One thread of each block calls this. `alone`: the scan
// has one block, and found no other scan running into its row.
template <bool kMoments>
__device__ inline void publish(const Totals<kMoments>& found, const Call& call, bool alone) {
  Row* row = call.row;
  if (found.max_key) {
    atomic_max(&row->max_key, found.max_key);
    atomic_max(&row->min_key, found.min_key);
  }
  if (found.nan) atomic_add(&row->nan, found.nan * call.repeat);
  if (found.posinf) atomic_add(&row->posinf, found.posinf * call.repeat);
  if (found.neginf) atomic_add(&row->neginf, found.neginf * call.repeat);
  if constexpr (kMoments) {
    atomicAdd(&row->sum, found.sum * static_cast<double>(call.repeat));
    atomicAdd(&row->sumsq, found.sumsq * static_cast<double>(call.repeat));
    if (found.zeros) atomic_add(&row->zeros, found.zeros * call.repeat);
    if (found.subnormals) atomic_add(&row->subnormals, found.subnormals * call.repeat);
  }
  if (call.block == 0) atomic_add(&row->elements, call.elements);

  if (alone && !found.first && !call.mirrored) {  // nobody waits for this block, nor it for others
    atomic_add(calls_and_pending(row), 1);
    return;
  }
  uint64_t change = 0 - kOneBlock;
  if (call.block == 0) change += call.blocks * kOneBlock + kOneOpenCall + 1;
  if (found.first) atomic_max(&row->call_first_bad, found.first);
  if (found.first || call.mirrored) __threadfence();  // before this block is counted out
  const uint64_t after = atomic_add(calls_and_pending(row), change) + change;
  if (!no_blocks(after)) return;
  __threadfence();  // what the others wrote
  uint64_t first_bad = row->call_first_bad;
  if (first_bad) {
    first_bad = atomic_exchange(&row->call_first_bad, 0);
    __threadfence();  // before a call that begins now could be taken for this one
  }
  const bool only_call = close_calls(row, after) && after / kOneOpenCall == 1;
  conclude(row, call.tickets, first_bad, only_call ? static_cast<uint32_t>(after) : 0);
  if (!call.mirrored) return;
  __threadfence();
  send_to_mirror(row);
}

// The end of a block: every thread calls this once.
template <bool kMoments>
__device__ inline void finish(Totals<kMoments> found, const Call& call) {
  struct Warps {
    alignas(Totals<kMoments>) unsigned char of[kWarps][sizeof(Totals<kMoments>)];
  };
  NANSCAN_SHARED(Warps, warps);  // as bytes: shared memory has no constructors
  // Read here, so that what follows hides the latency.
  const bool alone = threadIdx.x == 0 && call.blocks == 1 && runs_alone(call.row);
  found.merge_warp();
  if (threadIdx.x % 32 == 0) memcpy(warps.of[threadIdx.x / 32], &found, sizeof found);
  __syncthreads();
  if (threadIdx.x != 0) return;
#pragma unroll 1
  for (int i = 1; i < kWarps; ++i) {
    Totals<kMoments> other;
    memcpy(&other, warps.of[i], sizeof other);
    found.merge(other);
  }
  publish(found, call, alone);
}

// ---- flat memory -------------------------------------------------------------------------------

// Elements in walk order: elements[0] has the position `place`.
template <typename Format>
struct Run {
  using Int = typename Format::Int;
  const Int* elements;
  uint64_t place;

  __device__ __forceinline__ uint64_t place_of(const Int* p) const {
    return place + static_cast<uint64_t>(p - elements);
  }
};

// Scans up to kLoads vectors of one thread: the first is at `p`, the others `step` apart, and
// `valid` of them exist. Level 1, then level 2 if need be.
template <typename Format, bool kMoments, typename Index>
__device__ __forceinline__ void scan_vectors(const uint4* p, uint64_t step, int valid,
                                             const Run<Format>& run, const Index& index,
                                             const Row* row, Lanes<Format>& lanes,
                                             Found<Format, kMoments>& found) {
  using Int = typename Format::Int;
  if constexpr (!kMoments) {  // moments need each element anyway
    uint4 v[kLoads];
    v[0] = load_streaming(p);
#pragma unroll
    for (int j = 1; j < kLoads; ++j) v[j] = load_streaming_if(j < valid, p + j * step);
#pragma unroll
    for (int j = 1; j < kLoads; ++j) v[j] = j < valid ? v[j] : v[0];
    Lanes<Format> tile;
    tile.start(v[0]);
#pragma unroll
    for (int j = 1; j < kLoads; ++j) tile.fold(v[j]);
    if (!tile.shows_nonfinite()) {
      lanes.merge(tile);
      return;
    }
  }
// Element by element. Not unrolled: that would take most of the compile time.
#pragma unroll 1
  for (; valid > 0; --valid, p += step) {
    const Int* const elements = reinterpret_cast<const Int*>(p);
#pragma unroll 1
    for (int i = 0; i < kLoadBytes / static_cast<int>(sizeof(Int)); ++i)
      found.element(elements[i], run.place_of(elements + i), index, row);
  }
}

// The counts of one thread of block `call.block` of `call.blocks`. Memory is read in vectors of 16
// bytes, aligned; block 0 also takes the elements before the first and after the last vector.
template <typename Format, bool kMoments, typename Index>
__device__ __forceinline__ Totals<kMoments> scan_flat(const void* data, uint64_t count,
                                                      const Index& index, const Call& call) {
  using Int = typename Format::Int;
  constexpr uint32_t kPerVector = kLoadBytes / sizeof(Int);
  Lanes<Format> lanes;
  Found<Format, kMoments> found;

  const Run<Format> run{static_cast<const Int*>(data), 0};
  const uint32_t skew = static_cast<uint32_t>(reinterpret_cast<uint64_t>(data)) % kLoadBytes;
  uint64_t head = skew == 0 ? 0 : (kLoadBytes - skew) / sizeof(Int);
  if (head > count) head = count;
  const uint4* p = reinterpret_cast<const uint4*>(run.elements + head);
  uint64_t left = (count - head) / kPerVector;
  const uint64_t behind = head + left * kPerVector;

  const uint64_t round = uint64_t{call.blocks} * (kThreads * kLoads);
  const uint64_t mine = uint64_t{call.block} * (kThreads * kLoads) + threadIdx.x;
  for (p += mine; left >= round; left -= round, p += round)
    scan_vectors<Format, kMoments>(p, kThreads, kLoads, run, index, call.row, lanes, found);
  p -= mine;

  // The rest, less than a round, is divided among all blocks.
  const uint64_t i = uint64_t{call.block} * kThreads + threadIdx.x;
  if (i < left) {
    const uint64_t step = uint64_t{call.blocks} * kThreads;
    int valid = 1;
    while (valid < kLoads && i + valid * step < left) ++valid;
    scan_vectors<Format, kMoments>(p + i, step, valid, run, index, call.row, lanes, found);
  }

  if (call.block == 0) {
    uint64_t place = count;
    if (threadIdx.x < head) place = threadIdx.x;
    if (threadIdx.x >= 32) place = behind + threadIdx.x - 32;
    if (place < count) found.element(run.elements[place], place, index, call.row);
  }
  found.add_key(lanes.max_key(), lanes.min_key());
  return found.result();
}

template <typename Format>
__device__ __forceinline__ void run_flat(const FlatScan& scan) {
  const Call call{scan.row, scan.tickets, scan.count, 1, blockIdx.x, gridDim.x, scan.mirrored != 0};
  finish(scan_flat<Format, false>(scan.data, scan.count, SameIndex{}, call), call);
}

// ---- any other layout --------------------------------------------------------------------------

template <typename Format, bool kMoments>
__device__ __forceinline__ void scan_strided(const StridedScan& scan) {
  using Int = typename Format::Int;
  constexpr uint32_t kPerVector = kLoadBytes / sizeof(Int);
  const Call call{scan.row,   scan.tickets, scan.elements,     scan.repeat,
                  blockIdx.x, gridDim.x,    scan.mirrored != 0};
  const MappedIndex index{scan.index, scan.index_count};
  Lanes<Format> lanes;
  Found<Format, kMoments> found;

  const uint64_t thread = uint64_t{blockIdx.x} * kThreads + threadIdx.x;
  const uint32_t lane = static_cast<uint32_t>(thread) & (scan.lanes - 1);
  const uint64_t groups = uint64_t{gridDim.x} * kThreads / scan.lanes;
  for (uint64_t unit = thread / scan.lanes; unit < scan.units; unit += groups) {
    uint64_t outer = unit;
    const uint64_t piece = scan.pieces == 1 ? 0 : divide(outer, scan.pieces);
    const uint64_t place = outer * scan.run;
    int64_t offset = 0;
    for (uint32_t d = scan.outer_count; d > 0; --d) {
      const WalkDim& dim = scan.outer[d - 1];
      offset += static_cast<int64_t>(d > 1 ? divide(outer, dim.size) : outer) * dim.stride;
    }
    const Run<Format> run{static_cast<const Int*>(scan.data) + offset, place};
    uint64_t begin = piece * kLoads * scan.lanes;
    if (!scan.vectors) {
      for (uint32_t j = 0; j < kLoads; ++j) {
        const uint64_t i = begin + j * scan.lanes + lane;
        if (i >= scan.run) break;
        found.element(run.elements[static_cast<int64_t>(i) * scan.run_stride], place + i, index,
                      scan.row);
      }
      continue;
    }
    const uint64_t whole = scan.run / kPerVector;
    int valid = 0;
    while (valid < kLoads && begin + valid * scan.lanes + lane < whole) ++valid;
    if (valid > 0)
      scan_vectors<Format, kMoments>(reinterpret_cast<const uint4*>(run.elements) + begin + lane,
                                     scan.lanes, valid, run, index, scan.row, lanes, found);
    // The rest of the run, less than a vector, is scanned by the thread that would take the next
    // one.
    if (valid == kLoads || begin + valid * scan.lanes + lane != whole) continue;
    for (uint64_t i = whole * kPerVector; i < scan.run; ++i)
      found.element(run.elements[i], place + i, index, scan.row);
  }
  found.add_key(lanes.max_key(), lanes.min_key());
  finish(found.result(), call);
}

// ---- many tensors ------------------------------------------------------------------------------

template <bool kMoments>
__device__ __forceinline__ void scan_many(const ManyScan& scan) {
  uint32_t low = 0, high = scan.tensors;  // the last entry that begins at or before this block
  while (high - low > 1) {
    const uint32_t middle = (low + high) / 2;
    if (scan.entry[middle].first_block <= blockIdx.x)
      low = middle;
    else
      high = middle;
  }
  const ManyEntry& entry = scan.entry[low];
  const uint32_t end = low + 1 < scan.tensors ? scan.entry[low + 1].first_block : scan.blocks;
  const Call call{entry.row,
                  scan.tickets,
                  entry.count,
                  1,
                  blockIdx.x - entry.first_block,
                  end - entry.first_block,
                  scan.mirrored != 0};
  const MappedIndex index{scan.index + entry.index_begin, entry.index_count};
  Totals<kMoments> found;
  switch (entry.dtype) {
#define NANSCAN_CASE(dtype, ...)                                                               \
  case DType::dtype:                                                                           \
    found = scan_flat<FormatOf<DType::dtype>, kMoments>(entry.data, entry.count, index, call); \
    break;
    NANSCAN_DTYPES(NANSCAN_CASE)
#undef NANSCAN_CASE
  }
  finish(found, call);
}

}  // namespace nanscan::cuda

// ---- entry points, looked up by name ------------------------------------------------------------

#define NANSCAN_ENTRY(kernel, arguments, blocks_per_sm, body)                \
  extern "C" __global__ void __launch_bounds__(nanscan::cuda::kThreads,      \
                                               nanscan::cuda::blocks_per_sm) \
      kernel(const __grid_constant__ nanscan::cuda::arguments scan) {        \
    using namespace nanscan;                                                 \
    using namespace nanscan::cuda;                                           \
    body;                                                                    \
  }

#define NANSCAN_ENTRIES(dtype, suffix, ...)                                       \
  NANSCAN_ENTRY(nanscan_flat_##suffix, FlatScan, kFlatResident,                   \
                (run_flat<FormatOf<DType::dtype>>(scan)))                         \
  NANSCAN_ENTRY(nanscan_strided_##suffix, StridedScan, kOtherBlocksPerSm,         \
                (scan_strided<FormatOf<DType::dtype>, false>(scan)))              \
  NANSCAN_ENTRY(nanscan_strided_moments_##suffix, StridedScan, kOtherBlocksPerSm, \
                (scan_strided<FormatOf<DType::dtype>, true>(scan)))

NANSCAN_DTYPES(NANSCAN_ENTRIES)
NANSCAN_ENTRY(nanscan_many, ManyScan, kOtherBlocksPerSm, scan_many<false>(scan))
NANSCAN_ENTRY(nanscan_many_moments, ManyScan, kOtherBlocksPerSm, scan_many<true>(scan))

#endif  // NANSCAN_CUDA_SCAN_KERNELS_CUH_
