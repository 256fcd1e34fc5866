// The contract between the instruction-set variants of the block kernels and their caller.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../float_format.h"

namespace nanscan::cpu {

// Accumulates over consecutive blocks of one scan. Keys are FloatFormat keys, widened.
// Plain data with no member functions: it crosses between objects built for different machines.
struct BlockTotals {
  uint64_t nan, posinf, neginf;
  int64_t max_key, min_key;  // over finite values; meaningful once has_finite
  uint32_t has_finite;
  double sum, sumsq;  // these four only from moments
  uint64_t zeros, subnormals;
};

// Scans n elements at data (any alignment, n >= 0) and merges what it finds into totals.
using BlockScan = void (*)(const void* data, size_t n, BlockTotals* totals);

struct Variant {
  const char* name;
  BlockScan scan[kDTypeCount];     // counts and extremes
  BlockScan moments[kDTypeCount];  // sum, sumsq, zeros and subnormals of the finite values
  BlockScan read;                  // data as bytes: loads and combines them, and nothing else
};

}  // namespace nanscan::cpu
