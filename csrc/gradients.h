// The work when a gradient reaches a module's output. As long as nothing is new, it is scanned into
// its known row. Anything else goes to `python_hooks`, see python_hooks.h.
//
// Contract: every member needs the GIL. Autograd graphs hold the hooks, which may so outlive the
// monitor: an inactive object does nothing, and uses neither table nor python_hooks.
#pragma once

#include <Python.h>

#include <memory>

#include "python_hooks.h"
#include "stopwatch.h"
#include "table.h"

namespace nanscan {

class Gradients {
 public:
  // Both are borrowed, and must live while this object is active.
  Gradients(Table& table, PyObject* python_hooks) : table_(table), python_hooks_(python_hooks) {}

  void set_active(bool active) { active_ = active; }
  Stopwatch& stopwatch() { return stopwatch_; }

  // One hook for all outputs of one module. It knows the module by number only: Python's garbage
  // collector would not see a reference that is held here.
  struct Hook {
    std::shared_ptr<Gradients> gradients;
    int number;
    KnownRows rows = {};
  };

  // The body of a hook. False: a Python error is set.
  bool visit(Hook& hook, PyObject* gradient);

 private:
  Table& table_;
  PyObject* const python_hooks_;
  bool active_ = false;
  Stopwatch stopwatch_;
};

}  // namespace nanscan
