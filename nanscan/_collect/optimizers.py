"""Optimizers: whose parameters each one steps, and what is known of it."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.amp import GradScaler
from torch.optim.optimizer import Optimizer

from nanscan._collect.backward_order import BackwardOrder
from nanscan._collect.names import Registry
from nanscan._collect.roots import Roots, alive, parameters_of
from nanscan._collect.snapshot import OptimizerFacts, Outcome
from nanscan._collect.table import Table
from nanscan._data.dtypes import rounds_to_zero
from nanscan._data.places import ParameterPlace
from nanscan._scan.check import check

Watched = list[tuple[int, ParameterPlace]]  # by position in the optimizer

_MAX_PLANS = 1024
_HALF = 2  # bytes


@dataclass(frozen=True)
class Plan:
    """The parameters of one optimizer that are watched, as (position, place).

    Attributes:
        optimizer: whose plan it is.
        number: of the optimizer, among those that are alive. One that is made anew with the same
            parameters has the number of the one before it.
        identity: ids of all its parameters, to notice when they change.
        known: how many changes of modules were known, to notice new ones.
        has_loose: some parameter belongs to no known module.
        watched: in the optimizer's order.
        backward: in the order in which backward reaches them.
        order_version: of that order.
    """

    optimizer: weakref.ref[Optimizer]
    number: int
    identity: list[int]
    known: int
    has_loose: bool
    watched: Watched
    backward: Watched
    order_version: int


class Stepping(threading.local):
    """Between the two hooks of an optimizer step: whose step it is, by id, and its plan.

    Attributes:
        optimizer: id of the optimizer; 0: no watched optimizer is stepping.
        plan: the optimizer's.
        stepped: the optimizer that a GradScaler steps has begun to.
        scaler: the GradScaler that is stepping an optimizer.
    """

    optimizer = 0
    plan: Plan
    stepped = False
    scaler: GradScaler | None = None


class Optimizers:
    """Plans of the optimizers that stepped, by identity, and facts about them.

    Args:
        registry: names of parameters.
        table: says in which order modules ran.
        order: in which backward reaches parameters, as far as it is known.
    """

    def __init__(self, registry: Registry, table: Table, order: BackwardOrder) -> None:
        self._registry = registry
        self._table = table
        self._order = order
        self._roots = Roots(registry)
        self.is_any_watched = self._roots.look_around
        self._plans: dict[int, Plan] = {}  # by id(optimizer)
        self._alive = weakref.WeakSet[Optimizer]()  # when one that was not among them had stepped
        self._late = set[int]()  # numbers of those made after others had stepped; not stepped yet

    def plan_of_step(self, optimizer: Optimizer) -> Plan | None:
        """The same for an optimizer that is about to step: it may tell which modules are a model.

        Those may get other names, so this is not for a step that is being judged.
        """
        self._roots.look_at(optimizer)
        return self.plan(optimizer)

    def plan(self, optimizer: Optimizer) -> Plan | None:
        """Places of an optimizer's parameters; None if none of them is watched."""
        identity = [*map(id, parameters_of(optimizer))]
        plan = self._plans.get(id(optimizer))
        if (
            plan is None
            or plan.optimizer() is not optimizer
            or plan.identity != identity
            or (plan.has_loose and plan.known != self._registry.changes)
        ):
            plan = self._plans[id(optimizer)] = self._make_plan(optimizer, identity)
        elif plan.order_version != self._order.version:
            plan = self._plans[id(optimizer)] = dataclasses.replace(
                plan,
                backward=self._in_plan(optimizer, plan.watched),
                order_version=self._order.version,
            )
        return plan if plan.watched else None

    def _make_plan(self, optimizer: Optimizer, identity: list[int]) -> Plan:
        self._registry.rescan()
        kind = type(optimizer).__name__
        places = [
            (i, self._registry.parameter(p, f"{kind} parameter {i}"))
            for i, p in enumerate(parameters_of(optimizer))
        ]
        watched = [(i, place) for i, place in places if place is not None and place.watched]
        return Plan(
            weakref.ref(optimizer),
            self._number(optimizer, identity),
            identity,
            self._registry.changes,
            any(place is None or place.parent is None for _, place in places),
            watched,
            self._in_plan(optimizer, watched),
            self._order.version,
        )

    def _number(self, optimizer: Optimizer, identity: list[int]) -> int:
        """The number of an optimizer; forgets those that are gone, whose numbers are free again."""
        plans = {key: plan for key, plan in self._plans.items() if plan.optimizer() is not None}
        self._plans = plans if len(plans) < _MAX_PLANS else {}
        taken = set[int]()
        for plan in self._plans.values():
            if plan.optimizer() is optimizer or plan.identity == identity:
                return plan.number
            taken.add(plan.number)
        number = next(number for number in itertools.count() if number not in taken)
        if optimizer not in self._alive:
            if taken:
                self._late.add(number)
            self._alive = weakref.WeakSet(alive((Optimizer,)))
        return number

    def may_join(self, plan: Plan) -> bool:
        """Whether an optimizer may step in the step in which another did, as in a GAN.

        Not the first time, if it was made after others had stepped: it replaces them, though they
        may still be alive. To be asked before each of its steps.
        """
        is_late = plan.number in self._late
        self._late.discard(plan.number)
        return not is_late

    def _in_plan(self, optimizer: Optimizer, watched: Watched) -> Watched:
        parameters = parameters_of(optimizer)
        order = self.in_backward_order([(parameters[i], place) for i, place in watched])
        return [watched[position] for position in order]

    def in_backward_order(self, pairs: list[tuple[torch.Tensor, ParameterPlace]]) -> list[int]:
        """Positions of parameters, with their places, the first to have its gradient first.

        Those that no autograd graph showed follow what belongs to modules that ran later.
        """
        ranks = [self._order.rank(place, parameter) for parameter, place in pairs]
        known = [rank for rank in ranks if rank is not None]
        if len(known) == len(pairs):
            return sorted(range(len(pairs)), key=known.__getitem__)
        ran = [self._forward_position(place) for _, place in pairs]
        graphed = [(at, rank) for at, rank in zip(ran, ranks, strict=True) if rank is not None]
        keys = [
            (rank, 0)
            if rank is not None
            else (max((r for at, r in graphed if at >= own), default=-1), 1 - own)
            for own, rank in zip(ran, ranks, strict=True)
        ]
        return sorted(range(len(pairs)), key=keys.__getitem__)

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

    # -- facts -----------------------------------------------------------------------------------

    def with_moments(
        self, optimizer: Optimizer, wanted: set[ParameterPlace]
    ) -> dict[ParameterPlace, OptimizerFacts]:
        """What explains bad parameters that an optimizer steps; scans their moments.

        To be asked right after the step: one later they would be bad as well.
        """
        return {
            place: _facts(optimizer, group, moments(optimizer, parameter))
            for place, group, parameter in (self._stepped(optimizer) if wanted else ())
            if place in wanted
        }

    def with_moments_of_suspects(
        self, optimizer: Optimizer
    ) -> dict[ParameterPlace, OptimizerFacts]:
        """Facts with moments of each parameter whose eps rounds to 0 in its moments' dtype.

        For steps that are judged later. Such settings are rare, and scanning their moments in every
        step is the price of a diagnosis without waiting for the device.
        """
        found = {}
        for place, group, parameter in self._stepped(optimizer):
            eps = group.get("eps")
            if isinstance(eps, float) and parameter.dtype.itemsize <= _HALF:
                state = moments(optimizer, parameter)
                if any(rounds_to_zero(eps, moment.dtype) for _, moment in state):
                    found[place] = _facts(optimizer, group, state)
        return found

    def facts(self) -> dict[ParameterPlace | None, OptimizerFacts]:
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
        plan = self.plan(optimizer)
        places = dict(plan.watched) if plan is not None else {}
        pairs = ((group, p) for group in optimizer.param_groups for p in group["params"])
        for position, (group, parameter) in enumerate(pairs):
            if position in places:
                yield places[position], group, parameter


def moments(optimizer: Optimizer, parameter: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """An optimizer's moments of a parameter, by name; the step counter is none."""
    state = optimizer.state.get(parameter, {})
    return [
        (name, value)
        for name, value in state.items()
        if isinstance(value, torch.Tensor) and name != "step"
    ]


def outcome_of(optimizer: Optimizer, scaler: GradScaler | None) -> Outcome:
    """The outcome of a step that ran. A fused optimizer may have skipped it, by `found_inf`."""
    skipped, scale = getattr(optimizer, "found_inf", None), getattr(scaler, "_scale", None)
    if not isinstance(skipped, torch.Tensor):
        return Outcome(id(optimizer), False, math.nan)
    # The scaler changes its scale in place.
    kept = scale.clone() if isinstance(scale, torch.Tensor) else math.nan
    return Outcome(id(optimizer), skipped.clone(), kept)


def _facts(
    optimizer: Optimizer, group: dict[str, Any], state: list[tuple[str, torch.Tensor]]
) -> OptimizerFacts:
    options = {key: value for key, value in group.items() if key != "params"}
    scans = {}
    for name, moment in state:
        with contextlib.suppress(TypeError, ValueError):
            scans[name] = check(moment, moments=True)
    groups = enumerate(optimizer.param_groups)
    index = next((i for i, other in groups if other is group), None)
    return OptimizerFacts(type(optimizer).__name__, options, scans, index)
