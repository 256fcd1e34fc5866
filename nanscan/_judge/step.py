"""StepVerdicts: which rows of one record are bad, in what order, and what each of them is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from nanscan._collect.snapshot import StepRecord
from nanscan._data.finding import Finding, Seen, Verdict
from nanscan._data.places import ModulePlace, Node, ParameterPlace, SinglePlace
from nanscan._data.result import ScanResult
from nanscan._data.site import Kind, Site
from nanscan._judge.evidence import Evidence, StepEvidence

_BEFORE = 5  # sites shown before a finding

_HOW: dict[Verdict, str] = {
    "origin": "made here",
    "propagated": "it was given non-finite values",
    "absorbed": "it was given non-finite values and returned finite ones",
    "near-limit": "close to overflow",
}


@dataclass(frozen=True)
class _Conclusion:
    """A verdict with its reason."""

    verdict: Verdict
    how: str
    between: tuple[Site, Site] | None = None
    from_outside: bool = False
    unscanned: tuple[Site, ...] = ()
    given: list[Seen] | None = field(default=None)  # None: what the site was made from


class StepVerdicts:
    """Judges the rows of one record.

    Args:
        record: the record.
        rank: of this process.
        bad_parameters: parameters that are bad, by row, as last scanned; kept up to date.
        bad_before: other rows that were bad before it.
    """

    def __init__(
        self,
        record: StepRecord,
        rank: int,
        bad_parameters: Mapping[int, ScanResult],
        bad_before: Iterable[int],
    ) -> None:
        self._record = record
        self._rank = rank
        self._bad_parameters = bad_parameters
        self._earlier = {*bad_parameters, *bad_before}  # rows already bad
        self._made = False  # whether something went bad in this step that no caller handed in
        self._evidence = StepEvidence(record)

    def note(self, row: int) -> None:
        """From here on this row counts as bad for what comes after it."""
        self._earlier.add(row)
        node = self._record.nodes[row]
        self._made |= node.kind is not Kind.INPUT or self._record.around(node.place) is not None

    def in_order(self, rows: Iterable[int]) -> list[int]:
        """Bad rows in the order in which they went bad."""
        return sorted(rows, key=lambda row: int(self._record.rows[row]["ticket"]))

    # -- verdicts ----------------------------------------------------------------------------------

    def judge(self, row: int) -> Evidence:
        """Verdict and surroundings of a bad row."""
        return self._build(row, self._conclude(row))

    def _conclude(self, row: int) -> _Conclusion:
        conclusion = self._conclude_of_scans(row)
        if conclusion.verdict != "origin" or self._record.turn.is_full:
            return conclusion
        unscanned = tuple(self._unscanned_before(row))
        if not unscanned:
            return conclusion
        how = "made here or where this step did not scan"
        return _Conclusion("origin", how, conclusion.between, unscanned=unscanned)

    def _conclude_of_scans(self, row: int) -> _Conclusion:
        node = self._record.nodes[row]
        if self._record.is_untrained:
            return _Conclusion("origin", "it was so before its model first ran")
        if self._record.spoiled:
            return _Conclusion("origin", self._record.spoiled)
        if node.kind is Kind.INPUT:
            return self._conclude_of_input(row, node)
        if self._was_handed_bad_values(row, node):
            return _Conclusion("propagated", _HOW["propagated"])
        if node.kind in (Kind.LOSS, Kind.PROBE):
            return _Conclusion("origin", "made by code outside of any module", self._between(row))
        between = self._between(row) if node.kind.is_gradient else None
        return _Conclusion("origin", "made here", between)

    def _conclude_of_input(self, row: int, node: Node) -> _Conclusion:
        around = self._record.around(node.place)
        by_code = node.computed or around is not None
        between = self._between(row) if by_code else None
        if around is None and node.place.parent is not None and self._may_be_made(row):
            how = "made by code outside of any module, or handed in by the caller"
            if not (self._earlier or self._made):
                return _Conclusion("origin", how, self._between(row))
        if around is None and between is None and not self._made:
            return _Conclusion(
                "propagated", "the caller gave it non-finite values", from_outside=True
            )
        if self._earlier:
            return _Conclusion("propagated", _HOW["propagated"])
        where = f", in the forward of {around.name}" if around is not None else ""
        return _Conclusion("origin", f"made by code outside of any module{where}", between)

    def _may_be_made(self, row: int) -> bool:
        """Whether code may have made an input of what a module returned before, unseen by autograd.

        What code makes of an output that has a history has one, too.
        """
        order, nodes = self._record.order, self._record.nodes
        earlier = (nodes[r] for r in self._record.scanned() if order[r] < order[row])
        return any(node.kind is Kind.OUTPUT and not node.computed for node in earlier)

    def _was_handed_bad_values(self, row: int, node: Node) -> bool:
        place = node.place
        if node.kind is Kind.OUTPUT and isinstance(place, ModulePlace):
            sources = place.input_sources()
            if not sources:  # inputs are not watched
                return bool(self._earlier - {row})
            sources |= place.parameter_sources()
            nodes = self._record.nodes
            inside = {r for r in self._earlier if nodes[r].place.is_inside(place)}
            return bool((sources | inside) & self._earlier - {row})
        if node.kind is Kind.PARAM and isinstance(place, ParameterPlace):
            return bool(place.grad.sources & self._earlier)
        is_first = self._record.rows[row]["first_bad_call"] == 1  # else: after clipping
        if node.kind is Kind.GRAD and is_first and place.parent is not None:
            gradients = self._gradients_of(place.parent)
            if gradients:  # what its backward was given is known
                return bool((gradients | place.parent.input_sources()) & self._earlier)
        return bool(self._earlier - {row})

    def _gradients_of(self, place: ModulePlace) -> set[int]:
        """Rows of this step with the gradients that reached a module's outputs.

        None for a module that a checkpoint ran again: what went into it then is not known.
        """
        if any(self._record.was_scanned(node.row) for node in place.recomputed.walk()):
            return set()
        nodes = [node.gradient for node in place.outputs.walk() if node.gradient is not None]
        rows = {row for node in nodes for row in (node.row, *node.sources)}
        return {row for row in rows if self._record.was_scanned(row)}

    def _unscanned_before(self, row: int) -> list[Site]:
        """Outputs that a full step scans between this row and the last finite one before it."""
        order, record = self._record.history.full_order, self._record
        if row >= len(order) or order[row] == 0:
            return []
        earlier = [r for r in range(len(order)) if 0 < order[r] < order[row]]
        scanned = [r for r in earlier if record.rows[r]["calls"]]
        finite = [order[r] for r in scanned if r not in self._earlier]
        missing = [
            r
            for r in earlier
            if record.nodes[r].kind is Kind.OUTPUT
            and not record.rows[r]["calls"]
            and order[r] > max(finite, default=0)
        ]
        return [record.nodes[r].site for r in sorted(missing, key=order.__getitem__)]

    def absorbed(self, bad: list[int]) -> Evidence | None:
        """The first module behind the bad rows that was handed some and returned finite values."""
        rows, nodes = set(bad), self._record.nodes
        found: list[tuple[int, int, list[int]]] = []
        for row in self._record.scanned():
            node = nodes[row]
            if (
                node.kind is not Kind.OUTPUT
                or not isinstance(node.place, ModulePlace)
                or row in rows
            ):
                continue
            own = [n.row for n in node.place.outputs.walk() if n.row >= 0]
            taken = node.place.input_sources() & rows
            if taken and not rows & set(own):
                found.append((int(self._record.order[row]), row, sorted(taken)))
        if not found:
            return None
        _, first, handed = min(found)
        return self.describe(first, "absorbed", given=self._seen(handed))

    # -- surroundings ------------------------------------------------------------------------------

    def describe(
        self, row: int, verdict: Verdict, how: str = "", given: list[Seen] | None = None
    ) -> Evidence:
        """Surroundings of a row whose verdict is known.

        Args:
            row: the row.
            verdict: what it is.
            how: the verdict in words; "": the usual ones.
            given: what was given to it; None: what it was made from.
        """
        return self._build(row, _Conclusion(verdict, how or _HOW[verdict], given=given))

    def _build(self, row: int, conclusion: _Conclusion) -> Evidence:
        node = self._record.nodes[row]
        given = self._given(node) if conclusion.given is None else conclusion.given
        aliases = node.place.aliases if isinstance(node.place, ParameterPlace) else []
        finding = Finding(
            step=self._record.step,
            rank=self._rank,
            site=node.site,
            verdict=conclusion.verdict,
            how=conclusion.how,
            stats=self._record.result(row),
            given=tuple(given),
            before=tuple(self._seen(self._rows_before(row))),
            between=conclusion.between,
            history=self._record.history.of(row),
            aliases=tuple(aliases),
            unscanned=conclusion.unscanned,
        )
        outside = tuple(self._seen(self._outermost_inputs()))
        return Evidence(finding, node, self._evidence, conclusion.from_outside, outside)

    def _rows_before(self, row: int) -> list[int]:
        """The last few rows first scanned before this one in the step, in execution order."""
        order = self._record.order
        earlier = np.flatnonzero((order > 0) & (order < order[row]))
        return [int(r) for r in earlier[np.argsort(order[earlier])][-_BEFORE:]]

    def _between(self, row: int) -> tuple[Site, Site] | None:
        """None, too, for a later call of a place: the order known is that of first calls."""
        before, nodes = self._rows_before(row), self._record.nodes
        if not before or self._record.rows[row]["first_bad_call"] > 1:
            return None
        return nodes[before[-1]].site, nodes[row].site

    def _given(self, node: Node) -> list[Seen]:
        """What a site was made from: a module's inputs, a parameter's gradient and moments."""
        place, sources = node.place, set[int]()
        if node.kind is Kind.OUTPUT and isinstance(place, ModulePlace):
            sources = place.input_sources() | place.parameter_sources() & self._earlier
        elif node.kind in (Kind.PARAM, Kind.STATE) and isinstance(place, ParameterPlace):
            sources = place.grad.sources
        rows = sorted(sources - {-1, node.row})
        seen = self._seen(rows, as_known=node.kind is Kind.OUTPUT)
        if node.kind is Kind.PARAM and isinstance(place, ParameterPlace):
            facts = self._record.optimizers.get(place)
            moments = facts.moments if facts is not None else {}
            seen += [(place.moment(name).site, moment) for name, moment in moments.items()]
        return seen

    def _outermost_inputs(self) -> list[int]:
        nodes = self._record.nodes
        return [
            row
            for row in self._record.scanned()
            if nodes[row].kind is Kind.INPUT and not self._record.around(nodes[row].place)
        ]

    def _seen(self, rows: Iterable[int], *, as_known: bool = False) -> list[Seen]:
        """Rows of this step, and parameters that were bad before; `as_known`: as they were then."""
        known, record = self._bad_parameters, self._record
        return [
            (
                record.nodes[row].site,
                known[row]
                if row in known and (as_known or not record.was_scanned(row))
                else record.result(row),
            )
            for row in rows
            if row in known or record.was_scanned(row)
        ]


def is_mask(record: StepRecord, row: int) -> bool:
    """Whether a bad row looks like a mask: -Inf alone in an input or buffer."""
    values, node = record.rows[row], record.nodes[row]
    if not node.kind.may_be_mask or values["nan"] or values["posinf"]:
        return False
    return not (isinstance(node.place, SinglePlace) and node.place.is_statistic)
