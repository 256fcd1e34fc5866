"""The table of rows, the history of its snapshots, and rows as results."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from nanscan import _C
from nanscan._row import ROW, Rows, absmax, finite_max, finite_min, nonfinite
from nanscan._scan import ScanResult
from nanscan._sites import Node


@dataclass
class Snapshot:
    """One step's rows on the host.

    Attributes:
        step: the step's number.
        rows: [N] records of dtype `ROW`.
        order: [N] position of each row among the step's first visits, from 1; 0: not visited.
        notable: rows that are non-finite or near their dtype's limit.
        whole: the rows began anew after it; else it is a look at a step that goes on.
    """

    step: int
    rows: Rows
    order: npt.NDArray[np.uint64]
    notable: list[int]
    whole: bool


class Table:
    """Rows of CPU tensors: one a node, fixed from its first scan on.

    Args:
        history: how many steps to keep; memory is history * rows * 136 bytes.
        near_limit: share of a dtype's largest value from which a finite value makes a row notable.
    """

    def __init__(self, history: int, near_limit: float) -> None:
        self.core = _C.Table(near_limit)
        self._near_limit = near_limit
        self.visit = self.core.visit
        self.scan = self.core.scan
        self.scan_many = self.core.scan_many
        self.nodes: list[Node] = []
        self._lock = threading.Lock()  # rows and nodes are of one length
        self._steps = np.full(history, -1, np.int64)
        self._rows = np.zeros((history, 0), ROW)
        self._order = np.zeros((history, 0), np.uint64)
        self._taken = 0

    @property
    def visits(self) -> int:
        """Rows visited since the last snapshot."""
        return self.core.visits

    @property
    def last_ticket(self) -> int:
        """Changes whenever a row goes bad."""
        return self.core.last_ticket

    def order(self, row: int) -> int:
        """Position of a row among the first visits since the last snapshot; 0: not visited."""
        return self.core.order(row)

    def add(self, node: Node) -> int:
        """Gives a node its row."""
        with self._lock:
            if node.row < 0:  # else another thread was faster
                self.nodes.append(node)
                node.row = self.core.add_row()
        node.add_source(node.row)
        return node.row

    def take(self, step: int, *, keep: bool, reset: bool = True) -> Snapshot:
        """Copies all rows to the host.

        Args:
            step: number of the step.
            keep: make it part of the history; the returned arrays are then views of the history
                and valid until `history` more steps were kept.
            reset: begin all rows anew. Else they go on: what is looked at amid a step stays in it.

        Synchronization: none.
        """
        with self._lock:
            count = len(self.nodes)
            if not keep:
                rows, order = np.zeros(count, ROW), np.zeros(count, np.uint64)
            else:
                self._reserve(count)
                slot = self._taken % len(self._steps)
                self._taken += 1
                self._steps[slot] = step
                rows, order = self._rows[slot, :count], self._order[slot, :count]
            notable = self.core.snapshot(rows.view(np.uint8), order, reset)
        return Snapshot(step, rows, order, notable, reset)

    def _reserve(self, count: int) -> None:
        steps, capacity = self._rows.shape
        if count <= capacity:
            return
        wider = max(count, 2 * capacity, 64)
        rows, order = np.zeros((steps, wider), ROW), np.zeros((steps, wider), np.uint64)
        rows[:, :capacity], order[:, :capacity] = self._rows, self._order
        self._rows, self._order = rows, order

    def result(self, row: int, record: np.void) -> ScanResult:
        """A record of a row as a result, with the dtype and shape that the host last saw there."""
        described = self.core.describe(row)
        dtype, shape = described or ("float32", ())
        return ScanResult(record, shape, getattr(torch, dtype))

    def limit(self, row: int) -> float:
        """Largest finite value of the dtype last scanned into a row."""
        described = self.core.describe(row)
        return float(torch.finfo(getattr(torch, described[0])).max) if described else math.inf

    def is_notable(self, record: bytes, dtype: torch.dtype) -> bool:
        """Whether a record of one scan is non-finite or near its dtype's limit."""
        rows = np.frombuffer(record, ROW)
        near = self._near_limit * torch.finfo(dtype).max
        return bool(nonfinite(rows)[0] or absmax(rows)[0] >= near)

    def history(self, row: int) -> dict[str, npt.NDArray[Any]]:
        """The kept steps in which a row was scanned, oldest first, as arrays of one length."""
        slots = (self._taken + np.arange(len(self._steps))) % len(self._steps)
        slots = slots[self._steps[slots] >= 0]
        if row >= self._rows.shape[1]:  # its first step is not over yet
            slots = slots[:0]
        rows = self._rows[slots, row] if len(slots) else np.zeros(0, ROW)
        used = rows["calls"] > 0
        rows, steps = rows[used], self._steps[slots][used]
        return {
            "step": steps,
            "calls": rows["calls"],
            "nan": rows["nan"],
            "posinf": rows["posinf"],
            "neginf": rows["neginf"],
            "min": finite_min(rows),
            "max": finite_max(rows),
            "absmax": absmax(rows),
        }

    @property
    def nbytes(self) -> int:
        """Bytes of the table and its history."""
        return int(len(self.nodes) * ROW.itemsize + self._rows.nbytes + self._order.nbytes)
