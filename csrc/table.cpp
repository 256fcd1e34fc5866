#include "table.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <set>

#include "cpu/scan.h"
#include "gil.h"

namespace nanscan {
namespace {

constexpr int64_t kNoVersion = -1;

double from_bits(uint64_t bits) {
  double value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

uint64_t to_bits(double value) {
  uint64_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

// Lets other threads run while so much is scanned. The caller's references keep tensors alive.
class ReleaseGilIfLong {
 public:
  explicit ReleaseGilIfLong(uint64_t bytes) {
    if (bytes >= cpu::kLongBytes) release_.emplace();
  }

 private:
  std::optional<ReleaseGil> release_;
};

ScanTotals scan_host(const TensorView& view, bool moments) {
  const ReleaseGilIfLong release(view.elements * item_size(view.dtype));
  return cpu::scan(view, moments);
}

std::set<int>& refused_devices() {
  static std::set<int> refused;
  return refused;
}

bool describes(const Description& description, const TensorView& view) {
  const auto count = static_cast<size_t>(view.user_dims());
  return description.dtype == view.dtype && description.is_complex == view.is_complex &&
         description.shape.size() == count &&
         std::equal(description.shape.begin(), description.shape.end(), view.logical.size);
}

bool is_notable(const Row& row, const Description* description) {
  // min_key is a complement, and so ascends with the magnitude of negative values.
  return row.ticket != 0 || (description && (row.max_key >= description->near_key ||
                                             row.min_key >= description->near_key));
}

// A row that went bad, in the terms of its own device.
struct Ticket {
  uint32_t ticket;
  int row;
  uint32_t batch = 0;  // the scan_many that the row was last in, 0: a single scan
};

// Tickets count on each device by itself, and in one launch for many tensors the smallest is the
// first to be done. Gives rows one order: each device's own; of rows scanned by one call, that of
// the call; and between devices the order in which the host first visited the rows.
void number_tickets(std::vector<std::vector<Ticket>>& sources, const uint64_t* order, Row* rows) {
  for (auto& source : sources) {
    std::sort(source.begin(), source.end(),
              [](const Ticket& a, const Ticket& b) { return a.ticket < b.ticket; });
    for (auto begin = source.begin(); begin != source.end();) {
      const auto end = std::find_if(begin, source.end(), [&](const Ticket& ticket) {
        return ticket.batch == 0 || ticket.batch != begin->batch;
      });
      std::sort(begin, end,
                [&](const Ticket& a, const Ticket& b) { return order[a.row] < order[b.row]; });
      begin = std::max(end, begin + 1);
    }
    std::reverse(source.begin(), source.end());  // the last to be taken comes first
  }
  for (uint32_t next = 1;; ++next) {
    std::vector<Ticket>* earliest = nullptr;
    for (auto& source : sources)
      if (!source.empty() && (!earliest || order[source.back().row] < order[earliest->back().row]))
        earliest = &source;
    if (!earliest) return;
    rows[earliest->back().row].ticket = next;
    earliest->pop_back();
  }
}

void merge_rows(const Row& from, Row& into) {
  into.elements += from.elements;
  into.nan += from.nan;
  into.posinf += from.posinf;
  into.neginf += from.neginf;
  into.max_key = std::max(into.max_key, from.max_key);
  into.min_key = std::max(into.min_key, from.min_key);
  if (into.ticket == 0) {
    into.first_bad = from.first_bad;
    into.first_bad_call = from.first_bad_call;
    into.ticket = from.ticket;
  }
  into.calls += from.calls;
  into.sum += from.sum;
  into.sumsq += from.sumsq;
  into.zeros += from.zeros;
  into.subnormals += from.subnormals;
}

// Runs f; the driver's errors become Python's.
template <typename F>
int guarded(F&& f) {
  try {
    return f();
  } catch (const cuda::Error& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return kFailed;
  }
}

// The tensor's version counter, which every in-place operation raises; kNoVersion where there is
// none (inference tensors). Asking such a tensor raises, which is slow: after one, ask politely.
int64_t version_of(PyObject* tensor, bool& expect_inference) {
  static PyObject* const name_version = PyUnicode_InternFromString("_version");
  static PyObject* const name_is_inference = PyUnicode_InternFromString("is_inference");
  if (expect_inference) {
    PyObject* inference = PyObject_CallMethodNoArgs(tensor, name_is_inference);
    expect_inference = inference == Py_True;
    Py_XDECREF(inference);
    if (!inference) PyErr_Clear();
    if (expect_inference) return kNoVersion;
  }
  PyObject* version = PyObject_GetAttr(tensor, name_version);
  if (!version) {
    PyErr_Clear();
    expect_inference = true;
    return kNoVersion;
  }
  const int64_t value = PyLong_AsLongLong(version);
  Py_DECREF(version);
  return value;
}

// Whether a weak reference still points to this object. An address may be used again by another
// tensor once the first is freed; a weak reference may not.
bool refers_to(PyObject* weakref, PyObject* object) {
#if PY_VERSION_HEX >= 0x030D0000
  PyObject* target = nullptr;
  if (PyWeakref_GetRef(weakref, &target) < 0) PyErr_Clear();
  Py_XDECREF(target);
  return target == object;
#else
  return PyWeakref_GetObject(weakref) == object;
#endif
}

}  // namespace

void* stream_of(const cuda::Device& device) {
  void* stream = nullptr;
  if (current_stream({dlpack::kCUDA, device.ordinal()}, stream)) return stream;
  throw cuda::Error("nanscan: torch names no current stream of " + device.name());
}

Status view_scannable(PyObject* tensor, TensorView& view, LazyBits lazy_bits) {
  const Status status = view_tensor(tensor, view, lazy_bits);
  if (status != kOk || view.device.type == dlpack::kCPU) return status;
  if (view.device.type != dlpack::kCUDA || refused_devices().count(view.device.id))
    return kOtherDevice;
  if (!cuda::Device::find(view.device.id)) return kUnprepared;
  return cuda::is_aligned(view) ? kOk : kMisaligned;
}

void refuse_device(int ordinal) { refused_devices().insert(ordinal); }

SeenTensors::Entry& SeenTensors::slot(PyObject* tensor) {
  // Objects lie 16 bytes apart at least; multiplying spreads what is left (Fibonacci hashing).
  const uint64_t hash = (reinterpret_cast<uintptr_t>(tensor) >> 4) * 0x9E3779B97F4A7C15u;
  const size_t mask = entries_.size() - 1;
  size_t i = (hash >> 32) & mask;
  while (entries_[i].tensor && entries_[i].tensor != tensor) i = (i + 1) & mask;
  return entries_[i];
}

SeenTensors::Entry* SeenTensors::find(PyObject* tensor) {
  Entry& entry = slot(tensor);
  return entry.tensor ? &entry : nullptr;
}

void SeenTensors::put(const Entry& entry) {
  if (2 * used_ >= entries_.size()) grow();
  Entry& place = slot(entry.tensor);
  if (place.tensor)
    Py_DECREF(place.weakref);
  else
    ++used_;
  place = entry;
}

void SeenTensors::clear() {
  if (used_ == 0) return;
  for (Entry& entry : entries_) {
    if (entry.tensor) Py_DECREF(entry.weakref);
    entry.tensor = nullptr;
  }
  used_ = 0;
}

void SeenTensors::grow() {
  std::vector<Entry> old(2 * entries_.size());
  old.swap(entries_);
  for (const Entry& entry : old)
    if (entry.tensor) slot(entry.tensor) = entry;
}

int Table::add_row() {
  const int index = size();
  if (index % kRowsPerChunk == 0) chunks_.push_back(std::make_unique<Row[]>(kRowsPerChunk));
  contexts_.emplace_back();
  return index;
}

std::vector<std::tuple<int, uint32_t, bool>> Table::bad_rows() const {
  std::vector<std::tuple<int, uint32_t, bool>> bad;
  for (int i = 0; i < size(); ++i) {
    const Row& r = row(i);
    if (r.ticket != 0) bad.emplace_back(i, r.ticket, r.nan == 0 && r.posinf == 0);
  }
  return bad;
}

DescriptionPtr Table::description_of(DType dtype, bool is_complex,
                                     std::vector<int64_t> shape) const {
  const double largest = with_format(dtype, [](auto format) {
    using Format = decltype(format);
    return from_bits(Format::float64_bits(Format::kMaxFinite));
  });
  return std::make_shared<const Description>(
      Description{dtype, is_complex, std::move(shape), order_key(to_bits(near_limit_ * largest))});
}

void Table::describe(RowContext& context, const TensorView& view) const {
  if (context.description && describes(*context.description, view)) return;
  const int64_t* sizes = view.logical.size;
  context.description =
      description_of(view.dtype, view.is_complex, {sizes, sizes + view.user_dims()});
}

void Table::describe_on_device(RowContext& context, const TensorView& view) const {
  if (context.device_calls > 0 && !describes(*context.description, view))
    context.earlier.emplace_back(context.device_calls, context.description);
  ++context.device_calls;
  describe(context, view);
}

cuda::Rows& Table::device_rows(int ordinal) {
  const auto index = static_cast<size_t>(ordinal);
  if (index >= device_rows_.size()) device_rows_.resize(index + 1);
  if (!device_rows_[index])
    device_rows_[index] = std::make_unique<cuda::Rows>(*cuda::Device::find(ordinal));
  return *device_rows_[index];
}

// What the host notes of a scan on a device, before its launch.
void Table::note_device_scan(const TensorView& view, int index, uint32_t batch) {
  RowContext& context = contexts_[index];
  context.batch = batch;
  if (row(index).ticket == 0)
    describe_on_device(context, view);
  else
    ++context.device_calls;  // it went bad on the host before: that is what is described
  note_visit(index);
}

Status Table::scan(PyObject* tensor, int index) {
  return static_cast<Status>(guarded([&] { return scan_or_throw(tensor, index); }));
}

Status Table::scan_or_throw(PyObject* tensor, int index) {
  TensorView view;
  const Status status = view_scannable(tensor, view, LazyBits::kByStrides);
  if (status != kOk) return status;
  if (view.device.type == dlpack::kCUDA) return scan_on_device(view, index);
  scan_on_host(view, index);
  return kOk;
}

void Table::scan_on_host(const TensorView& view, int index) {
  fold(view, index, scan_host(view, /*moments=*/false));
}

void Table::fold(const TensorView& view, int index, const ScanTotals& totals) {
  latest_device_ = -1;
  Row& target = row(index);
  if (target.ticket == 0) describe(contexts_[index], view);
  note_visit(index);
  merge_into(target, totals, last_ticket_, [&] { return cpu::first_nonfinite(view); });
}

Status Table::scan_on_device(const TensorView& view, int index) {
  if (view.elements == 0) {  // nothing to launch, but a call, which the host counts
    RowContext& context = contexts_[index];
    if (context.device_calls == 0 && row(index).ticket == 0) describe(context, view);
    note_visit(index);
    latest_device_ = -1;
    merge_into(row(index), ScanTotals{}, last_ticket_, [] { return uint64_t{0}; });
    return kOk;
  }
  note_device_scan(view, index, 0);
  cuda::Rows& rows = device_rows(view.device.id);
  void* const stream = stream_of(rows.device());
  const cuda::Target target{rows.row(index), rows.tickets(), stream, false, false};
  latest_device_ = view.device.id;
  latest_stream_ = stream;
  const cuda::Rows::Launch launch(rows, stream);
  const ReleaseGil release;
  rows.device().scan(view, target);
  return kOk;
}

int Table::visit(PyObject* tensor, int index) {
  int64_t version = kNoVersion;
  const bool known = seen_.find(tensor) != nullptr;
  if (known) {
    version = version_of(tensor, expect_inference_);  // may let other threads run: look only after
    const SeenTensors::Entry* seen = seen_.find(tensor);
    if (seen && is_seen(*seen, tensor, version)) return seen->row;
  }
  if (index < 0) {
    TensorView view;
    const Status status = view_scannable(tensor, view, LazyBits::kByStrides);
    return status == kOk ? kNeedsRow : status;
  }
  const Status status = scan(tensor, index);
  if (status != kOk) return status;
  if (!known) version = version_of(tensor, expect_inference_);
  if (version == kNoVersion) return index;
  PyObject* weakref = PyWeakref_NewRef(tensor, nullptr);
  if (weakref)
    seen_.put({tensor, weakref, version, index, latest_device_, latest_stream_});
  else
    PyErr_Clear();
  return index;
}

bool Table::is_seen(const SeenTensors::Entry& seen, PyObject* tensor, int64_t version) const {
  if (version == kNoVersion || seen.version != version || !refers_to(seen.weakref, tensor))
    return false;
  void* stream = nullptr;
  return seen.device < 0 ||
         (current_stream({dlpack::kCUDA, seen.device}, stream) && stream == seen.stream);
}

void Table::scan_many(const std::vector<std::pair<PyObject*, int>>& tensors,
                      std::vector<std::pair<int, int>>& refused) {
  constexpr size_t kAtOnce = cuda::kManyTensors;
  if (++last_batch_ == 0) ++last_batch_;
  HostBatch on_host;
  on_host.views.reserve(std::min(tensors.size(), HostBatch::kMost));
  std::vector<std::pair<TensorView, int>> waiting;  // of one device
  const auto flush = [&] {
    if (waiting.empty()) return;
    cuda::Rows& rows = device_rows(waiting.front().first.device.id);
    void* const stream = stream_of(rows.device());
    cuda::ManyScans many(rows.device(), {nullptr, rows.tickets(), stream, false, false});
    std::vector<Row*> targets;
    for (const auto& [view, index] : waiting) targets.push_back(rows.row(index));
    {
      const cuda::Rows::Launch launch(rows, stream);
      const ReleaseGil release;
      for (size_t i = 0; i < waiting.size(); ++i) many.add(waiting[i].first, targets[i]);
      many.flush();
    }
    waiting.clear();
  };
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto [tensor, index] = tensors[i];
    TensorView view;
    const Status status = view_scannable(tensor, view, LazyBits::kByStrides);
    if (status != kOk) {
      refused.emplace_back(static_cast<int>(i), status);
    } else if (view.device.type == dlpack::kCPU) {
      note_visit(index);
      on_host.add(view, index);
      if (on_host.is_full()) fold_all(on_host);
    } else if (view.elements == 0) {
      scan_on_device(view, index);
    } else {
      if (waiting.size() == kAtOnce ||
          (!waiting.empty() && waiting.front().first.device.id != view.device.id))
        flush();
      note_device_scan(view, index, last_batch_);
      waiting.emplace_back(view, index);
    }
  }
  flush();
  fold_all(on_host);
}

void Table::fold_all(HostBatch& batch) {
  std::vector<ScanTotals> totals(batch.views.size());
  {
    const ReleaseGilIfLong release(batch.bytes);
    cpu::scan_many(batch.views, /*moments=*/false, totals.data());
  }
  for (size_t i = 0; i < totals.size(); ++i) fold(batch.views[i], batch.rows[i], totals[i]);
  batch.clear();
}

void Table::merge(int index, const Row& scan, DType dtype, bool is_complex,
                  const std::vector<int64_t>& shape) {
  Row& target = row(index);
  if (target.ticket == 0) contexts_[index].description = description_of(dtype, is_complex, shape);
  note_visit(index);
  ScanTotals totals;
  totals.elements = scan.elements;
  totals.nan = scan.nan;
  totals.posinf = scan.posinf;
  totals.neginf = scan.neginf;
  totals.max_key = scan.max_key;
  totals.min_key = scan.min_key;
  merge_into(target, totals, last_ticket_, [&] { return ~scan.first_bad; });
}

bool Table::can_snapshot() {
  for (const auto& rows : device_rows_) {
    if (rows && rows->note_capture(stream_of(rows->device()))) return false;
  }
  return true;
}

void Table::abandon_devices() {
  for (auto& rows : device_rows_) (void)rows.release();  // never freed: the driver knows no child
  device_rows_.clear();
}

void Table::set_timed(bool timed) {
  for (const auto& rows : device_rows_)
    if (rows) rows->set_timed(timed);
}

double Table::take_device_seconds() {
  double seconds = 0;
  for (const auto& rows : device_rows_)
    if (rows) seconds += rows->take_seconds();
  return seconds;
}

bool Table::captured() const {
  return std::any_of(device_rows_.begin(), device_rows_.end(),
                     [](const auto& rows) { return rows && rows->captured(); });
}

std::unique_ptr<Arrival> Table::send(bool reset) {
  auto arrival = std::make_unique<Arrival>();
  // What can fail for want of memory comes first: no device's rows are reset then.
  for (const auto& rows : device_rows_)
    if (rows) arrival->copies_.push_back(rows->reserve(size()));
  if (arrival->copies_.empty()) return nullptr;
  auto copy = arrival->copies_.begin();
  for (const auto& rows : device_rows_)
    if (rows) rows->send(**copy++, reset, stream_of(rows->device()));
  const bool graphs = captured();
  for (int i = 0; i < size(); ++i) {
    RowContext& context = contexts_[i];
    arrival->descriptions_.push_back(context.description);
    arrival->batches_.push_back(context.batch);
    if (!context.earlier.empty()) arrival->earlier_[i] = context.earlier;
    if (graphs) arrival->graph_order_.push_back(context.latest_order);
    if (!reset) continue;
    context.device_calls = 0;
    context.earlier.clear();
  }
  return arrival;
}

std::unique_ptr<Arrival> Table::snapshot(Row* rows, uint64_t* order, bool reset,
                                         std::vector<int>& notable) {
  std::unique_ptr<Arrival> arrival = send(reset);
  for (int i = 0; i < size(); ++i) {
    Row& source = row(i);
    RowContext& context = contexts_[i];
    if (is_notable(source, context.description.get())) notable.push_back(i);
    rows[i] = source;
    order[i] = context.order;
    if (context.order == 0) continue;
    context.latest_order = context.order;
    if (!reset) continue;
    source = Row{};
    context.order = 0;
  }
  if (reset) {
    visits_ = 0;
    seen_.clear();
  }
  return arrival;
}

bool Arrival::ready() {
  return std::all_of(copies_.begin(), copies_.end(), [](auto& copy) { return copy->ready(); });
}

void Arrival::wait() {
  for (auto& copy : copies_) copy->wait();
}

std::vector<int> Arrival::merge_into(Row* rows, uint64_t* order) {
  std::vector<std::vector<Ticket>> sources(1);  // by device, the host's first
  for (int i = 0; i < size(); ++i)
    if (rows[i].ticket != 0) sources[0].push_back({rows[i].ticket, i});
  for (const auto& copy : copies_) {
    sources.emplace_back();
    for (int i = 0; i < size(); ++i) {
      const Row& arrived = copy->rows()[i];
      if (arrived.calls == 0) continue;
      if (order[i] == 0 && !graph_order_.empty()) order[i] = graph_order_[i];
      if (arrived.ticket != 0 && rows[i].ticket == 0) {
        sources.back().push_back({arrived.ticket, i, batches_[i]});
        const auto found = earlier_.find(i);
        if (found != earlier_.end())
          for (const auto& [last_call, description] : found->second)
            if (arrived.first_bad_call <= last_call) {
              descriptions_[i] = description;
              break;
            }
      }
      merge_rows(arrived, rows[i]);
    }
  }
  number_tickets(sources, order, rows);
  std::vector<int> notable;
  for (int i = 0; i < size(); ++i)
    if (is_notable(rows[i], descriptions_[i].get())) notable.push_back(i);
  copies_.clear();  // their memory is free for the next ones
  return notable;
}

void scan_once(const TensorView& view, bool moments, Row& row) {
  uint32_t ticket = 0;
  merge_into(row, scan_host(view, moments), ticket, [&] { return cpu::first_nonfinite(view); });
}

}  // namespace nanscan
