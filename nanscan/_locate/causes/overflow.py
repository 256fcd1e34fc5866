"""Rules about the size of values: overflow, and denominators of optimizers that are 0."""

from __future__ import annotations

import math

import torch

from nanscan._data import causes, text
from nanscan._data.cause import Cause
from nanscan._data.dtypes import smallest
from nanscan._data.location import Location, Operand
from nanscan._data.text import dtype_name, figure, rounded_down
from nanscan._locate.causes.bounds import RANGES, bound, largest_exponent, limit, overflows
from nanscan._locate.causes.evidence import OpEvidence, rule
from nanscan._locate.causes.exponentials import exponential_remedy
from nanscan._locate.causes.op_call import OpCall, absmax, is_bad
from nanscan._locate.causes.singularities import safe_eps, zeros
from nanscan._locate.causes.wording import but_not_in_backward, made_counts, named, reaches

_CASTS = ("_to_copy", "copy")
_FAR_APART = 8.0  # ratio of the largest values of two branches


# Optimizers -------------------------------------------------------------------------------------


@rule(verdicts=("origin", "propagated"), directions=("optimizer",))
def nonfinite_setting(evidence: OpEvidence) -> Cause | None:
    """A number that an optimizer computes with is not finite, such as the learning rate."""
    location = evidence.location
    given = {k: x for k, x in evidence.call.settings.items() if isinstance(x, float)}
    bad = next((f"{k}={x:g}" for k, x in given.items() if not math.isfinite(x)), "")
    is_unknown = any(is_bad(o) and not o.what for o in location.operands)  # a rate as a tensor
    if not bad and not is_unknown:
        return None
    if location.bad_settings:
        return causes.setting_not_finite(location.bad_settings[0], f"the result of {location.op}")
    if not bad:
        return None
    return Cause(
        "the optimizer computed with a number that is not finite",
        f"{location.op} was given {bad}",
        "",
    )


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
        "eps=1e-4 for the optimizer, or keep parameters in float32 and use torch.autocast",
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
        f"{named(grad)} reaches {figure(largest)}; {figure(largest)}^2 * {share or 1.0:g} = "
        f"{figure(added)}, and {dtype} ends at {text.largest(moment.dtype)}",
        dtype,
    )


@rule(directions=("optimizer",))
def update_overflow(evidence: OpEvidence) -> Cause | None:
    """Any other overflow in an optimizer: parameter + rate * update is too large."""
    call = evidence.call
    if not overflows(call):
        return None
    settings = ("alpha", "value", "lr")
    factor = next((n for s in settings if (n := call.number(s)) is not None), None)
    names = ("other", "tensor1", "grad")
    gradient = next((x for name in names if (x := call.absmax(name))), None)
    lower = limit(call.made.dtype) / gradient / 2 if gradient else None
    return Cause(
        f"the optimizer's update overflows {dtype_name(call.made.dtype)}",
        f"{reaches(call)}" + (f"; the step is multiplied by {factor:g}" if factor else ""),
        "a lower learning rate"
        + (f", far below {rounded_down(lower)}" if factor and lower else ""),
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
    location, dtype = evidence.location, dtype_name(call.made.dtype)
    reached = written.format(figure(largest, ends))
    return Cause(
        f"{reached} overflows {dtype}{_in_backward(location)}{but_not_in_backward(location)}",
        f"{named(given)} reaches {figure(largest, ends)}; {dtype} ends at "
        f"{written.format(figure(ends))}",
        exponential_remedy(location, call, ends) if location.direction != "backward" else "",
    )


@rule(functions=_CASTS)
def cast(evidence: OpEvidence) -> Cause | None:
    """A value is too large for the dtype that it is converted to."""
    call = evidence.call
    given = call.tensors.get("src") or call.tensors.get("self")
    if given is None or call.result is None or not is_bad(call.made):
        return None
    is_integer = not given.dtype.is_floating_point and not given.dtype.is_complex
    if not overflows(call) and not is_integer:
        return None
    largest, most = call.absmax("src", "self"), limit(call.made.dtype)
    source, dtype = dtype_name(given.dtype), dtype_name(call.made.dtype)
    reach = ", which has no Inf"
    if largest is not None:
        times = f"{largest / most:.3g} times the largest {dtype}, {text.largest(call.made.dtype)}"
        reach = f" and reaches {figure(largest, most)}, {times}"
    return Cause(
        f"conversion to {dtype} overflows",
        f"{named(given)} is {source}{reach}",
        _cast_remedy(given, call.made.dtype),
    )


def _cast_remedy(given: Operand, dtype: torch.dtype) -> str:
    if dtype.itemsize == 1:
        name = dtype_name(dtype)
        return (
            f"scale it into the range first: scale = (x.abs().amax() / torch.finfo(torch.{name})"
            f".max).clamp(min={safe_eps(given.dtype):g}); (x / scale).to(torch.{name})"
        )
    if not given.dtype.is_floating_point:
        return "x.float(), and compute what follows in float32"
    if given.stats is not None and given.stats.min == -limit(given.dtype):
        return (
            f"make the mask in the dtype that uses it: torch.finfo(torch.{dtype_name(dtype)}).min"
        )
    return f"leave it in {dtype_name(given.dtype)} here, and compute what follows in it"


@rule(functions=("add",))
def smallest_numbers_add_up(evidence: OpEvidence) -> Cause | None:
    """Masks of the smallest number of a dtype: a sum with a score, or of two masks, is -Inf."""
    call = evidence.call
    made = call.result
    if made is None or made.stats is None or not made.stats.neginf_count or not overflows(call):
        return None
    most = limit(made.dtype)
    masks = [o for o in call.tensors.values() if o.stats is not None and o.stats.min == -most]
    if not masks or made.stats.nan_count or made.stats.posinf_count:
        return None
    dtype = dtype_name(made.dtype)
    return Cause(
        f"a mask of the smallest {dtype} is added to negative numbers: the sum is -Inf",
        f"{named(masks[0])} goes down to -{text.largest(made.dtype)}, the smallest {dtype}; "
        f"{made_counts(call)}",
        "scores.masked_fill(~mask, torch.finfo(scores.dtype).min) in the place of scores + mask; "
        "masks that are bool combine with &",
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
        _wider(call),
    )


def _spread(operand: Operand) -> str:
    """Mean, std and absmax of a tensor where they are known, else its range."""
    stats = operand.stats
    if stats is None or stats.min is None or stats.max is None:
        return f"{named(operand)} is not known"
    if not operand.has_moments:
        return f"{named(operand)} is in [{figure(stats.min)}, {figure(stats.max)}]"
    mean, std, most = (figure(x or 0.0) for x in (stats.mean, stats.std, stats.absmax))
    return f"{named(operand)} has mean {mean}, std {std}, absmax {most}"


@rule(functions=("div",))
def small_divisor(evidence: OpEvidence) -> Cause | None:
    """A division by values that are not 0, but so small that the quotient overflows."""
    call = evidence.call
    least = call.smallest("other")
    if least is None or least >= 1 or not overflows(call):
        return None
    below, top = call.stats("other"), call.absmax("self") or 0.0
    remedy = _wider(call)
    if below is not None and below.min is not None and evidence.location.node == "":
        eps = 2 * top / limit(call.made.dtype)
        is_positive = below.min > 0
        remedy = f"x / y.clamp({f'min={eps:.1g}' if is_positive else f'max=-{eps:.1g}'})"
    return Cause(
        f"division by values close to 0 overflows {dtype_name(call.made.dtype)}",
        f"the numerator reaches {figure(top)}, the denominator goes down to {figure(least)}; "
        f"{made_counts(call)}",
        remedy,
    )


@rule(directions=("forward", "backward"))
def overflow(evidence: OpEvidence) -> Cause | None:
    """A sum, product or power overflows, in forward or backward."""
    call = evidence.call
    if call.function in _CASTS or not overflows(call) or smallest_numbers_add_up(evidence):
        return None
    location, dtype = evidence.location, call.made.dtype
    return Cause(
        f"{call.function} overflows {dtype_name(dtype)}{_in_backward(location)}"
        f"{but_not_in_backward(location)}",
        f"{reaches(call)}; {made_counts(call)}",
        _norm_remedy(call, evidence.location.op) or _wider(call),
    )


def _in_backward(location: Location) -> str:
    return f" in the backward of {location.node}" if location.direction == "backward" else ""


def _norm_remedy(call: OpCall, op: str) -> str:
    """What to do about a norm that overflows though each value is finite; "" of another op."""
    if call.function not in ("linalg_vector_norm", "norm"):
        return ""
    if "_foreach_norm" in op:  # as in clip_grad_norm_
        return "torch.nn.utils.clip_grad_value_(model.parameters(), 1.0) before the norm is taken"
    if call.made.dtype.itemsize < 4:  # noqa: PLR2004 - bytes of float32
        return "keep it in float32: x.float().norm()"
    return "scale = x.abs().amax(); scale * (x / scale).norm()"


def _wider(call: OpCall) -> str:
    """What to do about values that are too large for a dtype."""
    dtype, largest = call.made.dtype, bound(call)
    if call.function in RANGES and dtype.itemsize < 4:  # noqa: PLR2004 - bytes of float32
        return f"torch.{call.function}(..., dtype=torch.float32), and compute what follows in it"
    if dtype in (torch.float16, torch.bfloat16, torch.float32):
        wide = torch.float64 if dtype == torch.float32 else torch.float32
        if largest is not None and largest < limit(wide):
            if wide is torch.float64:
                return (
                    "normalise what feeds it: values this large have mostly diverged. float64 "
                    "holds them: x.double()"
                )
            return "keep this place in float32: x.float() of what goes into it"
    return "normalise what feeds it"
