#include "driver.h"

#include <dlfcn.h>

#include <cstdlib>
#include <cstring>

namespace nanscan::cuda {
namespace {

constexpr int kLeastVersion = 12000;  // what torch 2.10's oldest CUDA build needs

Driver load() {
  const char* other = std::getenv("NANSCAN_CUDA_DRIVER");
  const char* name = other && *other ? other : "libcuda.so.1";
  void* library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
  if (!library) throw Error(std::string("nanscan: no CUDA driver: ") + dlerror());
  Driver found{};
#define NANSCAN_LOOK_UP(member, name, arguments)                               \
  found.member = reinterpret_cast<Result(*) arguments>(dlsym(library, #name)); \
  if (!found.member) throw Error("nanscan: the CUDA driver is too old: it has no " #name);
  NANSCAN_DRIVER(NANSCAN_LOOK_UP)
#undef NANSCAN_LOOK_UP
  const auto expect = [&](Result result, const char* doing) {
    const char* reason = nullptr;
    if (result != kSuccess) found.error_name(result, &reason);
    if (result != kSuccess)
      throw Error(std::string("nanscan: ") + doing + " failed: " + (reason ? reason : "?"));
  };
  int version = 0;
  expect(found.driver_version(&version), "asking for the CUDA driver's version");
  if (version < kLeastVersion)
    throw Error("nanscan: the CUDA driver is too old: it is made for CUDA " +
                std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10) +
                ", nanscan needs 12.0 or later");
  expect(found.init(0), "starting the CUDA driver");
  return found;
}

}  // namespace

const Driver& driver() {
  static const Driver loaded = load();  // tried again after a failure
  return loaded;
}

void check(Result result, const std::string& doing) {
  if (result == kSuccess) return;
  const char* name = nullptr;
  const char* text = nullptr;
  driver().error_name(result, &name);
  driver().error_string(result, &text);
  throw Error("nanscan: " + doing +
              " failed: " + (name ? name : "error " + std::to_string(result)) +
              (text ? std::string(" (") + text + ")" : ""));
}

bool is_capturing(Handle stream) {
  int status = kCaptureNone;
  return driver().stream_is_capturing(stream, &status) == kSuccess && status != kCaptureNone;
}

CurrentContext::CurrentContext(Handle context) {
  Handle current = nullptr;
  check(driver().current_context(&current), "asking for the current CUDA context");
  pushed_ = current != context;
  if (pushed_) check(driver().push_context(context), "making a CUDA context current");
}

CurrentContext::~CurrentContext() {
  Handle popped;
  if (pushed_) driver().pop_context(&popped);
}

}  // namespace nanscan::cuda
