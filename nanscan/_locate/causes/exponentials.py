"""What to write in the place of an exponential that overflows, by what its result is used for."""

from __future__ import annotations

import math

import torch

from nanscan._data.location import Location, Op
from nanscan._locate.causes.bounds import limit
from nanscan._locate.causes.op_call import OpCall, absmax, call_of, op_function

_SELECTS = ("where", "masked_fill")


def exponential_remedy(location: Location, call: OpCall, ends: float) -> str:
    """What to do about an exponential that overflows.

    Args:
        location: of the exponential.
        call: it.
        ends: the largest argument that its dtype survives.
    """
    first, second = location.takers or ((), ())
    takers = {op_function(op.name) for op in first}
    after = {op_function(op.name) for op in second}
    if call.function == "exp":
        if (top := _clamped_at(first)) is not None:
            return (
                f"clamp before exp, with the same values: x.clamp(max=math.log({top:g})).exp() in "
                f"the place of x.exp().clamp(max={top:g})"
            )
        if stable := _stable(first, takers, after):
            return stable
    if takers & set(_SELECTS):
        return (
            "make the argument safe before the function, too: "
            f"torch.where(ok, torch.where(ok, x, 0).{call.function}(), y)"
        )
    return _bounded(call, ends)


def _stable(first: tuple[Op, ...], takers: set[str], after: set[str]) -> str:
    """The function that computes the same without an overflow; "" where none is known."""
    if {"sum", "div"} <= takers:
        return "F.softmax(x, dim) in the place of x.exp() / x.exp().sum(dim, keepdim=True)"
    if "sum" in takers and "log" in after and "div" not in after:
        return "torch.logsumexp(x, dim) in the place of x.exp().sum(dim).log()"
    if "log1p" in takers or (_adds_one(first) and "log" in after):
        return "F.softplus(x) in the place of (1 + x.exp()).log()"
    if _adds_one(first) and "reciprocal" in after:
        return "torch.sigmoid(-x) in the place of 1 / (1 + x.exp())"
    return ""


def _bounded(call: OpCall, ends: float) -> str:
    top = math.floor(ends)
    written = {
        "pow": f"{call.number('self') or 0:g} ** x.clamp(max={top})",
        "cosh": f"x.clamp(-{top}, {top}).cosh()",
    }.get(call.function, f"x.clamp(max={top}).{call.function}()")
    text = f"bound the argument: {written}; of a log-variance or log-scale far lower"
    given = call.tensors.get("exponent" if call.function == "pow" else "self")
    is_narrow = call.made.dtype == torch.float16 and call.function == "exp"
    if is_narrow and given and absmax(given) < math.log(limit(torch.float32)):
        return f"{text}; where no gradient is needed, x.float().exp()"
    return text


def _clamped_at(takers: tuple[Op, ...]) -> float | None:
    """The number at which an op clamps what it takes; None where none does."""
    for op in takers:
        taker = call_of(op)
        if taker.function in ("clamp", "clamp_max"):
            top = taker.number("max")
            if top is not None and top > 0:
                return top
    return None


def _adds_one(takers: tuple[Op, ...]) -> bool:
    calls = map(call_of, takers)
    return any(call.function == "add" and call.number("other") == 1 for call in calls)
