"""Snapshot: one step's rows on their way to the host."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from nanscan import _C
from nanscan._collect.schedule import FULL, Turn
from nanscan._data.places import Node, ParameterPlace
from nanscan._data.result import Record, ScanResult
from nanscan._data.row import Rows


@dataclass
class OptimizerFacts:
    """What is known of the optimizer step that a parameter went bad in.

    Attributes:
        name: class of the optimizer.
        options: of the parameter's group: lr, eps, betas, ...
        moments: scans with moments of the parameter's state, by name, taken right after the step.
    """

    name: str
    options: dict[str, Any]
    moments: dict[str, ScanResult] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """What became of an optimizer's step under a GradScaler.

    Attributes:
        optimizer: its id.
        skipped: whether the scaler skipped it; a tensor where only the device knows.
        scale: the scaler's then; likewise.
    """

    optimizer: int
    skipped: bool | torch.Tensor
    scale: float | torch.Tensor


@dataclass
class Snapshot:
    """One step's rows on the host; those of CUDA devices once they arrived.

    Attributes:
        step: the step's number.
        rows: [N] records of dtype `ROW`.
        order: [N] position of each row among the step's first visits, from 1; 0: not visited.
        notable: rows that are non-finite or near their dtype's limit.
        whole: the rows began anew after it; else it is a look at a step that goes on.
        describe: dtype and shape of what was scanned into a row; None for none.
        arrival: rows that are still on their way.
        untrained: they are parameters, scanned before their model first ran.
        spoiled: they are parameters that went bad before this step and in no optimizer's: what is
            known of that, in words.
        keep: it is to become part of the history once it is complete.
        outcome: of the optimizer step that ended it, if one did.
        skips: steps of that optimizer that a GradScaler skipped, this one and those before without
            one that it let pass; 0: it let this one pass.
        scale: the GradScaler's then.
        first_scale: what it was in the first of those steps.
        turn: what was scanned.
        continues: it is what came after the last whole one, in the same step.
        facts: what explains parameters that went bad in the step, by their places.
        calls: what is kept of the calls of outermost modules in the step.
    """

    step: int
    rows: Rows
    order: npt.NDArray[np.uint64]
    notable: list[int]
    whole: bool
    describe: Describe
    arrival: _C.Arrival | None = None
    untrained: bool = False
    spoiled: str = ""
    keep: bool = False
    outcome: Outcome | None = None
    skips: int = 0
    scale: float = math.nan
    first_scale: float = math.nan
    turn: Turn = FULL
    continues: bool = False
    facts: dict[ParameterPlace, OptimizerFacts] = field(default_factory=dict)
    calls: tuple[Any, ...] = ()

    def ready(self) -> bool:
        """Whether all rows arrived. Never blocks."""
        return self.arrival is None or self.arrival.ready()

    def result(self, row: int) -> ScanResult:
        """A row as a result."""
        dtype, shape = self.describe(row) or ("float32", ())
        return ScanResult(self.rows[row], shape, getattr(torch, dtype))

    def limit(self, row: int) -> float:
        """Largest finite value of the dtype scanned into a row."""
        described = self.describe(row)
        return float(torch.finfo(getattr(torch, described[0])).max) if described else math.inf


@dataclass
class Sweep:
    """Parameters scanned outside of the table's rows, in most cases before their model first ran.

    Attributes:
        step: the number of the step that comes, or is under way.
        scans: of each parameter.
        calls: as those of a Snapshot.
        spoiled: likewise; "": their model has not run.
    """

    step: int
    scans: Scans
    calls: tuple[Any, ...] = ()
    spoiled: str = ""

    def ready(self) -> bool:
        """Whether all are done. Never blocks."""
        return all(scan.ready() for _, scan, _ in self.scans if isinstance(scan, _C.PendingScan))


Describe = Callable[[int], tuple[str, tuple[int, ...]] | None]
# A node, its record or what will be it, and the name of dtype and the shape of the tensor.
Scans = list[tuple[Node, Record | _C.PendingScan, tuple[str, tuple[int, ...]]]]
