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

  // outermost: no known module contains it. watched: to be scanned at all. sentinel: in every step
  // in which anything is.
  void add(const void* module, PyObject* place, bool outermost, bool watched, bool sentinel);
  void remove(const void* module);
  void forget_running();

  // The innermost place that runs in this thread; null if none. Borrowed.
  PyObject* running();

  // Whether what runs in this thread repeats a forward, for a checkpoint.
  bool recomputing() { return stack().recomputing; }

  // What to scan from now on. period 0: nothing, calls are only followed; 1: all that is watched;
  // more: sentinels, and of the others one in `period`, by turns.
  void set_turn(unsigned period, unsigned turn) {
    period_ = period;
    turn_ = turn;
  }

  // Nanoseconds spent in calls, and their number, since the last time it was asked.
  std::pair<uint64_t, uint64_t> take_cost();

  // Lasts while a hook's body runs, where costs are counted.
  class Timer {
   public:
    explicit Timer(Calls& calls) : calls_(calls) {
      if (calls_.timed_) begin();
    }
    ~Timer() {
      if (began_) end();
    }
    Timer(const Timer&) = delete;
    Timer& operator=(const Timer&) = delete;

   private:
    void begin();
    void end();

    Calls& calls_;
    uint64_t began_ = 0;
  };
  void set_timed(bool timed) { timed_ = timed; }

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
    bool outermost, watched, sentinel;
    unsigned phase;      // whose turn it is
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
  bool scans(const Module& module) const {
    return module.watched &&
           (period_ == 1 ||
            (period_ > 1 && (module.sentinel || module.phase % period_ == turn_ % period_)));
  }
  // A tensor that no scan saw on its way is no news while scans are thinned out.
  bool scans_inputs(const Module& module) {
    return inputs_ && scans(module) && (period_ == 1 || module.outermost) && !stack().recomputing;
  }

  unsigned period_ = 1, turn_ = 0, next_phase_ = 0;
  bool timed_ = false;
  uint64_t nanoseconds_ = 0, counted_ = 0;
  const uint64_t serial_;  // never used twice, unlike an address
  std::unordered_map<const void*, Module*> modules_;
  std::unordered_map<unsigned long, Stack> stacks_;  // by thread; entries are never erased
  PyObject *name_unknown_, *name_is_running_, *name_first_call_, *name_input_, *name_keywords_,
      *name_output_, *name_gradient_, *name_is_recomputing_, *name_requires_grad_,
      *name_forward_ended_;
};

}  // namespace nanscan
