"""Which scan serves a tensor: the kernels of its device, or plain torch."""

from __future__ import annotations

import torch

from nanscan import _C
from nanscan._data.result import Record
from nanscan._data.row import Rows
from nanscan._scan import cuda, reference


def prepare(x: torch.Tensor) -> bool:
    """Loads the kernels on the CUDA device of a tensor; whether it has them now."""
    ordinal = _C.cuda_ordinal(x)
    return ordinal is not None and cuda.prepare(ordinal)


def scan_anywhere(x: torch.Tensor, *, moments: bool = False) -> Record | _C.PendingScan | int:
    """What `_C.scan_once` does on the CPU and on CUDA devices that were met before, for any device.

    A CUDA device gets its kernels here. Where there are none, and where a kernel cannot read the
    address, plain torch scans.
    """
    row = _C.scan_once(x, moments)
    if row == _C.UNPREPARED:
        prepare(x)
        row = _C.scan_once(x, moments)
    if isinstance(row, int) and row in (_C.OTHER_DEVICE, _C.MISALIGNED):
        return scan_without_kernels(x, moments=moments)
    return row


def scan_without_kernels(x: torch.Tensor, *, moments: bool = False) -> Rows:
    """Scans a plain tensor that no kernel of the core can read: a backend for a device goes here.

    Synchronization: plain torch copies the tensor to the host and waits.
    """
    return reference.scan(x, moments=moments)
