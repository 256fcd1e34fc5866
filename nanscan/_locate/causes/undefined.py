"""Rules about arguments for which a function, or its derivative, is not defined."""

from __future__ import annotations

import math

from nanscan._data import causes
from nanscan._data.cause import Cause
from nanscan._data.causes import UNMASK
from nanscan._data.location import Location, Operand
from nanscan._data.text import dtype_name
from nanscan._locate.causes.evidence import OpEvidence, rule
from nanscan._locate.causes.op_call import OpCall, node_function
from nanscan._locate.causes.singularities import (
    Domain,
    Outside,
    domain_of,
    domain_of_node,
    zeros,
)
from nanscan._locate.causes.wording import made_counts, named

_DECOMPOSITIONS = ("linalgsvd", "linalgeigh", "linalgeig")
_SELECTS = ("where", "masked_fill", "masked_select", "index", "index_put", "masked_scatter")


@rule(directions=("backward",))
def undefined_derivative(evidence: OpEvidence) -> Cause | None:
    """The derivative is not finite for the argument: Inf, or NaN where the gradient is 0."""
    location = evidence.location
    forward = None if location.forward is None else evidence.forward_call
    found = domain_of(forward) if forward is not None else domain_of_node(location.node)
    if found is None:
        return None
    outside = found.outside(_argument(forward, found), backward=True) if forward else Outside()
    divided = _divided_by_zero(evidence)
    if not outside and not divided:
        return None
    numbers = [f"its argument has {outside}"] if outside else []
    numbers += [divided] if divided else []
    function, masked = found.what.rpartition(" ")[0], masked_by(location)
    if masked and _has_zero_times_inf(location):
        return Cause(
            f"{masked} does not stop 0 * Inf = NaN in the backward of {function}",
            f"{'; '.join(numbers)}; where {masked} drops its result the gradient is 0"
            f"{_zero_gradients(location)}",
            _where_remedy(found, location),
        )
    at = " and ".join(outside.kinds) if outside else ""
    return causes.undefined_derivative("; ".join(numbers), function, at, found.remedy)


def _argument(call: OpCall | None, found: Domain) -> Operand | float | None:
    if call is None:
        return None
    return call.tensors.get(found.argument) or call.number(found.argument)


def _divided_by_zero(evidence: OpEvidence) -> str:
    """Says that the formula of a derivative took values outside of a domain, such as x / 0."""
    call = evidence.call
    found = domain_of(call)
    if found is None:
        return ""
    outside = found.outside(_argument(call, found))
    return f"{evidence.location.node} computes {found.what} {outside}" if outside else ""


def masked_by(location: Location) -> str:
    """What selected from the forward result: "torch.where"; "" where nothing is known to."""
    functions = [name.split(".")[1].removesuffix("_") for name in location.consumers if "." in name]
    selects = next((name for name in functions if name in _SELECTS), "")
    if selects:
        return "indexing" if selects.startswith("index") else f"torch.{selects}"
    return "multiplication by 0" if "mul" in functions else ""


def _has_zero_times_inf(location: Location) -> bool:
    """Whether NaN was made, as 0 * Inf gives it."""
    ops = [op for op in (location.at, location.consequence) if op is not None]
    return any(r.stats is not None and r.stats.nan_count for op in ops for r in op.results)


def _zero_gradients(location: Location) -> str:
    """In brackets: the zeros in the gradient that the op that made NaN took; "" else."""
    op = location.consequence or location.at
    held = zeros(op.operands[0]) if op.operands else ""
    return f" ({held})" if held else ""


def _where_remedy(found: Domain, location: Location) -> str:
    name = location.forward.name.split(".")[1] if location.forward else node_function(location.node)
    written = {"div": "y / safe", "pow": "safe ** p", "reciprocal": "1 / safe"}
    safe = written.get(name, f"safe.{name}()")
    inside = "x != 0" if found.pole == 0 else f"x > {found.low:g}"
    if found.high < math.inf:
        inside = f"(x > {found.low:g}) & (x < {found.high:g})"
    value = 1 if found.high == math.inf else (found.low + found.high) / 2
    return (
        "make the argument safe before the function: "
        f"ok = {inside}; safe = torch.where(ok, x, {value:g}); torch.where(ok, {safe}, 0)"
    )


@rule(directions=("forward", "optimizer"))
def outside_of_domain(evidence: OpEvidence) -> Cause | None:
    """A forward op, or one of an optimizer, has an argument outside of its domain."""
    call = evidence.call
    found = domain_of(call)
    if found is None or not (outside := found.outside(_argument(call, found))):
        return None
    argument = call.tensors.get(found.argument)
    where = named(argument) if argument is not None else found.argument
    after = evidence.location.consequence
    times_log = after is not None and ".mul" in after.name and "log" in call.function
    return Cause(
        f"{found.what} {' and '.join(outside.kinds)}" + (", then 0 * -Inf" if times_log else ""),
        f"{where} has {outside}; {made_counts(call)}",
        "torch.special.entr(p), or torch.xlogy(p, q): they give 0 for p = 0"
        if times_log
        else _division_remedy(call) or found.remedy,
    )


def _division_remedy(call: OpCall) -> str:
    """What to do about a division by 0, by the ops that made its operands; "" if unknown."""
    above, below = (call.tensors[n].made_by if n in call.tensors else "" for n in ("self", "other"))
    if "aten.exp." in above and "aten.sum." in below:
        return f"F.softmax(scores, dim=-1); of rows that are fully masked: {UNMASK}"
    for maker, remedy in _DIVISORS.items():
        if f"aten.{maker}." in below:
            return remedy
    return ""


_DIVISORS = {
    **dict.fromkeys(
        ("linalg_vector_norm", "norm"),
        "F.normalize(x, dim=-1), which divides by norm.clamp(1e-12)",
    ),
    **dict.fromkeys(("std", "var"), "(x - mean) / (std + eps)"),
    **dict.fromkeys(("count_nonzero", "_to_copy"), "total / count.clamp(min=1)"),
    "sum": "x / x.sum().clamp(min=1e-12); where it is a count, .clamp(min=1)",
}


@rule(functions=("div",))
def integer_zero(evidence: OpEvidence) -> Cause | None:
    """A division by an integer tensor: it is not scanned, but only its zeros can be the cause."""
    call = evidence.call
    below = call.tensors.get("other")
    if below is None or below.stats is not None or call.has_bad_argument:
        return None
    if below.dtype.is_floating_point or below.dtype.is_complex:
        return None
    return Cause(
        "division by a count of 0",
        f"{named(below)} is {dtype_name(below.dtype)}; the numerator is finite, up to "
        f"{call.absmax('self') or 0.0:.6g}; {made_counts(call)}",
        "total / count.clamp(min=1)",
    )


@rule(functions=("pow",))
def negative_base(evidence: OpEvidence) -> Cause | None:
    """A power of two tensors. That it has NaN shows that some base does not fit its exponent."""
    call = evidence.call
    base, exponent, made = call.stats("self"), call.stats("exponent"), call.result
    if base is None or exponent is None or made is None or call.has_bad_argument:
        return None
    if made.stats is None or base.min is None or exponent.min is None:
        return None
    if made.stats.nan_count and base.min < 0:
        what, held = "a negative base with a fractional exponent", f"bases down to {base.min:.6g}"
    elif exponent.min < 0 and (held := zeros(call.tensors["self"])):
        what, held = "a base of zero with a negative exponent", f"{held} as base"
    else:
        return None
    return Cause(
        f"power of {what}",
        f"{held}, exponents in [{exponent.min:.6g}, {exponent.max:.6g}]; {made_counts(call)}",
        "(x.clamp(min=0) + eps) ** p, or x.sign() * x.abs() ** p where that is meant",
    )


@rule(functions=("div",))
def equal_singular_values(evidence: OpEvidence) -> Cause | None:
    """The derivative of eigenvectors divides by differences of eigenvalues."""
    node, below = evidence.location.node, evidence.call.tensors.get("other")
    if node_function(node) not in _DECOMPOSITIONS:
        return None
    if below is None or not (held := zeros(below)):
        return None
    return Cause(
        "two equal eigenvalues or singular values: the derivative of their vectors is not defined",
        f"{node} divides by differences of them, with {held}",
        "use torch.linalg.svdvals or eigvalsh if the vectors need no gradient; break the ties: "
        "A + 1e-6 * torch.diag(torch.rand(n))",
    )
