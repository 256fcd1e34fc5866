"""Evidence: what a rule may ask about a finding. Worked out only when a rule asks."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from nanscan._collect.snapshot import OptimizerFacts, StepRecord
from nanscan._data.finding import Finding, Seen
from nanscan._data.places import ModulePlace, Node, ParameterPlace
from nanscan._data.result import ScanResult
from nanscan._data.row import Floats, absmax, nonfinite
from nanscan._data.settings import numbers
from nanscan._data.site import Kind, Site
from nanscan._data.text import number
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
    def has_all_gradients(self) -> bool:
        """Whether gradients were scanned in each step before, as far as kept, and were finite."""
        steps, records = self.record.history.kept(self._rows(Kind.GRAD))
        used = (steps < self.record.step) & (records["calls"].max(1, initial=0) > 0)
        seen = steps[used]
        is_gapless = len(seen) > 0 and seen[0] + len(seen) == self.record.step
        return bool(is_gapless and not nonfinite(records[used]).any())

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

    @functools.cached_property
    def is_clipped(self) -> bool:
        """Whether gradients were scanned before clipping and after it."""
        return any(self.record.rows[row]["calls"] > 1 for row in self.scanned(Kind.GRAD))

    @functools.cached_property
    def are_gradients_nan(self) -> bool:
        """Whether each value of each of several gradients is NaN."""
        rows = self.record.rows[self.scanned(Kind.GRAD)]
        return len(rows) > 1 and bool((rows["nan"] == rows["elements"]).all())

    def forward_before(self, row: int) -> ForwardBefore:
        """What is known of inputs, outputs and loss that were scanned before a row."""
        order, bad, masked, tops = self._forward
        count = int(np.searchsorted(order, self.record.order[row]))
        top = float(tops[:count].max(initial=0.0))
        return ForwardBefore(count, int(bad[:count].sum()), int(masked[:count].sum()), top)

    @functools.cached_property
    def _forward(self) -> tuple[Floats, Floats, Floats, Floats]:
        """Of each row of the forward, in order: when it was scanned; if it is bad; if it holds
        -Inf as a mask does; its absmax, that of additive masks aside.
        """  # noqa: D205
        found: list[tuple[float, float, float, float]] = []
        forward = [kind for kind in Kind if kind.is_forward]
        seen = [(row, self.record.result(row)) for row in self.scanned(*forward)]
        for row, stats in (*self._forward_of_first_part(forward), *seen):
            kind = self.record.nodes[row].kind
            holds_mask = stats.neginf_count == stats.nonfinite_count > 0 and kind.may_be_mask
            is_bad = not (stats.is_finite or holds_mask)
            is_additive = kind is Kind.INPUT and is_mask(stats.min, stats.max)
            top = 0.0 if is_additive else stats.absmax or 0.0
            found.append((self.record.order[row], is_bad, holds_mask, top))
        columns = np.array(found, np.float64).reshape(-1, 4).T
        return columns[0], columns[1], columns[2], columns[3]

    def _forward_of_first_part(self, forward: list[Kind]) -> Iterator[tuple[int, ScanResult]]:
        """Of a step whose forward was judged before, in a record of its own: what that showed."""
        if not self.record.continues:
            return
        nodes = self.record.nodes[: len(self.record.rows)]
        rows = [n.row for n in nodes if n.kind in forward and not self.record.order[n.row]]
        steps, records = self.record.history.kept(rows)
        for position in np.flatnonzero(steps == self.record.step):
            for row, values in zip(rows, records[position], strict=True):
                if values["calls"]:
                    yield row, ScanResult(values, (), torch.float32)

    def masks_before(self, row: int) -> list[Seen]:
        """What holds -Inf alone, as masks do, and was scanned before a row of this step."""
        record = self.record
        found = [
            (record.nodes[other].site, record.result(other))
            for other in self.scanned(*(kind for kind in Kind if kind.may_be_mask))
            if record.order[other] < record.order[row]
        ]
        return [(s, held) for s, held in found if held.neginf_count == held.nonfinite_count > 0]

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


@dataclass(frozen=True)
class ForwardBefore:
    """What was scanned in the forward before something.

    Attributes:
        count: tensors that were scanned.
        bad: how many of them are bad.
        masked: how many more hold -Inf alone, as masks do.
        absmax: largest finite magnitude in them, additive masks aside.
    """

    count: int
    bad: int
    masked: int
    absmax: float

    @property
    def is_finite(self) -> bool:
        """Whether something was scanned, and all of it is finite, or a mask."""
        return self.count > 0 and not self.bad

    def __str__(self) -> str:
        aside = f", the -Inf of masks in {self.masked} aside" if self.masked else ""
        return (
            f"all {self.count} tensors scanned in the forward of this step are finite{aside}, "
            f"absmax {number(self.absmax)}"
        )


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
    def first_bad_call(self) -> int:
        """Number of the scan that first saw the site bad, from 1."""
        return int(self.record.rows[self.row]["first_bad_call"])

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
    def is_given_finite(self) -> bool:
        """Whether all is known of what a module's output was made from, and is finite."""
        given = self.finding.given
        return bool(given) and all(stats.is_finite for _, stats in given)

    @property
    def is_mask_on_mask(self) -> bool:
        """Whether the values show additive masks that were added: -Inf beside the lowest value."""
        stats = self.stats
        only_neginf = stats.neginf_count == stats.nonfinite_count > 0
        return only_neginf and stats.min == torch.finfo(stats.dtype).min

    @property
    def bad_buffers(self) -> list[tuple[Site, ScanResult, str]]:
        """Own buffers of a layer that were bad before this step, each with since when."""
        place = self.node.place
        own = place.buffers.values() if isinstance(place, ModulePlace) else ()
        nodes = {buffer.node.site: buffer.node for buffer in own if buffer.node.row >= 0}
        found = {
            site: (site, stats, "since before this step")
            for site, stats in self.finding.given
            if site in nodes and not stats.is_finite
        }
        for node in nodes.values():
            steps, records = self.record.history.kept([node.row])
            used = (steps < self.record.step) & (records["calls"][:, 0] > 0)
            steps, past = steps[used], records[used, 0]
            bad = nonfinite(past) > past["neginf"]
            if len(bad) and bad[-1]:
                fine = np.flatnonzero(~bad)
                since = steps[fine[-1] + 1] if len(fine) else steps[0]
                result = ScanResult(past[-1], (), self.stats.dtype)
                found[node.site] = node.site, result, f"since step {since}"
        return list(found.values())

    @property
    def has_finite_buffers(self) -> bool:
        """Whether all own buffers of a layer were scanned as they are, and are finite."""
        place = self.node.place
        own = place.buffers.values() if isinstance(place, ModulePlace) else ()
        rows = [buffer.node.row for buffer in own]
        seen = [self.record.was_scanned(r) or bool(len(self.step.trend(r))) for r in rows]
        bad = [self.record.was_scanned(r) and not self.record.result(r).is_finite for r in rows]
        return all(seen) and not any(bad) and not self.bad_buffers

    @functools.cached_property
    def weights(self) -> list[tuple[Site, float]]:
        """The layer's own parameters in this step's forward, as far as known: their absmax."""
        place = self.node.place
        if self.kind is not Kind.OUTPUT or not isinstance(place, ModulePlace):
            return []
        known = [(p.param.site, self._absmax_of(key, p)) for key, p in place.parameters.items()]
        return [(site, top) for site, top in known if top is not None]

    def _absmax_of(self, key: str, place: ParameterPlace) -> float | None:
        past = self.step.trend(place.param.row)
        if past:
            return past.last
        parameter = getattr(self.module, key, None)
        is_as_it_was = place not in self.record.model.optimizers
        if not isinstance(parameter, torch.Tensor) or parameter.device.type != "cpu":
            return None
        top = float(parameter.detach().abs().max()) if is_as_it_was and parameter.numel() else None
        return top if top is not None and np.isfinite(top) else None

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
        """A number among the optimizer's options; None for a tensor on a device, and where unknown.

        Synchronization: none.
        """
        values = [] if self.optimizer is None else numbers(self.optimizer.options.get(name))
        return values[0] if len(values) == 1 else None


def is_mask(low: float | None, high: float | None) -> bool:
    """Whether finite extremes are those of an additive mask: 0 and something very low."""
    return low is not None and low <= -1e4 and high in (0, low)  # noqa: PLR2004
