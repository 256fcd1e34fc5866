"""Evidence: what a rule may ask about a finding. Worked out only when a rule asks."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from nanscan._collect.snapshot import OptimizerFacts, StepRecord
from nanscan._data.finding import Finding, Seen
from nanscan._data.places import ModulePlace, Node, ParameterPlace
from nanscan._data.result import ScanResult
from nanscan._data.row import Floats, absmax, nonfinite
from nanscan._data.site import Kind, Site
from nanscan._judge.trend import Trend


class StepEvidence:
    """What is known of one step, and of those before it; shared by all its findings.

    Args:
        record: of the step.
    """

    def __init__(self, record: StepRecord) -> None:
        self.record = record

    # -- over the steps before ---------------------------------------------------------------------

    def trend(self, *rows: int) -> Trend:
        """The largest magnitude in any of some rows."""
        steps, records = self.record.history.kept([row for row in rows if row >= 0])
        tops = np.nan_to_num(absmax(records), nan=-1.0).max(1, initial=-1.0)
        return Trend(tops[(steps < self.record.step) & (tops >= 0)])

    def trend_at(self, site: Site) -> Trend:
        """The largest magnitude at a site, one value a step."""
        return self.trend(*[node.row for node in self.record.nodes if node.site == site])

    def elements_before(self, row: int) -> list[int]:
        """Elements a call in the steps before in which a row was scanned and finite."""
        steps, records = self.record.history.kept([row])
        used = (steps < self.record.step) & (records["calls"][:, 0] > 0)
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
        return [node.row for node in self.record.nodes if node.kind in kinds]

    def scanned(self, *kinds: Kind) -> list[int]:
        """Rows of these kinds that this step scanned, in execution order."""
        found = [row for row in self._rows(*kinds) if self.record.was_scanned(row)]
        return sorted(found, key=lambda row: int(self.record.order[row]))

    def forward_before(self, row: int) -> tuple[int, int, float]:
        """Of inputs, outputs and loss before a row: how many, how many bad, and the absmax.

        Additive masks count for nothing: -Inf alone in an input, or the lowest finite value.
        """
        order, bad, tops = self._forward
        count = int(np.searchsorted(order, self.record.order[row]))
        return count, int(bad[:count].sum()), float(tops[:count].max(initial=0.0))

    @functools.cached_property
    def _forward(self) -> tuple[Floats, Floats, Floats]:
        """Of each row of the forward, in order: when it was scanned, if it is bad, its absmax."""
        found: list[tuple[float, float, float]] = []
        for row in self.scanned(*(kind for kind in Kind if kind.is_forward)):
            stats, is_input = self.record.result(row), self.record.nodes[row].kind is Kind.INPUT
            infinite = stats.posinf_count if is_input else stats.inf_count
            masked = is_input and is_mask(stats.min, stats.max)
            top = 0.0 if masked else stats.absmax or 0.0
            found.append((self.record.order[row], bool(stats.nan_count or infinite), top))
        columns = np.array(found, np.float64).reshape(-1, 3).T
        return columns[0], columns[1], columns[2]

    @functools.cached_property
    def narrowest(self) -> torch.dtype:
        """Of the dtypes of outputs, the one that overflows first."""
        dtypes = {self.record.result(row).dtype for row in self.scanned(Kind.OUTPUT, Kind.INPUT)}
        real = [dtype for dtype in dtypes if not dtype.is_complex]
        return min(real, key=lambda dtype: float(torch.finfo(dtype).max), default=torch.float32)

    def alike_before(self, row: int) -> list[Seen]:
        """Finite tensors of a row's shape and dtype, in execution order up to it.

        They are inputs and outputs of modules inside the one whose forward made the row, and its
        own inputs.
        """
        record = self.record
        node, like = record.nodes[row], record.describe(row)
        inside = node.place
        if node.kind is not Kind.OUTPUT and node.place.parent is not None:
            inside = node.place.parent
        sources = inside.input_sources() if isinstance(inside, ModulePlace) else set()
        return [
            (other.site, record.result(other.row))
            for other in (record.nodes[r] for r in self.scanned(Kind.INPUT, Kind.OUTPUT))
            if (other.place.is_inside(inside) or other.row in sources)
            and record.order[other.row] < record.order[row]
            and record.describe(other.row) == like
            and not nonfinite(record.rows[other.row : other.row + 1])[0]
        ]

    def gradients_by_module(self, before: int) -> list[tuple[str, float]]:
        """Largest gradient of each module, in the order of backward, up to a row.

        Weights and biases differ in scale for good reasons; modules of one kind should not.
        """
        record, tops = self.record, dict[str, float]()
        for row in self.scanned(record.nodes[before].kind):
            node, values = record.nodes[row], record.rows[row : row + 1]
            if record.order[row] >= record.order[before] or nonfinite(values)[0]:
                continue
            owner = node.place if isinstance(node.place, ModulePlace) else node.place.parent
            name = owner.name if owner is not None else node.place.name
            tops[name] = max(tops.get(name, 0.0), float(absmax(values)[0]))
        return [(name, top) for name, top in tops.items() if top > 0]


@dataclass
class Evidence:
    """The one argument of a rule: a finding, and all that may explain it.

    Attributes:
        finding: the finding, without causes.
        node: its site.
        step: what is known of the step, and of those before it.
        from_outside: it is an input that the caller of an outermost module handed in.
        from_start: it was bad before its model first ran.
        inputs_from_outside: all inputs of outermost modules in this step.
        affected: sites that went bad after the first one of the step.
    """

    finding: Finding
    node: Node
    step: StepEvidence
    from_outside: bool
    from_start: bool
    inputs_from_outside: tuple[Seen, ...]
    affected: tuple[Site, ...] = ()

    @property
    def record(self) -> StepRecord:
        """The step's record."""
        return self.step.record

    @property
    def stats(self) -> ScanResult:
        """What was scanned at the site."""
        return self.finding.stats

    @property
    def kind(self) -> Kind:
        """Of the site."""
        return self.finding.site.kind

    @property
    def row(self) -> int:
        """Of the site."""
        return self.node.row

    @functools.cached_property
    def trend(self) -> Trend:
        """The site's absmax in the steps before."""
        return self.step.trend(self.row)

    @property
    def module(self) -> nn.Module | None:
        """The module of the site; of a parameter, the one that owns it."""
        place = self.node.place
        owner = place if isinstance(place, ModulePlace) else place.parent
        return self.record.model.modules.get(owner) if owner is not None else None

    @property
    def layer(self) -> nn.Module | None:
        """The module whose output the site is; None for other kinds."""
        return self.module if self.kind is Kind.OUTPUT else None

    @property
    def gradient(self) -> ScanResult | None:
        """Of a parameter or its moments: the gradient that the optimizer was given."""
        return next((stats for site, stats in self.finding.given if site.kind is Kind.GRAD), None)

    @property
    def optimizer(self) -> OptimizerFacts | None:
        """What steps the parameter, with its moments if it is bad; else the only optimizer."""
        place, model = self.node.place, self.record.model
        if not isinstance(place, ParameterPlace):
            return model.optimizers.get(None)
        return self.record.optimizers.get(place) or model.optimizers.get(place)

    def option(self, name: str) -> float | None:
        """A number among the optimizer's options; None for a tensor, which may be on a device."""
        value = self.optimizer.options.get(name) if self.optimizer is not None else None
        return float(value) if isinstance(value, (int, float)) else None


def is_mask(low: float | None, high: float | None) -> bool:
    """Whether finite extremes are those of an additive mask: 0 and something very low."""
    return low is not None and low <= -1e4 and high in (0, low)  # noqa: PLR2004
