// CUDA C++ kernels as plain C++, run on the CPU: one fiber a CUDA thread, in random schedules.
//
// Include this before a kernel's source, link simt.cpp, and start kernels with simt::launch(). It
// needs no CUDA toolkit, GCC or Clang, and x86-64 Linux. A wrong barrier, mask or use of a warp
// intrinsic ends the process with a message. AddressSanitizer sees shared memory and the fibers'
// stacks; ThreadSanitizer sees what orders memory in CUDA, and nothing else: __syncthreads,
// __syncwarp, fences with atomics, the end of a launch. README.md says what nothing here can see.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <type_traits>

// ---- the language ------------------------------------------------------------------------------

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __grid_constant__

// Storage of the block, by a name that lives as long. Filled with 0xA5 before the block begins.
#define NANSCAN_SHARED(type, name)          \
  static const char simt_key_of_##name = 0; \
  auto& name = ::simt::shared_variable<type>(&simt_key_of_##name)

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

namespace simt {

// ---- launching ---------------------------------------------------------------------------------

enum class Schedule {  // which of the threads that can run goes on
  kForward,            // the lowest
  kReverse,            // the highest
  kRandom,
  kWarpRandom,  // the lowest of a random warp
};

struct Config {
  Schedule schedule = Schedule::kRandom;
  uint64_t seed = 1;
  unsigned atomic_yield = 4;     // one in so many atomics and fences lets others go first; 0: none
  unsigned resident_blocks = 2;  // that run interleaved
  unsigned os_threads = 1;       // each with its resident blocks, truly concurrent
  // An atomic whose result nobody reads takes effect as late as the next fence allows. It makes a
  // missing fence visible without ThreadSanitizer. Off while there are several OS threads, or that
  // sanitizer.
  bool delay_reductions = true;
};

// For the launches from here on. The same configuration gives the same schedules again, unless
// os_threads > 1.
void configure(const Config& config);

// Runs kernel() once for each thread of the grid, blocks in a shuffled order. From any OS thread;
// launches are serialised.
void launch(dim3 grid, dim3 block, const std::function<void()>& kernel);

// With which sanitizer the program runs.
bool under_asan();
bool under_tsan();

// Called by each __threadfence_system(), before it returns. For tests of what the host may see.
void on_system_fence(std::function<void()> callback);

// Called by each __threadfence(), before it returns: a place to hold a thread, for a schedule made
// by hand. One OS thread only.
void on_fence(std::function<void()> callback);

// By a CUDA thread: the others run until condition() is true. Blocks that are not resident yet do
// not begin meanwhile; kForward and kReverse may choose the waiting thread again and again.
void wait_until(const std::function<bool()>& condition);

// Called before a fault that was found here ends the process.
void on_death(std::function<void()> callback);

// ---- what the kernel-side functions below are made of ------------------------------------------

struct Thread {
  dim3 thread_index, block_index, block_size, grid_size;
  unsigned lane;
};
extern __thread const Thread* current __attribute__((tls_model("initial-exec")));

struct Place {  // in the source
  const char* function;
  const char* file;
  int line;
};

enum class WarpOp : uint8_t { kSync, kShuffle, kBallot, kReduceMin, kReduceMax, kReduceAdd };

void* shared_storage(const void* key, size_t bytes);
int barrier(bool predicate, const Place& place);  // how many came with a true predicate
uint64_t exchange(WarpOp op, uint32_t mask, uint64_t value, unsigned source_lane,
                  const Place& place);
void fence(bool system);
void before_atomic(void* address);
void after_atomic(void* address);

using Perform = void (*)(void* address, uint64_t operand);
void reduce(void* address, uint64_t operand, Perform perform);  // now or later

template <typename T>
T& shared_variable(const void* key) {
  static_assert(std::is_trivially_default_constructible_v<T>, "shared memory has no initialisers");
  return *static_cast<T*>(shared_storage(key, sizeof(T)));
}

template <typename T>
uint64_t to_word(T value) {
  static_assert(sizeof(T) <= 8 && std::is_trivially_copyable_v<T>, "32 or 64 bits");
  uint64_t word = 0;
  memcpy(&word, &value, sizeof value);
  return word;
}

template <typename T>
T from_word(uint64_t word) {
  T value;
  memcpy(&value, &word, sizeof value);
  return value;
}

template <typename T>
T shuffle(uint32_t mask, T value, unsigned source, int width, const Place& place) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "shuffles move 32 or 64 bits");
  const unsigned segment = current->lane / width * width;
  // Out of the segment: the lane's own value.
  if (source < segment || source >= segment + width) source = current->lane;
  return from_word<T>(exchange(WarpOp::kShuffle, mask, to_word(value), source, place));
}

template <typename T>
T warp_reduce(WarpOp op, uint32_t mask, T value, const Place& place) {
  static_assert(sizeof(T) == 4 && std::is_integral_v<T>, "redux takes 32-bit integers");
  return static_cast<T>(
      exchange(op, mask, static_cast<uint64_t>(static_cast<int64_t>(value)), 0, place));
}

// Relaxed, as CUDA's are.
template <typename T, typename Change>
T read_modify_write(T* address, Change change) {
  T old, changed;
  __atomic_load(address, &old, __ATOMIC_RELAXED);
  do {
    changed = change(old);
  } while (!__atomic_compare_exchange(address, &old, &changed, false, __ATOMIC_RELAXED,
                                      __ATOMIC_RELAXED));
  return old;
}

template <typename T, typename Change>
T atomic(T* address, Change change) {
  before_atomic(address);
  const T old = read_modify_write(address, change);
  after_atomic(address);
  return old;
}

struct Add {
  template <typename T>
  static T apply(T old, T operand) {
    return static_cast<T>(old + operand);
  }
};
struct Max {
  template <typename T>
  static T apply(T old, T operand) {
    return old > operand ? old : operand;
  }
};
struct Min {
  template <typename T>
  static T apply(T old, T operand) {
    return old < operand ? old : operand;
  }
};

// The result of an atomic. Who reads it has the atomic performed, there and then; an atomic whose
// result is dropped is a reduction.
template <typename T, typename Change>
class Atomic {
 public:
  Atomic(T* address, T operand) : address_(address), operand_(operand) {}
  Atomic(const Atomic&) = delete;
  Atomic& operator=(const Atomic&) = delete;
  ~Atomic() {
    if (!performed_) reduce(address_, to_word(operand_), perform_later);
  }

  operator T() {
    if (!performed_)
      old_ = atomic(address_, [this](T old) { return Change::apply(old, operand_); });
    performed_ = true;
    return old_;
  }

 private:
  static void perform_later(void* address, uint64_t operand) {
    read_modify_write(static_cast<T*>(address),
                      [=](T old) { return Change::apply(old, from_word<T>(operand)); });
  }

  T* address_;
  T operand_;
  T old_{};
  bool performed_ = false;
};

template <typename T>
using Operand = std::common_type_t<T>;  // not deduced from

}  // namespace simt

// ---- the built-ins -----------------------------------------------------------------------------

#define threadIdx (::simt::current->thread_index)
#define blockIdx (::simt::current->block_index)
#define blockDim (::simt::current->block_size)
#define gridDim (::simt::current->grid_size)
constexpr int warpSize = 32;

// Default arguments, so that the place is the caller's.
#define SIMT_FILE const char *file = __builtin_FILE(), int line = __builtin_LINE()
#define SIMT_PLACE (simt::Place{__func__, file, line})

inline void __syncthreads(SIMT_FILE) { simt::barrier(false, SIMT_PLACE); }
inline int __syncthreads_or(int predicate, SIMT_FILE) {
  return simt::barrier(predicate != 0, SIMT_PLACE) != 0;
}
inline int __syncthreads_count(int predicate, SIMT_FILE) {
  return simt::barrier(predicate != 0, SIMT_PLACE);
}

inline void __syncwarp(unsigned mask = 0xffffffffu, SIMT_FILE) {
  simt::exchange(simt::WarpOp::kSync, mask, 0, 0, SIMT_PLACE);
}
template <typename T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32, SIMT_FILE) {
  const unsigned segment = simt::current->lane / width * width;
  return simt::shuffle(mask, value, segment + source % width, width, SIMT_PLACE);
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32, SIMT_FILE) {
  return simt::shuffle(mask, value, simt::current->lane ^ lanes, width, SIMT_PLACE);
}
template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, SIMT_FILE) {
  return simt::shuffle(mask, value, simt::current->lane + delta, width, SIMT_PLACE);
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, SIMT_FILE) {
  return simt::shuffle(mask, value, simt::current->lane - delta, width, SIMT_PLACE);
}
inline unsigned __ballot_sync(unsigned mask, int predicate, SIMT_FILE) {
  return static_cast<unsigned>(
      simt::exchange(simt::WarpOp::kBallot, mask, predicate != 0, 0, SIMT_PLACE));
}
inline int __any_sync(unsigned mask, int predicate, SIMT_FILE) {
  return simt::exchange(simt::WarpOp::kBallot, mask, predicate != 0, 0, SIMT_PLACE) != 0;
}
inline int __all_sync(unsigned mask, int predicate, SIMT_FILE) {
  return simt::exchange(simt::WarpOp::kBallot, mask, predicate == 0, 0, SIMT_PLACE) == 0;
}
template <typename T>
T __reduce_max_sync(unsigned mask, T value, SIMT_FILE) {
  return simt::warp_reduce(simt::WarpOp::kReduceMax, mask, value, SIMT_PLACE);
}
template <typename T>
T __reduce_min_sync(unsigned mask, T value, SIMT_FILE) {
  return simt::warp_reduce(simt::WarpOp::kReduceMin, mask, value, SIMT_PLACE);
}
template <typename T>
T __reduce_add_sync(unsigned mask, T value, SIMT_FILE) {
  return simt::warp_reduce(simt::WarpOp::kReduceAdd, mask, value, SIMT_PLACE);
}
#undef SIMT_FILE
#undef SIMT_PLACE

inline void __threadfence() { simt::fence(false); }
inline void __threadfence_system() { simt::fence(true); }

template <typename T>
simt::Atomic<T, simt::Add> atomicAdd(T* address, simt::Operand<T> value) {
  return {address, value};
}
template <typename T>
simt::Atomic<T, simt::Max> atomicMax(T* address, simt::Operand<T> value) {
  return {address, value};
}
template <typename T>
simt::Atomic<T, simt::Min> atomicMin(T* address, simt::Operand<T> value) {
  return {address, value};
}
template <typename T>
T atomicExch(T* address, simt::Operand<T> value) {
  return simt::atomic(address, [value](T) { return value; });
}
template <typename T>
T atomicCAS(T* address, simt::Operand<T> expected, simt::Operand<T> value) {
  return simt::atomic(address, [=](T old) { return old == expected ? value : old; });
}

template <typename T>
T __ldg(const T* address) {
  return *address;
}
inline unsigned __float_as_uint(float value) {
  return simt::from_word<unsigned>(simt::to_word(value));
}
inline float __uint_as_float(unsigned bits) { return simt::from_word<float>(bits); }
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __clz(int bits) { return bits ? __builtin_clz(static_cast<unsigned>(bits)) : 32; }
inline int __ffs(int bits) { return __builtin_ffs(bits); }
