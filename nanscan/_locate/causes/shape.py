"""Causes that lie in how many values there are: masked rows, empty means, one-value variances."""

from __future__ import annotations

import math

import torch

from nanscan._data.cause import Cause
from nanscan._data.location import Location, Operand
from nanscan._data.text import plural
from nanscan._locate.causes.calls import Call, call, forward_call, given_bad, named, numel
from nanscan._locate.causes.domains import zeros

SOFTMAX = ("_softmax", "_log_softmax", "_safe_softmax", "softmax", "log_softmax")
_VARIANCES = ("var", "std", "var_mean", "std_mean")
_MEANS = ("mean", "mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy")


# Masks ------------------------------------------------------------------------------------------


UNMASK = (
    "scores.masked_fill(~mask, torch.finfo(scores.dtype).min) in the place of -inf; or let padded "
    "rows see one key and drop them later; F.scaled_dot_product_attention returns 0 for such rows"
)


def fully_masked_rows(location: Location) -> Cause | None:
    """Of a softmax, or of one whose backward this is."""
    c = forward_call(location)
    given = c.tensors.get("self")
    if c.function not in (*SOFTMAX, "logsumexp") or given is None or given.stats is None:
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
        f"{plural(rows, 'row')} of the softmax {'is' if rows == 1 else 'are'} fully masked",
        f"{named(given)} holds {given.stats.neginf_count:,} -Inf; the bad values are "
        f"{plural(rows, 'whole row')} of {size} along dim {dim}",
        UNMASK,
    )


def masked_row_by_hand(location: Location) -> Cause | None:
    """By hand: x - x.max() is -Inf less -Inf, where all of a row is -Inf."""
    c = call(location.at)
    scores, most, made = c.stats("self"), c.stats("other"), c.result
    if c.function != "sub" or scores is None or most is None or made is None or made.stats is None:
        return None
    rows, per_row = most.neginf_count, scores.numel // most.numel if most.numel else 0
    if not rows or per_row <= 1 or made.stats.nan_count != rows * per_row:
        return None
    return Cause(
        f"{plural(rows, 'row')} of a hand-written softmax {'is' if rows == 1 else 'are'} fully "
        "masked: -Inf - (-Inf)",
        f"{named(c.tensors['other'])}, the maximum of each row, holds {rows:,} -Inf; the "
        f"{made.stats.nan_count:,} NaN are {plural(rows, 'whole row')} of {per_row}",
        UNMASK,
    )


def masked_query(location: Location) -> Cause | None:
    """Of an attention in one kernel: as many rows of NaN as -Inf can mask."""
    c = forward_call(location)
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
        f"{plural(rows, 'query row')} of an attention {'is' if rows == 1 else 'are'} fully masked",
        f"{named(mask)} holds {mask.stats.neginf_count:,} -Inf, {keys} mask a row; the result has "
        f"{plural(rows, 'whole row')} of {width} NaN",
        UNMASK,
    )


def zero_times_inf(location: Location) -> Cause | None:
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


def variance_of_too_few(location: Location) -> Cause | None:
    """Divided by n - correction, which is 0 or below."""
    c = forward_call(location)
    if c.function not in _VARIANCES or (count := c.reduced) is None:
        return None
    correction = c.number("correction")
    if correction is None:
        correction = 0.0 if c.settings.get("unbiased") is False else 1.0
    if count > correction:
        return None
    return Cause(
        "variance of a single value" if count == 1 else f"variance of {count} values",
        f"{c.function} of {list(c.tensors['self'].shape)} takes {plural(count, 'value')} an "
        f"element, and divides by {count} - {correction:g} = {count - correction:g}",
        f"x.{c.function}(dim, correction=0), or skip batches of fewer than {correction + 1:g}",
    )


def mean_of_nothing(location: Location) -> Cause | None:
    """Also of losses that take the mean of an empty batch."""
    c = call(location.at)
    given = c.tensors.get("self")
    if c.function not in _MEANS or given is None or numel(given):
        return None
    if c.number("reduction") not in (None, 1):
        return None
    return Cause(
        "mean over nothing: 0 / 0",
        f"{c.function} of {named(given)} of shape {list(given.shape)}, which has no element",
        "skip it: x.mean() if x.numel() else x.sum()",
    )


def all_labels_ignored(location: Location) -> Cause | None:
    """The mean loss divides by the weight of the labels that count."""
    c = forward_call(location)
    weight = c.results[1].stats if len(c.results) > 1 else None
    if c.function not in ("nll_loss_forward", "nll_loss2d_forward") or c.number("reduction") != 1:
        return None
    if weight is None or weight.min != 0 or weight.max != 0:
        return None
    labels = numel(c.tensors.get("target"))
    weights = c.stats("weight")
    why = f"each is {c.settings.get('ignore_index')}, the ignore_index"
    if weights is not None:
        why += f", or of a class whose weight is 0 (weights are {weights.min:g} to {weights.max:g})"
    return Cause(
        "every label of the batch is ignored: the mean loss is 0 / 0",
        f"the {labels:,} labels have a total weight of 0: {why}",
        "F.cross_entropy(x, y, reduction='sum') / (y != ignore_index).sum().clamp(min=1)",
    )


def ctc_target_too_long(location: Location) -> Cause | None:
    """Of finite log probabilities, an infinite loss says that no alignment exists."""
    c = call(location.at)
    made = c.results[0].stats if c.results else None
    if c.function != "_ctc_loss" or made is None or not made.posinf_count or given_bad(c):
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


def single_value_a_channel(location: Location) -> Cause | None:
    """In training: running_var is of n - 1 = 0 values."""
    c = forward_call(location)
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


def zero_variance(location: Location) -> Cause | None:
    """A constant group, and no eps that its dtype can hold."""
    c = forward_call(location)
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
