"""Table: the rows of a monitor, one a node, and their copies at the end of a step."""

from __future__ import annotations

import threading

import numpy as np
import torch

from nanscan import _C
from nanscan._collect.history import History
from nanscan._collect.snapshot import Snapshot, Sweep
from nanscan._data.places import Node
from nanscan._data.row import ROW, Rows, absmax, nonfinite
from nanscan._data.text import dtype_name


class Table:
    """Rows of tensors: one a node, fixed from its first scan on.

    Args:
        history: how many steps to keep.
        near_limit: share of a dtype's largest value from which a finite value makes a row notable.
    """

    def __init__(self, history: int, near_limit: float) -> None:
        self.core = _C.Table(near_limit)
        self._near_limit = near_limit
        self.visit = self.core.visit
        self.scan = self.core.scan
        self.scan_many = self.core.scan_many
        self.nodes: list[Node] = []
        self.history = History(history)
        self._lock = threading.Lock()  # rows and nodes are of one length
        self.resets = 0  # how often all rows began anew

    @property
    def visits(self) -> int:
        """Rows visited since the last snapshot."""
        return self.core.visits

    @property
    def last_ticket(self) -> int:
        """Changes whenever a row goes bad."""
        return self.core.last_ticket

    @property
    def on_device(self) -> bool:
        """Whether snapshots arrive later than they are taken."""
        return self.core.on_device

    @property
    def has_news(self) -> bool:
        """Whether something may have been scanned since the last snapshot."""
        return self.core.visits > 0 or self.core.captured

    def order(self, row: int) -> int:
        """Position of a row among the first visits since the last snapshot; 0: not visited."""
        return self.core.order(row)

    def latest_order(self, row: int) -> int:
        """Position of a row in this step, or in the last step that visited it; 0: in none."""
        return self.core.order(row) or self.core.latest_order(row)

    def add(self, node: Node) -> int:
        """Gives a node its row."""
        with self._lock:
            if node.row < 0:  # else another thread was faster
                self.nodes.append(node)
                node.row = self.core.add_row()
        node.add_source(node.row)
        return node.row

    def take(self, step: int, *, keep: bool, reset: bool = True) -> Snapshot | None:
        """Copies all rows to the host, or sends them there.

        Args:
            step: number of the step.
            keep: make it part of the history; the arrays may then be views of the history and
                valid until `history` more steps were kept.
            reset: begin all rows anew. Else they go on: what is looked at amid a step stays in it.

        Returns:
            The snapshot, to be completed by `complete` once it is `ready`; None while a CUDA graph
            records this thread's stream, and then all rows just go on.

        Synchronization: none.
        """
        with self._lock:
            count = len(self.nodes)
            if keep and not self.on_device and not self.history.has(step):
                rows, order = self.history.next_slot(step, count)
                keep = False
            else:
                rows, order = np.zeros(count, ROW), np.zeros(count, np.uint64)
            taken = self.core.snapshot(rows.view(np.uint8), order, reset)
            self.resets += reset and taken is not None
        if taken is None:
            return None
        notable, arrival = taken
        source = self.core if arrival is None else arrival
        return Snapshot(
            rows,
            order,
            notable,
            source.describe,
            source.bad_counts,
            arrival,
            is_to_keep=keep,
            is_whole=reset,
        )

    def complete(self, step: int, item: Snapshot | Sweep) -> Snapshot:
        """A snapshot with all its rows, in the history if it belongs there.

        Synchronization: waits for what has not arrived.
        """
        if isinstance(item, Sweep):
            return self._swept(item)
        if item.arrival is not None:
            item.arrival.wait()
            memory = item.rows.view(np.uint8)
            item.notable = item.arrival.merge_into(memory, item.order)
            if item.is_whole:
                item.notable += self.core.turned_to_zero(memory, item.order)
            item.arrival = None  # its memory is free again; `describe` keeps the rest
        if item.is_to_keep:
            with self._lock:
                self.history.add(step, item.rows, item.order)
        return item

    def _swept(self, sweep: Sweep) -> Snapshot:
        count = len(self.nodes)
        rows, order = np.zeros(count, ROW), np.zeros(count, np.uint64)
        notable, descriptions = [], {}
        for position, (node, scan, described) in enumerate(sweep.scans, start=1):
            record = scan.wait() if isinstance(scan, _C.PendingScan) else scan
            if not isinstance(record, bytes):
                record = record.tobytes()
            is_notable = self._is_notable(record, described[0])
            if is_notable:
                notable.append(node.row)
            if is_notable or not sweep.is_selective:  # what was bad may be fine again
                descriptions[node.row] = described
                rows[node.row] = np.frombuffer(record, ROW)[0]
                order[node.row] = position
                if rows[node.row]["ticket"]:
                    rows[node.row]["ticket"] = position
        return Snapshot(rows, order, notable, descriptions.get)

    def merge(self, row: int, tensor: torch.Tensor, record: Rows) -> None:
        """Merges a scan that plain torch made, where there are no kernels."""
        self.core.merge(row, record.tobytes(), dtype_name(tensor.dtype), tuple(tensor.shape))

    def _is_notable(self, record: bytes, dtype: str) -> bool:
        """Whether a record of one scan is non-finite or near its dtype's limit."""
        rows = np.frombuffer(record, ROW)
        near = self._near_limit * torch.finfo(getattr(torch, dtype)).max
        return bool(nonfinite(rows)[0] or absmax(rows)[0] >= near)

    @property
    def nbytes(self) -> int:
        """Bytes of the table and its history."""
        return len(self.nodes) * ROW.itemsize + self.history.nbytes
