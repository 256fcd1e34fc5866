// Scans outside of any table, for nanscan.check: the kernel itself sends the finished row to mapped
// host memory. So such a scan is one launch, too, and whether it is done is a look at memory.
//
// Contract: needs the GIL. Errors are thrown.
#pragma once

#include <memory>
#include <vector>

#include "scan.h"

namespace nanscan::cuda {

class Slots;

// One such scan, under way or done.
class PendingScan {
 public:
  // Scans on the stream. Several at once share launches.
  static std::vector<std::unique_ptr<PendingScan>> start(const Device& device,
                                                         const std::vector<TensorView>& views,
                                                         bool moments, Handle stream);
  ~PendingScan();
  PendingScan(const PendingScan&) = delete;
  PendingScan& operator=(const PendingScan&) = delete;

  bool ready() const;                          // never blocks
  bool captured() const { return captured_; }  // it is done in each replay of a CUDA graph

  // The row. Waits, without the GIL, for what was sent to the stream before. Throws when the scan
  // was recorded into a CUDA graph that has not run.
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
  const bool captured_;  // its graph may run again at any time: the slot stays taken
  Row copy_{};
};

}  // namespace nanscan::cuda
