"""Snapshot: the rows of a step on their way to the host. StepRecord: the same, complete."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from nanscan import _C
from nanscan._collect.history import History, Order
from nanscan._collect.schedule import FULL, Turn
from nanscan._data.kept import KeptCall
from nanscan._data.places import ModulePlace, Node, ParameterPlace, Place
from nanscan._data.result import Record, ScanResult
from nanscan._data.row import Rows

Describe = Callable[[int], tuple[str, tuple[int, ...]] | None]
BadCounts = Callable[[int], tuple[int, int, int, int] | None]
# How a parameter went bad that other code than an optimizer has written to.
BY_NO_OPTIMIZER = "changed between two steps, by no optimizer"
# A node, its record or what will be it, and the name of dtype and the shape of the tensor.
Scans = list[tuple[Node, Record | _C.PendingScan, tuple[str, tuple[int, ...]]]]


def _unknown_counts(_row: int) -> None:
    return None


@dataclass
class Snapshot:
    """Rows of a step on the host; those of CUDA devices once they arrived.

    Attributes:
        rows: [N] records of dtype `ROW`.
        order: [N] position of each row among the step's first visits, from 1; 0: not visited.
        notable: rows that are non-finite or near their dtype's limit.
        describe: dtype and shape of what was scanned into a row; None for none.
        bad_counts: of a bad row, those of its first bad call, where they are known.
        arrival: rows that are still on their way.
        is_to_keep: it is to become part of the history once it is complete.
        is_whole: nothing more comes into these rows.
    """

    rows: Rows
    order: Order
    notable: list[int]
    describe: Describe
    bad_counts: BadCounts = _unknown_counts
    arrival: _C.Arrival | None = None
    is_to_keep: bool = False
    is_whole: bool = False

    def ready(self) -> bool:
        """Whether all rows arrived. Never blocks."""
        return self.arrival is None or self.arrival.ready()


@dataclass(frozen=True)
class Sweep:
    """Parameters that were scanned outside of the table, since their rows hold other scans.

    Attributes:
        scans: of each parameter.
        is_selective: only what is notable counts.
    """

    scans: Scans
    is_selective: bool

    def ready(self) -> bool:
        """Whether all scans are done. Never blocks."""
        return all(scan.ready() for _, scan, _ in self.scans if isinstance(scan, _C.PendingScan))


@dataclass(frozen=True)
class OptimizerFacts:
    """What is known of the optimizer that steps a parameter.

    Attributes:
        name: class of the optimizer.
        options: of the parameter's group: lr, eps, betas, ...
        moments: scans with moments of the parameter's state, by name, taken right after the step;
            empty where they were not scanned.
        group: index of the parameter's group; None for what all groups agree on.
    """

    name: str
    options: Mapping[str, Any]
    moments: Mapping[str, ScanResult] = field(default_factory=dict)
    group: int | None = None


@dataclass(frozen=True)
class Outcome:
    """What became of an optimizer's step under a GradScaler.

    Attributes:
        optimizer: its id.
        skipped: whether the scaler skipped the step; a tensor where only the device knows.
        scale: the scaler's then; a tensor where only the device knows; NaN without a scaler.
    """

    optimizer: int
    skipped: bool | torch.Tensor
    scale: float | torch.Tensor


class ModelView:
    """What a diagnosis may ask about the model; looked up only when it asks.

    Args:
        modules: the modules that are known and alive, with their places.
        optimizers: what steps each parameter, without moments; under None the only optimizer.
    """

    def __init__(
        self,
        modules: Callable[[], Iterator[tuple[nn.Module, ModulePlace]]],
        optimizers: Callable[[], dict[ParameterPlace | None, OptimizerFacts]],
    ) -> None:
        self._modules = modules
        self._optimizers = optimizers

    @functools.cached_property
    def modules(self) -> dict[ModulePlace, nn.Module]:
        """Modules by their places."""
        return {place: module for module, place in self._modules()}

    @functools.cached_property
    def optimizers(self) -> dict[ParameterPlace | None, OptimizerFacts]:
        """What steps each parameter, without moments; under None the only optimizer."""
        return self._optimizers()

    @functools.cached_property
    def trained(self) -> list[torch.dtype]:
        """Dtypes of all parameters that require a gradient."""
        seen = {
            id(parameter): parameter.dtype
            for module in self.modules.values()
            for parameter in module.parameters(recurse=False)
            if parameter.requires_grad
        }
        return list(seen.values())


def _unknown_parts(_row: int) -> tuple[int, int]:
    return 0, 0


@dataclass(frozen=True)
class StepRecord:
    """All that is known of a step, or of a part of one, when it is judged.

    Attributes:
        step: the step's number.
        rows: [N] records of dtype `ROW`.
        order: [N] position of each row among the step's first visits, from 1; 0: not visited.
        notable: rows that are non-finite or near their dtype's limit.
        describe: dtype and shape of what was scanned into a row; None for none. Of a bad row it is
            what its first bad call scanned.
        bad_counts: of a bad row: elements, NaN, +Inf and -Inf of its first bad call; None where
            they are not known, as on devices.
        nodes: [N] what each row stands for.
        history: rows of the steps before, and of this one where it is whole.
        model: the modules and their optimizers.
        is_whole: the rows began anew after it; else the step goes on.
        continues: an earlier record held the forward of the same step.
        ended_by: number of the optimizer whose step ended this part of the step; -1: none did.
        is_ahead: it is judged amid a step, so that inputs can still be saved; findings wait for the
            end of the step.
        is_untrained: it holds parameters, scanned before their model first ran.
        spoiled: it holds parameters that went bad between two steps, by no optimizer: what is known
            of that, in words; "" otherwise.
        bad_parts: of a row, the parts of dimension 0 that hold NaN or +Inf, as bits, and its size;
            0 for both where it is not known, as on devices.
        turn: what the step scanned.
        optimizers: what explains parameters that went bad in the step, with moments.
        skips: steps of that optimizer in a row, this one included, that a GradScaler skipped; 0: it
            let this one pass.
        scale: the GradScaler's in this step.
        first_scale: the GradScaler's in the first of the skipped steps.
        calls: the calls of outermost modules in the step, as far as their inputs are kept.
        entered: modules of the step that were called while no other watched module ran.
    """

    step: int
    rows: Rows
    order: Order
    notable: Sequence[int]
    describe: Describe
    bad_counts: BadCounts
    nodes: Sequence[Node]
    history: History
    model: ModelView
    is_whole: bool
    continues: bool = False
    ended_by: int = -1
    is_ahead: bool = False
    is_untrained: bool = False
    spoiled: str = ""
    bad_parts: Callable[[int], tuple[int, int]] = _unknown_parts
    turn: Turn = FULL
    optimizers: Mapping[ParameterPlace, OptimizerFacts] = field(default_factory=dict)
    skips: int = 0
    scale: float = math.nan
    first_scale: float = math.nan
    calls: tuple[KeptCall, ...] = ()
    entered: frozenset[ModulePlace] = frozenset()

    def result(self, row: int) -> ScanResult:
        """A row as a result."""
        dtype, shape = self.describe(row) or ("float32", ())
        return ScanResult(self.rows[row], shape, getattr(torch, dtype))

    def around(self, place: Place) -> ModulePlace | None:
        """The module whose forward called a module; None: a caller outside of the model did.

        A module that contains it, and never runs, such as a ModuleList, is not that module.
        """
        around = place.parent
        outer = [*place.parents()]
        if place in self.entered and not self.entered.intersection(outer):
            return None
        return next((owner for owner in outer if owner.called), around)

    def limit(self, row: int) -> float:
        """Largest finite value of the dtype scanned into a row."""
        described = self.describe(row)
        return float(torch.finfo(getattr(torch, described[0])).max) if described else math.inf

    def was_scanned(self, row: int) -> bool:
        """Whether a row, which may be newer than the record, was scanned in this step."""
        return 0 <= row < len(self.rows) and bool(self.rows[row]["calls"])

    def scanned(self) -> Iterator[int]:
        """Rows that were visited in this step, by number."""
        return (int(row) for row in np.flatnonzero(self.order > 0))
