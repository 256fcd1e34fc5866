#include "seen_tensors.h"

#include "tensor_view.h"

namespace nanscan {
namespace {

constexpr int64_t kNoVersion = -1;

// Whether a weak reference still points to this object. Another tensor may have the address of one
// that was freed; the weak reference then points to nothing.
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

// A scan on one stream does not count for another stream. That one may be recorded into a CUDA
// graph, and each replay of the graph must scan as well.
bool is_current(const ScanPlace& place) {
  void* stream = nullptr;
  return place.device < 0 ||
         (current_stream({dlpack::kCUDA, place.device}, stream) && stream == place.stream);
}

}  // namespace

int SeenTensors::row_of(PyObject* tensor, int64_t& version) {
  version = kNotAsked;
  if (!slot(tensor).tensor) return -1;
  version = version_of(tensor);  // may let other threads run, so the entry is looked up again
  if (version == kNoVersion) return -1;
  const Entry& seen = slot(tensor);
  const bool is_valid = seen.tensor && seen.version == version && refers_to(seen.weakref, tensor) &&
                        is_current(seen.place);
  return is_valid ? seen.row : -1;
}

void SeenTensors::add(PyObject* tensor, int64_t version, int row, const ScanPlace& place) {
  if (version == kNotAsked) version = version_of(tensor);
  if (version == kNoVersion) return;
  PyObject* weakref = PyWeakref_NewRef(tensor, nullptr);
  if (weakref)
    put({tensor, weakref, version, row, place});
  else
    PyErr_Clear();
}

void SeenTensors::clear() {
  if (used_ == 0) return;
  for (Entry& entry : entries_) {
    if (entry.tensor) Py_DECREF(entry.weakref);
    entry.tensor = nullptr;
  }
  used_ = 0;
}

SeenTensors::Entry& SeenTensors::slot(PyObject* tensor) {
  // Addresses of objects are multiples of 16. Multiplying spreads the other bits (Fibonacci
  // hashing).
  const uint64_t hash = (reinterpret_cast<uintptr_t>(tensor) >> 4) * 0x9E3779B97F4A7C15u;
  const size_t mask = entries_.size() - 1;
  size_t i = (hash >> 32) & mask;
  while (entries_[i].tensor && entries_[i].tensor != tensor) i = (i + 1) & mask;
  return entries_[i];
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

void SeenTensors::grow() {
  std::vector<Entry> old(2 * entries_.size());
  old.swap(entries_);
  for (const Entry& entry : old)
    if (entry.tensor) slot(entry.tensor) = entry;
}

// The version counter, which every in-place operation raises; kNoVersion for inference tensors. To
// ask one of those raises an exception, which is slow. So after one, is_inference is asked first.
int64_t SeenTensors::version_of(PyObject* tensor) {
  static PyObject* const name_version = PyUnicode_InternFromString("_version");
  static PyObject* const name_is_inference = PyUnicode_InternFromString("is_inference");
  if (expect_inference_) {
    PyObject* inference = PyObject_CallMethodNoArgs(tensor, name_is_inference);
    expect_inference_ = inference == Py_True;
    Py_XDECREF(inference);
    if (!inference) PyErr_Clear();
    if (expect_inference_) return kNoVersion;
  }
  PyObject* version = PyObject_GetAttr(tensor, name_version);
  if (!version) {
    PyErr_Clear();
    expect_inference_ = true;
    return kNoVersion;
  }
  const int64_t value = PyLong_AsLongLong(version);
  Py_DECREF(version);
  return value;
}

}  // namespace nanscan
