"""The scan in plain torch and NumPy, in float64: the oracle of the tests, and the way for devices
without kernels.
"""  # noqa: D205

from __future__ import annotations

import numpy as np
import torch

from nanscan._data.row import ROW, Rows, order_key


def as_float64(x: torch.Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """The tensor's values as float64 on the host, exactly; complex as pairs in a last dimension."""
    x = x.detach().cpu().resolve_conj().resolve_neg()
    if x.is_complex():
        x = torch.view_as_real(x)
    if x.dtype.itemsize == 1:  # float8 converts through float32, exactly
        x = x.to(torch.float32)
    values: np.ndarray[tuple[int, ...], np.dtype[np.float64]] = x.to(torch.float64).numpy()
    return values


def scan(x: torch.Tensor, *, moments: bool = False) -> Rows:
    """The row, an array of shape [], of a floating-point or complex tensor in any layout.

    Synchronization: copies the tensor to the host and waits.
    """
    values = as_float64(x).ravel()
    row = np.zeros((), ROW)
    row["calls"] = 1
    row["elements"] = values.size
    row["nan"] = np.isnan(values).sum()
    row["posinf"] = np.isposinf(values).sum()
    row["neginf"] = np.isneginf(values).sum()
    finite = values[np.isfinite(values)]
    if finite.size:
        keys = order_key(finite)
        row["max_key"] = keys.max()
        row["min_key"] = ~keys.min()
    if finite.size < values.size:
        row["ticket"] = row["first_bad_call"] = 1
        row["first_bad"] = ~np.uint64(np.flatnonzero(~np.isfinite(values))[0])
    if moments:
        real_dtype = x.dtype.to_real() if x.is_complex() else x.dtype
        smallest = torch.finfo(real_dtype).smallest_normal
        with np.errstate(over="ignore", invalid="ignore"):  # float64 alone can overflow
            row["sum"] = finite.sum()
            row["sumsq"] = (finite * finite).sum()
        row["zeros"] = (finite == 0).sum()
        row["subnormals"] = ((finite != 0) & (np.abs(finite) < smallest)).sum()
    return row
