"""locate: runs code op by op, and names the op that made the first non-finite value."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.module import (
    _global_forward_hooks_with_kwargs,
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.optim.optimizer import Optimizer
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import (
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)

from nanscan import _C
from nanscan._collect import torch_events
from nanscan._collect.listener import Listener
from nanscan._collect.names import Registry
from nanscan._data.frames import is_library, user_frame
from nanscan._data.location import Direction, Location, Op, Operand
from nanscan._data.places import ModulePlace
from nanscan._data.result import ScanResult
from nanscan._locate.causes import causes, refuted
from nanscan._locate.taint import Blame, Kind, Taint
from nanscan._locate.trace import OpTrace
from nanscan._locate.values import Event, Value
from nanscan._output.save import load_saved

if TYPE_CHECKING:
    from typing_extensions import Self

_logger = logging.getLogger("nanscan")

_MAX_EVENTS = 20_000  # of one step, before it is settled in parts
_MAX_FORWARD = 100_000  # ops whose backward may still come
_MAX_NAMES = 5  # in a message
_UNLIKELY = 2  # suspicions to refute
_COPY_SLICES = "torch::autograd::CopySlices"
_SIMPLE = (int, float, bool, str, type(None))

_HOW: dict[Kind, str] = {
    "made": "made here out of finite values",
    "minus": "made here out of finite values",
    "raw": "memory that nothing was ever written to was read",
    "outside": "it was so when it was first read; nothing before made non-finite values",
    "mask": "",
}


_entered: weakref.WeakSet[Locating] = weakref.WeakSet()
_behind: weakref.WeakSet[OpTrace] = weakref.WeakSet()
_eagerly = contextlib.ExitStack()  # while one is entered, in whatever order they leave
_entering = threading.Lock()


class Locating(Listener):
    """A search, op by op, made by `locating`.

    Attributes:
        location: what was found so far; None: nothing yet.
        absorbed: the first op that made non-finite values of which nothing is left: other ops took
            all of them, and returned finite values. No fault, but perhaps of interest.
    """

    def __init__(
        self,
        registry: Registry | None = None,
        on_located: Callable[[Location], None] | None = None,
        step: int = 0,
    ) -> None:
        self.location: Location | None = None
        self.absorbed: Location | None = None
        self._registry = registry or Registry(None, lambda _name, _module: True)
        self._on_located = on_located
        self._trace = OpTrace(self._ran)
        self._trace.step = step
        self._blame = Blame()
        self._events: list[Event] = []  # of this step
        # For scans on a device: ops, and what counts.
        self._waiting: deque[Event | tuple[list[Value | None], str]] = deque()
        self._leaves: dict[int, weakref.ref[torch.Tensor]] = {}  # by id, that may get gradients
        self._types: dict[ModulePlace, str] = {}
        self._is_after_backward = False
        self._stepped: weakref.ref[Optimizer] | None = None
        self._handles: list[Any] = []
        self._ident = 0  # of the thread
        self._is_suspended = False
        self._in_inference = False  # when it was entered

    # -- entering and leaving --------------------------------------------------------------------

    def __enter__(self) -> Self:
        """Begins to run this thread's ops one by one."""
        if self._handles:
            raise RuntimeError("nanscan: this search is under way already")
        self._handles = [
            register_module_forward_pre_hook(self._module_begins),
            register_module_forward_hook(self._module_ended, with_kwargs=True, always_call=True),
        ]
        torch_events.listen(self, is_first=True)
        with _entering:
            if not _entered:
                _eagerly.enter_context(torch.compiler.set_stance("force_eager"))
            _entered.add(self)
        self._ident = threading.get_ident()
        self._enter()
        return self

    def __exit__(self, *error: object) -> None:
        """Ends that."""
        self._leave()
        with _entering:
            _entered.discard(self)
            if not _entered:
                _eagerly.close()
        torch_events.forget(self)
        for handle in self._handles:
            handle.remove()
            _global_forward_hooks_with_kwargs.pop(handle.id, None)  # torch forgets this one
        self._handles.clear()
        self.settle()

    def suspend(self) -> None:
        """Lets ops run as usual until `resume`: inference mode may end before that.

        When it ends, torch forgets of a mode that was entered in it that it is there; and where one
        that was entered before was left in it, torch calls modes of which none is there.
        """
        if not self._is_suspended and self._is_here() and self._can_leave():
            self._leave()
            self._is_suspended = True

    def resume(self, *, is_new: bool) -> None:
        """Undoes that.

        Args:
            is_new: this search began in the call of an outermost module that is about to run.
        """
        if self._is_suspended:
            self._is_suspended = False
            self._enter()
        if is_new:
            self._trace.thread.modules.append((None, False))

    def _can_leave(self) -> bool:
        in_inference = torch.is_inference_mode_enabled()
        return not _is_guarded() and (self._in_inference or not in_inference)

    def _enter(self) -> None:
        clear_away()
        self._in_inference = torch.is_inference_mode_enabled()
        self._trace.__enter__()  # type: ignore[no-untyped-call]

    def _leave(self) -> None:
        """Leaves the stack of modes of this thread; one that the user entered may lie above."""
        above = []
        if self._is_suspended:
            return
        if not (self._is_here() and self._can_leave()):  # it is another thread's, or stays for now
            self._trace.is_idle = True
            _behind.add(self._trace)
            return
        stack = _get_current_dispatch_mode_stack()
        while stack.pop() is not self._trace:
            above.append(_pop_mode())
        self._trace.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        for mode in reversed(above):
            _push_mode(mode)

    def _is_here(self) -> bool:
        """Whether this thread is searched, or runs a backward of one that is."""
        if self._is_suspended:
            return threading.get_ident() == self._ident
        return any(mode is self._trace for mode in _get_current_dispatch_mode_stack())

    def settle(self, *, is_end: bool = True) -> None:
        """Judges all that ran so far.

        Args:
            is_end: a step is over.

        Synchronization: waits for the scans.
        """
        while self._waiting:
            item = self._waiting.popleft()
            if isinstance(item, Event):
                self._judge(item, None)
            else:
                self._blame.reached(*item)
        self._gradients_reached()
        if is_end:
            self._blame.end_step()
            absorbed = self._blame.first_absorbed
            if absorbed is not None and self.absorbed is None:
                self.absorbed = dataclasses.replace(
                    self._build(absorbed),
                    verdict="absorbed",
                    how="made here; ops that took them returned finite values",
                )
        first = self._blame.first
        if first is not None and self.location is None:
            self.location = self._build(first)
            self._trace.is_idle = True
            if self._on_located is not None:
                self._on_located(self.location)
        self._blame.forget(self._events, is_end=is_end)
        self._events.clear()
        self._trace.settle(_MAX_FORWARD)
        self._leaves = {k: ref for k, ref in self._leaves.items() if ref() is not None}

    def abandon(self) -> None:
        """Ops run as usual from now on."""
        self._leave()
        self._trace.is_idle = True

    def returned(self, values: Any) -> None:
        """What the code returned counts."""
        self._reached(values, "what it returned")

    def __str__(self) -> str:
        return "no non-finite value was made" if self.location is None else str(self.location)

    # -- what runs -------------------------------------------------------------------------------

    def _ran(self, event: Event, operands: list[torch.Tensor]) -> None:
        self._events.append(event)
        for tensor in operands if event.node is None else ():
            if tensor.requires_grad and tensor.is_leaf:
                self._leaves.setdefault(id(tensor), weakref.ref(tensor))
        if self._waiting or any(isinstance(v.row, _C.PendingScan) for v in event.results):
            self._waiting.append(event)
        else:
            self._judge(event, operands)
        if len(self._events) >= _MAX_EVENTS:
            self.settle(is_end=False)

    def _judge(self, event: Event, operands: list[torch.Tensor] | None) -> None:
        for value in self._blame.judge(event, operands):
            tensor = value.ref()
            if tensor is not None and tensor.is_leaf and tensor.requires_grad:
                self._blame.reached([value], self._name_of(tensor) or "a parameter")

    def _reached(self, x: Any, what: str) -> None:
        tensors = [t for t in pytree.tree_leaves(x) if isinstance(t, torch.Tensor)]
        goal: tuple[list[Value | None], str] = ([self._trace.read(t) for t in tensors], what)
        if self._waiting:
            self._waiting.append(goal)
        else:
            self._blame.reached(*goal)

    @property
    def _has_suspects(self) -> bool:
        """Whether something in this step is bad, or may yet turn out to be."""
        return bool(self._waiting) or self._blame.has_suspects

    def on_after_backward(self) -> None:
        """What it left in leaves counts."""
        if self._is_here():
            self._gradients_reached()

    def _gradients_reached(self) -> None:
        """What leaves have for gradients after a backward, and at the end of a step, counts."""
        if self._has_suspects:
            for reference in self._leaves.values():
                leaf = reference()
                if leaf is not None and leaf.grad is not None:
                    name = self._name_of(leaf) or "a leaf"
                    self._reached(leaf.grad, f"the gradient of {name}")

    def _module_begins(self, module: nn.Module, _args: Any) -> None:
        if not self._is_here():
            return
        modules = self._trace.thread.modules
        if not modules and self._is_after_backward and not OpTrace.is_in_backward():
            self._is_after_backward = False
            self.settle()  # a loop without an optimizer of torch
        caller, recomputed = modules[-1] if modules else (None, OpTrace.is_in_backward())
        place = self._registry.places.get(id(module)) or self._registry.discover(module, caller)
        if place is not None:
            self._types[place] = type(module).__name__
        modules.append((place or caller, recomputed))

    def _module_ended(
        self, _module: nn.Module, _args: Any, _kwargs: Any, output: Any = None
    ) -> None:
        """Is also called, without an output, where a module raised: a checkpoint stops so."""
        modules = self._trace.thread.modules
        if modules and self._is_here():
            _, recomputed = modules.pop()
            if not modules and not recomputed:
                self._reached(output, "what the model returned")
                if not torch.is_grad_enabled():
                    self.settle()

    def on_before_optimizer_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._is_here():
            return
        frame = user_frame(sys._getframe(1))  # noqa: SLF001 - where inspect is too slow
        closure = getattr(kwargs.get("closure", args[-1] if args else None), "__code__", None)
        self._trace.thread.optimizer = None if frame is None else frame.f_code, closure

    def on_after_optimizer_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._is_here():
            return
        self._trace.thread.optimizer = None
        self._is_after_backward = False
        self._stepped = weakref.ref(optimizer)
        if self._has_suspects:
            for state in optimizer.state.values():
                self._reached(state, "the optimizer's state")
        self.settle()
        self._trace.step += 1

    def on_before_backward(self, tensors: Any) -> None:
        """The loss counts."""
        if not self._is_here():
            return
        self._reached(tensors, "the loss")
        self._is_after_backward = True

    # -- what was found --------------------------------------------------------------------------

    def _build(self, taint: Taint) -> Location:
        event = taint.event
        forward = self._forward_of(event)
        at = self._op(event)
        location = Location(
            at,
            "propagated" if taint.kind == "outside" else "origin",
            _HOW[taint.kind],
            _direction(event),
            node=event.node[0].rpartition("::")[2] if event.node else "",
            output_index=_first_bad(event.outputs),
            forward=None if forward is None else self._op(forward),
            consumers=tuple(self._consumers(forward)),
            consequence=None if taint.consequence is None else self._op(taint.consequence),
            reached=taint.reached,
            recomputed=event.recomputed,
            step=event.step,
        )
        return dataclasses.replace(
            location,
            causes=tuple(causes(location)),
            unlikely=tuple(refuted(location)[:_UNLIKELY]),
        )

    def _forward_of(self, event: Event) -> Event | None:
        """The op whose backward this is. Numbers are a thread's own: the likeliest name decides."""
        if event.node is None:
            return None
        name, number = event.node
        if name == _COPY_SLICES:  # an op in place on a view, which made a node of its own before
            number -= 1
        likely = name.rpartition("::")[2].partition("Backward")[0].lower()

        def is_unlikely(e: Event) -> bool:
            return likely != e.info.name.split(".")[1].replace("_", "")

        made = [e for (_, n), e in self._trace.forward.items() if n == number]
        if not made:  # an op in place clones first what it writes over, and that made a node too
            made = [e for (_, n), e in self._trace.forward.items() if n == number + 1]
            made = [e for e in made if not is_unlikely(e)]
        forward = min(made, key=is_unlikely, default=None)
        if forward is None or forward.node in (None, event.node):
            return forward
        return self._forward_of(forward) or forward  # of a double backward

    def _consumers(self, forward: Event | None) -> list[str]:
        if forward is None:
            return []
        names = [
            event.info.name
            for event in self._events
            if event.node is None
            and event.info.name != "aten.detach.default"  # autograd keeps a result so
            and any(value.maker is forward for _, value in event.operands)
        ]
        return list(dict.fromkeys(names))

    def _op(self, event: Event) -> Op:
        place = event.place
        results = ["result"]
        if len(event.results) > 1:
            results = [f"result[{i}]" for i in range(len(event.results))]
        settings = {**event.info.defaults, **event.settings}
        return Op(
            event.info.name,
            place.name if place is not None else "",
            self._types.get(place, "") if place is not None else "",
            event.code.co_filename if event.code is not None else "",
            event.line,
            event.code.co_name if event.code is not None else "",
            tuple(self._operand(name, value) for name, value in event.operands),
            tuple(
                self._operand(name, value, made=True)
                for name, value in zip(results, event.results, strict=True)
            ),
            {name: x for name, x in settings.items() if _is_simple(x)},
        )

    def _operand(self, name: str, value: Value, *, made: bool = False) -> Operand:
        what = self._name_of(value.ref())
        if not what and value.base is not None:
            what = self._name_of(value.base.ref())
        made_by = "" if made or value.maker is None else _where(value.maker)
        row = value.row if value.moments is None else value.moments
        stats, shape = None, tuple(value.shape)
        has_moments = value.moments is not None
        if row is not None:
            stats = ScanResult(row, shape, value.dtype, moments=has_moments)
        return Operand(name, what, value.dtype, shape, stats, has_moments, made_by)

    def _name_of(self, tensor: torch.Tensor | None) -> str:
        """A parameter's name, or what an optimizer knows of a tensor; "" if neither."""
        if tensor is None:
            return ""
        place = self._registry.parameter(tensor, "")
        return place.name if place is not None else self._name_in_optimizer(tensor)

    def _name_in_optimizer(self, tensor: torch.Tensor) -> str:
        optimizer = self._stepped() if self._stepped is not None else None
        if optimizer is None:
            return ""
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            place = self._registry.parameter(parameter, "")
            name = place.name if place is not None else "a parameter"
            if tensor is parameter.grad:
                return f"gradient of {name}"
            for key, moment in optimizer.state.get(parameter, {}).items():
                if tensor is moment:
                    return f"{key} of {name}"
        return ""


def _is_guarded() -> bool:
    """Whether torch will put back what modes it calls: after a backward, or a compiled call."""
    if OpTrace.is_in_backward():
        return True
    frame: FrameType | None = sys._getframe()  # noqa: SLF001
    while frame is not None:
        if frame.f_code.co_name == "compile_wrapper" and is_library(frame.f_code.co_filename):
            return True
        frame = frame.f_back
    return False


def clear_away() -> None:
    """Takes modes off this thread's stack that could not leave it when their search ended."""
    if not _behind or torch.is_inference_mode_enabled() or _is_guarded():
        return
    stack = _get_current_dispatch_mode_stack()
    while stack and isinstance(trace := stack.pop(), OpTrace) and trace in _behind:
        trace.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        _behind.discard(trace)


def can_search() -> bool:
    """Whether a search may begin in this thread: no mode is there that may leave before it."""
    clear_away()
    return not _is_guarded() and torch._C._len_torch_dispatch_stack() == 0  # noqa: SLF001


def _after_fork() -> None:
    """A worker of a DataLoader is no part of the search."""
    for search in _entered:
        search.abandon()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _direction(event: Event) -> Direction:
    if event.in_optimizer:
        return "optimizer"
    return "forward" if event.node is None else "backward"


def _first_bad(outputs: list[Value | None] | None) -> int | None:
    return next((i for i, v in enumerate(outputs or ()) if v is not None and v.is_bad), None)


def _where(event: Event) -> str:
    """An op and its line, for people."""
    if event.code is None:
        return event.info.name
    return f"{event.info.name}, {Path(event.code.co_filename).name}:{event.line}"


def _is_simple(x: object) -> bool:
    return isinstance(x, _SIMPLE) or (isinstance(x, (list, tuple)) and all(map(_is_simple, x)))


def locating() -> Locating:
    """Runs the code of a `with` block op by op, forward, backward and optimizer steps.

        with nanscan.locating() as search:
            loss = criterion(model(x), y)
            loss.backward()
        print(search.location or "all finite")

    What `locate` says holds here too. One step at a time: what is found is told when an optimizer
    step or the block ends. After that ops run as usual.

    Returns:
        The search; its `location` is None as long as nothing was found.

    Synchronization: none an op; the end of each optimizer step, and of the block, waits for scans.
    """
    return Locating()


def locate(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Location | None:
    """Runs code once, op by op, and names the first op that made non-finite values out of finite.

    Every floating-point result of every op is scanned, in the forward, in backward and in optimizer
    steps; also inside of checkpoints, under autocast, in custom autograd Functions, and with ops in
    place. What torch.compile compiled runs eagerly meanwhile.

    What other ops absorb is no fault: NaN that torch.where or nan_to_num replaces, and that no
    backward brings back; `locating` has the first of these as `absorbed`. -Inf alone is taken for a
    mask until it turns into NaN, or reaches a loss, a gradient, a parameter or what is returned. So
    are values out of memory that was never written to, and values that were bad before anything
    ran: those are named as such ("propagated").

    Args:
        fn: code to run, such as one training step.
        *args: its arguments.
        **kwargs: its keyword arguments.

    Returns:
        Where it was made; None: no non-finite value was made, or none that led anywhere.

    Raises:
        Exception: what `fn` raises, unless something was found first: then that is returned, and
            the error logged.

    Synchronization: none an op; at the end of each optimizer step and of `fn` it waits for scans.
        A CUDA graph must not be recorded meanwhile.
    """
    return _run(Locating(), fn, args, kwargs)


def _run(
    search: Locating, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Location | None:
    with search:
        try:
            search.returned(fn(*args, **kwargs))
        except Exception:
            search.settle()
            if search.location is None:
                raise
            _logger.warning("nanscan: the code that was searched raised", exc_info=True)
    return search.location


def replay(
    path: str | os.PathLike[str],
    model: nn.Module,
    step_fn: Callable[..., Any] | None = None,
) -> Location | None:
    """Runs a step that the monitor's `save` wrote down once more, op by op.

    Args:
        path: the folder of that step.
        model: a model like the one it was of. It gets the step's parameters and buffers, and which
            of its modules were in training mode.
        step_fn: runs the step; called with the model and the saved arguments of its call:
            `lambda model, x: loss(model(x)).backward()`. None: the forward alone.

    Returns:
        As for `locate`.

    Raises:
        FileNotFoundError: there is no such step.
        ValueError: no arguments were saved.
        RuntimeError: the model is not like the one that was saved.

    Synchronization: as for `locate`.
    """
    saved = load_saved(path)
    for what, note in saved.notes.items():
        _logger.warning("nanscan: of the saved step, %s is %s", what or "the call", note)
    if saved.state_dict is not None:
        if differing := saved.differing(model):
            raise RuntimeError(
                f"nanscan: the model is not like the one that was saved in {path}: only one of "
                f"them has {', '.join(differing[:_MAX_NAMES])}"
            )
        model.load_state_dict(saved.state_dict, strict=False)
    for name, module in model.named_modules():
        module.training = saved.training.get(name, module.training)
    saved.restore_rng()
    with contextlib.ExitStack() as contexts:
        for kind, dtype in saved.autocast.items():
            contexts.enter_context(torch.autocast(kind, dtype=dtype))
        search = Locating(step=saved.step)
        if step_fn is None:
            return _run(search, model, saved.args, saved.kwargs)
        return _run(search, step_fn, (model, *saved.args), saved.kwargs)
