#include "scannable.h"

#include <set>

namespace nanscan {
namespace {

std::set<int>& refused_devices() {
  static std::set<int> refused;
  return refused;
}

}  // namespace

Status view_scannable(PyObject* tensor, TensorView& view, LazyBits lazy_bits) {
  const Status status = view_tensor(tensor, view, lazy_bits);
  if (status != kOk || view.device.type == dlpack::kCPU) return status;
  if (view.device.type != dlpack::kCUDA || refused_devices().count(view.device.id))
    return kOtherDevice;
  if (!cuda::Device::find(view.device.id)) return kUnprepared;
  return cuda::is_aligned(view) ? kOk : kMisaligned;
}

void refuse_device(int ordinal) { refused_devices().insert(ordinal); }

void* stream_of(const cuda::Device& device) {
  void* stream = nullptr;
  if (current_stream({dlpack::kCUDA, device.ordinal()}, stream)) return stream;
  throw cuda::Error("nanscan: torch names no current stream of " + device.name());
}

}  // namespace nanscan
