"""Types of the compiled core. Functions marked raw are METH_FASTCALL, positional only."""

from collections.abc import Callable
from types import CodeType
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import Self

# Statuses: why a tensor was not scanned (csrc/tensor_view.h).
NOT_PLAIN: Final[int]
NEEDS_ROW: Final[int]
NOT_FLOAT: Final[int]
BAD_FORMAT: Final[int]
OTHER_DEVICE: Final[int]
NO_DATA: Final[int]
NO_VIEW: Final[int]
LAZY_BIT: Final[int]
UNPREPARED: Final[int]
MISALIGNED: Final[int]

DTYPES: Final[tuple[str, ...]]  # torch's names of the dtypes with kernels (csrc/float_format.h)
ROW_FIELDS: Final[tuple[tuple[str, str], ...]]  # name and NumPy format (csrc/row.h)

CUDA_TOOLKIT: Final[str]  # version of the toolkit that the build found, or ""
CUDA_ARCHITECTURES: Final[str]  # those of the shipped image, separated by commas

def initialize(tensor: type, parameter: type, exchange: Any) -> None: ...
def variants() -> list[str]: ...
def variant() -> str: ...
def use_variant(name: str) -> None: ...
def plain_read(data: Any) -> None: ...
def noop(x: object, row: int) -> int: ...

class PendingScan:
    """A scan of a CUDA tensor, which runs or has ended."""

    @property
    def captured(self) -> bool: ...  # it belongs to a CUDA graph, and runs in each replay
    def ready(self) -> bool: ...
    def wait(self) -> bytes: ...

def held_states(value: object, depth: int, /) -> bytes: ...  # raw; id and version, as int64
def keys_with_tensors(held: dict[str, Any], less: frozenset[str], depth: int, /) -> list[str]: ...
def scan_once(tensor: object, moments: bool, /) -> bytes | PendingScan | int: ...  # raw

class ResultBase:
    """The row of a scan with the shape and dtype of its tensor. A number waits for the scan."""

    def __new__(
        cls,
        row: Any,  # a PendingScan, or a buffer of 128 bytes, which is copied
        shape: tuple[int, ...],
        dtype: torch.dtype,
        *,
        moments: bool = False,
    ) -> Self: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def numel(self) -> int: ...
    @property
    def nan_count(self) -> int: ...
    @property
    def posinf_count(self) -> int: ...
    @property
    def neginf_count(self) -> int: ...
    @property
    def calls(self) -> int: ...
    @property
    def _max_key(self) -> int: ...
    @property
    def _min_key(self) -> int: ...
    @property
    def _first_bad(self) -> int: ...
    @property
    def _sum(self) -> float: ...
    @property
    def _sumsq(self) -> float: ...
    @property
    def _zeros(self) -> int: ...
    @property
    def _subnormals(self) -> int: ...
    @property
    def _has_moments(self) -> bool: ...
    @property
    def _pending(self) -> PendingScan | None: ...  # until its row was read
    @property
    def _row(self) -> bytes: ...

# The class of the results that check makes, and torch's dtypes in the order of DTYPES. Once.
def initialize_results(result_type: type[ResultBase], dtypes: tuple[torch.dtype, ...]) -> None: ...
def check(tensor: object, moments: bool, /) -> Any: ...  # a ScanResult or a status; raw

# For what is no plain tensor, list, tuple, dict or None, `open(x, moments)` returns its result, or
# its children and the spec with which `close(results, spec)` makes the like of it.
def check_tree(
    tree: Any,
    moments: bool,
    open: Callable[[Any, bool], Any],  # noqa: A002
    close: Callable[[list[Any], Any], Any],
) -> Any: ...
def scan_once_many(tensors: list[Any], moments: bool) -> list[bytes | PendingScan | int]: ...
def describe(tensor: object) -> tuple[str, tuple[int, ...]] | None: ...  # dtype and shape
def bad_parts(tensor: object) -> tuple[int, int]: ...  # bits of dimension 0, and its size

# Merges rows into as many others, both as bytes; `into` changes.
def merge_rows(rows: npt.NDArray[np.uint8], into: npt.NDArray[np.uint8]) -> None: ...

# A CUDA device is given by its index. Failures of the driver are RuntimeErrors.
def cuda_ordinal(tensor: object) -> int | None: ...  # None: not on a CUDA device
def cuda_capability(ordinal: int) -> tuple[int, int]: ...
def cuda_prepare(ordinal: int, image: bytes) -> None: ...  # a fatbin, cubin or PTX
def cuda_is_prepared(ordinal: int) -> bool: ...
def cuda_refuse(ordinal: int) -> None: ...

class Arrival:
    """Rows of one snapshot that are on their way from CUDA devices."""

    def ready(self) -> bool: ...
    def wait(self) -> None: ...
    # Returns the rows that are non-finite or near their limit, of the host and all devices.
    def merge_into(
        self, rows: npt.NDArray[np.uint8], order: npt.NDArray[np.uint64]
    ) -> list[int]: ...
    def describe(self, row: int) -> tuple[str, tuple[int, ...]] | None: ...
    # Of the first bad scan of a row that is bad: elements, NaN, +Inf, -Inf. None: not known.
    def bad_counts(self, row: int) -> tuple[int, int, int, int] | None: ...

class Table:
    def __init__(self, near_limit: float = 1.0) -> None: ...
    def add_row(self) -> int: ...
    def __len__(self) -> int: ...
    @property
    def visits(self) -> int: ...  # rows visited since the last snapshot
    @property
    def last_ticket(self) -> int: ...  # changes whenever a row goes bad
    @property
    # Of this step, on the host: row, ticket, and whether its non-finite values are all -Inf.
    def bad_rows(self) -> list[tuple[int, int, bool]]: ...
    def order(self, row: int) -> int: ...
    def latest_order(self, row: int) -> int: ...  # in the last step before this one that visited it
    @property
    def on_device(self) -> bool: ...  # some rows have memory on CUDA devices
    def abandon_devices(self) -> None: ...  # in a forked child
    # Whether to measure scans on devices; the seconds of those that have ended. Never blocks.
    def set_timed(self, timed: bool) -> None: ...
    def take_device_seconds(self) -> float: ...
    def note_captures(self) -> bool: ...  # False while a CUDA graph records this thread's stream
    @property
    def captured(self) -> bool: ...  # CUDA graphs may write into rows at any time
    # Fills both arrays, of len(self) rows. Returns the rows that are non-finite or near their
    # limit, and the rows that come from devices, if any. While a CUDA graph records this thread's
    # stream, returns None and changes nothing.
    def snapshot(
        self, rows: npt.NDArray[np.uint8], order: npt.NDArray[np.uint64], reset: bool = True
    ) -> tuple[list[int], Arrival | None] | None: ...
    # Merges one scan that was made elsewhere, moments included: the bytes of its row.
    def merge(self, row: int, scan: bytes, dtype: str, shape: tuple[int, ...]) -> None: ...
    # Of a whole step whose rows came from devices: those that turned to 0.
    def turned_to_zero(
        self, rows: npt.NDArray[np.uint8], order: npt.NDArray[np.uint64]
    ) -> list[int]: ...
    def bad_parts(self, row: int) -> tuple[int, int]: ...  # bits of dimension 0, and its size
    def describe(self, row: int) -> tuple[str, tuple[int, ...]] | None: ...
    def bad_counts(self, row: int) -> tuple[int, int, int, int] | None: ...

    # Raw. Each returns 0 or a row index on success, a negative status otherwise.
    def scan(self, tensor: object, row: int, /) -> int: ...
    def visit(self, tensor: object, row: int, /) -> int: ...
    def scan_many(self, tensors: list[Any], rows: list[int], /) -> list[tuple[int, int]]: ...

class CallObserver:
    """Hears of module calls, while it is added."""

# `owner` keeps the observer alive.
def add_observer(observer: CallObserver, owner: object) -> None: ...
def remove_observer(observer: CallObserver) -> None: ...

# The descriptor for nn.Module._compiled_call_impl, given nn.Module and the code of its __call__.
def make_door(module_type: type, call_code: CodeType) -> object: ...

class CallEvents(CallObserver):
    """Calls `on_before_module(module)` and `on_after_module(module, output)` of a listener."""

    def __init__(self, listener: Any) -> None: ...  # it is the owner, too

class IdleObserver(CallObserver):
    """Does nothing, to measure what observing costs."""

class HookedCall:
    """A module call that begins here, where hooks tell of it and not the door."""

    def __init__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None: ...
    def returned(self, output: Any) -> None: ...
    def raised(self) -> None: ...

class Calls(CallObserver):
    """Scans at module calls. For what is new it calls `python_hooks`, which outlives it."""

    def __init__(
        self,
        table: Table,
        python_hooks: Any,
        *,
        inputs: bool,
        outputs: bool,
        gradients: bool,
        everything: bool,  # also modules that were not added
        arguments: bool,  # tell of those of outermost calls
    ) -> None: ...
    def add(
        self, module: int, place: object, outermost: bool, watched: bool, always: bool
    ) -> None: ...  # by id
    def ignore(self, module: int, outside: bool) -> None: ...  # by id
    def remove(self, module: int) -> None: ...
    # period 0: calls are followed, and nothing is scanned; 1: all watched modules are; more: the
    # `always` modules in each step, and each other module in one of `period` steps.
    def set_turn(self, period: int, step: int) -> None: ...
    def set_attached(self, attached: bool) -> None: ...  # False: nothing is watched
    def set_timed(self, timed: bool) -> None: ...
    def take_cost(self) -> tuple[int, int]: ...  # nanoseconds and calls since the last time
    def take_gradient_cost(self) -> tuple[int, int]: ...  # the same of gradient hooks
    # A raw function of one gradient, for all outputs of one module. Python is given its number.
    def gradient_hook(self, number: int) -> Callable[[Any], None]: ...
    @property
    def wants_gradients(self) -> bool: ...  # of the output that this thread now handles
    @property
    def recomputing(self) -> bool: ...  # the module calls of this thread repeat a forward
    @property
    def running(self) -> Any: ...  # innermost place running in this thread, or None
