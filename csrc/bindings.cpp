// The module nanscan._C: checks Python arguments, calls C++, and turns failures into exceptions.
//
// Functions that every hook calls are raw METH_FASTCALL functions; pybind11 makes all others. The
// `self` of a raw function is a capsule of the C++ object, so that a call needs no attribute
// look-up, no argument tuple and no type cast.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <string>
#include <type_traits>

#include "calls.h"
#include "check.h"
#include "cpu/scan.h"
#include "cuda/results.h"
#include "door.h"
#include "held_states.h"
#include "host_scan.h"
#include "python_hooks.h"
#include "scan_result.h"
#include "scannable.h"
#include "table.h"

namespace py = pybind11;

namespace nanscan {
namespace {

// The name of the capsules of each type; Python checks it.
template <typename T>
constexpr const char* kCapsule = nullptr;
template <>
constexpr const char* kCapsule<Table> = "nanscan.Table";
template <>
constexpr const char* kCapsule<Gradients::Hook> = "nanscan.GradientHook";

template <typename T>
T* self_of(PyObject* capsule) {
  return static_cast<T*>(PyCapsule_GetPointer(capsule, kCapsule<T>));
}

// A row index from Python; -2 with an error set if it is not one. -1 is allowed if `optional`.
int row_index(PyObject* object, const Table& table, bool optional) {
  const long index = PyLong_AsLong(object);
  if (index == -1 && PyErr_Occurred()) return -2;
  if (index >= (optional ? -1 : 0) && index < table.size()) return static_cast<int>(index);
  PyErr_Format(PyExc_IndexError, "nanscan: row %ld is outside a table of %d rows", index,
               table.size());
  return -2;
}

bool expect_arguments(Py_ssize_t count, Py_ssize_t least, Py_ssize_t most) {
  if (count >= least && count <= most) return true;
  PyErr_Format(PyExc_TypeError, "nanscan: expected %zd arguments, got %zd", most, count);
  return false;
}

py::bytes scan_now(const TensorView& view, bool moments) {
  const Row row = scan_once(view, moments);
  return py::bytes(reinterpret_cast<const char*>(&row), sizeof row);
}

// Runs f, which returns an object; an error of the driver becomes a Python error.
template <typename F>
PyObject* guarded(F&& f) {
  try {
    return py::object(f()).release().ptr();
  } catch (const cuda::Error& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  } catch (py::error_already_set& error) {
    error.restore();
    return nullptr;
  }
}

PyObject* none_if(bool succeeded) { return succeeded ? Py_NewRef(Py_None) : nullptr; }

PyObject* result_of(int row_or_status) {
  return row_or_status == kFailed ? nullptr : PyLong_FromLong(row_or_status);
}

PyObject* table_scan(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  Table* table = self_of<Table>(self);
  if (!table || !expect_arguments(count, 2, 2)) return nullptr;
  const int row = row_index(args[1], *table, false);
  return row < 0 ? nullptr : result_of(table->scan(args[0], row));
}

PyObject* table_visit(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  Table* table = self_of<Table>(self);
  if (!table || !expect_arguments(count, 2, 2)) return nullptr;
  const int row = row_index(args[1], *table, true);
  return row < -1 ? nullptr : result_of(table->visit(args[0], row));
}

// scan_once(tensor, moments: bool) -> 128 bytes of a Row, a PendingScan, or a negative status.
PyObject* scan_once_raw(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (!expect_arguments(count, 2, 2)) return nullptr;
  const int moments = PyObject_IsTrue(args[1]);
  if (moments < 0) return nullptr;
  TensorView view;
  const Status status = view_scannable(args[0], view, LazyBits::kAlwaysAsk);
  if (status != kOk) return PyLong_FromLong(status);
  if (!is_launched(view)) return scan_now(view, moments != 0).release().ptr();
  return guarded([&] { return py::cast(std::move(start_scans({view}, moments != 0).front())); });
}

// held_states(value, depth: int) -> bytes: id and version of each tensor, as int64.
PyObject* held_states_raw(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (!expect_arguments(count, 2, 2)) return nullptr;
  const long depth = PyLong_AsLong(args[1]);
  if (depth == -1 && PyErr_Occurred()) return nullptr;
  std::vector<int64_t> states;
  add_states(args[0], static_cast<int>(depth), states);
  return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(states.data()),
                                   static_cast<Py_ssize_t>(states.size() * sizeof(int64_t)));
}

// keys_with_tensors(dict, less: frozenset, depth: int) -> list[str]
PyObject* keys_with_tensors_raw(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (!expect_arguments(count, 3, 3)) return nullptr;
  const long depth = PyLong_AsLong(args[2]);
  if (depth == -1 && PyErr_Occurred()) return nullptr;
  if (!PyDict_Check(args[0])) {
    PyErr_SetString(PyExc_TypeError, "nanscan: expected a dict");
    return nullptr;
  }
  return keys_with_tensors(args[0], args[1], static_cast<int>(depth));
}

// check(tensor, moments: bool) -> ScanResult, or a negative status.
PyObject* check_raw(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (!expect_arguments(count, 2, 2)) return nullptr;
  const int moments = PyObject_IsTrue(args[1]);
  if (moments < 0) return nullptr;
  return guarded([&] { return check(args[0], moments != 0); });
}

// hook(gradient)
PyObject* gradient_hook(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  auto* hook = self_of<Gradients::Hook>(self);
  if (!hook || !expect_arguments(count, 1, 1)) return nullptr;
  return none_if(hook->gradients->visit(*hook, args[0]));
}

// Scans many tensors with few launches. Returns for each what scan_once returns.
py::list scan_once_many(const py::list& tensors, bool moments) {
  py::list results;
  std::map<int, std::vector<std::pair<size_t, TensorView>>> on_device;
  for (const py::handle tensor : tensors) {
    TensorView view;
    const Status status = view_scannable(tensor.ptr(), view, LazyBits::kAlwaysAsk);
    if (status == kOk && !is_launched(view)) {
      results.append(scan_now(view, moments));
      continue;
    }
    if (status == kOk) on_device[view.device.id].emplace_back(results.size(), view);
    results.append(static_cast<int>(status));
  }
  for (const auto& [ordinal, numbered] : on_device) {
    std::vector<TensorView> views;
    for (const auto& [position, view] : numbered) views.push_back(view);
    auto scans = start_scans(views, moments);
    for (size_t i = 0; i < scans.size(); ++i)
      results[numbered[i].first] = py::cast(std::move(scans[i]));
  }
  return results;
}

// scan_many(tensors: list, rows: list) -> list of (position, status) of the tensors not scanned.
PyObject* table_scan_many(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  Table* table = self_of<Table>(self);
  if (!table || !expect_arguments(count, 2, 2)) return nullptr;
  if (!PyList_Check(args[0]) || !PyList_Check(args[1]) ||
      PyList_GET_SIZE(args[0]) != PyList_GET_SIZE(args[1])) {
    PyErr_SetString(PyExc_TypeError, "nanscan: scan_many expects two lists of one length");
    return nullptr;
  }
  // A copy of the list keeps its tensors alive: a large scan releases the GIL, and the list may
  // change meanwhile.
  const auto alive =
      py::reinterpret_steal<py::object>(PyList_GetSlice(args[0], 0, PyList_GET_SIZE(args[0])));
  if (!alive) return nullptr;
  std::vector<std::pair<PyObject*, int>> pairs;
  pairs.reserve(static_cast<size_t>(PyList_GET_SIZE(args[1])));
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(alive.ptr()); ++i) {
    const int row = row_index(PyList_GET_ITEM(args[1], i), *table, false);
    if (row < 0) return nullptr;
    pairs.emplace_back(PyList_GET_ITEM(alive.ptr(), i), row);
  }
  return guarded([&] {
    std::vector<std::pair<int, int>> refused;
    table->scan_many(pairs, refused);
    return py::cast(refused);
  });
}

// A METH_FASTCALL function is stored as a PyCFunction; CPython casts it back.
template <PyObject* (*f)(PyObject*, PyObject* const*, Py_ssize_t)>
PyMethodDef* method(const char* name, const char* doc) {
  static PyMethodDef definition = {
      name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(f)), METH_FASTCALL, doc};
  return &definition;
}

py::object builtin(PyMethodDef* definition, py::handle self) {
  return py::reinterpret_steal<py::object>(PyCFunction_New(definition, self.ptr()));
}

// A raw method of an object. Its capsule keeps the Python object alive.
template <typename T, PyObject* (*f)(PyObject*, PyObject* const*, Py_ssize_t)>
py::object bound(py::object object, const char* name, const char* doc) {
  py::capsule capsule(object.cast<T*>(), kCapsule<T>);
  PyCapsule_SetContext(capsule.ptr(), object.release().ptr());
  PyCapsule_SetDestructor(capsule.ptr(), [](PyObject* self) {
    Py_XDECREF(static_cast<PyObject*>(PyCapsule_GetContext(self)));
  });
  return builtin(method<f>(name, doc), capsule);
}

py::object make_gradient_hook(const Calls& calls, int number) {
  using Hook = Gradients::Hook;
  py::capsule capsule(new Hook{calls.gradients(), number}, kCapsule<Hook>, [](PyObject* self) {
    delete static_cast<Hook*>(PyCapsule_GetPointer(self, kCapsule<Hook>));
  });
  return builtin(method<gradient_hook>("gradient_hook", "gradient_hook(gradient)"), capsule);
}

using ByteArray = py::array_t<uint8_t, py::array::c_style>;
using OrderArray = py::array_t<uint64_t, py::array::c_style>;

void expect_size(const ByteArray& rows, const OrderArray& order, int size) {
  if (rows.nbytes() != size * static_cast<py::ssize_t>(sizeof(Row)) || order.size() != size)
    throw py::value_error("nanscan: a snapshot expects arrays of exactly the table's size");
}

py::object snapshot(Table& table, ByteArray rows, OrderArray order, bool reset) {
  expect_size(rows, order, table.size());
  if (!table.can_snapshot()) return py::none();
  std::vector<int> notable;
  std::unique_ptr<Arrival> arrival = table.snapshot(reinterpret_cast<Row*>(rows.mutable_data()),
                                                    order.mutable_data(), reset, notable);
  return py::make_tuple(notable, std::move(arrival));
}

std::vector<int> merge_arrival(Arrival& arrival, ByteArray rows, OrderArray order) {
  expect_size(rows, order, arrival.size());
  return arrival.merge_into(reinterpret_cast<Row*>(rows.mutable_data()), order.mutable_data());
}

// Merges rows into as many others, each as bytes.
void merge_all(ByteArray rows, ByteArray into) {
  if (rows.size() != into.size() || rows.size() % sizeof(Row) != 0)
    throw py::value_error("nanscan: expected as many whole rows to merge as to merge into");
  const auto* from = reinterpret_cast<const Row*>(rows.data());
  auto* target = reinterpret_cast<Row*>(into.mutable_data());
  for (size_t i = 0; i < rows.size() / sizeof(Row); ++i)
    if (from[i].calls != 0) merge_rows(from[i], target[i]);
}

// turned_to_zero(rows, order) -> rows of a whole step, complete by now, that turned to 0.
std::vector<int> turned_to_zero(Table& table, const ByteArray& rows, const OrderArray& order) {
  const int count = static_cast<int>(order.size());
  expect_size(rows, order, std::min(count, table.size()));
  std::vector<int> found;
  for (int i = 0; i < count; ++i)
    if (order.at(i) != 0 && table.turned_to_zero(i, reinterpret_cast<const Row*>(rows.data())[i]))
      found.push_back(i);
  return found;
}

// torch's names, by DType.
constexpr const char* kDTypeNames[] = {
#define NANSCAN_NAME(dtype, torch_name, ...) #torch_name,
    NANSCAN_DTYPES(NANSCAN_NAME)
#undef NANSCAN_NAME
};

const RowContext& context_of(const Table& table, int row) {
  if (row < 0 || row >= table.size())
    throw py::index_error("nanscan: row " + std::to_string(row) + " is outside a table of " +
                          std::to_string(table.size()) + " rows");
  return table.context(row);
}

// torch's name of a dtype, or of the complex dtype of two such values.
std::string name_of(DType dtype, bool is_complex) {
  if (is_complex) return "complex" + std::to_string(2 * 8 * item_size(dtype));
  return kDTypeNames[static_cast<int>(dtype)];
}

py::object as_tuple(DType dtype, bool is_complex, const int64_t* sizes, size_t count) {
  py::tuple shape(count);
  for (size_t i = 0; i < count; ++i) shape[i] = sizes[i];
  return py::make_tuple(name_of(dtype, is_complex), shape);
}

// (dtype, shape); None if nothing was scanned.
py::object as_tuple(const Description* description) {
  if (!description) return py::none();
  return as_tuple(description->dtype, description->is_complex, description->shape.data(),
                  description->shape.size());
}

// (elements, nan, posinf, neginf) of the first bad scan; None where the host does not know them.
py::object bad_counts(const Description* description) {
  if (!description || !description->counts.is_bad()) return py::none();
  const Counts& counts = description->counts;
  return py::make_tuple(counts.elements, counts.nan, counts.posinf, counts.neginf);
}

const Description* description_in(const Arrival& arrival, int row) {
  if (row < 0 || row >= arrival.size()) throw py::index_error("nanscan: no such row");
  return arrival.describe(row);
}

// (dtype, shape) of a tensor, without calling torch: a tracer would record the call.
py::object describe(py::handle tensor) {
  TensorView view;
  if (view_tensor(tensor.ptr(), view, LazyBits::kByStrides) != kOk) return py::none();
  return as_tuple(view.dtype, view.is_complex, view.logical.size,
                  static_cast<size_t>(view.user_dims()));
}

// bad_parts(tensor) -> bits of dimension 0, and its size; (0, 0) of what is not scanned on the
// host.
std::pair<uint64_t, int64_t> bad_parts(py::handle tensor) {
  TensorView view;
  if (view_scannable(tensor.ptr(), view, LazyBits::kAlwaysAsk) != kOk || is_launched(view))
    return {0, 0};
  return {cpu::nonfinite_parts(view), view.user_dims() > 0 ? view.logical.size[0] : 1};
}

// Merges one scan, given as the bytes of a Row.
void merge_scan(Table& table, int row, const py::bytes& scan, const std::string& dtype,
                const std::vector<int64_t>& shape) {
  context_of(table, row);
  const std::string bytes = scan;
  const bool is_complex = dtype.rfind("complex", 0) == 0;
  int format = 0;
  while (format < kDTypeCount && name_of(static_cast<DType>(format), is_complex) != dtype) ++format;
  if (bytes.size() != sizeof(Row) || format == kDTypeCount)
    throw py::value_error("nanscan: expected the bytes of a row and the name of a dtype");
  Row merged;
  std::memcpy(&merged, bytes.data(), sizeof merged);
  table.merge(row, merged, static_cast<DType>(format), is_complex, shape);
}

void define_arrival(py::module_& m) {
  py::class_<Arrival>(m, "Arrival")
      .def("ready", &Arrival::ready)
      .def("wait", &Arrival::wait)
      .def("merge_into", &merge_arrival, py::arg("rows").noconvert(), py::arg("order").noconvert())
      .def("describe",
           [](const Arrival& arrival, int row) { return as_tuple(description_in(arrival, row)); })
      .def("bad_counts", [](const Arrival& arrival, int row) {
        return bad_counts(description_in(arrival, row));
      });
}

void define_table(py::module_& m) {
  py::class_<Table>(m, "Table")
      .def(py::init<double>(), py::arg("near_limit") = 1.0)
      .def("add_row", &Table::add_row)
      .def("__len__", &Table::size)
      .def_property_readonly("visits", &Table::visits)
      .def_property_readonly("last_ticket", &Table::last_ticket)
      .def_property_readonly("bad_rows", &Table::bad_rows)
      .def("order", [](const Table& table, int row) { return context_of(table, row).order; })
      .def("latest_order",
           [](const Table& table, int row) { return context_of(table, row).latest_order; })
      .def("snapshot", &snapshot, py::arg("rows").noconvert(), py::arg("order").noconvert(),
           py::arg("reset") = true)
      .def("turned_to_zero", &turned_to_zero, py::arg("rows").noconvert(),
           py::arg("order").noconvert())
      .def("describe", [](const Table& table,
                          int row) { return as_tuple(context_of(table, row).description.get()); })
      .def("bad_counts",
           [](const Table& table, int row) {
             return bad_counts(context_of(table, row).description.get());
           })
      .def("bad_parts",
           [](const Table& table, int row) {
             const RowContext& context = context_of(table, row);
             return std::make_pair(context.bad_parts, context.parts_of);
           })
      .def_property_readonly("captured", &Table::captured)
      .def("abandon_devices", &Table::abandon_devices)
      .def("set_timed", &Table::set_timed)
      .def("take_device_seconds", &Table::take_device_seconds)
      .def("note_captures", &Table::can_snapshot)
      .def_property_readonly("on_device", &Table::on_device)
      .def_property_readonly("scan_many",
                             [](py::object self) {
                               return bound<Table, table_scan_many>(std::move(self), "scan_many",
                                                                    "scan_many(tensors, rows)");
                             })
      .def("merge", &merge_scan)
      .def_property_readonly("visit",
                             [](py::object self) {
                               return bound<Table, table_visit>(std::move(self), "visit",
                                                                "visit(tensor, row)");
                             })
      .def_property_readonly("scan", [](py::object self) {
        return bound<Table, table_scan>(std::move(self), "scan", "scan(tensor, row)");
      });
}

// The index of a tensor's CUDA device; None if it is not on one.
py::object cuda_ordinal(py::handle tensor) {
  TensorView view;
  const Status status = view_tensor(tensor.ptr(), view, LazyBits::kByStrides);
  if (status != kOk || view.device.type != dlpack::kCUDA) return py::none();
  return py::int_(view.device.id);
}

void define_cuda(py::module_& m) {
  py::class_<cuda::PendingScan>(m, "PendingScan")
      .def("ready", &cuda::PendingScan::ready)
      .def_property_readonly("captured", &cuda::PendingScan::captured)
      .def("wait", [](cuda::PendingScan& scan) {
        return py::bytes(reinterpret_cast<const char*>(&scan.wait()), sizeof(Row));
      });
  m.def("cuda_ordinal", &cuda_ordinal);
  m.def("cuda_capability", &cuda::Device::compute_capability);
  m.def("cuda_prepare", [](int ordinal, const py::bytes& image) {
    cuda::Device::prepare(ordinal, PyBytes_AS_STRING(image.ptr()));
  });
  m.def("cuda_refuse", &refuse_device);
  m.def("cuda_is_prepared", [](int ordinal) { return cuda::Device::find(ordinal) != nullptr; });
}

// Tells a listener in Python of all module calls: slow, for searches.
class CallEvents : public CallObserver {
 public:
  explicit CallEvents(py::handle listener) : listener_(listener.ptr()) {}  // borrowed: its owner

  bool wants(PyObject*) const override { return true; }

  bool before(PyObject* module, const Arguments&, void*& call) override {
    call = this;
    return tell("on_before_module", module);
  }

  bool after(void*, PyObject* module, PyObject* output) override {
    return tell("on_after_module", module, output ? output : Py_None);
  }

 private:
  template <typename... Args>
  bool tell(const char* event, Args... args) {
    const Uncompiled scope;
    try {
      py::handle(listener_).attr(event)(py::handle(args)...);
      return true;
    } catch (py::error_already_set& error) {
      error.restore();
      return false;
    }
  }

  PyObject* const listener_;
};

// Does nothing, to measure what observing costs.
class IdleObserver : public CallObserver {
 public:
  bool wants(PyObject*) const override { return true; }
  bool before(PyObject*, const Arguments&, void*& call) override {
    call = this;
    return true;
  }
  bool after(void*, PyObject*, PyObject*) override { return true; }
};

// A module call that hooks tell of, where torch does not ask at the door.
class HookedCall {
 public:
  HookedCall(py::object module, const py::tuple& args, const py::dict& kwargs)
      : module_(std::move(module)), call_(module_.ptr()) {
    std::vector<PyObject*> values;
    for (const py::handle x : args) values.push_back(x.ptr());
    for (const auto& item : kwargs) values.push_back(item.second.ptr());
    const auto names = py::tuple(kwargs.attr("keys")());
    const Arguments arguments{values.data(), static_cast<Py_ssize_t>(args.size()),
                              names.empty() ? nullptr : names.ptr()};
    if (call_.begin(arguments)) return;
    call_.end(nullptr);
    throw py::error_already_set();
  }

  void returned(py::object output) {
    if (!py::reinterpret_steal<py::object>(call_.end(output.release().ptr())))
      throw py::error_already_set();
  }

  void raised() { call_.end(nullptr); }

 private:
  const py::object module_;
  OpenCall call_;
};

void define_door(py::module_& m) {
  py::class_<CallObserver>(m, "CallObserver");
  py::class_<CallEvents, CallObserver>(m, "CallEvents")
      .def(py::init<py::handle>(), py::arg("listener"));
  py::class_<IdleObserver, CallObserver>(m, "IdleObserver").def(py::init<>());
  py::class_<HookedCall>(m, "HookedCall")
      .def(py::init<py::object, const py::tuple&, const py::dict&>(), py::arg("module"),
           py::arg("args"), py::arg("kwargs"))
      .def("returned", &HookedCall::returned)
      .def("raised", &HookedCall::raised);
  m.def("add_observer",
        [](CallObserver& observer, py::handle owner) { add_observer(&observer, owner.ptr()); });
  m.def("remove_observer", [](CallObserver& observer) { remove_observer(&observer); });
  m.def("make_door", [](const py::type& module_type, py::handle call_code) {
    return py::reinterpret_steal<py::object>(
        make_door(reinterpret_cast<PyTypeObject*>(module_type.ptr()), call_code.ptr()));
  });
}

void define_calls(py::module_& m) {
  py::class_<Calls, CallObserver>(m, "Calls")
      .def(py::init([](Table& table, py::handle python_hooks, bool inputs, bool outputs,
                       bool gradients, bool everything, bool arguments) {
             return std::make_unique<Calls>(
                 table, python_hooks.ptr(),
                 Calls::Options{inputs, outputs, gradients, everything, arguments});
           }),
           py::arg("table"), py::arg("python_hooks"), py::arg("inputs"), py::arg("outputs"),
           py::arg("gradients"), py::arg("everything"), py::arg("arguments"),
           py::keep_alive<1, 2>())
      .def("add",
           [](Calls& calls, uintptr_t module, py::handle place, bool outermost, bool watched,
              bool always) {
             calls.add(reinterpret_cast<const void*>(module), place.ptr(), outermost, watched,
                       always);
           })
      .def("ignore",
           [](Calls& calls, uintptr_t module, bool outside) {
             calls.ignore(reinterpret_cast<const void*>(module), outside);
           })
      .def("remove", [](Calls& calls,
                        uintptr_t module) { calls.remove(reinterpret_cast<const void*>(module)); })
      .def("set_turn", &Calls::set_turn)
      .def("set_attached", &Calls::set_attached)
      .def("set_timed",
           [](Calls& calls, bool timed) {
             calls.stopwatch().set_running(timed);
             calls.gradients()->stopwatch().set_running(timed);
           })
      .def("take_cost", [](Calls& calls) { return calls.stopwatch().take(); })
      .def("take_gradient_cost", [](Calls& calls) { return calls.gradients()->stopwatch().take(); })
      .def("gradient_hook", &make_gradient_hook)
      .def_property_readonly("wants_gradients", &Calls::wants_gradients)
      .def_property_readonly("recomputing", &Calls::recomputing)
      .def_property_readonly("running", [](Calls& calls) {
        PyObject* place = calls.running();
        return place ? py::reinterpret_borrow<py::object>(place) : py::none();
      });
}

// torch's names of all dtypes that can be scanned: the real ones, then the complex ones.
py::tuple dtype_names() {
  py::list names;
  for (int i = 0; i < kDTypeCount; ++i) names.append(name_of(static_cast<DType>(i), false));
  for (int i = 0; i < kDTypeCount; ++i)
    if (has_complex(static_cast<DType>(i))) names.append(name_of(static_cast<DType>(i), true));
  return names;
}

template <typename T>
std::string numpy_format() {
  const char* const kind = std::is_floating_point_v<T> ? "f" : std::is_signed_v<T> ? "i" : "u";
  return kind + std::to_string(sizeof(T));
}

// (name, NumPy format) of each field of a Row, in the order of memory.
py::tuple row_fields() {
  py::list fields;
#define NANSCAN_FIELD(type, name, merge) fields.append(py::make_tuple(#name, numpy_format<type>()));
  NANSCAN_ROW_FIELDS(NANSCAN_FIELD)
#undef NANSCAN_FIELD
  return fields;
}

void define_status(py::module_& m) {
  m.attr("NOT_PLAIN") = static_cast<int>(kNotPlain);
  m.attr("NEEDS_ROW") = static_cast<int>(kNeedsRow);
  m.attr("NOT_FLOAT") = static_cast<int>(kNotFloat);
  m.attr("BAD_FORMAT") = static_cast<int>(kBadFormat);
  m.attr("OTHER_DEVICE") = static_cast<int>(kOtherDevice);
  m.attr("NO_DATA") = static_cast<int>(kNoData);
  m.attr("NO_VIEW") = static_cast<int>(kNoView);
  m.attr("LAZY_BIT") = static_cast<int>(kLazyBit);
  m.attr("UNPREPARED") = static_cast<int>(kUnprepared);
  m.attr("MISALIGNED") = static_cast<int>(kMisaligned);
}

void initialize(py::type tensor, py::type parameter, py::capsule exchange) {
  if (!initialize_torch(tensor.ptr(), parameter.ptr(), exchange.ptr()))
    throw py::error_already_set();
}

void define_check(py::module_& m) {
  m.attr("ResultBase") = py::reinterpret_steal<py::object>(make_result_base());
  m.def("initialize_results", [](py::handle result_type, py::handle dtypes) {
    if (!initialize_results(result_type.ptr(), dtypes.ptr())) throw py::error_already_set();
  });
  m.attr("check") = builtin(method<check_raw>("check", "check(tensor, moments)"), m);
  m.def("check_tree", [](py::handle tree, bool moments, py::handle open, py::handle close) {
    return check_tree(tree.ptr(), moments, open.ptr(), close.ptr());
  });
}

void use_variant(const std::string& name) {
  if (cpu::use_variant(name.c_str())) return;
  std::string known;
  for (const char* variant : cpu::variants())
    known += std::string(known.empty() ? "" : ", ") + variant;
  throw py::value_error("nanscan: no CPU variant '" + name + "' on this machine; it has: " + known);
}

void plain_read(const py::buffer& data) {
  const py::buffer_info info = data.request();
  py::gil_scoped_release release;
  cpu::plain_read(info.ptr, static_cast<uint64_t>(info.size * info.itemsize));
}

}  // namespace
}  // namespace nanscan

PYBIND11_MODULE(_C, m) {
  using namespace nanscan;
  m.doc() = "Compiled core of nanscan; see _C.pyi.";
  define_status(m);
  define_arrival(m);
  define_table(m);
  define_door(m);
  define_calls(m);
  define_cuda(m);
  define_check(m);
  m.def("scan_once_many", &scan_once_many);
  m.def("describe", &describe);
  m.def("merge_rows", &merge_all, py::arg("rows").noconvert(), py::arg("into").noconvert());
  m.def("bad_parts", &bad_parts);
  m.attr("scan_once") =
      builtin(method<scan_once_raw>("scan_once", "scan_once(tensor, moments)"), m);
  m.attr("held_states") =
      builtin(method<held_states_raw>("held_states", "held_states(value, depth)"), m);
  m.attr("keys_with_tensors") = builtin(
      method<keys_with_tensors_raw>("keys_with_tensors", "keys_with_tensors(dict, less, depth)"),
      m);
  m.def("initialize", &initialize);
  m.def("variants", &cpu::variants);
  m.def("variant", &cpu::variant);
  m.def("use_variant", &use_variant);
  m.def("plain_read", &plain_read);
  m.def("noop", [](const py::object&, int) { return 0; });
  m.attr("DTYPES") = dtype_names();
  m.attr("ROW_FIELDS") = row_fields();
  m.attr("CUDA_TOOLKIT") = NANSCAN_CUDA_TOOLKIT;
  m.attr("CUDA_ARCHITECTURES") = NANSCAN_CUDA_ARCHITECTURES;
}
