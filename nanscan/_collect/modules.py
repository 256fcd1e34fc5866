"""Module calls as events. No other file knows that torch tells of them by hooks.

The methods `before` and `after` run at every module call, so each line of them counts; what they do
while nothing is new is in csrc/calls.cpp.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.modules.module import (
    _global_forward_hooks_with_kwargs,
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from nanscan import _C
from nanscan._collect.listener import Listener
from nanscan._collect.names import Registry
from nanscan._collect.output_gradients import OutputGradients
from nanscan._collect.scanner import Scanner
from nanscan._collect.schedule import Turn
from nanscan._data.places import ModulePlace
from nanscan._data.site import Kind
from nanscan._hooks import _Inert

_RAISED = object()
_CALL = nn.Module._call_impl.__code__  # noqa: SLF001 - the frame of every module call

# While torch.compile traces a hook this is the constant True, and the hook leaves nothing behind.
is_tracing = torch.compiler.is_dynamo_compiling


def is_recomputing() -> bool:
    """Whether a backward runs in this thread: a call now repeats one, for a checkpoint."""
    return torch._C._current_autograd_node() is not None  # noqa: SLF001 - no public spelling


class ModuleCalls:
    """Scans what goes into and comes out of modules, and tells a listener of outermost calls.

    Args:
        registry: the modules to watch.
        scanner: scans what is new.
        kinds: what to scan.
        listener: gets `on_before_forward`, `on_after_forward`, `on_first_call` and, if
            `with_arguments`, `on_outermost_call`.
        with_arguments: whether the listener wants the arguments of outermost calls.

    Attributes:
        is_attached: module calls are watched.
    """

    def __init__(
        self,
        registry: Registry,
        scanner: Scanner,
        kinds: frozenset[Kind],
        listener: Listener,
        *,
        with_arguments: bool,
    ) -> None:
        self._registry = registry
        self._scanner = scanner
        self._listener = listener
        self._with_arguments = with_arguments
        self.is_attached = False
        self._handles: list[RemovableHandle] = []
        self.core = _C.Calls(
            scanner.table.core,
            python_hooks=self,
            inputs=Kind.INPUT in kinds,
            outputs=Kind.OUTPUT in kinds,
            late_keywords=not registry.only,
            gradients=Kind.GRAD_OUTPUT in kinds,
        )
        self._before, self._after, self._leaf = self.core.before, self.core.after, self.core.leaf
        self._gradients = OutputGradients(self.core, scanner)
        registry.listen(self.core.add, self.core.remove)

    def set_turn(self, turn: Turn) -> None:
        """What to scan from now on."""
        self.core.set_turn(turn.period, turn.number)

    # -- attaching -------------------------------------------------------------------------------

    def attach(self) -> None:
        """Registers all hooks. Modules found later are seen by global hooks only."""
        self.is_attached = True
        self.core.set_attached(True)
        if self._with_arguments:  # registered first, so that nothing runs yet when it looks
            self._handles.append(register_module_forward_pre_hook(self.outermost))
        if not self._registry.only:
            self._handles.append(register_module_forward_pre_hook(self.before))
            self._handles.append(
                register_module_forward_hook(self.after, with_kwargs=True, always_call=True)
            )
            return
        for module, place in self._registry.modules():
            if place.watched or place.parent is None:
                self._attach(module, place)

    def _attach(self, module: nn.Module, place: ModulePlace) -> None:
        if isinstance(module, torch.jit.ScriptModule):
            place.outputs.skipped = "torch takes no hooks on a scripted module"
        elif _is_simple_leaf(module):
            self._handles.append(module.register_forward_hook(self.leaf, with_kwargs=True))
        else:
            self._handles.append(module.register_forward_pre_hook(self.before, with_kwargs=True))
            self._handles.append(
                module.register_forward_hook(self.after, with_kwargs=True, always_call=True)
            )

    def detach(self) -> None:
        """Removes every hook; hook dicts are as they were before."""
        self.is_attached = False
        remove(self._handles)
        self.core.set_attached(False)
        self.core.forget_running()

    # A copied or unpickled model carries bound methods of this object along. Copies are unknown to
    # the registry and so not watched; a pickle must not drag the monitor with it.

    def __deepcopy__(self, memo: dict[int, object]) -> ModuleCalls:
        return self

    def __reduce__(self) -> tuple[Callable[[], _Inert], tuple[()]]:
        return _Inert, ()

    # -- the hooks -------------------------------------------------------------------------------

    def outermost(self, module: nn.Module, args: Any) -> None:
        """Tells of calls that no other encloses, and that repeat none for a checkpoint."""
        if is_tracing() or self.core.running is not None or is_recomputing():
            return
        if not self._registry.only or id(module) in self._registry.places:
            self._listener.on_outermost_call(module, args, _keywords_of_call())

    def before(self, module: nn.Module, args: Any, kwargs: Any = None) -> None:
        """Scans what goes into a module and was not seen before."""
        if is_tracing():
            return
        self._before(module, args, kwargs)

    def after(self, module: nn.Module, args: Any, kwargs: Any, output: Any = _RAISED) -> None:
        """Scans what a module returned. Also called when it raised, to keep the stack right."""
        if is_tracing():
            return
        if output is None and _is_passing(sys.exc_info()[2]):  # a hook on one module gets None then
            output = _RAISED
        if output is _RAISED:
            self._after(module, kwargs)
        else:
            self._after(module, kwargs, output)

    def leaf(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Both in one, for a module that calls no other and leaves its inputs as they were."""
        if is_tracing():
            return
        self._leaf(module, args, kwargs, output)

    # -- what is new at a call: csrc/calls.cpp calls these by name, and does the rest itself ------

    def discover(self, module: nn.Module) -> None:
        """A module that the registry has not met."""
        self._registry.discover(module, self.core.running)

    def is_running(self, module: int) -> bool:
        """Whether a module, by id, is being called, apart from the call that has just begun."""
        frame, outer = sys._getframe(), False  # noqa: SLF001
        while frame := frame.f_back:  # type: ignore[assignment]
            if frame.f_code is _CALL:
                if outer and id(frame.f_locals["self"]) == module:
                    return True
                outer = True
        return False

    def on_first_call(self, place: ModulePlace) -> None:
        """A module runs for the first time."""
        place.called = True
        self._listener.on_first_call(place)

    def scan_new_input(self, place: ModulePlace, index: int, x: Any, row: int) -> int:
        """An argument from a new source, or not a plain tensor. Returns its own row or -1."""
        node = place.inputs.item(index)
        if row >= 0:
            node.add_source(row)
        else:
            self._scanner.visit_new(x, node, row)
        return node.row

    def scan_keywords(self, place: ModulePlace, kwargs: Mapping[str, Any]) -> None:
        """Keyword arguments, at each call that has some."""
        for key, x in kwargs.items():
            self._scanner.visit(x, place.keywords.child(key))

    def scan_new_output(self, place: ModulePlace, output: Any, status: int) -> int:
        """An output without a row yet, or not a plain tensor. Returns its own row or -1."""
        node = place.recomputed if self.core.recomputing else place.outputs
        self._scanner.visit_new(output, node, status)
        return node.row

    def watch_gradient(self, place: ModulePlace, output: Any) -> torch.Tensor | None:
        """A module's only output, at calls at which the core cannot watch its gradient by itself.

        Returns:
            The tensor whose hooks do for every later output, if there is one.
        """
        self._gradients.watch_all(output, place.outputs)
        return place.outputs.hooked

    def scan_new_gradient(self, number: int, gradient: Any, row: int) -> int:
        """A gradient without a row yet, in a new one, or no plain tensor. Returns its own row."""
        return self._gradients.scan_new(number, gradient, row)

    def on_before_forward(self) -> bool:
        """A call that no other encloses. Returns whether it repeats one, for a checkpoint."""
        recomputing = is_recomputing()
        if not recomputing:
            self._listener.on_before_forward()
        return recomputing

    def on_after_forward(self, place: ModulePlace) -> None:
        """An outermost module returned."""
        self._listener.on_after_forward(place)


def _keywords_of_call() -> Any:
    """Keyword arguments of the module call whose global pre-hook runs: torch does not pass them."""
    frame = sys._getframe(2)  # noqa: SLF001
    while frame.f_code is not _CALL and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_locals.get("kwargs", {})


def _is_passing(traceback: TracebackType | None) -> bool:
    """Whether an exception has come as far as the caller of our hook."""
    return traceback is not None and traceback.tb_frame is sys._getframe(2)  # noqa: SLF001


def _is_simple_leaf(module: nn.Module) -> bool:
    """One of torch's own leaf layers: its inputs can be scanned after it ran, by one hook."""
    return (
        type(module).__module__.startswith("torch.nn.modules.")
        and not any(True for _ in module.children())
        and not getattr(module, "inplace", False)
        and not isinstance(module, LazyModuleMixin)
        and "forward" not in vars(module)
    )


class ModuleEvents:
    """Tells a listener of every module call of the process, in Python: slow, for searches.

    Args:
        listener: gets `on_before_module` and `on_after_module`.
    """

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._handles: list[RemovableHandle] = []

    @property
    def is_attached(self) -> bool:
        """Whether the hooks are in place."""
        return bool(self._handles)

    def attach(self) -> None:
        """Begins to tell the listener."""
        self._handles = [
            register_module_forward_pre_hook(self._before),
            register_module_forward_hook(self._after, with_kwargs=True, always_call=True),
        ]

    def detach(self) -> None:
        """Removes the hooks."""
        remove(self._handles)

    def _before(self, module: nn.Module, _args: Any) -> None:
        self._listener.on_before_module(module)

    def _after(self, module: nn.Module, _args: Any, _kwargs: Any, output: Any = None) -> None:
        self._listener.on_after_module(module, output)


def remove(handles: list[RemovableHandle]) -> None:
    """Removes hooks; torch's dicts are as they were before."""
    for handle in handles:
        handle.remove()
        _global_forward_hooks_with_kwargs.pop(handle.id, None)  # torch forgets this one
    handles.clear()
