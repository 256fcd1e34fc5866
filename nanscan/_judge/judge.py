"""From a step's rows to findings: what went bad, where first, and made there or handed on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from nanscan._collect.snapshot import Snapshot
from nanscan._collect.table import Table
from nanscan._data.finding import Finding, Seen, Verdict
from nanscan._data.places import ModulePlace, Node, ParameterPlace, SinglePlace
from nanscan._data.result import ScanResult
from nanscan._data.row import absmax
from nanscan._data.site import Site

if TYPE_CHECKING:
    pass


_BEFORE = 5  # sites shown before a finding
_BACKWARD = ("grad", "grad_output", "loss")  # kinds that a loss scale multiplies

_HOW: dict[Verdict, str] = {
    "origin": "made here",
    "propagated": "handed on",
    "absorbed": "it was handed non-finite values, and returned finite ones",
    "near-limit": "close to overflow",
}


@dataclass
class Judged:
    """A finding with what a diagnosis needs to know beyond it.

    Attributes:
        finding: the finding, without causes.
        node: its site.
        from_outside: an input that the caller of an outermost module handed in.
        untrained: a parameter, as it was before its model first ran.
        inputs_from_outside: all inputs of outermost modules in this step.
    """

    finding: Finding
    node: Node
    from_outside: bool = False
    untrained: bool = False
    inputs_from_outside: list[Seen] = field(default_factory=list)


class Judge:
    """Judges snapshots in order; remembers what is bad from one to the next.

    Args:
        table: whose rows the snapshots hold.
        near_limit: share of a dtype's largest value from which a finite value is reported.
        rank: of this process.
        max_skips: skipped optimizer steps in a row that are a scale search, and no fault yet.
        ignores: whether a site with this dtype is of no interest.
    """

    def __init__(
        self,
        table: Table,
        near_limit: float,
        rank: int,
        *,
        max_skips: int,
        ignores: Callable[[Site, torch.dtype], bool],
    ) -> None:
        self._table = table
        self._near_limit = near_limit
        self._rank = rank
        self._max_skips = max_skips
        self._ignores = ignores
        self._first: Site | None = None  # of the faults of this episode
        self._bad_parameters: dict[int, ScanResult] = {}  # by row, as last scanned
        self._reported: set[int] = set()  # rows reported as bad in this episode
        self._near: set[int] = set()  # rows reported as near the limit, still there
        self._latest: set[int] = set()  # rows that were bad in the last whole snapshot
        self._absorbed = -1, -1  # step and row, as last reported: a step may be judged in parts

    @property
    def in_episode(self) -> bool:
        """Whether something was bad in the last step, or a parameter still is."""
        return bool(self._reported)

    def judge(self, snapshot: Snapshot) -> list[Judged]:
        """What is new in a step, in the order in which it happened."""
        if not (snapshot.notable or self._reported or self._near):
            return []  # and so `_latest` is empty
        step = _Step(self, snapshot)
        bad = step.bad_rows()
        if snapshot.whole:
            self._latest = set(bad)
        near = self._newly_near(snapshot, set(bad))
        news = [step.describe(row, "near-limit") for row in near]
        if snapshot.skips and step.is_of_backward(bad):
            return news + self._skipped(step, snapshot, bad)
        faults = []
        for row in bad:
            if row not in self._reported:
                faults.append(step.finding(row))
                self._reported.add(row)
            step.note(row)
        self._update_parameters(snapshot)
        if faults:
            faults[0].finding.affected = tuple(item.finding.site for item in faults[1:])
            self._first = self._first or faults[0].finding.site
            absorbed = [
                i for i in step.absorbed(bad) if (snapshot.step, i.node.row) != self._absorbed
            ]
            if absorbed:
                self._absorbed = snapshot.step, absorbed[0].node.row
            return [*news, *faults, *absorbed]
        is_over = snapshot.whole and not snapshot.continues and not bad
        if is_over and self._reported and not self._bad_parameters:
            news += self._recovered(step, snapshot)
        return news

    def _skipped(self, step: _Step, snapshot: Snapshot, bad: list[int]) -> list[Judged]:
        """A step that a GradScaler skipped, with nothing bad before backward."""
        if snapshot.skips not in (1, self._max_skips):
            return []
        judged = step.describe(bad[0], "scale-search")
        finding = judged.finding
        finding.affected = tuple(self._table.nodes[row].site for row in bad[1:])
        finding.how = f"the GradScaler skipped the step and lowered its scale of {snapshot.scale:g}"
        if snapshot.skips == self._max_skips:
            finding.verdict = "persistent-overflow"
            finding.how = (
                f"the GradScaler skipped {snapshot.skips} steps in a row, this one at a scale of "
                f"{snapshot.scale:g}"
            )
        return [judged]

    def _recovered(self, step: _Step, snapshot: Snapshot) -> list[Judged]:
        """The end of an episode."""
        first, rows = self._first, sorted(self._reported)
        self._reported.clear()
        self._first = None
        # The first site, or, where its tensor is another one's in this step, the next that is seen.
        rows.sort(key=lambda row: self._table.nodes[row].site != first)
        seen = (row for row in rows if row < len(snapshot.rows) and snapshot.rows[row]["calls"])
        row = next(seen, None)
        if row is None:
            row = next(step.scanned(), None)
        if row is None:
            return []
        judged = step.describe(row, "recovered")
        judged.finding.how = "all that was scanned in this step is finite"
        return [judged]

    # -- near the limit --------------------------------------------------------------------------

    def _newly_near(self, snapshot: Snapshot, bad: set[int]) -> list[int]:
        near = {
            row
            for row in snapshot.notable
            if row not in bad
            and self._is_near(row, snapshot)
            and not self._is_ignored(row, snapshot)
        }
        new = sorted(near - self._near)
        unseen = {row for row in self._near if not snapshot.rows[row]["calls"]}
        self._near = near | unseen
        return new

    def _is_near(self, row: int, snapshot: Snapshot) -> bool:
        magnitude, limit = absmax(snapshot.rows[row : row + 1])[0], snapshot.limit(row)
        if self._table.nodes[row].kind == "input" and magnitude == limit:
            return False  # an additive mask is filled with torch.finfo(dtype).min itself
        return bool(magnitude >= self._near_limit * limit)

    def _is_ignored(self, row: int, snapshot: Snapshot) -> bool:
        described = snapshot.describe(row)
        dtype = getattr(torch, described[0]) if described else torch.float32
        return self._ignores(self._table.nodes[row].site, dtype)

    # -- what stays bad --------------------------------------------------------------------------

    def _update_parameters(self, snapshot: Snapshot) -> None:
        for row in [row for row in self._bad_parameters if snapshot.rows[row]["calls"]]:
            del self._bad_parameters[row]
        for row in snapshot.notable:
            is_parameter = self._table.nodes[row].kind == "param"
            if (
                snapshot.rows[row]["ticket"]
                and is_parameter
                and not self._is_ignored(row, snapshot)
            ):
                self._bad_parameters[row] = snapshot.result(row)


class _Step:
    """One snapshot under judgement."""

    def __init__(self, judge: Judge, snapshot: Snapshot) -> None:
        self._judge = judge
        self._table = judge._table  # noqa: SLF001 - one unit in two classes
        self._snapshot = snapshot
        self._rows = snapshot.rows
        self._order = snapshot.order
        self._earlier: set[int] = set(judge._bad_parameters)  # noqa: SLF001 - rows already bad
        if snapshot.continues:
            self._earlier |= judge._latest  # noqa: SLF001
        self._made = False  # whether something went bad in this step that no caller handed in

    def note(self, row: int) -> None:
        """From here on this row counts as bad for what comes after it."""
        self._earlier.add(row)
        node = self._node(row)
        self._made |= node.kind != "input" or node.place.parent is not None

    def _node(self, row: int) -> Node:
        """The node of a row. A keyword argument that global hooks saw late, first where it was
        handed on to, belongs to the outermost module that was given it.
        """  # noqa: D205
        node = self._table.nodes[row]
        place = node.place.parent if node.late else None
        while place is not None:
            node = next((n for n in place.keywords.walk() if row in n.sources), node)
            place = place.parent
        return node

    # -- which rows are bad, in what order ---------------------------------------------------------

    def bad_rows(self) -> list[int]:
        """Bad rows in the order in which they went bad, masks left out."""
        rows = [
            row
            for row in self._snapshot.notable
            if self._rows[row]["ticket"]
            and not self._is_mask(row)
            and not self._judge._is_ignored(row, self._snapshot)  # noqa: SLF001
        ]
        tickets = {row: float(self._rows[row]["ticket"]) for row in rows}

        for row in rows:
            node = self._node(row)
            if node.late:  # it went in before anything inside the module ran
                inside = [
                    tickets[r] for r in rows if self._table.nodes[r].place.is_inside(node.place)
                ]
                tickets[row] = min(inside) - 0.5
        return sorted(rows, key=tickets.__getitem__)

    def _is_mask(self, row: int) -> bool:
        """-Inf alone in an input or buffer is a mask, unless the rest shows an overflow."""
        record, node = self._rows[row], self._table.nodes[row]
        if node.kind not in ("input", "buffer") or record["nan"] or record["posinf"]:
            return False
        if isinstance(node.place, SinglePlace) and node.place.is_statistic:
            return False
        return not self._judge._is_near(row, self._snapshot)  # noqa: SLF001

    def is_of_backward(self, rows: list[int]) -> bool:
        """Whether some rows are bad, and only such as a loss scale multiplies."""
        return bool(rows) and all(self._table.nodes[row].kind in _BACKWARD for row in rows)

    # -- findings ----------------------------------------------------------------------------------

    def finding(self, row: int) -> Judged:
        """Verdict and surroundings of a bad row."""
        judged = self._judged(row)
        if judged.finding.verdict == "origin" and not self._snapshot.turn.is_full:
            judged.finding.unscanned = tuple(self._unscanned_before(row))
            if judged.finding.unscanned:
                judged.finding.how = "made here or where this step did not scan"
        return judged

    def _unscanned_before(self, row: int) -> list[Site]:
        """Outputs that a full step scans between this row and the last finite one before it."""
        order, nodes = self._table.full_order, self._table.nodes
        if row >= len(order) or order[row] == 0:
            return []
        scanned = [r for r in range(len(order)) if 0 < order[r] < order[row]]
        finite = [order[r] for r in scanned if self._rows[r]["calls"] and r not in self._earlier]
        missing = [
            r
            for r in scanned
            if nodes[r].kind == "output"
            and not self._rows[r]["calls"]
            and order[r] > max(finite, default=0)
        ]
        return [nodes[r].site for r in sorted(missing, key=order.__getitem__)]

    def _judged(self, row: int) -> Judged:
        node = self._node(row)
        judged = self.describe(row, "origin")
        if self._snapshot.untrained:
            judged.finding.how = "it was so before its model first ran"
            return judged
        if self._snapshot.spoiled:
            judged.finding.how = self._snapshot.spoiled
            return judged
        place = node.place
        if node.kind == "input":
            by_code = node.computed or place.parent is not None
            between = self._between(row) if by_code else None
            judged.from_outside = place.parent is None and between is None and not self._made
            if judged.from_outside or self._earlier:
                judged.finding.verdict = "propagated"
                judged.finding.how = "handed on"
                if judged.from_outside:
                    judged.finding.how = "handed in by the caller"
            else:
                judged.finding.between = between
                judged.finding.how = "made by code of no module"
                if place.parent is not None:
                    judged.finding.how += f", in the forward of {place.parent.name}"
        elif self._was_handed_bad_values(row, node):
            judged.finding.verdict = "propagated"
            judged.finding.how = "handed on"
        elif node.kind in ("grad", "grad_output", "loss", "probe"):
            judged.finding.between = self._between(row)
            if node.kind in ("loss", "probe"):
                judged.finding.how = "made by code of no module"
        return judged

    def absorbed(self, bad: list[int]) -> list[Judged]:
        """The first module behind the bad rows that was handed some and returned finite values."""
        rows, nodes = set(bad), self._table.nodes
        found: list[tuple[int, int, list[int]]] = []
        for row in self.scanned():
            node = nodes[row]
            if node.kind != "output" or not isinstance(node.place, ModulePlace) or row in rows:
                continue
            own = [n.row for n in node.place.outputs.walk() if n.row >= 0]
            taken = node.place.input_sources() & rows
            if taken and not rows & set(own):
                found.append((int(self._order[row]), row, sorted(taken)))
        if not found:
            return []
        _, first, handed = min(found)
        judged = self.describe(first, "absorbed")
        judged.finding.given = tuple(self._seen(handed))
        return [judged]

    def describe(self, row: int, verdict: Verdict) -> Judged:
        node = self._node(row)
        finding = Finding(
            step=self._snapshot.step,
            rank=self._judge._rank,  # noqa: SLF001
            site=node.site,
            verdict=verdict,
            how=_HOW.get(verdict, ""),
            stats=self._stats(row),
            given=tuple(self._seen(self._given(node), as_known=node.kind == "output")),
            before=tuple(self._seen(self._rows_before(row))),
            history=self._table.history(row),
            aliases=tuple(node.place.aliases) if isinstance(node.place, ParameterPlace) else (),
        )
        return Judged(
            finding,
            node,
            untrained=self._snapshot.untrained,
            inputs_from_outside=self._seen(self._outermost_inputs()),
        )

    def _was_handed_bad_values(self, row: int, node: Node) -> bool:
        place = node.place
        if node.kind == "output" and isinstance(place, ModulePlace):
            sources = place.input_sources()
            if not sources:  # inputs are not watched
                return bool(self._earlier - {row})
            sources |= place.parameter_sources()
            inside = {r for r in self._earlier if self._table.nodes[r].place.is_inside(place)}
            return bool((sources | inside) & self._earlier - {row})
        if node.kind == "param" and isinstance(place, ParameterPlace):
            return bool(place.grad.sources & self._earlier)
        is_first = self._rows[row]["first_bad_call"] == 1  # else: after clipping
        if node.kind == "grad" and is_first and place.parent is not None:
            gradients = self._gradients_of(place.parent)
            if gradients:  # what its backward was given is known
                return bool((gradients | place.parent.input_sources()) & self._earlier)
        return bool(self._earlier - {row})

    def _gradients_of(self, place: ModulePlace) -> set[int]:
        """Rows of this step with the gradients that reached a module's outputs.

        None for a module that a checkpoint ran again: what went into it then is not known.
        """
        if any(self._was_scanned(node.row) for node in place.recomputed.walk()):
            return set()
        nodes = [node.gradient for node in place.outputs.walk() if node.gradient is not None]
        rows = {row for node in nodes for row in (node.row, *node.sources)}
        return {row for row in rows if self._was_scanned(row)}

    def _was_scanned(self, row: int) -> bool:
        return 0 <= row < len(self._rows) and bool(self._rows[row]["calls"])

    def scanned(self) -> Iterator[int]:
        return (int(row) for row in np.flatnonzero(self._order > 0))

    def _rows_before(self, row: int) -> list[int]:
        """The last few rows first scanned before this one in the step, in execution order."""
        order = self._order
        earlier = np.flatnonzero((order > 0) & (order < order[row]))
        return [int(r) for r in earlier[np.argsort(order[earlier])][-_BEFORE:]]

    def _between(self, row: int) -> tuple[Site, Site] | None:
        """None, too, for a later call of a place: the order known is that of first calls."""
        before = self._rows_before(row)
        if not before or self._rows[row]["first_bad_call"] > 1:
            return None
        return self._table.nodes[before[-1]].site, self._table.nodes[row].site

    def _given(self, node: Node) -> list[int]:
        place = node.place
        if node.kind == "output" and isinstance(place, ModulePlace):
            sources = place.input_sources() | place.parameter_sources() & self._earlier
        elif node.kind in ("param", "state") and isinstance(place, ParameterPlace):
            sources = place.grad.sources
        else:
            sources = set()
        return sorted(sources - {-1, node.row})

    def _outermost_inputs(self) -> list[int]:
        nodes = self._table.nodes
        return [r for r in self.scanned() if nodes[r].kind == "input" and not nodes[r].place.parent]

    def _stats(self, row: int) -> ScanResult:
        return self._snapshot.result(row)

    def _seen(self, rows: Iterable[int], *, as_known: bool = False) -> list[Seen]:
        """Rows of this step, and parameters that were bad before; `as_known`: as they were then."""
        known = self._judge._bad_parameters  # noqa: SLF001
        return [
            (
                self._table.nodes[row].site,
                known[row]
                if row in known and (as_known or not self._was_scanned(row))
                else self._stats(row),
            )
            for row in rows
            if row in known or self._was_scanned(row)
        ]
