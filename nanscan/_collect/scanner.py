"""Scanner: from values of any kind (tensors, containers, subclasses) to rows of the table."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from nanscan import _C
from nanscan._collect.snapshot import Scans
from nanscan._collect.table import Table
from nanscan._data.places import Node
from nanscan._data.site import Kind
from nanscan._scan.dispatch import prepare, scan_anywhere, scan_without_kernels
from nanscan._scan.unwrap import Unscannable, plain_parts, reason

_MAX_DEPTH = 16  # of nested containers
_PLAIN = (type(None), bool, int, float, str, bytes, complex)  # hold no tensors
_NEEDS_ROW = _C.NEEDS_ROW
_NOT_FLOAT = _C.NOT_FLOAT


class Scanner:
    """Scans values into the rows of nodes, and gives nodes their rows.

    Args:
        table: with the rows.
    """

    def __init__(self, table: Table) -> None:
        self.table = table
        self._visit = table.visit
        # Called with each tensor that has a gradient and went to the row of an output.
        self.on_output: Callable[[torch.Tensor, Node], None] = lambda _x, _node: None

    def visit(self, x: Any, node: Node, around: tuple[int, ...] = ()) -> None:
        """Scans a value, unless the same tensors were scanned since the last snapshot.

        Args:
            x: a tensor, a container of some, or anything else, which is left alone.
            node: its place.
            around: ids of the containers that it lies in.
        """
        row = self._visit(x, node.row)
        if row >= 0:
            node.add_source(row)
        elif row != _NOT_FLOAT:
            self.visit_new(x, node, row, around)
        if node.kind is Kind.OUTPUT and row >= 0 and row == node.row and x.requires_grad:
            self.on_output(x, node)

    def visit_new(self, x: Any, node: Node, status: int, around: tuple[int, ...] = ()) -> None:
        """Scans what `table.visit` did not: all but plain tensors whose node has a row.

        Args:
            x: the value.
            node: its place.
            status: what `table.visit` returned.
            around: ids of the containers that it lies in.
        """
        if isinstance(x, torch.Tensor):
            if status == _C.UNPREPARED:
                prepare(x)
                status = self._visit(x, node.row)
            if status == _NEEDS_ROW:
                if node.row < 0:
                    self.table.add(node)
                    node.computed = _has_history(x)
                node.skipped = ""
                status = self._visit(x, node.row)
                if node.kind is Kind.OUTPUT and status == node.row and x.requires_grad:
                    self.on_output(x, node)
            if status < 0:
                self._scan_unusual(x, node, status)
            return
        try:
            for value, child, deeper in children(x, node, around):
                self.visit(value, child, deeper)
        except Exception as error:  # noqa: BLE001 - a container of the user's may raise anything
            node.skipped = f"reading it raised {type(error).__name__}: {error}"

    def scan_all(self, pairs: list[tuple[torch.Tensor, Node]]) -> None:
        """Scans tensors, each into its own row, whether or not they were scanned before."""
        for _, node in pairs:
            if node.row < 0:
                self.table.add(node)
        refused = self.table.scan_many(
            [tensor for tensor, _ in pairs], [node.row for _, node in pairs]
        )
        again: list[tuple[torch.Tensor, Node]] = []
        for position, status in refused:
            tensor, node = pairs[position]
            if status == _C.UNPREPARED and prepare(tensor):
                again.append((tensor, node))
            elif status != _NOT_FLOAT:
                self._scan_unusual(tensor, node, status)
        if again:
            self.scan_all(again)

    def scan_apart(self, pairs: list[tuple[torch.Tensor, Node]]) -> Scans:
        """Scans tensors outside of the table; those of unusual types into their rows after all."""
        scans: Scans = []
        rows = _C.scan_once_many([tensor for tensor, _ in pairs], False)
        for (tensor, node), scanned in zip(pairs, rows, strict=True):
            row = scan_anywhere(tensor) if isinstance(scanned, int) else scanned
            if isinstance(row, int):
                self._scan_unusual(tensor, node, row)
            else:
                scans.append((node, row, _C.describe(tensor) or ("float32", ())))
        return scans

    def _scan_unusual(self, x: torch.Tensor, node: Node, status: int) -> None:
        """A subclass, a sparse tensor, a lazily negated view, ...: unwraps it or notes why not."""
        try:
            if status in (_C.BAD_FORMAT, _C.NO_DATA):
                raise Unscannable(reason(x, status))  # noqa: TRY301
            for attribute, plain in plain_parts(x):
                self._scan_part(plain, node.child(attribute) if attribute else node, node)
        except Unscannable as why:
            node.skipped = str(why)
        except Exception as error:  # noqa: BLE001 - a tensor subclass may raise anything
            node.skipped = f"reading it raised {type(error).__name__}: {error}"

    def _scan_part(self, plain: torch.Tensor, part: Node, whole: Node) -> None:
        if part.row < 0:
            self.table.add(part)
        status = self.table.scan(plain, part.row)
        if status == _C.UNPREPARED and prepare(plain):
            status = self.table.scan(plain, part.row)
        if status in (_C.UNPREPARED, _C.OTHER_DEVICE, _C.MISALIGNED):
            self.table.merge(part.row, plain, scan_without_kernels(plain))
            status = 0
        part.skipped = "" if status == 0 else reason(plain, status)
        whole.add_source(part.row)


def children(
    x: Any, node: Node, around: tuple[int, ...]
) -> Iterator[tuple[Any, Node, tuple[int, ...]]]:
    """What a container holds, with the nodes for it; nothing for anything else.

    Args:
        x: the container: a mapping, tuple, list or dataclass.
        node: its place.
        around: ids of the containers that it lies in.

    Yields:
        A value, its node, and the ids of the containers that the value lies in.
    """
    if len(around) >= _MAX_DEPTH or isinstance(x, _PLAIN) or id(x) in around:
        return
    deeper = (*around, id(x))
    if isinstance(x, Mapping):
        yield from ((value, node.child(key), deeper) for key, value in x.items())
    elif isinstance(x, tuple) and hasattr(x, "_fields"):
        for key, value in zip(x._fields, x, strict=True):
            yield value, node.child(key), deeper
    elif isinstance(x, (tuple, list)):
        for index, value in enumerate(x):
            if not isinstance(value, _PLAIN):
                yield value, node.item(index), deeper
    elif dataclasses.is_dataclass(x):
        names = (field.name for field in dataclasses.fields(x))
        yield from ((getattr(x, name, None), node.child(name), deeper) for name in names)


def tensors(
    x: Any, node: Node, around: tuple[int, ...] = ()
) -> Iterator[tuple[torch.Tensor, Node]]:
    """All tensors in a value, with their nodes."""
    if isinstance(x, torch.Tensor):
        yield x, node
        return
    for value, child, deeper in children(x, node, around):
        yield from tensors(value, child, deeper)


def _has_history(x: torch.Tensor) -> bool:
    try:
        return x.grad_fn is not None
    except RuntimeError:  # some views that were changed in place raise when asked
        return True
