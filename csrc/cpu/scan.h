// Scans of tensors in host memory: picks the instruction set, walks any layout, uses torch's
// threads.
//
// Contract: bitwise deterministic whatever the number of threads, the two moment sums excepted.
// Never touches Python: callers may release the GIL. An empty tensor gives all-zero totals.
#pragma once

#include <vector>

#include "../row.h"
#include "../tensor_view.h"

namespace nanscan::cpu {

// From this size on callers release the GIL.
constexpr uint64_t kLongBytes = uint64_t{2} << 20;

// From this size on a scan is shared out to torch's intra-op threads. Waking them may take longer
// than they save here, but torch's own operators share out from 128 KB on: what they wrote lies in
// the caches of several cores, and the next operator is slower if one core has read it all.
constexpr uint64_t kParallelBytes = uint64_t{256} << 10;

ScanTotals scan(const TensorView& view, bool moments);

// The same of each view. Threads share out small tensors, and each large one, by bytes.
void scan_many(const std::vector<TensorView>& views, bool moments, ScanTotals* totals);

// Row-major index of the first non-finite element, in elements of the real format; the number of
// elements if all are finite. Stops at the first.
uint64_t first_nonfinite(const TensorView& view);

std::vector<const char*> variants();  // that this machine can run, best last
const char* variant();                // in use
bool use_variant(const char* name);   // false: unknown, or not for this machine

// Reads every byte of [data, data + bytes), shared out as a scan is, and does nothing with them:
// the benchmarks' limit.
void plain_read(const void* data, uint64_t bytes);

}  // namespace nanscan::cpu
