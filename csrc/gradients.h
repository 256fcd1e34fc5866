// What happens when a gradient reaches a module's output, while nothing is new: it goes to its
// known row. Anything else is handed to Python, nanscan/_hooks.py, which this class calls `slow`.
//
// Contract: every member needs the GIL. Hooks lie in autograd graphs and may outlive the monitor;
// what is not active does nothing, and touches neither table nor `slow`.
#pragma once

#include <Python.h>

#include <memory>

#include "slow.h"
#include "stopwatch.h"
#include "table.h"

namespace nanscan {

class Gradients {
 public:
  // Both are borrowed, and alive while this is active.
  Gradients(Table& table, PyObject* slow) : table_(table), slow_(slow) {}

  void set_active(bool active) { active_ = active; }
  Stopwatch& stopwatch() { return stopwatch_; }

  // One hook, for all tensors that a place returns. It knows its place by number alone: a reference
  // from here would be one that Python's garbage collector does not see.
  struct Hook {
    std::shared_ptr<Gradients> gradients;
    int number;
    Memory memory = {};
  };

  // The body of a hook. False: a Python error is set.
  bool visit(Hook& hook, PyObject* gradient);

 private:
  Table& table_;
  PyObject* slow_;
  bool active_ = false;
  Stopwatch stopwatch_;
};

}  // namespace nanscan
