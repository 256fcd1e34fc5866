"""Which dtypes can be scanned, and what each can hold."""

from __future__ import annotations

import functools

import torch

from nanscan import _C

# The names, and with them what the kernels know, come from the table in csrc/float_format.h.
DTYPES: tuple[torch.dtype, ...] = tuple(getattr(torch, name) for name in _C.DTYPES)


@functools.lru_cache(maxsize=64)
def rounds_to_zero(value: float, dtype: torch.dtype) -> bool:
    """Whether a number is 0 in a dtype. Remembered: it is asked for each parameter in each step."""
    return torch.tensor(value, dtype=dtype).item() == 0


def smallest(dtype: torch.dtype) -> float:
    """Smallest positive value of a dtype, a subnormal."""
    info = torch.finfo(dtype)
    return float(info.smallest_normal) * float(info.eps)
