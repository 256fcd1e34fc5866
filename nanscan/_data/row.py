"""The row as NumPy sees it; csrc/row.h defines its layout and its keys."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from nanscan import _C

ROW = np.dtype(list(_C.ROW_FIELDS))

Rows = npt.NDArray[np.void]
Floats = npt.NDArray[np.float64]

_SIGN = np.uint64(1 << 63)


def order_key(values: Floats) -> npt.NDArray[np.uint64]:
    """Maps float64 values to unsigned keys of the same order; -0.0 comes before +0.0."""
    bits = np.ascontiguousarray(values, np.float64).view(np.uint64)
    return np.where(bits & _SIGN, ~bits, bits | _SIGN)


def value_of_key(keys: npt.NDArray[np.uint64]) -> Floats:
    """Inverse of `order_key`; key 0, which stands for no value, gives NaN."""
    keys = np.asarray(keys, np.uint64)
    bits = np.where(keys & _SIGN, keys ^ _SIGN, ~keys)
    return np.where(keys == 0, np.nan, bits.view(np.float64))


def finite_max(rows: Rows) -> Floats:
    """Largest finite value of each row; NaN where it has none."""
    return value_of_key(rows["max_key"])


def finite_min(rows: Rows) -> Floats:
    """Smallest finite value of each row; NaN where it has none."""
    keys: npt.NDArray[np.uint64] = rows["min_key"]
    return np.where(keys == 0, np.nan, value_of_key(~keys))


def absmax(rows: Rows) -> Floats:
    """Largest finite magnitude of each row; NaN where it has none."""
    result: Floats = np.maximum(np.abs(finite_max(rows)), np.abs(finite_min(rows)))
    return result


def nonfinite(rows: Rows) -> npt.NDArray[np.uint64]:
    """Count of NaN, +Inf and -Inf of each row."""
    result: npt.NDArray[np.uint64] = rows["nan"] + rows["posinf"] + rows["neginf"]
    return result
