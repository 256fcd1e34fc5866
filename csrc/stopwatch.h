// Measures how long hooks take and counts them, while it is switched on.
#pragma once

#include <chrono>
#include <cstdint>
#include <utility>

namespace nanscan {

class Stopwatch {
 public:
  void set_running(bool running) { running_ = running; }

  // Nanoseconds and laps since the last call.
  std::pair<uint64_t, uint64_t> take() {
    const std::pair<uint64_t, uint64_t> taken{nanoseconds_, laps_};
    nanoseconds_ = laps_ = 0;
    return taken;
  }

  // Measures its own lifetime: that of one hook.
  class Lap {
   public:
    explicit Lap(Stopwatch& watch) : watch_(watch), began_(watch.running_ ? now() : 0) {}
    ~Lap() {
      if (!began_) return;
      watch_.nanoseconds_ += now() - began_;
      ++watch_.laps_;
    }
    Lap(const Lap&) = delete;
    Lap& operator=(const Lap&) = delete;

   private:
    static uint64_t now() {
      const auto since = std::chrono::steady_clock::now().time_since_epoch();
      return static_cast<uint64_t>(std::chrono::nanoseconds(since).count());
    }

    Stopwatch& watch_;
    const uint64_t began_;
  };

 private:
  bool running_ = false;
  uint64_t nanoseconds_ = 0, laps_ = 0;
};

}  // namespace nanscan
