"""A table of functions: where each is not defined, and where its derivative is not finite."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from nanscan._data.location import Operand
from nanscan._data.result import ScanResult
from nanscan._data.text import figure
from nanscan._locate.causes.op_call import OpCall, node_function

_ROUNDING = 32  # so many eps of the largest value


@dataclass
class Outside:
    """What part of an argument is outside of a function's domain. False where nothing is.

    Attributes:
        kinds: "zero", "negative values", ...
        held: with numbers: "3 exact zeros of 12", "values down to -2".
    """

    kinds: list[str] = field(default_factory=list)
    held: list[str] = field(default_factory=list)

    def add(self, kind: str, held: str) -> None:
        """Adds one kind of value."""
        self.kinds.append(kind)
        self.held.append(held)

    def __bool__(self) -> bool:
        return bool(self.kinds)

    def __str__(self) -> str:
        return " and ".join(self.held)


@dataclass(frozen=True)
class Domain:
    """Where a function of one argument, and its derivative, is finite.

    Attributes:
        what: the function in words, up to what it is of: "log of", "division by".
        remedy: what to write instead, where an argument is at the edge of the domain; "": the
            argument is replaced before the function.
        argument: the name of the argument in the schema.
        low: the smallest value for which it is defined.
        high: the largest.
        pole: a value between them for which it is not defined.
        at_ends: at `low` and `high` the function is finite, and its derivative is not.
    """

    what: str
    remedy: str
    argument: str = "self"
    low: float = -math.inf
    high: float = math.inf
    pole: float | None = None
    at_ends: bool = False

    def outside(self, operand: Operand | float | None, *, backward: bool = False) -> Outside:
        """What part of an argument is outside of the domain.

        Args:
            operand: the argument: a tensor or a number.
            backward: of the domain of the derivative.
        """
        if operand is None:
            return Outside()
        if isinstance(operand, (int, float)):
            return self._outside_number(float(operand), backward=backward)
        stats = operand.stats
        found = Outside()
        if stats is None or stats.min is None or stats.max is None:
            return found
        points = [] if self.at_ends and not backward else [self.low, self.high]
        points += [] if self.pole is None else [self.pole]
        for point in points:
            if held := _holds(operand, stats, point):
                found.add("zero" if point == 0 else f"{point:g}", held)
        if stats.min < self.low:
            less = "negative values" if self.low == 0 else f"values below {self.low:g}"
            found.add(less, f"values down to {figure(stats.min, self.low)}")
        if stats.max > self.high:
            found.add(f"values above {self.high:g}", f"values up to {figure(stats.max, self.high)}")
        return found

    def _outside_number(self, value: float, *, backward: bool) -> Outside:
        at_end = value in (self.low, self.high) and (backward or not self.at_ends)
        found = Outside()
        if math.isnan(value):
            return found
        if at_end or value == self.pole or not self.low <= value <= self.high:
            found.add("zero" if value == 0 else f"{value:g}", f"the number {value:g}")
        return found


def zeros(operand: Operand) -> str:
    """Zeros in a tensor: "3 exact zeros of 12"; "" where there are none, or it is not known."""
    stats = operand.stats
    return "" if stats is None or stats.min is None else _holds(operand, stats, 0.0)


def _holds(operand: Operand, stats: ScanResult, point: float) -> str:
    """Says that a tensor holds a value, as far as its scan shows that; else ""."""
    if point == 0 and operand.has_moments:
        count = stats.zero_count
        return f"{count:,} exact zero{'s' * (count != 1)} of {stats.numel:,}" if count else ""
    if stats.min == point:
        return f"a smallest value of exactly {point:g}"
    return f"a largest value of exactly {point:g}" if stats.max == point else ""


# Remedies for arguments at the edge of a domain, or outside of it by no more than rounding.
_LOG = "x.clamp(min=torch.finfo(x.dtype).tiny).{0}()"
_INSIDE = "torch.{0}(x.clamp(-1 + eps, 1 - eps)) with eps = torch.finfo(x.dtype).eps"
_DIVISOR = "y = torch.where(y == 0, 1, y) before the division"

_DOMAINS = {
    **{name: Domain(f"{name} of", _LOG.format(name), low=0) for name in ("log", "log2", "log10")},
    "xlogy": Domain(
        "log of",
        "torch.xlogy(x, y.clamp(min=torch.finfo(y.dtype).tiny))",
        argument="other",
        low=0,
    ),
    "log1p": Domain("log1p of", "x.clamp(min=-1 + torch.finfo(x.dtype).eps).log1p()", low=-1),
    "logit": Domain("logit of", "torch.logit(x, eps=torch.finfo(x.dtype).eps)", low=0, high=1),
    "sqrt": Domain("square root of", "", low=0, at_ends=True),
    "rsqrt": Domain("reciprocal square root of", "torch.rsqrt(x.clamp(min={eps:g}))", low=0),
    "reciprocal": Domain("division by", _DIVISOR, pole=0),
    "div": Domain("division by", _DIVISOR, argument="other", pole=0),
    "remainder": Domain("remainder of a division by", _DIVISOR, argument="other", pole=0),
    "fmod": Domain("remainder of a division by", _DIVISOR, argument="other", pole=0),
    "acos": Domain("acos of", _INSIDE.format("acos"), low=-1, high=1, at_ends=True),
    "asin": Domain("asin of", _INSIDE.format("asin"), low=-1, high=1, at_ends=True),
    "atanh": Domain("atanh of", _INSIDE.format("atanh"), low=-1, high=1),
    "erfinv": Domain("erfinv of", _INSIDE.format("erfinv"), low=-1, high=1),
    "acosh": Domain(
        "acosh of",
        "torch.acosh(x.clamp(min=1 + eps)) with eps = torch.finfo(x.dtype).eps",
        low=1,
        at_ends=True,
    ),
}


def safe_eps(dtype: torch.dtype) -> float:
    """A number that can stand for 0 in a divisor or a root, in forward and backward."""
    return 1e-3 if dtype == torch.float16 else 1e-12


def is_rounding(operand: Operand, found: Domain) -> bool:
    """Whether values leave a domain by no more than what rounding does."""
    stats = operand.stats
    if stats is None or stats.min is None or stats.max is None:
        return True
    tolerance = _ROUNDING * torch.finfo(operand.dtype).eps * max(1.0, stats.absmax or 0.0)
    return found.low - stats.min <= tolerance and stats.max - found.high <= tolerance


def domain_of(call: OpCall) -> Domain | None:
    """The domain of a function; None where it is defined everywhere, or not in the table."""
    return (
        _power_domain(call.number("exponent"))
        if call.function == "pow"
        else _DOMAINS.get(call.function)
    )


def domain_of_node(node: str) -> Domain | None:
    """The domain of the function whose backward an autograd node is, or None."""
    return _DOMAINS.get(node_function(node))


def _power_domain(exponent: float | None) -> Domain | None:
    """The domain of x ** exponent: x < 0 takes a whole exponent, x = 0 one that is not negative."""
    if (
        exponent is None
        or math.isnan(exponent)
        or (exponent >= 1 and float(exponent).is_integer())
        or exponent == 0
    ):
        return None
    what = f"power {exponent:g} of"
    if float(exponent).is_integer():
        return Domain(what, "", pole=0)
    # At x = 0 a power between 0 and 1 is finite, and its derivative is not.
    return Domain(what, "", low=0, at_ends=exponent > 0)
