"""Numbers, counts, shares and dtypes as people read them."""

from __future__ import annotations

import math

import torch

_PARTS = 64  # of a dimension that bits tell apart
_SHOWN = 4  # indices


def number(value: float) -> str:
    """As a person reads it."""
    whole = 1e3 <= abs(value) < 1e7  # noqa: PLR2004
    return f"{value:,.0f}" if whole and math.isfinite(value) else f"{value:.3g}"


def largest(dtype: torch.dtype) -> str:
    """The largest value of a dtype: "65504", "3.403e+38"."""
    value = float(torch.finfo(dtype).max)
    return f"{value:g}" if value < 1e6 else f"{value:.4g}"  # noqa: PLR2004


def figure(value: float, beside: float | None = None) -> str:
    """To four digits, or all of a whole number; written out where that is short: "-355,700".

    Args:
        value: the number.
        beside: one that it is compared with. Where both would read the same, it has more digits.
    """
    if beside is not None and value != beside and figure(value) == figure(beside):
        return f"{value:.9g}"
    if not 1e3 <= abs(value) < 1e9:  # noqa: PLR2004 - NaN and Inf, too
        return f"{value:.4g}"
    is_short = abs(value) < 1e6 and float(value).is_integer()  # noqa: PLR2004
    return f"{value if is_short else float(f'{value:.4g}'):,.0f}"


def dtype_name(dtype: torch.dtype) -> str:
    """Without the name of torch."""
    return str(dtype).removeprefix("torch.")


def rounded_down(value: float) -> str:
    """To one digit, as a setting to try that is not to be exceeded."""
    if not 0 < value < math.inf:
        return f"{value:g}"
    unit = 10.0 ** math.floor(math.log10(value))
    return f"{float(f'{math.floor(value / unit) * unit:.1g}'):g}"


def share(x: float, most: float) -> str:
    """How much of `most` x is, in percent: "95 %", "0.3 %", "less than 0.1 %"."""
    percent = 100 * x / most
    if 0 < percent < 0.1:  # noqa: PLR2004
        return "less than 0.1 %"
    if 99.5 <= percent < 100:  # noqa: PLR2004
        return "over 99 %"
    return f"{percent:,.0f} %" if percent >= 10 else f"{percent:.2g} %"  # noqa: PLR2004


def plural(count: int, noun: str) -> str:
    """A count with its noun."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def indices(parts: int, size: int) -> str:
    """Indices of a dimension, given as bits: "1, 5"; "" where it is longer than the bits."""
    found = [str(index) for index in range(size) if parts >> index & 1]
    more = ", ..." if len(found) > _SHOWN else ""
    return "" if size > _PARTS else ", ".join(found[:_SHOWN]) + more


def type_name(x: object) -> str:
    """Module and name of an object's type; of built-in types the name."""
    return f"{type(x).__module__}.{type(x).__qualname__}".removeprefix("builtins.")
