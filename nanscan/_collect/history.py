"""History: the rows of the last steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from nanscan import _C
from nanscan._data.row import ROW, Rows, absmax, finite_max, finite_min

Order = npt.NDArray[np.uint64]
Numbers = npt.NDArray[Any]

_UNUSED = np.iinfo(np.int64).min

_NUMBERS: dict[str, Callable[[Rows], Numbers]] = {
    **{name: itemgetter(name) for name in ("calls", "nan", "posinf", "neginf")},
    "min": finite_min,
    "max": finite_max,
    "absmax": absmax,
}


class RowHistory(Mapping[str, Numbers]):
    """One row in several steps, as arrays of one length. An array is made when it is first read.

    Args:
        steps: [N] numbers of the steps.
        rows: [N] records of dtype `ROW`, which stay as they are.
    """

    def __init__(self, steps: npt.NDArray[np.int64], rows: Rows) -> None:
        self._rows = rows
        self._read: dict[str, Numbers] = {"step": steps}

    def __getitem__(self, name: str) -> Numbers:
        """An array by its name."""
        if name not in self._read:
            self._read[name] = _NUMBERS[name](self._rows)
        return self._read[name]

    def __iter__(self) -> Iterator[str]:
        """Names of all arrays, whether they were read or not."""
        return iter(("step", *_NUMBERS))

    def __len__(self) -> int:
        """How many arrays there are."""
        return 1 + len(_NUMBERS)

    def __repr__(self) -> str:
        return repr(dict(self))


class History:
    """A ring of the rows of so many steps; it grows with the table.

    Args:
        steps: how many to keep; memory is steps * rows * 136 bytes on the host.
    """

    def __init__(self, steps: int) -> None:
        self._steps = np.full(steps, _UNUSED, np.int64)
        self._rows = np.zeros((steps, 0), ROW)
        self._order = np.zeros((steps, 0), np.uint64)
        self._taken = 0
        self._latest: int | None = None  # the step that was kept last
        self.full_order: Order = np.zeros(0, np.uint64)  # of the last step that scanned everything

    def has(self, step: int) -> bool:
        """Whether a part of a step was kept last."""
        return self._latest == step

    def add(self, step: int, rows: Rows, order: Order) -> None:
        """Keeps the rows of a step, or merges those of a further part into it."""
        if self.has(step):
            self._reserve(len(rows))
            into = self._rows[self._slot(-1), : len(rows)]
            _C.merge_rows(rows.view(np.uint8), into.view(np.uint8))
        else:
            into, its_order = self.next_slot(step, len(rows))
            into[:], its_order[:] = rows, order

    def shift(self, steps: int) -> None:
        """Lowers the numbers of all steps so far."""
        self._steps[self._steps != _UNUSED] -= steps
        if self._latest is not None:
            self._latest -= steps

    def _slot(self, position: int = 0) -> int:
        return (self._taken + position) % len(self._steps)

    def next_slot(self, step: int, count: int) -> tuple[Rows, Order]:
        """The arrays to fill for a step: rows [count] and their order [count].

        `count` is never less than it was before.
        """
        self._reserve(count)
        slot = self._slot()
        self._taken += 1
        self._steps[slot] = self._latest = step
        return self._rows[slot, :count], self._order[slot, :count]

    def _reserve(self, count: int) -> None:
        steps, capacity = self._rows.shape
        if count <= capacity:
            return
        wider = max(count, 2 * capacity, 64)
        rows, order = np.zeros((steps, wider), ROW), np.zeros((steps, wider), np.uint64)
        rows[:, :capacity], order[:, :capacity] = self._rows, self._order
        self._rows, self._order = rows, order

    def of(self, row: int) -> RowHistory:
        """The kept steps in which a row was scanned, oldest first."""
        steps, kept = self.kept([row])
        used = kept[:, 0]["calls"] > 0
        return RowHistory(steps[used], kept[used, 0])

    def kept(self, rows: list[int]) -> tuple[npt.NDArray[np.int64], Rows]:
        """The kept steps, oldest first, and records [steps, rows]; zeros where not scanned."""
        slots = (self._taken + np.arange(len(self._steps))) % len(self._steps)
        slots = slots[self._steps[slots] != _UNUSED]
        records = np.zeros((len(slots), len(rows)), ROW)
        for column, row in enumerate(rows):
            if row < self._rows.shape[1]:  # else its first step is not over yet
                records[:, column] = self._rows[slots, row]
        return self._steps[slots], records

    @property
    def nbytes(self) -> int:
        """Bytes of host memory."""
        return int(self._rows.nbytes + self._order.nbytes)
