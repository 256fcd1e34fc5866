"""Which values turned into zeros, where an overflow wiped them out: nothing of it is non-finite.

An RMSNorm in float16 whose squares overflow multiplies with 1 / Inf, and a norm of gradients that
is Inf makes clipping multiply with 0. That zeros came of nothing else is not certain: an expert
that no token chose and a loss that is met return zeros as well. So only what the numbers show.
"""

from __future__ import annotations

import numpy as np
import torch

from nanscan._collect.snapshot import StepRecord
from nanscan._data.places import ModulePlace
from nanscan._data.row import absmax
from nanscan._data.site import Kind

_STEPS = 3  # before, in which it was not all zero


class Zeros:
    """What turned to 0, from one record to the next: each row is reported once."""

    def __init__(self) -> None:
        self._told: set[int] = set()
        self._norm_overflowed = False  # in the last record

    def new_in(self, record: StepRecord) -> list[tuple[int, str]]:
        """The first output and the first gradient that turned to 0, each with what shows it."""
        rows = [row for row in turned_to_zero(record) if row not in self._told]
        self._told.update(rows)
        rows.sort(key=lambda row: -int(record.order[row]))
        first = {record.nodes[row].kind: row for row in rows}  # the first one comes last
        found = [(row, "it was not in the steps before") for row in first.values()]
        largest = norm_overflows(record)
        if largest is not None and not self._norm_overflowed:
            found.append((largest, "the norm of all gradients overflows: clipping makes them 0"))
        self._norm_overflowed = largest is not None
        return found


def turned_to_zero(record: StepRecord) -> list[int]:
    """Rows of this step that hold nothing but zeros, and never did in the steps before.

    Outputs whose inputs have squares that overflow the dtype, such as those of a norm; and
    gradients, where those of all parameters did.
    """
    zero = absmax(record.rows) == 0
    rows = [int(row) for row in np.flatnonzero(zero) if record.was_scanned(int(row))]
    outputs = [row for row in rows if record.nodes[row].kind is Kind.OUTPUT]
    wiped = [row for row in outputs if _may_overflow(record, row) and _was_not_zero(record, row)]
    return wiped + _all_gradients(record, rows)


def _all_gradients(record: StepRecord, rows: list[int]) -> list[int]:
    nodes = record.nodes
    every = [row for row in record.scanned() if nodes[row].kind is Kind.GRAD]
    zero = [row for row in rows if nodes[row].kind is Kind.GRAD]
    if len(every) < 2 or len(zero) < len(every) or record.skips:  # noqa: PLR2004
        return []
    return [row for row in zero if _was_not_zero(record, row)]


def _was_not_zero(record: StepRecord, row: int) -> bool:
    steps, records = record.history.kept([row])
    past = records[(steps < record.step) & (records["calls"][:, 0] > 0), 0]
    return len(past) >= _STEPS and bool((absmax(past) > 0).all())


def _may_overflow(record: StepRecord, row: int) -> bool:
    """Whether the square of an input of a module does not fit into the dtype of its output."""
    place, described = record.nodes[row].place, record.describe(row)
    if not isinstance(place, ModulePlace) or described is None:
        return False
    inputs = [r for r in place.input_sources() if record.was_scanned(r)]
    tops = absmax(record.rows[inputs]) if inputs else np.zeros(0)
    limit = torch.finfo(getattr(torch, described[0])).max
    return bool(len(tops)) and float(np.nanmax(tops)) ** 2 > limit


def norm_overflows(record: StepRecord) -> int | None:
    """The row of the largest gradient, where the norm by which gradients were clipped was Inf.

    Clipping then made all of them 0, which their rows do not show: they hold the scan before it,
    too. None where all gradients fit into a norm, or where nothing clipped.
    """
    rows = [row for row in record.scanned() if record.nodes[row].kind is Kind.GRAD]
    if not rows or not all(record.rows[row]["calls"] == 2 for row in rows):  # noqa: PLR2004
        return None
    tops = absmax(record.rows[rows])
    dtype = getattr(torch, (record.describe(rows[0]) or ("float32",))[0])
    # A norm is at least the largest value. In 32 bits its squares overflow, in 16 bits itself.
    wide = torch.finfo(dtype).bits > 16  # noqa: PLR2004
    norm = float(np.sqrt(np.nansum(np.square(tops, dtype=np.float64))))
    size = norm**2 if wide else norm
    return rows[int(np.nanargmax(tops))] if size > torch.finfo(dtype).max else None
