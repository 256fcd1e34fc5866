// The rows of one table on one CUDA device: fixed addresses, copied to the host and reset once a
// step, both in the order of the stream.
//
// Contract: needs the GIL. Errors are thrown. A row never moves, and the first kMany of them need
// one allocation, so that a step makes one copy, one reset and one event.
#pragma once

#include <memory>
#include <vector>

#include "scan.h"

namespace nanscan::cuda {

// One step's rows on their way to the host.
class Copy {
 public:
  ~Copy();
  Copy(const Copy&) = delete;
  Copy& operator=(const Copy&) = delete;

  bool ready();             // never blocks
  void wait();              // without the GIL
  const Row* rows() const;  // once ready

 private:
  friend class Rows;
  struct Buffer;  // of pinned memory, used again when its copy arrived
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
  Row* row(int index);  // allocates where it must

  struct Timing {
    Handle begin, end;  // events
  };

  // Lasts while a launch into rows is made, which happens without the GIL: scans on several streams
  // are kept in order with copies, and another thread may take one meanwhile.
  class Launch {
   public:
    Launch(Rows& rows, Handle stream) : rows_(rows), stream_(stream) {
      ++rows_.use_of(stream_).under_way;
      if (rows_.timed_) timing_ = rows_.begin_timing(stream_);
    }
    ~Launch() {
      --rows_.use_of(stream_).under_way;
      if (timing_.begin) rows_.end_timing(timing_, stream_);
    }
    Launch(const Launch&) = delete;
    Launch& operator=(const Launch&) = delete;

   private:
    Rows& rows_;
    const Handle stream_;
    Timing timing_{};
  };

  // While on, each launch goes between two events. Not for streams that a CUDA graph records.
  void set_timed(bool timed) { timed_ = timed; }

  // Seconds that the device took for timed launches which have ended since the last time it was
  // asked. Never blocks: others are counted later.
  double take_seconds();

  // Notes whether a CUDA graph records what goes to the stream: its replays will write into rows.
  bool note_capture(Handle stream);
  bool captured() const { return captured_; }

  // Allocates what a copy of rows [0, count) needs.
  std::unique_ptr<Copy> reserve(int count);

  // Sends them to the host and, with `reset`, begins them anew. Not while the stream is being
  // captured.
  void send(Copy& copy, bool reset, Handle stream);

 private:
  static constexpr int kMany = 16384;  // 2 MiB a chunk

  Timing begin_timing(Handle stream);
  void end_timing(Timing timing, Handle stream);

  struct Use {
    Handle stream;
    int under_way;  // launches
  };

  Use& use_of(Handle stream);
  void order_after_copy(Handle stream);
  std::vector<Handle> join_others(Handle stream, const std::string& doing);
  DevicePointer address(int index) const {
    return chunks_[index / kMany] + static_cast<uint64_t>(index % kMany + 1) * sizeof(Row);
  }

  const Device& device_;
  std::vector<DevicePointer> chunks_;  // each begins with a row that is none: the first one's holds
                                       // the last ticket
  std::shared_ptr<Copy::Pool> pool_;
  std::vector<Use> uses_;  // since the last copy, and that one's stream; the latest is the last
  Handle copied_on_ = nullptr;  // the stream of the last copy
  bool copied_ = false;         // there was one
  Handle order_ = nullptr;      // event; made when a second stream is used
  bool captured_ = false;
  bool timed_ = false;
  std::vector<Timing> running_, idle_;
};

}  // namespace nanscan::cuda
