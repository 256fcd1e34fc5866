"""From module calls and optimizer steps to scans. No judgement here, and nothing kept alive.

The methods `before` and `after` run at every module call, so each line of them counts; what they do
while nothing is new is in csrc/calls.cpp.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from types import TracebackType
from typing import Any, cast

import torch
from torch import nn
from torch.amp import GradScaler
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.modules.module import (
    _global_forward_hooks_with_kwargs,
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.optim.optimizer import Optimizer
from torch.utils.hooks import RemovableHandle

from nanscan import _C
from nanscan._collect import torch_events
from nanscan._collect.listener import Listener
from nanscan._collect.names import Registry
from nanscan._collect.parameter_changes import Suspects
from nanscan._collect.schedule import FULL, Cost, Turn, dispatch_seconds, gradient_dispatch_seconds
from nanscan._collect.skip_step import Gradients, Skipper, is_stand_in
from nanscan._collect.snapshot import OptimizerFacts, Outcome, Scans
from nanscan._collect.table import Table
from nanscan._data.dtypes import rounds_to_zero
from nanscan._data.places import ModulePlace, Node, ParameterPlace, SinglePlace
from nanscan._data.site import Kind
from nanscan._hooks import _Inert
from nanscan._scan import reference
from nanscan._scan.check import check
from nanscan._scan.dispatch import prepare, scan_anywhere
from nanscan._scan.unwrap import Unscannable, plain_parts, reason

_RAISED = object()
_MAX_DEPTH = 16  # of nested containers
_MAX_PLANS = 64
_DEVICE_EVERY = 16  # steps between two whose scans are timed on the device
_NEEDS_ROW = _C.NEEDS_ROW
_NOT_FLOAT = _C.NOT_FLOAT
_CALL = nn.Module._call_impl.__code__  # noqa: SLF001 - the frame of every module call
_NOTHING = (type(None), bool, int, float, str, bytes, complex)

# While torch.compile traces a hook this is the constant True, and the hook leaves nothing behind.
_is_tracing = torch.compiler.is_dynamo_compiling


class Hooks(Listener):
    """Observes one model, or every module of the process.

    Args:
        registry: names of modules and parameters.
        table: where scans go.
        kinds: what to scan.
        on_sweep: called with scans of the parameters of a model, before it first runs.
        on_spoiled: called with scans of parameters that went bad between two steps, and how; and
            again when they are fine.
        on_start: called before an outermost module call.
        on_forward: called after one, with its place.
        on_backward: called before the loss of an outermost backward is scanned (False), and when
            that has ended (True).
        on_step: called after an optimizer step, with the optimizer and what became of the step.
        on_call: called before an outermost module call, with module and arguments; None: never.
        on_gradients: called when the gradients of an optimizer were scanned before its step.
        skipper: keeps optimizers from steps on non-finite gradients, if that is asked for.
    """

    def __init__(  # noqa: PLR0913 - wiring, in one place
        self,
        registry: Registry,
        table: Table,
        kinds: frozenset[str],
        *,
        on_sweep: Callable[[Scans], None],
        on_spoiled: Callable[[Scans, str], None],
        on_start: Callable[[], None],
        on_forward: Callable[[ModulePlace], None],
        on_backward: Callable[[bool], None],
        on_step: Callable[[Optimizer, Outcome], None],
        on_call: Callable[[nn.Module, Any, Any], None] | None = None,
        on_gradients: Callable[[], None] = lambda: None,
        skipper: Skipper | None = None,
    ) -> None:
        self._registry = registry
        self._table = table
        self._visit = table.visit
        self._kinds = kinds
        self._calls = _C.Calls(
            table.core,
            self,
            inputs="input" in kinds,
            outputs="output" in kinds,
            late_keywords=not registry.only,
            gradients="grad_output" in kinds,
        )
        self._before = self._calls.before
        self._after = self._calls.after
        self._leaf = self._calls.leaf
        registry.listen(self._calls.add, self._calls.remove)
        self._on_sweep = on_sweep
        self._on_spoiled = on_spoiled
        self._suspects = Suspects(registry, table)
        self._on_start = on_start
        self._on_forward = on_forward
        self._on_backward = on_backward
        self._backward_order: dict[ParameterPlace, int] = {}  # where no optimizer has a plan
        self._are_gradients_scanned = False  # of the last backward, where no optimizer steps
        self._on_step = on_step
        self._on_call = on_call
        self._on_gradients = on_gradients
        self._skipper = skipper
        self._gradients: list[Node] = []  # by the number that their hooks have
        self._bad_gradients = -1  # resets of the table before a gradient last went bad
        self._handles: list[RemovableHandle] = []
        self._plans: dict[int, _Plan] = {}  # by id(optimizer)
        self._buffers: dict[SinglePlace, tuple[int, int]] = {}  # id and version as last scanned
        self._stepping = _Stepping()
        self._ran = False  # an outermost module, since the last step
        self.turn = FULL
        # Seconds that torch takes to call a hook of a module, and of a tensor.
        self._dispatch = self._gradient_dispatch = 0.0
        self._is_measured = False
        self._cost = Cost()
        self._steps_measured = 0
        self._device_seconds = 0.0

    # -- what to scan, and what it costs ---------------------------------------------------------

    def set_turn(self, turn: Turn) -> None:
        """What to scan from now on."""
        self.turn = turn
        self._calls.set_turn(turn.period, turn.number)

    def measure(self) -> None:
        """Counts costs from now on."""
        self._is_measured = True
        self._dispatch = dispatch_seconds()
        if "grad_output" in self._kinds:
            self._gradient_dispatch = gradient_dispatch_seconds()
        self._calls.set_timed(True)

    def take_cost(self) -> Cost:
        """What was spent since the last time."""
        cost, self._cost = self._cost, Cost()
        nanoseconds, count = self._calls.take_cost()
        cost.dispatch = count * self._dispatch
        cost.calls = nanoseconds * 1e-9 + cost.dispatch
        nanoseconds, count = self._calls.take_gradient_cost()
        cost.gradients = nanoseconds * 1e-9 + count * self._gradient_dispatch
        if self._is_measured:
            self._measure_device(cost)
        return cost

    def _measure_device(self, cost: Cost) -> None:
        """Times the device's part in one full step of many; events tell of it steps later."""
        core, measured = self._table.core, self._steps_measured % _DEVICE_EVERY
        self._steps_measured += 1
        core.set_timed(measured == 0)
        self._device_seconds += core.take_device_seconds()
        if measured == _DEVICE_EVERY - 1:
            cost.device, self._device_seconds = self._device_seconds, 0.0

    # -- attaching -------------------------------------------------------------------------------

    def attach(self) -> None:
        """Registers all hooks. Modules found later are seen by global hooks only."""
        if self._handles:
            return
        self._calls.set_attached(True)
        torch_events.listen(self)
        if self._on_call is not None:  # registered first, so that nothing runs yet when it looks
            self._handles.append(register_module_forward_pre_hook(self.call_begins))
        self._attach_modules()

    def _attach_modules(self) -> None:
        if not self._registry.only:
            self._handles.append(register_module_forward_pre_hook(self.before))
            self._handles.append(
                register_module_forward_hook(self.after, with_kwargs=True, always_call=True)
            )
            return
        for module, place in self._registry.modules():
            if not place.watched and place.parent is not None:
                continue
            if isinstance(module, torch.jit.ScriptModule):
                place.outputs.skipped = "torch takes no hooks on a scripted module"
                continue
            if _is_simple_leaf(module):
                self._handles.append(module.register_forward_hook(self.leaf, with_kwargs=True))
                continue
            self._handles.append(module.register_forward_pre_hook(self.before, with_kwargs=True))
            self._handles.append(
                module.register_forward_hook(self.after, with_kwargs=True, always_call=True)
            )

    def detach(self) -> None:
        """Removes every hook; hook dicts are as they were before."""
        for handle in self._handles:
            handle.remove()
            _global_forward_hooks_with_kwargs.pop(handle.id, None)  # torch forgets this one
        self._handles.clear()
        self._calls.set_attached(False)
        torch_events.forget(self)
        self._calls.forget_running()

    # A copied or unpickled model carries bound methods of these hooks along. Copies are unknown to
    # the registry and so not watched; a pickle must not drag the monitor with it.

    def __deepcopy__(self, memo: dict[int, object]) -> Hooks:
        return self

    def __reduce__(self) -> tuple[Callable[[], _Inert], tuple[()]]:
        return _Inert, ()

    # -- module calls ----------------------------------------------------------------------------

    def call_begins(self, module: nn.Module, args: Any) -> None:
        """Tells of calls that no other encloses, and that repeat none for a checkpoint."""
        if _is_tracing():
            return
        if self._calls.running is not None or self._on_call is None or self.is_recomputing():
            return
        if not self._registry.only or id(module) in self._registry.places:
            self._on_call(module, args, _keywords_of_call())

    def before(self, module: nn.Module, args: Any, kwargs: Any = None) -> None:
        """Scans what goes into a module and was not seen before."""
        if _is_tracing():
            return
        self._before(module, args, kwargs)

    def after(self, module: nn.Module, args: Any, kwargs: Any, output: Any = _RAISED) -> None:
        """Scans what a module returned. Also called when it raised, to keep the stack right."""
        if _is_tracing():
            return
        if output is None and _is_passing(sys.exc_info()[2]):  # a hook on one module is told None
            output = _RAISED
        if output is _RAISED:
            self._after(module, kwargs)
        else:
            self._after(module, kwargs, output)

    def leaf(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Both in one, for a module that calls no other and leaves its inputs as they were."""
        if _is_tracing():
            return
        self._leaf(module, args, kwargs, output)

    # What is new at a call. The core (csrc/calls.cpp) calls these, and does the rest itself.

    def unknown(self, module: nn.Module) -> None:
        """A module that the registry has not met."""
        self._registry.discover(module, self._calls.running)

    def is_running(self, module: int) -> bool:
        """Whether a module, by id, is being called, apart from the call that has just begun."""
        frame, outer = sys._getframe(), False  # noqa: SLF001
        while frame := frame.f_back:  # type: ignore[assignment]
            if frame.f_code is _CALL:
                if outer and id(frame.f_locals["self"]) == module:
                    return True
                outer = True
        return False

    def first_call(self, place: ModulePlace) -> None:
        """A module runs for the first time. What do the parameters around it hold?"""
        place.called = True
        outermost = place
        while outermost.parent is not None:
            outermost = outermost.parent
        if not outermost.swept and "param" in self._kinds:
            outermost.swept = True
            self._sweep_parameters(outermost)

    def new_input(self, place: ModulePlace, index: int, x: Any, row: int) -> int:
        """An argument from a new source, or not a plain tensor. Returns its own row or -1."""
        node = place.inputs.item(index)
        if row >= 0:
            node.add_source(row)
        else:
            self._visit_other(x, node, row)
        return node.row

    def keywords(self, place: ModulePlace, kwargs: Mapping[str, Any]) -> None:
        """Keyword arguments, at each call that has some."""
        for key, x in kwargs.items():
            self._visit_one(x, place.keywords.child(key))

    def new_output(self, place: ModulePlace, output: Any, status: int) -> int:
        """An output without a row yet, or not a plain tensor. Returns its own row or -1."""
        node = place.recomputed if self._calls.recomputing else place.outputs
        self._visit_other(output, node, status)
        return node.row

    def call_starts(self) -> bool:
        """A call that no other encloses. Returns whether it repeats one, for a checkpoint."""
        recomputing = self.is_recomputing()
        if not recomputing:
            self._on_start()
        return recomputing

    def is_recomputing(self) -> bool:
        """Whether a backward runs in this thread: a call now repeats one, for a checkpoint."""
        return torch._C._current_autograd_node() is not None  # noqa: SLF001 - no public spelling

    def gradient(self, place: ModulePlace, output: Any) -> torch.Tensor | None:
        """A module's only output, at calls at which the core cannot watch its gradient by itself.

        Returns:
            The tensor whose hooks do for every later output, if there is one.
        """
        self._watch_gradients(output, place.outputs)
        return place.outputs.hooked

    def new_gradient(self, number: int, gradient: Any, row: int) -> int:
        """A gradient without a row yet, in a new one, or no plain tensor. Returns its own row."""
        node = self._gradients[number]
        if row >= 0:
            node.add_source(row)
        else:
            self._visit_other(gradient, node, row)
        return node.row

    def forward_ended(self, place: ModulePlace) -> None:
        """An outermost module returned."""
        self._look_for_spoiled()
        self._ran |= torch.is_grad_enabled()
        self._on_forward(place)

    def _sweep_parameters(self, outermost: ModulePlace) -> None:
        """Gives the parameters of a model their rows, and scans what they hold now.

        Not into those rows: they are for what the optimizer's step leaves behind.
        """
        swept: list[tuple[torch.Tensor, Node]] = []
        for module, owner in self._registry.modules():
            if owner.is_inside(outermost):
                for parameter in module.parameters(recurse=False):
                    known = self._registry.parameter(parameter, "")
                    if known is not None and known.watched and known.param.row < 0:
                        self._table.add(known.param)
                        swept.append((parameter, known.param))
        scans = self._scan_apart(swept)
        # Nobody knows when, and if, a CUDA graph that is being recorded will run.
        captured = any(isinstance(scan, _C.PendingScan) and scan.captured for _, scan, _ in scans)
        if scans and not captured:
            self._on_sweep(scans)

    def _scan_apart(self, pairs: list[tuple[torch.Tensor, Node]]) -> Scans:
        """Scans outside of the table's rows; what is no plain tensor, into its row after all."""
        scans: Scans = []
        rows = _C.scan_once_many([tensor for tensor, _ in pairs], False)
        for (tensor, node), scanned in zip(pairs, rows, strict=True):
            row = scan_anywhere(tensor) if isinstance(scanned, int) else scanned
            if isinstance(row, int):
                self._scan_unusual(tensor, node, row)
            else:
                scans.append((node, row, _C.describe(tensor) or ("float32", ())))
        return scans

    def _look_for_spoiled(self) -> None:
        """Has a parameter gone bad since its last scan? Asked as soon as something else has."""
        if "param" in self._kinds:
            for how, scans in self._suspects.look():
                self._on_spoiled(scans, how)

    def _visit_one(self, x: Any, node: Node, around: tuple[int, ...] = ()) -> None:
        row = self._visit(x, node.row)
        if row >= 0:
            node.add_source(row)
        elif row != _NOT_FLOAT:
            self._visit_other(x, node, row, around)
        if node.kind == "output" and row >= 0 and row == node.row and x.requires_grad:
            self._watch_gradient(x, node)

    def _visit_other(self, x: Any, node: Node, status: int, around: tuple[int, ...] = ()) -> None:
        """Everything but a plain tensor that already has its row; `around`: containers, by id."""
        if isinstance(x, torch.Tensor):
            if status == _C.UNPREPARED:
                prepare(x)
                status = self._visit(x, node.row)
            if status == _NEEDS_ROW:
                if node.row < 0:
                    self._table.add(node)
                    node.computed = _has_history(x)
                node.skipped = ""
                status = self._visit(x, node.row)
                if node.kind == "output" and status == node.row and x.requires_grad:
                    self._watch_gradient(x, node)
            if status < 0:
                self._scan_unusual(x, node, status)
        elif len(around) < _MAX_DEPTH and not isinstance(x, _NOTHING) and id(x) not in around:
            try:
                for value, child in _children(x, node):
                    self._visit_one(value, child, (*around, id(x)))
            except Exception as error:  # noqa: BLE001 - a container of the user's may raise anything
                node.skipped = f"reading it raised {type(error).__name__}: {error}"

    def _watch_gradient(self, x: torch.Tensor, node: Node) -> None:
        """Scans the gradient that reaches a tensor. A hook on the tensor, not on the module: full
        backward hooks make in-place operations on outputs raise.
        """  # noqa: D205
        if not self._calls.wants_gradients or x.is_leaf:  # a leaf would keep the hook
            return
        node = node.first_time()
        if node.hooked is None:
            self._make_gradient_hook(node)
        if x.output_nr == 0 and x._backward_hooks is None:  # noqa: SLF001 - as in csrc/calls.cpp
            cast("Any", x.grad_fn)._register_hook_dict(node.hooked)  # noqa: SLF001
        else:
            x.register_hook(node.hook)  # type: ignore[no-untyped-call]

    def _make_gradient_hook(self, node: Node) -> None:
        node.gradient = Node(node.place, Kind.GRAD_OUTPUT, node.path)
        node.hook = self._calls.gradient_hook(len(self._gradients))
        self._gradients.append(node.gradient)
        with torch.inference_mode(mode=False):
            hooked: Any = torch.empty(0, device="cpu")
        hooked._backward_hooks = {0: node.hook}  # noqa: SLF001 - the dict is all that it is for
        node.hooked = hooked

    def _watch_gradients(self, x: Any, node: Node, around: tuple[int, ...] = ()) -> None:
        if isinstance(x, torch.Tensor):
            if x.requires_grad:
                self._watch_gradient(x, node)
        elif len(around) < _MAX_DEPTH and not isinstance(x, _NOTHING) and id(x) not in around:
            for value, child in _children(x, node):
                self._watch_gradients(value, child, (*around, id(x)))

    def watch(self, x: Any, name: str, kind: Kind) -> None:
        """Scans a value that no module returned: the loss, or a probe."""
        if self._handles and kind in self._kinds and self.turn.period and not _is_tracing():
            self._visit_one(x, self._registry.single(name, kind).node)

    # -- scans without a look at what was seen before --------------------------------------------

    def _scan_all(self, pairs: list[tuple[torch.Tensor, Node]]) -> None:
        for _, node in pairs:
            if node.row < 0:
                self._table.add(node)
        refused = self._table.scan_many(
            [tensor for tensor, _ in pairs], [node.row for _, node in pairs]
        )
        again: list[tuple[torch.Tensor, Node]] = []
        for position, status in refused:
            tensor, node = pairs[position]
            if status == _C.UNPREPARED and prepare(tensor):
                again.append((tensor, node))
            elif status != _NOT_FLOAT:
                self._scan_unusual(tensor, node, status)
        if again:
            self._scan_all(again)

    def _scan_unusual(self, x: torch.Tensor, node: Node, status: int) -> None:
        """A subclass, a sparse tensor, a lazily negated view, ...: unwraps it or notes why not."""
        try:
            if status in (_C.BAD_FORMAT, _C.NO_DATA):
                raise Unscannable(reason(x, status))  # noqa: TRY301
            for attribute, plain in plain_parts(x):
                self._scan_part(plain, node.child(attribute) if attribute else node, node)
        except Unscannable as why:
            node.skipped = str(why)
        except Exception as error:  # noqa: BLE001 - a tensor subclass may raise anything
            node.skipped = f"reading it raised {type(error).__name__}: {error}"

    def _scan_part(self, plain: torch.Tensor, part: Node, whole: Node) -> None:
        if part.row < 0:
            self._table.add(part)
        status = self._table.scan(plain, part.row)
        if status == _C.UNPREPARED and prepare(plain):
            status = self._table.scan(plain, part.row)
        if status in (_C.UNPREPARED, _C.OTHER_DEVICE, _C.MISALIGNED):
            self._table.merge(part.row, plain, reference.scan(plain))
            status = 0
        part.skipped = "" if status == 0 else reason(plain, status)
        whole.add_source(part.row)

    # -- what torch has no hook for -------------------------------------------------------------

    def on_before_backward(self, tensors: Any) -> None:
        """Scans the loss, unless it can only be another model's, or a checkpoint's."""
        if self._is_of_ours():
            self._on_backward(False)
            self.watch(tensors, "loss", Kind.LOSS)
            self._look_for_spoiled()

    def on_after_backward(self) -> None:
        """Tells of it. `torch.autograd.grad` and what torch.compile traced does not come here."""
        if self._is_of_ours():
            self._on_backward(True)

    def _is_of_ours(self) -> bool:
        return bool(
            self._handles and (self._ran or not self._registry.only) and not self.is_recomputing()
        )

    def on_before_clipping(self, parameters: list[torch.Tensor]) -> None:
        """Scans gradients as backward left them. Before the step they are scanned as they are."""
        if "grad" not in self._kinds or not self.turn.period or not self._handles:
            return
        if self._are_gradients_scanned:
            return
        known = [(p, self._registry.parameter(p, "")) for p in parameters]
        places = [(p, place) for p, place in known if place is not None and place.watched]
        places.sort(key=lambda pair: -self._forward_position(pair[1]))
        self._scan_all([(p.grad, place.grad) for p, place in places if p.grad is not None])

    def on_before_scaled_step(self, optimizer: Optimizer, scaler: GradScaler) -> None:
        """Nothing is known yet: the scaler looks for Inf itself."""
        self._stepping.stepped = False
        self._stepping.scaler = scaler

    def on_after_scaled_step(self, optimizer: Optimizer, scaler: GradScaler) -> None:
        """Scans the gradients that no optimizer's hook saw, if the scaler skipped the step."""
        self._stepping.scaler = None
        if self._stepping.stepped:
            return
        plan = self._plan(optimizer)
        if plan is not None and self._handles:
            self._scan_gradients(optimizer, plan)
            self._on_step(optimizer, Outcome(id(optimizer), True, scaler.get_scale()))

    # -- training by hand: no optimizer steps what backward made gradients of ----------------------

    def scan_gradients(self) -> None:
        """Scans all gradients, in the order in which backward made them."""
        if "grad" not in self._kinds or not self.turn.period:
            return
        began = time.perf_counter()
        pairs = [
            (grad, place)
            for parameter, place in self._registry.live_parameters()
            if (grad := parameter.grad) is not None
        ]
        if any(place not in self._backward_order for _, place in pairs):
            self._backward_order = {place: -self._forward_position(place) for _, place in pairs}
        pairs.sort(key=lambda pair: self._backward_order[pair[1]])
        self._scan_all([(grad, place.grad) for grad, place in pairs])
        self._are_gradients_scanned = True
        self._cost.rest += time.perf_counter() - began
        self._look_for_spoiled()

    def scan_parameters(self) -> None:
        """Scans parameters and buffers, as after an optimizer's step."""
        self._are_gradients_scanned = self._ran = False
        if not (self.turn.slow and self._handles):
            return
        began = time.perf_counter()
        if "param" in self._kinds:
            live = self._registry.live_parameters()
            self._scan_all([(parameter, place.param) for parameter, place in live])
        if "buffer" in self._kinds:
            self._scan_buffers()
        self._cost.slow += time.perf_counter() - began

    # -- optimizer steps -------------------------------------------------------------------------

    def on_before_optimizer_step(
        self, optimizer: Optimizer, args: Any, kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Scans gradients in the order in which backward made them, as far as that is known.

        Returns:
            What to call the step with instead, if it is not to be taken.
        """
        if is_stand_in(optimizer):  # the step of a base class, inside of one that we know
            return None
        self._stepping.optimizer = 0
        self._stepping.stepped = True
        if _is_tracing():
            return None
        plan = self._plan(optimizer)
        if plan is None or not self._handles:
            return None
        self._stepping.optimizer, self._stepping.plan = id(optimizer), plan
        if self._skipper is not None:
            return self._skipper.before(
                optimizer, args, kwargs, lambda: self._look_at_gradients(optimizer, plan)
            )
        self._scan_gradients(optimizer, plan)
        self._on_gradients()
        return None

    def _scan_gradients(self, optimizer: Optimizer, plan: _Plan) -> None:
        if "grad" in self._kinds and (self.turn.period or self._skipper is not None):
            began, ticket = time.perf_counter(), self._table.last_ticket
            parameters = _parameters(optimizer)
            self._scan_all(
                [
                    (grad, place.grad)
                    for i, place in plan.backward
                    if (grad := parameters[i].grad) is not None
                ]
            )
            if self._table.last_ticket != ticket:
                self._bad_gradients = self._table.resets
                self._look_for_spoiled()
            self._cost.rest += time.perf_counter() - began

    def _look_at_gradients(self, optimizer: Optimizer, plan: _Plan) -> tuple[Gradients, bool]:
        """Scans gradients; returns them, and whether those on the host are known to be finite."""
        if plan.has_loose:  # before a closure ran, its model may not have been known
            plan = self._stepping.plan = self._plan(optimizer) or plan
        self._scan_gradients(optimizer, plan)
        self._on_gradients()
        # A row takes a ticket once: after that it does not tell whether a later scan was bad.
        fine = self._bad_gradients != self._table.resets
        if fine and not self._table.on_device:
            return [], True
        parameters = _parameters(optimizer)
        pairs = [(parameters[i].grad, place.grad.site) for i, place in plan.backward]
        return [(grad, site) for grad, site in pairs if grad is not None], fine

    def on_after_optimizer_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Scans parameters, and moments when asked for, and ends the step."""
        if _is_tracing():
            return
        if self._skipper is not None:
            self._skipper.after(optimizer, args, kwargs)
        if self._stepping.optimizer == id(optimizer) and self._handles:
            self._stepping.optimizer = 0
            self._ran = False
            plan = self._stepping.plan
            # Before a closure ran, its model may not have been known.
            plan = (self._plan(optimizer) or plan) if plan.has_loose else plan
            began = time.perf_counter()
            self._suspects.stepped(id(optimizer), plan.watched, scanned=self.turn.slow)
            if self.turn.slow:
                self._scan_after_step(optimizer, plan)
            scanned = time.perf_counter()
            self._cost.slow += scanned - began
            self._on_step(optimizer, _outcome(optimizer, self._stepping.scaler))
            self._cost.rest += time.perf_counter() - scanned

    def _scan_after_step(self, optimizer: Optimizer, plan: _Plan) -> None:
        parameters = _parameters(optimizer)
        if "param" in self._kinds:
            self._scan_all([(parameters[i], place.param) for i, place in plan.watched])
        if "buffer" in self._kinds:
            self._scan_buffers()
        if "state" in self._kinds:
            self._scan_all(
                [
                    (moment, place.moment(name))
                    for i, place in plan.watched
                    for name, moment in moments(optimizer, parameters[i])
                ]
            )

    def _scan_buffers(self) -> None:
        """Scans the buffers that changed, such as running statistics, not masks and tables."""
        changed = []
        for buffer, place in self._registry.buffers():
            if not (buffer.is_floating_point() or buffer.is_complex()):
                continue
            state = id(buffer), buffer._version  # noqa: SLF001 - no public spelling
            # torch's batch_norm changes running statistics, and leaves their version as it was.
            if self._buffers.get(place) != state or place.is_statistic:
                self._buffers[place] = state
                changed.append((buffer, place.node))
        self._scan_all(changed)

    def facts(
        self, optimizer: Optimizer, place: ParameterPlace
    ) -> dict[ParameterPlace, OptimizerFacts]:
        """What explains a bad parameter, if the optimizer steps it; scans its moments.

        To be asked right after the step: one later they would be bad as well.
        """
        for stepped, group, parameter in self._stepped(optimizer):
            if stepped is place:
                return {place: _facts(optimizer, group, moments(optimizer, parameter))}
        return {}

    def facts_of_suspects(self, optimizer: Optimizer) -> dict[ParameterPlace, OptimizerFacts]:
        """The same of every parameter whose optimizer's eps is 0 in its moments' dtype.

        For steps that are judged later. Such settings are rare, and scanning their moments in every
        step is the price of a diagnosis without waiting for the device.
        """
        found = {}
        for place, group, parameter in self._stepped(optimizer):
            eps = group.get("eps")
            if isinstance(eps, float) and parameter.dtype.itemsize <= 2:  # noqa: PLR2004
                state = moments(optimizer, parameter)
                if any(rounds_to_zero(eps, moment.dtype) for _, moment in state):
                    found[place] = _facts(optimizer, group, state)
        return found

    def optimizers(self) -> dict[ParameterPlace | None, OptimizerFacts]:
        """What steps each watched parameter, without moments; under None the only optimizer.

        There of several groups only the options that agree.
        """
        found: dict[ParameterPlace | None, OptimizerFacts] = {}
        only: list[OptimizerFacts] = []
        for plan in tuple(self._plans.values()):
            optimizer = plan.optimizer()
            if optimizer is None or not plan.watched:
                continue
            groups = optimizer.param_groups
            facts = {id(group): _facts(optimizer, group, []) for group in groups}
            found |= {place: facts[id(group)] for place, group, _ in self._stepped(optimizer)}
            agreed = {k: v for k, v in groups[0].items() if all(g.get(k) is v for g in groups)}
            only.append(_facts(optimizer, agreed, []))
        return found | ({None: only[0]} if len(only) == 1 else {})

    def _stepped(
        self, optimizer: Optimizer
    ) -> Iterator[tuple[ParameterPlace, dict[str, Any], torch.Tensor]]:
        """Each watched parameter of an optimizer: its place, its group, and itself."""
        plan = self._plan(optimizer)
        places = dict(plan.watched) if plan is not None else {}
        pairs = ((group, p) for group in optimizer.param_groups for p in group["params"])
        for position, (group, parameter) in enumerate(pairs):
            if position in places:
                yield places[position], group, parameter

    def _plan(self, optimizer: Optimizer) -> _Plan | None:
        """Places of an optimizer's parameters; None if none of them is watched."""
        identity = [*map(id, _parameters(optimizer))]
        plan = self._plans.get(id(optimizer))
        if (
            plan is None
            or plan.optimizer() is not optimizer
            or plan.identity != identity
            or (plan.has_loose and plan.known != self._registry.parameters_known)
        ):
            if len(self._plans) >= _MAX_PLANS:
                self._plans.clear()
            plan = self._plans[id(optimizer)] = self._make_plan(optimizer, identity)
        return plan if plan.watched else None

    def _make_plan(self, optimizer: Optimizer, identity: list[int]) -> _Plan:
        self._registry.rescan()
        kind = type(optimizer).__name__
        places = [
            (i, self._registry.parameter(p, f"{kind} parameter {i}"))
            for i, p in enumerate(_parameters(optimizer))
        ]
        watched = [(i, place) for i, place in places if place is not None and place.watched]
        backward = sorted(watched, key=lambda pair: -self._forward_position(pair[1]))
        has_loose = any(place.parent is None for _, place in watched)
        known = self._registry.parameters_known
        return _Plan(weakref.ref(optimizer), identity, known, has_loose, watched, backward)

    def _forward_position(self, place: ParameterPlace) -> int:
        """When the module that owns a parameter ran in this step or its last one; 0: never.

        A module may use the parameters of one inside it without calling that.
        """
        owner, position = place.parent, 0
        while owner is not None and position == 0:
            rows = [node.row for node in owner.outputs.walk() if node.row >= 0]
            position = max(map(self._table.latest_order, rows), default=0)
            owner = owner.parent
        return position


@dataclasses.dataclass
class _Plan:
    """The parameters of one optimizer that are watched, as (position, place).

    Attributes:
        optimizer: whose plan it is.
        identity: ids of all its parameters, to notice when they change.
        known: how many parameters of modules were known, to notice new ones.
        has_loose: some parameter belongs to no known module.
        watched: in the optimizer's order.
        backward: in the order in which backward reaches them: the last module to run comes first.
    """

    optimizer: weakref.ref[Optimizer]
    identity: list[int]
    known: int
    has_loose: bool
    watched: list[tuple[int, ParameterPlace]]
    backward: list[tuple[int, ParameterPlace]]


def _children(x: Any, node: Node) -> Iterator[tuple[Any, Node]]:
    """What a container holds, with the nodes for it; nothing for anything else."""
    if isinstance(x, Mapping):
        yield from ((value, node.child(key)) for key, value in x.items())
    elif isinstance(x, tuple) and hasattr(x, "_fields"):
        yield from ((value, node.child(key)) for key, value in zip(x._fields, x, strict=True))
    elif isinstance(x, (tuple, list)):
        for index, value in enumerate(x):
            if not isinstance(value, _NOTHING):
                yield value, node.item(index)
    elif dataclasses.is_dataclass(x):
        names = (field.name for field in dataclasses.fields(x))
        yield from ((getattr(x, name, None), node.child(name)) for name in names)


def _has_history(x: torch.Tensor) -> bool:
    try:
        return x.grad_fn is not None
    except RuntimeError:  # some views that were changed in place raise when asked
        return True


class _Stepping(threading.local):
    """Between the two hooks of an optimizer step: whose step it is, by id, and its plan.

    Attributes:
        stepped: the optimizer that a GradScaler steps has begun to.
        scaler: the GradScaler that is stepping an optimizer.
    """

    optimizer = 0
    plan: _Plan
    stepped = False
    scaler: GradScaler | None = None


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


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [*chain.from_iterable(group["params"] for group in optimizer.param_groups)]


def moments(optimizer: Optimizer, parameter: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """An optimizer's moments of a parameter, by name; the step counter is none."""
    state = optimizer.state.get(parameter, {})
    return [
        (name, value)
        for name, value in state.items()
        if isinstance(value, torch.Tensor) and name != "step"
    ]


def _facts(
    optimizer: Optimizer, group: dict[str, Any], state: list[tuple[str, torch.Tensor]]
) -> OptimizerFacts:
    options = {key: value for key, value in group.items() if key != "params"}
    facts = OptimizerFacts(type(optimizer).__name__, options)
    for name, moment in state:
        with contextlib.suppress(TypeError, ValueError):
            facts.moments[name] = check(moment, moments=True)
    return facts


def _outcome(optimizer: Optimizer, scaler: GradScaler | None) -> Outcome:
    """Of a step that was made: a fused optimizer skips it itself, as a GradScaler told it to."""
    skipped, scale = getattr(optimizer, "found_inf", None), getattr(scaler, "_scale", None)
    if not isinstance(skipped, torch.Tensor):
        return Outcome(id(optimizer), False, math.nan)
    # The scaler changes its scale in place.
    kept = scale.clone() if isinstance(scale, torch.Tensor) else math.nan
    return Outcome(id(optimizer), skipped.clone(), kept)
