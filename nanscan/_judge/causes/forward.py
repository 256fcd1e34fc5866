"""Causes of what goes bad in a forward: the batch, overflow, normalisation, masks, the loss."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.loss import _Loss

from nanscan._data import causes
from nanscan._data.cause import Cause
from nanscan._data.dtypes import rounds_to_zero
from nanscan._data.finding import Seen
from nanscan._data.result import ScanResult
from nanscan._data.site import Kind, Site
from nanscan._data.text import dtype_name, number, share
from nanscan._judge.evidence import Evidence, is_mask
from nanscan._judge.rule import rule

_FAR_FROM_UNIT_SCALE = 50.0
_RECENT = 8  # steps that tell the pace of a growth
_HALF = (torch.float16, torch.bfloat16)


@rule(verdicts=("propagated",))
def bad_input_batch(e: Evidence) -> Cause | None:
    """An input that the caller handed in was bad."""
    if not e.from_outside:
        return None
    finding = e.finding
    return Cause(
        "the batch was bad before the model saw it",
        f"{finding.site} came from the caller with {finding.stats.nonfinite_count:,} non-finite of "
        f"{finding.stats.numel:,} elements; nothing was bad earlier in step {finding.step}",
        "find the sample in the data loader; drop or repair it: "
        "assert torch.isfinite(batch).all() in the dataset",
    )


# -- overflow --------------------------------------------------------------------------------------


@rule(kinds=lambda kind: kind.is_forward)
def overflow(e: Evidence) -> Cause | None:
    """Inf, where finite values were near the limit, now or in the steps before."""
    stats = e.stats
    if not stats.inf_count or stats.dtype.is_complex:
        return None
    limit, dtype = torch.finfo(stats.dtype).max, dtype_name(stats.dtype)
    past = e.trend
    reached = max(stats.absmax or 0.0, past.last if past else 0.0)
    if reached < limit / 16:
        return None
    beside = "finite values up to" if stats.absmax else "no finite value, and before that up to"
    grew = f"; absmax before went {past}" if len(past) > 1 else ""
    return Cause(
        f"overflow of {dtype}: values grew beyond {limit:g}",
        f"{stats.inf_count:,} Inf beside {beside} {number(reached)} "
        f"({share(reached, limit)} of the largest {dtype}){grew}",
        _more_range(stats.dtype),
    )


def _more_range(dtype: torch.dtype) -> str:
    if dtype == torch.float16:
        return "use bfloat16, which reaches 3e38, or rescale what feeds this place"
    return "rescale or normalise what feeds this place"


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
        f"absmax went {trend}, of late {pace:.3g}-fold a step; so it passes {limit:g} in "
        + ("the next step" if steps == 1 else f"{steps:,} steps"),
        _more_range(finding.dtype),
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
        f"their sum can reach {number(_largest_sum(other, last))}, the largest is {limit:g}",
        "bring both to one scale before they meet, norm(x) + branch, or damp one, "
        "x + 0.1 * branch; or add in float32: x.float() + branch.float()",
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
    """Raw pixels or the like, in 16 bits or where gradients explode."""
    half = e.finding.dtype in _HALF
    if not (half or e.step.gradients.explodes):
        return None
    largest: tuple[Site, float] | None = None
    for site, stats in e.inputs_from_outside:
        if stats.absmax is None or is_mask(stats.min, stats.max):
            continue
        if largest is None or stats.absmax > largest[1]:
            largest = site, stats.absmax
    if largest is None or largest[1] < _FAR_FROM_UNIT_SCALE:
        return None
    instead = ", or train in float32 under torch.autocast" if half else ""
    return Cause(
        "inputs are far from unit scale" + (" for 16-bit training" if half else ""),
        f"{largest[0]} reaches {number(largest[1])}",
        f"normalise the data (x / 255 for images){instead}",
    )


# -- layers and losses -----------------------------------------------------------------------------


@rule()
def zero_variance(e: Evidence) -> Cause | None:
    """A normalisation whose eps is 0 has nothing to divide by where all values are one."""
    stats, module = e.stats, e.layer
    if module is None or "Norm" not in type(module).__name__:
        return None
    eps = getattr(module, "eps", getattr(module, "variance_epsilon", None))
    of_torch = isinstance(module, (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm))
    single = of_torch and stats.dtype in _HALF  # torch's own layers compute in float32
    dtype = torch.float32 if single else stats.dtype
    if not isinstance(eps, (int, float)) or not rounds_to_zero(float(eps), dtype):
        return None
    channels = getattr(module, "num_features", getattr(module, "num_channels", 0))
    size = stats.numel // channels if channels else 0
    whole = bool(size) and stats.nonfinite_count % size == 0
    many = f"; that is {stats.nonfinite_count // size} of {channels} channels" if whole else ""
    kind = type(module).__name__
    return causes.zero_variance(
        f"{stats.nonfinite_count:,} of {stats.numel:,} values are bad{many}; what it was given is "
        "finite",
        kind,
        eps,
        dtype_name(dtype),
    )


@rule(kinds=lambda kind: kind.is_forward)
def single_sample(e: Evidence) -> Cause | None:
    """All is NaN in a batch of one, and nothing was in larger ones."""
    stats = e.stats
    if stats.nan_count != stats.numel or stats.calls != 1 or stats.shape[:1] != (1,):
        return None
    before = e.step.elements_before(e.row)
    if not before or min(before) <= stats.numel:
        return None
    return Cause(
        "the batch has one sample, and the variance of a single value is 0/0",
        f"all {stats.numel:,} values of shape {list(stats.shape)} are NaN; in the {len(before)} "
        f"steps before there were at least {min(before):,}, all finite",
        "DataLoader(..., drop_last=True), or x.var(0, correction=0)",
    )


@rule()
def fully_masked_rows(e: Evidence) -> Cause | None:
    """Softmax of a row that holds nothing but -Inf."""
    finding, stats = e.finding, e.stats
    if not stats.nan_count or stats.posinf_count:
        return None
    masks = {
        site: seen.neginf_count
        for site, seen in (*finding.given, *e.inputs_from_outside)
        if seen.neginf_count and seen.neginf_count == seen.nonfinite_count
    }
    module = e.layer
    row = _softmax_row(module, stats)
    # A boolean mask is not scanned; torch's attention has nothing else to make NaN of.
    if not masks and not (row and isinstance(module, nn.MultiheadAttention)):
        return None
    if row and stats.nan_count % row:
        return None
    count = stats.nan_count // row if row else 0
    rows = f": {count:,} whole row{'s' * (count > 1)} of {row:,}" if row else ""
    held = "; ".join(f"{site} holds {count:,} -Inf" for site, count in masks.items())
    evidence = (
        f"{stats.nan_count:,} NaN and no +Inf{rows}; {held or 'no float mask was given'}; "
        "all else that went in is finite"
    )
    if row:
        is_attention = isinstance(module, nn.MultiheadAttention)
        return causes.masked_rows(
            evidence, count, "an attention" if is_attention else "the softmax"
        )
    title = "NaN out of -Inf: a fully masked row of a softmax, or 0 * -Inf"
    return Cause(title, evidence, causes.UNMASK)


def _softmax_row(module: nn.Module | None, stats: ScanResult) -> int:
    """Length of the rows that go bad as a whole; 0 where it is not known."""
    if isinstance(module, nn.MultiheadAttention):
        return int(module.embed_dim)
    if isinstance(module, (nn.Softmax, nn.LogSoftmax)) and module.dim is not None:
        return (
            int(stats.shape[module.dim])
            if -len(stats.shape) <= module.dim < len(stats.shape)
            else 0
        )
    return 0


@rule()
def mean_over_nothing(e: Evidence) -> Cause | None:
    """A loss module that averages, and has nothing to average over."""
    finding, stats = e.finding, e.stats
    module = e.layer
    if not isinstance(module, _Loss) or module.reduction != "mean":
        return None
    if stats.numel != 1 or not stats.nan_count or not finding.given:
        return None
    given, top = finding.given[0][1], finding.given[0][1].absmax or 0.0
    kind, ignored = type(module).__name__, getattr(module, "ignore_index", None)
    if not given.is_finite:
        return None
    if given.numel == 0:
        was_given = f"it was given {list(given.shape)}"
    elif ignored is not None and top < torch.finfo(given.dtype).max / 16:
        was_given = (
            f"it is NaN, not Inf, of finite logits with absmax {number(top)}; only labels that are "
            f"all ignore_index={ignored}, or class weights that are all 0, give that"
        )
    else:
        return None
    return causes.empty_mean(f"{kind}(reduction='mean'): {was_given}", of_labels=given.numel > 0)


@rule()
def nan_loss_of_finite_outputs(e: Evidence) -> Cause | None:
    """A NaN loss of finite values, outside of a loss module: one of a few possible causes."""
    finding, stats = e.finding, e.stats
    label = finding.site.name.partition("#")[0]
    is_loss = e.kind is Kind.LOSS or (label + finding.site.path).lower().endswith("loss")
    if mean_over_nothing(e) is not None:
        return None
    if not is_loss or stats.numel != 1 or not stats.nan_count:
        return None
    if any(seen.neginf_count for _, seen in (*finding.given, *e.inputs_from_outside)):
        return None
    scanned, bad, top = e.step.forward_before(e.row)
    if bad or not scanned or top > math.log(torch.finfo(e.step.narrowest).max) / 2:
        return None
    past = e.trend
    before = f"; in the steps before it was finite, {number(past.last)} at last" if past else ""
    return Cause(
        "the loss is a mean over nothing, or a log, root or quotient outside of its domain",
        f"it is NaN, not Inf, and the {scanned} tensors scanned before it are finite with absmax "
        f"{number(top)}, far from overflow{before}",
        "look at the labels: assert (labels != ignore_index).any(); guard the rest: "
        "log(p.clamp(min=1e-6)), x / n.clamp(min=1)",
    )
