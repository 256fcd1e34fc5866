"""From a location to its likely causes: one small function a cause, each resting on numbers.

A rule returns None unless the numbers it names are there. "No cause found" is an answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from nanscan._judge import Cause
from nanscan._location import Location, Operand
from nanscan._op_facts import (
    PRODUCTS,
    Call,
    Domain,
    Outside,
    bound,
    call,
    domain,
    domain_of_node,
    is_bad,
    largest_exponent,
    limit,
    node_function,
    summed_products,
    zeros,
)
from nanscan._scan import ScanResult

Rule = Callable[[Location], Cause | None]

_SOFTMAX = ("_softmax", "_log_softmax", "_safe_softmax", "softmax", "log_softmax")
_VARIANCES = ("var", "std", "var_mean", "std_mean")
_MEANS = ("mean", "mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy")
_EMPTY = ("empty", "new_empty", "resize", "set")
_SELECTS = ("where", "masked_fill", "masked_select", "index", "index_put", "masked_scatter")
_CASTS = ("_to_copy", "copy")
_FAR_APART = 8.0  # branches of a sum, by their largest values
_FAR_FROM_LIMIT = 0.01
_NARROW = 2  # bytes: overflow is a common suspicion of 16-bit types and narrower ones


def causes(location: Location) -> list[Cause]:
    """Likely causes of a location, best first."""
    found = []
    for rules in _RULES:
        named = (rule(location) for rule in rules)
        found += [cause for cause in named if cause is not None][:1]
    return found


def refuted(location: Location) -> list[str]:
    """Common suspicions that the numbers speak against, with these numbers."""
    if location.verdict != "origin":
        return []
    found = [check(location) for check in _REFUTATIONS]
    return [line for line in found if line]


# What was bad before ----------------------------------------------------------------------------


def _bad_from_outside(location: Location) -> Cause | None:
    if location.verdict != "propagated":
        return None
    bad = next(filter(is_bad, location.operands), None)
    if bad is None or bad.stats is None:
        return None
    held = f"{_named(bad)} held {_bad_counts(bad.stats)} when {location.op} first read it"
    if bad.what.startswith("gradient of "):
        return Cause(
            f"the {bad.what} was bad before it was watched",
            held,
            "watch its backward too: nanscan.locate(lambda: loss_of(batch).backward())",
        )
    if bad.what and not bad.what.startswith("aten."):
        return Cause(
            f"{bad.what} was bad before anything ran",
            held,
            "it went bad in an earlier step: nanscan.replay that one, or load a checkpoint that is "
            "finite. If it was never initialised, call reset_parameters() after to_empty()",
        )
    return Cause(
        "the data was bad before anything ran",
        held,
        "drop or repair the sample where it is loaded: assert torch.isfinite(batch).all()",
    )


def _uninitialised_memory(location: Location) -> Cause | None:
    function = call(location.at).function
    if not function.startswith(_EMPTY):
        return None
    result = call(location.at).result
    held = f" of {list(result.shape)}" if result is not None else ""
    reader = location.consequence
    read = f"{reader.name} read it" if reader is not None else "it was read"
    seen = "" if reader is None else _seen_by(call(reader))
    return Cause(
        "memory was read that nothing had been written to",
        f"{location.op} returns memory{held} as it was found; {read}{seen}, and nothing wrote it",
        f"torch.zeros in the place of {_python_name(function)}, or write all of it first",
    )


def _seen_by(reader: Call) -> str:
    bad = next(filter(is_bad, reader.tensors.values()), None)
    return "" if bad is None or bad.stats is None else f" with {_bad_counts(bad.stats)}"


def _python_name(function: str) -> str:
    if function in ("resize", "set"):
        return f"tensor.{function}_"
    return f"tensor.{function}" if function.startswith("new_") else f"torch.{function}"


# Masks ------------------------------------------------------------------------------------------


_UNMASK = (
    "scores.masked_fill(~mask, torch.finfo(scores.dtype).min) in the place of -inf; or let padded "
    "rows see one key and drop them later; F.scaled_dot_product_attention returns 0 for such rows"
)


def _fully_masked_rows(location: Location) -> Cause | None:
    """Of a softmax, or of one whose backward this is."""
    c = _forward_call(location)
    given = c.tensors.get("self")
    if c.function not in (*_SOFTMAX, "logsumexp") or given is None or given.stats is None:
        return None
    dim = c.settings.get("dim", -1)
    dims = dim if isinstance(dim, (list, tuple)) else [dim]
    size = math.prod(given.shape[int(d)] for d in dims) if given.shape else 1
    made = c.results[0].stats if c.results else None
    if made is None or given.stats.nan_count or given.stats.posinf_count:
        return None
    if c.function == "logsumexp":
        rows, rest = made.neginf_count, 0
    else:
        rows, rest = divmod(made.nan_count, size)
    if not rows or rest or given.stats.neginf_count < rows * size:
        return None
    return Cause(
        f"{_plural(rows, 'row')} of the softmax {'is' if rows == 1 else 'are'} fully masked",
        f"{_named(given)} holds {given.stats.neginf_count:,} -Inf; the bad values are "
        f"{_plural(rows, 'whole row')} of {size} along dim {dim}",
        _UNMASK,
    )


def _masked_row_by_hand(location: Location) -> Cause | None:
    """By hand: x - x.max() is -Inf less -Inf, where all of a row is -Inf."""
    c = call(location.at)
    scores, most, made = c.stats("self"), c.stats("other"), c.result
    if c.function != "sub" or scores is None or most is None or made is None or made.stats is None:
        return None
    rows, per_row = most.neginf_count, scores.numel // most.numel if most.numel else 0
    if not rows or per_row <= 1 or made.stats.nan_count != rows * per_row:
        return None
    return Cause(
        f"{_plural(rows, 'row')} of a hand-written softmax {'is' if rows == 1 else 'are'} fully "
        "masked: -Inf - (-Inf)",
        f"{_named(c.tensors['other'])}, the maximum of each row, holds {rows:,} -Inf; the "
        f"{made.stats.nan_count:,} NaN are {_plural(rows, 'whole row')} of {per_row}",
        _UNMASK,
    )


def _masked_query(location: Location) -> Cause | None:
    c = _forward_call(location)
    mask = c.tensors.get("attn_mask") or c.tensors.get("attn_bias")
    made = c.results[0] if c.results else None
    if "scaled_dot_product" not in c.function or mask is None or mask.stats is None:
        return None
    if made is None or made.stats is None or not made.stats.nan_count:
        return None
    keys, width = mask.shape[-1], made.shape[-1]
    rows, rest = divmod(made.stats.nan_count, width)
    if rest or mask.stats.neginf_count < keys:
        return None
    return Cause(
        f"{_plural(rows, 'query row')} of an attention {'is' if rows == 1 else 'are'} fully masked",
        f"{_named(mask)} holds {mask.stats.neginf_count:,} -Inf, {keys} mask a row; the result has "
        f"{_plural(rows, 'whole row')} of {width} NaN",
        _UNMASK,
    )


def _zero_times_inf(location: Location) -> Cause | None:
    """(1 - mask) * -inf: not what is meant, where the mask is 1."""
    c = call(location.at)
    if c.function != "mul" or c.result is None or c.result.stats is None:
        return None
    sides = [c.tensors.get("self"), c.tensors.get("other")]
    factor = c.number("other")
    if factor is not None and not math.isinf(factor):
        return None
    has_inf = factor is not None or any(map(_has_inf, sides))
    held = next((text for s in sides if s and (text := zeros(s))), "")
    if not has_inf or not held or not c.result.stats.nan_count:
        return None
    times = f"{factor:g}" if factor is not None else "Inf"
    return Cause(
        f"0 * {times} is NaN: a mask is not multiplied by {times}",
        f"an operand holds {held}; the product has {c.result.stats.nan_count:,} NaN",
        "scores.masked_fill(mask == 0, float('-inf')) in the place of scores + (1 - mask) * -inf",
    )


def _has_inf(operand: Operand | None) -> bool:
    return operand is not None and operand.stats is not None and operand.stats.inf_count > 0


# Too few values ---------------------------------------------------------------------------------


def _variance_of_too_few(location: Location) -> Cause | None:
    c = _forward_call(location)
    if c.function not in _VARIANCES or (count := c.reduced) is None:
        return None
    correction = c.number("correction")
    if correction is None:
        correction = 0.0 if c.settings.get("unbiased") is False else 1.0
    if count > correction:
        return None
    return Cause(
        "variance of a single value" if count == 1 else f"variance of {count} values",
        f"{c.function} of {list(c.tensors['self'].shape)} takes {_plural(count, 'value')} an "
        f"element, and divides by {count} - {correction:g} = {count - correction:g}",
        f"x.{c.function}(dim, correction=0), or skip batches of fewer than {correction + 1:g}",
    )


def _mean_of_nothing(location: Location) -> Cause | None:
    c = call(location.at)
    given = c.tensors.get("self")
    if c.function not in _MEANS or given is None or _numel(given):
        return None
    if c.number("reduction") not in (None, 1):
        return None
    return Cause(
        "mean over nothing: 0 / 0",
        f"{c.function} of {_named(given)} of shape {list(given.shape)}, which has no element",
        "skip it: x.mean() if x.numel() else x.sum()",
    )


def _all_labels_ignored(location: Location) -> Cause | None:
    c = _forward_call(location)
    weight = c.results[1].stats if len(c.results) > 1 else None
    if c.function not in ("nll_loss_forward", "nll_loss2d_forward") or c.number("reduction") != 1:
        return None
    if weight is None or weight.min != 0 or weight.max != 0:
        return None
    labels = _numel(c.tensors.get("target"))
    weights = c.stats("weight")
    why = f"each is {c.settings.get('ignore_index')}, the ignore_index"
    if weights is not None:
        why += f", or of a class whose weight is 0 (weights are {weights.min:g} to {weights.max:g})"
    return Cause(
        "every label of the batch is ignored: the mean loss is 0 / 0",
        f"the {labels:,} labels have a total weight of 0: {why}",
        "F.cross_entropy(x, y, reduction='sum') / (y != ignore_index).sum().clamp(min=1)",
    )


def _ctc_target_too_long(location: Location) -> Cause | None:
    """Of finite log probabilities, an infinite loss says that no alignment exists."""
    c = call(location.at)
    made = c.results[0].stats if c.results else None
    if c.function != "_ctc_loss" or made is None or not made.posinf_count or _given_bad(c):
        return None
    given, wanted = c.settings.get("input_lengths"), c.settings.get("target_lengths")
    lengths = ""
    if isinstance(given, (list, tuple)) and isinstance(wanted, (list, tuple)):
        short = [(a, b) for a, b in zip(given, wanted, strict=True) if a < b]
        lengths = f", such as one of {short[0][0]} frames for {short[0][1]} labels" if short else ""
    return Cause(
        "CTC: a target is longer than its input, which no alignment can give",
        f"the loss is Inf in {made.posinf_count:,} of {made.numel:,} samples{lengths}; between "
        "equal labels it takes a frame more",
        "drop such samples, or F.ctc_loss(..., zero_infinity=True)",
    )


# Normalisation ----------------------------------------------------------------------------------


def _groups(c: Call) -> int | None:
    """How many variances a normalisation layer divides by; None: it is none."""
    given = c.tensors.get("input")
    if given is None:
        return None
    if c.function in ("native_layer_norm", "_fused_rms_norm"):
        shape = c.settings.get("normalized_shape") or []
        return math.prod(given.shape[: len(given.shape) - len(shape)])
    if c.function == "native_group_norm":
        return int((c.number("N") or 1) * (c.number("group") or 1))
    if "batch_norm" in c.function and "backward" not in c.function and len(given.shape) > 1:
        return given.shape[1]
    return None


def _single_value_a_channel(location: Location) -> Cause | None:
    """In training: running_var is of n - 1 = 0 values."""
    c = _forward_call(location)
    groups = _groups(c)
    if groups is None or "batch_norm" not in c.function or c.settings.get("training") is False:
        return None
    given = c.tensors["input"]
    if math.prod(given.shape) != groups or "no_training" in c.function:
        return None
    return Cause(
        "batch norm in training of one value a channel",
        f"input of {list(given.shape)} has 1 value in each of {groups} channels; running_var is "
        "divided by 1 - 1 = 0",
        "DataLoader(..., drop_last=True), a larger batch, or nn.GroupNorm",
    )


def _zero_variance(location: Location) -> Cause | None:
    c = _forward_call(location)
    groups, eps = _groups(c), c.number("eps") or 0.0
    if groups is None:
        return None
    running = c.stats("running_var")
    if running is not None and c.settings.get("training") is not True:
        if running.min is None or running.min + eps > torch.finfo(running.dtype).tiny:
            return None
        evidence = f"running_var goes down to {running.min:g}, eps is {eps:g}"
    else:
        given = c.tensors["input"]
        # Mean and reciprocal deviation follow the output; running statistics come before it.
        output = next((i for i, r in enumerate(c.results) if r.shape == given.shape), 0)
        inverse = [r.stats for r in c.results[output + 1 :] if r.stats is not None]
        infinite = max((stats.posinf_count for stats in inverse), default=0)
        if not infinite:
            return None
        evidence = (
            f"{infinite:,} of {groups:,} groups of {math.prod(given.shape) // groups} values have "
            f"a variance for which 1 / sqrt(variance + {eps:g}) is Inf"
        )
    return Cause(
        f"{c.function.removeprefix('native_')} divides by a variance of 0 with eps {eps:g}",
        evidence,
        "eps=1e-5; in 16 bits 1e-3; and find what makes all of its input the same",
    )


# Optimizers -------------------------------------------------------------------------------------


def _denominator_zero(location: Location) -> Cause | None:
    """Roots of the second moment are not negative: with an eps, a sum of 0 is an eps of 0."""
    c = call(location.at)
    below = c.tensors.get("tensor2")
    if location.direction != "optimizer" or c.function != "addcdiv" or below is None:
        return None
    if not (held := zeros(below)):
        return None
    dtype = _name(below.dtype)
    return Cause(
        f"the optimizer's eps is 0 in {dtype}: the update divides by sqrt(0) + 0",
        f"its denominator holds {held}; the smallest {dtype} is {_smallest(below.dtype):.1e}",
        "Adam(..., eps=1e-4), or keep parameters in float32 and use torch.autocast",
    )


def _fused_denominator_zero(location: Location) -> Cause | None:
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


def _second_moment_overflow(location: Location) -> Cause | None:
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
        f"the optimizer's second moment overflows {_name(moment.dtype)}: gradients are squared",
        f"{_named(grad)} reaches {largest:.6g}; {largest:.6g}^2 * {share or 1.0:g} = {added:.3g}, "
        f"and {_name(moment.dtype)} ends at {most:.6g}",
        "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0) before the step; float32 "
        "parameters under torch.autocast",
    )


def _update_overflow(location: Location) -> Cause | None:
    c = call(location.at)
    if location.direction != "optimizer" or not _overflows(c):
        return None
    factor = next((n for s in ("alpha", "value", "lr") if (n := c.number(s)) is not None), None)
    return Cause(
        f"the optimizer's update overflows {_name(_made(c).dtype)}",
        f"{_reaches(c)}" + (f"; the step is multiplied by {factor:g}" if factor else ""),
        "a lower learning rate; torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0) before the "
        "step",
    )


# Outside of a function's domain -------------------------------------------------------------------


def _undefined_derivative(location: Location) -> Cause | None:
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
    function, masked = found.what.rpartition(" ")[0], _masked_by(location)
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


def _masked_by(location: Location) -> str:
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


def _outside_of_domain(location: Location) -> Cause | None:
    if location.direction == "backward":
        return None
    c = call(location.at)
    found = domain(c)
    if found is None or not (outside := found.outside(_argument(c, found))):
        return None
    argument = c.tensors.get(found.argument)
    where = _named(argument) if argument is not None else found.argument
    after = location.consequence
    times_log = after is not None and ".mul" in after.name and "log" in c.function
    return Cause(
        f"{found.what} {' and '.join(outside.kinds)}" + (", then 0 * -Inf" if times_log else ""),
        f"{where} has {outside}; {_made_counts(c)}",
        "torch.special.entr(p), or torch.xlogy(p, q): they give 0 for p = 0"
        if times_log
        else _division_remedy(c) or found.remedy,
    )


def _division_remedy(c: Call) -> str:
    """By what made the numerator and the denominator."""
    above, below = (c.tensors[n].what if n in c.tensors else "" for n in ("self", "other"))
    if "aten.exp." in above and "aten.sum." in below:
        return f"F.softmax(scores, dim=-1); of rows that are fully masked: {_UNMASK}"
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


def _integer_zero(location: Location) -> Cause | None:
    """Whole numbers are not scanned. Of them, only 0 makes a finite quotient non-finite."""
    c = call(location.at)
    below = c.tensors.get("other")
    if c.function != "div" or below is None or below.stats is not None or _given_bad(c):
        return None
    if below.dtype.is_floating_point or below.dtype.is_complex:
        return None
    return Cause(
        "division by a count of 0",
        f"{_named(below)} is {_name(below.dtype)}; the numerator is finite, up to "
        f"{c.absmax('self') or 0.0:.6g}; {_made_counts(c)}",
        "total / count.clamp(min=1)",
    )


def _negative_base(location: Location) -> Cause | None:
    """A power of two tensors: its exponents are not known one by one, its NaN are proof enough."""
    c = call(location.at)
    base, exponent, made = c.stats("self"), c.stats("exponent"), c.result
    if c.function != "pow" or base is None or exponent is None or made is None or _given_bad(c):
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
        f"{held}, exponents in [{exponent.min:.6g}, {exponent.max:.6g}]; {_made_counts(c)}",
        "(x.clamp(min=0) + eps) ** p, or x.sign() * x.abs() ** p where that is meant",
    )


def _equal_singular_values(location: Location) -> Cause | None:
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


# Overflow ---------------------------------------------------------------------------------------


def _exponential(location: Location) -> Cause | None:
    c = call(location.at)
    ends = largest_exponent(c)
    given = c.tensors.get("exponent" if c.function == "pow" else "self")
    if ends is None or given is None or given.stats is None or given.stats.max is None:
        return None
    is_even = c.function == "cosh"
    largest = _absmax(given) if is_even else given.stats.max
    if largest <= ends:
        return None
    written = f"{c.number('self'):g} ** {{}}" if c.function == "pow" else f"{c.function}({{}})"
    dtype = _name(_made(c).dtype)
    return Cause(
        f"{written.format(f'{largest:.6g}')} overflows {dtype}",
        f"{_named(given)} reaches {largest:.6g}; {dtype} ends at {written.format(f'{ends:.2f}')}",
        "softmax, logsumexp, softplus or sigmoid in their own functions; by hand "
        "(x - x.amax(-1, keepdim=True)).exp()",
    )


def _cast(location: Location) -> Cause | None:
    c = call(location.at)
    given = c.tensors.get("src") or c.tensors.get("self")
    if c.function not in _CASTS or given is None or given.stats is None or not _overflows(c):
        return None
    largest, most = given.stats.absmax or 0.0, limit(_made(c).dtype)
    return Cause(
        f"conversion to {_name(_made(c).dtype)} overflows",
        f"{_named(given)} is {_name(given.dtype)} and reaches {largest:.6g}, {largest / most:.3g} "
        f"times the largest {_name(_made(c).dtype)}, {most:.6g}",
        _wider(_made(c).dtype),
    )


def _unequal_branches(location: Location) -> Cause | None:
    """A residual sum: two tensors of one shape, of which one is much larger."""
    c = call(location.at)
    a, b = c.tensors.get("self"), c.tensors.get("other")
    if c.function != "add" or a is None or b is None or a.shape != b.shape or len(a.shape) <= 1:
        return None
    if location.direction != "forward" or not _overflows(c):
        return None
    large, small = sorted((a, b), key=_absmax, reverse=True)
    if _absmax(large) < _FAR_APART * _absmax(small):
        return None
    ratio = _absmax(large) / _absmax(small) if _absmax(small) else math.inf
    return Cause(
        "one branch of a residual sum has outgrown the other",
        f"{_spread(large)}; {_spread(small)}; the largest values differ by a factor of {ratio:.3g}",
        "normalise or scale the branch before the sum: x + scale * branch(norm(x)) with "
        "scale = nn.Parameter(torch.tensor(0.1))",
    )


def _numel(operand: Operand | None) -> int:
    return math.prod(operand.shape) if operand is not None else 0


def _absmax(operand: Operand) -> float:
    return (operand.stats.absmax or 0.0) if operand.stats is not None else 0.0


def _spread(operand: Operand) -> str:
    """Mean and std where they are known, else the range."""
    stats = operand.stats
    if stats is None or stats.min is None:
        return f"{_named(operand)} is not known"
    if not operand.has_moments:
        return f"{_named(operand)} is in [{stats.min:.4g}, {stats.max:.4g}]"
    return (
        f"{_named(operand)} has mean {stats.mean:.4g}, std {stats.std:.4g}, absmax "
        f"{stats.absmax:.4g}"
    )


def _small_divisor(location: Location) -> Cause | None:
    c = call(location.at)
    least = c.smallest("other")
    if c.function != "div" or least is None or least >= 1 or not _overflows(c):
        return None
    return Cause(
        f"division by values close to 0 overflows {_name(_made(c).dtype)}",
        f"the numerator reaches {c.absmax('self') or 0.0:.6g}, the denominator goes down to "
        f"{least:.3g}; {_made_counts(c)}",
        "x / y.clamp(min=eps) where y >= 0, with an eps that the quotient survives",
    )


def _overflow(location: Location) -> Cause | None:
    c = call(location.at)
    if location.direction == "optimizer" or c.function in _CASTS or not _overflows(c):
        return None
    dtype = _made(c).dtype
    return Cause(
        f"{c.function} overflows {_name(dtype)}" + _in_backward(location),
        f"{_reaches(c)}; {_made_counts(c)}",
        _wider(dtype),
    )


def _in_backward(location: Location) -> str:
    return f" in the backward of {location.node}" if location.direction == "backward" else ""


def _overflows(c: Call) -> bool:
    """Whether a result that is not finite can only be overflow."""
    if c.result is None or not is_bad(c.result) or _given_bad(c):
        return False
    if not (c.result.dtype.is_floating_point):
        return False
    largest = bound(c)
    return largest is not None and largest >= limit(c.result.dtype)


def _given_bad(c: Call) -> bool:
    numbers = (x for x in c.settings.values() if isinstance(x, float))
    return any(map(is_bad, c.tensors.values())) or not all(map(math.isfinite, numbers))


def _made(c: Call) -> Operand:
    if c.result is None:
        raise AssertionError("nanscan: internal: an op without results was judged")
    return c.result


def _reaches(c: Call) -> str:
    """How large the operands are, and the result can get, against its dtype."""
    dtype, largest = _made(c).dtype, bound(c)
    most = limit(dtype)
    parts = [
        f"{_named(o)} reaches {_absmax(o):.6g}, {_share(_absmax(o), most)} of the largest "
        f"{_name(dtype)}"
        for o in c.tensors.values()
        if _absmax(o)
    ]
    parts += [f"{name} is {c.settings[name]:g}" for name in ("other", "exponent") if c.number(name)]
    products = summed_products(c) if c.function in PRODUCTS else None
    of = f", {products:,} products a value" if products else ""
    parts.append(f"the result can get to {largest:.3g}{of}; {_name(dtype)} ends at {most:.6g}")
    return "; ".join(parts)


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


# What speaks against a common suspicion ----------------------------------------------------------


def _no_overflow(location: Location) -> str:
    c = call(location.at)
    operands = [o for o in c.tensors.values() if o.stats is not None and o.stats.absmax is not None]
    if c.result is None or not operands or not c.result.dtype.is_floating_point:
        return ""
    largest = max(map(_absmax, operands))
    most, reached = limit(c.result.dtype), bound(c)
    if (most * _FAR_FROM_LIMIT if reached is None else most) <= (reached or largest):
        return ""
    if _exponential(location) is not None or c.result.dtype.itemsize > _NARROW:
        return ""
    return (
        f"overflow: unlikely because operands reach {largest:.6g}, {_share(largest, most)} of "
        f"{_name(c.result.dtype)}'s largest {most:.6g}"
    )


def _no_bad_data(location: Location) -> str:
    known = [o for o in location.operands if o.stats is not None]
    if not known or any(map(is_bad, known)):
        return ""
    return (
        f"bad data or weights: unlikely because {location.op} was given "
        f"{_plural(len(known), 'tensor')} without a non-finite value"
    )


def _no_division_by_zero(location: Location) -> str:
    c = call(location.at)
    name = {"div": "other", "addcdiv": "tensor2"}.get(c.function, "")
    if (least := c.smallest(name)) is None:
        return ""
    return f"division by zero: unlikely because the smallest magnitude of {name} is {least:.3g}"


def _no_masked_row(location: Location) -> str:
    c = _forward_call(location)
    stats = c.stats("self")
    if c.function not in _SOFTMAX or stats is None or stats.neginf_count:
        return ""
    return "a fully masked row: unlikely because the softmax was given no -Inf"


def _no_where_trap(location: Location) -> str:
    if location.direction != "backward" or location.forward is None or not location.consumers:
        return ""
    if domain(call(location.forward)) is None or _masked_by(location):
        return ""
    taken = ", ".join(location.consumers)
    return (
        f"the torch.where trap: unlikely because only {taken} took what {location.forward.name} "
        "returned"
    )


# Words ------------------------------------------------------------------------------------------


def _forward_call(location: Location) -> Call:
    """The forward op: of backward the one that made the node, where it is known."""
    return call(location.forward if location.forward is not None else location.at)


def _named(operand: Operand) -> str:
    return f"{operand.name} ({operand.what})" if operand.what else operand.name


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _smallest(dtype: torch.dtype) -> float:
    info = torch.finfo(dtype)
    return float(info.smallest_normal) * float(info.eps)


def _share(x: float, most: float) -> str:
    return f"{100 * x / most:.2g} %"


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' * (count != 1)}"


def _bad_counts(stats: ScanResult) -> str:
    counts = (stats.nan_count, "NaN"), (stats.posinf_count, "+Inf"), (stats.neginf_count, "-Inf")
    return f"{', '.join(f'{n:,} {name}' for n, name in counts if n)} of {stats.numel:,}"


def _made_counts(c: Call) -> str:
    stats = c.result.stats if c.result is not None else None
    return "" if stats is None else f"the result has {_bad_counts(stats)}"


# Rules of one group speak of the same thing: the first that fits is named.
_RULES: tuple[tuple[Rule, ...], ...] = (
    (_bad_from_outside,),
    (_uninitialised_memory,),
    (_fully_masked_rows, _masked_row_by_hand, _masked_query, _zero_times_inf),
    (_variance_of_too_few, _mean_of_nothing, _all_labels_ignored, _ctc_target_too_long),
    (_single_value_a_channel, _zero_variance),
    (_denominator_zero, _fused_denominator_zero, _second_moment_overflow, _update_overflow),
    (_equal_singular_values, _undefined_derivative),
    (_outside_of_domain, _integer_zero, _negative_base),
    (_unequal_branches,),
    (_exponential, _cast, _small_divisor, _overflow),
)

_REFUTATIONS: tuple[Callable[[Location], str], ...] = (
    _no_overflow,
    _no_bad_data,
    _no_division_by_zero,
    _no_masked_row,
    _no_where_trap,
)
