// What happens at each module call while nothing is new: the arguments were seen before, the output
// goes to its known row. Anything else (an unknown module, a first argument, a nested structure) is
// handed to Python, nanscan/_hooks.py, which this class calls `slow`.
//
// Contract: every member needs the GIL. Exceptions of `slow` pass through as Python errors.
#pragma once

#include <Python.h>

#include <unordered_map>
#include <vector>

#include "table.h"

namespace nanscan {

class Calls {
 public:
  // `slow` is borrowed: it owns this object. `table` must outlive it too.
  Calls(Table& table, PyObject* slow, bool inputs, bool outputs, bool late_keywords,
        bool gradients);
  ~Calls();
  Calls(const Calls&) = delete;
  Calls& operator=(const Calls&) = delete;

  // outermost: no known module contains it.
  void add(const void* module, PyObject* place, bool outermost);
  void remove(const void* module);
  void forget_running();

  // The innermost place that runs in this thread; null if none. Borrowed.
  PyObject* running();

  // Whether what runs in this thread repeats a forward, for a checkpoint.
  bool recomputing() { return stack().recomputing; }

  // While not active, calls are followed but nothing is scanned.
  void set_active(bool active) { active_ = active; }

  // The bodies of the two hooks. False: a Python error is set.
  bool before(PyObject* module, PyObject* args, PyObject* kwargs);
  bool after(PyObject* module, PyObject* kwargs, PyObject* output);

  // Both in one, after a module that calls no other and leaves its inputs as they were.
  bool leaf(PyObject* module, PyObject* args, PyObject* kwargs, PyObject* output);

 private:
  static constexpr int kSources = 4;
  struct Argument {
    int row = -1;                              // its own; -1: it never needed one
    int sources[kSources] = {-1, -1, -1, -1};  // rows in which its tensors were found
    int next = 0;
  };
  struct Module {
    const void* key;
    PyObject* place;
    bool outermost;
    int references = 1;  // of the map and of the stacks; counted under the GIL
    bool called = false;
    int output_row = -1;
    int recomputed_row = -1;
    std::vector<Argument> arguments;
  };
  struct Stack : std::vector<Module*> {
    bool recomputing = false;  // its lowest module was called from within a backward
  };

  static Module* acquire(Module* module) {
    ++module->references;
    return module;
  }
  static void release(Module* module);
  Module* find(PyObject* module) const;
  bool find_or_ask(PyObject* module, Module*& entry);
  bool is_suspicious(Module* entry);
  bool drop_interrupted();
  bool note_recomputing();
  Stack& stack();
  bool visit_inputs(Module& module, PyObject* args);
  bool visit_keywords(Module& module, PyObject* kwargs);
  bool visit_output(Module& module, PyObject* output);
  bool watch_gradient(Module& module, PyObject* output);

  Table& table_;
  PyObject* slow_;
  const bool inputs_, outputs_, late_keywords_, gradients_;
  bool active_ = true;
  const uint64_t serial_;  // never used twice, unlike an address
  std::unordered_map<const void*, Module*> modules_;
  std::unordered_map<unsigned long, Stack> stacks_;  // by thread; entries are never erased
  PyObject *name_unknown_, *name_is_running_, *name_first_call_, *name_input_, *name_keywords_,
      *name_output_, *name_gradient_, *name_is_recomputing_, *name_requires_grad_,
      *name_forward_ended_;
};

}  // namespace nanscan
