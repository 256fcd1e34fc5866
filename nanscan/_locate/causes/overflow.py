"""Rules about the size of values: overflow, and denominators of optimizers that are 0."""

from __future__ import annotations

import math

import torch

from nanscan._data import causes
from nanscan._data.cause import Cause
from nanscan._data.dtypes import smallest
from nanscan._data.location import Operand
from nanscan._data.text import dtype_name
from nanscan._locate.causes.bounds import largest_exponent, limit, overflows
from nanscan._locate.causes.evidence import OpEvidence, rule
from nanscan._locate.causes.op_call import absmax
from nanscan._locate.causes.singularities import zeros
from nanscan._locate.causes.wording import made_counts, named, reaches

_CASTS = ("_to_copy", "copy")
_FAR_APART = 8.0  # ratio of the largest values of two branches


# Optimizers -------------------------------------------------------------------------------------


@rule(directions=("optimizer",), functions=("addcdiv",))
def denominator_zero(evidence: OpEvidence) -> Cause | None:
    """The denominator sqrt(second moment) + eps is 0 only where eps rounds to 0."""
    call = evidence.call
    below = call.tensors.get("tensor2")
    if below is None or not (held := zeros(below)):
        return None
    dtype = dtype_name(below.dtype)
    return Cause(
        f"the optimizer's eps is 0 in {dtype}: the update divides by sqrt(0) + 0",
        f"its denominator holds {held}; the smallest {dtype} is {smallest(below.dtype):.1e}",
        "Adam(..., eps=1e-4), or keep parameters in float32 and use torch.autocast",
    )


@rule(functions=("_fused_adam*",))
def fused_denominator_zero(evidence: OpEvidence) -> Cause | None:
    """In a fused kernel, which computes in float32: there only an eps of 0 is 0."""
    call = evidence.call
    second = call.stats("exp_avg_sq")
    if second is None or call.number("eps") != 0 or second.min != 0:
        return None
    return Cause(
        "the optimizer's eps is 0: the update divides by sqrt(0) + 0",
        f"{call.function} with eps=0 and an exp_avg_sq whose smallest value is 0",
        "Adam(..., eps=1e-8)",
    )


@rule(directions=("optimizer",), functions=("addcmul", "_fused_adam*"))
def second_moment_overflow(evidence: OpEvidence) -> Cause | None:
    """Adam, RMSprop and Adagrad keep squares of gradients in the dtype of the parameter."""
    call = evidence.call
    grad = call.tensors.get("tensor1") or call.tensors.get("grad")
    if grad is None or grad.stats is None:
        return None
    if call.function == "addcmul":
        moment, share = call.tensors["self"], call.number("value")
    elif "exp_avg_sq" in call.tensors:
        moment, share = call.tensors["exp_avg_sq"], 1.0 - (call.number("beta2") or 0.0)
    else:
        return None
    largest, most = grad.stats.absmax or 0.0, limit(moment.dtype)
    dtype = dtype_name(moment.dtype)
    added = (1.0 if share is None else share) * largest**2
    if added + (call.absmax("self") or 0.0 if call.function == "addcmul" else 0.0) < most:
        return None
    return causes.second_moment_overflow(
        f"{named(grad)} reaches {largest:.6g}; {largest:.6g}^2 * {share or 1.0:g} = {added:.3g}, "
        f"and {dtype} ends at {most:.6g}",
        dtype,
    )


@rule(directions=("optimizer",))
def update_overflow(evidence: OpEvidence) -> Cause | None:
    """Any other overflow in an optimizer: parameter + rate * update is too large."""
    call = evidence.call
    if not overflows(call):
        return None
    factor = next((n for s in ("alpha", "value", "lr") if (n := call.number(s)) is not None), None)
    return Cause(
        f"the optimizer's update overflows {dtype_name(call.made.dtype)}",
        f"{reaches(call)}" + (f"; the step is multiplied by {factor:g}" if factor else ""),
        "a lower learning rate; torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0) before the "
        "step",
    )


# Overflow ---------------------------------------------------------------------------------------


@rule()
def exponential(evidence: OpEvidence) -> Cause | None:
    """The argument of exp or another exponential function is too large."""
    call = evidence.call
    ends = largest_exponent(call)
    given = call.tensors.get("exponent" if call.function == "pow" else "self")
    if ends is None or given is None or given.stats is None or given.stats.max is None:
        return None
    is_even = call.function == "cosh"
    largest = absmax(given) if is_even else given.stats.max
    if largest <= ends:
        return None
    written = (
        f"{call.number('self'):g} ** {{}}" if call.function == "pow" else f"{call.function}({{}})"
    )
    dtype = dtype_name(call.made.dtype)
    return Cause(
        f"{written.format(f'{largest:.6g}')} overflows {dtype}",
        f"{named(given)} reaches {largest:.6g}; {dtype} ends at {written.format(f'{ends:.2f}')}",
        "softmax, logsumexp, softplus or sigmoid in their own functions; by hand "
        "(x - x.amax(-1, keepdim=True)).exp()",
    )


@rule(functions=_CASTS)
def cast(evidence: OpEvidence) -> Cause | None:
    """A value is too large for the dtype that it is converted to."""
    call = evidence.call
    given = call.tensors.get("src") or call.tensors.get("self")
    if given is None or given.stats is None or not overflows(call):
        return None
    largest, most = given.stats.absmax or 0.0, limit(call.made.dtype)
    dtype = dtype_name(call.made.dtype)
    return Cause(
        f"conversion to {dtype} overflows",
        f"{named(given)} is {dtype_name(given.dtype)} and reaches {largest:.6g}, "
        f"{largest / most:.3g} times the largest {dtype}, {most:.6g}",
        _wider(call.made.dtype),
    )


@rule(directions=("forward",), functions=("add",))
def unequal_branches(evidence: OpEvidence) -> Cause | None:
    """The sum of two tensors of one shape, one of which is much larger, overflows."""
    call = evidence.call
    a, b = call.tensors.get("self"), call.tensors.get("other")
    if a is None or b is None or a.shape != b.shape or len(a.shape) <= 1 or not overflows(call):
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
    """Mean, std and absmax of a tensor where they are known, else its range."""
    stats = operand.stats
    if stats is None or stats.min is None:
        return f"{named(operand)} is not known"
    if not operand.has_moments:
        return f"{named(operand)} is in [{stats.min:.4g}, {stats.max:.4g}]"
    return (
        f"{named(operand)} has mean {stats.mean:.4g}, std {stats.std:.4g}, absmax "
        f"{stats.absmax:.4g}"
    )


@rule(functions=("div",))
def small_divisor(evidence: OpEvidence) -> Cause | None:
    """A division by values that are not 0, but so small that the quotient overflows."""
    call = evidence.call
    least = call.smallest("other")
    if least is None or least >= 1 or not overflows(call):
        return None
    return Cause(
        f"division by values close to 0 overflows {dtype_name(call.made.dtype)}",
        f"the numerator reaches {call.absmax('self') or 0.0:.6g}, the denominator goes down to "
        f"{least:.3g}; {made_counts(call)}",
        "x / y.clamp(min=eps) where y >= 0, with an eps that the quotient survives",
    )


@rule(directions=("forward", "backward"))
def overflow(evidence: OpEvidence) -> Cause | None:
    """A sum, product or power overflows, in forward or backward."""
    call = evidence.call
    if call.function in _CASTS or not overflows(call):
        return None
    location, dtype = evidence.location, call.made.dtype
    node = f" in the backward of {location.node}" if location.direction == "backward" else ""
    return Cause(
        f"{call.function} overflows {dtype_name(dtype)}{node}",
        f"{reaches(call)}; {made_counts(call)}",
        _wider(dtype),
    )


def _wider(dtype: torch.dtype) -> str:
    """What to do about values that are too large for a dtype."""
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
