// Scans of tensors in host memory: picks the instruction set, walks any layout, uses torch's
// threads.
//
// Contract: the result is bitwise the same for any number of threads, except for the two moment
// sums. Never touches Python: callers may release the GIL.
#pragma once

#include <vector>

#include "../row.h"
#include "../tensor_view.h"

namespace nanscan::cpu {

// Scans of at least this size are worth releasing the GIL for.
constexpr uint64_t kLongBytes = uint64_t{2} << 20;

// Scans of at least this size run on torch's intra-op threads. Waking them may cost more time than
// they save in the scan itself. But torch's own operators use several threads from 128 KB on, so
// the data is in the caches of several cores, and the next operator is slower if one core reads it
// all.
constexpr uint64_t kParallelBytes = uint64_t{256} << 10;

// Counts, extremes and, if asked for, moments; all other fields are 0. An empty tensor gives zeros.
Row scan(const TensorView& view, bool moments);

// The same for each view. Threads divide the small tensors among them, and each large one, by
// bytes.
void scan_many(const std::vector<TensorView>& views, bool moments, Row* rows);

// Row-major index of the first non-finite element, in elements of the real format; the number of
// elements if all are finite. Reads no further than that element's block.
uint64_t first_nonfinite(const TensorView& view);

// In which parts of dimension 0 something is non-finite: bit i stands for index i, or for part i of
// 64 where the dimension is longer. A tensor without dimensions has one part.
uint64_t nonfinite_parts(const TensorView& view);

std::vector<const char*> variants();  // that this machine can run, the fastest last
const char* variant();                // the one in use
bool use_variant(const char* name);   // false: unknown, or not for this machine

// Reads every byte of [data, data + bytes) with the threads of a scan, and does nothing else. The
// benchmarks compare scans with it.
void plain_read(const void* data, uint64_t bytes);

}  // namespace nanscan::cpu
