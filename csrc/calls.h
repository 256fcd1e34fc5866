// What happens at each module call while nothing is new: the arguments were seen before, the output
// goes to its known row. Anything else (an unknown module, a first argument, a nested structure) is
// handed to Python, nanscan/_hooks.py, which this class calls `slow`.
//
// Contract: every member needs the GIL. Exceptions of `slow` pass through as Python errors.
#pragma once

#include <Python.h>

#include <memory>
#include <unordered_map>
#include <vector>

#include "gradients.h"
#include "slow.h"
#include "stopwatch.h"
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

  // outermost: no known module contains it. watched: to be scanned at all. sentinel: in every step
  // in which anything is.
  void add(const void* module, PyObject* place, bool outermost, bool watched, bool sentinel);
  void remove(const void* module);
  void forget_running();

  // The innermost place that runs in this thread; null if none. Borrowed.
  PyObject* running();

  // Whether what runs in this thread repeats a forward, for a checkpoint.
  bool recomputing() { return stack().recomputing; }

  // Whether to watch the gradients of the output that `slow` is looking at.
  bool wants_gradients() { return stack().wants_gradients; }

  // What to scan from now on. period 0: nothing, calls are only followed; 1: all that is watched;
  // more: sentinels, and of the others one in `period`, by turns.
  void set_turn(unsigned period, unsigned turn) {
    period_ = period;
    turn_ = turn;
    gradients_->set_active(attached_ && period_ > 0);
  }

  // Whether hooks are in place. Gradients of earlier calls may come at any time.
  void set_attached(bool attached) {
    attached_ = attached;
    gradients_->set_active(attached_ && period_ > 0);
  }

  Stopwatch& stopwatch() { return stopwatch_; }
  const std::shared_ptr<Gradients>& gradients() const { return gradients_; }

  // The bodies of the two hooks. False: a Python error is set.
  bool before(PyObject* module, PyObject* args, PyObject* kwargs);
  bool after(PyObject* module, PyObject* kwargs, PyObject* output);

  // Both in one, after a module that calls no other and leaves its inputs as they were.
  bool leaf(PyObject* module, PyObject* args, PyObject* kwargs, PyObject* output);

 private:
  struct Module {
    const void* key;
    PyObject* place;
    bool outermost, watched, sentinel;
    unsigned phase;      // whose turn it is
    int references = 1;  // of the map and of the stacks; counted under the GIL
    bool called = false;
    int output_row = -1;
    int recomputed_row = -1;
    std::vector<Memory> arguments;
    PyObject* hooked = nullptr;  // a tensor with the hook for its only output's gradient
  };
  struct Stack : std::vector<Module*> {
    bool recomputing = false;  // its lowest module was called from within a backward
    bool wants_gradients = false;
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
  bool note_start();
  Stack& stack();
  bool visit_inputs(Module& module, PyObject* args);
  bool visit_keywords(Module& module, PyObject* kwargs);
  bool visit_output(Module& module, PyObject* output);
  bool watch_gradient(Module& module, PyObject* output);
  bool add_gradient_hook(Module& module, PyObject* output, PyObject* function);
  bool is_first_without_hooks(PyObject* output) const;
  bool hook_slowly(Module& module, PyObject* output);

  Table& table_;
  PyObject* slow_;
  const bool inputs_, outputs_, late_keywords_, watches_gradients_;
  bool is_its_turn(const Module& module) const {
    return period_ == 1 || (period_ > 1 && module.phase % period_ == turn_ % period_);
  }
  bool scans(const Module& module) const {
    return module.watched && (is_its_turn(module) || (period_ > 1 && module.sentinel));
  }
  // A hook on a tensor costs more than a scan of it: few are there in every step.
  bool scans_gradients(const Module& module) const {
    return watches_gradients_ && module.watched &&
           (is_its_turn(module) || (period_ > 1 && module.outermost));
  }
  // A tensor that no scan saw on its way is no news while scans are thinned out.
  bool scans_inputs(const Module& module) {
    return inputs_ && scans(module) && (period_ == 1 || module.outermost) && !stack().recomputing;
  }

  unsigned period_ = 1, turn_ = 0, next_phase_ = 0;
  bool attached_ = false;
  Stopwatch stopwatch_;
  const std::shared_ptr<Gradients> gradients_;
  const uint64_t serial_;  // never used twice, unlike an address
  std::unordered_map<const void*, Module*> modules_;
  std::unordered_map<unsigned long, Stack> stacks_;  // by thread; entries are never erased
  PyObject *name_unknown_, *name_is_running_, *name_first_call_, *name_input_, *name_keywords_,
      *name_output_, *name_gradient_, *name_call_starts_, *name_forward_ended_, *name_grad_fn_,
      *name_output_nr_, *name_hooks_, *name_register_;
};

}  // namespace nanscan
