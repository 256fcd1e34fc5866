"""Runs code op by op, and finds the op that made the first non-finite value."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer
from torch.utils import _pytree as pytree

from nanscan import _C
from nanscan._collect import door, torch_events
from nanscan._collect.listener import Listener
from nanscan._collect.names import Registry
from nanscan._data.frames import user_frame
from nanscan._data.location import Location, Verdict
from nanscan._data.places import ModulePlace
from nanscan._data.settings import bad_settings
from nanscan._locate.building import LocationBuilder
from nanscan._locate.dispatch_stack import StackedTrace
from nanscan._locate.scale_search import is_scale_search
from nanscan._locate.taint import Taint, TaintTracker
from nanscan._locate.tensor_names import TensorNames
from nanscan._locate.trace import OpTrace
from nanscan._locate.values import Event, Value
from nanscan._locate.wiped import wiped_by

if TYPE_CHECKING:
    from typing_extensions import Self

_MAX_EVENTS = 20_000  # ops of one step that are kept before they are judged
_MAX_NAMED = 8  # values that came from outside, and whose names are kept
_MAX_FORWARD = 100_000  # forward ops that are kept for their backward

# Searches that are under way. While there is one, torch.compile runs functions eagerly.
_searches: weakref.WeakSet[Locating] = weakref.WeakSet()
_force_eager = contextlib.ExitStack()
_searches_lock = threading.Lock()


class Locating(Listener):
    """A search, op by op, made by `locating`.

    Attributes:
        location: the op that was found; None: none so far.
        absorbed: the first op that made non-finite values of which nothing is left: other ops took
            all of them and returned finite values. This is no fault, but may be of interest.
        scale_searches: how many steps a GradScaler skipped since its scale made float16 overflow in
            backward. It lowers its scale then, so this is no fault.
    """

    def __init__(
        self,
        registry: Registry | None = None,
        on_located: Callable[[Location], None] | None = None,
        step: int = 0,
        *,
        is_follow_up: bool = False,
    ) -> None:
        self.location: Location | None = None
        self.absorbed: Location | None = None
        self.scale_searches = 0
        self._registry = registry or Registry(None, lambda _names, _module: True)
        self._on_located = on_located
        self._is_follow_up = is_follow_up  # of a finding, which what is finite does not explain
        self._trace = OpTrace(self._on_op)
        self._trace.step = step
        self._stack = StackedTrace(self._trace)
        self._calls = _C.CallEvents(self)
        self._names = TensorNames(self._registry)
        self._builder = LocationBuilder(self._names, self._trace)
        self._taints = TaintTracker()
        self._events: list[Event] = []  # of this step
        # On a device scans take time. Until they are done, ops and values that count wait here, in
        # their order.
        self._waiting: deque[Event | tuple[list[Value | None], str, bool]] = deque()
        self._leaves: dict[int, weakref.ref[torch.Tensor]] = {}  # by id; they may get gradients
        self._is_after_backward = False
        self._calls_of: Counter[ModulePlace] = Counter()  # calls of each module in this step
        self._scaler: torch.amp.GradScaler | None = None  # that is about to step an optimizer
        self._step_of_scaler = 0  # in which it was about to

    @property
    def step(self) -> int:
        """Number of the step that is searched."""
        return self._trace.step

    @step.setter
    def step(self, number: int) -> None:
        self._trace.step = number

    # -- entering and leaving --------------------------------------------------------------------

    def __enter__(self) -> Self:
        """Begins to run this thread's ops one by one."""
        if self in _searches:
            raise RuntimeError("nanscan: this search is under way already")
        door.observe(self._calls, self)
        torch_events.listen(self, is_first=True)
        with _searches_lock:
            if not _searches:
                _force_eager.enter_context(torch.compiler.set_stance("force_eager"))
            _searches.add(self)
        self._stack.enter()
        return self

    def __exit__(self, *error: object) -> None:
        """Ends the search and judges what is left."""
        self._stack.leave()
        with _searches_lock:
            _searches.discard(self)
            if not _searches:
                _force_eager.close()
        torch_events.forget(self)
        door.forget(self._calls)
        self.settle()

    def suspend(self) -> None:
        """Lets ops run as usual until `resume`, where inference mode may end before that."""
        self._stack.suspend()

    def resume(self) -> None:
        """Searches on after `suspend`, at the call of an outermost module."""
        self._stack.resume()

    def abandon(self) -> None:
        """Lets ops run as usual from now on."""
        self._stack.leave()
        self._trace.is_idle = True

    def settle(self, *, is_end: bool = True) -> None:
        """Judges all that ran so far.

        Args:
            is_end: a step is over.

        Synchronization: waits for the scans.
        """
        self._judge_waiting()
        self._gradients_reached()
        if is_end:
            self._taints.end_step()
            self._calls_of.clear()
        fault = self._taints.first_fault
        if fault is not None:
            self._found(fault, None)
        elif is_end:
            self._judge_absorbed()
        self._taints.forget(self._events, is_end=is_end)
        self._events.clear()
        self._trace.settle(_MAX_FORWARD)
        self._leaves = {k: ref for k, ref in self._leaves.items() if ref() is not None}

    def _judge_waiting(self) -> None:
        while self._waiting:
            item = self._waiting.popleft()
            if isinstance(item, Event):
                self._judge(item, None)
            else:
                values, what, may_be_masks = item
                self._taints.mark_reached(values, what, may_be_masks=may_be_masks)

    def _found(self, taint: Taint, verdict: Verdict | None) -> None:
        if self.location is None:
            others = self._taints.has_others_before(taint)
            self.location = self._builder.build(taint, self._events, verdict, follows_others=others)
            self._trace.is_idle = True
            if self._on_located is not None:
                self._on_located(self.location)

    def _judge_absorbed(self) -> None:
        """Of a step without a fault: whether what ops absorbed has wiped out finite values."""
        for taint in self._taints.absorbed:
            taint.wiped_by = wiped_by(taint, self._events, self._builder.op)
            if taint.wiped_by is not None and not self._is_follow_up:
                self._found(taint, "wiped-out")
                return
        absorbed = next(iter(self._taints.absorbed), None)
        if absorbed is not None and self.absorbed is None:
            self.absorbed = self._builder.build(absorbed, self._events, "absorbed")

    def returned(self, values: Any) -> None:
        """Notes what the code returned: non-finite values there are a fault."""
        self._reached(values, "what it returned")

    def __str__(self) -> str:
        return "no non-finite value was made" if self.location is None else str(self.location)

    # -- ops, and values that count --------------------------------------------------------------

    def _on_op(self, event: Event, operands: list[torch.Tensor]) -> None:
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
        for value in self._taints.judge(event, operands):
            if value.taint.event is event and value.taint.source == "outside":
                self._keep_names(event)
            tensor = value.ref()
            if tensor is not None and tensor.is_leaf and tensor.requires_grad:
                name = self._names.name_of(tensor) or "a parameter"
                self._taints.mark_reached([value], name)

    def _keep_names(self, event: Event) -> None:
        """Names what an op read while it is there: the code may drop its model before the end."""
        if len(self._taints.all) <= _MAX_NAMED:
            for _, value in event.operands:
                if value.is_bad and (named := self._names.named_of(value)).name:
                    value.named = named

    def _reached(self, x: Any, what: str, *, may_be_masks: bool = False) -> None:
        """Notes tensors that count, such as a loss: non-finite values in them are a fault."""
        tensors = [t for t in pytree.tree_leaves(x) if isinstance(t, torch.Tensor)]
        is_first = not self._waiting
        self._waiting.append(([self._trace.read(t) for t in tensors], what, may_be_masks))
        if is_first:
            self._judge_waiting()

    def _gradients_reached(self) -> None:
        """Notes the gradients of leaves."""
        if self._may_be_bad:
            for reference in self._leaves.values():
                leaf = reference()
                if leaf is not None and leaf.grad is not None:
                    name = self._names.name_of(leaf) or "a leaf"
                    self._reached(leaf.grad, f"the gradient of {name}")

    @property
    def _may_be_bad(self) -> bool:
        """Whether something in this step is bad, or a scan that is not done may show that."""
        return bool(self._waiting) or self._taints.has_suspects

    def _forgive_scale_search(self, scale: float) -> None:
        """A GradScaler skipped the step: what its scale made overflow in backward is no fault."""
        self._judge_waiting()
        self._gradients_reached()
        searching = [t for t in self._taints.all if is_scale_search(t, scale, self._builder.op)]
        for taint in searching:
            taint.is_fault, taint.is_forgiven = False, True
        self.scale_searches += bool(searching)

    # -- events of the step ----------------------------------------------------------------------

    def on_before_module(self, module: nn.Module) -> None:
        """Notes the module. The next outermost one after a backward begins a step."""
        if not self._stack.is_here:
            return
        modules = self._trace.thread.modules
        if not modules and self._is_after_backward and not OpTrace.is_in_backward():
            self._is_after_backward = False
            self.settle()  # no optimizer of torch has ended the step
        caller, recomputed, _ = modules[-1] if modules else (None, OpTrace.is_in_backward(), 0)
        place = self._registry.places.get(id(module)) or self._registry.discover(module, caller)
        if place is not None:
            self._builder.module_types[place] = type(module).__name__
            self._calls_of[place] += not recomputed
        inside = place or caller
        modules.append((inside, recomputed, self._calls_of[inside] if inside is not None else 0))

    def on_after_module(self, module: nn.Module, output: Any) -> None:
        """Notes what an outermost module returned. A checkpoint stops modules by raising."""
        modules = self._trace.thread.modules
        if modules and self._stack.is_here:
            _, recomputed, _ = modules.pop()
            if not modules and not recomputed:
                # Of a finding, it is known that the values are no mask.
                masks = not self._is_follow_up
                self._reached(output, "what the model returned", may_be_masks=masks)
                if not torch.is_grad_enabled():
                    self.settle()

    def on_before_backward(self, tensors: Any) -> None:
        """Notes the loss."""
        if self._stack.is_here:
            self._reached(tensors, "the loss")
            self._is_after_backward = True

    def on_after_backward(self) -> None:
        """Notes the gradients."""
        if self._stack.is_here:
            self._gradients_reached()

    def on_before_scaled_step(self, optimizer: Optimizer, scaler: torch.amp.GradScaler) -> None:
        """Notes that a GradScaler decides whether the optimizer steps."""
        if self._stack.is_here:
            self._scaler = scaler
            self._step_of_scaler = self._trace.step

    def on_after_scaled_step(self, optimizer: Optimizer, scaler: torch.amp.GradScaler) -> None:
        """Ends a step that the GradScaler has skipped."""
        if not self._stack.is_here or self._scaler is None:
            return
        if self._trace.step == self._step_of_scaler:
            self._end_step(optimizer)
        self._scaler = None

    def on_before_optimizer_step(
        self,
        optimizer: Optimizer,
        args: Any,
        kwargs: Any,
    ) -> None:
        """Notes that ops belong to the optimizer from now on, but for those of its closure."""
        if not self._stack.is_here:
            return
        frame = user_frame(sys._getframe(1))  # noqa: SLF001 - where inspect is too slow
        closure = getattr(kwargs.get("closure", args[-1] if args else None), "__code__", None)
        self._trace.thread.optimizer = None if frame is None else frame.f_code, closure
        kind, groups = type(optimizer).__name__, enumerate(optimizer.param_groups)
        self._builder.bad_settings = tuple(
            setting for i, group in groups for setting in bad_settings(kind, i, group)
        )

    def on_after_optimizer_step(
        self,
        optimizer: Optimizer,
        args: Any,
        kwargs: Any,
    ) -> None:
        """Ends the step."""
        if not self._stack.is_here:
            return
        self._end_step(optimizer)

    def _end_step(self, optimizer: Optimizer) -> None:
        self._trace.thread.optimizer = None
        self._is_after_backward = False
        self._names.use_optimizer(optimizer)
        scaler = None if self._is_follow_up else self._scaler
        if scaler is not None and self._may_be_bad and _has_skipped(scaler, optimizer):
            self._forgive_scale_search(scaler.get_scale())
        if self._may_be_bad:
            for state in optimizer.state.values():
                self._reached(state, "the optimizer's state")
        self.settle()
        self._trace.step += 1


def _has_skipped(scaler: torch.amp.GradScaler, optimizer: Optimizer) -> bool:
    """Whether a GradScaler found Inf or NaN in the gradients. Waits for them."""
    found = scaler._found_inf_per_device(optimizer)  # noqa: SLF001 - no public spelling
    return any(x.item() for x in found.values())


def _after_fork() -> None:
    """Ends all searches in a forked process, such as a worker of a DataLoader."""
    for search in _searches:
        search.abandon()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
