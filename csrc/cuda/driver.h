// The part of the CUDA driver API that nanscan uses, declared from its documentation and looked up
// in libcuda.so.1 at run time: no part of CUDA is needed to build or to link.
//
// Contract: thread-safe. Every failure is an Error that says what failed and the driver's reason.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace nanscan::cuda {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

using Result = int;  // CUresult
constexpr Result kSuccess = 0;
constexpr Result kNotReady = 600;

using DevicePointer = uint64_t;
using Handle = void*;  // context, module, function, stream or event

enum DeviceAttribute : int {
  kMultiprocessors = 16,
  kComputeMajor = 75,
  kComputeMinor = 76,
};
constexpr unsigned kHostPortable = 1, kHostMapped = 2;
constexpr unsigned kEventTiming = 0, kEventNoTiming = 2;
constexpr unsigned kStreamNonBlocking = 1;
constexpr int kCaptureNone = 0;
constexpr int kCaptureRelaxed = 2;

// X(member, exported name, arguments)
#define NANSCAN_DRIVER(X)                                                                        \
  X(init, cuInit, (unsigned flags))                                                              \
  X(driver_version, cuDriverGetVersion, (int* version))                                          \
  X(error_name, cuGetErrorName, (Result error, const char** name))                               \
  X(error_string, cuGetErrorString, (Result error, const char** text))                           \
  X(device_get, cuDeviceGet, (int* device, int ordinal))                                         \
  X(device_attribute, cuDeviceGetAttribute, (int* value, int attribute, int device))             \
  X(retain_primary_context, cuDevicePrimaryCtxRetain, (Handle * context, int device))            \
  X(current_context, cuCtxGetCurrent, (Handle * context))                                        \
  X(push_context, cuCtxPushCurrent_v2, (Handle context))                                         \
  X(wait_for_context, cuCtxSynchronize, ())                                                      \
  X(pop_context, cuCtxPopCurrent_v2, (Handle * context))                                         \
  X(module_load, cuModuleLoadData, (Handle * module, const void* image))                         \
  X(module_function, cuModuleGetFunction, (Handle * function, Handle module, const char* name))  \
  X(launch, cuLaunchKernel,                                                                      \
    (Handle function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,       \
     unsigned block_y, unsigned block_z, unsigned shared_bytes, Handle stream, void** arguments, \
     void** extra))                                                                              \
  X(allocate, cuMemAlloc_v2, (DevicePointer * pointer, size_t bytes))                            \
  X(release, cuMemFree_v2, (DevicePointer pointer))                                              \
  X(host_allocate, cuMemHostAlloc, (void** pointer, size_t bytes, unsigned flags))               \
  X(host_release, cuMemFreeHost, (void* pointer))                                                \
  X(host_device_pointer, cuMemHostGetDevicePointer_v2,                                           \
    (DevicePointer * pointer, void* host, unsigned flags))                                       \
  X(copy_to_host, cuMemcpyDtoHAsync_v2,                                                          \
    (void* to, DevicePointer from, size_t bytes, Handle stream))                                 \
  X(copy_to_device, cuMemcpyHtoDAsync_v2,                                                        \
    (DevicePointer to, const void* from, size_t bytes, Handle stream))                           \
  X(set_bytes, cuMemsetD8Async,                                                                  \
    (DevicePointer to, unsigned char value, size_t bytes, Handle stream))                        \
  X(event_create, cuEventCreate, (Handle * event, unsigned flags))                               \
  X(event_destroy, cuEventDestroy_v2, (Handle event))                                            \
  X(event_record, cuEventRecord, (Handle event, Handle stream))                                  \
  X(event_elapsed, cuEventElapsedTime, (float* milliseconds, Handle begin, Handle end))          \
  X(event_query, cuEventQuery, (Handle event))                                                   \
  X(event_wait, cuEventSynchronize, (Handle event))                                              \
  X(stream_create, cuStreamCreate, (Handle * stream, unsigned flags))                            \
  X(stream_wait_event, cuStreamWaitEvent, (Handle stream, Handle event, unsigned flags))         \
  X(stream_wait, cuStreamSynchronize, (Handle stream))                                           \
  X(stream_is_capturing, cuStreamIsCapturing, (Handle stream, int* status))                      \
  X(exchange_capture_mode, cuThreadExchangeStreamCaptureMode, (int* mode))

struct Driver {
#define NANSCAN_MEMBER(member, name, arguments) Result(*member) arguments;
  NANSCAN_DRIVER(NANSCAN_MEMBER)
#undef NANSCAN_MEMBER
};

// The driver, loaded and initialised by the first call. Tests set the environment variable
// NANSCAN_CUDA_DRIVER to load another library.
const Driver& driver();

// Throws if the driver failed: "nanscan: <doing> failed: CUDA_ERROR_... (text)".
void check(Result result, const std::string& doing);
inline void check(Result result, const char* doing) {
  if (result != kSuccess) check(result, std::string(doing));
}

// Whether a CUDA graph records this stream, which belongs to the current context.
bool is_capturing(Handle stream);

// Makes a context current in this thread for a scope, then restores the previous one.
class CurrentContext {
 public:
  explicit CurrentContext(Handle context);
  ~CurrentContext();
  CurrentContext(const CurrentContext&) = delete;
  CurrentContext& operator=(const CurrentContext&) = delete;

 private:
  bool pushed_;
};

// For a scope, lets this thread allocate and wait even if a stream is being captured.
class AllowDuringCapture {
 public:
  AllowDuringCapture()
      : mode_(kCaptureRelaxed), changed_(driver().exchange_capture_mode(&mode_) == kSuccess) {}
  ~AllowDuringCapture() {
    if (changed_) driver().exchange_capture_mode(&mode_);
  }
  AllowDuringCapture(const AllowDuringCapture&) = delete;
  AllowDuringCapture& operator=(const AllowDuringCapture&) = delete;

 private:
  int mode_;
  const bool changed_;
};

}  // namespace nanscan::cuda
