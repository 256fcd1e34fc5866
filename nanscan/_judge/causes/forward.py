"""Causes of what goes bad in a forward: the batch, buffers that were bad, and overflow."""

from __future__ import annotations

import math

import torch
from torch import nn

from nanscan._data.cause import Cause
from nanscan._data.finding import Seen
from nanscan._data.result import ScanResult, bad_counts
from nanscan._data.site import Kind, Site
from nanscan._data.text import dtype_name, largest, number, share
from nanscan._judge.causes.gradients import exploding_gradients, overflow_in_backward
from nanscan._judge.evidence import Evidence, is_mask
from nanscan._judge.rule import rule

_FAR_FROM_UNIT_SCALE = 50.0
_RECENT = 8  # steps that tell the pace of a growth
_HALF = (torch.float16, torch.bfloat16)
_NEAR = 1 / 4  # of the largest value: what stands beside it has outgrown it
# They add up products, and do nothing else: what they make of finite values overflows or is finite.
_PRODUCTS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


@rule(verdicts=("propagated",))
def bad_input_batch(e: Evidence) -> Cause | None:
    """An input that the caller handed in was bad."""
    if not e.from_outside:
        return None
    finding = e.finding
    earlier = e.step.forward_before(e.row)
    calm = f"; nothing was bad earlier in step {finding.step}" if not earlier.bad else ""
    return Cause(
        "the batch was bad before the model saw it",
        f"{finding.site} came from the caller with {finding.stats.nonfinite_count:,} non-finite of "
        f"{finding.stats.numel:,} elements{calm}",
        "assert torch.isfinite(batch).all() in the dataset, and in what transforms it: drop or "
        "repair such a sample",
    )


@rule(verdicts=("origin", "propagated"), kinds=lambda kind: kind is Kind.OUTPUT)
def bad_buffer(e: Evidence) -> Cause | None:
    """A layer read a buffer of its own that was bad before."""
    found = e.bad_buffers
    if not found or any(s.kind is not Kind.BUFFER and _is_bad(r) for s, r in e.finding.given):
        return None
    site, stats, since = found[0]
    more = "".join(f"; {other} as well" for other, *_ in found[1:])
    is_statistic = "running_" in site.name
    name = e.finding.site.name
    return Cause(
        f"{site.name} was bad before {name} ran",
        f"the buffer holds {bad_counts(stats)} of {stats.numel:,} {since}{more}",
        f"{name}.reset_running_stats(), then batches in train mode; or load it from a checkpoint"
        if is_statistic
        else f"compute or load {site.name} again, with finite values",
    )


def _is_bad(stats: ScanResult) -> bool:
    return not stats.is_finite and stats.neginf_count != stats.nonfinite_count


# -- overflow --------------------------------------------------------------------------------------


@rule(kinds=lambda kind: kind.is_forward)
def overflow(e: Evidence) -> Cause | None:
    """Inf, where finite values were near the limit, now or in the steps before."""
    stats = e.stats
    if stats.dtype.is_complex:
        return None
    limit, dtype = torch.finfo(stats.dtype).max, dtype_name(stats.dtype)
    title = f"overflow of {dtype}: values grew beyond {largest(stats.dtype)}"
    past = e.trend
    grew = f"; absmax before went {past}" if len(past) > 1 else ""
    if e.is_mask_on_mask:
        return None
    reached = max(stats.absmax or 0.0, past.last if past else 0.0)
    if not stats.inf_count or reached < limit * _NEAR:
        factors = _factors(e)
        return Cause(title, f"{factors}{grew}", _more_range(e)) if factors else None
    beside = "finite values up to" if stats.absmax else "no finite value, and before that up to"
    return Cause(
        title,
        f"{stats.inf_count:,} Inf beside {beside} {number(reached)} "
        f"({share(reached, limit)} of the largest {dtype}){grew}{_large_weight(e)}",
        _more_range(e),
    )


def _factors(e: Evidence) -> str:
    """What a layer multiplied, where only that can have made what is bad; "" elsewhere."""
    layer = e.layer
    if layer is None or type(layer) not in _PRODUCTS or not e.is_given_finite or not e.weights:
        return ""
    inputs = max(stats.absmax or 0.0 for _, stats in e.finding.given)
    site, top = max(e.weights, key=lambda weight: weight[1])
    terms = getattr(layer, "weight").numel()  # noqa: B009 - at most: it is a Tensor
    if inputs * top * terms < torch.finfo(e.stats.dtype).max or layer._forward_hooks:  # noqa: SLF001
        return ""  # whatever made it, these did not
    return (
        f"{bad_counts(e.stats)} in sums of products of finite values: the input reaches "
        f"{number(inputs)}, {site.name} {number(top)}"
    )


def _large_weight(e: Evidence) -> str:
    """A weight of the layer that is finite, and large beside what it meets."""
    site, top = max(e.weights, key=lambda weight: weight[1], default=(None, 0.0))
    return f"; {site.name} reaches {number(top)}" if site is not None and top > 1 else ""


def _more_range(e: Evidence) -> str:
    """Another dtype, where one has room for more, and the values do not run away."""
    if e.stats.dtype != torch.float16 or e.step.losses.explodes:
        return ""
    place = e.module
    half = place is not None and any(p.dtype == torch.float16 for p in place.parameters())
    how = "model.bfloat16()" if half else "torch.autocast(device, torch.bfloat16)"
    return f"bfloat16 in the place of float16, which reaches 3e38: {how}"


@rule(kinds=lambda kind: kind.is_forward)
def mask_on_mask(e: Evidence) -> Cause | None:
    """Two additive masks of the lowest value, and their sum is -Inf."""
    if not e.is_mask_on_mask:
        return None
    stats, dtype = e.stats, dtype_name(e.stats.dtype)
    return Cause(
        f"additive masks overflow {dtype}: its lowest value and a negative one add up to -Inf",
        f"{stats.neginf_count:,} -Inf beside the lowest {dtype}, {number(stats.min or 0.0)}, of "
        "which masks are made",
        "torch.minimum(mask, other_mask) in the place of their sum; or boolean masks that are "
        "merged before scores.masked_fill(~mask, torch.finfo(scores.dtype).min)",
    )


@rule(verdicts=("near-limit",))
def growing_to_the_limit(e: Evidence) -> Cause | None:
    """Near the limit, with a trend that reaches it."""
    finding = e.finding
    if finding.dtype.is_complex:
        return None
    trend = e.trend.and_now(finding.stats.absmax)
    recent = trend.values[-_RECENT:]
    if len(recent) < 3 or recent[0] <= 0 or trend.growth < 1.2:  # noqa: PLR2004
        return None
    pace = float(trend.last / recent[0]) ** (1 / (len(recent) - 1))
    limit = torch.finfo(finding.dtype).max
    if pace <= 1:
        return None
    steps = max(math.ceil(math.log(limit / trend.last) / math.log(pace)), 1)
    return Cause(
        f"values grow towards the largest {dtype_name(finding.dtype)}",
        f"absmax went {trend}, of late {number(pace)}-fold a step; at this pace it passes "
        f"{largest(finding.dtype)} in " + ("the next step" if steps == 1 else f"{steps:,} steps"),
        _more_range(e) if e.kind.is_forward else "",
    )


@rule(kinds=lambda kind: kind.is_forward)
def branches_of_different_scale(e: Evidence) -> Cause | None:
    """Two finite tensors of the result's shape, whose sum does not fit."""
    stats = e.stats
    if not stats.inf_count:
        return None
    module = e.layer
    if module is not None and type(module).__module__.startswith("torch.nn.modules."):
        return None  # a layer of torch adds no branches
    alike, limit = e.step.alike_before(e.row), torch.finfo(stats.dtype).max
    if len(alike) < 2 or stats.dtype.is_complex:  # noqa: PLR2004
        return None
    last = alike[-1]  # what ran last is there for what comes next
    others = [seen for seen in alike[:-1] if _largest_sum(seen, last) > limit]
    if not others:
        return None
    other = others[0]  # a branch is left where it begins
    also = f" ({others[-1][0]} is as large)" if len(others) > 1 else ""
    return Cause(
        f"two branches meet here, and their sum does not fit into {dtype_name(stats.dtype)}",
        f"absmax of {_with_growth(other, e)}{also}, that of {_with_growth(last, e)}; "
        f"their sum can reach {number(_largest_sum(other, last))}, the largest is "
        f"{largest(stats.dtype)}",
        _more_range(e),
    )


def _largest_sum(a: Seen, b: Seen) -> float:
    """Of two finite tensors, with the sign in which it is largest."""
    return max((a[1].max or 0.0) + (b[1].max or 0.0), -(a[1].min or 0.0) - (b[1].min or 0.0))


def _with_growth(seen: Seen, e: Evidence) -> str:
    site, stats = seen
    trend = e.step.trend_at(site).and_now(stats.absmax)
    return f"{site} went {trend}" if len(trend) > 1 else f"{site} is {number(trend.last)}"


@rule()
def far_from_unit_scale(e: Evidence) -> Cause | None:
    """Raw pixels or the like, where values overflow 16 bits or gradients explode."""
    half = e.finding.dtype in _HALF and (overflow(e) or overflow_in_backward(e)) is not None
    if not (half or exploding_gradients(e) is not None):
        return None
    largest: tuple[Site, ScanResult] | None = None
    for site, stats in e.inputs_from_outside:
        if not stats.absmax or is_mask(stats.min, stats.max):
            continue
        if largest is None or stats.absmax > (largest[1].absmax or 0.0):
            largest = site, stats
    if largest is None or (largest[1].absmax or 0.0) < _FAR_FROM_UNIT_SCALE:
        return None
    site, stats = largest
    top = stats.absmax or 0.0
    divisor = "255" if (stats.min or 0.0) >= 0 and 128 <= top <= 255 else f"{top:.1g}"  # noqa: PLR2004
    return Cause(
        "inputs are far from unit scale" + (" for 16-bit training" if half else ""),
        f"{site} reaches {number(top)}",
        f"normalise the data: x / {float(divisor):g}",
    )
