#include "calls.h"

#include <algorithm>

namespace nanscan {
namespace {

uint64_t next_serial() {
  static uint64_t last = 0;
  return ++last;
}

}  // namespace

Calls::Calls(Table& table, PyObject* slow, bool inputs, bool outputs, bool late_keywords,
             bool gradients)
    : table_(table),
      slow_(slow),
      inputs_(inputs),
      outputs_(outputs),
      late_keywords_(late_keywords),
      watches_gradients_(gradients),
      gradients_(std::make_shared<Gradients>(table, slow)),
      serial_(next_serial()),
      name_unknown_(PyUnicode_InternFromString("unknown")),
      name_is_running_(PyUnicode_InternFromString("is_running")),
      name_first_call_(PyUnicode_InternFromString("first_call")),
      name_input_(PyUnicode_InternFromString("new_input")),
      name_keywords_(PyUnicode_InternFromString("keywords")),
      name_output_(PyUnicode_InternFromString("new_output")),
      name_gradient_(PyUnicode_InternFromString("gradient")),
      name_call_starts_(PyUnicode_InternFromString("call_starts")),
      name_forward_ended_(PyUnicode_InternFromString("forward_ended")),
      name_grad_fn_(PyUnicode_InternFromString("grad_fn")),
      name_output_nr_(PyUnicode_InternFromString("output_nr")),
      name_hooks_(PyUnicode_InternFromString("_backward_hooks")),
      name_register_(PyUnicode_InternFromString("_register_hook_dict")) {}

Calls::~Calls() {
  gradients_->set_active(false);
  forget_running();
  for (auto& entry : modules_) release(entry.second);
  for (PyObject* name :
       {name_unknown_, name_is_running_, name_first_call_, name_input_, name_keywords_,
        name_output_, name_gradient_, name_call_starts_, name_forward_ended_, name_grad_fn_,
        name_output_nr_, name_hooks_, name_register_})
    Py_DECREF(name);
}

void Calls::release(Module* module) {
  if (--module->references > 0) return;
  Py_DECREF(module->place);
  Py_XDECREF(module->hooked);
  delete module;
}

void Calls::add(const void* module, PyObject* place, bool outermost, bool watched, bool sentinel) {
  remove(module);
  modules_[module] =
      new Module{module, Py_NewRef(place), outermost, watched, sentinel, next_phase_++};
}

void Calls::remove(const void* module) {
  const auto found = modules_.find(module);
  if (found == modules_.end()) return;
  Module* entry = found->second;
  modules_.erase(found);
  release(entry);
}

void Calls::forget_running() {
  for (auto& entry : stacks_) {
    std::vector<Module*> stack;
    stack.swap(entry.second);
    for (Module* module : stack) release(module);
  }
}

Calls::Module* Calls::find(PyObject* module) const {
  const auto found = modules_.find(module);
  return found == modules_.end() ? nullptr : found->second;
}

Calls::Stack& Calls::stack() {
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

// A KeyboardInterrupt ends module calls, and torch tells no hook. What they left on the stack shows
// only when a module comes that would not be called below it: is the lowest one really running?
bool Calls::is_suspicious(Module* entry) {
  const Stack& running = stack();
  return !running.empty() && (!entry || entry->outermost ||
                              std::find(running.begin(), running.end(), entry) != running.end());
}

bool Calls::drop_interrupted() {
  Stack& running = stack();
  PyObject* key = PyLong_FromVoidPtr(const_cast<void*>(running.front()->key));
  PyObject* answer = key ? call(slow_, name_is_running_, key) : nullptr;
  Py_XDECREF(key);
  if (answer == Py_False) {
    std::vector<Module*> stack;
    stack.swap(running);
    for (Module* module : stack) release(module);
  }
  return succeeded(answer);
}

// Leaves entry null if the module is not to be watched; else the caller releases it.
bool Calls::find_or_ask(PyObject* module, Module*& entry) {
  entry = find(module);
  if (is_suspicious(entry)) {
    if (!drop_interrupted()) return false;
    entry = find(module);  // anew: Python ran meanwhile
  }
  if (!entry) {
    if (!succeeded(call(slow_, name_unknown_, module))) return false;
    if (!(entry = find(module))) return true;
  }
  acquire(entry);
  if (entry->called) return true;
  entry->called = true;
  if (succeeded(call(slow_, name_first_call_, entry->place))) return true;
  release(entry);
  return false;
}

// Tells of a call that no other encloses. Does it belong to a backward?
bool Calls::note_start() {
  if (!stack().empty()) return true;
  PyObject* answer = call(slow_, name_call_starts_);
  stack().recomputing = answer == Py_True;
  return succeeded(answer);
}

bool Calls::before(PyObject* module, PyObject* args, PyObject* kwargs) {
  Module* entry;
  if (!find_or_ask(module, entry)) return false;
  if (!entry) return true;
  if (!note_start()) {
    release(entry);
    return false;
  }
  stack().push_back(entry);
  if (!scans_inputs(*entry)) return true;
  acquire(entry);  // `slow` may close the monitor, which empties the stack
  const bool done =
      visit_inputs(*entry, args) && (late_keywords_ || visit_keywords(*entry, kwargs));
  release(entry);
  return done;
}

bool Calls::leaf(PyObject* module, PyObject* args, PyObject* kwargs, PyObject* output) {
  Module* entry;
  if (!find_or_ask(module, entry)) return false;
  if (!entry) return true;
  const bool done =
      note_start() &&
      (!scans_inputs(*entry) || (visit_inputs(*entry, args) && visit_keywords(*entry, kwargs))) &&
      (!scans(*entry) || visit_output(*entry, output)) &&
      (!stack().empty() || succeeded(call(slow_, name_forward_ended_, entry->place)));
  release(entry);
  return done;
}

bool Calls::visit_inputs(Module& module, PyObject* args) {
  if (!PyTuple_Check(args)) return true;
  const Py_ssize_t count = PyTuple_GET_SIZE(args);
  if (static_cast<size_t>(count) > module.arguments.size()) module.arguments.resize(count);
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* x = PyTuple_GET_ITEM(args, i);
    const int row = table_.visit(x, module.arguments[i].row());
    if (row == kNotFloat) continue;
    if (row == kFailed) return false;
    if (module.arguments[i].knows(row)) continue;
    PyObject* index = PyLong_FromSsize_t(i);
    PyObject* status = PyLong_FromLong(row);
    const int own = take_row(
        index && status ? call(slow_, name_input_, module.place, index, x, status) : nullptr);
    Py_XDECREF(index);
    Py_XDECREF(status);
    if (own == -1 && PyErr_Occurred()) return false;
    module.arguments[i].note(own, row);
  }
  return true;
}

bool Calls::visit_keywords(Module& module, PyObject* kwargs) {
  if (!kwargs || !PyDict_Check(kwargs) || PyDict_GET_SIZE(kwargs) == 0) return true;
  return succeeded(call(slow_, name_keywords_, module.place, kwargs));
}

bool Calls::after(PyObject* module, PyObject* kwargs, PyObject* output) {
  Stack& running = stack();
  Module* entry = running.empty() ? nullptr : running.back();
  if (!entry || entry != find(module)) {
    entry = find(module);
    if (std::find(running.begin(), running.end(), entry) == running.end()) return true;
    for (; running.back() != entry; running.pop_back()) release(running.back());
    // What lay above was left behind by a KeyboardInterrupt.
  }
  running.pop_back();
  const bool outermost = running.empty();
  const bool done = !output ||  // the module raised
                    ((!late_keywords_ || !scans_inputs(*entry) || visit_keywords(*entry, kwargs)) &&
                     (!scans(*entry) || visit_output(*entry, output)) &&
                     (!outermost || succeeded(call(slow_, name_forward_ended_, entry->place))));
  release(entry);
  return done;
}

bool Calls::visit_output(Module& module, PyObject* output) {
  stack().wants_gradients = scans_gradients(module);
  if (!outputs_) return !scans_gradients(module) || watch_gradient(module, output);
  int& own_row = stack().recomputing ? module.recomputed_row : module.output_row;
  const int row = table_.visit(output, own_row);
  if (row >= 0 && row == own_row) return !scans_gradients(module) || watch_gradient(module, output);
  if (row >= 0 || row == kNotFloat) return true;
  if (row == kFailed) return false;
  PyObject* status = PyLong_FromLong(row);
  const int own =
      take_row(status ? call(slow_, name_output_, module.place, output, status) : nullptr);
  Py_XDECREF(status);
  if (own == -1 && PyErr_Occurred()) return false;
  own_row = own;
  return true;
}

// NOTES: Tensor.register_hook makes a dict and a handle for each tensor, 3.5 us. Here the node of
// the graph that made the output gets the dict of another tensor, one that has our hook: 0.6 us,
// and nothing on the output itself.
bool Calls::watch_gradient(Module& module, PyObject* output) {
  if (!is_plain_tensor(output)) return hook_slowly(module, output);
  PyObject* function = PyObject_GetAttr(output, name_grad_fn_);
  if (!function) {  // some views that were changed in place raise when asked
    if (!PyErr_ExceptionMatches(PyExc_RuntimeError)) return false;
    PyErr_Clear();
    return true;
  }
  const bool done = function == Py_None || add_gradient_hook(module, output, function);
  Py_DECREF(function);
  return done;
}

bool Calls::add_gradient_hook(Module& module, PyObject* output, PyObject* function) {
  if (!module.hooked || !is_first_without_hooks(output)) return hook_slowly(module, output);
  return succeeded(call(function, name_register_, module.hooked));
}

// Whether the dict of another tensor does: that says which output of the node it is for. Where a
// user has put a hook, those that follow keep their order.
bool Calls::is_first_without_hooks(PyObject* output) const {
  PyObject* hooks = PyObject_GetAttr(output, name_hooks_);
  PyObject* number = hooks ? PyObject_GetAttr(output, name_output_nr_) : nullptr;
  const bool answer = hooks == Py_None && number && PyLong_AsLong(number) == 0;
  Py_XDECREF(hooks);
  Py_XDECREF(number);
  PyErr_Clear();
  return answer;
}

bool Calls::hook_slowly(Module& module, PyObject* output) {
  PyObject* hooked = call(slow_, name_gradient_, module.place, output);
  if (!hooked) return false;
  PyObject* const before = module.hooked;
  module.hooked = hooked == Py_None ? nullptr : Py_NewRef(hooked);
  Py_XDECREF(before);
  Py_DECREF(hooked);
  return true;
}

}  // namespace nanscan
