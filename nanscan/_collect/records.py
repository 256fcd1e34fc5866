"""RecordQueue: rows on their way to the host, and the records that come of them, in order."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch.optim.optimizer import Optimizer

from nanscan._collect.inputs import KeptInputs
from nanscan._collect.names import Registry
from nanscan._collect.optimizers import Optimizers
from nanscan._collect.schedule import Turn
from nanscan._collect.snapshot import (
    ModelView,
    OptimizerFacts,
    Outcome,
    Snapshot,
    StepRecord,
    Sweep,
)
from nanscan._collect.steps import StepTracker
from nanscan._collect.table import Table
from nanscan._data.places import ParameterPlace
from nanscan._data.site import Kind

_MAX_EXPLAINED = 8  # parameters of one step whose moments are scanned


class Consumer(Protocol):
    """Who gets what is collected: the monitor."""

    @property
    def has_news(self) -> bool:
        """Whether a record matters in which no row is notable: something may have recovered."""
        raise NotImplementedError

    def on_training_start(self) -> bool:
        """The first optimizer is seen. Returns whether steps may be counted anew from here."""
        raise NotImplementedError

    def knows(self, rows: Snapshot) -> bool:
        """Whether all that is notable is known to mean nothing, as masks do."""
        raise NotImplementedError

    def on_record(self, record: StepRecord) -> None:
        """All that is known of a step, or of a part of one. Records come in order."""

    def on_clean_step(self, step: int) -> None:
        """A step had no notable row; it has no record."""

    def on_step_end(self, step: int) -> None:
        """A step ended and its records, as far as they arrived, were delivered.

        Args:
            step: number of the step that comes.
        """

    def on_forward_start(self, step: int) -> None:
        """An outermost module is about to run in this step."""


@dataclass
class _Pending:
    """Rows that are on their way to the host, and what goes with them into the record."""

    rows: Snapshot | Sweep
    step: int
    is_whole: bool = False
    outcome: Outcome | None = None
    context: dict[str, Any] = field(default_factory=dict)


class RecordQueue:
    """Takes snapshots, waits for their rows without blocking, and delivers records.

    Args:
        registry: the modules.
        table: the rows.
        optimizers: explain parameters that went bad.
        tracker: which step it is.
        inputs: what went into outermost modules; None: it is not kept.
        consumer: gets the records.

    Attributes:
        lock: held while records are made and delivered.
        is_ahead: what is delivered now is judged before its step ends.
        has_ahead: such a record had something notable, and no other came since.
    """

    def __init__(  # noqa: PLR0913 - its parts, in one place
        self,
        registry: Registry,
        table: Table,
        optimizers: Optimizers,
        tracker: StepTracker,
        *,
        inputs: KeptInputs | None,
        consumer: Consumer,
    ) -> None:
        self.lock = threading.RLock()
        self.is_ahead = self.has_ahead = False
        self._is_judging = False
        self._told = -1  # the last step of which a record had something notable
        self._registry = registry
        registry.may_rename = self.may_rename
        registry.step = lambda: tracker.step
        self._table = table
        self._optimizers = optimizers
        self._tracker = tracker
        self._inputs = inputs
        self._consumer = consumer
        self._pending: deque[_Pending] = deque()  # oldest first; they arrive in order
        self._delivered_ticket = 0
        self._bad_rows: set[int] = set()  # on the host, in the last snapshot
        # By id(optimizer): steps in a row that were skipped, and the scale in the first of them.
        self._skips: dict[int, tuple[int, float]] = {}

    def may_rename(self) -> bool:
        """Whether places may get other names: no report that has the old ones can go on."""
        return not self._is_judging and self._told != self._tracker.step

    def clear(self) -> None:
        """Forgets what is on its way."""
        self._pending.clear()

    def count_anew(self) -> None:
        """The current step becomes number 0, and those before it are numbered backwards."""
        steps = self._tracker.count_anew()
        self._table.history.shift(steps)
        for pending in self._pending:
            pending.step -= steps

    @property
    def may_be_bad(self) -> bool:
        """Whether a row went bad since the last record, as far as the host can know."""
        return self._table.on_device or self.has_bad_rows

    @property
    def has_bad_rows(self) -> bool:
        """Whether a row on the host did."""
        return self._table.last_ticket != self._delivered_ticket

    def add_sweep(self, sweep: Sweep, **context: Any) -> None:
        """Adds scans of parameters that were made outside of the table.

        Args:
            sweep: the scans.
            **context: fields of the record.
        """
        self._send(_Pending(sweep, self._tracker.step, context=context))

    def add_untrained(self, sweep: Sweep, turn: Turn) -> None:
        """Adds scans of a model that runs for the first time, and has them judged."""
        with self.lock:
            if self.may_be_bad:
                self.look(turn)  # what other models did before comes first
            self.add_sweep(sweep, is_untrained=True)
            self.deliver()

    def end_step(
        self, turn: Turn, optimizer: Optimizer | None = None, outcome: Outcome | None = None
    ) -> bool:
        """Takes all rows of a step that ends; they begin anew.

        Args:
            turn: what the step scanned.
            optimizer: whose step ended it; None: nobody's.
            outcome: of the optimizer's step.

        Returns:
            False while a CUDA graph is being recorded: its replays are the steps.
        """
        if not self._table.has_news:
            return True
        snapshot = self._table.take(self._tracker.step, keep=True)
        if snapshot is None:
            return False
        facts = self._explain(optimizer, snapshot)
        context = {**self._context(turn), "optimizers": facts}
        self._send(_Pending(snapshot, self._tracker.step, True, outcome, context))
        return True

    def _explain(
        self, optimizer: Optimizer | None, snapshot: Snapshot
    ) -> dict[ParameterPlace, OptimizerFacts]:
        """What explains parameters that went bad in this step: an optimizer's moments of them."""
        if snapshot.arrival is not None:
            return {} if optimizer is None else self._optimizers.with_moments_of_suspects(optimizer)
        new = self._newly_bad(snapshot)
        if optimizer is None or not new:
            return {}
        nodes = [self._table.nodes[row] for row in new[:_MAX_EXPLAINED]]
        places = {node.place for node in nodes if node.kind in (Kind.PARAM, Kind.STATE)}
        wanted = {place for place in places if isinstance(place, ParameterPlace)}
        return self._optimizers.with_moments(optimizer, wanted)

    def _newly_bad(self, snapshot: Snapshot) -> list[int]:
        """Rows on the host that are bad and were not in the snapshot before, as they went bad."""
        if not (snapshot.notable or self._bad_rows):
            return []
        bad = {row for row in snapshot.notable if snapshot.rows[row]["ticket"]}
        before, self._bad_rows = self._bad_rows, bad
        return sorted(bad - before, key=lambda row: int(snapshot.rows[row]["ticket"]))

    def look(self, turn: Turn, *, reset: bool = False) -> None:
        """Takes what a step has scanned so far; unless `reset`, it goes on in one piece."""
        with self.lock:
            if self._table.has_news:
                snapshot = self._table.take(self._tracker.step, keep=False, reset=reset)
                if snapshot is not None:
                    self._newly_bad(snapshot)
                    context = self._context(turn)
                    self._send(_Pending(snapshot, self._tracker.step, reset, None, context))
            if reset and self._inputs is not None:
                self._inputs.forget()
            self.deliver()

    def look_ahead(self, turn: Turn) -> None:
        """Judges a step before it ends, while inputs and parameters are still unchanged."""
        with self.lock:
            self.is_ahead = True
            try:
                self.look(turn)
            finally:
                self.is_ahead = False

    def look_at_bad(self, turn: Turn) -> None:
        """Has what is known to be bad in the unfinished step judged. Never blocks."""
        with self.lock:
            self.deliver()
            if self.has_bad_rows:
                self.look_ahead(turn)

    def _context(self, turn: Turn) -> dict[str, Any]:
        return {
            "turn": turn,
            "continues": self._tracker.continues,
            "ended_by": self._tracker.stepped,
            "entered": frozenset(self._tracker.entered),
        }

    def _send(self, pending: _Pending) -> None:
        pending.context["calls"] = () if self._inputs is None else self._inputs.calls
        self._pending.append(pending)

    def deliver(self, *, wait: bool = False) -> None:
        """Hands over the records whose rows have arrived on the host.

        Args:
            wait: for all that is on its way.
        """
        with self.lock:
            while self._pending and (wait or self._pending[0].rows.ready()):
                self._deliver(self._pending.popleft())

    def _deliver(self, pending: _Pending) -> None:
        rows = self._table.complete(pending.step, pending.rows)
        skips = self._count_skips(pending.outcome)
        if pending.is_whole and pending.context["turn"].is_full:
            self._table.history.full_order = rows.order.copy()
        if not isinstance(pending.rows, Sweep):  # which shows nothing of the table
            self._delivered_ticket = self._table.last_ticket
        self.has_ahead = self.is_ahead and (self.has_ahead or bool(rows.notable))
        is_notable = bool(rows.notable) and not (pending.is_whole and self._consumer.knows(rows))
        if is_notable or skips or self._consumer.has_news:
            self._told = pending.step
            self._is_judging = True
            try:
                self._consumer.on_record(self._record(pending, rows, skips))
            finally:
                self._is_judging = False
        elif pending.is_whole:  # nearly every step; a record would cost more than the rest
            self._consumer.on_clean_step(pending.step)

    def _record(self, pending: _Pending, rows: Snapshot, skips: dict[str, Any]) -> StepRecord:
        return StepRecord(
            pending.step,
            rows.rows,
            rows.order,
            tuple(rows.notable),
            rows.describe,
            rows.bad_counts,
            self._table.nodes,
            self._table.history,
            ModelView(self._registry.modules, self._optimizers.facts),
            is_whole=pending.is_whole,
            is_ahead=self.is_ahead,
            bad_parts=self._table.core.bad_parts,
            **pending.context,
            **skips,
        )

    def _count_skips(self, outcome: Outcome | None) -> dict[str, Any]:
        """Synchronization: none; what a device knows of an arrived step has long been computed."""
        if outcome is None:
            return {}
        if not bool(outcome.skipped):
            self._skips.pop(outcome.optimizer, None)
            return {}
        scale = float(outcome.scale)
        count, first = self._skips.get(outcome.optimizer, (0, scale))
        self._skips[outcome.optimizer] = count + 1, first
        return {"skips": count + 1, "scale": scale, "first_scale": first}
