// The observer of module calls that scans: the work at each call as long as nothing is new. Then
// the arguments were seen before, and the output is scanned into its known row. Anything else (an
// unknown module, a first argument, a nested structure) goes to `python_hooks`, see python_hooks.h.
//
// Contract: every member needs the GIL. Exceptions of `python_hooks` pass through as Python errors.
#pragma once

#include <Python.h>

#include <memory>
#include <unordered_map>
#include <vector>

#include "door.h"
#include "gradients.h"
#include "python_hooks.h"
#include "stopwatch.h"
#include "table.h"

namespace nanscan {

// Every name that this class looks up in Python: X(member, text). First the methods of
// `python_hooks`, then attributes and methods of torch.
#define NANSCAN_CALLED_NAMES(X)             \
  X(discover, "discover")                   \
  X(on_outermost_call, "on_outermost_call") \
  X(on_first_call, "on_first_call")         \
  X(note_compiled, "note_compiled")         \
  X(scan_new_input, "scan_new_input")       \
  X(scan_keywords, "scan_keywords")         \
  X(scan_new_output, "scan_new_output")     \
  X(note_bad_inputs, "note_bad_inputs")     \
  X(watch_gradient, "watch_gradient")       \
  X(on_before_forward, "on_before_forward") \
  X(on_after_forward, "on_after_forward")   \
  X(grad_fn, "grad_fn")                     \
  X(output_nr, "output_nr")                 \
  X(backward_hooks, "_backward_hooks")      \
  X(register_hook_dict, "_register_hook_dict")

class Calls : public CallObserver {
 public:
  struct Options {
    bool inputs, outputs, gradients;  // what to scan
    bool everything;                  // follow modules, too, that nobody has added
    bool arguments;                   // tell python_hooks of the arguments of outermost calls
  };

  // `python_hooks` is borrowed: it owns this object. `table` must outlive this object, too.
  Calls(Table& table, PyObject* python_hooks, const Options& options);
  ~Calls() override;
  Calls(const Calls&) = delete;
  Calls& operator=(const Calls&) = delete;

  // outermost: no known module contains it. watched: it is scanned at all. always: its output is
  // scanned in every step that scans anything.
  void add(const void* module, PyObject* place, bool outermost, bool watched, bool always);
  // Known, and not to be followed. outside: no module that is followed called it; it is looked at
  // once more if one does, as it may be a part of that by then.
  void ignore(const void* module, bool outside);
  void remove(const void* module);

  // The place of the innermost module that runs in this thread; null if none. Borrowed.
  PyObject* running();

  // Whether the module calls of this thread repeat a forward, for activation checkpointing.
  bool recomputing() { return stack().recomputing; }

  // Whether the gradients of the output that Python now handles are to be watched.
  bool wants_gradients() { return stack().wants_gradients; }

  // What to scan from now on. period 0: nothing, calls are only followed. 1: all watched modules.
  // More: the `always` modules, and of the others each one in one of `period` steps; `step` says
  // which step this is.
  void set_turn(unsigned period, unsigned step) {
    period_ = period;
    step_ = step;
    gradients_->set_active(attached_ && period_ > 0);
  }

  // If not attached, calls that begin are not followed, and of those that are running only the end
  // is noted. Gradients of earlier calls may still arrive: they are ignored.
  void set_attached(bool attached) {
    attached_ = attached;
    gradients_->set_active(attached_ && period_ > 0);
  }

  Stopwatch& stopwatch() { return stopwatch_; }
  const std::shared_ptr<Gradients>& gradients() const { return gradients_; }

  bool wants(PyObject* module) const override;
  bool before(PyObject* module, const Arguments& arguments, void*& call) override;
  bool after(void* call, PyObject* module, PyObject* output) override;

 private:
  struct Module {
    const void* key;
    PyObject* place;  // null: it is ignored
    bool outermost, watched, always;
    unsigned number;  // modules are numbered as they are added
    bool outside = false;
    int references = 1;  // from the map and from the stacks
    bool called = false, compiled = false;
    int output_row = -1;
    int recomputed_row = -1;
    std::vector<KnownRows> arguments = {};
    KnownRows returned = {};            // rows of other places that held its output
    PyObject* hooked_output = nullptr;  // an earlier output, which has our gradient hook
  };
  struct Stack : std::vector<Module*> {
    bool recomputing = false;  // its lowest module was called by a backward
    bool wants_gradients = false;
  };

  struct Names {
#define NANSCAN_MEMBER(member, text) PyObject* member;
    NANSCAN_CALLED_NAMES(NANSCAN_MEMBER)
#undef NANSCAN_MEMBER
    Names();
    ~Names();
    Names(const Names&) = delete;
    Names& operator=(const Names&) = delete;
  };

  static Module* acquire(Module* module) {
    ++module->references;
    return module;
  }
  static void release(Module* module);
  Module* find(PyObject* module) const;
  // Whether Python has to say if a module is to be followed.
  bool is_unsure(const Module* entry) const {
    return !entry || (entry->outside && !stack().empty());
  }
  PyObject* tell(PyObject* method, PyObject* about, const Arguments& arguments);
  bool tell_outermost(PyObject* module, const Arguments& arguments, const Stack& running);
  bool find_or_ask(PyObject* module, Module*& entry);
  bool note_compiled(Module& module, const Arguments& arguments);
  bool note_start(Stack& running, const Module& module, const Arguments& arguments);
  Stack& stack() const;
  bool visit_inputs(Module& module, const Arguments& arguments);
  bool visit_keywords(Module& module, const Arguments& arguments);
  bool visit_all(Module& module, const Arguments& arguments, bool outermost);
  bool visit_output(Module& module, PyObject* output, Stack& running);
  bool watch_gradient(Module& module, PyObject* output);
  bool add_gradient_hook(Module& module, PyObject* output, PyObject* function);
  bool can_share_hook(PyObject* output) const;
  bool hook_in_python(Module& module, PyObject* output);

  Table& table_;
  PyObject* const python_hooks_;
  const Options options_;
  bool is_due(const Module& module) const {
    return period_ == 1 || (period_ > 1 && module.number % period_ == step_ % period_);
  }
  bool scans(const Module& module) const {
    return module.watched && (is_due(module) || (period_ > 1 && module.always));
  }
  // A hook on a tensor costs more than a scan. So of the `always` modules only the outermost ones
  // have one in every step.
  bool scans_gradients(const Module& module) const {
    return options_.gradients && module.watched &&
           (is_due(module) || (period_ > 1 && module.outermost));
  }
  // When few outputs are scanned, an input that was not seen before is nothing new: most come from
  // a module that was not scanned. So only the inputs of outermost calls are scanned then.
  bool scans_inputs(const Module& module, const Stack& running) const {
    return options_.inputs && scans(module) && (period_ == 1 || running.size() == 1) &&
           !running.recomputing;
  }

  unsigned period_ = 1, step_ = 0, next_number_ = 0;
  bool attached_ = false;
  Stopwatch stopwatch_;
  const std::shared_ptr<Gradients> gradients_;
  const uint64_t serial_;  // identifies this object; an address may be used again
  std::unordered_map<const void*, Module*> modules_;
  // What was found last: a call looks for one module three times.
  mutable const void* last_key_ = nullptr;
  mutable Module* last_found_ = nullptr;
  mutable std::unordered_map<unsigned long, Stack>
      stacks_;  // by thread; never erased, so pointers stay valid
  const Names names_;
};

}  // namespace nanscan
