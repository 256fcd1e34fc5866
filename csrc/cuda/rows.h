// The rows of one table on one CUDA device. Once a step they are copied to the host and reset, in
// stream order.
//
// Contract: needs the GIL. Errors are thrown. A row never moves. The first kRowsPerChunk rows are
// one allocation, so that a step makes one copy, one reset and one event.
#pragma once

#include <memory>
#include <vector>

#include "scan.h"

namespace nanscan::cuda {

// A copy of one step's rows to the host, which runs or has ended.
class Copy {
 public:
  ~Copy();
  Copy(const Copy&) = delete;
  Copy& operator=(const Copy&) = delete;

  bool ready();             // never blocks
  void wait();              // releases the GIL
  const Row* rows() const;  // valid once ready

 private:
  friend class Rows;
  struct Buffer;  // pinned memory, used again after its copy has arrived
  struct Pool;

  Copy(std::shared_ptr<Pool> pool, std::unique_ptr<Buffer> buffer, int count);

  std::shared_ptr<Pool> pool_;
  std::unique_ptr<Buffer> buffer_;
  const int count_;
};

class Rows {
 public:
  explicit Rows(const Device& device);
  ~Rows();
  Rows(const Rows&) = delete;
  Rows& operator=(const Rows&) = delete;

  const Device& device() const { return device_; }
  uint32_t* tickets() const { return reinterpret_cast<uint32_t*>(chunks_.front()); }
  Row* row(int index);  // allocates it if need be

  struct Timing {
    Handle begin, end;  // events
  };

  // The scope of a launch into rows. The launch happens without the GIL, and another thread may
  // start a copy meanwhile: the copy must then know of this stream.
  class Launch {
   public:
    Launch(Rows& rows, Handle stream) : rows_(rows), stream_(stream) {
      ++rows_.use_of(stream_).launching;
      if (rows_.timed_) timing_ = rows_.begin_timing(stream_);
    }
    ~Launch() {
      --rows_.use_of(stream_).launching;
      if (timing_.begin) rows_.end_timing(timing_, stream_);
    }
    Launch(const Launch&) = delete;
    Launch& operator=(const Launch&) = delete;

   private:
    Rows& rows_;
    const Handle stream_;
    Timing timing_{};
  };

  // While on, each launch is between two events, except on streams that a CUDA graph records.
  void set_timed(bool timed) { timed_ = timed; }

  // The seconds of timed launches that have ended since the last call. Never blocks: a launch that
  // still runs is counted later.
  double take_seconds();

  // Checks whether a CUDA graph records the stream. If so, its replays will write into rows.
  bool note_capture(Handle stream);
  bool captured() const { return captured_; }

  // Allocates the memory for a copy of rows [0, count).
  std::unique_ptr<Copy> reserve(int count);

  // Starts the copy and, with `reset`, then zeroes the rows. Not while the stream is being
  // captured.
  void send(Copy& copy, bool reset, Handle stream);

 private:
  static constexpr int kRowsPerChunk = 16384;  // 2 MiB a chunk

  Timing begin_timing(Handle stream);
  void end_timing(Timing timing, Handle stream);

  struct Use {
    Handle stream;
    int launching;  // launches that are being made now
  };

  Use& use_of(Handle stream);
  void order_after_copy(Handle stream);
  std::vector<Handle> join_others(Handle stream, const std::string& doing);
  DevicePointer address(int index) const {
    return chunks_[index / kRowsPerChunk] +
           static_cast<uint64_t>(index % kRowsPerChunk + 1) * sizeof(Row);
  }

  const Device& device_;
  std::vector<DevicePointer> chunks_;  // each begins with an extra row; that of the first chunk
                                       // holds the last ticket
  std::shared_ptr<Copy::Pool> pool_;
  std::vector<Use> uses_;         // since the last copy, whose stream is included; latest use last
  Handle copied_on_ = nullptr;    // the stream of the last copy
  bool copied_ = false;           // there was a copy
  Handle order_event_ = nullptr;  // made when a second stream is used
  bool captured_ = false;
  bool timed_ = false;
  std::vector<Timing> running_, idle_;
};

}  // namespace nanscan::cuda
