// Tests of the harness itself: toy kernels give the right results in every schedule, and planted
// faults are caught, each by the build that is there to catch it.
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "simt.h"

namespace {

constexpr unsigned kAllLanes = 0xffffffffu;
const bool kAsan = simt::under_asan(), kTsan = simt::under_tsan();
const int kSeeds = kTsan ? 8 : 40;

int failures = 0;

void check(bool ok, const std::string& what) {
  if (ok) return;
  fprintf(stderr, "FAIL: %s\n", what.c_str());
  ++failures;
}

// Runs f in a child. Returns whether it died, and what it said.
template <typename F>
std::pair<bool, std::string> dies(F f) {
  int ends[2];
  if (pipe(ends) != 0) abort();
  const pid_t child = fork();
  if (child == 0) {
    dup2(ends[1], STDERR_FILENO);
    close(ends[0]);
    f();
    _exit(0);
  }
  close(ends[1]);
  std::string said;
  char buffer[4096];
  for (ssize_t n; (n = read(ends[0], buffer, sizeof buffer)) > 0;) said.append(buffer, n);
  close(ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  return {!WIFEXITED(status) || WEXITSTATUS(status) != 0, said};
}

// f must die in a child, and say `message`. ThreadSanitizer sees a race only where the two threads
// really overlap, and on a busy machine they may run one after the other: it gets more than one
// try.
template <typename F>
void check_dies(const char* name, const char* message, F f) {
  std::pair<bool, std::string> end;
  for (int tries = kTsan ? 30 : 1; tries > 0 && !end.first; --tries) end = dies(f);
  check(end.first, std::string(name) + ": not caught");
  check(end.second.find(message) != std::string::npos,
        std::string(name) + ": expected \"" + message + "\", got:\n" + end.second);
}

template <typename F>
void in_every_schedule(F f) {
  for (int seed = 1; seed <= kSeeds; ++seed) {
    simt::Config config;
    config.schedule = static_cast<simt::Schedule>(seed % 4);
    config.seed = seed;
    config.resident_blocks = 1 + seed / 4 % 3;
    config.os_threads = kTsan ? 2 : 1;
    simt::configure(config);
    f();
  }
}

// ---- kernels -----------------------------------------------------------------------------------

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;

enum class Fault {
  kNone,
  kNoBarrier,
  kNoBarrierBeforeReuse,
  kNoFenceBefore,
  kNoFenceAfter,
  kDivergentBarrier,
  kTwoBarriers,
  kEarlyReturn,
  kHalfMask,
  kMissingLanes,
  kMixedIntrinsics,
  kSharedOverrun,
  kUnwrittenShared,
  kReadPastEnd,
  kMisaligned,
};

struct Sum {
  unsigned long long total;
  unsigned ticket;
  unsigned long long result;  // of the last block: total, as it sees it
};

// Sums n unsigned numbers: warps by shuffles, the block in shared memory, the grid by atomics; the
// last block publishes the total.
__global__ void sum_kernel(const unsigned* data, unsigned n, Sum* sum, Fault fault) {
  unsigned long long mine = 0;
  const unsigned end = fault == Fault::kReadPastEnd ? n + 1 : n;
  for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < end; i += gridDim.x * blockDim.x)
    mine += data[i];
  if (fault == Fault::kMisaligned && threadIdx.x == 0)
    mine += reinterpret_cast<const uint4*>(data + 1)->x - data[1];
  if (fault == Fault::kEarlyReturn && threadIdx.x >= 96) return;
  if (fault == Fault::kMissingLanes && threadIdx.x == 7) __syncwarp(0x180);
  if (fault == Fault::kMixedIntrinsics && threadIdx.x % 2) __ballot_sync(kAllLanes, 1);
  const unsigned mask = fault == Fault::kHalfMask ? 0xffffu : kAllLanes;
  for (int distance = 16; distance > 0; distance /= 2)
    mine += __shfl_down_sync(mask, mine, distance);

  struct Partial {
    unsigned long long of[kWarps];
  };
  NANSCAN_SHARED(Partial, partial);
  const unsigned warp = threadIdx.x / 32;
  unsigned long long* slot = partial.of + warp;
  if (fault == Fault::kSharedOverrun) ++slot;
  if (threadIdx.x % 32 == 0 && !(fault == Fault::kUnwrittenShared && warp == 2)) *slot = mine;
  if (fault == Fault::kDivergentBarrier) {
    if (threadIdx.x < 32) __syncthreads();
  } else if (fault == Fault::kTwoBarriers) {
    if (threadIdx.x < 32)
      __syncthreads();
    else
      __syncthreads();
  } else if (fault != Fault::kNoBarrier) {
    __syncthreads();
  }
  if (threadIdx.x != 0) return;
  for (int i = 1; i < kWarps; ++i) mine += partial.of[i];
  atomicAdd(&sum->total, mine);
  if (fault != Fault::kNoFenceBefore) __threadfence();
  if (atomicAdd(&sum->ticket, 1u) != gridDim.x - 1) return;
  if (fault != Fault::kNoFenceAfter) __threadfence();
  sum->result = sum->total;
}

unsigned long long run_sum(const unsigned* data, unsigned n, Fault fault, unsigned grid) {
  Sum sum{};
  simt::launch(grid, kThreads, [&] { sum_kernel(data, n, &sum, fault); });
  return sum.result;
}

// Rotates what the threads hold, in shared memory that is used again each round.
__global__ void rotate_kernel(int* out, bool fault) {
  struct Slots {
    int of[kThreads];
  };
  NANSCAN_SHARED(Slots, slots);
  int value = threadIdx.x;
  for (int round = 0; round < 3; ++round) {
    slots.of[threadIdx.x] = value;
    __syncthreads();
    value = slots.of[(threadIdx.x + 1) % kThreads];
    if (!fault) __syncthreads();
  }
  out[threadIdx.x] = value;
}

// Exchanges by shared memory inside a warp.
__global__ void warp_kernel(int* out, bool fault) {
  struct Slots {
    int of[kThreads];
  };
  NANSCAN_SHARED(Slots, slots);
  slots.of[threadIdx.x] = threadIdx.x;
  if (fault)
    __shfl_xor_sync(kAllLanes, 0, 1);  // gives no ordering
  else
    __syncwarp();
  out[threadIdx.x] = slots.of[threadIdx.x ^ 1];
}

__global__ void intrinsics_kernel(unsigned* wrong) {
  const unsigned lane = threadIdx.x % 32;
  const auto expect = [&](bool ok) {
    if (!ok) atomicAdd(wrong, 1u);
  };
  expect(__shfl_xor_sync(kAllLanes, lane, 5) == (lane ^ 5));
  expect(__shfl_xor_sync(kAllLanes, uint64_t{lane} << 40, 1) == uint64_t{lane ^ 1} << 40);
  expect(__shfl_xor_sync(kAllLanes, lane * -0.5, 16) == (lane ^ 16) * -0.5);
  expect(__shfl_down_sync(kAllLanes, lane, 3) == (lane < 29 ? lane + 3 : lane));
  expect(__shfl_up_sync(kAllLanes, lane, 3) == (lane < 3 ? lane : lane - 3));
  expect(__shfl_down_sync(kAllLanes, lane, 1, 8) == (lane % 8 == 7 ? lane : lane + 1));
  expect(__shfl_sync(kAllLanes, lane, 9) == 9);
  expect(__shfl_sync(kAllLanes, lane, 1, 4) == lane / 4 * 4 + 1);
  expect(__ballot_sync(kAllLanes, lane % 3 == 0) == 0x49249249u);
  expect(__any_sync(kAllLanes, lane == 31) && !__any_sync(kAllLanes, 0));
  expect(__all_sync(kAllLanes, lane < 32) && !__all_sync(kAllLanes, lane != 4));
  expect(__reduce_max_sync(kAllLanes, lane + 0x80000000u) == 31 + 0x80000000u);
  expect(__reduce_min_sync(kAllLanes, static_cast<int>(lane) - 7) == -7);
  expect(__reduce_max_sync(kAllLanes, -1 - static_cast<int>(lane)) == -1);
  expect(__reduce_add_sync(kAllLanes, lane) == 496);
  // The halves of a warp on their own.
  if (lane < 16)
    expect(__reduce_add_sync(0x0000ffffu, 1u) == 16);
  else
    expect(__shfl_xor_sync(0xffff0000u, lane, 1) == (lane ^ 1));
  __syncwarp();
  expect(__syncthreads_or(threadIdx.x == 77) == 1);
  expect(__syncthreads_or(0) == 0);
  expect(__syncthreads_count(threadIdx.x % 2) == kThreads / 2);
}

__global__ void atomics_kernel(unsigned* u, int* i, unsigned long* ul, unsigned long long* ull,
                               double* d) {
  atomicAdd(u, 1u);
  atomicMax(u + 1, threadIdx.x);
  atomicMin(i, -static_cast<int>(threadIdx.x));
  atomicMax(ul, uint64_t{threadIdx.x} << 32);
  atomicAdd(ull, 1ull << 40);
  atomicAdd(d, 0.5);
  if (atomicCAS(u + 2, 0u, threadIdx.x + 1) == 0) atomicExch(u + 3, threadIdx.x + 1);
}

// ---- tests -------------------------------------------------------------------------------------

void test_results() {
  std::vector<unsigned> data(3001);
  std::iota(data.begin(), data.end(), 1u);
  in_every_schedule([&] {
    for (unsigned grid : {1u, 5u})
      check(run_sum(data.data(), data.size(), Fault::kNone, grid) == 3001ull * 3002 / 2, "sum");
    int out[kThreads];
    simt::launch(1, kThreads, [&] { rotate_kernel(out, false); });
    for (int i = 0; i < kThreads; ++i) check(out[i] == (i + 3) % kThreads, "rotate");
    simt::launch(1, kThreads, [&] { warp_kernel(out, false); });
    for (int i = 0; i < kThreads; ++i) check(out[i] == (i ^ 1), "warp");
    unsigned wrong = 0;
    simt::launch(2, kThreads, [&] { intrinsics_kernel(&wrong); });
    check(wrong == 0, "intrinsics");

    unsigned u[4] = {};
    int i = 0;
    unsigned long ul = 0;
    unsigned long long ull = 0;
    double d = 0;
    simt::launch(3, kThreads, [&] { atomics_kernel(u, &i, &ul, &ull, &d); });
    check(u[0] == 3 * kThreads && u[1] == kThreads - 1 && u[2] != 0 && u[2] == u[3] &&
              i == 1 - kThreads && ul == uint64_t{kThreads - 1} << 32 &&
              ull == uint64_t{3 * kThreads} << 40 && d == 1.5 * kThreads,
          "atomics");
  });
}

void test_geometry() {
  in_every_schedule([&] {
    std::vector<int> seen(2 * 3 * 45);
    simt::launch(dim3(2, 3), dim3(9, 5), [&] {
      const unsigned block = blockIdx.x + 2 * blockIdx.y;
      seen[block * 45 + threadIdx.x + 9 * threadIdx.y] += 1;
      check(gridDim.y == 3 && blockDim.x == 9, "sizes");
      __syncthreads();  // 45 threads: a warp and a part of one
      check(__ballot_sync(kAllLanes, 1) ==
                (threadIdx.x + 9 * threadIdx.y < 32 ? kAllLanes : (1u << 13) - 1),
            "ballot of a part of a warp");
    });
    check(seen == std::vector<int>(seen.size(), 1), "every thread runs once");
  });
}

void test_undefined_values_are_poison() {
  simt::configure({});
  simt::launch(1, 32, [&] {
    struct Slot {
      unsigned word;
    };
    NANSCAN_SHARED(Slot, slot);
    check(slot.word == 0xa5a5a5a5u, "unwritten shared memory");
    if (threadIdx.x >= 16) return;
    check(__shfl_sync(0xffffu, threadIdx.x, 20) == 0xdeadbeefu, "shuffle from no lane");
  });
}

// Which threads run when, as one number.
uint64_t schedule_print() {
  uint64_t print = 0;
  simt::launch(3, 64, [&] {
    print = print * 31 + blockIdx.x * 64 + threadIdx.x;
    __syncthreads();
    print = print * 31 + blockIdx.x * 64 + threadIdx.x;
  });
  return print;
}

void test_schedules_repeat() {
  if (kTsan) return;  // the kernel races on purpose
  simt::Config config;
  config.seed = 7;
  simt::configure(config);
  const uint64_t first = schedule_print(), second = schedule_print();
  check(first != second, "launches differ");
  simt::configure(config);
  check(schedule_print() == first && schedule_print() == second, "a seed repeats its schedules");
}

void test_launches_from_many_os_threads() {
  simt::configure({});
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t)
    threads.emplace_back([] {
      const std::vector<unsigned> data(100, 3);
      for (int i = 0; i < 5; ++i)
        check(run_sum(data.data(), 100, Fault::kNone, 2) == 300, "launches are serialised");
    });
  for (std::thread& thread : threads) thread.join();
}

void test_system_fence_callback() {
  simt::configure({});
  int at_fence = 0, value = 0;
  simt::on_system_fence([&] { at_fence = value; });
  simt::launch(1, 1, [&] {
    value = 1;
    __threadfence_system();
    value = 2;
  });
  simt::on_system_fence(nullptr);
  check(at_fence == 1 && value == 2, "a system fence calls back");
}

void test_faults_stop_the_launch() {
  const struct {
    Fault fault;
    const char* name;
    const char* message;
  } faults[] = {
      {Fault::kDivergentBarrier, "barrier in a divergent branch", "left"},
      {Fault::kTwoBarriers, "two barriers", "different barriers"},
      {Fault::kEarlyReturn, "early return before a barrier", "left"},
      {Fault::kHalfMask, "half a mask", "a lane is not in the mask it names"},
      {Fault::kMissingLanes, "a lane is missing", "no thread can go on"},
      {Fault::kMixedIntrinsics, "mixed intrinsics", "different warp intrinsics"},
  };
  const std::vector<unsigned> data(300, 1);
  for (const auto& f : faults)
    check_dies(f.name, f.message,
               [&] { in_every_schedule([&] { run_sum(data.data(), data.size(), f.fault, 3); }); });
}

// Faults that the plain build sees in results, in some schedule.
void test_faults_show_in_results() {
  if (kTsan) return;
  const std::vector<unsigned> data(300, 1);
  for (const Fault fault : {Fault::kNoBarrier, Fault::kNoFenceBefore, Fault::kUnwrittenShared}) {
    int wrong = 0;
    in_every_schedule([&] { wrong += run_sum(data.data(), 300, fault, 3) != 300; });
    check(wrong > 0, "no wrong result from fault " + std::to_string(static_cast<int>(fault)));
  }
}

void test_faults_for_address_sanitizer() {
  if (!kAsan) return;
  const std::vector<unsigned> data(300, 1);
  check_dies("shared array one too small", "use-after-poison",
             [&] { run_sum(data.data(), 300, Fault::kSharedOverrun, 1); });
  check_dies("read past the end", "heap-buffer-overflow",
             [&] { run_sum(data.data(), 300, Fault::kReadPastEnd, 1); });
  check_dies("misaligned vector load", "misaligned address",
             [&] { run_sum(data.data(), 300, Fault::kMisaligned, 1); });
}

void test_faults_for_thread_sanitizer() {
  if (!kTsan) return;
  const std::vector<unsigned> data(300, 1);
  const char* race = "data race";
  const auto sum = [&](Fault fault) {
    in_every_schedule([&] { run_sum(data.data(), 300, fault, 4); });
  };
  int out[kThreads];
  check_dies("no barrier", race, [&] { sum(Fault::kNoBarrier); });
  check_dies("no fence before the ticket", race, [&] { sum(Fault::kNoFenceBefore); });
  check_dies("no fence after the ticket", race, [&] { sum(Fault::kNoFenceAfter); });
  check_dies("no barrier before reuse", race, [&] {
    in_every_schedule([&] { simt::launch(1, kThreads, [&] { rotate_kernel(out, true); }); });
  });
  check_dies("a shuffle in the place of __syncwarp", race, [&] {
    in_every_schedule([&] { simt::launch(1, kThreads, [&] { warp_kernel(out, true); }); });
  });
}

}  // namespace

int main() {
  test_results();
  test_geometry();
  test_undefined_values_are_poison();
  test_schedules_repeat();
  test_launches_from_many_os_threads();
  test_system_fence_callback();
  test_faults_stop_the_launch();
  test_faults_show_in_results();
  test_faults_for_address_sanitizer();
  test_faults_for_thread_sanitizer();
  if (failures == 0) puts("test_simt: all passed");
  return failures != 0;
}
