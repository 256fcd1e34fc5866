#include "calls.h"

#include <algorithm>

namespace nanscan {
namespace {

uint64_t next_serial() {
  static uint64_t last = 0;
  return ++last;
}

}  // namespace

Calls::Names::Names() {
#define NANSCAN_INTERN(member, text) member = PyUnicode_InternFromString(text);
  NANSCAN_CALLED_NAMES(NANSCAN_INTERN)
#undef NANSCAN_INTERN
}

Calls::Names::~Names() {
#define NANSCAN_RELEASE(member, text) Py_DECREF(member);
  NANSCAN_CALLED_NAMES(NANSCAN_RELEASE)
#undef NANSCAN_RELEASE
}

Calls::Calls(Table& table, PyObject* python_hooks, const Options& options)
    : table_(table),
      python_hooks_(python_hooks),
      options_(options),
      gradients_(std::make_shared<Gradients>(table, python_hooks)),
      serial_(next_serial()) {}

Calls::~Calls() {
  gradients_->set_active(false);
  for (auto& entry : modules_) release(entry.second);
}

void Calls::release(Module* module) {
  if (--module->references > 0) return;
  Py_XDECREF(module->place);
  Py_XDECREF(module->hooked_output);
  delete module;
}

void Calls::add(const void* module, PyObject* place, bool outermost, bool watched, bool always) {
  remove(module);
  modules_[module] =
      new Module{module, Py_NewRef(place), outermost, watched, always, next_number_++};
}

void Calls::ignore(const void* module, bool outside) {
  remove(module);
  modules_[module] = new Module{module, nullptr, false, false, false, 0, outside};
}

void Calls::remove(const void* module) {
  last_key_ = nullptr;
  const auto found = modules_.find(module);
  if (found == modules_.end()) return;
  Module* entry = found->second;
  modules_.erase(found);
  release(entry);
}

Calls::Module* Calls::find(PyObject* module) const {
  if (last_key_ == module) return last_found_;
  const auto found = modules_.find(module);
  last_key_ = module;
  last_found_ = found == modules_.end() ? nullptr : found->second;
  return last_found_;
}

Calls::Stack& Calls::stack() const {
  static thread_local uint64_t owner = 0;
  static thread_local Stack* latest = nullptr;
  if (owner != serial_) {
    latest = &stacks_[PyThread_get_thread_ident()];
    owner = serial_;
  }
  return *latest;
}

PyObject* Calls::running() {
  const Stack& s = stack();
  return s.empty() ? nullptr : s.back()->place;
}

// Of one model, only modules that are watched are followed, and the model itself. An unknown module
// may be a new part of it.
bool Calls::wants(PyObject* module) const {
  if (!attached_) return false;
  const Module* entry = find(module);
  if (is_unsure(entry)) return true;
  return entry->place && (options_.everything || entry->watched || entry->outermost);
}

// Finds a module, or lets Python add it. `entry` is null if the module is not watched; else the
// caller releases it.
bool Calls::find_or_ask(PyObject* module, Module*& entry) {
  entry = find(module);
  if (is_unsure(entry)) {
    if (!succeeded(call(python_hooks_, names_.discover, module))) return false;
    entry = find(module);
  }
  if (!entry || !entry->place) {
    entry = nullptr;
    return true;
  }
  acquire(entry);
  if (entry->called) return true;
  entry->called = true;
  if (succeeded(call(python_hooks_, names_.on_first_call, entry->place))) return true;
  release(entry);
  return false;
}

// Tells Python of a call and its arguments. Returns a new reference, or null with an error.
PyObject* Calls::tell(PyObject* method, PyObject* about, const Arguments& arguments) {
  PyObject* args = arguments.tuple();
  PyObject* kwargs = args ? arguments.dict() : nullptr;
  PyObject* answer = kwargs ? call(python_hooks_, method, about, args, kwargs) : nullptr;
  Py_XDECREF(args);
  Py_XDECREF(kwargs);
  return answer;
}

// Before any of an outermost call: nothing of it has run, also none of our own code.
bool Calls::tell_outermost(PyObject* module, const Arguments& arguments, const Stack& running) {
  return !options_.arguments || !running.empty() ||
         succeeded(tell(names_.on_outermost_call, module, arguments));
}

// Tells Python once of a module that has begun to run as compiled code.
bool Calls::note_compiled(Module& module, const Arguments& arguments) {
  if (!arguments.compiled || module.compiled) return true;
  module.compiled = true;
  return succeeded(call(python_hooks_, names_.note_compiled, module.place));
}

// At a call that no other call encloses: asks Python whether it repeats a forward in a backward.
bool Calls::note_start(Stack& running, const Module& module, const Arguments& arguments) {
  if (!running.empty()) return true;
  PyObject* answer = tell(names_.on_before_forward, module.place, arguments);
  running.recomputing = answer == Py_True;
  return succeeded(answer);
}

bool Calls::before(PyObject* module, const Arguments& arguments, void*& call) {
  const Stopwatch::Lap lap(stopwatch_);
  Stack& running = stack();
  Module* entry;
  if (!tell_outermost(module, arguments, running) || !find_or_ask(module, entry)) return false;
  if (!entry) return true;
  if (!note_compiled(*entry, arguments) || !note_start(running, *entry, arguments)) {
    release(entry);
    return false;
  }
  running.push_back(entry);
  call = entry;  // with its reference
  return !scans_inputs(*entry, running) || visit_all(*entry, arguments, running.size() == 1);
}

bool Calls::visit_all(Module& module, const Arguments& arguments, bool outermost) {
  const uint64_t bad_scans = table_.bad_scans();
  if (!visit_inputs(module, arguments) || !visit_keywords(module, arguments)) return false;
  if (!outermost || table_.bad_scans() == bad_scans) return true;
  return succeeded(tell(names_.note_bad_inputs, module.place, arguments));
}

bool Calls::visit_inputs(Module& module, const Arguments& arguments) {
  const Py_ssize_t count = arguments.positional;
  if (static_cast<size_t>(count) > module.arguments.size()) module.arguments.resize(count);
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* x = arguments.values[i];
    const int row = table_.visit(x, module.arguments[i].own());
    if (row == kNotFloat) continue;
    if (row == kFailed) return false;
    if (module.arguments[i].contains(row)) continue;
    PyObject* index = PyLong_FromSsize_t(i);
    PyObject* status = PyLong_FromLong(row);
    const int own = take_row(
        index && status ? call(python_hooks_, names_.scan_new_input, module.place, index, x, status)
                        : nullptr);
    Py_XDECREF(index);
    Py_XDECREF(status);
    if (own == -1 && PyErr_Occurred()) return false;
    module.arguments[i].add(own, row);
  }
  return true;
}

bool Calls::visit_keywords(Module& module, const Arguments& arguments) {
  if (!arguments.keywords) return true;
  PyObject* kwargs = arguments.dict();
  const bool done =
      kwargs && succeeded(call(python_hooks_, names_.scan_keywords, module.place, kwargs));
  Py_XDECREF(kwargs);
  return done;
}

bool Calls::after(void* call, PyObject*, PyObject* output) {
  const Stopwatch::Lap lap(stopwatch_);
  auto* entry = static_cast<Module*>(call);
  Stack& running = stack();
  if (running.back() == entry) {
    running.pop_back();
  } else {  // greenlets switch between calls of one thread
    running.erase(std::find(running.begin(), running.end(), entry));
  }
  const bool outermost = running.empty();
  const bool done = !output || !attached_ ||
                    ((!scans(*entry) || visit_output(*entry, output, running)) &&
                     (!outermost || succeeded(nanscan::call(python_hooks_, names_.on_after_forward,
                                                            entry->place))));
  release(entry);
  return done;
}

bool Calls::visit_output(Module& module, PyObject* output, Stack& running) {
  running.wants_gradients = scans_gradients(module);
  if (!options_.outputs) return !scans_gradients(module) || watch_gradient(module, output);
  int& own_row = running.recomputing ? module.recomputed_row : module.output_row;
  const int row = table_.visit(output, own_row);
  if (row >= 0 && row == own_row) return !scans_gradients(module) || watch_gradient(module, output);
  if (row == kNotFloat) return true;
  if (row == kFailed) return false;
  // What a module inside returned, and this one hands on.
  if (row >= 0 && (running.recomputing || module.returned.contains(row))) return true;
  PyObject* status = PyLong_FromLong(row);
  const int own = take_row(
      status ? call(python_hooks_, names_.scan_new_output, module.place, output, status) : nullptr);
  Py_XDECREF(status);
  if (own == -1 && PyErr_Occurred()) return false;
  own_row = own;
  if (row >= 0) module.returned.add(own, row);
  return true;
}

// NOTES: Tensor.register_hook makes a dict and a handle for each tensor: 3.5 us. Instead, the
// autograd node that made the output gets the hook dict of an earlier output, which has our hook:
// 0.6 us, and the output itself is left as it is.
bool Calls::watch_gradient(Module& module, PyObject* output) {
  if (!is_plain_tensor(output)) return hook_in_python(module, output);
  PyObject* function = PyObject_GetAttr(output, names_.grad_fn);
  if (!function) {  // for some views that were changed in place, grad_fn raises
    if (!PyErr_ExceptionMatches(PyExc_RuntimeError)) return false;
    PyErr_Clear();
    return true;
  }
  const bool done = function == Py_None || add_gradient_hook(module, output, function);
  Py_DECREF(function);
  return done;
}

bool Calls::add_gradient_hook(Module& module, PyObject* output, PyObject* function) {
  if (!module.hooked_output || !can_share_hook(output)) return hook_in_python(module, output);
  return succeeded(call_method(function, names_.register_hook_dict, module.hooked_output));
}

// Whether the hook dict of an earlier output serves this one. The dict holds for one output number
// of a node. A user's own hooks on the output must keep their order, so they rule it out.
bool Calls::can_share_hook(PyObject* output) const {
  PyObject* hooks = PyObject_GetAttr(output, names_.backward_hooks);
  PyObject* number = hooks ? PyObject_GetAttr(output, names_.output_nr) : nullptr;
  const bool answer = hooks == Py_None && number && PyLong_AsLong(number) == 0;
  Py_XDECREF(hooks);
  Py_XDECREF(number);
  PyErr_Clear();
  return answer;
}

bool Calls::hook_in_python(Module& module, PyObject* output) {
  PyObject* hooked = call(python_hooks_, names_.watch_gradient, module.place, output);
  if (!hooked) return false;
  PyObject* const before = module.hooked_output;
  module.hooked_output = hooked == Py_None ? nullptr : Py_NewRef(hooked);
  Py_XDECREF(before);
  Py_DECREF(hooked);
  return true;
}

}  // namespace nanscan
