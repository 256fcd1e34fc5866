// The runtime behind simt.h: fibers, their scheduler, barriers, warps, shared memory, fences.
//
// Always compiled without sanitizers, and speaks to the one that the program is linked with, if
// any, through weak symbols. So a sanitizer sees kernels and tests, and of the runtime only what
// it is told here.
#include "simt.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#if !defined(__x86_64__) || !defined(__linux__)
#error "tests/simt switches stacks in x86-64 assembly and needs Linux"
#endif
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#error "simt.cpp is compiled without sanitizers"
#endif

extern "C" {
#define SIMT_WEAK __attribute__((weak))
SIMT_WEAK void __asan_poison_memory_region(const volatile void* begin, size_t bytes);
SIMT_WEAK void __asan_unpoison_memory_region(const volatile void* begin, size_t bytes);
SIMT_WEAK void __sanitizer_start_switch_fiber(void** fake_stack, const void* bottom, size_t bytes);
SIMT_WEAK void __sanitizer_finish_switch_fiber(void* fake_stack, const void** old_bottom,
                                               size_t* old_bytes);
SIMT_WEAK void* __tsan_get_current_fiber();
SIMT_WEAK void* __tsan_create_fiber(unsigned flags);
SIMT_WEAK void __tsan_destroy_fiber(void* fiber);
SIMT_WEAK void __tsan_switch_to_fiber(void* fiber, unsigned flags);
SIMT_WEAK void __tsan_acquire(void* address);
SIMT_WEAK void __tsan_release(void* address);
#undef SIMT_WEAK

const char* __tsan_default_options() { return "halt_on_error=1"; }  // as the other sanitizers do

// Saves the callee's registers on this stack and its pointer in *from; goes on at `to`.
void simt_switch_stacks(void** from, void* to);
}
asm(R"(
.text
.type simt_switch_stacks, @function
simt_switch_stacks:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size simt_switch_stacks, .-simt_switch_stacks
)");

namespace simt {

__thread const Thread* current;

bool under_asan() { return __asan_poison_memory_region != nullptr; }
bool under_tsan() { return __tsan_create_fiber != nullptr; }

namespace {

constexpr size_t kPage = 4096;
constexpr size_t kArenaBytes = 128 << 10;  // shared memory of a block, with its red zones
constexpr size_t kRedZone = 64;
constexpr size_t kSharedVariables = 64;
constexpr unsigned char kPoison = 0xA5;
constexpr uint64_t kNoValue = 0xdeadbeefdeadbeef;  // what a shuffle from a missing lane gives
constexpr size_t kIdentities = 240;                // that libtsan tells apart, less a few
constexpr size_t kCouriers = 10;                   // of them that a block takes to carry_order()
constexpr size_t kRetired = 2000;
constexpr unsigned kNoSync = 1;  // __tsan_switch_to_fiber: no ordering

void tsan_acquire(void* address) {
  if (under_tsan()) __tsan_acquire(address);
}
void tsan_release(void* address) {
  if (under_tsan()) __tsan_release(address);
}

size_t stack_bytes() { return under_asan() || under_tsan() ? 256 << 10 : 64 << 10; }

std::function<void()> fence_callback, system_fence_callback, death_callback;

[[noreturn]] void die() {
  if (death_callback) death_callback();
  fflush(stderr);
  abort();
}

[[noreturn]] void die(const char* what) {
  fprintf(stderr, "simt: %s\n", what);
  die();
}

[[noreturn]] void die(const char* what, const Place& a, const Place& b) {
  fprintf(stderr, "simt: %s:\n  %s at %s:%d\n", what, a.function, a.file, a.line);
  if (b.function) fprintf(stderr, "  %s at %s:%d\n", b.function, b.file, b.line);
  die();
}
[[noreturn]] void die(const char* what, const Place& place) { die(what, place, Place{}); }

bool same(const char* a, const char* b) { return a == b || strcmp(a, b) == 0; }
bool operator==(const Place& a, const Place& b) {
  return a.line == b.line && same(a.file, b.file) && same(a.function, b.function);
}

class Random {
 public:
  explicit Random(uint64_t seed = 0) : state_(seed) {}
  uint64_t operator()() {  // splitmix64
    uint64_t z = state_ += 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return z ^ z >> 31;
  }
  size_t below(size_t n) { return ((*this)() >> 32) * n >> 32; }

 private:
  uint64_t state_;
};

template <typename T>
void shuffle_order(std::vector<T>& items, Random& random) {
  for (size_t i = items.size(); i > 1; --i) std::swap(items[i - 1], items[random.below(i)]);
}

// A stack that can be left and come back to.
struct Context {
  void* stack_pointer = nullptr;
  const void* stack_bottom = nullptr;
  size_t stack_size = 0;
  void* fake_stack = nullptr;  // AddressSanitizer's
  void* tsan_fiber = nullptr;
};

struct WarpWait {  // in which warp intrinsic a lane waits
  WarpOp op;
  uint32_t mask;
  uint64_t value;
  unsigned source;
  Place place;
};

struct Block;
struct Fiber : Context, Thread {
  Block* block;
  unsigned number;  // in the block
  enum { kRunning, kAtBarrier, kInWarp, kLeft } state;
  bool has_fenced;
  WarpWait wait;
  uint64_t result;  // of the barrier or the warp intrinsic
};

struct Warp {
  uint32_t alive, waiting;  // bits of lanes
  unsigned syncs;           // of __syncwarp, so far
};

struct SharedVariable {
  const void* key;
  char* storage;
};

struct Delayed {  // a reduction that has not taken effect
  void* address;
  uint64_t operand;
  Perform perform;
  unsigned number;                        // whose
  enum { kThread, kWarp, kBlock } scope;  // whose fences it must come before

  bool before_fence_of(unsigned thread) const {
    return scope == kBlock || (scope == kWarp ? number / 32 == thread / 32 : number == thread);
  }
  void operator()() const { perform(address, operand); }
};

struct Block {
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  unsigned alive = 0, at_barrier = 0, votes = 0, barriers = 0;
  Place barrier_place{};
  std::vector<SharedVariable> shared;
  size_t shared_bytes = 0;
  std::vector<Delayed> delayed;
  std::vector<void*> identities;  // fibers of ThreadSanitizer's, which the threads share
  uint32_t* ready = nullptr;      // a word a warp: the lanes that can run

  // One mapping: addresses for ThreadSanitizer, shared memory, stacks.
  char* memory = nullptr;
  size_t memory_bytes = 0;

  // What carries an order from one thread to another. Barriers take turns between two: whoever is
  // already at the next one must not seem to come before those that still leave this one.
  void* barrier_sync() { return memory + 8 * (barriers % 2); }
  void* warp_sync(unsigned warp) { return memory + 8 * (2 + 2 * warp + warps[warp].syncs % 2); }
  void* acquired_by(unsigned thread) { return memory + 8 * (2 + 2 * warps.size() + thread); }
  size_t sync_bytes() const {
    return (8 * (2 + 2 * warps.size() + fibers.size()) + kPage - 1) / kPage * kPage;
  }
  char* arena() { return memory + sync_bytes(); }

  Block() = default;
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
  ~Block() { unmap(); }

  void unmap() {
    if (!memory) return;
    if (under_asan()) __asan_unpoison_memory_region(memory, memory_bytes);
    munmap(memory, memory_bytes);
    memory = nullptr;
  }

  void map(unsigned threads) {
    unmap();
    const size_t stride = kPage + stack_bytes();  // a guard page under each stack
    memory_bytes = sync_bytes() + kArenaBytes + threads * stride;
    void* mapped = mmap(nullptr, memory_bytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED) die("no memory for the fibers' stacks");
    memory = static_cast<char*>(mapped);
    if (under_asan()) __asan_poison_memory_region(arena(), kArenaBytes);
    for (unsigned i = 0; i < threads; ++i) {
      char* guard = arena() + kArenaBytes + i * stride;
      // ThreadSanitizer has blocks mapped anew all the time; it goes without guards.
      if (!under_tsan()) mprotect(guard, kPage, PROT_NONE);
      fibers[i].stack_bottom = guard + kPage;
      fibers[i].stack_size = stack_bytes();
    }
  }
};

struct Launch {
  dim3 grid, block;
  const std::function<void()>& kernel;
  const Config& config;
  std::vector<unsigned> order;  // of blocks
  std::atomic<size_t> next{0};  // in `order`
  uint64_t seed;

  unsigned threads() const { return block.x * block.y * block.z; }
};

std::atomic_flag atomic_lock = ATOMIC_FLAG_INIT;

// Runs the blocks of a launch on one OS thread, a few at a time.
class Processor {
 public:
  void run(Launch& launch, unsigned index) {
    launch_ = &launch;
    random_ = Random(launch.seed + index * 0x632be59bd9b4e019);
    delays_ = launch.config.delay_reductions && launch.config.os_threads <= 1 && !under_tsan();
    running_fiber_ = nullptr;
    running_ = &main_;
    if (under_tsan()) main_.tsan_fiber = __tsan_get_current_fiber();
    const size_t residents = launch.config.resident_blocks ? launch.config.resident_blocks : 1;
    while (blocks_.size() < residents) blocks_.push_back(std::make_unique<Block>());
    blocks_.resize(residents);
    const size_t warps = (launch.threads() + 31) / 32;
    ready_.assign(residents * warps, 0);
    for (size_t i = 0; i < residents; ++i) blocks_[i]->ready = &ready_[i * warps];

    for (bool more = true; more;) {
      more = false;
      for (auto& block : blocks_) {
        if (block->alive == 0) begin(*block);
        more |= block->alive != 0;
      }
      if (more) switch_to(*pick());
    }
    tsan_acquire(&exit_sync_);
    destroy_retired();
    shuffle_order(delayed_, random_);
    for (const Delayed& reduction : delayed_) reduction();
    delayed_.clear();
  }

  void* shared_storage(const void* key, size_t bytes) {
    Block& block = *running_fiber_->block;
    for (const SharedVariable& variable : block.shared)
      if (variable.key == key) return variable.storage;
    char* storage = block.arena() + block.shared_bytes;
    block.shared_bytes += (bytes + kRedZone - 1) / kRedZone * kRedZone + kRedZone;
    if (block.shared_bytes > kArenaBytes || block.shared.size() == kSharedVariables)
      die("too much shared memory");
    if (under_asan()) __asan_unpoison_memory_region(storage, bytes);
    void* end = storage;  // not memset, which the sanitizers would take for the kernel's
    asm volatile("rep stosb" : "+D"(end), "+c"(bytes) : "a"(kPoison) : "memory");
    block.shared.push_back({key, storage});
    return storage;
  }

  int barrier(bool predicate, const Place& place) {
    Fiber& self = *running_fiber_;
    Block& block = *self.block;
    if (block.alive < block.fibers.size()) die("threads of the block have left before", place);
    if (block.at_barrier == 0) block.barrier_place = place;
    if (!(block.barrier_place == place))
      die("threads of a block are at different barriers", block.barrier_place, place);
    void* const sync = block.barrier_sync();
    tsan_release(sync);
    block.votes += predicate;
    self.state = Fiber::kAtBarrier;
    if (++block.at_barrier == block.alive) release_barrier(block);
    schedule();
    tsan_acquire(sync);
    return static_cast<int>(self.result);
  }

  uint64_t exchange(const WarpWait& wait) {
    Fiber& self = *running_fiber_;
    Block& block = *self.block;
    const unsigned warp = self.number / 32;
    if (!(wait.mask >> self.lane & 1)) die("a lane is not in the mask it names", wait.place);
    void* const sync = block.warp_sync(warp);
    if (wait.op == WarpOp::kSync) tsan_release(sync);
    self.wait = wait;
    self.state = Fiber::kInWarp;
    block.warps[warp].waiting |= 1u << self.lane;
    complete(block, warp, wait.mask);
    schedule();
    if (wait.op == WarpOp::kSync) tsan_acquire(sync);
    return self.result;
  }

  void fence(bool system) {
    Fiber& self = *running_fiber_;
    perform_delayed(*self.block, [&](const Delayed& d) { return d.before_fence_of(self.number); });
    tsan_acquire(self.block->acquired_by(self.number));
    self.has_fenced = true;
    std::atomic_thread_fence(std::memory_order_seq_cst);
    const std::function<void()>& callback = system ? system_fence_callback : fence_callback;
    if (callback) callback();
    maybe_yield();
  }

  void wait_until(const std::function<bool()>& condition) {
    while (!condition()) {
      const auto can_run = [](uint32_t lanes) { return lanes != 0; };
      if (std::none_of(ready_.begin(), ready_.end(), can_run)) stuck();
      ready(*running_fiber_);
      schedule();
    }
  }

  // From here to after_atomic() no other OS thread performs one: ThreadSanitizer must be told of an
  // atomic and of what it orders in one go.
  void before_atomic(void* address) {
    let_others_go_first(address);
    while (atomic_lock.test_and_set(std::memory_order_acquire)) std::this_thread::yield();
  }

  // What a thread does before its fence and then an atomic comes before what another does after its
  // own fence, if the other's atomic, before that fence, read what the first one's wrote.
  void after_atomic(void* address, bool read) {
    Fiber& self = *running_fiber_;
    if (self.has_fenced) tsan_release(address);
    if (read) carry_order(address, self.block->acquired_by(self.number));
    atomic_lock.clear(std::memory_order_release);
  }

  void reduce(const Delayed& reduction) {
    Block& block = *running_fiber_->block;
    const char* address = static_cast<const char*>(reduction.address);
    const bool shared = address >= block.arena() && address < block.arena() + kArenaBytes;
    if (delays_ && !shared) {
      let_others_go_first(reduction.address);
      block.delayed.push_back(reduction);
      block.delayed.back().number = running_fiber_->number;
      return;
    }
    before_atomic(reduction.address);
    reduction();
    after_atomic(reduction.address, false);
  }

  // Where a fiber begins and ends.
  [[noreturn]] void live() {
    arrived();
    tsan_acquire(&launch_sync_);
    launch_->kernel();
    tsan_release(&exit_sync_);

    Fiber& self = *running_fiber_;
    Block& block = *self.block;
    if (block.at_barrier != 0)
      die("a thread has left while others of its block wait in", block.barrier_place);
    self.state = Fiber::kLeft;
    Warp& warp = block.warps[self.number / 32];
    warp.alive &= ~(1u << self.lane);
    for (uint32_t waiting = warp.waiting; waiting != 0; waiting &= warp.waiting) {
      const unsigned lane = __builtin_ctz(waiting);
      waiting &= waiting - 1;
      const unsigned first = self.number / 32 * 32;
      complete(block, self.number / 32, block.fibers[first + lane].wait.mask);
    }
    if (--block.alive == 0)
      switch_to(main_);
    else
      schedule();
    die("a thread that has left goes on");
  }

 private:
  void begin(Block& block) {
    end(block);
    const size_t next = launch_->next.fetch_add(1, std::memory_order_relaxed);
    if (next >= launch_->order.size()) return;
    const unsigned threads = launch_->threads();
    const bool resized = block.fibers.size() != threads;
    if (resized) {
      block.fibers.resize(threads);
      block.warps.resize((threads + 31) / 32);
    }
    // ThreadSanitizer gets new fibers, stacks and shared memory each time: blocks are unordered.
    if (resized || under_tsan()) block.map(threads);
    if (under_asan()) __asan_poison_memory_region(block.arena(), block.shared_bytes);
    block.shared.clear();
    block.shared.reserve(kSharedVariables);
    block.shared_bytes = 0;
    block.alive = threads;
    block.at_barrier = block.votes = 0;

    if (under_tsan()) give_identities(block);
    tsan_release(&launch_sync_);

    const dim3 grid = launch_->grid, size = launch_->block;
    const unsigned index = launch_->order[next];
    for (Warp& warp : block.warps) warp = {};
    for (unsigned i = 0; i < threads; ++i) {
      Fiber& fiber = block.fibers[i];
      fiber.thread_index = dim3(i % size.x, i / size.x % size.y, i / size.x / size.y);
      fiber.block_index = dim3(index % grid.x, index / grid.x % grid.y, index / grid.x / grid.y);
      fiber.block_size = size;
      fiber.grid_size = grid;
      fiber.lane = i % 32;
      fiber.block = &block;
      fiber.number = i;
      fiber.state = Fiber::kRunning;
      fiber.has_fenced = false;
      fiber.fake_stack = nullptr;
      fiber.stack_pointer = fresh_stack(fiber);
      block.warps[i / 32].alive |= 1u << fiber.lane;
      block.ready[i / 32] |= 1u << fiber.lane;
    }
  }

  // As simt_switch_stacks leaves one that is about to call live().
  static void* fresh_stack(const Fiber& fiber) {
    // NOTES: the offset keeps the tops of the stacks out of each other's cache lines.
    char* top = static_cast<char*>(const_cast<void*>(fiber.stack_bottom)) + fiber.stack_size -
                fiber.number % 61 * 192;
    void** stack = reinterpret_cast<void**>(top);
    *--stack = nullptr;  // no return address; keeps the ABI's alignment
    *--stack = reinterpret_cast<void*>(&start);
    for (int saved_registers = 0; saved_registers < 6; ++saved_registers) *--stack = nullptr;
    return stack;
  }
  static void start();

  // What is left to do for the block that ran here before.
  void end(Block& block) {
    retired_.insert(retired_.end(), block.identities.begin(), block.identities.end());
    block.identities.clear();
    if (retired_.size() > kRetired) destroy_retired();
    perform_delayed(block, [&](const Delayed&) { return random_.below(2) == 0; });
    delayed_.insert(delayed_.end(), block.delayed.begin(), block.delayed.end());
    block.delayed.clear();
  }

  // NOTES: LLVM's libtsan tells 255 threads apart. The next takes the place of an old one and
  // counts as its successor, and a barrier hands that order on to its whole block: with a fiber of
  // libtsan's to each CUDA thread, hardly any race between blocks would be seen. So a few threads
  // of a block, never the same, share one, and races among them are left to the other launches. The
  // call stacks of reports are mixed up by this, but for the innermost function.
  void give_identities(Block& block) {
    const size_t fair = kIdentities / launch_->order.size();
    const size_t count = fair < 16 + kCouriers ? 16 : fair > 64 + kCouriers ? 64 : fair - kCouriers;
    while (block.identities.size() < count) block.identities.push_back(__tsan_create_fiber(0));
    std::vector<size_t> order(block.fibers.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = i % count;
    shuffle_order(order, random_);
    for (size_t i = 0; i < order.size(); ++i)
      block.fibers[i].tsan_fiber = block.identities[order[i]];
  }

  // NOTES: libtsan drops a race, without a word, if it no longer knows one of its two threads. So
  // they are kept, up to some number, until the launch ends.
  void destroy_retired() {
    for (void* fiber : retired_) __tsan_destroy_fiber(fiber);
    retired_.clear();
  }

  // ---- switching ----

  Fiber* pick() {
    const size_t words = ready_.size();
    const Schedule schedule = launch_->config.schedule;
    size_t word = 0;
    if (schedule == Schedule::kForward) {
      while (word < words && ready_[word] == 0) ++word;
    } else if (schedule == Schedule::kReverse) {
      word = words - 1;
      while (word < words && ready_[word] == 0) --word;
    } else {
      word = random_.below(words);
      for (size_t tries = 0; ready_[word] == 0; ++tries) {
        if (tries == words) stuck();
        if (++word == words) word = 0;
      }
    }
    if (word >= words) stuck();

    uint32_t& ready = ready_[word];
    unsigned lane;
    if (schedule == Schedule::kReverse) {
      lane = 31 - __builtin_clz(ready);
    } else if (schedule == Schedule::kRandom) {
      const unsigned turn = static_cast<unsigned>(random_.below(32));
      const uint32_t turned = ready >> turn | ready << (-turn & 31);
      lane = (__builtin_ctz(turned) + turn) % 32;
    } else {
      lane = __builtin_ctz(ready);
    }
    ready &= ~(1u << lane);
    const size_t warps = words / blocks_.size();
    return &blocks_[word / warps]->fibers[word % warps * 32 + lane];
  }

  void schedule() { switch_to(*pick()); }

  void switch_to(Fiber& to) {
    running_fiber_ = &to;
    to.state = Fiber::kRunning;
    current = &to;
    switch_to(static_cast<Context&>(to));
  }

  void switch_to(Context& to) {
    if (running_ == &to) return;
    Context& from = *running_;
    const bool forever = &from != &main_ && static_cast<Fiber&>(from).state == Fiber::kLeft;
    previous_ = &from;
    running_ = &to;
    if (under_asan())
      __sanitizer_start_switch_fiber(forever ? nullptr : &from.fake_stack, to.stack_bottom,
                                     to.stack_size);
    if (under_tsan()) __tsan_switch_to_fiber(to.tsan_fiber, kNoSync);
    simt_switch_stacks(&from.stack_pointer, to.stack_pointer);
    arrived();
  }

  // The first thing after a switch. What the previous stack is, AddressSanitizer says here; of the
  // main one nobody else does.
  void arrived() {
    if (under_asan())
      __sanitizer_finish_switch_fiber(running_->fake_stack, &previous_->stack_bottom,
                                      &previous_->stack_size);
  }

  void ready(Fiber& fiber) { fiber.block->ready[fiber.number / 32] |= 1u << fiber.lane; }

  void maybe_yield() {
    const unsigned one_in = launch_->config.atomic_yield;
    if (one_in == 0 || random_.below(one_in) != 0) return;
    ready(*running_fiber_);
    schedule();
  }

  // Tells ThreadSanitizer that what was released to `from` comes before what acquires `to`, and
  // nothing else: done by a fiber of its own, which knows no more than that the launch has begun.
  void carry_order(void* from, void* to) {
    if (!under_tsan()) return;
    __tsan_switch_to_fiber(main_.tsan_fiber, kNoSync);
    void* const courier = __tsan_create_fiber(0);
    __tsan_switch_to_fiber(courier, kNoSync);
    __tsan_acquire(from);
    __tsan_release(to);
    __tsan_switch_to_fiber(running_->tsan_fiber, kNoSync);
    __tsan_destroy_fiber(courier);
  }

  // ---- rendezvous ----

  void release_barrier(Block& block) {
    for (Fiber& fiber : block.fibers) {
      fiber.result = block.votes;
      ready(fiber);
    }
    block.at_barrier = block.votes = 0;
    ++block.barriers;
    for (Delayed& reduction : block.delayed) reduction.scope = Delayed::kBlock;
  }

  // Lets the lanes of `mask` go on if all of them have come.
  void complete(Block& block, unsigned number, uint32_t mask) {
    Warp& warp = block.warps[number];
    const uint32_t present = mask & warp.alive;
    if (present & ~warp.waiting) return;
    Fiber* const lanes = &block.fibers[number * 32];
    const WarpWait& first = lanes[__builtin_ctz(present)].wait;
    for (uint32_t rest = present; rest != 0; rest &= rest - 1) {
      const WarpWait& wait = lanes[__builtin_ctz(rest)].wait;
      if (wait.mask != mask) return;
      if (wait.op != first.op || (wait.op != WarpOp::kSync && !(wait.place == first.place)))
        die("lanes of one mask are in different warp intrinsics", first.place, wait.place);
    }

    uint64_t common = combine(lanes, present);
    for (uint32_t rest = present; rest != 0; rest &= rest - 1) {
      Fiber& fiber = lanes[__builtin_ctz(rest)];
      const unsigned source = fiber.wait.source;
      fiber.result = first.op != WarpOp::kShuffle ? common
                     : present >> source & 1      ? lanes[source].wait.value
                                                  : kNoValue;
      ready(fiber);
    }
    warp.waiting &= ~present;
    if (first.op != WarpOp::kSync) return;
    ++warp.syncs;
    for (Delayed& reduction : block.delayed)
      if (reduction.number / 32 == number && reduction.scope == Delayed::kThread)
        reduction.scope = Delayed::kWarp;
  }

  static uint64_t combine(const Fiber* lanes, uint32_t present) {
    const WarpOp op = lanes[__builtin_ctz(present)].wait.op;
    uint64_t result = 0;
    if (op == WarpOp::kSync || op == WarpOp::kShuffle) return result;
    for (uint32_t rest = present; rest != 0; rest &= rest - 1) {
      const unsigned lane = __builtin_ctz(rest);
      const uint64_t value = lanes[lane].wait.value;
      const bool smaller = static_cast<int64_t>(value) < static_cast<int64_t>(result);
      if (op == WarpOp::kBallot)
        result |= value << lane;
      else if (op == WarpOp::kReduceAdd)
        result += value;
      else if (rest == present || smaller == (op == WarpOp::kReduceMin))
        result = value;
    }
    return result;
  }

  // ---- delayed reductions ----

  void let_others_go_first(const void* address) {
    maybe_yield();
    Fiber& self = *running_fiber_;
    perform_delayed(*self.block, [&](const Delayed& d) {  // one address keeps its order
      return (d.address == address && d.before_fence_of(self.number)) || random_.below(8) == 0;
    });
  }

  template <typename Wanted>
  void perform_delayed(Block& block, Wanted wanted) {
    size_t kept = 0;
    for (const Delayed& reduction : block.delayed)
      if (wanted(reduction))
        reduction();
      else
        block.delayed[kept++] = reduction;
    block.delayed.resize(kept);
  }

  [[noreturn]] void stuck() {
    fprintf(stderr, "simt: no thread can go on\n");
    for (const auto& block : blocks_) {
      if (block->alive == 0) continue;
      fprintf(stderr, "  block %u:\n", block->fibers[0].block_index.x);
      std::vector<bool> told(block->fibers.size());
      for (const Fiber& fiber : block->fibers) {
        if (told[fiber.number] || fiber.state == Fiber::kLeft) continue;
        const bool in_warp = fiber.state == Fiber::kInWarp;
        unsigned alike = 0;
        for (const Fiber& other : block->fibers) {
          if (other.state != fiber.state) continue;
          if (in_warp && !(other.wait.place == fiber.wait.place &&
                           other.wait.mask == fiber.wait.mask && other.wait.op == fiber.wait.op))
            continue;
          told[other.number] = true;
          ++alike;
        }
        const Place& place = in_warp ? fiber.wait.place : block->barrier_place;
        fprintf(stderr, "    %u threads, thread %u the first, in %s", alike, fiber.number,
                place.function);
        if (in_warp) fprintf(stderr, " with mask 0x%08x", fiber.wait.mask);
        fprintf(stderr, " at %s:%d\n", place.file, place.line);
      }
    }
    die();
  }

  Launch* launch_ = nullptr;
  Random random_;
  bool delays_ = false;
  std::vector<std::unique_ptr<Block>> blocks_;
  std::vector<uint32_t> ready_;
  std::vector<Delayed> delayed_;  // of blocks that have ended
  std::vector<void*> retired_;    // ThreadSanitizer's fibers, of blocks that have ended
  Context main_;
  Context* running_ = nullptr;
  Context* previous_ = nullptr;
  Fiber* running_fiber_ = nullptr;
  char launch_sync_, exit_sync_;  // ThreadSanitizer: begin and end of the launch
};

__thread Processor* processor __attribute__((tls_model("initial-exec")));

void Processor::start() { processor->live(); }

// What all launches share.
std::mutex launch_mutex;
Config configuration;
uint64_t launches;  // since it was configured
std::vector<std::unique_ptr<Processor>>& processors() {
  static std::vector<std::unique_ptr<Processor>> all;
  return all;
}

void run_on(unsigned index, Launch& launch) {
  processor = processors()[index].get();
  processor->run(launch, index);
  processor = nullptr;
  current = nullptr;
}

}  // namespace

void configure(const Config& config) {
  std::lock_guard<std::mutex> lock(launch_mutex);
  configuration = config;
  launches = 0;
}

void launch(dim3 grid, dim3 block, const std::function<void()>& kernel) {
  std::lock_guard<std::mutex> lock(launch_mutex);
  Random random(configuration.seed * 0x2545f4914f6cdd1d + launches++);
  Launch launch{grid, block, kernel, configuration, {}, {}, random()};
  launch.order.resize(size_t{grid.x} * grid.y * grid.z);
  for (size_t i = 0; i < launch.order.size(); ++i) launch.order[i] = static_cast<unsigned>(i);
  shuffle_order(launch.order, random);

  const unsigned os_threads = configuration.os_threads ? configuration.os_threads : 1;
  while (processors().size() < os_threads) processors().push_back(std::make_unique<Processor>());
  if (os_threads == 1) return run_on(0, launch);
  std::vector<std::thread> threads;
  for (unsigned i = 0; i < os_threads; ++i) threads.emplace_back(run_on, i, std::ref(launch));
  for (std::thread& thread : threads) thread.join();
}

void on_system_fence(std::function<void()> callback) {
  std::lock_guard<std::mutex> lock(launch_mutex);
  system_fence_callback = std::move(callback);
}

void on_fence(std::function<void()> callback) {
  std::lock_guard<std::mutex> lock(launch_mutex);
  fence_callback = std::move(callback);
}

void wait_until(const std::function<bool()>& condition) { processor->wait_until(condition); }

void on_death(std::function<void()> callback) { death_callback = std::move(callback); }

void* shared_storage(const void* key, size_t bytes) {
  return processor->shared_storage(key, bytes);
}
int barrier(bool predicate, const Place& place) { return processor->barrier(predicate, place); }
uint64_t exchange(WarpOp op, uint32_t mask, uint64_t value, unsigned source_lane,
                  const Place& place) {
  return processor->exchange({op, mask, value, source_lane, place});
}
void fence(bool system) { processor->fence(system); }
void before_atomic(void* address) { processor->before_atomic(address); }
void after_atomic(void* address) { processor->after_atomic(address, true); }
void reduce(void* address, uint64_t operand, Perform perform) {
  processor->reduce({address, operand, perform, 0, Delayed::kThread});
}

}  // namespace simt
