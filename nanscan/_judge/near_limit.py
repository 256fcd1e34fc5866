"""Which finite values are close to overflow."""

from __future__ import annotations

from collections.abc import Iterable

from nanscan._collect.snapshot import StepRecord
from nanscan._data.row import absmax
from nanscan._data.site import Kind


def is_near(record: StepRecord, row: int, share: float) -> bool:
    """Whether a row holds finite values near the largest of their dtype.

    Args:
        record: of the step.
        row: the row.
        share: of the dtype's largest value, from which on a value is near.
    """
    magnitude, limit = absmax(record.rows[row : row + 1])[0], record.limit(row)
    if record.nodes[row].kind is Kind.INPUT and magnitude == limit:
        return False  # an additive mask is filled with torch.finfo(dtype).min itself
    return bool(magnitude >= share * limit)


class NearLimit:
    """Rows near the limit, from one record to the next: each is reported when it gets there.

    Args:
        share: of a dtype's largest value, from which on a value is near.

    Attributes:
        rows: those that are near, as last scanned.
    """

    def __init__(self, share: float) -> None:
        self.rows: set[int] = set()
        self._share = share

    def new_in(self, record: StepRecord, bad: Iterable[int]) -> list[int]:
        """Rows that are near and were not before, those aside that are bad."""
        near = {row for row in record.notable if is_near(record, row, self._share)}
        near.difference_update(bad)
        new = sorted(near - self.rows)
        self.rows = near | {row for row in self.rows if not record.was_scanned(row)}
        return new
