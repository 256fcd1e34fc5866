#include "scan.h"

#include <algorithm>
#include <map>

namespace nanscan::cuda {
namespace {

std::map<int, std::unique_ptr<Device>>& devices() {
  // Never destroyed: at exit the driver may already be unloaded.
  static auto* const all = new std::map<int, std::unique_ptr<Device>>;
  return *all;
}

int device_of(int ordinal) {
  int device = 0;
  check(driver().device_get(&device, ordinal), "finding cuda:" + std::to_string(ordinal));
  return device;
}

int attribute(int ordinal, DeviceAttribute which) {
  int value = 0;
  check(driver().device_attribute(&value, which, device_of(ordinal)),
        "asking for an attribute of cuda:" + std::to_string(ordinal));
  return value;
}

uint64_t divide_up(uint64_t n, uint64_t by) { return (n + by - 1) / by; }

unsigned blocks_for(uint64_t threads, unsigned most) {
  return static_cast<unsigned>(
      std::clamp<uint64_t>(divide_up(threads, kThreads), 1, std::max(most, 1u)));
}

uint64_t address(const TensorView& view) { return reinterpret_cast<uint64_t>(view.data); }

uint64_t vectors_in(const TensorView& view) {
  return divide_up(view.elements * item_size(view.dtype), kLoadBytes);
}

bool is_flat(const MemoryLayout& layout) {
  return layout.outer.count == 0 && layout.run_stride == 1 && layout.repeat == 1;
}

// Whether every run is contiguous, begins at a multiple of 16 bytes, and has at least 16 bytes.
bool suits_vectors(const TensorView& view, const MemoryLayout& layout) {
  const int64_t item = item_size(view.dtype);
  if (layout.run_stride != 1 || layout.run * item < kLoadBytes || address(view) % kLoadBytes != 0)
    return false;
  for (int d = 0; d < layout.outer.count; ++d)
    if (layout.outer.stride[d] * item % kLoadBytes != 0) return false;
  return true;
}

StridedScan plan_strided(const TensorView& view, const MemoryLayout& layout) {
  StridedScan scan;
  scan.data = view.data;
  scan.run = static_cast<uint64_t>(layout.run);
  scan.run_stride = layout.run_stride;
  scan.repeat = layout.repeat;
  scan.elements = view.elements;
  scan.vectors = suits_vectors(view, layout);
  const uint64_t loads =
      scan.vectors ? divide_up(scan.run * item_size(view.dtype), kLoadBytes) : scan.run;
  scan.lanes = 1;
  while (scan.lanes < 32 && scan.lanes * kLoads < loads) scan.lanes *= 2;
  scan.pieces = divide_up(loads, uint64_t{scan.lanes} * kLoads);
  scan.units = layout.stored / scan.run * scan.pieces;
  scan.outer_count = static_cast<uint32_t>(layout.outer.count);
  for (int d = 0; d < layout.outer.count; ++d)
    scan.outer[d] = {static_cast<uint64_t>(layout.outer.size[d]), layout.outer.stride[d]};
  IndexPlan index;
  plan_index(view, index);
  scan.index_count = static_cast<uint32_t>(index.count);
  for (int d = 0; d < index.count; ++d) scan.index[d] = {index.size[d], index.weight[d]};
  return scan;
}

}  // namespace

Device* Device::find(int ordinal) {
  const auto found = devices().find(ordinal);
  return found == devices().end() ? nullptr : found->second.get();
}

Device& Device::prepare(int ordinal, const void* image) {
  std::unique_ptr<Device>& device = devices()[ordinal];
  if (!device) {
    try {
      device.reset(new Device(ordinal, image));
    } catch (...) {
      devices().erase(ordinal);
      throw;
    }
  }
  return *device;
}

std::pair<int, int> Device::compute_capability(int ordinal) {
  return {attribute(ordinal, kComputeMajor), attribute(ordinal, kComputeMinor)};
}

Device::Device(int ordinal, const void* image)
    : ordinal_(ordinal),
      multiprocessors_(static_cast<unsigned>(attribute(ordinal, kMultiprocessors))) {
  const std::string loading = "loading the kernels on " + name();
  // torch uses the primary context. It is retained until the process ends.
  check(driver().retain_primary_context(&context_, device_of(ordinal)), loading);
  CurrentContext current(context_);
  AllowDuringCapture allow;
  Handle module;
  check(driver().module_load(&module, image), loading);
  // To look a function up loads it. A load during a capture would break the capture.
  const auto function = [&](const std::string& kernel) {
    Handle found;
    check(driver().module_function(&found, module, kernel.c_str()), loading + ": " + kernel);
    return found;
  };
#define NANSCAN_FUNCTIONS(dtype, suffix, ...)                                         \
  flat_[static_cast<int>(DType::dtype)] = function("nanscan_flat_" #suffix);          \
  strided_[static_cast<int>(DType::dtype)][0] = function("nanscan_strided_" #suffix); \
  strided_[static_cast<int>(DType::dtype)][1] = function("nanscan_strided_moments_" #suffix);
  NANSCAN_DTYPES(NANSCAN_FUNCTIONS)
#undef NANSCAN_FUNCTIONS
  many_[0] = function("nanscan_many");
  many_[1] = function("nanscan_many_moments");
  check(driver().stream_create(&service_stream_, kStreamNonBlocking), loading);
}

void Device::launch(Handle function, unsigned blocks, void* arguments, Handle stream) const {
  CurrentContext current(context_);
  void* parameters[] = {arguments};
  const Result result =
      driver().launch(function, blocks, 1, 1, kThreads, 1, 1, 0, stream, parameters, nullptr);
  if (result != kSuccess) check(result, "launching a scan on " + name());
}

void Device::scan(const TensorView& view, Target target) const {
  MemoryLayout layout;
  plan_layout(view, layout);
  const int dtype = static_cast<int>(view.dtype);
  if (layout.row_major_flat && !target.moments) {
    FlatScan scan{view.data, view.elements, target.row, target.tickets, target.mirrored};
    launch(flat_[dtype], blocks_for(vectors_in(view), multiprocessors_ * kFlatBlocksPerSm), &scan,
           target.stream);
    return;
  }
  StridedScan scan = plan_strided(view, layout);
  scan.row = target.row;
  scan.tickets = target.tickets;
  scan.mirrored = target.mirrored;
  launch(strided_[dtype][target.moments],
         blocks_for(scan.units * scan.lanes, multiprocessors_ * kOtherBlocksPerSm), &scan,
         target.stream);
}

bool is_aligned(const TensorView& view) { return address(view) % item_size(view.dtype) == 0; }

ManyScans::ManyScans(const Device& device, const Target& target)
    : device_(device), target_(target) {
  scan_.tensors = scan_.blocks = 0;
  scan_.tickets = target.tickets;
  scan_.mirrored = target.mirrored;
}

void ManyScans::add(const TensorView& view, Row* row) {
  MemoryLayout layout;
  plan_layout(view, layout);
  IndexPlan index;
  index.count = 0;
  if (!layout.row_major_flat) plan_index(view, index);
  if (!is_flat(layout) || index.count > kManyDims) {
    target_.row = row;
    device_.scan(view, target_);
    return;
  }
  if (scan_.tensors == kManyTensors || dims_ + index.count > kManyDims) flush();
  ManyEntry& entry = scan_.entry[scan_.tensors++];
  entry = {view.data,
           view.elements,
           row,
           scan_.blocks,
           view.dtype,
           static_cast<uint8_t>(index.count),
           static_cast<uint16_t>(dims_)};
  for (int d = 0; d < index.count; ++d) scan_.index[dims_++] = {index.size[d], index.weight[d]};
  scan_.blocks +=
      blocks_for(divide_up(vectors_in(view), kLoads), device_.multiprocessors_ * kOtherBlocksPerSm);
}

void ManyScans::flush() {
  if (scan_.tensors == 0) return;
  const unsigned blocks = scan_.blocks;
  device_.launch(device_.many_[target_.moments], blocks, &scan_, target_.stream);
  scan_.tensors = scan_.blocks = dims_ = 0;
}

}  // namespace nanscan::cuda
