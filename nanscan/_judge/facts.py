"""What a diagnosis may ask beyond a finding: trends, the module, the optimizer.

Made once a step in which something was found, and worked out only when a rule asks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from nanscan._collect.names import Registry
from nanscan._collect.snapshot import OptimizerFacts, Snapshot
from nanscan._collect.table import Table
from nanscan._data.finding import Seen
from nanscan._data.places import ModulePlace, ParameterPlace
from nanscan._data.row import Floats, absmax, nonfinite
from nanscan._data.site import Kind, Site
from nanscan._data.text import number
from nanscan._judge.judge import Judged

_EXPLODES = 10.0  # from the largest value of the first half to the last
_JUMPS = 100.0  # the same in one step


@dataclass(frozen=True)
class Trend:
    """Largest finite magnitudes of some rows, one a step, oldest first; the finding's step aside.

    Attributes:
        values: the magnitudes; steps without any are left out.
    """

    values: Floats

    @property
    def early(self) -> float:
        """The largest of the first half, 0 where that is empty.

        Two optimizers that step by turns are so compared with both, not one with the other.
        """
        return float(self.values[: len(self.values) // 2].max(initial=0.0))

    @property
    def growth(self) -> float:
        """From the first half to the last step; 1 where there is nothing to compare."""
        early = self.early
        return self.last / early if early > 0 else 1.0

    @property
    def explodes(self) -> bool:
        """Whether it grew by orders of magnitude: from step to step, or in one jump."""
        rises = float(np.mean(np.diff(self.values) > 0)) if len(self.values) > 1 else 0.0
        return self.growth >= _JUMPS or (self.growth >= _EXPLODES and rises >= 0.6)  # noqa: PLR2004

    @property
    def last(self) -> float:
        """Of the latest step."""
        return float(self.values[-1])

    def and_now(self, value: float | None) -> Trend:
        """With the finding's own step."""
        return self if value is None else Trend(np.append(self.values, value))

    def __len__(self) -> int:
        return len(self.values)

    def __str__(self) -> str:
        first = number(float(self.values[0]))
        return f"from {first} to {number(self.last)} in {len(self)} steps"


class Facts:
    """What is known of one step, and of those before it.

    Args:
        snapshot: of the step.
        table: with the history.
        registry: with the modules.
        optimizers: tells what steps each parameter, and under None the only optimizer there is.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        table: Table,
        registry: Registry,
        optimizers: Callable[[], dict[ParameterPlace | None, OptimizerFacts]],
    ) -> None:
        self.snapshot = snapshot
        self._table = table
        self._registry = registry
        self._ask_optimizers = optimizers

    # -- over the steps before ---------------------------------------------------------------------

    def trend(self, *rows: int) -> Trend:
        """The largest magnitude in any of some rows."""
        steps, records = self._table.kept([row for row in rows if row >= 0])
        tops = np.nan_to_num(absmax(records), nan=-1.0).max(1, initial=-1.0)
        return Trend(tops[(steps < self.snapshot.step) & (tops >= 0)])

    def trend_at(self, site: Site) -> Trend:
        """The same of a site."""
        return self.trend(*[node.row for node in self._table.nodes if node.site == site])

    def elements_before(self, row: int) -> list[int]:
        """Elements a call in the steps before in which a row was scanned and finite."""
        steps, records = self._table.kept([row])
        used = (steps < self.snapshot.step) & (records["calls"][:, 0] > 0)
        past = records[used, 0]
        past = past[nonfinite(past) == 0]
        return [int(n) for n in past["elements"] // past["calls"]]

    @functools.cached_property
    def gradients(self) -> Trend:
        """Of all parameters; before clipping, where a step clips."""
        return self.trend(*self._rows(Kind.GRAD))

    @functools.cached_property
    def parameters(self) -> Trend:
        """Of all parameters, after each step."""
        return self.trend(*self._rows(Kind.PARAM))

    @functools.cached_property
    def losses(self) -> Trend:
        """Of what backward started from."""
        return self.trend(*self._rows(Kind.LOSS))

    # -- in this step ------------------------------------------------------------------------------

    def _rows(self, *kinds: Kind) -> list[int]:
        return [node.row for node in self._table.nodes if node.kind in kinds]

    def scanned(self, *kinds: Kind) -> list[int]:
        """Rows of these kinds that this step scanned, in execution order."""
        rows, order = self.snapshot.rows, self.snapshot.order
        found = [row for row in self._rows(*kinds) if row < len(rows) and rows[row]["calls"]]
        return sorted(found, key=lambda row: int(order[row]))

    def forward_before(self, row: int) -> tuple[int, int, float]:
        """Of inputs, outputs and loss before a row: how many, how many bad, and the absmax.

        Additive masks count for nothing: -Inf alone in an input, or the lowest finite value.
        """
        order, bad, tops = self._forward
        count = int(np.searchsorted(order, self.snapshot.order[row]))
        return count, int(bad[:count].sum()), float(tops[:count].max(initial=0.0))

    @functools.cached_property
    def _forward(self) -> tuple[Floats, Floats, Floats]:
        """Of each row of the forward, in order: when it was scanned, if it is bad, its absmax."""
        found: list[tuple[float, float, float]] = []
        for row in self.scanned(Kind.INPUT, Kind.OUTPUT, Kind.LOSS, Kind.PROBE):
            stats, is_input = self.snapshot.result(row), self._table.nodes[row].kind == "input"
            infinite = stats.posinf_count if is_input else stats.inf_count
            masked = is_input and is_mask(stats.min, stats.max)
            top = 0.0 if masked else stats.absmax or 0.0
            found.append((self.snapshot.order[row], bool(stats.nan_count or infinite), top))
        columns = np.array(found, np.float64).reshape(-1, 3).T
        return columns[0], columns[1], columns[2]

    @functools.cached_property
    def narrowest(self) -> torch.dtype:
        """Of the dtypes of outputs, the one that overflows first."""
        dtypes = {self.snapshot.result(row).dtype for row in self.scanned(Kind.OUTPUT, Kind.INPUT)}
        real = [dtype for dtype in dtypes if not dtype.is_complex]
        return min(real, key=lambda dtype: float(torch.finfo(dtype).max), default=torch.float32)

    def alike_before(self, row: int) -> list[Seen]:
        """Finite tensors of a row's shape and dtype, in execution order up to it.

        They are inputs and outputs of modules inside the one whose forward made the row, and its
        own inputs.
        """
        rows, order, node = self.snapshot.rows, self.snapshot.order, self._table.nodes[row]
        inside, like = node.place, self.snapshot.describe(row)
        if node.kind != "output" and node.place.parent is not None:
            inside = node.place.parent
        sources = inside.input_sources() if isinstance(inside, ModulePlace) else set()
        return [
            (other.site, self.snapshot.result(other.row))
            for other in (self._table.nodes[r] for r in self.scanned(Kind.INPUT, Kind.OUTPUT))
            if (other.place.is_inside(inside) or other.row in sources)
            and order[other.row] < order[row]
            and self.snapshot.describe(other.row) == like
            and not nonfinite(rows[other.row : other.row + 1])[0]
        ]

    def gradients_by_module(self, before: int) -> list[tuple[str, float]]:
        """Largest gradient of each module, in the order of backward, up to a row.

        Weights and biases differ in scale for good reasons; modules of one kind should not.
        """
        rows, order, tops = self.snapshot.rows, self.snapshot.order, dict[str, float]()
        for row in self.scanned(self._table.nodes[before].kind):
            node = self._table.nodes[row]
            if order[row] >= order[before] or nonfinite(rows[row : row + 1])[0]:
                continue
            owner = node.place if isinstance(node.place, ModulePlace) else node.place.parent
            name = owner.name if owner is not None else node.place.name
            tops[name] = max(tops.get(name, 0.0), float(absmax(rows[row : row + 1])[0]))
        return [(name, top) for name, top in tops.items() if top > 0]

    # -- the model and its optimizer ---------------------------------------------------------------

    def module(self, judged: Judged) -> nn.Module | None:
        """The module of the site; of a parameter, the one that owns it."""
        place = judged.node.place
        owner = place if isinstance(place, ModulePlace) else place.parent
        return self._modules.get(owner) if owner is not None else None

    @functools.cached_property
    def _modules(self) -> dict[ModulePlace, nn.Module]:
        return {place: module for module, place in self._registry.modules()}

    def optimizer(self, judged: Judged) -> OptimizerFacts | None:
        """What steps the parameter, with its moments if it is bad; else the only optimizer."""
        place = judged.node.place
        if not isinstance(place, ParameterPlace):
            return self._optimizers.get(None)
        return self.snapshot.facts.get(place) or self._optimizers.get(place)

    @functools.cached_property
    def _optimizers(self) -> dict[ParameterPlace | None, OptimizerFacts]:
        return self._ask_optimizers()

    @functools.cached_property
    def trained(self) -> list[torch.dtype]:
        """Dtypes of all parameters that are trained."""
        seen = {
            id(parameter): parameter.dtype
            for module, _ in self._registry.modules()
            for parameter in module.parameters(recurse=False)
            if parameter.requires_grad
        }
        return list(seen.values())


def option(optimizer: OptimizerFacts | None, name: str) -> float | None:
    """A number among an optimizer's options; None for a tensor, which may be on a device."""
    value = optimizer.options.get(name) if optimizer is not None else None
    return float(value) if isinstance(value, (int, float)) else None


def is_mask(low: float | None, high: float | None) -> bool:
    """Whether finite extremes are those of an additive mask: 0 and something very low."""
    return low is not None and low <= -1e4 and high in (0, low)  # noqa: PLR2004
