"""Rules that speak against common suspicions. Each returns a sentence with the numbers."""

from __future__ import annotations

from nanscan._data.text import dtype_name, plural, share
from nanscan._locate.causes.bounds import bound, limit
from nanscan._locate.causes.evidence import OpEvidence, rule
from nanscan._locate.causes.masks import SOFTMAX
from nanscan._locate.causes.op_call import absmax, is_bad
from nanscan._locate.causes.overflow import exponential
from nanscan._locate.causes.singularities import domain_of
from nanscan._locate.causes.undefined import masked_by

_FAR_FROM_LIMIT = 0.01
_NARROW = 2  # bytes: in dtypes of 16 bits or less, overflow is a common suspicion


@rule()
def no_overflow(evidence: OpEvidence) -> str | None:
    """The arguments are too small for an overflow."""
    call = evidence.call
    operands = [
        o for o in call.tensors.values() if o.stats is not None and o.stats.absmax is not None
    ]
    if call.result is None or not operands or not call.result.dtype.is_floating_point:
        return None
    largest = max(map(absmax, operands))
    most, reached = limit(call.result.dtype), bound(call)
    if (most * _FAR_FROM_LIMIT if reached is None else most) <= (reached or largest):
        return None
    if exponential(evidence) is not None or call.result.dtype.itemsize > _NARROW:
        return None
    return (
        f"overflow: unlikely because operands reach {largest:.6g}, {share(largest, most)} of "
        f"{dtype_name(call.result.dtype)}'s largest {most:.6g}"
    )


@rule()
def no_bad_data(evidence: OpEvidence) -> str | None:
    """All arguments are finite."""
    location = evidence.location
    known = [o for o in location.operands if o.stats is not None]
    if not known or any(map(is_bad, known)):
        return None
    return (
        f"bad data or weights: unlikely because {location.op} was given "
        f"{plural(len(known), 'tensor')} without a non-finite value"
    )


@rule(functions=("div", "addcdiv"))
def no_division_by_zero(evidence: OpEvidence) -> str | None:
    """The denominator has no zero."""
    name = "other" if evidence.call.function == "div" else "tensor2"
    least = evidence.call.smallest(name)
    if least is None:
        return None
    return f"division by zero: unlikely because the smallest magnitude of {name} is {least:.3g}"


@rule(functions=SOFTMAX, of_forward=True)
def no_masked_row(evidence: OpEvidence) -> str | None:
    """The softmax took no -Inf."""
    stats = evidence.forward_call.stats("self")
    if stats is None or stats.neginf_count:
        return None
    return "a fully masked row: unlikely because the softmax was given no -Inf"


@rule(directions=("backward",))
def no_where_trap(evidence: OpEvidence) -> str | None:
    """No torch.where, or the like, took the result of a function that is not defined everywhere."""
    location = evidence.location
    if location.forward is None or not location.consumers:
        return None
    if domain_of(evidence.forward_call) is None or masked_by(location):
        return None
    taken = ", ".join(location.consumers)
    return (
        f"the torch.where trap: unlikely because only {taken} took what {location.forward.name} "
        "returned"
    )
