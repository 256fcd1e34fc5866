// PyTorch's intra-op threads, looked up in the loaded libtorch at run time. So
// torch.set_num_threads applies, no second OpenMP is loaded, and the extension links to no torch
// library.
#pragma once

#include <cstdint>

namespace nanscan::cpu {

using RangeFunction = void (*)(int64_t begin, int64_t end, void* context);

// Divides [0, n) into ranges of at least `grain` and calls f for each, on torch's threads; in one
// call on this thread if torch has none. Returns when all are done.
void parallel_for(int64_t n, int64_t grain, RangeFunction f, void* context);

}  // namespace nanscan::cpu
