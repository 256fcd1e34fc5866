// Launches the scan kernels on one CUDA device. A scan makes no allocation, copy, query or
// synchronisation.
//
// Contract: any thread may call, with any context current. Errors are thrown.
#pragma once

#include <memory>

#include "../tensor_view.h"
#include "driver.h"
#include "scan_args.h"

namespace nanscan::cuda {

// Where and how a scan runs, and the row that it merges into.
struct Target {
  Row* row;
  uint32_t* tickets;
  Handle stream;
  bool moments;
  bool mirrored;  // the row has a mirror
};

class Device {
 public:
  // The device; null if its kernels are not loaded. Needs the GIL, as prepare does.
  static Device* find(int ordinal);

  // Loads all kernels from an image for the device: fatbin, cubin or PTX.
  static Device& prepare(int ordinal, const void* image);

  // Major and minor, for example 9 and 0.
  static std::pair<int, int> compute_capability(int ordinal);

  int ordinal() const { return ordinal_; }
  Handle context() const { return context_; }
  Handle service_stream() const { return service_stream_; }  // for initialising memory
  std::string name() const { return "cuda:" + std::to_string(ordinal_); }

  // Makes one launch, which scans the view and merges into the target's row.
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

// Whether the kernels can read it: they need elements aligned to their size.
bool is_aligned(const TensorView& view);

// Collects tensors of one device and scans as many of them in one launch as fit. Their memory must
// live until `flush` returns.
class ManyScans {
 public:
  ManyScans(const Device& device, const Target& target);  // the target's row is not used

  void add(const TensorView& view, Row* row);  // may launch what was collected before
  void flush();

 private:
  const Device& device_;
  Target target_;
  uint32_t dims_ = 0;
  ManyScan scan_;
};

}  // namespace nanscan::cuda
