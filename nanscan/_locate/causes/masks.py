"""Rules about masks: rows of a softmax that are all -Inf, and 0 * -Inf."""

from __future__ import annotations

import dataclasses
import math

import torch

from nanscan._data import causes
from nanscan._data.cause import Cause
from nanscan._data.location import Operand
from nanscan._data.text import figure, plural
from nanscan._locate.causes.bounds import PRODUCTS
from nanscan._locate.causes.evidence import OpEvidence, rule
from nanscan._locate.causes.op_call import absmax, is_bad, op_function
from nanscan._locate.causes.singularities import zeros
from nanscan._locate.causes.wording import bad_of, made_counts, named

_ATTENTION_DIMS = 3  # scores of attention have at least so many
_FILL = "scores.masked_fill(~mask, torch.finfo(scores.dtype).min) in the place of -inf"
_LOGITS = (
    "of logits: no choice is left in such a row, so leave one, such as the end of the sequence, or "
    "end it"
)
# Layers in one op, their attention included.
_LAYERS = ("_native_multi_head_attention", "_transformer_encoder_layer_fwd")
_MASKS = ("attn_mask", "attn_bias", "mask")
_NEVER_OVERFLOWS = 1e6  # what a layer computes in float32 of values up to this stays below 1e38
SOFTMAX = ("_softmax", "_log_softmax", "_safe_softmax", "softmax", "log_softmax")


@rule(functions=(*SOFTMAX, "logsumexp"), of_forward=True)
def fully_masked_rows(evidence: OpEvidence) -> Cause | None:
    """A softmax, or the forward softmax of this backward, has rows that are all -Inf."""
    call = evidence.forward_call
    given = call.tensors.get("self")
    if given is None or given.stats is None:
        return None
    dim = call.settings.get("dim", -1)
    dims = dim if isinstance(dim, (list, tuple)) else [dim]
    size = math.prod(given.shape[int(d)] for d in dims) if given.shape else 1
    made = call.results[0].stats if call.results else None
    if made is None or given.stats.nan_count or given.stats.posinf_count:
        return None
    if call.function == "logsumexp":
        rows, rest = made.neginf_count, 0
    else:
        rows, rest = divmod(made.nan_count, size)
    if not rows or rest or given.stats.neginf_count < rows * size:
        return None
    cause = causes.masked_rows(
        f"{named(given)} holds {given.stats.neginf_count:,} -Inf; the bad values are "
        f"{plural(rows, 'whole row')} of {size} along dim {dim}",
        rows,
        "the logsumexp" if call.function == "logsumexp" else "the softmax",
    )
    if call.function == "logsumexp":
        return dataclasses.replace(cause, remedy=_FILL)
    if len(given.shape) < _ATTENTION_DIMS:  # most likely logits, from which a choice is made
        return dataclasses.replace(cause, remedy=f"{_LOGITS}; of attention: {_FILL}")
    return cause


@rule(functions=("sub",))
def masked_row_by_hand(evidence: OpEvidence) -> Cause | None:
    """A softmax written by hand: x - x.max() is -Inf - (-Inf) in a row that is all -Inf."""
    call = evidence.call
    scores, most, made = call.stats("self"), call.stats("other"), call.result
    if scores is None or most is None or made is None or made.stats is None:
        return None
    rows, per_row = most.neginf_count, scores.numel // most.numel if most.numel else 0
    if not rows or per_row <= 1 or made.stats.nan_count != rows * per_row:
        return None
    return causes.masked_rows(
        f"{named(call.tensors['other'])}, the maximum of each row, holds {rows:,} -Inf; the "
        f"{made.stats.nan_count:,} NaN (-Inf - -Inf) are {plural(rows, 'whole row')} of {per_row}",
        rows,
        "a hand-written softmax",
    )


@rule(functions=("add", "sub"))
def inf_minus_inf(evidence: OpEvidence) -> Cause | None:
    """A sum of Inf and -Inf, or a difference of two Inf of one sign, is NaN."""
    call = evidence.call
    sides = [call.tensors.get("self"), call.tensors.get("other")]
    stats = [side.stats for side in sides if side is not None and side.stats is not None]
    made = call.result
    if len(stats) < 2 or made is None or made.stats is None:  # noqa: PLR2004 - a sum
        return None
    if any(s.nan_count or not s.inf_count for s in stats) or not made.stats.nan_count:
        return None
    a, b = (named(side) for side in sides if side is not None)
    return Cause(
        "Inf - Inf is NaN",
        f"{a} has {bad_of(stats[0])}, {b} {bad_of(stats[1])}; {made_counts(call)}",
        "",
    )


@rule(verdicts=("origin",), directions=("forward",))
def written_inf_that_counts(evidence: OpEvidence) -> Cause | None:
    """Inf that the code wrote as a number, such as a mask, reached a loss or a gradient."""
    location, call = evidence.location, evidence.call
    written = next((x for x in call.settings.values() if isinstance(x, float) and math.isinf(x)), 0)
    if not written or not location.reached or call.result is None or call.result.stats is None:
        return None
    if call.result.stats.nan_count:
        return None
    loss = "" if location.consequence is None else op_function(location.consequence.name)
    is_label = loss in ("nll_loss_forward", "nll_loss2d_forward")
    return Cause(
        f"a {written:g} that the code writes reaches {location.reached}"
        + (": a label is a class that it masks" if is_label else ""),
        f"{call.function} is given {written:g}; {made_counts(call)}",
        "",
    )


@rule(functions=("*scaled_dot_product*", *_LAYERS), of_forward=True)
def masked_query(evidence: OpEvidence) -> Cause | None:
    """An attention kernel has rows of NaN, its mask can do that, and no score has overflowed."""
    call = evidence.forward_call
    mask = next((call.tensors[name] for name in _MASKS if name in call.tensors), None)
    made = call.results[0] if call.results else None
    if mask is None or mask.stats is None or mask.stats.nan_count or mask.stats.posinf_count:
        return None
    if made is None or made.stats is None or not made.stats.nan_count:
        return None
    others = [operand for operand in call.tensors.values() if operand is not mask]
    most = max(map(absmax, others), default=0.0)
    computes_in_half = call.function in _LAYERS and made.dtype == torch.float16
    if any(map(is_bad, others)) or most > _NEVER_OVERFLOWS or computes_in_half:
        return None
    keys, width = mask.shape[-1], made.shape[-1]
    rows, rest = divmod(made.stats.nan_count, width)
    if rest or mask.stats.neginf_count < keys:
        return None
    return causes.masked_rows(
        f"{named(mask)} holds {mask.stats.neginf_count:,} -Inf, {keys} mask a row; all else that "
        f"went in is at most {figure(most)}, so no score overflows; the result has "
        f"{plural(rows, 'whole row')} of {width} NaN",
        rows,
        "an attention",
        "let each row of the mask see one key, and drop the padded rows later",
    )


@rule(directions=("forward", "backward"), functions=("mul",))
def zero_times_inf(evidence: OpEvidence) -> Cause | None:
    """A mask written as (1 - mask) * -inf: where the mask is 1, this is 0 * -inf = NaN."""
    call = evidence.call
    if call.result is None or call.result.stats is None:
        return None
    sides = [call.tensors.get("self"), call.tensors.get("other")]
    factor = call.number("other")
    if factor is not None and not math.isinf(factor):
        return None
    has_inf = factor is not None or any(map(_has_inf, sides))
    held = next((text for s in sides if s and (text := zeros(s))), "")
    if not has_inf or not held or not call.result.stats.nan_count:
        return None
    times = f"{factor:g}" if factor is not None else "Inf"
    is_mask = any(s is not None and not _has_inf(s) and _is_mask(s) for s in sides)
    return Cause(
        f"0 * {times} is NaN" + (f": a mask is not multiplied by {times}" if is_mask else ""),
        f"an operand holds {held}; the product has {call.result.stats.nan_count:,} NaN",
        "scores.masked_fill(mask == 0, float('-inf')) in the place of scores + (1 - mask) * -inf"
        if is_mask
        else "",
    )


def _is_mask(operand: Operand) -> bool:
    """Whether a tensor may hold nothing but 0 and 1."""
    stats = operand.stats
    return stats is not None and (stats.min, stats.max) in ((0.0, 1.0), (0.0, 0.0))


@rule(verdicts=("propagated", "origin"), functions=("mul", *PRODUCTS))
def nan_behind_a_mask(evidence: OpEvidence) -> Cause | None:
    """Weights of 0 are to hide values that are NaN: 0 * NaN is NaN."""
    call, hidden = evidence.call, evidence.location.hidden_values
    if not hidden or call.result is None or call.result.stats is None:
        return None
    bad = next(filter(is_bad, call.tensors.values()), None)
    if bad is None or bad.stats is None:
        return None
    total = call.result.stats.nonfinite_count
    if hidden < total:
        return None
    return Cause(
        "a weight of 0 does not hide a NaN: 0 * NaN is NaN",
        f"{named(bad)} has {bad_of(bad.stats)}; all {total:,} bad values of the result come of "
        "weights that are exactly 0",
        "x.masked_fill(hidden, 0) before the product, where hidden says which values the weights "
        "of 0 are to hide",
    )


def _has_inf(operand: Operand | None) -> bool:
    return operand is not None and operand.stats is not None and operand.stats.inf_count > 0
