#include "threads.h"

#include <dlfcn.h>

namespace nanscan::cpu {
namespace {

// torch/csrc/stable/c/shim.h (torch 2.10 and later). Returns 0 on success.
using TorchParallelFor = int32_t (*)(int64_t begin, int64_t end, int64_t grain, RangeFunction f,
                                     void* context);

TorchParallelFor find_torch_parallel_for() {
#ifdef __APPLE__
  const char* library = "@rpath/libtorch_cpu.dylib";
#else
  const char* library = "libtorch_cpu.so";
#endif
  void* handle = dlopen(library, RTLD_LAZY | RTLD_NOLOAD);
  if (!handle) handle = RTLD_DEFAULT;
  return reinterpret_cast<TorchParallelFor>(dlsym(handle, "torch_parallel_for"));
}

}  // namespace

void parallel_for(int64_t n, int64_t grain, RangeFunction f, void* context) {
  static const TorchParallelFor torch_parallel_for = find_torch_parallel_for();
  if (!torch_parallel_for || torch_parallel_for(0, n, grain, f, context) != 0) f(0, n, context);
}

}  // namespace nanscan::cpu
