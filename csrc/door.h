// The place that every module call passes: a data descriptor on nn.Module._compiled_call_impl.
//
// nn.Module.__call__ asks the module for this attribute before anything else, and calls what it
// gets. The descriptor answers it with a WatchedCall, which tells observers of the arguments, runs
// the module, and tells them of the result. Hooks, dicts and pickles of modules stay as they are.
// Anyone else who asks gets what the module itself holds: None, or what Module.compile() set.
//
// Contract: everything here needs the GIL.
#pragma once

#include <Python.h>

#include <vector>

namespace nanscan {

// What a module is called with, as CPython's vectorcall passes it. Borrowed.
struct Arguments {
  PyObject* const* values;  // the positional ones, then those of the keywords
  Py_ssize_t positional;
  PyObject* keywords;  // a tuple of names; null if there are none
  bool compiled;       // the module runs a compiled call of its own, as Module.compile() sets it

  Py_ssize_t keyword_count() const { return keywords ? PyTuple_GET_SIZE(keywords) : 0; }
  PyObject* tuple() const;  // new: of the positional ones
  PyObject* dict() const;   // new: of the keywords
};

class CallObserver {
 public:
  virtual ~CallObserver() = default;

  // Whether to tell of the calls of a module. Runs no Python code.
  virtual bool wants(PyObject* module) const = 0;

  // A call begins. `call` is set if the observer is to be told of its end, also where this fails.
  // False: a Python error is set.
  virtual bool before(PyObject* module, const Arguments& arguments, void*& call) = 0;

  // A call ended, in the same thread. `output` is null if it raised: no error is set meanwhile.
  virtual bool after(void* call, PyObject* module, PyObject* output) = 0;
};

// Adds an observer of all module calls. `owner` is the Python object that keeps it alive; it is
// kept until the observer is removed and no call that it was told of is running.
void add_observer(CallObserver* observer, PyObject* owner);
void remove_observer(CallObserver* observer);

// One module call, from its begin to its end. Observers hear of the end in reverse order. One that
// is added by another in `begin` hears of this call, too.
class OpenCall {
 public:
  explicit OpenCall(PyObject* module) : module_(module) {}  // borrowed
  OpenCall(const OpenCall&) = delete;
  OpenCall& operator=(const OpenCall&) = delete;

  // False: a Python error is set, and the module is not to run. `end` must follow in any case.
  bool begin(const Arguments& arguments);

  // Takes the result, or null with a Python error set, and returns the same; null if an observer
  // raised.
  PyObject* end(PyObject* output);

 private:
  struct Entered {
    CallObserver* observer;
    PyObject* owner;
    void* call;
  };
  static constexpr size_t kInline = 2;

  bool has_entered(const CallObserver* observer) const;
  void enter(const Entered& entered);
  Entered leave();

  PyObject* const module_;
  size_t count_ = 0;
  Entered first_[kInline];
  std::vector<Entered> more_ = {};
};

// The descriptor. `module_type` is nn.Module, `call_code` the code object of its __call__. New
// reference.
PyObject* make_door(PyTypeObject* module_type, PyObject* call_code);

}  // namespace nanscan
