"""Numbers, counts, shares and dtypes as people read them."""

from __future__ import annotations

import math

import torch


def number(value: float) -> str:
    """As a person reads it."""
    whole = 1e3 <= abs(value) < 1e7  # noqa: PLR2004
    return f"{value:,.0f}" if whole and math.isfinite(value) else f"{value:.3g}"


def name_of(dtype: torch.dtype) -> str:
    """Without the name of torch."""
    return str(dtype).removeprefix("torch.")


def rounded(value: float) -> str:
    """To one digit, as a setting to try."""
    return f"{float(f'{value:.1g}'):g}"
