#include "table.h"

#include <algorithm>

#include "cpu/scan.h"
#include "gil.h"
#include "host_scan.h"
#include "scannable.h"

namespace nanscan {
namespace {

// Runs f; an error of the driver becomes a Python error and kFailed.
template <typename F>
int guarded(F&& f) {
  try {
    return f();
  } catch (const cuda::Error& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return kFailed;
  }
}

}  // namespace

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

cuda::Rows& Table::device_rows(int ordinal) {
  const auto index = static_cast<size_t>(ordinal);
  if (index >= device_rows_.size()) device_rows_.resize(index + 1);
  if (!device_rows_[index])
    device_rows_[index] = std::make_unique<cuda::Rows>(*cuda::Device::find(ordinal));
  return *device_rows_[index];
}

// What the host records of a scan on a device, before its launch.
void Table::note_device_scan(const TensorView& view, int index, uint32_t batch) {
  RowContext& context = contexts_[index];
  context.batch = batch;
  if (row(index).ticket == 0)
    context.describe_on_device(view, near_limit_);
  else
    ++context.device_calls;  // the row went bad on the host before: that scan stays the description
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
  const Row scan = scan_host(view, /*moments=*/false);
  merge_host_scan(view, index, scan);
  if (scan.nan || scan.posinf) {  // -Inf alone is mostly a mask, in every step
    const int64_t size = view.user_dims() > 0 ? view.logical.size[0] : 1;
    contexts_[index].note_bad_parts(cpu::nonfinite_parts(view), size);
    ++bad_scans_;
  }
}

void Table::merge_host_scan(const TensorView& view, int index, const Row& scan) {
  latest_place_ = {};
  Row& target = row(index);
  if (target.ticket == 0) contexts_[index].describe(view, near_limit_, counts_of(scan));
  note_visit(index);
  merge_scan(scan, target, last_ticket_, [&] { return cpu::first_nonfinite(view); });
}

Status Table::scan_on_device(const TensorView& view, int index) {
  if (view.elements == 0) {  // nothing to launch: the host counts the call
    RowContext& context = contexts_[index];
    if (context.device_calls == 0 && row(index).ticket == 0) context.describe(view, near_limit_);
    note_visit(index);
    latest_place_ = {};
    merge_scan(Row{}, row(index), last_ticket_, [] { return uint64_t{0}; });
    return kOk;
  }
  note_device_scan(view, index, 0);
  cuda::Rows& rows = device_rows(view.device.id);
  void* const stream = stream_of(rows.device());
  const cuda::Target target{rows.row(index), rows.tickets(), stream, false, false};
  latest_place_ = {view.device.id, stream};
  const cuda::Rows::Launch launch(rows, stream);
  const ReleaseGil release;
  rows.device().scan(view, target);
  return kOk;
}

int Table::visit(PyObject* tensor, int index) {
  int64_t version;
  const int seen = seen_.row_of(tensor, version);
  if (seen >= 0) return seen;
  if (index < 0) {
    TensorView view;
    const Status status = view_scannable(tensor, view, LazyBits::kByStrides);
    return status == kOk ? kNeedsRow : status;
  }
  const Status status = scan(tensor, index);
  if (status != kOk) return status;
  seen_.add(tensor, version, index, latest_place_);
  return index;
}

void Table::scan_many(const std::vector<std::pair<PyObject*, int>>& tensors,
                      std::vector<std::pair<int, int>>& refused) {
  if (++last_batch_ == 0) ++last_batch_;
  HostBatch on_host(tensors.size());
  const auto flush_host = [&] {
    on_host.flush([this](const TensorView& view, int index, const Row& scan) {
      merge_host_scan(view, index, scan);
    });
  };
  std::vector<std::pair<TensorView, int>> waiting;  // all on one device
  const auto flush_device = [&] {
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
      if (on_host.is_full()) flush_host();
    } else if (view.elements == 0) {
      scan_on_device(view, index);
    } else {
      if (waiting.size() == cuda::kManyTensors ||
          (!waiting.empty() && waiting.front().first.device.id != view.device.id))
        flush_device();
      note_device_scan(view, index, last_batch_);
      waiting.emplace_back(view, index);
    }
  }
  flush_device();
  flush_host();
}

void Table::merge(int index, const Row& scan, DType dtype, bool is_complex,
                  const std::vector<int64_t>& shape) {
  Row& target = row(index);
  if (target.ticket == 0)
    contexts_[index].description =
        make_description(dtype, is_complex, shape, near_limit_, counts_of(scan));
  note_visit(index);
  merge_scan(scan, target, last_ticket_, [&] { return ~scan.first_bad; });
}

bool Table::can_snapshot() {
  for (const auto& rows : device_rows_) {
    if (rows && rows->note_capture(stream_of(rows->device()))) return false;
  }
  return true;
}

void Table::abandon_devices() {
  for (auto& rows : device_rows_)
    (void)rows.release();  // never freed: a forked child must not call the driver
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

std::unique_ptr<Arrival> Table::send_from_devices(bool reset) {
  std::vector<std::unique_ptr<cuda::Copy>> copies;
  // All memory is allocated first: if that fails, no device's rows have been reset.
  for (const auto& rows : device_rows_)
    if (rows) copies.push_back(rows->reserve(size()));
  if (copies.empty()) return nullptr;
  auto copy = copies.begin();
  for (const auto& rows : device_rows_)
    if (rows) rows->send(**copy++, reset, stream_of(rows->device()));
  auto arrival = std::make_unique<Arrival>(std::move(copies), captured());
  for (RowContext& context : contexts_) {
    arrival->add_row(context);
    if (!reset) continue;
    context.device_calls = 0;
    context.earlier.clear();
  }
  return arrival;
}

bool Table::turned_to_zero(int index, const Row& row) {
  int& steps = contexts_[index].steps_not_zero;
  const bool is_zero = is_all_zero(row);
  const bool is_steady = steps >= RowContext::kSteadySteps;
  steps = is_zero ? 0 : std::min(steps + 1, RowContext::kSteadySteps);
  return is_zero && is_steady;
}

std::unique_ptr<Arrival> Table::snapshot(Row* rows, uint64_t* order, bool reset,
                                         std::vector<int>& notable) {
  std::unique_ptr<Arrival> arrival = send_from_devices(reset);
  for (int i = 0; i < size(); ++i) {
    Row& source = row(i);
    RowContext& context = contexts_[i];
    if (is_notable(source, context.description.get())) notable.push_back(i);
    rows[i] = source;
    order[i] = context.order;
    if (context.order == 0) continue;
    context.latest_order = context.order;
    if (!reset) continue;
    if (!arrival && turned_to_zero(i, source)) notable.push_back(i);
    source = Row{};
    context.order = 0;
  }
  if (reset) {
    visits_ = 0;
    seen_.clear();
  }
  return arrival;
}

}  // namespace nanscan
