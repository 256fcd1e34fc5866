"""StepVerdicts: which rows of one record are bad, in what order, and what each of them is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from nanscan._collect.snapshot import StepRecord
from nanscan._data.finding import Finding, Seen, Verdict
from nanscan._data.places import ModulePlace, Node, ParameterPlace
from nanscan._data.result import BadCall, ScanResult
from nanscan._data.site import Kind, Site
from nanscan._judge.evidence import Evidence, StepEvidence
from nanscan._judge.provenance import Provenance

_BEFORE = 5  # sites shown before a finding

_UNSEEN = ": nothing of the forward was scanned, as where a compiled function runs it"
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


def _made_in(node: Node) -> str:
    """Where an origin was made, if not by the code that its site names."""
    place = node.place
    owner = place if isinstance(place, ModulePlace) else place.parent
    region = owner and node.kind in (Kind.OUTPUT, Kind.GRAD) and owner.compiled_region
    return f"made in {region.name} (compiled)" if region else "made here"


class StepVerdicts:
    """Judges the rows of one record.

    Args:
        record: the record.
        rank: of this process.
        provenance: which of its bad rows follow from which.
        lasting: parameters, buffers and moments that were bad before it, by row, as last scanned.
    """

    def __init__(
        self,
        record: StepRecord,
        rank: int,
        provenance: Provenance,
        lasting: Mapping[int, ScanResult],
    ) -> None:
        self._record = record
        self._rank = rank
        self._provenance = provenance
        self._lasting = lasting
        self._bad = {*provenance.bad, *lasting}
        self._evidence = StepEvidence(record)

    # -- verdicts ----------------------------------------------------------------------------------

    def judge(self, row: int, addition: str = "") -> Evidence:
        """Verdict and surroundings of a bad row.

        Args:
            row: the row.
            addition: what else is to be said of the verdict.
        """
        conclusion = self._conclude(row)
        if addition:
            conclusion = replace(conclusion, how=f"{conclusion.how}; {addition}")
        return self._build(row, conclusion)

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
        if self._is_from_start(row):
            return _Conclusion("origin", "it was so before its model first ran")
        if self._record.spoiled:
            return _Conclusion("origin", self._record.spoiled)
        if row in self._provenance.handed_in:
            # A cache is no batch: what is bad in it may come from an earlier call.
            memory = self._memory(row) if node.is_written else ""
            how = f"the caller gave it non-finite values{memory}"
            return _Conclusion("propagated", how, from_outside=not node.is_written)
        if self._provenance.sources.get(row):
            return _Conclusion("propagated", _HOW["propagated"])
        if node.kind in (Kind.INPUT, Kind.LOSS, Kind.PROBE):
            around = self._record.around(node.place)
            where = f", in the forward of {around.name}" if around is not None else ""
            if row in self._provenance.unclear:
                where = ", or handed in by the caller"
            how = f"made by code outside of any module{where}"
            if node.kind is Kind.LOSS and not self._has_forward:
                how = f"made before it{_UNSEEN}"
            return _Conclusion("origin", how, self._between(row))
        between = self._between(row) if node.kind.is_gradient else None
        how = _made_in(node)
        if node.kind is Kind.GRAD and not (self._has_forward or self._has_loss):
            how = f"made here or before it{_UNSEEN}"
        return _Conclusion("origin", how, between)

    @property
    def _has_forward(self) -> bool:
        """Whether a module was seen to run in this step, or in a part of it that was judged."""
        return self._record.continues or bool(self._evidence.scanned(Kind.INPUT, Kind.OUTPUT))

    @property
    def _has_loss(self) -> bool:
        return bool(self._evidence.scanned(Kind.LOSS))

    def _memory(self, row: int) -> str:
        """Of memory that was handed in, in which module its bad values first show."""
        nodes, roots = self._record.nodes, self._provenance.roots
        place, root = nodes[row].place, roots[row]
        inside = (r for r in self._provenance.bad if roots[r] == root and nodes[r].place != place)
        first = next(inside, None)
        shows = "" if first is None else f"; inside of it they first show in {nodes[first].site}"
        return f", in memory that the model writes into{shows}"

    def _unscanned_before(self, row: int) -> list[Site]:
        """Outputs that a full step scans between this row and the last finite one before it."""
        order, record = self._record.history.full_order, self._record
        if row >= len(order) or order[row] == 0:
            return []
        earlier = [r for r in range(len(order)) if 0 < order[r] < order[row]]
        scanned = [r for r in earlier if record.rows[r]["calls"]]
        finite = [order[r] for r in scanned if r not in self._bad]
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
                or self._is_bad(row)
            ):
                continue
            own = [n.row for n in node.place.outputs.walk() if n.row >= 0]
            taken = node.place.input_sources() & rows
            if taken and not any(self._is_bad(r) for r in own):
                found.append((int(self._record.order[row]), row, sorted(taken)))
        if not found:
            return None
        _, first, handed = min(found)
        return self.describe(first, "absorbed", given=self._seen(handed))

    def _is_bad(self, row: int) -> bool:
        """Whether a row holds something non-finite, also where that is ignored."""
        return self._record.was_scanned(row) and bool(self._record.rows[row]["ticket"])

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
            stats=self._result(row),
            bad_call=self._bad_call(row),
            given=tuple(given),
            before=tuple(self._seen(self._rows_before(row))),
            between=conclusion.between,
            history=self._record.history.of(row),
            aliases=tuple(aliases),
            unscanned=conclusion.unscanned,
        )
        outside = tuple(self._seen(self._outermost_inputs()))
        return Evidence(
            finding,
            node,
            self._evidence,
            from_outside=conclusion.from_outside,
            from_start=self._is_from_start(row),
            inputs_from_outside=outside,
        )

    def _is_from_start(self, row: int) -> bool:
        """Whether a row is as it was before its model first ran: a buffer may be told later."""
        return self._record.is_untrained or not self._record.was_scanned(row)

    def _result(self, row: int) -> ScanResult:
        scanned = self._record.was_scanned(row)
        return self._record.result(row) if scanned else self._lasting[row]

    def _bad_call(self, row: int) -> BadCall | None:
        """The first bad call of a row, where each call of the step was scanned into it."""
        record, node = self._record, self._record.nodes[row]
        if not record.was_scanned(row) or node.kind.is_saved or node.kind is Kind.GRAD:
            return None  # a gradient is the sum of all backwards, and is scanned more than once
        number, calls = (int(record.rows[row][key]) for key in ("first_bad_call", "calls"))
        if calls == 1 or number == 0 or calls != self._calls_of(node):
            return None
        counts = record.bad_counts(row) or (None,) * 4
        return BadCall(number, calls, record.is_whole, self._result(row).shape, *counts)

    def _calls_of(self, node: Node) -> int:
        """How often the module of an input or output ran, as far as the scans show; 0: unknown.

        What another module returned, or a call before, is not scanned again.
        """
        place = node.place
        if not isinstance(place, ModulePlace) or node.kind is Kind.GRAD_OUTPUT:
            return self._scans(node.row)
        if node in place.recomputed.walk():
            return 0
        inputs = max((self._scans(other.row) for other in place.input_nodes()), default=0)
        if node.kind is Kind.OUTPUT:
            return max(inputs, self._scans(node.row))
        returned = {row for other in place.outputs.walk() for row in (other.row, *other.sources)}
        outputs = max(map(self._scans, returned), default=0)
        return outputs if outputs == inputs else 0

    def _scans(self, row: int) -> int:
        return int(self._record.rows[row]["calls"]) if self._record.was_scanned(row) else 0

    def _rows_before(self, row: int) -> list[int]:
        """The last few rows first scanned before this one in the step, in execution order."""
        order = self._record.order
        earlier = np.flatnonzero((order > 0) & (order < order[row]))
        return [int(r) for r in earlier[np.argsort(order[earlier])][-_BEFORE:]]

    def _between(self, row: int) -> tuple[Site, Site] | None:
        """None, too, unless it was a place's first call: the order known is that of first calls."""
        before, nodes = self._rows_before(row), self._record.nodes
        if not before or self._record.rows[row]["first_bad_call"] != 1:
            return None
        return nodes[before[-1]].site, nodes[row].site

    def _given(self, node: Node) -> list[Seen]:
        """What a site was made from: a module's inputs, a parameter's gradient and moments."""
        place, sources = node.place, set[int]()
        bad = self._provenance.sources.get(node.row, set())
        if node.kind is Kind.OUTPUT and isinstance(place, ModulePlace):
            own = {r for r in bad if self._record.nodes[r].kind in (Kind.PARAM, Kind.BUFFER)}
            sources = place.input_sources() | own
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
        known, record = self._lasting, self._record
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
