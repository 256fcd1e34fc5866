"""Causes that lie in the size of values: overflow, also of what an optimizer computes."""

from __future__ import annotations

import math

import torch

from nanscan._data.cause import Cause
from nanscan._data.dtypes import smallest
from nanscan._data.location import Location, Operand
from nanscan._data.text import dtype_name
from nanscan._locate.causes.calls import (
    absmax,
    call,
    largest_exponent,
    limit,
    made_by,
    made_counts,
    named,
    overflows,
    reaches,
)
from nanscan._locate.causes.domains import zeros

_CASTS = ("_to_copy", "copy")
_FAR_APART = 8.0  # branches of a sum, by their largest values


# Optimizers -------------------------------------------------------------------------------------


def denominator_zero(location: Location) -> Cause | None:
    """Roots of the second moment are not negative: with an eps, a sum of 0 is an eps of 0."""
    c = call(location.at)
    below = c.tensors.get("tensor2")
    if location.direction != "optimizer" or c.function != "addcdiv" or below is None:
        return None
    if not (held := zeros(below)):
        return None
    dtype = dtype_name(below.dtype)
    return Cause(
        f"the optimizer's eps is 0 in {dtype}: the update divides by sqrt(0) + 0",
        f"its denominator holds {held}; the smallest {dtype} is {smallest(below.dtype):.1e}",
        "Adam(..., eps=1e-4), or keep parameters in float32 and use torch.autocast",
    )


def fused_denominator_zero(location: Location) -> Cause | None:
    """The same in one kernel, which computes in float32: there only an eps of 0 is 0."""
    c = call(location.at)
    second = c.stats("exp_avg_sq")
    if not c.function.startswith("_fused_adam") or second is None or c.number("eps") != 0:
        return None
    if second.min != 0:
        return None
    return Cause(
        "the optimizer's eps is 0: the update divides by sqrt(0) + 0",
        f"{c.function} with eps=0 and an exp_avg_sq whose smallest value is 0",
        "Adam(..., eps=1e-8)",
    )


def second_moment_overflow(location: Location) -> Cause | None:
    """Adam, RMSprop and Adagrad keep squares of gradients in the dtype of the parameter."""
    c = call(location.at)
    grad = c.tensors.get("tensor1") or c.tensors.get("grad")
    if location.direction != "optimizer" or grad is None or grad.stats is None:
        return None
    if c.function == "addcmul":
        moment, share = c.tensors["self"], c.number("value")
    elif c.function.startswith("_fused_adam") and "exp_avg_sq" in c.tensors:
        moment, share = c.tensors["exp_avg_sq"], 1.0 - (c.number("beta2") or 0.0)
    else:
        return None
    largest, most = grad.stats.absmax or 0.0, limit(moment.dtype)
    added = (1.0 if share is None else share) * largest**2
    if added + (c.absmax("self") or 0.0 if c.function == "addcmul" else 0.0) < most:
        return None
    return Cause(
        f"the optimizer's second moment overflows {dtype_name(moment.dtype)}: gradients are squared",
        f"{named(grad)} reaches {largest:.6g}; {largest:.6g}^2 * {share or 1.0:g} = {added:.3g}, "
        f"and {dtype_name(moment.dtype)} ends at {most:.6g}",
        "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0) before the step; float32 "
        "parameters under torch.autocast",
    )


def update_overflow(location: Location) -> Cause | None:
    """What remains of optimizers: parameter + rate * step is too large."""
    c = call(location.at)
    if location.direction != "optimizer" or not overflows(c):
        return None
    factor = next((n for s in ("alpha", "value", "lr") if (n := c.number(s)) is not None), None)
    return Cause(
        f"the optimizer's update overflows {dtype_name(made_by(c).dtype)}",
        f"{reaches(c)}" + (f"; the step is multiplied by {factor:g}" if factor else ""),
        "a lower learning rate; torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0) before the "
        "step",
    )


# Overflow ---------------------------------------------------------------------------------------


def exponential(location: Location) -> Cause | None:
    """Exp and its like: told by their argument."""
    c = call(location.at)
    ends = largest_exponent(c)
    given = c.tensors.get("exponent" if c.function == "pow" else "self")
    if ends is None or given is None or given.stats is None or given.stats.max is None:
        return None
    is_even = c.function == "cosh"
    largest = absmax(given) if is_even else given.stats.max
    if largest <= ends:
        return None
    written = f"{c.number('self'):g} ** {{}}" if c.function == "pow" else f"{c.function}({{}})"
    dtype = dtype_name(made_by(c).dtype)
    return Cause(
        f"{written.format(f'{largest:.6g}')} overflows {dtype}",
        f"{named(given)} reaches {largest:.6g}; {dtype} ends at {written.format(f'{ends:.2f}')}",
        "softmax, logsumexp, softplus or sigmoid in their own functions; by hand "
        "(x - x.amax(-1, keepdim=True)).exp()",
    )


def cast(location: Location) -> Cause | None:
    """A value that the new dtype cannot hold."""
    c = call(location.at)
    given = c.tensors.get("src") or c.tensors.get("self")
    if c.function not in _CASTS or given is None or given.stats is None or not overflows(c):
        return None
    largest, most = given.stats.absmax or 0.0, limit(made_by(c).dtype)
    return Cause(
        f"conversion to {dtype_name(made_by(c).dtype)} overflows",
        f"{named(given)} is {dtype_name(given.dtype)} and reaches {largest:.6g}, {largest / most:.3g} "
        f"times the largest {dtype_name(made_by(c).dtype)}, {most:.6g}",
        _wider(made_by(c).dtype),
    )


def unequal_branches(location: Location) -> Cause | None:
    """A residual sum: two tensors of one shape, of which one is much larger."""
    c = call(location.at)
    a, b = c.tensors.get("self"), c.tensors.get("other")
    if c.function != "add" or a is None or b is None or a.shape != b.shape or len(a.shape) <= 1:
        return None
    if location.direction != "forward" or not overflows(c):
        return None
    large, small = sorted((a, b), key=absmax, reverse=True)
    if absmax(large) < _FAR_APART * absmax(small):
        return None
    ratio = absmax(large) / absmax(small) if absmax(small) else math.inf
    return Cause(
        "one branch of a residual sum has outgrown the other",
        f"{_spread(large)}; {_spread(small)}; the largest values differ by a factor of {ratio:.3g}",
        "normalise or scale the branch before the sum: x + scale * branch(norm(x)) with "
        "scale = nn.Parameter(torch.tensor(0.1))",
    )


def _spread(operand: Operand) -> str:
    """Mean and std where they are known, else the range."""
    stats = operand.stats
    if stats is None or stats.min is None:
        return f"{named(operand)} is not known"
    if not operand.has_moments:
        return f"{named(operand)} is in [{stats.min:.4g}, {stats.max:.4g}]"
    return (
        f"{named(operand)} has mean {stats.mean:.4g}, std {stats.std:.4g}, absmax "
        f"{stats.absmax:.4g}"
    )


def small_divisor(location: Location) -> Cause | None:
    """Not by 0, but close enough."""
    c = call(location.at)
    least = c.smallest("other")
    if c.function != "div" or least is None or least >= 1 or not overflows(c):
        return None
    return Cause(
        f"division by values close to 0 overflows {dtype_name(made_by(c).dtype)}",
        f"the numerator reaches {c.absmax('self') or 0.0:.6g}, the denominator goes down to "
        f"{least:.3g}; {made_counts(c)}",
        "x / y.clamp(min=eps) where y >= 0, with an eps that the quotient survives",
    )


def overflow(location: Location) -> Cause | None:
    """Of sums, products and powers, forward and backward."""
    c = call(location.at)
    if location.direction == "optimizer" or c.function in _CASTS or not overflows(c):
        return None
    dtype = made_by(c).dtype
    return Cause(
        f"{c.function} overflows {dtype_name(dtype)}" + _in_backward(location),
        f"{reaches(c)}; {made_counts(c)}",
        _wider(dtype),
    )


def _in_backward(location: Location) -> str:
    return f" in the backward of {location.node}" if location.direction == "backward" else ""


def _wider(dtype: torch.dtype) -> str:
    if dtype == torch.float16:
        return (
            "bfloat16 reaches 3.4e38: torch.autocast(device, dtype=torch.bfloat16); or keep this "
            "place in float32: x.float(), or scale down what feeds it"
        )
    if dtype.itemsize == 1:
        return (
            "scale the tensor into the range first: x / (x.abs().amax() / torch.finfo(dtype).max)"
        )
    return (
        "values this large have diverged: lower the learning rate, clip gradients with "
        "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0), or normalise what feeds it"
    )
