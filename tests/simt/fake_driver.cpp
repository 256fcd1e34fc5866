// A CUDA driver without a GPU: what NANSCAN_CUDA_DRIVER names in tests (see csrc/cuda/driver.cpp).
//
// It exports each function of NANSCAN_DRIVER, checks how it is called, keeps a record of it, and
// runs the kernels on host memory through simt.h. tests/fake_cuda.py builds it and drives it
// through the fake_... functions at the end. Two modes: eager (work runs when it is sent, events
// are complete at once) and lagging (work waits for fake_progress or for someone who waits for it;
// streams take turns at random). What a program must not do, as freeing twice or launching into
// another context's stream, gets the driver's error and is a "violation", which fails the test.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "simt.h"
// After it, since it is CUDA C++.
#include "../../csrc/cuda/driver.h"
#include "../../csrc/cuda/scan_kernels.cuh"
#include "../../csrc/dlpack_abi.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

using namespace nanscan;
using cuda::DevicePointer;
using cuda::Handle;
using cuda::kSuccess;
using cuda::Result;

// The signatures must be those that nanscan calls.
#define DECLARE(member, name, arguments) EXPORT Result name arguments;
NANSCAN_DRIVER(DECLARE)
#undef DECLARE

// One call, as Python reads it (fake_cuda.Call).
struct Call {
  const char* function;
  const char* kernel;  // of a launch, else null
  int32_t result;
  int32_t device;  // of the current context; -1: none
  uint32_t grid, block;
  uint64_t stream;
  uint64_t address;  // of device memory
  uint64_t bytes;
  const void* arguments;  // of the kernel; valid until the record is cleared
  uint64_t argument_bytes;
};

namespace {

// ---- errors ------------------------------------------------------------------------------------

struct ErrorText {
  Result code;
  const char* name;
  const char* text;
};
constexpr ErrorText kErrors[] = {
    {0, "CUDA_SUCCESS", "no error"},
    {1, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {3, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {100, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {101, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {201, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {218, "CUDA_ERROR_INVALID_PTX", "a PTX JIT compilation failed"},
    {400, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {500, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {600, "CUDA_ERROR_NOT_READY", "device not ready"},
    {700, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
     "operation not permitted when stream is capturing"},
    {901, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
     "operation failed due to a previous error during capture"},
    {903, "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED", "capture was not ended in the same stream"},
    {904, "CUDA_ERROR_STREAM_CAPTURE_UNJOINED", "capturing stream has unjoined work"},
    {905, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION",
     "dependency created on uncaptured work in another stream"},
    {907, "CUDA_ERROR_CAPTURED_EVENT",
     "operation not permitted on an event last recorded in a capturing stream"},
};
constexpr Result kInvalidValue = 1, kOutOfMemory = 2, kNotInitialized = 3, kNoDevice = 100,
                 kInvalidDevice = 101, kInvalidContext = 201, kInvalidHandle = 400, kNotFound = 500,
                 kIllegalAddress = 700, kCaptureUnsupported = 900, kCaptureInvalidated = 901,
                 kCaptureUnmatched = 903, kCaptureUnjoined = 904, kCaptureIsolation = 905,
                 kCapturedEvent = 907;

const ErrorText* find_error(Result code) {
  for (const ErrorText& error : kErrors)
    if (error.code == code) return &error;
  return nullptr;
}

// ---- kernels -----------------------------------------------------------------------------------

// The memory that a launch names.
struct Targets {
  std::vector<const Row*> rows;
  std::vector<const void*> data;
  const uint32_t* tickets;
  bool mirrored;
};

template <typename Scan>
Targets targets_of(const Scan& scan) {
  return {{scan.row}, {scan.data}, scan.tickets, scan.mirrored != 0};
}
Targets targets_of(const cuda::ManyScan& scan) {
  Targets targets{{}, {}, scan.tickets, scan.mirrored != 0};
  for (uint32_t i = 0; i < scan.tensors; ++i) {
    targets.rows.push_back(scan.entry[i].row);
    targets.data.push_back(scan.entry[i].data);
  }
  return targets;
}

struct Kernel {
  const char* name;
  size_t argument_bytes;
  void (*run)(const void* arguments);  // by each thread of the grid
  Targets (*targets)(const void* arguments);
};

#define KERNEL(kernel, Arguments)                                          \
  {#kernel, sizeof(cuda::Arguments),                                       \
   [](const void* p) { kernel(*static_cast<const cuda::Arguments*>(p)); }, \
   [](const void* p) { return targets_of(*static_cast<const cuda::Arguments*>(p)); }},
#define KERNELS(dtype, suffix, ...)             \
  KERNEL(nanscan_flat_##suffix, FlatScan)       \
  KERNEL(nanscan_strided_##suffix, StridedScan) \
  KERNEL(nanscan_strided_moments_##suffix, StridedScan)
const Kernel kKernels[] = {NANSCAN_DTYPES(KERNELS) KERNEL(nanscan_many, ManyScan)
                               KERNEL(nanscan_many_moments, ManyScan)};
#undef KERNELS
#undef KERNEL

// ---- what the driver holds ---------------------------------------------------------------------

struct Capture;
struct Context;
struct Stream;

// When an event was recorded.
struct Moment {
  bool done = false;
  std::shared_ptr<Capture> capture;  // it was recorded in one
  Stream* stream = nullptr;
};

struct Work {
  std::function<void()> run;
  std::shared_ptr<Moment> after;  // null: can run at once
};

struct Graph {
  std::vector<Work> nodes;
};

struct Capture {
  Stream* origin;
  int mode;
  std::thread::id thread;
  std::map<Stream*, bool> joined;  // streams that were pulled in: the origin has waited for them
  std::unique_ptr<Graph> graph;
  bool broken = false, ended = false;
};

struct Stream {
  Context* context = nullptr;
  std::deque<Work> queue;
  std::shared_ptr<Capture> capture;
};

struct Context {  // a device's primary one
  int device = 0;
  unsigned retained = 0;
  Stream legacy;
};

struct Event {
  Context* context;
  std::shared_ptr<Moment> moment;  // null: never recorded
  bool timed;
};

struct Module {
  Context* context;
};

struct Function {
  Context* context;
  const Kernel* kernel;
};

struct Memory {
  bool pinned;
  Context* context;
  char* memory;  // as the host sees it; of device memory, as kernels do
  char* alias;   // pinned and mapped: as kernels see it, at another address
  size_t bytes, mapped_bytes;
};

struct Failure {
  std::string function;  // empty: of any
  int64_t countdown;
  Result error;
  bool sticky;  // and later calls fail with kIllegalAddress
};

struct Placement {
  uintptr_t begin, end;
  int ordinal;  // -1: stays on the host
};

struct Recorded {
  Call call;
  std::shared_ptr<char[]> arguments;
};

struct Settings {
  int64_t devices = 2, version = 12040, capability = 90, multiprocessors = 3;
  int64_t lagging = 0;
  int64_t seed = 1;          // of schedules; 0: the fastest one
  int64_t guard = 0;         // device memory can be touched by what runs on the device alone
  int64_t record = 0;        // keep a record of calls
  int64_t launch_delay = 0;  // milliseconds, before a launch
  int64_t return_delay = 0;  // and after it
  int64_t no_stream = 0;     // torch cannot name its current stream
};
constexpr std::pair<const char*, int64_t Settings::*> kSettings[] = {
    {"devices", &Settings::devices},
    {"version", &Settings::version},
    {"capability", &Settings::capability},
    {"multiprocessors", &Settings::multiprocessors},
    {"lagging", &Settings::lagging},
    {"seed", &Settings::seed},
    {"guard", &Settings::guard},
    {"record", &Settings::record},
    {"launch_delay", &Settings::launch_delay},
    {"return_delay", &Settings::return_delay},
    {"no_stream", &Settings::no_stream},
};

struct State {
  std::mutex mutex;
  Settings settings;
  bool initialized = false;
  bool broken = false;              // by a sticky failure
  std::map<int, Context> contexts;  // by device
  std::set<Stream*> streams;
  std::set<Event*> events;
  std::set<Module*> modules;
  std::set<Function*> functions;
  std::set<Handle> destroyed;  // streams that were
  std::map<const char*, Memory> memory;
  std::vector<std::shared_ptr<Capture>> captures;
  std::mt19937_64 random;
  std::deque<Recorded> record;
  std::vector<std::string> violations;
  std::vector<Failure> failures;
  std::vector<Placement> placements;
  const dlpack::ExchangeApi* torch = nullptr;
};

State& state() {
  static State* const all = new State;  // never destroyed: nanscan frees memory at exit
  return *all;
}

const Settings& settings() { return state().settings; }

thread_local std::vector<Context*> context_stack;
thread_local int capture_mode = 0;                  // global
thread_local std::map<int, void*> current_streams;  // torch's, by device

Context* current() { return context_stack.empty() ? nullptr : context_stack.back(); }

Result violation(Result error, const std::string& what) {
  state().violations.push_back(what);
  return error;
}

// ---- memory ------------------------------------------------------------------------------------

size_t whole_pages(size_t bytes) { return (bytes + 4095) / 4096 * 4096; }

// The allocation that holds all of a range; null if none does.
const Memory* find_memory(bool pinned, const void* begin, size_t bytes) {
  auto found = state().memory.upper_bound(static_cast<const char*>(begin));
  if (found == state().memory.begin()) return nullptr;
  const Memory& memory = (--found)->second;
  const size_t offset = static_cast<size_t>(static_cast<const char*>(begin) - memory.memory);
  return memory.pinned == pinned && offset + bytes <= memory.bytes ? &memory : nullptr;
}

bool on_device(const void* begin, size_t bytes, const Context* context) {
  const Memory* memory = find_memory(false, begin, bytes);
  return memory && memory->context == context;
}

bool is_alias(const void* begin, size_t bytes) {
  const char* const first = static_cast<const char*>(begin);
  for (const auto& [address, memory] : state().memory)
    if (memory.alias && first >= memory.alias && first + bytes <= memory.alias + memory.bytes)
      return true;
  return false;
}

void protect_devices(bool closed) {
  if (!settings().guard) return;
  for (const auto& [address, memory] : state().memory)
    if (!memory.pinned)
      mprotect(memory.memory, memory.mapped_bytes, closed ? PROT_NONE : PROT_READ | PROT_WRITE);
}

char* map_pages(size_t bytes, int file) {
  void* mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                      file < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED, file, 0);
  return mapped == MAP_FAILED ? nullptr : static_cast<char*>(mapped);
}

Result allocate(bool pinned, bool mapped, size_t bytes, char*& pointer) {
  if (bytes == 0) return violation(kInvalidValue, "an allocation of no bytes");
  Memory memory{pinned, current(), nullptr, nullptr, bytes, whole_pages(bytes)};
  if (mapped) {
    const int file = memfd_create("pinned", 0);
    if (file < 0 || ftruncate(file, static_cast<off_t>(memory.mapped_bytes)) != 0)
      return kOutOfMemory;
    memory.memory = map_pages(memory.mapped_bytes, file);
    memory.alias = map_pages(memory.mapped_bytes, file);
    close(file);
  } else {
    memory.memory = map_pages(memory.mapped_bytes, -1);
  }
  if (!memory.memory || (mapped && !memory.alias)) return kOutOfMemory;
  memset(memory.memory, 0xA5, memory.mapped_bytes);  // no allocation promises zeros
  state().memory[memory.memory] = memory;
  pointer = memory.memory;
  protect_devices(true);
  return kSuccess;
}

Result release(bool pinned, const char* pointer) {
  const auto found = state().memory.find(pointer);
  if (found == state().memory.end() || found->second.pinned != pinned)
    return violation(kInvalidValue, "memory was freed that is not allocated");
  const Memory memory = found->second;
  state().memory.erase(found);
  munmap(memory.memory, memory.mapped_bytes);
  if (memory.alias) munmap(memory.alias, memory.mapped_bytes);
  return kSuccess;
}

// ---- streams -----------------------------------------------------------------------------------

std::vector<Stream*> all_streams() {
  std::vector<Stream*> all(state().streams.begin(), state().streams.end());
  for (auto& [device, context] : state().contexts) all.push_back(&context.legacy);
  return all;
}

bool can_run(const Stream& stream) {
  if (stream.queue.empty()) return false;
  const auto& after = stream.queue.front().after;
  return !after || after->done;
}

// Runs the next work of a random stream. False: nothing can run.
bool step() {
  std::vector<Stream*> ready;
  for (Stream* stream : all_streams())
    if (can_run(*stream)) ready.push_back(stream);
  if (ready.empty()) return false;
  Stream* stream = ready[state().random() % ready.size()];
  const Work work = std::move(stream->queue.front());
  stream->queue.pop_front();
  if (work.run) work.run();
  return true;
}

template <typename Done>
Result run_until(Done done) {
  protect_devices(false);
  while (!done() && step()) {
  }
  protect_devices(true);
  return done() ? kSuccess : violation(cuda::kNotReady, "a wait for what never comes");
}

void run_all() {
  protect_devices(false);
  while (step()) {
  }
  protect_devices(true);
}

// Sends work to a stream, or into the graph that is made of it.
void send(Stream& stream, Work work) {
  if (stream.capture) {
    stream.capture->graph->nodes.push_back(std::move(work));
    if (&stream != stream.capture->origin) stream.capture->joined[&stream] = false;
    return;
  }
  stream.queue.push_back(std::move(work));
  if (!settings().lagging) run_all();
}

// ---- capture -----------------------------------------------------------------------------------

Result break_capture(Capture& capture, const char* function, Result error) {
  capture.broken = true;
  const ErrorText* text = find_error(error);
  return violation(error, std::string(function) + " broke a capture: " + text->name);
}

// "Potentially unsafe" calls are forbidden while some capture runs, unless this thread opted out.
Result check_captures(const char* function) {
  Result result = kSuccess;
  if (capture_mode == cuda::kCaptureRelaxed) return result;
  for (const auto& capture : state().captures) {
    const bool own = capture->thread == std::this_thread::get_id();
    if (own ? capture->mode != cuda::kCaptureRelaxed : capture->mode == 0 && capture_mode == 0)
      result = break_capture(*capture, function, kCaptureUnsupported);
  }
  return result;
}

// ---- entering a function -----------------------------------------------------------------------

enum Needs : unsigned { kNothing = 0, kInit = 1, kContext = 2, kNoCapture = 4, kHealth = 8 };
constexpr unsigned kWork = kInit | kContext | kHealth;

Result injected(const char* function) {
  Result result = kSuccess;
  auto& failures = state().failures;
  for (size_t i = 0; i < failures.size(); ++i) {
    Failure& failure = failures[i];
    if (!failure.function.empty() && failure.function != function) continue;
    if (--failure.countdown > 0) continue;
    result = failure.error;
    state().broken |= failure.sticky;
    failures.erase(failures.begin() + static_cast<std::ptrdiff_t>(i--));
  }
  return result;
}

// Checks what every call has in common, runs it, and keeps a record.
template <typename Body>
Result enter(const char* function, unsigned needs, Body body) {
  const std::lock_guard<std::mutex> lock(state().mutex);
  Recorded recorded{};
  Call& call = recorded.call;
  call.function = function;
  call.device = current() ? current()->device : -1;
  const auto run = [&]() -> Result {
    if ((needs & kInit) && !state().initialized)
      return violation(kNotInitialized, std::string(function) + " came before cuInit");
    if ((needs & kContext) && !current())
      return violation(kInvalidContext, std::string(function) + " needs a current context");
    if ((needs & kHealth) && state().broken) return kIllegalAddress;
    if (needs & kNoCapture)
      if (const Result result = check_captures(function)) return result;
    return body(recorded);
  };
  const Result failure = injected(function);
  // A pop may tell of earlier work's failure, but pops.
  const bool still_runs = failure == kSuccess || !strcmp(function, "cuCtxPopCurrent_v2");
  call.result = still_runs ? run() : failure;
  if (failure != kSuccess) call.result = failure;
  const Result result = call.result;
  if (settings().record) state().record.push_back(std::move(recorded));
  return result;
}

// The stream behind a handle, if it is of the current context and its capture is whole.
Result find_stream(Handle handle, Recorded& recorded, Stream*& stream) {
  recorded.call.stream = reinterpret_cast<uint64_t>(handle);
  const std::string function = recorded.call.function;
  stream = handle ? static_cast<Stream*>(handle) : &current()->legacy;
  if (handle && !state().streams.count(stream))
    return state().destroyed.count(handle) ? kInvalidHandle
                                           : violation(kInvalidHandle, function + " got no stream");
  if (stream->context != current())
    return violation(kInvalidHandle, function + " got a stream of another context");
  return stream->capture && stream->capture->broken ? kCaptureInvalidated : kSuccess;
}

Result find_event(Handle handle, const Recorded& recorded, Event*& event) {
  event = static_cast<Event*>(handle);
  return state().events.count(event)
             ? kSuccess
             : violation(kInvalidHandle, std::string(recorded.call.function) + " got no event");
}

// ---- kernels -----------------------------------------------------------------------------------

int placed_on(const void* data) {
  const auto address = reinterpret_cast<uintptr_t>(data);
  for (const Placement& placement : state().placements)
    if (address >= placement.begin && address < placement.end) return placement.ordinal;
  return 0;
}

Result check_targets(const Targets& targets, const char* kernel) {
  const std::string name = kernel;
  const Context* context = current();
  if (!on_device(targets.tickets, sizeof(uint32_t), context))
    return violation(kInvalidValue, name + " counts tickets outside of its device's memory");
  for (const Row* row : targets.rows)
    if (!on_device(row, sizeof(Row), context))
      return violation(kInvalidValue, name + " has a row outside of its device's memory");
  for (const void* data : targets.data)
    if (placed_on(data) != context->device)
      return violation(kInvalidValue, name + " reads a tensor of another device");
  return kSuccess;
}

void run_kernel(const Kernel& kernel, const void* arguments, unsigned grid, unsigned block) {
  const Targets targets = kernel.targets(arguments);
  const auto refuse = [&](const char* why) { violation(0, std::string(kernel.name) + why); };
  for (const Row* row : targets.rows) {
    if (!find_memory(false, row, sizeof(Row))) return refuse(" ran after its row was freed");
    if ((row->mirror != 0) != targets.mirrored) return refuse(" and its row differ on mirrors");
    if (row->mirror && !is_alias(reinterpret_cast<const void*>(row->mirror), sizeof(Row)))
      return refuse(" has a mirror outside of mapped memory");
  }
  simt::launch(grid, block, [&] { kernel.run(arguments); });
}

// ---- streams and captures ----------------------------------------------------------------------

Result wait_for(Stream& stream, const Event& event, const char* function) {
  if (!event.moment) return kSuccess;
  const std::shared_ptr<Capture>& capture = event.moment->capture;
  if (!capture) {
    if (stream.capture) return break_capture(*stream.capture, function, kCaptureIsolation);
    send(stream, {nullptr, event.moment});
    return kSuccess;
  }
  if (capture->ended) return violation(kCapturedEvent, "a wait for what is in a graph");
  if (!stream.capture) {  // the capture takes this stream, too
    stream.capture = capture;
    capture->joined[&stream] = false;
  } else if (stream.capture != capture) {
    return break_capture(*capture, function, kCaptureUnmatched);
  } else if (&stream == capture->origin) {
    capture->joined[event.moment->stream] = true;
  }
  return kSuccess;
}

// Of an event in a graph one can neither ask nor wait for anything.
Result check_not_captured(const Event& event, const char* function) {
  if (!event.moment || !event.moment->capture) return kSuccess;
  Capture& capture = *event.moment->capture;
  return capture.ended ? violation(kCapturedEvent, std::string(function) + " of a graph's event")
                       : break_capture(capture, function, kCapturedEvent);
}

void pause(int64_t milliseconds) {
  if (milliseconds) std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
}

Context* context_of(int device) {
  Context& context = state().contexts[device];
  context.device = device;
  context.legacy.context = &context;
  return &context;
}

bool is_device(int device) { return device >= 0 && device < settings().devices; }

}  // namespace

// ---- the driver's functions --------------------------------------------------------------------

EXPORT Result cuInit(unsigned flags) {
  return enter(__func__, kNothing, [&](Recorded&) -> Result {
    if (flags != 0) return violation(kInvalidValue, "cuInit with flags");
    if (settings().devices == 0) return kNoDevice;
    state().initialized = true;
    return kSuccess;
  });
}

EXPORT Result cuDriverGetVersion(int* version) {
  return enter(__func__, kNothing, [&](Recorded&) -> Result {
    *version = static_cast<int>(settings().version);
    return kSuccess;
  });
}

EXPORT Result cuGetErrorName(Result error, const char** name) {
  const ErrorText* text = find_error(error);
  *name = text ? text->name : nullptr;
  return text ? kSuccess : kInvalidValue;
}

EXPORT Result cuGetErrorString(Result error, const char** string) {
  const ErrorText* text = find_error(error);
  *string = text ? text->text : nullptr;
  return text ? kSuccess : kInvalidValue;
}

EXPORT Result cuDeviceGet(int* device, int ordinal) {
  return enter(__func__, kInit, [&](Recorded&) -> Result {
    if (!is_device(ordinal)) return kInvalidDevice;
    *device = ordinal;
    return kSuccess;
  });
}

EXPORT Result cuDeviceGetAttribute(int* value, int attribute, int device) {
  return enter(__func__, kInit, [&](Recorded&) -> Result {
    if (!is_device(device)) return kInvalidDevice;
    const int64_t capability = settings().capability;
    switch (attribute) {
      case cuda::kMultiprocessors:
        *value = static_cast<int>(settings().multiprocessors);
        return kSuccess;
      case cuda::kComputeMajor:
        *value = static_cast<int>(capability / 10);
        return kSuccess;
      case cuda::kComputeMinor:
        *value = static_cast<int>(capability % 10);
        return kSuccess;
      default:
        return violation(kInvalidValue, "an attribute that nothing should ask for");
    }
  });
}

EXPORT Result cuDevicePrimaryCtxRetain(Handle* context, int device) {
  return enter(__func__, kInit, [&](Recorded&) -> Result {
    if (!is_device(device)) return kInvalidDevice;
    ++context_of(device)->retained;
    *context = context_of(device);
    return kSuccess;
  });
}

EXPORT Result cuCtxGetCurrent(Handle* context) {
  return enter(__func__, kInit, [&](Recorded&) -> Result {
    *context = current();
    return kSuccess;
  });
}

EXPORT Result cuCtxPushCurrent_v2(Handle handle) {
  return enter(__func__, kInit, [&](Recorded&) -> Result {
    for (auto& [device, context] : state().contexts) {
      if (handle != &context || context.retained == 0) continue;
      context_stack.push_back(&context);
      return kSuccess;
    }
    return violation(kInvalidContext, "what was pushed is no retained context");
  });
}

EXPORT Result cuCtxPopCurrent_v2(Handle* context) {
  return enter(__func__, kInit | kContext, [&](Recorded&) -> Result {
    *context = current();
    context_stack.pop_back();
    return kSuccess;
  });
}

EXPORT Result cuCtxSynchronize() {
  return enter(__func__, kWork | kNoCapture, [&](Recorded& recorded) -> Result {
    for (Stream* stream : all_streams())  // in no mode while one of the context is captured
      if (stream->context == current() && stream->capture)
        return break_capture(*stream->capture, recorded.call.function, kCaptureUnsupported);
    return run_until([] {
      for (const Stream* stream : all_streams())
        if (stream->context == current() && !stream->queue.empty()) return false;
      return true;
    });
  });
}

EXPORT Result cuModuleLoadData(Handle* module, const void* image) {
  return enter(__func__, kWork | kNoCapture, [&](Recorded&) -> Result {
    if (!image) return violation(kInvalidValue, "no image of a module");
    *module = *state().modules.insert(new Module{current()}).first;
    return kSuccess;
  });
}

EXPORT Result cuModuleGetFunction(Handle* function, Handle handle, const char* name) {
  return enter(__func__, kWork | kNoCapture, [&](Recorded& recorded) -> Result {
    const auto module = state().modules.find(static_cast<Module*>(handle));
    if (module == state().modules.end()) return violation(kInvalidHandle, "no module");
    for (const Kernel& kernel : kKernels) {
      if (strcmp(kernel.name, name) != 0) continue;
      recorded.call.kernel = kernel.name;
      *function = *state().functions.insert(new Function{(*module)->context, &kernel}).first;
      return kSuccess;
    }
    return kNotFound;
  });
}

EXPORT Result cuLaunchKernel(Handle handle, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                             unsigned block_x, unsigned block_y, unsigned block_z,
                             unsigned shared_bytes, Handle stream_handle, void** parameters,
                             void** extra) {
  pause(settings().launch_delay);
  const Result launched = enter(__func__, kWork, [&](Recorded& recorded) -> Result {
    const auto function = state().functions.find(static_cast<Function*>(handle));
    if (function == state().functions.end())
      return violation(kInvalidHandle, "a launch of no function");
    const Kernel& kernel = *(*function)->kernel;
    const std::string name = kernel.name;
    if ((*function)->context != current())
      return violation(kInvalidHandle, name + " was launched in another context than it is of");
    Stream* stream;
    if (const Result result = find_stream(stream_handle, recorded, stream)) return result;
    if (grid_x == 0 || grid_y != 1 || grid_z != 1 || block_x == 0 || block_x > 1024 ||
        block_y != 1 || block_z != 1 || shared_bytes != 0 || extra || !parameters)
      return violation(kInvalidValue, name + " was launched in an odd shape");
    if (const Result result = check_targets(kernel.targets(parameters[0]), kernel.name))
      return result;

    const std::shared_ptr<char[]> arguments(new char[kernel.argument_bytes]);
    memcpy(arguments.get(), parameters[0], kernel.argument_bytes);
    Call& call = recorded.call;
    call.kernel = kernel.name;
    call.grid = grid_x;
    call.block = block_x;
    call.arguments = arguments.get();
    call.argument_bytes = kernel.argument_bytes;
    recorded.arguments = arguments;
    send(*stream,
         {[=, &kernel] { run_kernel(kernel, arguments.get(), grid_x, block_x); }, nullptr});
    return kSuccess;
  });
  pause(settings().return_delay);
  return launched;
}

EXPORT Result cuMemAlloc_v2(DevicePointer* pointer, size_t bytes) {
  return enter(__func__, kWork | kNoCapture, [&](Recorded& recorded) -> Result {
    recorded.call.bytes = bytes;
    char* memory = nullptr;
    const Result result = allocate(/*pinned=*/false, /*mapped=*/false, bytes, memory);
    *pointer = recorded.call.address = reinterpret_cast<DevicePointer>(memory);
    return result;
  });
}

EXPORT Result cuMemFree_v2(DevicePointer pointer) {
  return enter(__func__, kWork | kNoCapture, [&](Recorded& recorded) -> Result {
    recorded.call.address = pointer;
    run_all();  // as the real one waits for the device
    return release(/*pinned=*/false, reinterpret_cast<const char*>(pointer));
  });
}

EXPORT Result cuMemHostAlloc(void** pointer, size_t bytes, unsigned flags) {
  return enter(__func__, kWork | kNoCapture, [&](Recorded& recorded) -> Result {
    recorded.call.bytes = bytes;
    if (flags & ~(cuda::kHostPortable | cuda::kHostMapped))
      return violation(kInvalidValue, "unknown flags of host memory");
    char* memory = nullptr;
    const Result result = allocate(/*pinned=*/true, flags & cuda::kHostMapped, bytes, memory);
    *pointer = memory;
    return result;
  });
}

EXPORT Result cuMemFreeHost(void* pointer) {
  return enter(__func__, kWork | kNoCapture, [&](Recorded&) -> Result {
    run_all();
    return release(/*pinned=*/true, static_cast<const char*>(pointer));
  });
}

EXPORT Result cuMemHostGetDevicePointer_v2(DevicePointer* pointer, void* host, unsigned flags) {
  return enter(__func__, kWork, [&](Recorded&) -> Result {
    const Memory* memory = find_memory(/*pinned=*/true, host, 1);
    if (!memory || !memory->alias || flags != 0)
      return violation(kInvalidValue, "the device address of memory that is not mapped");
    *pointer = reinterpret_cast<DevicePointer>(memory->alias +
                                               (static_cast<char*>(host) - memory->memory));
    return kSuccess;
  });
}

EXPORT Result cuMemcpyDtoHAsync_v2(void* to, DevicePointer from, size_t bytes, Handle handle) {
  return enter(__func__, kWork, [&](Recorded& recorded) -> Result {
    recorded.call.address = from;
    recorded.call.bytes = bytes;
    Stream* stream;
    if (const Result result = find_stream(handle, recorded, stream)) return result;
    const void* const source = reinterpret_cast<const void*>(from);
    if (!on_device(source, bytes, current()))
      return violation(kInvalidValue, "a copy from outside of the device's memory");
    if (!find_memory(/*pinned=*/true, to, bytes))
      return violation(kInvalidValue, "a copy to memory that is not pinned, which waits");
    send(*stream, {[=] {
                     if (!find_memory(false, source, bytes) || !find_memory(true, to, bytes))
                       violation(0, "a copy ran after its memory was freed");
                     else
                       memcpy(to, source, bytes);
                   },
                   nullptr});
    return kSuccess;
  });
}

EXPORT Result cuMemcpyHtoDAsync_v2(DevicePointer to, const void* from, size_t bytes,
                                   Handle handle) {
  return enter(__func__, kWork, [&](Recorded& recorded) -> Result {
    recorded.call.address = to;
    recorded.call.bytes = bytes;
    Stream* stream;
    if (const Result result = find_stream(handle, recorded, stream)) return result;
    void* const target = reinterpret_cast<void*>(to);
    if (!on_device(target, bytes, current()))
      return violation(kInvalidValue, "a copy to outside of the device's memory");
    // Memory that is not pinned has been read when the call returns.
    const bool pinned = find_memory(/*pinned=*/true, from, bytes);
    const std::string bytes_now(static_cast<const char*>(from), pinned ? 0 : bytes);
    send(*stream, {[=] {
                     if (!find_memory(false, target, bytes))
                       violation(0, "a copy ran after its memory was freed");
                     else
                       memcpy(target, pinned ? from : bytes_now.data(), bytes);
                   },
                   nullptr});
    return kSuccess;
  });
}

EXPORT Result cuMemsetD8Async(DevicePointer to, unsigned char value, size_t bytes, Handle handle) {
  return enter(__func__, kWork, [&](Recorded& recorded) -> Result {
    recorded.call.address = to;
    recorded.call.bytes = bytes;
    Stream* stream;
    if (const Result result = find_stream(handle, recorded, stream)) return result;
    void* const target = reinterpret_cast<void*>(to);
    if (!on_device(target, bytes, current()))
      return violation(kInvalidValue, "bytes were set outside of the device's memory");
    send(*stream, {[=] {
                     if (!find_memory(false, target, bytes))
                       violation(0, "bytes were set after their memory was freed");
                     else
                       memset(target, value, bytes);
                   },
                   nullptr});
    return kSuccess;
  });
}

EXPORT Result cuEventCreate(Handle* event, unsigned flags) {
  return enter(__func__, kWork, [&](Recorded&) -> Result {
    if (flags & ~cuda::kEventNoTiming) return violation(kInvalidValue, "flags of an event");
    const bool timed = !(flags & cuda::kEventNoTiming);
    *event = *state().events.insert(new Event{current(), nullptr, timed}).first;
    return kSuccess;
  });
}

EXPORT Result cuEventDestroy_v2(Handle handle) {
  return enter(__func__, kWork, [&](Recorded& recorded) -> Result {
    Event* event;
    if (const Result result = find_event(handle, recorded, event)) return result;
    state().events.erase(event);
    delete event;
    return kSuccess;
  });
}

EXPORT Result cuEventRecord(Handle event_handle, Handle stream_handle) {
  return enter(__func__, kWork, [&](Recorded& recorded) -> Result {
    Event* event;
    if (const Result result = find_event(event_handle, recorded, event)) return result;
    Stream* stream;
    if (const Result result = find_stream(stream_handle, recorded, stream)) return result;
    if (event->context != stream->context)
      return violation(kInvalidHandle, "an event was recorded in another context");
    const auto moment = std::make_shared<Moment>();
    event->moment = moment;
    moment->stream = stream;
    moment->capture = stream->capture;
    if (!moment->capture) send(*stream, {[=] { moment->done = true; }, nullptr});
    return kSuccess;
  });
}

// Each stretch between two events takes a millisecond.
EXPORT Result cuEventElapsedTime(float* milliseconds, Handle begin, Handle end) {
  return enter(__func__, kInit | kHealth | kNoCapture, [&](Recorded& recorded) -> Result {
    for (const Handle handle : {begin, end}) {
      Event* event;
      if (const Result result = find_event(handle, recorded, event)) return result;
      if (const Result result = check_not_captured(*event, recorded.call.function)) return result;
      if (!event->timed || !event->moment) return violation(kInvalidHandle, "an event has no time");
      if (!event->moment->done) return cuda::kNotReady;
    }
    *milliseconds = 1;
    return kSuccess;
  });
}

EXPORT Result cuEventQuery(Handle handle) {
  return enter(__func__, kInit | kHealth | kNoCapture, [&](Recorded& recorded) -> Result {
    Event* event;
    if (const Result result = find_event(handle, recorded, event)) return result;
    if (const Result result = check_not_captured(*event, recorded.call.function)) return result;
    return !event->moment || event->moment->done ? kSuccess : cuda::kNotReady;
  });
}

EXPORT Result cuEventSynchronize(Handle handle) {
  return enter(__func__, kInit | kHealth | kNoCapture, [&](Recorded& recorded) -> Result {
    Event* event;
    if (const Result result = find_event(handle, recorded, event)) return result;
    if (const Result result = check_not_captured(*event, recorded.call.function)) return result;
    const auto moment = event->moment;
    return run_until([&] { return !moment || moment->done; });
  });
}

EXPORT Result cuStreamCreate(Handle* stream, unsigned flags) {
  return enter(__func__, kWork, [&](Recorded&) -> Result {
    if (flags != cuda::kStreamNonBlocking)
      return violation(kInvalidValue, "a stream that waits for the legacy one");
    auto* const created = new Stream;
    created->context = current();
    state().streams.insert(created);
    *stream = created;
    return kSuccess;
  });
}

EXPORT Result cuStreamWaitEvent(Handle stream_handle, Handle event_handle, unsigned flags) {
  return enter(__func__, kWork, [&](Recorded& recorded) -> Result {
    Stream* stream;
    if (const Result result = find_stream(stream_handle, recorded, stream)) return result;
    Event* event;
    if (const Result result = find_event(event_handle, recorded, event)) return result;
    if (flags != 0) return violation(kInvalidValue, "flags of a wait");
    return wait_for(*stream, *event, recorded.call.function);
  });
}

EXPORT Result cuStreamSynchronize(Handle handle) {
  return enter(__func__, kWork | kNoCapture, [&](Recorded& recorded) -> Result {
    Stream* stream;
    if (const Result result = find_stream(handle, recorded, stream)) return result;
    if (stream->capture)
      return break_capture(*stream->capture, recorded.call.function, kCaptureUnsupported);
    return run_until([&] { return stream->queue.empty(); });
  });
}

EXPORT Result cuStreamIsCapturing(Handle handle, int* status) {
  return enter(__func__, kWork, [&](Recorded& recorded) -> Result {
    Stream* stream;
    const Result result = find_stream(handle, recorded, stream);
    if (result != kSuccess && result != kCaptureInvalidated) return result;
    *status = !stream->capture ? 0 : stream->capture->broken ? 2 : 1;
    return kSuccess;
  });
}

EXPORT Result cuThreadExchangeStreamCaptureMode(int* mode) {
  return enter(__func__, kInit, [&](Recorded&) -> Result {
    if (*mode < 0 || *mode > cuda::kCaptureRelaxed)
      return violation(kInvalidValue, "no mode of captures");
    std::swap(*mode, capture_mode);
    return kSuccess;
  });
}

namespace {
// Does not link when one is missing.
#define ADDRESS(member, name, arguments) reinterpret_cast<const void*>(&name),
[[gnu::used]] const void* const kAll[] = {NANSCAN_DRIVER(ADDRESS)};
#undef ADDRESS
}  // namespace

// ---- torch's exchange table --------------------------------------------------------------------

namespace {

int view_on_device(void* object, dlpack::Tensor* view) {
  const int result = state().torch->tensor_from_py_object_no_sync(object, view);
  if (result != 0 || view->device.type != dlpack::kCPU) return result;
  const std::lock_guard<std::mutex> lock(state().mutex);
  const int ordinal = placed_on(static_cast<const char*>(view->data) + view->byte_offset);
  if (ordinal >= 0) view->device = {dlpack::kCUDA, ordinal};
  return 0;
}

int current_work_stream(int32_t type, int32_t ordinal, void** stream) {
  if (type != dlpack::kCUDA) return state().torch->current_work_stream(type, ordinal, stream);
  const std::lock_guard<std::mutex> lock(state().mutex);
  if (settings().no_stream) return -1;
  const auto found = current_streams.find(ordinal);
  *stream = found == current_streams.end() ? nullptr : found->second;
  return 0;
}

}  // namespace

// torch's table, in which tensors of host memory are on CUDA devices. Call it once.
EXPORT const void* fake_exchange(const void* torch) {
  static dlpack::ExchangeApi table;
  state().torch = static_cast<const dlpack::ExchangeApi*>(torch);
  table = *state().torch;
  table.tensor_from_py_object_no_sync = view_on_device;
  table.current_work_stream = current_work_stream;
  return &table;
}

// Puts memory on another device than the first; -1: leaves it on the host.
EXPORT void fake_place(const void* begin, size_t bytes, int ordinal) {
  const std::lock_guard<std::mutex> lock(state().mutex);
  const auto address = reinterpret_cast<uintptr_t>(begin);
  state().placements.insert(state().placements.begin(), {address, address + bytes, ordinal});
}

EXPORT void fake_unplace(const void* begin) {
  const std::lock_guard<std::mutex> lock(state().mutex);
  auto& placements = state().placements;
  const auto found = std::find_if(placements.begin(), placements.end(), [&](const Placement& p) {
    return p.begin == reinterpret_cast<uintptr_t>(begin);
  });
  if (found != placements.end()) placements.erase(found);
}

// The stream of torch's work of this thread on a device. Returns what it was.
EXPORT void* fake_use_stream(int device, void* stream) {
  return std::exchange(current_streams[device], stream);
}

namespace {

void use_seed() {
  simt::Config config;
  config.seed = static_cast<uint64_t>(settings().seed);
  if (settings().seed == 0) {
    config.schedule = simt::Schedule::kForward;
    config.atomic_yield = 0;
    config.resident_blocks = 1;
  }
  simt::configure(config);
  state().random.seed(config.seed);
}

}  // namespace

// ---- control -----------------------------------------------------------------------------------

EXPORT void fake_reset() {
  const std::lock_guard<std::mutex> lock(state().mutex);
  state().settings = Settings();
  state().failures.clear();
  state().broken = false;
  state().record.clear();
  use_seed();
}

EXPORT int fake_set(const char* name, int64_t value) {
  const std::lock_guard<std::mutex> lock(state().mutex);
  for (const auto& [known, member] : kSettings) {
    if (strcmp(known, name) != 0) continue;
    state().settings.*member = value;
    if (member == &Settings::seed) use_seed();
    return 1;
  }
  return 0;
}

// Makes a device the current one of this thread, as torch.cuda.set_device does; -1: none.
EXPORT void fake_use_device(int device) {
  const std::lock_guard<std::mutex> lock(state().mutex);
  context_stack.clear();
  if (device < 0) return;
  ++context_of(device)->retained;
  context_stack.push_back(context_of(device));
}

EXPORT void* fake_stream_create(int device) {
  const std::lock_guard<std::mutex> lock(state().mutex);
  auto* const stream = new Stream;
  stream->context = context_of(device);
  state().streams.insert(stream);
  return stream;
}

EXPORT void fake_stream_destroy(Stream* stream) {
  const std::lock_guard<std::mutex> lock(state().mutex);
  run_all();
  state().streams.erase(stream);
  state().destroyed.insert(stream);  // not deleted: no other may get its address
}

EXPORT void fake_begin_capture(Stream* stream, int mode) {
  const std::lock_guard<std::mutex> lock(state().mutex);
  auto capture = std::make_shared<Capture>();
  capture->origin = stream;
  capture->mode = mode;
  capture->thread = std::this_thread::get_id();
  capture->graph = std::make_unique<Graph>();
  stream->capture = capture;
  state().captures.push_back(std::move(capture));
}

// Returns the graph; null if the capture was broken.
EXPORT Graph* fake_end_capture(Stream* stream) {
  const std::lock_guard<std::mutex> lock(state().mutex);
  const std::shared_ptr<Capture> capture = stream->capture;
  for (const auto& [joined, is_awaited] : capture->joined)
    if (!is_awaited) break_capture(*capture, "the end of the capture", kCaptureUnjoined);
  for (Stream* other : all_streams())
    if (other->capture == capture) other->capture = nullptr;
  capture->ended = true;
  auto& all = state().captures;
  all.erase(std::find(all.begin(), all.end(), capture));
  return capture->broken ? nullptr : capture->graph.release();
}

EXPORT void fake_replay(const Graph* graph, Stream* stream) {
  const std::lock_guard<std::mutex> lock(state().mutex);
  for (const Work& node : graph->nodes) send(*stream, node);
}

EXPORT uint64_t fake_graph_size(const Graph* graph) { return graph->nodes.size(); }

// Runs so many pieces of work. Returns how many there were.
EXPORT uint64_t fake_progress(uint64_t most) {
  const std::lock_guard<std::mutex> lock(state().mutex);
  uint64_t done = 0;
  protect_devices(false);
  while (done < most && step()) ++done;
  protect_devices(true);
  return done;
}

// The `nth` call of a function from now on, or with an empty name of any, returns `error`.
EXPORT void fake_fail(const char* function, int64_t nth, int error, int sticky) {
  const std::lock_guard<std::mutex> lock(state().mutex);
  state().failures.push_back({function, nth, error, sticky != 0});
}

EXPORT void fake_heal() {
  const std::lock_guard<std::mutex> lock(state().mutex);
  state().failures.clear();
  state().broken = false;
}

EXPORT uint64_t fake_calls(Call* calls, uint64_t capacity) {
  const std::lock_guard<std::mutex> lock(state().mutex);
  const auto& record = state().record;
  for (uint64_t i = 0; i < std::min<uint64_t>(capacity, record.size()); ++i)
    calls[i] = record[i].call;
  return record.size();
}

EXPORT void fake_clear_calls() {
  const std::lock_guard<std::mutex> lock(state().mutex);
  state().record.clear();
}

// What was done wrong since it was last asked, a line each.
EXPORT const char* fake_violations() {
  static std::string text;
  const std::lock_guard<std::mutex> lock(state().mutex);
  text.clear();
  for (const std::string& violation : state().violations) text += violation + "\n";
  state().violations.clear();
  return text.c_str();
}

// What nanscan holds, and how this thread is left.
struct Held {
  uint64_t device_memory, pinned_memory, events, streams, modules;  // counts
  uint64_t queued;                                                  // pieces of work
  int32_t context_depth, capture_mode;
};
EXPORT void fake_held(Held* held) {
  const std::lock_guard<std::mutex> lock(state().mutex);
  *held = {};
  for (const auto& [address, memory] : state().memory)
    ++(memory.pinned ? held->pinned_memory : held->device_memory);
  held->events = state().events.size();
  held->streams = state().streams.size();
  held->modules = state().modules.size();
  for (const Stream* stream : all_streams()) held->queued += stream->queue.size();
  held->context_depth = static_cast<int32_t>(context_stack.size());
  held->capture_mode = capture_mode;
}
