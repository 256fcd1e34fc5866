#include "results.h"

#include <algorithm>
#include <atomic>
#include <map>

#include "../gil.h"

namespace nanscan::cuda {

// The pool of rows, with their mirrors, of one device.
class Slots {
 public:
  using Slot = PendingScan::Slot;

  static Slots& of(const Device& device) {
    static auto* const all = new std::map<int, Slots>;  // never destroyed: a scan may still run
    return all->try_emplace(device.ordinal(), device).first->second;
  }

  explicit Slots(const Device& device) : device_(device) {}

  uint32_t* tickets() const { return tickets_; }
  Slot take();
  void give_back(Slot slot) { (arrived(slot) ? idle_ : abandoned_).push_back(slot); }

  static bool arrived(const Slot& slot) {
    const bool arrived = slot.host->arrived != 0;
    std::atomic_thread_fence(std::memory_order_acquire);
    return arrived;
  }

 private:
  static constexpr int kSlab = 256;

  void add_slab();

  const Device& device_;
  uint32_t* tickets_ = nullptr;
  std::vector<Slot> idle_;
  std::vector<Slot> abandoned_;  // their PendingScan is gone, but the scan still runs
};

PendingScan::Slot Slots::take() {
  if (idle_.empty()) {
    const auto done = std::partition(abandoned_.begin(), abandoned_.end(),
                                     [](const Slot& slot) { return !arrived(slot); });
    idle_.assign(done, abandoned_.end());
    abandoned_.erase(done, abandoned_.end());
  }
  if (idle_.empty()) add_slab();
  const Slot slot = idle_.back();
  idle_.pop_back();
  slot.host->arrived = 0;
  return slot;
}

void Slots::add_slab() {
  const std::string doing = "allocating memory for results on " + device_.name();
  const Driver& cuda = driver();
  CurrentContext current(device_.context());
  AllowDuringCapture allow;
  constexpr size_t kBytes = kSlab * sizeof(Row);
  void* host = nullptr;
  DevicePointer rows = 0, mirrors = 0;
  const Handle stream = device_.service_stream();
  std::vector<Row> initial(kSlab + 1, Row{});  // the last row holds the ticket counter
  const auto attempt = [&] {
    Result result = cuda.host_allocate(&host, kBytes, kHostPortable | kHostMapped);
    if (result == kSuccess) result = cuda.host_device_pointer(&mirrors, host, 0);
    if (result == kSuccess) result = cuda.allocate(&rows, kBytes + sizeof(Row));
    for (int i = 0; i < kSlab; ++i) initial[i].mirror = mirrors + i * sizeof(Row);
    if (result == kSuccess)
      result = cuda.copy_to_device(rows, initial.data(), initial.size() * sizeof(Row), stream);
    return result == kSuccess ? cuda.stream_wait(stream) : result;
  };
  const Result result = attempt();
  if (result != kSuccess) {
    if (rows) cuda.release(rows);
    if (host) cuda.host_release(host);
  }
  check(result, doing);
  if (!tickets_) tickets_ = reinterpret_cast<uint32_t*>(rows + kBytes);
  for (int i = kSlab - 1; i >= 0; --i)
    idle_.push_back({reinterpret_cast<Row*>(rows) + i, static_cast<Row*>(host) + i});
}

std::vector<std::unique_ptr<PendingScan>> PendingScan::start(const Device& device,
                                                             const std::vector<TensorView>& views,
                                                             bool moments, Handle stream) {
  Slots& slots = Slots::of(device);
  std::vector<std::unique_ptr<PendingScan>> scans;
  const bool captured = [&] {
    CurrentContext current(device.context());
    return is_capturing(stream);
  }();
  const auto add = [&] {
    scans.emplace_back(new PendingScan(device, slots.take(), stream, captured));
    return scans.back()->slot_.row;
  };
  std::vector<Row*> rows;
  for (size_t i = 0; i < views.size(); ++i) rows.push_back(add());
  const Target target{rows.front(), slots.tickets(), stream, moments, /*mirrored=*/true};
  const auto launch = [&] {
    const ReleaseGil release;
    if (views.size() == 1) {
      device.scan(views.front(), target);
      return;
    }
    ManyScans many(device, target);
    for (size_t i = 0; i < views.size(); ++i) many.add(views[i], rows[i]);
    many.flush();
  };
  try {
    launch();
  } catch (const Error&) {
    if (scans.size() == 1)
      scans.front()->slot_.host->arrived = 1;  // not launched: the slot is free
    throw;
  }
  return scans;
}

PendingScan::~PendingScan() {
  if (!captured_) Slots::of(device_).give_back(slot_);
}

bool PendingScan::ready() const { return Slots::arrived(slot_); }

const Row& PendingScan::wait() {
  if (!ready()) {
    const std::string doing = "waiting for a scan on " + device_.name();
    CurrentContext current(device_.context());
    AllowDuringCapture allow;
    const auto wait = [&] {
      const ReleaseGil release;
      // A graph may run on any stream.
      return captured_ ? driver().wait_for_context() : driver().stream_wait(stream_);
    };
    check(wait(), doing);
    if (!ready())
      throw Error("nanscan: " + doing +
                  " failed: it was recorded into a CUDA graph that has not run since");
  }
  for (int i = 0; i < kResultWords; ++i)
    reinterpret_cast<uint64_t*>(&copy_)[i] =
        reinterpret_cast<const volatile uint64_t*>(slot_.host)[i];
  return copy_;
}

}  // namespace nanscan::cuda
