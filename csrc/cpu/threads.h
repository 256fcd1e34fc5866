// PyTorch's own intra-op pool, found in the loaded libtorch at run time: torch.set_num_threads
// rules, no second OpenMP comes in, and the binary links to no torch library.
#pragma once

#include <cstdint>

namespace nanscan::cpu {

using RangeFunction = void (*)(int64_t begin, int64_t end, void* context);

// Calls f over [0, n) in disjoint ranges of at least `grain`, on several threads where torch has
// them, else at once on this one. Returns after the last.
void parallel_for(int64_t n, int64_t grain, RangeFunction f, void* context);

}  // namespace nanscan::cpu
