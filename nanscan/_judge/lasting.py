"""Lasting: parameters, buffers and moments that are bad, from one record to the next."""

from __future__ import annotations

from nanscan._collect.snapshot import StepRecord
from nanscan._data.places import SinglePlace
from nanscan._data.result import ScanResult


class Lasting:
    """What a checkpoint would hold that is bad, as last scanned.

    A buffer may be meant to be bad when its model first runs: the start of a running extreme, or
    memory that is written before it is read. Such a buffer is `unset` until it holds more bad
    values than then.

    Attributes:
        rows: what is bad, by row.
        unset: of these, buffers that were so before their model first ran, as they were then.
    """

    def __init__(self) -> None:
        self.rows: dict[int, ScanResult] = {}
        self.unset: dict[int, ScanResult] = {}
        self._in_checkpoint: dict[int, bool] = {}  # of `rows`
        # Rows that were found amid a step: that step, and whether they were spoiled in it, or are
        # those of a model that first ran in it.
        self._found_in: dict[int, tuple[int, bool]] = {}

    @property
    def is_healthy(self) -> bool:
        """Whether all that a checkpoint holds was finite when it was last scanned."""
        return not any(self._in_checkpoint[row] for row in self.rows if row not in self.unset)

    def note_unset(self, record: StepRecord, bad: list[int]) -> None:
        """Notes buffers that are bad before their model first runs, and those that got worse."""
        for row in bad:
            place = record.nodes[row].place
            if record.is_untrained and isinstance(place, SinglePlace) and not place.is_statistic:
                self.unset[row] = record.result(row)
            elif row in self.unset and _is_worse(record.result(row), self.unset[row]):
                del self.unset[row]

    def is_worse(self, record: StepRecord, row: int) -> bool:
        """Whether a row that was bad before holds more bad values now."""
        return row in self.rows and _is_worse(record.result(row), self.rows[row])

    def update(self, record: StepRecord, bad: list[int]) -> None:
        """Takes over what a record shows."""
        if record.is_untrained or record.spoiled:
            self._found_in |= {row: (record.step, bool(record.spoiled)) for row in bad}
        for row in [row for row in self.rows if record.was_scanned(row)]:
            del self.rows[row]
        for row in bad:
            node = record.nodes[row]
            if node.kind.is_saved:
                self.rows[row] = record.result(row)
                place = node.place
                self._in_checkpoint[row] = not isinstance(place, SinglePlace) or place.is_saved

    def spoiled_in(self, step: int) -> set[int]:
        """Rows that other code spoiled in a step."""
        return {row for row, found in self._found_in.items() if found == (step, True)}

    def joined_in(self, step: int) -> set[int]:
        """Rows of models that first ran in a step."""
        return {row for row, found in self._found_in.items() if found == (step, False)}


def _is_worse(now: ScanResult, before: ScanResult) -> bool:
    return (
        now.nan_count > before.nan_count
        or now.posinf_count > before.posinf_count
        or now.neginf_count > before.neginf_count
    )
