"""Causes that lie outside of where a function, or its derivative, is defined."""

from __future__ import annotations

import math

from nanscan._data.cause import Cause
from nanscan._data.location import Location, Operand
from nanscan._data.text import dtype_name
from nanscan._locate.causes.calls import Call, call, given_bad, made_counts, named, node_function
from nanscan._locate.causes.domains import Domain, Outside, domain, domain_of_node, zeros
from nanscan._locate.causes.shape import UNMASK

_SELECTS = ("where", "masked_fill", "masked_select", "index", "index_put", "masked_scatter")


def undefined_derivative(location: Location) -> Cause | None:
    """The derivative of a function at the end of its domain: Inf, and NaN times a gradient of 0."""
    if location.direction != "backward":
        return None
    forward = None if location.forward is None else call(location.forward)
    found = domain(forward) if forward is not None else domain_of_node(location.node)
    if found is None:
        return None
    outside = found.outside(_argument(forward, found), backward=True) if forward else Outside()
    divided = _divided_by_zero(location)
    if not outside and not divided:
        return None
    evidence = [f"its argument has {outside}"] if outside else []
    evidence += [divided] if divided else []
    function, masked = found.what.rpartition(" ")[0], masked_by(location)
    if masked and _has_zero_times_inf(location):
        return Cause(
            f"{masked} does not stop 0 * Inf = NaN in the backward of {function}",
            f"{'; '.join(evidence)}; where {masked} drops its result the gradient is 0"
            f"{_zero_gradients(location)}",
            _where_remedy(found, location),
        )
    return Cause(
        f"the derivative of {function} is not finite"
        + (f" at {' and '.join(outside.kinds)}" if outside else ""),
        "; ".join(evidence),
        found.remedy,
    )


def _argument(c: Call | None, found: Domain) -> Operand | float | None:
    if c is None:
        return None
    return c.tensors.get(found.argument) or c.number(found.argument)


def _divided_by_zero(location: Location) -> str:
    """What the formula of a derivative divided by, if that holds zeros."""
    c = call(location.at)
    found = domain(c)
    if found is None:
        return ""
    outside = found.outside(_argument(c, found))
    return f"{location.node} computes {found.what} {outside}" if outside else ""


def masked_by(location: Location) -> str:
    """What took a part of the forward result: "torch.where"; "" if nothing known."""
    functions = [name.split(".")[1].removesuffix("_") for name in location.consumers if "." in name]
    selects = next((name for name in functions if name in _SELECTS), "")
    if selects:
        return "indexing" if selects.startswith("index") else f"torch.{selects}"
    return "multiplication by 0" if "mul" in functions else ""


def _has_zero_times_inf(location: Location) -> bool:
    """Whether NaN was made, out of gradients that may be 0."""
    ops = [op for op in (location.at, location.consequence) if op is not None]
    return any(r.stats is not None and r.stats.nan_count for op in ops for r in op.results)


def _zero_gradients(location: Location) -> str:
    """In brackets: the zeros of the gradient that came in, which the op that made NaN took."""
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


def outside_of_domain(location: Location) -> Cause | None:
    """In the forward, or in an optimizer."""
    if location.direction == "backward":
        return None
    c = call(location.at)
    found = domain(c)
    if found is None or not (outside := found.outside(_argument(c, found))):
        return None
    argument = c.tensors.get(found.argument)
    where = named(argument) if argument is not None else found.argument
    after = location.consequence
    times_log = after is not None and ".mul" in after.name and "log" in c.function
    return Cause(
        f"{found.what} {' and '.join(outside.kinds)}" + (", then 0 * -Inf" if times_log else ""),
        f"{where} has {outside}; {made_counts(c)}",
        "torch.special.entr(p), or torch.xlogy(p, q): they give 0 for p = 0"
        if times_log
        else _division_remedy(c) or found.remedy,
    )


def _division_remedy(c: Call) -> str:
    """By what made the numerator and the denominator."""
    above, below = (c.tensors[n].made_by if n in c.tensors else "" for n in ("self", "other"))
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


def integer_zero(location: Location) -> Cause | None:
    """Whole numbers are not scanned. Of them, only 0 makes a finite quotient non-finite."""
    c = call(location.at)
    below = c.tensors.get("other")
    if c.function != "div" or below is None or below.stats is not None or given_bad(c):
        return None
    if below.dtype.is_floating_point or below.dtype.is_complex:
        return None
    return Cause(
        "division by a count of 0",
        f"{named(below)} is {dtype_name(below.dtype)}; the numerator is finite, up to "
        f"{c.absmax('self') or 0.0:.6g}; {made_counts(c)}",
        "total / count.clamp(min=1)",
    )


def negative_base(location: Location) -> Cause | None:
    """A power of two tensors: its exponents are not known one by one, its NaN are proof enough."""
    c = call(location.at)
    base, exponent, made = c.stats("self"), c.stats("exponent"), c.result
    if c.function != "pow" or base is None or exponent is None or made is None or given_bad(c):
        return None
    if made.stats is None or base.min is None or exponent.min is None:
        return None
    if made.stats.nan_count and base.min < 0:
        what, held = "a negative base with a fractional exponent", f"bases down to {base.min:.6g}"
    elif exponent.min < 0 and (held := zeros(c.tensors["self"])):
        what, held = "a base of zero with a negative exponent", f"{held} as base"
    else:
        return None
    return Cause(
        f"power of {what}",
        f"{held}, exponents in [{exponent.min:.6g}, {exponent.max:.6g}]; {made_counts(c)}",
        "(x.clamp(min=0) + eps) ** p, or x.sign() * x.abs() ** p where that is meant",
    )


def equal_singular_values(location: Location) -> Cause | None:
    """Derivatives of eigenvectors divide by differences of eigenvalues."""
    c = call(location.at)
    if node_function(location.node) not in ("linalgsvd", "linalgeigh", "linalgeig"):
        return None
    below = c.tensors.get("other")
    if c.function != "div" or below is None or not (held := zeros(below)):
        return None
    return Cause(
        "two equal eigenvalues or singular values: the derivative of their vectors is not defined",
        f"{location.node} divides by differences of them, with {held}",
        "use torch.linalg.svdvals or eigvalsh if the vectors need no gradient; break the ties: "
        "A + 1e-6 * torch.diag(torch.rand(n))",
    )
