"""Judge: judges records in order, and remembers what is bad from one to the next."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from nanscan._collect.snapshot import StepRecord
from nanscan._data.finding import Finding
from nanscan._data.result import ScanResult
from nanscan._data.site import Kind, Site
from nanscan._judge.causes import causes, unlikely
from nanscan._judge.evidence import Evidence
from nanscan._judge.near_limit import is_near
from nanscan._judge.step import StepVerdicts, is_mask


class Judge:
    """From records to findings.

    An episode lasts from the first fault until a whole step without one. In it each row is reported
    once.

    Args:
        near_limit: share of a dtype's largest value from which a finite value is reported.
        rank: of this process.
        max_skips: skipped optimizer steps in a row that are a scale search, and no fault yet.
        ignores: whether a site with this dtype is of no interest.
    """

    def __init__(
        self,
        near_limit: float,
        rank: int,
        *,
        max_skips: int,
        ignores: Callable[[Site, torch.dtype], bool],
    ) -> None:
        self._near_limit = near_limit
        self._rank = rank
        self._max_skips = max_skips
        self._ignores = ignores
        self._first: Site | None = None  # of the faults of this episode
        self._bad_parameters: dict[int, ScanResult] = {}  # by row, as last scanned
        self._reported: set[int] = set()  # rows reported as bad in this episode
        self._near: set[int] = set()  # rows reported as near the limit, still there
        self._latest: set[int] = set()  # rows that were bad in the last whole record
        self._absorbed = -1, -1  # step and row, as last reported: a step may be judged in parts

    @property
    def in_episode(self) -> bool:
        """Whether something was bad in the last step, or a parameter still is."""
        return bool(self._reported)

    @property
    def is_waiting(self) -> bool:
        """Whether something that was reported may be over: then each record matters."""
        return bool(self._reported or self._near)

    def judge(self, record: StepRecord) -> list[Finding]:
        """What is new in a step, in the order in which it happened; complete findings."""
        if not (record.notable or self.is_waiting):
            return []  # and so `_latest` is empty
        before = self._latest if record.continues else ()
        step = StepVerdicts(record, self._rank, self._bad_parameters, before)
        bad = step.in_order(row for row in record.notable if self._is_bad(row, record))
        if record.is_whole:
            self._latest = set(bad)
        near = self._newly_near(record, set(bad))
        news = [step.describe(row, "near-limit") for row in near]
        if record.skips and bad and all(record.nodes[row].kind.is_scaled for row in bad):
            news += self._skipped(step, record, bad)  # with nothing bad before backward
        else:
            news += self._faults(step, record, bad) or self._recovered(step, record, bad)
        return [_complete(evidence) for evidence in news]

    def _faults(self, step: StepVerdicts, record: StepRecord, bad: list[int]) -> list[Evidence]:
        faults = []
        for row in bad:
            if row not in self._reported:
                faults.append(step.judge(row))
                self._reported.add(row)
            step.note(row)
        self._update_parameters(record)
        if not faults:
            return []
        faults[0].affected = tuple(fault.finding.site for fault in faults[1:])
        self._first = self._first or faults[0].finding.site
        absorbed = step.absorbed(bad)
        if absorbed is None or (record.step, absorbed.row) == self._absorbed:
            return faults
        self._absorbed = record.step, absorbed.row
        return [*faults, absorbed]

    def _skipped(self, step: StepVerdicts, record: StepRecord, bad: list[int]) -> list[Evidence]:
        """A step that a GradScaler skipped."""
        if record.skips == self._max_skips:
            evidence = step.describe(
                bad[0],
                "persistent-overflow",
                f"the GradScaler skipped {record.skips} steps in a row, this one at a scale of "
                f"{record.scale:g}",
            )
        elif record.skips == 1:
            evidence = step.describe(
                bad[0],
                "scale-search",
                f"the GradScaler skipped the step and lowered its scale of {record.scale:g}",
            )
        else:
            return []
        evidence.affected = tuple(record.nodes[row].site for row in bad[1:])
        return [evidence]

    def _recovered(self, step: StepVerdicts, record: StepRecord, bad: list[int]) -> list[Evidence]:
        """The end of an episode."""
        is_over = record.is_whole and not record.continues and not bad
        if not is_over or not self._reported or self._bad_parameters:
            return []
        first, rows = self._first, sorted(self._reported)
        self._reported.clear()
        self._first = None
        # The first site, or, where its tensor is another one's in this step, the next that is seen.
        rows.sort(key=lambda row: record.nodes[row].site != first)
        seen = (row for row in rows if record.was_scanned(row))
        row = next(seen, None)
        if row is None:
            row = next(record.scanned(), None)
        if row is None:
            return []
        return [step.describe(row, "recovered", "all that was scanned in this step is finite")]

    # -- which rows count --------------------------------------------------------------------------

    def _is_bad(self, row: int, record: StepRecord) -> bool:
        if not record.rows[row]["ticket"]:
            return False
        if is_mask(record, row) and not is_near(record, row, self._near_limit):
            return False  # nothing else in it shows an overflow
        return not self._is_ignored(row, record)

    def _newly_near(self, record: StepRecord, bad: set[int]) -> list[int]:
        near = {
            row
            for row in record.notable
            if row not in bad
            and is_near(record, row, self._near_limit)
            and not self._is_ignored(row, record)
        }
        new = sorted(near - self._near)
        unseen = {row for row in self._near if not record.was_scanned(row)}
        self._near = near | unseen
        return new

    def _is_ignored(self, row: int, record: StepRecord) -> bool:
        described = record.describe(row)
        dtype = getattr(torch, described[0]) if described else torch.float32
        return self._ignores(record.nodes[row].site, dtype)

    def _update_parameters(self, record: StepRecord) -> None:
        for row in [row for row in self._bad_parameters if record.was_scanned(row)]:
            del self._bad_parameters[row]
        for row in record.notable:
            is_parameter = record.nodes[row].kind is Kind.PARAM
            if record.rows[row]["ticket"] and is_parameter and not self._is_ignored(row, record):
                self._bad_parameters[row] = record.result(row)


def _complete(evidence: Evidence) -> Finding:
    return dataclasses.replace(
        evidence.finding,
        affected=evidence.affected,
        causes=tuple(causes(evidence)),
        unlikely=tuple(unlikely(evidence)),
    )
