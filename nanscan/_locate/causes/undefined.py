"""Rules about arguments for which a function, or its derivative, is not defined."""

from __future__ import annotations

import math

import torch

from nanscan._data import causes
from nanscan._data.cause import Cause
from nanscan._data.causes import UNMASK
from nanscan._data.location import Location, Operand
from nanscan._data.text import dtype_name, figure
from nanscan._locate.causes.evidence import OpEvidence, rule
from nanscan._locate.causes.op_call import (
    OpCall,
    absmax,
    is_bad,
    makers,
    node_function,
    op_function,
)
from nanscan._locate.causes.singularities import (
    Domain,
    Outside,
    domain_of,
    domain_of_node,
    is_rounding,
    safe_eps,
    zeros,
)
from nanscan._locate.causes.wording import but_not_in_backward, hidden, made_counts, named

_DECOMPOSITIONS = ("linalgsvd", "linalgeigh", "linalgeig")
_TRIANGULAR = {"linalgqr": "QR", "linalgcholeskyex": "Cholesky"}
_NEVER_OVERFLOWS = 1e6  # values up to this, divided by ones that are not close to 0
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
        by = hidden(location)
        return Cause(
            f"{masked} does not stop 0 * Inf = NaN in the backward of {function}",
            f"{'; '.join(numbers)}; where {by or masked} drops its result the gradient is 0"
            f"{_zero_gradients(location)}",
            _where_remedy(found, location),
        )
    at = " and ".join(outside.kinds) if outside else ""
    remedy = found.remedy.format(eps=safe_eps(evidence.call.made.dtype))
    return causes.undefined_derivative(
        "; ".join(numbers), function, at, remedy or _where_remedy(found, location)
    )


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
    """Whether NaN was made of a gradient that has zeros, as 0 * Inf gives it."""
    op = location.consequence or location.at
    has_nan = any(r.stats is not None and r.stats.nan_count for r in op.results)
    return has_nan and bool(_zero_gradients(location))


def _zero_gradients(location: Location) -> str:
    """In brackets: the zeros in the gradient that the op that made NaN took; "" else."""
    op = location.consequence or location.at
    held = next((text for o in op.operands if not is_bad(o) and (text := zeros(o))), "")
    return f" ({held})" if held else ""


def _where_remedy(found: Domain, location: Location) -> str:
    name = node_function(location.node)
    if location.forward is not None or not location.node:
        name = op_function((location.forward or location.at).name)
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
    then = ", then 0 * -Inf" if times_log else but_not_in_backward(evidence.location)
    by = "" if then else hidden(evidence.location)
    return Cause(
        f"{found.what} {' and '.join(outside.kinds)}{then}",
        f"{where} has {outside}; {made_counts(call)}" + (f"; {by} drops it" if by else ""),
        _remedy(evidence, found, times_log=times_log),
    )


def _remedy(evidence: OpEvidence, found: Domain, *, times_log: bool) -> str:
    """What to do about an argument outside of a domain."""
    call, location = evidence.call, evidence.location
    argument = call.tensors.get(found.argument)
    if location.hidden_by is not None and op_function(location.hidden_by.name) in _SELECTS:
        return _where_remedy(found, location)
    if argument is not None and not is_rounding(argument, found):
        return _formula_remedy(call, argument)
    if times_log:
        return _times_log_remedy(location, argument)
    if call.function in ("log", "log2", "log10") and argument is not None:
        maker = next(makers(argument), None)
        if maker is not None and "softmax" in maker.function:
            return "F.log_softmax(x, dim) in the place of softmax and log"
    if found.what.startswith("division by"):
        return _division_remedy(call, found)
    return found.remedy.format(eps=safe_eps(call.made.dtype)) or _where_remedy(found, location)


def _times_log_remedy(location: Location, argument: Operand | None) -> str:
    """What to do about p * log(p) or p * log(q) with p = 0."""
    factors = [] if location.consequence is None else location.consequence.operands
    q = "p" if any(_look_same(factor, argument) for factor in factors) else "q"
    entropy = "torch.special.entr(p), or " if q == "p" else ""
    return (
        f"{entropy}torch.xlogy(p, q), where no gradient is needed; with one: "
        f"torch.xlogy(p, {q}.clamp(min=torch.finfo({q}.dtype).tiny))"
    )


def _look_same(a: Operand, b: Operand | None) -> bool:
    """Whether two operands are most likely the same tensor."""
    if b is None or a.stats is None or b.stats is None or a.made_by != b.made_by:
        return False
    return (a.shape, a.stats.min, a.stats.max) == (b.shape, b.stats.min, b.stats.max)


def _formula_remedy(call: OpCall, argument: Operand) -> str:
    made = f" ({argument.made_by})" if argument.made_by else ""
    text = f"mend the formula that made {argument.name}{made}: a clamp would hide that it is wrong"
    if call.function == "pow":
        text += "; x.sign() * x.abs() ** p where that is meant"
    return text


def _division_remedy(call: OpCall, found: Domain) -> str:  # noqa: PLR0911 - a table
    """What to do about a division by 0, by the ops that made its operands."""
    above, below = (next(makers(call.tensors.get(n)), None) for n in ("self", found.argument))
    eps = safe_eps(call.made.dtype)
    if found.argument not in call.tensors:  # a number
        enough = 4 * (call.absmax("self") or 0.0) / torch.finfo(call.made.dtype).max
        return f"x / max(y, {max(eps, enough):.1g}), where y >= 0"
    pair = tuple("" if maker is None else maker.function for maker in (above, below))
    if pair == ("exp", "sum"):
        return f"F.softmax(scores, dim=-1); of rows that are fully masked: {UNMASK}"
    if pair[1] in ("linalg_vector_norm", "norm"):
        return f"F.normalize(x, dim=-1), with eps={eps:g}: it divides by norm.clamp(min=eps)"
    if pair[1] in ("std", "var"):
        return f"(x - mean) / (std + eps) with eps={eps:g}"
    if _is_count(call.tensors.get(found.argument)):
        return "total / count.clamp(min=1)"
    divisor = call.stats(found.argument)
    if divisor is None or divisor.min is None or divisor.min < 0:
        return _DIVISOR
    if pair[1] == "sum":
        return f"x / x.sum().clamp(min={eps:g}); where it is a count, .clamp(min=1)"
    if call.made.dtype == torch.float16:
        return _DIVISOR
    return f"x / y.clamp(min=eps) with eps={eps:g}, where y >= 0; or {_DIVISOR}"


_DIVISOR = "y = torch.where(y == 0, 1, y) before the division"


def _is_count(operand: Operand | None) -> bool:
    """Whether a tensor is a sum of integers, or a conversion of them."""
    if operand is None or operand.maker is None or not operand.maker.operands:
        return False
    source = operand.maker.operands[0].dtype
    function = op_function(operand.maker.name)
    if function == "count_nonzero":
        return True
    return (
        function in ("_to_copy", "sum") and not source.is_floating_point and not source.is_complex
    )


@rule(functions=("div", "reciprocal"))
def scale_of_zeros(evidence: OpEvidence) -> Cause | None:
    """A scale is the largest magnitude of a tensor, as for float8, and the tensor is all zeros."""
    call = evidence.call
    found = domain_of(call)
    scale = None if found is None else call.tensors.get(found.argument)
    if scale is None or not (held := zeros(scale)):
        return None
    before = [maker.function for maker in makers(scale)]
    if not {"amax", "max"} & set(before) or "abs" not in before:
        return None
    return Cause(
        "a scale is 0: it is the largest magnitude of values that are all 0",
        f"{named(scale)} ({scale.made_by}) has {held}; {made_counts(call)}",
        f"scale.clamp(min={safe_eps(scale.dtype):g}) before the division",
    )


@rule(functions=("div",))
def integer_zero(evidence: OpEvidence) -> Cause | None:
    """A division by an integer tensor: it is not scanned, but only its zeros can be the cause."""
    call = evidence.call
    below = call.tensors.get("other")
    if below is None or below.stats is not None or call.has_bad_argument:
        return None
    if below.integers is not None and not below.integers.zero_count:
        return None
    if below.dtype.is_floating_point or below.dtype.is_complex:
        return None
    return Cause(
        "division by a count of 0",
        f"{named(below)} is {dtype_name(below.dtype)}; the numerator is finite, up to "
        f"{figure(call.absmax('self') or 0.0)}; {made_counts(call)}",
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
        what = "a negative base with a fractional exponent"
        held = f"bases down to {figure(base.min)}"
    elif exponent.min < 0 and (held := zeros(call.tensors["self"])):
        what, held = "a base of zero with a negative exponent", f"{held} as base"
    else:
        return None
    return Cause(
        f"power of {what}",
        f"{held}, exponents in [{figure(exponent.min)}, {figure(exponent.max or 0.0)}]; "
        f"{made_counts(call)}",
        "x.sign() * x.abs() ** p where that is meant"
        if base.min < 0
        else "torch.where(x == 0, 1, x) ** p",
    )


@rule(functions=("div",))
def equal_singular_values(evidence: OpEvidence) -> Cause | None:
    """The derivative of eigenvectors divides by differences of eigenvalues."""
    node, below = evidence.location.node, evidence.call.tensors.get("other")
    if node_function(node) not in _DECOMPOSITIONS:
        return None
    if below is None or not (held := zeros(below)):
        return None
    is_difference = below.shape[-2:-1] == below.shape[-1:]
    return Cause(
        "two equal eigenvalues or singular values: the derivative of their vectors is not defined"
        if is_difference
        else "a singular value of 0: the derivative of its vectors is not defined",
        f"{node} divides by {'differences of ' if is_difference else ''}them, with {held}",
        "torch.linalg.svdvals(A) or eigvalsh(A) if the vectors need no gradient: theirs is defined",
    )


@rule(directions=("backward",), functions=("linalg_solve_triangular",))
def triangle_without_full_rank(evidence: OpEvidence) -> Cause | None:
    """The derivatives of QR and Cholesky divide by the diagonal of the triangular factor."""
    node, call = evidence.location.node, evidence.call
    what = _TRIANGULAR.get(node_function(node))
    given = list(call.tensors.values())
    if what is None or any(map(is_bad, given)) or max(map(absmax, given)) > _NEVER_OVERFLOWS:
        return None
    return Cause(
        f"the derivative of {what} is not defined for a matrix without full rank",
        f"{node} divides by the diagonal of its triangular factor, of which an element is 0 or "
        f"close to it; {made_counts(call)}",
        "",
    )
