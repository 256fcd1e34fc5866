"""From module calls and optimizer steps to scans. No judgement here, and nothing kept alive.

The methods `before` and `after` run at every module call, so each line of them counts; what they do
while nothing is new is in csrc/calls.cpp.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from nanscan import _C
from nanscan._sites import ModulePlace, Node, ParameterPlace, Registry
from nanscan._table import Table
from nanscan._tensors import Unscannable, plain_parts, reason

_RAISED = object()
_MAX_DEPTH = 16  # of nested containers
_MAX_PLANS = 64
_NEEDS_ROW = _C.NEEDS_ROW
_NOT_FLOAT = _C.NOT_FLOAT
_NOTHING = (type(None), bool, int, float, str, bytes, complex)

# While torch.compile traces a hook this is the constant True, and the hook leaves nothing behind.
_is_tracing = torch.compiler.is_dynamo_compiling


class Hooks:
    """Observes one model, or every module of the process.

    Args:
        registry: names of modules and parameters.
        table: where scans go.
        kinds: what to scan.
        on_sweep: called after the parameters of a model were scanned, before it first runs.
        on_forward: called after an outermost module call.
        on_step: called after an optimizer step, with the optimizer.
    """

    def __init__(  # noqa: PLR0913 - wiring, in one place
        self,
        registry: Registry,
        table: Table,
        kinds: frozenset[str],
        *,
        on_sweep: Callable[[], None],
        on_forward: Callable[[], None],
        on_step: Callable[[Optimizer], None],
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
        )
        self._before = self._calls.before
        self._after = self._calls.after
        self._leaf = self._calls.leaf
        registry.listen(self._calls.add, self._calls.remove)
        self._on_sweep = on_sweep
        self._on_forward = on_forward
        self._on_step = on_step
        self._handles: list[RemovableHandle] = []
        self._step_handle: RemovableHandle | None = None
        self._plans: dict[int, _Plan] = {}  # by id(optimizer)
        self._in_optimizer = False
        # Between the two hooks of an optimizer step: the optimizer, its plan and its parameters.
        self._stepping: tuple[Optimizer, _Plan, list[torch.Tensor]] | None = None

    # -- attaching -------------------------------------------------------------------------------

    @property
    def attached(self) -> bool:
        return bool(self._handles)

    def attach(self) -> None:
        """Registers all hooks. Modules found later are seen by global hooks only."""
        if self._handles:
            return
        self._attach_modules()
        self._handles.append(register_optimizer_step_pre_hook(self.before_step))
        self._step_handle = register_optimizer_step_post_hook(self.after_step)

    def _attach_modules(self) -> None:
        if not self._registry.only:
            self._handles.append(register_module_forward_pre_hook(self.before))
            self._handles.append(
                register_module_forward_hook(self.after, with_kwargs=True, always_call=True)
            )
            return
        for module, _ in self._registry.modules():
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
        self._handles.clear()
        self._calls.forget_running()
        if self._step_handle is not None and not self._in_optimizer:
            self._step_handle.remove()
            self._step_handle = None

    # A copied or unpickled model carries bound methods of these hooks along. Copies are unknown to
    # the registry and so not watched; a pickle must not drag the monitor with it.

    def __deepcopy__(self, memo: dict[int, object]) -> Hooks:
        return self

    def __reduce__(self) -> tuple[Callable[[], _Inert], tuple[()]]:
        return _Inert, ()

    # -- module calls ----------------------------------------------------------------------------

    def before(self, module: nn.Module, args: Any, kwargs: Any = None) -> None:
        """Scans what goes into a module and was not seen before."""
        if _is_tracing():
            return
        self._before(module, args, kwargs)

    def after(self, module: nn.Module, args: Any, kwargs: Any, output: Any = _RAISED) -> None:
        """Scans what a module returned. Also called when it raised, to keep the stack right."""
        if _is_tracing():
            return
        if output is None and sys.exc_info()[1] is not None:  # a hook on one module is told None
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

    def first_call(self, place: ModulePlace) -> None:
        """A module runs for the first time. What do the parameters around it hold?"""
        place.called = True
        outermost = place
        while outermost.parent is not None:
            outermost = outermost.parent
        if not outermost.swept and "param" in self._kinds:
            outermost.swept = True
            self._sweep_parameters(outermost)
            self._on_sweep()

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
        self._visit_other(output, place.outputs, status)
        return place.outputs.row

    def forward_ended(self) -> None:
        """An outermost module returned."""
        self._on_forward()

    def _sweep_parameters(self, outermost: ModulePlace) -> None:
        for module, owner in self._registry.modules():
            if owner.is_inside(outermost):
                for parameter in module.parameters(recurse=False):
                    known = self._registry.parameter(parameter, "")
                    if known is not None and known.param.row < 0:
                        self._scan(parameter, known.param)

    def _visit_one(self, x: Any, node: Node, depth: int = 0) -> None:
        row = self._visit(x, node.row)
        if row >= 0:
            node.add_source(row)
        elif row != _NOT_FLOAT:
            self._visit_other(x, node, row, depth)

    def _visit_other(self, x: Any, node: Node, status: int, depth: int = 0) -> None:
        """Everything but a plain tensor that already has its row."""
        if isinstance(x, torch.Tensor):
            if status == _NEEDS_ROW:
                self._table.add(node)
                node.skipped = ""
                self._visit(x, node.row)
            else:
                self._scan_unusual(x, node, status)
        elif depth < _MAX_DEPTH and not isinstance(x, _NOTHING):
            for value, child in _children(x, node):
                self._visit_one(value, child, depth + 1)

    # -- scans without a look at what was seen before --------------------------------------------

    def _scan(self, tensor: torch.Tensor, node: Node) -> None:
        if node.row < 0:
            self._table.add(node)
        status = self._table.scan(tensor, node.row)
        if status not in (0, _NOT_FLOAT):
            self._scan_unusual(tensor, node, status)

    def _scan_all(self, pairs: list[tuple[torch.Tensor, Node]]) -> None:
        for _, node in pairs:
            if node.row < 0:
                self._table.add(node)
        refused = self._table.scan_many(
            [tensor for tensor, _ in pairs], [node.row for _, node in pairs]
        )
        for position, status in refused:
            if status != _NOT_FLOAT:
                self._scan_unusual(*pairs[position], status)

    def _scan_unusual(self, x: torch.Tensor, node: Node, status: int) -> None:
        """A subclass, a sparse tensor, a lazily negated view, ...: unwraps it or notes why not."""
        try:
            if status in (_C.OTHER_DEVICE, _C.BAD_FORMAT, _C.NO_DATA):
                raise Unscannable(reason(x, status))  # noqa: TRY301
            for attribute, plain in plain_parts(x):
                part = node.child(attribute) if attribute else node
                if part.row < 0:
                    self._table.add(part)
                status = self._table.scan(plain, part.row)
                part.skipped = "" if status == 0 else reason(plain, status)
                node.add_source(part.row)
        except Unscannable as why:
            node.skipped = str(why)
        except Exception as error:  # noqa: BLE001 - a tensor subclass may raise anything
            node.skipped = f"reading it raised {type(error).__name__}: {error}"

    # -- optimizer steps -------------------------------------------------------------------------

    def before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Scans gradients in the order in which backward made them, as far as that is known."""
        self._stepping = None
        if _is_tracing():
            return
        plan = self._plan(optimizer)
        if plan is None:
            return
        parameters = _parameters(optimizer)
        self._stepping = optimizer, plan, parameters
        if "grad" in self._kinds:
            pairs = [(parameters[i].grad, place.grad) for i, place in plan.backward]
            self._scan_all([(grad, node) for grad, node in pairs if grad is not None])

    def after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Scans parameters, and moments when asked for, and ends the step."""
        if _is_tracing() or self._stepping is None or self._stepping[0] is not optimizer:
            return
        _, plan, parameters = self._stepping
        self._stepping = None
        if not self._handles:  # closed while the optimizer stepped
            return
        if "param" in self._kinds:
            self._scan_all([(parameters[i], place.param) for i, place in plan.watched])
        if "state" in self._kinds:
            self._scan_all(
                [
                    (moment, place.moment(name))
                    for i, place in plan.watched
                    for name, moment in moments(optimizer, parameters[i])
                ]
            )
        self._in_optimizer = True
        try:
            self._on_step(optimizer)
        finally:
            self._in_optimizer = False

    def parameter_of(
        self, optimizer: Optimizer, place: ParameterPlace
    ) -> tuple[torch.Tensor, dict[str, Any]] | None:
        """The tensor behind a place in an optimizer, with the options of its group."""
        plan = self._plan(optimizer)
        position = next((i for i, watched in plan.watched if watched is place), -1) if plan else -1
        for group in optimizer.param_groups:
            if 0 <= position < len(group["params"]):
                options = {key: value for key, value in group.items() if key != "params"}
                return group["params"][position], options
            position -= len(group["params"])
        return None

    def _plan(self, optimizer: Optimizer) -> _Plan | None:
        """Places of an optimizer's parameters; None if none of them is watched."""
        identity = [id(p) for p in _parameters(optimizer)]
        plan = self._plans.get(id(optimizer))
        if plan is None or plan.identity != identity:
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
        watched = [(i, place) for i, place in places if place is not None]
        backward = sorted(watched, key=lambda pair: -self._forward_position(pair[1]))
        return _Plan(identity, watched, backward)

    def _forward_position(self, place: ParameterPlace) -> int:
        """When the module that owns a parameter ran in this step; 0: it did not."""
        if place.parent is None:
            return 0
        rows = [node.row for node in place.parent.outputs.walk() if node.row >= 0]
        return max((self._table.order(row) for row in rows), default=0)


@dataclasses.dataclass
class _Plan:
    """The parameters of one optimizer that are watched, as (position, place).

    Attributes:
        identity: ids of all its parameters, to notice when they change.
        watched: in the optimizer's order.
        backward: in the order in which backward reaches them: the last module to run comes first.
    """

    identity: list[int]
    watched: list[tuple[int, ParameterPlace]]
    backward: list[tuple[int, ParameterPlace]]


def _children(x: Any, node: Node) -> Iterator[tuple[Any, Node]]:
    """What a container holds, with the nodes for it; nothing for anything else."""
    if isinstance(x, Mapping):
        yield from ((value, node.child(key)) for key, value in x.items())
    elif isinstance(x, tuple) and hasattr(x, "_fields"):
        yield from ((value, node.child(key)) for key, value in zip(x._fields, x, strict=True))
    elif isinstance(x, (tuple, list)):
        yield from ((value, node.item(index)) for index, value in enumerate(x))
    elif dataclasses.is_dataclass(x):
        names = (field.name for field in dataclasses.fields(x))
        yield from ((getattr(x, name, None), node.child(name)) for name in names)


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
    return [p for group in optimizer.param_groups for p in group["params"]]


def moments(optimizer: Optimizer, parameter: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """An optimizer's moments of a parameter, by name; the step counter is none."""
    state = optimizer.state.get(parameter, {})
    return [
        (name, value)
        for name, value in state.items()
        if isinstance(value, torch.Tensor) and name != "step"
    ]


class _Inert:
    """What the hooks of an unpickled model become: nothing is watched there."""

    def before(self, module: nn.Module, args: Any, kwargs: Any = None) -> None: ...

    def after(self, module: nn.Module, args: Any, kwargs: Any, output: Any = None) -> None: ...
