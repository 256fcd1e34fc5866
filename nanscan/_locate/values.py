"""What ops took and returned: events, and values of tensors between two writes."""

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
    """Counts of NaN, +Inf and -Inf in a row."""
    return (row if isinstance(row, bytes) else row.tobytes())[_COUNTS]


class Value:
    """What a tensor held, from one write of it to the next.

    Attributes:
        ref: the tensor, weakly.
        address: of its data.
        versions: of it, while this holds; several, as torch counts a write after the op is over.
        row: a scan, done or under way; None: not floating point, or not scanned.
        moments: a second scan, with moments.
        maker: the op that made it; None: it came from outside, or was written through a view.
        raw: the op whose uninitialised memory it may be.
        taint: why it is not finite; None: it is, or nobody asked.
        base: what it is a view of.
        via: what a view of it held last that was not finite, when it was written through that.
        number: of the op at which this was noted.
        is_apart: it may be the `data` of a tensor, or a view of that: a write of it counts no
            version of that tensor.
        is_consumed: an op took it, and returned floating-point values.
        is_rewritten: it was written through another view, or by code that is not seen.
    """

    # Defaults here, not in __init__: one is made for each result of each op.
    raw: Event | None = None
    taint: Any = None
    base: Value | None = None
    via: Value | None = None
    is_apart = False
    is_rewritten = False
    is_consumed = False

    def __init__(self, tensor: torch.Tensor, maker: Event | None, row: Any, number: int) -> None:
        self.ref = weakref.ref(tensor)
        version, self.address = state_of(tensor)
        self.versions: tuple[int, ...] = (version, version)
        self.row: Record | _C.PendingScan | None = row
        # On a device every scan takes moments: later the tensor may be gone.
        self.moments: Record | _C.PendingScan | None = None if row.__class__ is bytes else row
        self.maker = maker
        self.number = number
        self.dtype, self.shape = tensor.dtype, shape_of(tensor)

    @property
    def counts(self) -> bytes:
        """Counts of NaN, +Inf and -Inf. Waits for the scan."""
        row = self.row
        if row is None:
            return _CLEAN
        if isinstance(row, _C.PendingScan):
            row = self.row = row.wait()
        return counts_of(row)

    @property
    def is_unread(self) -> bool:
        """Whether it is uninitialised memory that nobody read yet."""
        return self.raw is not None and self.row is None

    @property
    def is_bad(self) -> bool:
        """Whether it holds a non-finite value. Waits for the scan."""
        return self.counts != _CLEAN


class Event:
    """One op that ran, and where.

    Attributes:
        number: position in the order of execution.
        operands: (argument's name, value before the op ran).
        results: values after it.
        settings: its other arguments, those that were given, by name.
        code: of the user's line; None: not known.
        line: its number.
        place: the innermost module that was running.
        node: name and sequence number of the autograd node that ran it.
        recomputed: it repeats a forward, for a checkpoint.
        in_optimizer: an optimizer ran it.
        outputs: gradients that the node returned; None: it does not run in one, or after it.
    """

    # Defaults here, not in __init__, as above.
    code: CodeType | None = None
    line = 0
    place: ModulePlace | None = None
    node: tuple[str, int] | None = None
    recomputed = False
    in_optimizer = False
    outputs: list[Value | None] | None = None

    def __init__(self, number: int, step: int, info: OpInfo) -> None:
        self.number = number
        self.step = step
        self.info = info
        self.operands: list[tuple[str, Value]] = []
        self.results: list[Value] = []
        self.settings: dict[str, Any] = {}


def state_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Version and address of a tensor: what changes when it is written, or given other memory."""
    try:
        return tensor._version, tensor.data_ptr()  # noqa: SLF001 - no public spelling
    except RuntimeError:  # an inference tensor, a sparse one, ...: it is scanned at every read
        return -1, 0


def storage_of(tensor: torch.Tensor) -> int:
    """Address of the memory that a tensor is a view of; 0 where it has none."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0


def shape_of(tensor: torch.Tensor) -> torch.Size:
    """Of a nested tensor only that of its memory is a shape."""
    return tensor.values().shape if tensor.is_nested else tensor.shape


def scan_of(tensor: torch.Tensor) -> Record | _C.PendingScan | None:
    """A row; with moments where it cannot be looked at before the tensor is gone."""
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
    """Of a subclass that wraps one tensor."""
    try:
        parts = plain_parts(tensor)
    except Unscannable:
        return None
    row = scan_anywhere(parts[0][1], moments=moments) if len(parts) == 1 else None
    return None if isinstance(row, int) else row
