// Launches of the scan kernels on one CUDA device. No allocation, copy, query or synchronisation.
//
// Contract: members may be called by any thread, with whatever context current. Errors are thrown.
#pragma once

#include <memory>

#include "../tensor_view.h"
#include "driver.h"
#include "scan_args.h"

namespace nanscan::cuda {

// Where a scan goes.
struct Target {
  Row* row;
  uint32_t* tickets;
  Handle stream;
  bool moments;
  bool mirrored;  // the row has a mirror
};

class Device {
 public:
  // The device once its kernels are loaded, else null. Needs the GIL, as prepare and refuse do.
  static Device* find(int ordinal);

  // Loads all kernels from an image that fits the device: fatbin, cubin or PTX.
  static Device& prepare(int ordinal, const void* image);

  // Major and minor, as in 9 and 0.
  static std::pair<int, int> compute_capability(int ordinal);

  int ordinal() const { return ordinal_; }
  Handle context() const { return context_; }
  Handle service_stream() const { return service_stream_; }  // for setting memory up
  std::string name() const { return "cuda:" + std::to_string(ordinal_); }

  // One launch on the stream that merges a scan of the view into a row of this device.
  void scan(const TensorView& view, Target target) const;

 private:
  friend class ManyScans;

  Device(int ordinal, const void* image);
  void launch(Handle function, unsigned blocks, void* arguments, Handle stream) const;

  int ordinal_;
  unsigned multiprocessors_;
  Handle context_, service_stream_;
  Handle flat_[kDTypeCount], strided_[kDTypeCount][2], many_[2];
};

// Whether a scan can read it: device memory is read in whole elements.
bool is_aligned(const TensorView& view);

// Collects tensors of one device and scans as many as fit in a launch. The memory must outlive
// `flush`.
class ManyScans {
 public:
  ManyScans(const Device& device, const Target& target);  // but for its row

  void add(const TensorView& view, Row* row);  // may launch what was collected before
  void flush();

 private:
  const Device& device_;
  Target target_;
  uint32_t dims_ = 0;
  ManyScan scan_;
};

}  // namespace nanscan::cuda
