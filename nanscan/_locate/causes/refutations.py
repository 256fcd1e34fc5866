"""Rules that speak against common suspicions. Each returns a sentence with the numbers."""

from __future__ import annotations

from nanscan._data.text import dtype_name, figure, largest, share
from nanscan._locate.causes.bounds import bound, limit
from nanscan._locate.causes.evidence import OpEvidence, rule
from nanscan._locate.causes.masks import SOFTMAX
from nanscan._locate.causes.op_call import absmax
from nanscan._locate.causes.singularities import domain_of

_NARROW = 2  # bytes: in dtypes of 16 bits or less, overflow is a common suspicion
# What these return for a finite argument inside of their domain is far from the limit of any dtype.
_NEVER_OVERFLOW: tuple[str, ...] = ("log", "log2", "log10", "log1p", "sqrt", "rsqrt", "logit")
_NEVER_OVERFLOW += ("acos", "asin", "atanh", "acosh", "erfinv")


@rule()
def no_overflow(evidence: OpEvidence) -> str | None:
    """The result is bounded, or the function cannot overflow, and nothing before it has."""
    call = evidence.call
    if (
        evidence.location.follows_others
        or call.result is None
        or call.has_bad_argument
        or not call.result.dtype.is_floating_point
    ):
        return None
    if call.result.dtype.itemsize > _NARROW or any(o.stats is None for o in call.tensors.values()):
        return None
    most, reached = limit(call.result.dtype), bound(call)
    is_proven = reached < most if reached is not None else call.function in _NEVER_OVERFLOW
    top = max(map(absmax, call.tensors.values()), default=0.0)
    if not is_proven or not top:
        return None
    return (
        f"overflow: unlikely because operands reach {figure(top)}, {share(top, most)} of "
        f"{dtype_name(call.result.dtype)}'s largest {largest(call.result.dtype)}"
    )


@rule(functions=("div", "addcdiv"))
def no_division_by_zero(evidence: OpEvidence) -> str | None:
    """The denominator has no zero."""
    name = "other" if evidence.call.function == "div" else "tensor2"
    least = evidence.call.smallest(name)
    if least is None:
        return None
    return f"division by zero: unlikely because the smallest magnitude of {name} is {figure(least)}"


@rule(functions=SOFTMAX, of_forward=True)
def no_masked_row(evidence: OpEvidence) -> str | None:
    """The softmax took no -Inf."""
    stats = evidence.forward_call.stats("self")
    if stats is None or stats.neginf_count:
        return None
    return "a fully masked row: unlikely because the softmax was given no -Inf"


@rule(directions=("backward",), functions=("div", "mul"))
def no_where_trap(evidence: OpEvidence) -> str | None:
    """No torch.where, or the like, dropped a result: its gradient would be 0 there."""
    location = evidence.location
    if location.forward is None or domain_of(evidence.forward_call) is None:
        return None
    gradient = location.operands[0] if location.operands else None
    if gradient is None or gradient.stats is None or not gradient.has_moments:
        return None
    if gradient.stats.zero_count or not gradient.stats.is_finite:
        return None
    return f"the torch.where trap: unlikely because the gradient that {location.node} took has no 0"
