"""Which finite values are close to overflow."""

from __future__ import annotations

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
