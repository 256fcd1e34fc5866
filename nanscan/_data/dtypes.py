"""Which dtypes can be scanned, and what each can hold."""

from __future__ import annotations

import functools

import torch

DTYPES = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.complex32,
    torch.complex64,
    torch.complex128,
)


@functools.lru_cache(maxsize=64)
def rounds_to_zero(value: float, dtype: torch.dtype) -> bool:
    """Whether a number is 0 in a dtype. Remembered: it is asked for each parameter in each step."""
    return torch.tensor(value, dtype=dtype).item() == 0


def smallest(dtype: torch.dtype) -> float:
    """Smallest positive value of a dtype, a subnormal."""
    info = torch.finfo(dtype)
    return float(info.smallest_normal) * float(info.eps)
