// Scans that belong to no table, for nanscan.check. The kernel itself writes the finished row to
// mapped host memory. So a scan is one launch, and the host sees in memory whether it has ended.
//
// Contract: needs the GIL. Errors are thrown.
#pragma once

#include <memory>
#include <vector>

#include "scan.h"

namespace nanscan::cuda {

class Slots;

// One such scan, which runs or has ended.
class PendingScan {
 public:
  // Starts a scan of each view on the stream. Several views share launches.
  static std::vector<std::unique_ptr<PendingScan>> start(const Device& device,
                                                         const std::vector<TensorView>& views,
                                                         bool moments, Handle stream);
  ~PendingScan();
  PendingScan(const PendingScan&) = delete;
  PendingScan& operator=(const PendingScan&) = delete;

  bool ready() const;                          // never blocks
  bool captured() const { return captured_; }  // it belongs to a CUDA graph

  // The row. If need be, waits for the stream, without the GIL. Throws if the scan was recorded
  // into a CUDA graph that has not run.
  const Row& wait();

 private:
  struct Slot {
    Row* row;            // on the device
    volatile Row* host;  // its mirror
  };
  friend class Slots;

  PendingScan(const Device& device, Slot slot, Handle stream, bool captured)
      : device_(device), slot_(slot), stream_(stream), captured_(captured) {}

  const Device& device_;
  const Slot slot_;
  const Handle stream_;
  const bool captured_;  // the graph may run again, so the slot is never given back
  Row copy_{};
};

}  // namespace nanscan::cuda
