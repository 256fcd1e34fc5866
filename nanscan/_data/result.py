"""ScanResult: what one or more scans of a tensor found."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch

from nanscan import _C
from nanscan._data.dtypes import DTYPES
from nanscan._data.row import Rows
from nanscan._data.text import dtype_name, number

Record = bytes | np.void | Rows  # of one row
_SIGN = 1 << 63
_ALL = (1 << 64) - 1


def _value_of_key(key: int) -> float | None:
    if key == 0:
        return None
    bits = key ^ _SIGN if key & _SIGN else key ^ _ALL
    value: float = struct.unpack("<d", struct.pack("<Q", bits))[0]
    return value


class ScanResult(_C.ResultBase):
    """What one pass over a tensor found. Immutable.

    Counts and extremes of a complex tensor are those of its real and imaginary parts, so `numel` is
    twice the tensor's. Extremes and moments are over finite values; they are None where there is
    none.

    Attributes:
        shape: of the tensor that was scanned.
        dtype: of the tensor that was scanned.
        numel: elements scanned; over all calls where several were merged.
        nan_count: elements that are NaN, whatever their sign and payload.
        posinf_count: elements that are +Inf.
        neginf_count: elements that are -Inf.
        calls: scans merged into this result.

    Synchronization: none until a value is read; then it waits for the scan, and so for what was
        sent to its CUDA stream before. On the CPU the scan is done when `check` returns.
    """

    __slots__ = ()

    @property
    def inf_count(self) -> int:
        """Elements that are +Inf or -Inf."""
        return self.posinf_count + self.neginf_count

    @property
    def nonfinite_count(self) -> int:
        """Elements that are NaN, +Inf or -Inf."""
        return self.nan_count + self.inf_count

    @property
    def is_finite(self) -> bool:
        """Whether every element is finite; True for an empty tensor."""
        return not (self.nan_count or self.posinf_count or self.neginf_count)

    @property
    def min(self) -> float | None:
        """Smallest finite value; -0.0 counts as smaller than +0.0."""
        return _value_of_key(self._min_key ^ _ALL if self._min_key else 0)

    @property
    def max(self) -> float | None:
        """Largest finite value."""
        return _value_of_key(self._max_key)

    @property
    def absmax(self) -> float | None:
        """Largest finite magnitude: max(|min|, |max|)."""
        if self._max_key == 0:
            return None
        # As integers: a comparison of floats takes subnormals for 0 under flush-to-zero.
        keys = (self._max_key, self._min_key ^ _ALL)
        return _value_of_key(max(key if key & _SIGN else key ^ _ALL for key in keys) | _SIGN)

    @property
    def first_nonfinite(self) -> tuple[int, ...] | None:
        """Index of the first non-finite element in row-major order, or None if all are finite.

        Of several calls it is in the first bad one. None, too, if their shapes differ and scans
        of several CUDA streams overlapped: the call is not known then.
        """
        if self._first_bad == 0:
            return None
        flat = self._first_bad ^ _ALL
        if self.dtype.is_complex:
            flat //= 2
        if flat >= math.prod(self.shape):  # merged calls of different shapes
            return None
        return tuple(int(i) for i in np.unravel_index(flat, self.shape)) if self.shape else ()

    def _require_moments(self) -> None:
        if not self._has_moments:
            raise AttributeError(
                "nanscan: this scan took no moments; ask for them with check(x, moments=True)"
            )

    def _per_finite(self, total: float) -> float | None:
        finite = self.numel - self.nonfinite_count
        return total / finite if finite else None

    @property
    def mean(self) -> float | None:
        """Mean of the finite values, summed in float64."""
        self._require_moments()
        return self._per_finite(self._sum)

    @property
    def rms(self) -> float | None:
        """Root mean square of the finite values."""
        self._require_moments()
        square = self._per_finite(self._sumsq)
        return None if square is None else math.sqrt(square)

    @property
    def std(self) -> float | None:
        """Population standard deviation of the finite values: sqrt(E[x^2] - E[x]^2)."""
        mean, square = self.mean, self._per_finite(self._sumsq)
        if mean is None or square is None:
            return None
        variance = square - mean * mean
        return math.sqrt(variance) if variance > 0 else 0.0 if variance <= 0 else variance

    @property
    def zero_count(self) -> int:
        """Elements that are +0.0 or -0.0."""
        self._require_moments()
        return self._zeros

    @property
    def subnormal_count(self) -> int:
        """Elements that are subnormal in the tensor's own format."""
        self._require_moments()
        return self._subnormals

    def ready(self) -> bool:
        """Whether reading a value would not block. Synchronization: none."""
        pending = self._pending
        return pending is None or pending.ready()

    def to_dict(self) -> dict[str, Any]:
        """Every value under its attribute's name, as plain Python objects fit for JSON."""
        names = [
            *("numel", "nan_count", "posinf_count", "neginf_count", "inf_count"),
            *("nonfinite_count", "is_finite", "min", "max", "absmax", "first_nonfinite", "calls"),
        ]
        if self._has_moments:
            names += ["mean", "std", "rms", "zero_count", "subnormal_count"]
        values = {name: getattr(self, name) for name in names}
        dtype = dtype_name(self.dtype)
        return {"dtype": dtype, "shape": list(self.shape), **values}

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (self._row, self.shape, self.dtype, self._has_moments)

    def __bool__(self) -> NoReturn:
        raise TypeError("nanscan: a ScanResult has no truth value; read .is_finite")

    def __repr__(self) -> str:
        values = self.to_dict()
        dtype, shape = values.pop("dtype"), values.pop("shape")
        body = ", ".join(f"{name}={value!r}" for name, value in values.items())
        return f"ScanResult({dtype} {shape}, {body})"


def _restored(row: bytes, shape: tuple[int, ...], dtype: torch.dtype, moments: bool) -> ScanResult:
    return ScanResult(row, shape, dtype, moments=moments)


_C.initialize_results(ScanResult, DTYPES)


@dataclass(frozen=True)
class BadCall:
    """The call in which a site went bad, of several in one step. They share one result.

    Of a loss, and of the gradient of an output, each backward is a call, in its order.

    Attributes:
        number: of the call, from 1.
        calls: how many there were.
        is_over: the step was over; else there may have been more calls after the finding.
        shape: of the tensor in that call.
        numel: elements scanned in that call; None where that was on a device, which does not tell
            calls apart. So it is with the counts.
        nan_count: elements of that call that are NaN.
        posinf_count: elements of that call that are +Inf.
        neginf_count: elements of that call that are -Inf.
    """

    number: int
    calls: int
    is_over: bool
    shape: tuple[int, ...]
    numel: int | None = None
    nan_count: int | None = None
    posinf_count: int | None = None
    neginf_count: int | None = None

    def __str__(self) -> str:
        of = f"{self.number} of {self.calls}" + ("" if self.is_over else " so far")
        shape = f"shape {list(self.shape)}"
        if self.numel is None:
            return f"{of}, {shape}"
        return f"{of}: {bad_counts(self)} of {self.numel:,}, {shape}"


def bad_counts(result: ScanResult | BadCall) -> str:
    """Such as "3 NaN, 1 +Inf"; "" where all is finite."""
    counts = {
        "NaN": result.nan_count,
        "+Inf": result.posinf_count,
        "-Inf": result.neginf_count,
    }
    return ", ".join(f"{count:,} {name}" for name, count in counts.items() if count)


def describe_parts(result: ScanResult) -> list[str]:
    """What `describe` joins: counts of how many; where first; the range of the rest."""
    counts = bad_counts(result)
    dtype = dtype_name(result.dtype)
    what = f"{counts} of {result.numel:,}" if counts else f"{result.numel:,} finite"
    parts = [f"{what} ({dtype} {list(result.shape)})"]
    if result.first_nonfinite is not None:
        parts.append(f"first at {result.first_nonfinite}")
    if result.min is not None:
        parts.append(f"finite values from {number(result.min)} to {number(result.max or 0.0)}")
    elif result.numel:
        parts.append("no finite value")
    return parts


def describe(result: ScanResult) -> str:
    """One line: what is wrong, of how many, where first, and the range of the rest."""
    return ", ".join(describe_parts(result))
