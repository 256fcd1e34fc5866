#include "table.h"

#include <cstring>

#include "cpu/scan.h"

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

// Scans with the GIL released when the tensor is large. The caller's reference keeps it alive.
ScanTotals scan_host(const TensorView& view, bool moments) {
  if (view.elements * item_size(view.dtype) < cpu::kParallelBytes) return cpu::scan(view, moments);
  ScanTotals totals;
  Py_BEGIN_ALLOW_THREADS;
  totals = cpu::scan(view, moments);
  Py_END_ALLOW_THREADS;
  return totals;
}

Status view_host_tensor(PyObject* tensor, TensorView& view, LazyBits lazy_bits) {
  const Status status = view_tensor(tensor, view, lazy_bits);
  return status == kOk && view.device.type != dlpack::kCPU ? kOtherDevice : status;
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

void SeenTensors::put(PyObject* tensor, PyObject* weakref, int64_t version, int row) {
  if (2 * used_ >= entries_.size()) grow();
  Entry& entry = slot(tensor);
  if (entry.tensor)
    Py_DECREF(entry.weakref);
  else
    ++used_;
  entry = {tensor, weakref, version, row};
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

void Table::describe(RowContext& context, const TensorView& view) const {
  if (!context.described || context.dtype != view.dtype) {
    const double largest = with_format(view.dtype, [](auto format) {
      using Format = decltype(format);
      return from_bits(Format::float64_bits(Format::kMaxFinite));
    });
    context.near_key = order_key(to_bits(near_limit_ * largest));
  }
  context.dtype = view.dtype;
  context.is_complex = view.is_complex;
  context.described = true;
  const int count = view.logical.count - (view.is_complex ? 1 : 0);
  context.shape.assign(view.logical.size, view.logical.size + count);
}

Status Table::scan(PyObject* tensor, int index) {
  TensorView view;
  const Status status = view_host_tensor(tensor, view, LazyBits::kByStrides);
  if (status != kOk) return status;
  const ScanTotals totals = scan_host(view, /*moments=*/false);
  Row& target = row(index);
  if (target.ticket == 0) describe(contexts_[index], view);
  note_visit(index);
  merge_into(target, totals, last_ticket_, [&] { return cpu::first_nonfinite(view); });
  return kOk;
}

int Table::visit(PyObject* tensor, int index) {
  int64_t version = kNoVersion;
  const bool known = seen_.find(tensor) != nullptr;
  if (known) {
    version = version_of(tensor, expect_inference_);  // may let other threads run: look only after
    const SeenTensors::Entry* seen = seen_.find(tensor);
    if (version != kNoVersion && seen && seen->version == version &&
        refers_to(seen->weakref, tensor))
      return seen->row;
  }
  if (index < 0) {
    TensorView view;
    const Status status = view_host_tensor(tensor, view, LazyBits::kByStrides);
    return status == kOk ? kNeedsRow : status;
  }
  const Status status = scan(tensor, index);
  if (status != kOk) return status;
  if (!known) version = version_of(tensor, expect_inference_);
  if (version == kNoVersion) return index;
  PyObject* weakref = PyWeakref_NewRef(tensor, nullptr);
  if (weakref)
    seen_.put(tensor, weakref, version, index);
  else
    PyErr_Clear();
  return index;
}

std::vector<int> Table::snapshot(Row* rows, uint64_t* order, bool reset) {
  std::vector<int> notable;
  for (int i = 0; i < size(); ++i) {
    Row& source = row(i);
    RowContext& context = contexts_[i];
    // min_key is a complement, and so ascends with the magnitude of negative values.
    if (source.ticket != 0 || source.max_key >= context.near_key ||
        source.min_key >= context.near_key)
      notable.push_back(i);
    rows[i] = source;
    order[i] = context.order;
    if (context.order == 0 || !reset) continue;
    source = Row{};
    context.order = 0;
  }
  if (reset) {
    visits_ = 0;
    seen_.clear();
  }
  return notable;
}

Status scan_once(PyObject* tensor, bool moments, Row& row) {
  TensorView view;
  const Status status = view_host_tensor(tensor, view, LazyBits::kAlwaysAsk);
  if (status != kOk) return status;
  uint32_t ticket = 0;
  merge_into(row, scan_host(view, moments), ticket, [&] { return cpu::first_nonfinite(view); });
  return kOk;
}

}  // namespace nanscan
