"""Event: an op that ran. Value: what a tensor held between two writes to it."""

from __future__ import annotations

import weakref
from types import CodeType
from typing import Any

import torch

from nanscan import _C
from nanscan._data.places import ModulePlace
from nanscan._data.result import Record
from nanscan._locate.schema import OpInfo
from nanscan._scan.dispatch import scan_anywhere
from nanscan._scan.unwrap import Unscannable, plain_parts

_scan_once = _C.scan_once
_CLEAN = bytes(24)  # the counts of a finite row
_COUNTS = slice(8, 32)


def counts_of(row: Record) -> bytes:
    """The bytes of a row that count NaN, +Inf and -Inf."""
    return (row if isinstance(row, bytes) else row.tobytes())[_COUNTS]


class Value:
    """What a tensor held between two writes to it.

    Attributes:
        ref: weak reference to the tensor.
        address: of its data.
        versions: the tensor's version counts while it held this. There are several, since torch
            counts a write after the op is over.
        row: a scan that is done or under way; None where the tensor is not floating point, or was
            not scanned.
        moments: a second scan, with moments; of an integer tensor, of its values as float64.
        numbers: of a small integer tensor its values, where they were asked for.
        maker: the op that made it; None where it is older than the search, or was written through
            a view.
        allocated_by: the op that allocated its memory, if that may be uninitialised, or that
            received into it from another process.
        taint: where its non-finite values come from; None: it is finite, or was not judged.
        base: the value that it is a view of.
        bad_view: the last non-finite value that was written to it through a view.
        number: of the op at which it was noted.
        has_own_version: the tensor may be the `.data` of another one, or a view of that. A write to
            it does not change the version count of the other tensor.
        is_consumed: an op took it and returned floating-point values.
        named: what the tensor is called, where that was asked for while it was there.
        is_rewritten: it was written through another view, or by code that is not seen.
    """

    # Defaults are class attributes: one Value is made for each result of each op, so __init__ must
    # be fast.
    allocated_by: Event | None = None
    numbers: tuple[int, ...] = ()
    taint: Any = None
    base: Value | None = None
    bad_view: Value | None = None
    named: Any = None
    has_own_version = False
    is_rewritten = False
    is_consumed = False

    def __init__(self, tensor: torch.Tensor, maker: Event | None, row: Any, number: int) -> None:
        self.ref = weakref.ref(tensor)
        version, self.address = state_of(tensor)
        self.versions: tuple[int, ...] = (version, version)
        self.row: Record | _C.PendingScan | None = row
        # On a device every scan takes moments, see scan_of.
        self.moments: Record | _C.PendingScan | None = None if row.__class__ is bytes else row
        self.maker = maker
        self.number = number
        self.dtype, self.shape = tensor.dtype, shape_of(tensor)

    @property
    def counts(self) -> bytes:
        """Counts of NaN, +Inf and -Inf, as in a row. Waits for the scan."""
        row = self.row
        if row is None:
            return _CLEAN
        if isinstance(row, _C.PendingScan):
            row = self.row = row.wait()
        return counts_of(row)

    @property
    def is_unread(self) -> bool:
        """Whether it may be uninitialised memory, and no op has read it yet."""
        return self.allocated_by is not None and self.row is None

    @property
    def is_bad(self) -> bool:
        """Whether it holds a non-finite value. Waits for the scan."""
        return self.counts != _CLEAN

    @property
    def has_nan(self) -> bool:
        """Whether it holds a NaN. Waits for the scan."""
        return self.counts[:8] != _CLEAN[:8]


class Event:
    """One op that ran, and where.

    Attributes:
        number: position in the order of execution, from 1.
        step: number of the step.
        info: the op's schema.
        operands: (argument's name, value before the op ran) of its tensors.
        results: values after it, of tensors that it returned or wrote.
        settings: by name, its other arguments that were given.
        code: code object of the user's line that called it; None where it is not known.
        line: number of that line.
        place: the innermost module that was running.
        call: which call of that module in this step, from 1; 0 where none was running.
        node: name and sequence number of the autograd node that ran it; None in a forward.
        recomputed: it repeats a forward op inside of a backward, for a checkpoint.
        in_optimizer: an optimizer ran it.
        outputs: the gradients that the node returned, once it is done; None where the op does not
            run in a node, or sums gradients after it.
        hidden_values: of a product that was given non-finite values, how many bad values of the
            result come of weights that are all 0. Counted where that may be the fault.
    """

    # Class attributes, as in Value.
    code: CodeType | None = None
    line = 0
    place: ModulePlace | None = None
    call = 0
    node: tuple[str, int] | None = None
    recomputed = False
    in_optimizer = False
    outputs: list[Value | None] | None = None
    hidden_values = 0

    def __init__(self, number: int, step: int, info: OpInfo) -> None:
        self.number = number
        self.step = step
        self.info = info
        self.operands: list[tuple[str, Value]] = []
        self.results: list[Value] = []
        self.settings: dict[str, Any] = {}


def state_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Version count and address of a tensor. A write changes one, other memory the other."""
    try:
        return tensor._version, tensor.data_ptr()  # noqa: SLF001 - no public spelling
    except RuntimeError:  # such as an inference tensor or a sparse one: it is scanned at every read
        return -1, 0


def storage_of(tensor: torch.Tensor) -> int:
    """Address of the storage that a tensor is a view of; 0 where it has none."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0


def shape_of(tensor: torch.Tensor) -> torch.Size:
    """Shape of a tensor; of a nested tensor, the shape of all its values in one."""
    return tensor.values().shape if tensor.is_nested else tensor.shape


def scan_of(tensor: torch.Tensor) -> Record | _C.PendingScan | None:
    """Scans a tensor. Returns None where it is not floating point, or cannot be scanned.

    On a device with moments: when the row is there, the tensor may be gone.
    """
    moments = tensor.is_cuda
    row: Record | _C.PendingScan | int = _scan_once(tensor, moments)
    if row.__class__ is bytes:  # the most frequent by far
        return row
    if row == _C.NOT_FLOAT:
        return None
    if isinstance(row, int):
        row = scan_anywhere(tensor, moments=moments)
    return row if not isinstance(row, int) else _scan_only_part(tensor, moments=moments)


def _scan_only_part(tensor: torch.Tensor, *, moments: bool) -> Record | _C.PendingScan | None:
    """Scans the one plain tensor that a subclass wraps; None where it wraps none or several."""
    try:
        parts = plain_parts(tensor)
    except Unscannable:
        return None
    row = scan_anywhere(parts[0][1], moments=moments) if len(parts) == 1 else None
    return None if isinstance(row, int) else row
