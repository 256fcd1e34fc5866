"""Causes that are known of layers and losses: normalisation, masks, running statistics, means."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.loss import _Loss

from nanscan._data import causes
from nanscan._data.cause import Cause
from nanscan._data.dtypes import rounds_to_zero
from nanscan._data.places import SinglePlace
from nanscan._data.result import ScanResult, bad_counts
from nanscan._data.site import Kind
from nanscan._data.text import dtype_name, largest, number, plural
from nanscan._judge.evidence import Evidence
from nanscan._judge.rule import rule

_HALF = (torch.float16, torch.bfloat16)
_FUNCTIONS = {"CrossEntropyLoss": "cross_entropy", "NLLLoss": "nll_loss"}


# -- normalisation ---------------------------------------------------------------------------------


@rule()
def zero_variance(e: Evidence) -> Cause | None:
    """A normalisation whose eps is 0 has nothing to divide by where all values are one."""
    stats, module = e.stats, e.layer
    if module is None or "Norm" not in type(module).__name__ or not e.is_given_finite:
        return None
    name = next((n for n in ("eps", "variance_epsilon") if hasattr(module, n)), "")
    eps = getattr(module, name, None)
    of_torch = isinstance(module, (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm))
    single = of_torch and stats.dtype in _HALF  # torch's own layers compute in float32
    dtype = torch.float32 if single else stats.dtype
    if not isinstance(eps, (int, float)) or not rounds_to_zero(float(eps), dtype):
        return None
    top = max(seen.absmax or 0.0 for _, seen in e.finding.given)
    if top**2 * stats.numel > torch.finfo(dtype).max:
        return None  # the squares may overflow, too
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
        "all is NaN in a batch of one sample: a variance of a single value is 0 / 0",
        f"all {stats.numel:,} values of shape {list(stats.shape)} are NaN; in the {len(before)} "
        f"steps before there were at least {min(before):,}, all finite",
        "DataLoader(..., drop_last=True)",
    )


@rule(verdicts=("origin", "propagated"), kinds=lambda kind: kind is Kind.BUFFER)
def spoiled_statistics(e: Evidence) -> Cause | None:
    """Running statistics keep what one bad batch left in them, and only eval mode uses them."""
    place, stats = e.node.place, e.stats
    if not isinstance(place, SinglePlace) or not place.is_statistic or place.parent is None:
        return None
    name, layer = e.finding.site.name.rpartition(".")[2], place.parent.name
    of_inf = "divide by Inf" if name == "running_var" else "return non-finite values"
    will = "return NaN" if stats.nan_count else of_inf
    return Cause(
        f"{name} of {layer} is non-finite: model.eval() will {will} until it is reset",
        f"{bad_counts(stats)} of {plural(stats.numel, 'channel')}; a running average never gets "
        "rid of it, whatever the batches that follow; train mode does not read it",
        f"{layer}.reset_running_stats(), then batches in train mode; or load it from a checkpoint",
    )


@rule(verdicts=("all-zero",), kinds=lambda kind: kind is Kind.OUTPUT)
def wiped_out(e: Evidence) -> Cause | None:
    """The square of an input overflows, and what is divided by it is 0."""
    tops = [seen.absmax or 0.0 for _, seen in e.finding.given]
    if not tops or max(tops) ** 2 <= torch.finfo(e.stats.dtype).max:
        return None
    top, dtype = max(tops), dtype_name(e.stats.dtype)
    return Cause(
        f"squares overflow {dtype}, and division by Inf gives 0",
        f"it was given values up to {number(top)}; {number(top)}^2 = {number(top**2)}, and {dtype} "
        f"ends at {largest(e.stats.dtype)}; it was not 0 in the steps before",
        "x.float() before the squares, and back after them" if dtype == "float16" else "",
    )


# -- masks -----------------------------------------------------------------------------------------


@rule(kinds=lambda kind: kind in (Kind.INPUT, Kind.OUTPUT, Kind.PROBE))
def fully_masked_rows(e: Evidence) -> Cause | None:
    """Softmax of a row that holds nothing but -Inf."""
    stats, module = e.stats, e.layer
    if not stats.nan_count or stats.posinf_count:
        return None
    seen = (*e.finding.given, *e.inputs_from_outside)
    masks = {site: held for site, held in (*seen, *e.step.masks_before(e.row)) if _is_mask(held)}
    row, others = _row_length(module, stats), [held for _, held in seen if not _is_mask(held)]
    if not row or stats.nan_count % row or not all(held.is_finite for held in others):
        return None
    count = stats.nan_count // row
    held = "; ".join(f"{site} holds {held.neginf_count:,} -Inf" for site, held in masks.items())
    evidence = (
        f"{stats.nan_count:,} NaN and no +Inf: {plural(count, 'whole row')} of {row:,}; "
        f"{held or 'no float mask was given'}; all else that went in is finite"
    )
    if isinstance(module, (nn.Softmax, nn.LogSoftmax)) and masks:
        return causes.masked_rows(evidence, count, remedy=_FILL)
    if isinstance(module, nn.MultiheadAttention):
        # A boolean mask is not scanned, and an attention has nothing else to make NaN of.
        return causes.masked_rows(evidence, count, "an attention", _UNCOVER)
    if (stats.first_nonfinite or (1,))[-1] != 0 or not any(map(_masks_a_row, masks.values())):
        return None
    title = "NaN out of -Inf: a fully masked row of a softmax, or 0 * -Inf"
    return Cause(title, evidence, "" if e.kind is Kind.PROBE else _FILL)


# Of scores of an attention; in a sampler it would choose among tokens that are all banned.
_FILL = (
    "of attention scores: scores.masked_fill(~mask, torch.finfo(scores.dtype).min) in the place of "
    "-inf"
)
_UNCOVER = "let each query see one key at least, mask[nothing_seen, 0] = False, and drop such rows"


def _is_mask(stats: ScanResult) -> bool:
    return stats.neginf_count == stats.nonfinite_count > 0


def _masks_a_row(mask: ScanResult) -> bool:
    """Whether a row of a mask may hold nothing but -Inf: the first that holds any begins so.

    That of a causal mask does not.
    """
    first, length = mask.first_nonfinite, mask.shape[-1] if mask.shape else 1
    return first is not None and first[-1:] in ((0,), ()) and mask.neginf_count >= length


def _row_length(module: nn.Module | None, stats: ScanResult) -> int:
    """Length of the rows that go bad as a whole; 0 where it is not known."""
    dim: int | None = -1
    if isinstance(module, (nn.Softmax, nn.LogSoftmax)):
        dim = module.dim
    size = len(stats.shape)
    return int(stats.shape[dim]) if dim is not None and -size <= dim < size else 0


# -- losses ----------------------------------------------------------------------------------------


@rule()
def mean_over_nothing(e: Evidence) -> Cause | None:
    """A loss module that averages, and has nothing to average over."""
    finding, stats, module = e.finding, e.stats, e.layer
    if not isinstance(module, _Loss) or module.reduction != "mean":
        return None
    if stats.numel != 1 or not stats.nan_count or not e.is_given_finite or e.bad_buffers:
        return None
    given = finding.given[0][1]
    kind, top = type(module).__name__, max(seen.absmax or 0.0 for _, seen in finding.given)
    if given.numel == 0:
        return causes.empty_mean(
            f"{kind}(reduction='mean'): it was given {list(given.shape)}",
        )
    if kind not in _FUNCTIONS or top > torch.finfo(given.dtype).max / 16:
        return None
    ignored, weight = getattr(module, "ignore_index", -100), getattr(module, "weight", None)
    if weight is not None and not e.has_finite_buffers:
        return None  # Inf / Inf
    weights = ", or class weights that are all 0," if weight is not None else ""
    return causes.empty_mean(
        f"{kind}(reduction='mean'): it is NaN, not Inf, of finite logits with absmax {number(top)};"
        f" only labels that are all ignore_index={ignored}{weights} give that",
        of_labels=True,
        remedy=_skip(ignored) if weight is not None else _count(_FUNCTIONS[kind], ignored),
    )


def _skip(ignored: int) -> str:
    return f"skip such a batch: if weight[y[y != {ignored}]].sum() > 0"


def _count(function: str, ignored: int) -> str:
    return (
        f"F.{function}(x, y, ignore_index={ignored}, reduction='sum') / "
        f"(y != {ignored}).sum().clamp(min=1)"
    )


@rule()
def nan_loss_of_finite_outputs(e: Evidence) -> Cause | None:
    """A NaN loss of finite values, outside of a loss module: one of a few possible causes."""
    finding, stats = e.finding, e.stats
    label = finding.site.name.partition("#")[0]
    is_loss = e.kind is Kind.LOSS or (label + finding.site.path).lower().endswith("loss")
    if not is_loss or stats.numel != 1 or not stats.nan_count or mean_over_nothing(e) is not None:
        return None
    before = e.step.forward_before(e.row)
    may_overflow = before.absmax > math.log(torch.finfo(e.step.narrowest).max) / 2
    if not before.is_finite or before.masked or may_overflow:
        return None
    past = e.trend
    was = f"; in the steps before it was finite, {number(past.last)} at last" if past else ""
    return Cause(
        "the loss is NaN and what came before is finite: a mean over nothing (no label counts), a "
        "log or root of negative values, or an Inf that was made on the way",
        f"it is NaN, not Inf, and {before}{was}",
        "",
    )
