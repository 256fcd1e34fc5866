// The interface of the block kernels: one Variant for each CPU instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../float_format.h"

namespace nanscan::cpu {

// The sums over consecutive blocks of one scan. Keys are those of FloatFormat, as 64-bit integers.
// It has no member functions: they would be compiled for different instruction sets, and the linker
// might keep one that this machine cannot run.
struct BlockTotals {
  uint64_t nan, posinf, neginf;
  int64_t max_key, min_key;  // over finite values; valid if has_finite
  uint32_t has_finite;
  double sum, sumsq;  // this line and the next: only from `scan_with_moments`
  uint64_t zeros, subnormals;
};

// Scans n elements at data (any alignment, n >= 0) and merges what it finds into totals.
using BlockScan = void (*)(const void* data, size_t n, BlockTotals* totals);

struct Variant {
  const char* name;
  BlockScan scan[kDTypeCount];               // counts and extremes
  BlockScan scan_with_moments[kDTypeCount];  // and sum, sumsq, zeros, subnormals of finite values
  BlockScan read;                            // only loads and combines n bytes
};

}  // namespace nanscan::cpu
