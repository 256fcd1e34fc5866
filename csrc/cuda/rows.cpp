#include "rows.h"

#include <algorithm>

#include "../gil.h"

namespace nanscan::cuda {

struct Copy::Buffer {
  Row* rows = nullptr;
  size_t capacity = 0;  // in rows
  Handle event = nullptr;
  bool arrived = true;
};

struct Copy::Pool {
  explicit Pool(const Device& on) : device(on) {}
  ~Pool();

  std::unique_ptr<Buffer> take(size_t count);
  bool has_arrived(Buffer& buffer) const;
  void free(Buffer& buffer);

  const Device& device;
  std::vector<std::unique_ptr<Buffer>> idle;
};

bool Copy::Pool::has_arrived(Buffer& buffer) const {
  if (buffer.arrived) return true;
  CurrentContext current(device.context());
  AllowDuringCapture allow;
  const Result result = driver().event_query(buffer.event);
  if (result == kNotReady) return false;
  check(result, "asking for a snapshot of " + device.name());
  return buffer.arrived = true;
}

std::unique_ptr<Copy::Buffer> Copy::Pool::take(size_t count) {
  for (size_t i = 0; i < idle.size(); ++i) {
    if (!has_arrived(*idle[i])) continue;  // its Copy is gone, but the copy still runs
    std::unique_ptr<Buffer> buffer = std::move(idle[i]);
    idle.erase(idle.begin() + static_cast<std::ptrdiff_t>(i));
    if (buffer->capacity >= count) return buffer;
    free(*buffer);
    --i;
  }
  auto buffer = std::make_unique<Buffer>();
  const std::string doing = "allocating memory for a snapshot of " + device.name();
  AllowDuringCapture allow;
  size_t capacity = 64;
  while (capacity < count) capacity *= 2;
  void* memory = nullptr;
  check(driver().host_allocate(&memory, capacity * sizeof(Row), kHostPortable), doing);
  buffer->rows = static_cast<Row*>(memory);
  buffer->capacity = capacity;
  const Result result = driver().event_create(&buffer->event, kEventNoTiming);
  if (result != kSuccess) {
    driver().host_release(memory);
    check(result, doing);
  }
  return buffer;
}

void Copy::Pool::free(Buffer& buffer) {
  driver().event_destroy(buffer.event);
  driver().host_release(buffer.rows);
}

Copy::Pool::~Pool() {
  try {
    CurrentContext current(device.context());
    AllowDuringCapture allow;
    const ReleaseGil release;  // the driver waits for running copies
    for (const auto& buffer : idle) free(*buffer);
  } catch (const Error&) {  // the context no longer exists, nor does the memory
  }
}

Copy::Copy(std::shared_ptr<Pool> pool, std::unique_ptr<Buffer> buffer, int count)
    : pool_(std::move(pool)), buffer_(std::move(buffer)), count_(count) {}

Copy::~Copy() { pool_->idle.push_back(std::move(buffer_)); }

bool Copy::ready() { return pool_->has_arrived(*buffer_); }

void Copy::wait() {
  if (buffer_->arrived) return;
  CurrentContext current(pool_->device.context());
  AllowDuringCapture allow;
  const auto wait_for_event = [&] {
    const ReleaseGil release;
    return driver().event_wait(buffer_->event);
  };
  check(wait_for_event(), "waiting for a snapshot of " + pool_->device.name());
  buffer_->arrived = true;
}

const Row* Copy::rows() const { return buffer_->rows; }

Rows::Rows(const Device& device) : device_(device), pool_(std::make_shared<Copy::Pool>(device)) {
  row(0);
}

Rows::~Rows() {
  if (captured_) return;  // a graph may write there until the process ends
  try {
    CurrentContext current(device_.context());
    AllowDuringCapture allow;
    const ReleaseGil release;
    for (const DevicePointer chunk : chunks_) driver().release(chunk);
    if (order_event_) driver().event_destroy(order_event_);
    for (const auto* timings : {&running_, &idle_})
      for (const Timing& timing : *timings) {
        driver().event_destroy(timing.begin);
        driver().event_destroy(timing.end);
      }
  } catch (const Error&) {
  }
}

Row* Rows::row(int index) {
  while (static_cast<size_t>(index / kRowsPerChunk) >= chunks_.size()) {
    const std::string doing = "allocating rows on " + device_.name();
    constexpr size_t kBytes = (kRowsPerChunk + 1) * sizeof(Row);
    CurrentContext current(device_.context());
    AllowDuringCapture allow;
    DevicePointer chunk;
    check(driver().allocate(&chunk, kBytes), doing);
    Result result = driver().set_bytes(chunk, 0, kBytes, device_.service_stream());
    if (result == kSuccess) result = driver().stream_wait(device_.service_stream());
    if (result != kSuccess) driver().release(chunk);
    check(result, doing);
    chunks_.push_back(chunk);
  }
  return reinterpret_cast<Row*>(address(index));
}

Rows::Use& Rows::use_of(Handle stream) {
  if (!uses_.empty() && uses_.back().stream == stream) return uses_.back();
  const auto found = std::find_if(uses_.begin(), uses_.end(),
                                  [&](const Use& use) { return use.stream == stream; });
  if (found == uses_.end()) {
    if (!note_capture(stream)) order_after_copy(stream);
    uses_.push_back({stream, 0});
  } else {
    std::swap(*found, uses_.back());
  }
  return uses_.back();
}

// A stream that the last copy did not wait for must not run ahead of that copy.
void Rows::order_after_copy(Handle stream) {
  if (!copied_ || copied_on_ == stream) return;
  CurrentContext current(device_.context());
  if (is_capturing(copied_on_)) return;
  const std::string doing = "ordering streams of " + device_.name();
  if (!order_event_) check(driver().event_create(&order_event_, kEventNoTiming), doing);
  if (driver().event_record(order_event_, copied_on_) == kSuccess)
    check(driver().stream_wait_event(stream, order_event_, 0), doing);
}

// A failure here only means that there is no measurement.
Rows::Timing Rows::begin_timing(Handle stream) {
  CurrentContext current(device_.context());
  if (is_capturing(stream)) return {};
  Timing timing{};
  if (!idle_.empty()) {
    timing = idle_.back();
    idle_.pop_back();
  } else if (driver().event_create(&timing.begin, kEventTiming) != kSuccess ||
             driver().event_create(&timing.end, kEventTiming) != kSuccess) {
    return {};
  }
  driver().event_record(timing.begin, stream);
  return timing;
}

void Rows::end_timing(Timing timing, Handle stream) {
  Handle popped;  // no CurrentContext: this must not throw
  if (driver().push_context(device_.context()) != kSuccess) return;
  driver().event_record(timing.end, stream);
  driver().pop_context(&popped);
  running_.push_back(timing);
}

double Rows::take_seconds() {
  double seconds = 0;
  if (running_.empty()) return seconds;
  CurrentContext current(device_.context());
  AllowDuringCapture allow;
  std::vector<Timing> later;
  for (const Timing& timing : running_) {
    float milliseconds = 0;
    if (driver().event_query(timing.end) == kNotReady) {
      later.push_back(timing);
      continue;
    }
    if (driver().event_elapsed(&milliseconds, timing.begin, timing.end) == kSuccess)
      seconds += 1e-3 * static_cast<double>(milliseconds);
    idle_.push_back(timing);
  }
  running_ = std::move(later);
  return seconds;
}

bool Rows::note_capture(Handle stream) {
  CurrentContext current(device_.context());
  const bool capturing = is_capturing(stream);
  captured_ |= capturing;
  return capturing;
}

// Makes the stream wait for the scans on all other streams in use, and returns those. A stream that
// is being captured has sent nothing to the device, and must not be joined. A stream may have been
// destroyed meanwhile: errors of such a stream are ignored.
std::vector<Handle> Rows::join_others(Handle stream, const std::string& doing) {
  std::vector<Handle> others;
  for (const Use& use : uses_)
    if (use.stream != stream && !is_capturing(use.stream)) others.push_back(use.stream);
  if (!order_event_ && !others.empty())
    check(driver().event_create(&order_event_, kEventNoTiming), doing);
  for (const Handle other : others)
    if (driver().event_record(order_event_, other) == kSuccess)
      check(driver().stream_wait_event(stream, order_event_, 0), doing);
  return others;
}

std::unique_ptr<Copy> Rows::reserve(int count) {
  CurrentContext current(device_.context());
  row(std::max(count - 1, 0));
  return std::unique_ptr<Copy>(new Copy(pool_, pool_->take(static_cast<size_t>(count)), count));
}

void Rows::send(Copy& copy, bool reset, Handle stream) {
  const std::string doing = "taking a snapshot of " + device_.name();
  CurrentContext current(device_.context());
  Copy::Buffer& buffer = *copy.buffer_;
  const std::vector<Handle> others = join_others(stream, doing);
  buffer.arrived = false;
  for (int begin = 0; begin < copy.count_; begin += kRowsPerChunk) {
    const size_t bytes =
        static_cast<size_t>(std::min(copy.count_ - begin, kRowsPerChunk)) * sizeof(Row);
    check(driver().copy_to_host(buffer.rows + begin, address(begin), bytes, stream), doing);
    if (reset) check(driver().set_bytes(address(begin), 0, bytes, stream), doing);
  }
  check(driver().event_record(buffer.event, stream), doing);
  for (const Handle other : others) driver().stream_wait_event(other, buffer.event, 0);
  uses_.erase(
      std::remove_if(uses_.begin(), uses_.end(),
                     [&](const Use& use) { return use.launching == 0 && use.stream != stream; }),
      uses_.end());
  copied_ = true;
  copied_on_ = stream;
  use_of(stream);
}

}  // namespace nanscan::cuda
