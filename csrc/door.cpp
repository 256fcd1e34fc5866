#include "door.h"

#include <algorithm>
#include <cstddef>

namespace nanscan {
namespace {

struct Registered {
  CallObserver* observer;
  PyObject* owner;
};

struct Observers : std::vector<Registered> {
  unsigned version = 0;  // changes with each addition and removal
};

Observers& observers() {
  static auto* const all = new Observers;  // never deleted: threads may still run at exit
  return *all;
}

bool is_wanted(PyObject* module) {
  for (const Registered& each : observers())
    if (each.observer->wants(module)) return true;
  return false;
}

getattrofunc plain_getattr = nullptr;  // how nn.Module finds attributes

PyObject* name_slot() {
  static PyObject* const name = PyUnicode_InternFromString("_compiled_call_impl");
  return name;
}

PyObject* name_call_impl() {
  static PyObject* const name = PyUnicode_InternFromString("_call_impl");
  return name;
}

// The module's own dict: borrowed; null with an error set if it has none.
PyObject* dict_of(PyObject* module) {
  PyObject* dict = PyObject_GenericGetDict(module, nullptr);
  Py_XDECREF(dict);  // the module keeps it
  return dict;
}

// What the module itself holds under a name: borrowed; null if it is nothing or None, or with an
// error set.
PyObject* own_value(PyObject* module, PyObject* name) {
  PyObject* dict = dict_of(module);
  PyObject* value = dict ? PyDict_GetItemWithError(dict, name) : nullptr;
  return value == Py_None ? nullptr : value;
}

// The function that is the module's `_call_impl`: a look-up in the class makes no bound method.
// Null if it is anything else, or with an error set.
PyObject* call_function(PyObject* module) {
  if (Py_TYPE(module)->tp_getattro != plain_getattr) return nullptr;
  if (own_value(module, name_call_impl()) || PyErr_Occurred()) return nullptr;
  PyObject* found =
      PyObject_GetAttr(reinterpret_cast<PyObject*>(Py_TYPE(module)), name_call_impl());
  if (found && !PyFunction_Check(found)) Py_CLEAR(found);
  return found;
}

// Runs `_call_impl`, with the module before the arguments.
PyObject* run_plain(PyObject* module, const Arguments& arguments) {
  constexpr Py_ssize_t kInline = 8;
  PyObject* few[1 + kInline];
  std::vector<PyObject*> many;
  const Py_ssize_t count = arguments.positional + arguments.keyword_count();
  PyObject** values = few;
  if (count > kInline) {
    many.resize(static_cast<size_t>(1 + count));
    values = many.data();
  }
  values[0] = module;
  std::copy(arguments.values, arguments.values + count, values + 1);
  const auto positional = static_cast<size_t>(1 + arguments.positional);
  if (PyObject* function = call_function(module)) {
    PyObject* result = PyObject_Vectorcall(function, values, positional, arguments.keywords);
    Py_DECREF(function);
    return result;
  }
  if (PyErr_Occurred()) return nullptr;
  return PyObject_VectorcallMethod(name_call_impl(), values, positional, arguments.keywords);
}

// Runs the module: its own compiled call, if it has one, else `_call_impl`.
PyObject* run(PyObject* module, PyObject* own, const Arguments& arguments) {
  return own ? PyObject_Vectorcall(own, arguments.values, static_cast<size_t>(arguments.positional),
                                   arguments.keywords)
             : run_plain(module, arguments);
}

// ---- WatchedCall: what nn.Module.__call__ calls ------------------------------------------------

struct WatchedCall {
  PyObject_HEAD vectorcallfunc vectorcall;
  PyObject* module;
};

PyObject* call_watched(PyObject* self, PyObject* const* values, size_t count, PyObject* keywords) {
  // __call__ holds the module and its arguments while this runs.
  PyObject* const module = reinterpret_cast<WatchedCall*>(self)->module;
  PyObject* own = own_value(module, name_slot());
  if (!own && PyErr_Occurred()) return nullptr;
  Py_XINCREF(own);
  const Arguments arguments{values, PyVectorcall_NARGS(count),
                            keywords && PyTuple_GET_SIZE(keywords) > 0 ? keywords : nullptr,
                            own != nullptr};
  OpenCall call(module);
  PyObject* result = call.begin(arguments) ? run(module, own, arguments) : nullptr;
  Py_XDECREF(own);
  return call.end(result);
}

void delete_watched(PyObject* self) {
  Py_DECREF(reinterpret_cast<WatchedCall*>(self)->module);
  PyObject_Free(self);
}

PyTypeObject watched_type;

// It lives for one read of the attribute, so the reference needs no garbage collector.
PyObject* watch(PyObject* module) {
  auto* made = PyObject_New(WatchedCall, &watched_type);
  if (!made) return nullptr;
  made->vectorcall = call_watched;
  made->module = Py_NewRef(module);
  return reinterpret_cast<PyObject*>(made);
}

// ---- Door: the descriptor ----------------------------------------------------------------------

struct Door {
  PyObject_HEAD PyObject* call_code;
};

// The code object that runs: borrowed. PyEval_GetFrame makes a frame object, which counts towards
// the next garbage collection; where CPython shows its inner frames, none is made.
PyObject* running_code() {
#if PY_VERSION_HEX >= 0x030C0000
  PyThreadState* const thread = PyThreadState_Get();
#if PY_VERSION_HEX >= 0x030D0000
  _PyInterpreterFrame* const frame = thread->current_frame;
#else
  _PyInterpreterFrame* const frame = thread->cframe->current_frame;
#endif
  PyObject* code = frame ? PyUnstable_InterpreterFrame_GetCode(frame) : nullptr;
  Py_XDECREF(code);  // the frame keeps it
  return code;
#elif PY_VERSION_HEX >= 0x030B0000
  struct Frame {  // how _PyInterpreterFrame begins in CPython 3.11
    PyObject *function, *globals, *builtins, *locals, *code;
  };
  const auto* frame = reinterpret_cast<const Frame*>(PyThreadState_Get()->cframe->current_frame);
  return frame ? frame->code : nullptr;
#else
  PyFrameObject* const frame = PyEval_GetFrame();
  PyCodeObject* code = frame ? PyFrame_GetCode(frame) : nullptr;
  Py_XDECREF(code);
  return reinterpret_cast<PyObject*>(code);
#endif
}

PyObject* get(PyObject* self, PyObject* module, PyObject*) {
  if (!module) Py_RETURN_NONE;  // of the class
  if (is_wanted(module) && running_code() == reinterpret_cast<Door*>(self)->call_code)
    return watch(module);
  PyObject* own = own_value(module, name_slot());
  return own || !PyErr_Occurred() ? Py_NewRef(own ? own : Py_None) : nullptr;
}

// Module.compile() sets it; a value of null deletes it.
int set(PyObject*, PyObject* module, PyObject* value) {
  PyObject* dict = dict_of(module);
  if (!dict) return -1;
  const int status =
      value ? PyDict_SetItem(dict, name_slot(), value) : PyDict_DelItem(dict, name_slot());
  if (status < 0 && PyErr_ExceptionMatches(PyExc_KeyError))
    PyErr_SetObject(PyExc_AttributeError, name_slot());
  return status;
}

void delete_door(PyObject* self) {
  Py_DECREF(reinterpret_cast<Door*>(self)->call_code);
  PyObject_Free(self);
}

PyTypeObject door_type;

bool ready(PyTypeObject& type, const char* name, size_t size, destructor remove) {
  if (type.tp_name) return true;
  Py_SET_REFCNT(&type, 1);
  type.tp_name = name;
  type.tp_basicsize = static_cast<Py_ssize_t>(size);
  type.tp_flags |= Py_TPFLAGS_DEFAULT;
  type.tp_dealloc = remove;
  return PyType_Ready(&type) == 0;
}

bool ready_types() {
  watched_type.tp_flags = Py_TPFLAGS_HAVE_VECTORCALL;
  watched_type.tp_vectorcall_offset = offsetof(WatchedCall, vectorcall);
  watched_type.tp_call = PyVectorcall_Call;
  door_type.tp_descr_get = get;
  door_type.tp_descr_set = set;
  return ready(watched_type, "nanscan._C.WatchedCall", sizeof(WatchedCall), delete_watched) &&
         ready(door_type, "nanscan._C.Door", sizeof(Door), delete_door);
}

}  // namespace

PyObject* Arguments::tuple() const {
  PyObject* made = PyTuple_New(positional);
  for (Py_ssize_t i = 0; made && i < positional; ++i)
    PyTuple_SET_ITEM(made, i, Py_NewRef(values[i]));
  return made;
}

PyObject* Arguments::dict() const {
  PyObject* made = PyDict_New();
  for (Py_ssize_t i = 0; made && i < keyword_count(); ++i)
    if (PyDict_SetItem(made, PyTuple_GET_ITEM(keywords, i), values[positional + i]) < 0)
      Py_CLEAR(made);
  return made;
}

void add_observer(CallObserver* observer, PyObject* owner) {
  observers().push_back({observer, Py_NewRef(owner)});
  ++observers().version;
}

void remove_observer(CallObserver* observer) {
  Observers& all = observers();
  const auto found = std::find_if(all.begin(), all.end(),
                                  [&](const Registered& r) { return r.observer == observer; });
  if (found == all.end()) return;
  PyObject* owner = found->owner;
  all.erase(found);
  ++all.version;
  Py_DECREF(owner);
}

bool OpenCall::has_entered(const CallObserver* observer) const {
  for (size_t i = 0; i < count_; ++i)
    if ((i < kInline ? first_[i] : more_[i - kInline]).observer == observer) return true;
  return false;
}

void OpenCall::enter(const Entered& entered) {
  if (count_ < kInline) {
    first_[count_] = entered;
  } else {
    more_.push_back(entered);
  }
  ++count_;
}

OpenCall::Entered OpenCall::leave() {
  if (--count_ < kInline) return first_[count_];
  const Entered last = more_.back();
  more_.pop_back();
  return last;
}

bool OpenCall::begin(const Arguments& arguments) {
  const Observers& all = observers();
  unsigned version = all.version;
  for (size_t i = 0; i < all.size(); ++i) {
    const Registered each = all[i];
    if (has_entered(each.observer) || !each.observer->wants(module_)) continue;
    Py_INCREF(each.owner);
    void* call = nullptr;
    const bool done = each.observer->before(module_, arguments, call);
    if (call) {
      enter({each.observer, each.owner, call});
    } else {
      Py_DECREF(each.owner);
    }
    if (!done) return false;
    if (version != all.version) {  // an observer came or went meanwhile: look at all again
      version = all.version;
      i = static_cast<size_t>(-1);
    }
  }
  return true;
}

PyObject* OpenCall::end(PyObject* output) {
  while (count_ > 0) {
    const Entered entered = leave();
    PyObject *type = nullptr, *value = nullptr, *traceback = nullptr;
    if (!output) PyErr_Fetch(&type, &value, &traceback);
    const bool done = entered.observer->after(entered.call, module_, output);
    if (!done && !output) PyErr_WriteUnraisable(entered.owner);  // the module's own error counts
    if (!done && output) Py_CLEAR(output);
    if (type) PyErr_Restore(type, value, traceback);
    Py_DECREF(entered.owner);
  }
  return output;
}

PyObject* make_door(PyTypeObject* module_type, PyObject* call_code) {
  if (!ready_types()) return nullptr;
  plain_getattr = module_type->tp_getattro;
  auto* made = PyObject_New(Door, &door_type);
  if (made) made->call_code = Py_NewRef(call_code);
  return reinterpret_cast<PyObject*>(made);
}

}  // namespace nanscan
