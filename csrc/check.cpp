#include "check.h"

#include <map>
#include <utility>

#include "host_scan.h"
#include "scan_result.h"
#include "scannable.h"

namespace py = pybind11;

namespace nanscan {
namespace {

py::object owned(PyObject* object) {
  if (!object) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(object);
}

class TreeCheck {
 public:
  TreeCheck(bool moments, PyObject* open, PyObject* close)
      : moments_(moments), open_(open), close_(close) {}

  py::object run(PyObject* tree) {
    py::list holder(1);
    holder[0] = py::reinterpret_borrow<py::object>(tree);
    replace_items(holder);
    launch();
    close_nodes();
    return holder[0];
  }

 private:
  // An item of a list, of a tuple or of a dict.
  struct Place {
    PyObject* container;
    Py_ssize_t index;
    PyObject* key;

    void put(py::object item) const {
      if (PyList_CheckExact(container)) {
        PyList_SetItem(container, index, item.release().ptr());
      } else if (PyTuple_CheckExact(container)) {
        PyObject* before = PyTuple_GET_ITEM(container, index);
        PyTuple_SET_ITEM(container, index, item.release().ptr());
        Py_XDECREF(before);
      } else if (PyDict_SetItem(container, key, item.ptr()) != 0) {
        throw py::error_already_set();
      }
    }
  };

  // A node of another type. Its children stand in its place until their scans were started: what
  // makes the node may read them.
  struct OpenNode {
    py::object container, key, children, spec;
    Py_ssize_t index;
  };

  // Refuses a tree that is too deep for the stack, such as a list that holds itself.
  struct Depth {
    Depth() {
      if (Py_EnterRecursiveCall(" in nanscan.check_many")) throw py::error_already_set();
    }
    ~Depth() { Py_LeaveRecursiveCall(); }
  };

  struct Launches {
    std::vector<TensorView> views;
    std::vector<py::object> tensors;  // a large scan releases the GIL, and the tree may change
    std::vector<py::object> results;
  };

  // Each replaces the items of a container that is ours by what comes of them. So an item stays
  // alive while it is scanned, whatever other threads do to the tree.
  void replace_items(const py::list& list) {
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list.ptr()); ++i) {
      const Place place{list.ptr(), i, nullptr};
      place.put(visit(PyList_GET_ITEM(list.ptr(), i), place));
    }
  }

  void replace_items(const py::tuple& from, const py::tuple& into) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(from.ptr()); ++i) {
      const Place place{into.ptr(), i, nullptr};
      place.put(visit(PyTuple_GET_ITEM(from.ptr(), i), place));
    }
  }

  void replace_items(const py::dict& dict) {
    PyObject *key, *value;
    for (Py_ssize_t i = 0; PyDict_Next(dict.ptr(), &i, &key, &value);) {
      const Place place{dict.ptr(), 0, key};
      place.put(visit(value, place));
    }
  }

  py::object visit(PyObject* x, const Place& place) {
    if (is_plain_tensor(x)) return scan(x, place);
    if (x == Py_None) return py::none();
    if (PyList_CheckExact(x) || PyTuple_CheckExact(x) || PyDict_CheckExact(x)) return container(x);
    return other(x, place);
  }

  py::object container(PyObject* x) {
    const Depth depth;
    if (PyTuple_CheckExact(x)) {
      py::tuple results(static_cast<size_t>(PyTuple_GET_SIZE(x)));
      replace_items(py::reinterpret_borrow<py::tuple>(x), results);
      return std::move(results);
    }
    if (PyList_CheckExact(x)) {
      auto results = owned(PyList_GetSlice(x, 0, PyList_GET_SIZE(x)));
      replace_items(py::reinterpret_borrow<py::list>(results));
      return results;
    }
    auto results = owned(PyDict_Copy(x));
    replace_items(py::reinterpret_borrow<py::dict>(results));
    return results;
  }

  py::object scan(PyObject* tensor, const Place& place) {
    TensorView view;
    if (view_scannable(tensor, view, LazyBits::kAlwaysAsk) != kOk) return other(tensor, place);
    if (!is_launched(view)) return owned(new_result(view, scan_once(view, moments_), moments_));
    auto result = owned(new_result(view, Row{}, moments_));
    Launches& launches = on_device_[view.device.id];
    launches.views.push_back(view);
    launches.tensors.push_back(py::reinterpret_borrow<py::object>(tensor));
    launches.results.push_back(result);
    return result;
  }

  py::object other(PyObject* x, const Place& place) {
    const Depth depth;
    auto opened = open_(py::handle(x), moments_);
    if (!PyTuple_CheckExact(opened.ptr())) return opened;
    const auto [children, spec] = opened.cast<std::pair<py::list, py::object>>();
    open_nodes_.push_back({py::reinterpret_borrow<py::object>(place.container),
                           py::reinterpret_borrow<py::object>(place.key), children, spec,
                           place.index});
    replace_items(children);
    return children;
  }

  void launch() {
    for (const auto& [device, launches] : on_device_) {
      auto scans = start_scans(launches.views, moments_);
      for (size_t i = 0; i < scans.size(); ++i)
        set_pending(launches.results[i].ptr(), py::cast(std::move(scans[i])).ptr());
    }
  }

  // The innermost nodes first: they were opened after those around them.
  void close_nodes() {
    for (; !open_nodes_.empty(); open_nodes_.pop_back()) {
      const OpenNode& node = open_nodes_.back();
      Place{node.container.ptr(), node.index, node.key.ptr()}.put(close_(node.children, node.spec));
    }
  }

  const bool moments_;
  const py::handle open_, close_;
  std::map<int, Launches> on_device_;
  std::vector<OpenNode> open_nodes_;
};

}  // namespace

bool is_launched(const TensorView& view) {
  return view.device.type == dlpack::kCUDA && view.elements > 0;
}

std::vector<std::unique_ptr<cuda::PendingScan>> start_scans(const std::vector<TensorView>& views,
                                                            bool moments) {
  const cuda::Device& device = *cuda::Device::find(views.front().device.id);
  return cuda::PendingScan::start(device, views, moments, stream_of(device));
}

py::object check(PyObject* tensor, bool moments) {
  TensorView view;
  const Status status = view_scannable(tensor, view, LazyBits::kAlwaysAsk);
  if (status != kOk) return py::int_(static_cast<int>(status));
  if (!is_launched(view)) return owned(new_result(view, scan_once(view, moments), moments));
  auto result = owned(new_result(view, Row{}, moments));
  set_pending(result.ptr(), py::cast(std::move(start_scans({view}, moments).front())).ptr());
  return result;
}

py::object check_tree(PyObject* tree, bool moments, PyObject* open, PyObject* close) {
  return TreeCheck(moments, open, close).run(tree);
}

}  // namespace nanscan
