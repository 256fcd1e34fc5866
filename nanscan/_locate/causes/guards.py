"""Rules about an eps that was to keep values inside of a domain, and that is lost in rounding."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from nanscan._data.cause import Cause
from nanscan._data.dtypes import rounds_to_zero, smallest
from nanscan._data.location import Operand
from nanscan._data.text import dtype_name
from nanscan._locate.causes.evidence import OpEvidence, rule
from nanscan._locate.causes.op_call import OpCall, call_of
from nanscan._locate.causes.singularities import Domain, domain_of, safe_eps, zeros
from nanscan._locate.causes.wording import named

_ADDED = {"clamp_min": "min", "clamp": "min", "add": "other", "sub": "other"}
_KEEP_ZERO: tuple[str, ...] = ("sqrt", "neg", "abs", "clone", "_to_copy")
_FAR = 4  # so many ops lie at most between an eps and what it is for


@rule(of_forward=True)
def eps_rounds_to_zero(evidence: OpEvidence) -> Cause | None:
    """An eps that was to keep an argument from 0 is 0 itself in the dtype at hand."""
    found, argument = _argument_of(evidence.forward_call)
    if found is None or argument is None:
        return None
    held = zeros(argument)
    for made, maker in _with_makers(argument) if held else ():
        eps, dtype = _eps_of(maker), dtype_name(made.dtype)
        if eps is not None and eps > 0 and zeros(maker.made):
            if not rounds_to_zero(eps, made.dtype):
                return None
            return Cause(
                f"{found.what} zero: its eps={eps:g} is 0 in {dtype}",
                f"{made.made_by} was to keep {named(argument)} from 0, which has {held}; the "
                f"smallest {dtype} is {smallest(made.dtype):.1e}",
                f"eps={safe_eps(made.dtype):g}, which {dtype} holds"
                + (
                    "; where no gradient is needed, the same in float32: x.float()" * _is_half(made)
                ),
            )
        is_scaled = maker.function in ("mul", "div") and maker.number("other")
        if maker.function not in _KEEP_ZERO and not is_scaled:
            break
    return None


@rule(of_forward=True)
def eps_rounds_to_one(evidence: OpEvidence) -> Cause | None:
    """A clamp to 1 - eps is a clamp to 1, for log(1 - p), atanh, acos and the like."""
    found, argument = _argument_of(evidence.forward_call)
    if found is None or argument is None:
        return None
    is_difference = found.low == 0 and bool(zeros(argument))
    for made, maker in _with_makers(argument):
        if maker.function == "rsub" and maker.number("other") == 1 and is_difference:
            continue
        top = maker.number("max") if maker.function in ("clamp", "clamp_max") else None
        stats = maker.made.stats
        if (
            top is None
            or stats is None
            or stats.max != 1
            or (found.high != 1 and not is_difference)
        ):
            return None
        if not (top < 1 and torch.tensor(top, dtype=made.dtype) == 1):
            return None
        dtype = dtype_name(made.dtype)
        of = "zero" if is_difference else "1"
        return Cause(
            f"{found.what} {of}: {top}, at which values are clamped, is 1 in {dtype}",
            f"{made.made_by} has a largest value of exactly 1; the {dtype} before 1 is "
            f"{1 - torch.finfo(made.dtype).eps / 2:.9g}",
            f"x.clamp({'-1 + eps' if found.low == -1 else 'eps'}, 1 - eps) with "
            "eps = torch.finfo(x.dtype).eps",
        )
    return None


def _argument_of(call: OpCall) -> tuple[Domain | None, Operand | None]:
    """The domain of a function, and its argument; None where one of them is not known."""
    found = domain_of(call)
    argument = None if found is None else call.tensors.get(found.argument)
    if argument is not None and not argument.dtype.is_floating_point:
        argument = None
    return found, argument


def _with_makers(operand: Operand) -> Iterator[tuple[Operand, OpCall]]:
    """A tensor with the call that made it, then the same of the first operand of that, ..."""
    for _ in itertools.repeat(None, _FAR):
        if operand.maker is None:
            return
        yield operand, call_of(operand.maker)
        if not operand.maker.operands:
            return
        operand = operand.maker.operands[0]


def _eps_of(maker: OpCall) -> float | None:
    """The number that an op adds to its argument, or below which it lets none of it fall."""
    name = _ADDED.get(maker.function, "")
    if maker.function == "sub":
        return None if (number := maker.number(name)) is None else -number
    bound = maker.stats(name) if maker.function == "clamp_min" else None
    if bound is not None and bound.min == bound.max:  # a tensor, as of F.cosine_similarity
        return bound.max
    return maker.number(name)


def _is_half(operand: Operand) -> bool:
    return operand.dtype == torch.float16
