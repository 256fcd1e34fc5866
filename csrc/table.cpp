#include "table.h"

#include "cpu/scan.h"

namespace nanscan {
namespace {

constexpr int64_t kNoVersion = -1;

// Scans with the GIL released when the tensor is large. The caller's reference keeps it alive.
ScanTotals scan_host(const TensorView& view, bool moments) {
  if (view.elements * item_size(view.dtype) < cpu::kParallelBytes) return cpu::scan(view, moments);
  ScanTotals totals;
  Py_BEGIN_ALLOW_THREADS;
  totals = cpu::scan(view, moments);
  Py_END_ALLOW_THREADS;
  return totals;
}

Status view_host_tensor(PyObject* tensor, TensorView& view) {
  const Status status = view_tensor(tensor, view);
  return status == kOk && view.device.type != dlpack::kCPU ? kOtherDevice : status;
}

void describe(RowContext& context, const TensorView& view) {
  context.dtype = view.dtype;
  context.is_complex = view.is_complex;
  context.described = true;
  const int count = view.logical.count - (view.is_complex ? 1 : 0);
  context.shape.assign(view.logical.size, view.logical.size + count);
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

int Table::add_row() {
  const int index = size();
  if (index % kRowsPerChunk == 0) chunks_.push_back(std::make_unique<Row[]>(kRowsPerChunk));
  contexts_.emplace_back();
  return index;
}

Status Table::scan(PyObject* tensor, int index) {
  TensorView view;
  const Status status = view_host_tensor(tensor, view);
  if (status != kOk) return status;
  const ScanTotals totals = scan_host(view, /*moments=*/false);
  Row& target = row(index);
  if (target.ticket == 0) describe(contexts_[index], view);
  note_visit(index);
  merge_into(target, totals, last_ticket_, [&] { return cpu::first_nonfinite(view); });
  return kOk;
}

int Table::visit(PyObject* tensor, int index) {
  const auto found = seen_.find(tensor);
  const bool known = found != seen_.end();
  int64_t version = kNoVersion;
  if (known) {
    const Seen seen = found->second;
    version = version_of(tensor, expect_inference_);
    if (version != kNoVersion && seen.version == version && refers_to(seen.weakref, tensor))
      return seen.row;
  }
  if (index < 0) {
    TensorView view;
    const Status status = view_host_tensor(tensor, view);
    return status == kOk ? kNeedsRow : status;
  }
  const Status status = scan(tensor, index);
  if (status != kOk) return status;
  if (!known) version = version_of(tensor, expect_inference_);
  if (version == kNoVersion) return index;
  PyObject* weakref = PyWeakref_NewRef(tensor, nullptr);
  if (!weakref) {
    PyErr_Clear();
    return index;
  }
  Seen& entry = seen_[tensor];  // looked up again: a large scan lets other threads change the map
  Py_XDECREF(entry.weakref);
  entry = {weakref, version, index};
  return index;
}

void Table::snapshot(Row* rows, uint64_t* order) {
  const int count = size();
  for (int i = 0; i < count; ++i) {
    rows[i] = row(i);
    row(i) = Row{};
    order[i] = contexts_[i].order;
    contexts_[i].order = 0;
  }
  visits_ = 0;
  forget_seen();
}

void Table::forget_seen() {
  for (auto& entry : seen_) Py_DECREF(entry.second.weakref);
  seen_.clear();
}

Status scan_once(PyObject* tensor, bool moments, TensorView& view, Row& row) {
  const Status status = view_host_tensor(tensor, view);
  if (status != kOk) return status;
  uint32_t ticket = 0;
  merge_into(row, scan_host(view, moments), ticket, [&] { return cpu::first_nonfinite(view); });
  return kOk;
}

}  // namespace nanscan
