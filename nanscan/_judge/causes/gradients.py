"""Causes of what goes bad in backward, or through the steps before: growth, derivatives, scale."""

from __future__ import annotations

import itertools

import torch
from torch import distributed

from nanscan._data import causes
from nanscan._data.cause import Cause
from nanscan._data.result import bad_counts
from nanscan._data.site import Kind
from nanscan._data.text import dtype_name, largest, number, rounded_down
from nanscan._judge.evidence import Evidence
from nanscan._judge.rule import rule

_MEDIUM_SCALE = 2.0**16  # with which a GradScaler starts
_DEPTH = 3  # fewest modules that show a growth from one to the next
_NEAR = 1 / 4  # of the largest value: what stands beside it has outgrown it


@rule(verdicts=("origin", "near-limit"), kinds=lambda kind: kind.is_trained)
def learning_rate(e: Evidence) -> Cause | None:
    """Loss, gradients and parameters grew together: each step makes the next one larger."""
    optimizer, lr = e.optimizer, e.option("lr")
    losses, gradients, parameters = e.step.losses, e.step.gradients, e.step.parameters
    if optimizer is None or lr is None or not losses.explodes or parameters.growth < 1.2:  # noqa: PLR2004
        return None
    if not gradients.explodes:
        return None
    return Cause(
        f"the learning rate is too high: training diverges at lr={number(lr)}",
        f"the loss went {losses}, absmax of gradients {gradients}, absmax of parameters "
        f"{parameters}",
        _lower_rate(e),
    )


def _lower_rate(e: Evidence) -> str:
    """The rate at which SGD does not diverge. For other optimizers no number is known.

    Gradient descent multiplies an error by 1 - lr * curvature. Where that is -pace, a rate of
    lr / (1 + pace) makes it 0.
    """
    optimizer, lr, pace = e.optimizer, e.option("lr"), e.step.gradients.pace
    if optimizer is None or lr is None or optimizer.name != "SGD" or pace <= 1:
        return ""
    return f"SGD(..., lr={rounded_down(lr / (1 + pace))})"


@rule(kinds=lambda kind: kind.is_trained)
def exploding_gradients(e: Evidence) -> Cause | None:
    """Gradients grew by orders of magnitude in the steps before, and moved the parameters."""
    gradients = e.step.gradients
    if not gradients.explodes or (e.kind.is_forward and e.step.parameters.growth < 1.2):  # noqa: PLR2004
        return None
    lr = e.option("lr")
    at = f"; lr={number(lr)}" if lr is not None else ""
    return Cause(
        "exploding gradients",
        f"absmax of all gradients went {gradients}; in the first half of these it was at most "
        f"{number(gradients.early)}{at}",
        _clip(e),
    )


def _clip(e: Evidence) -> str:
    """Clipping, where it changes anything: Adam and the like divide a gradient by its size."""
    optimizer = e.optimizer
    if optimizer is None or optimizer.name != "SGD" or e.step.is_clipped:
        return ""
    most = rounded_down(e.step.gradients.early)
    return f"torch.nn.utils.clip_grad_value_(model.parameters(), {most}) before optimizer.step()"


def _is_of_other_ranks(e: Evidence) -> bool:
    """Whether a gradient may have been summed with those of other ranks, which may be the bad."""
    if e.kind is not Kind.GRAD or not distributed.is_available():
        return False
    return distributed.is_initialized() and distributed.get_world_size() > 1


@rule(kinds=lambda kind: kind.is_gradient)
def overflow_in_backward(e: Evidence) -> Cause | None:
    """Inf, where gradients of this backward were large for the dtype that it ran in."""
    finding, limit = e.finding, torch.finfo(e.step.narrowest).max
    modules = e.step.gradients_by_module(e.row)
    if not finding.stats.inf_count or not modules or not e.step.forward_before(e.row).is_finite:
        return None
    name, top = max(modules, key=lambda module: module[1])
    beside = finding.stats.absmax or 0.0 if finding.dtype == e.step.narrowest else 0.0
    pace = _pace([size for _, size in modules])
    if max(top, beside) < limit * _NEAR and modules[-1][1] * pace**2 < limit:
        return None
    if _is_of_other_ranks(e):
        return None
    dtype = dtype_name(e.step.narrowest)
    growth = f", {number(pace)}-fold from module to module" if pace > 1 else ""
    near = f"finite values up to {number(beside)} beside it; " if beside else ""
    return Cause(
        f"gradients overflow {dtype} on the way back",
        f"{bad_counts(finding.stats)}; {near}the largest gradient before it is {number(top)}, "
        f"of {name}{growth}; values are {dtype}, which ends at "
        f"{largest(e.step.narrowest)}",
        _wider(e),
    )


def _wider(e: Evidence) -> str:
    """A GradScaler refuses gradients that are float16 themselves."""
    if e.step.narrowest != torch.float16:
        return ""
    if e.finding.dtype == torch.float16:
        return "bfloat16 in the place of float16: model.bfloat16()"
    return "torch.autocast(device, torch.bfloat16); or torch.amp.GradScaler(init_scale=1.0)"


def _pace(sizes: list[float]) -> float:
    """Growth a module, where gradients mostly grow; else 1."""
    if len(sizes) < _DEPTH:
        return 1.0
    rises = sum(b > a for a, b in itertools.pairwise(sizes)) / (len(sizes) - 1)
    growth = float(sizes[-1] / sizes[0]) ** (1 / (len(sizes) - 1))
    return max(growth, 1.0) if rises >= 0.6 else 1.0  # noqa: PLR2004


@rule(kinds=lambda kind: kind.is_gradient)
def undefined_derivative(e: Evidence) -> Cause | None:
    """Backward made it, and neither a trend nor its size says that it overflowed."""
    finding, before = e.finding, e.step.forward_before(e.row)
    if not before.is_finite or e.step.gradients.explodes or overflow_in_backward(e) is not None:
        return None
    if _is_of_other_ranks(e) or e.first_bad_call > 1 or e.step.are_gradients_nan:
        return None  # other ranks or code after backward may have made it
    where = f"in the backward that made {finding.site}"
    if finding.between:
        where = f"between {finding.between[0]}, which is finite, and {finding.between[1]}"
    return causes.undefined_derivative(f"{before}; it went bad {where}")


@rule(kinds=lambda kind: kind is Kind.GRAD)
def all_gradients_nan(e: Evidence) -> Cause | None:
    """Each value of each gradient is NaN, and the forward is finite."""
    before = e.step.forward_before(e.row)
    if not e.step.are_gradients_nan or not before.is_finite or _is_of_other_ranks(e):
        return None
    return Cause(
        "all gradients are NaN as a whole: the derivative of the loss is not finite, or they were "
        "multiplied with NaN after backward, as clipping by a norm that is NaN does",
        f"{before}; each value of all {len(e.step.scanned(Kind.GRAD))} gradients is NaN",
        "",
    )


@rule(verdicts=("origin", "propagated"), kinds=lambda kind: kind is Kind.GRAD)
def spread_by_clipping(e: Evidence) -> Cause | None:
    """clip_grad_norm_ multiplies all gradients with their norm's inverse, which is NaN for one NaN.

    They are scanned before it and after it.
    """
    stats, record = e.stats, e.record
    size = stats.numel // max(stats.calls, 1)
    if e.first_bad_call != 2 or stats.calls != 2 or stats.nan_count != size:  # noqa: PLR2004
        return None
    bad = [row for row in e.step.scanned(Kind.GRAD) if record.rows[row]["first_bad_call"] == 1]
    if not bad:
        return None
    first = record.nodes[min(bad, key=lambda row: int(record.rows[row]["ticket"]))].site
    return Cause(
        f"clipping spread the NaN of {first}: the norm of all gradients is NaN",
        f"{first} was bad before clipping, and this one was finite; after it all of its {size:,} "
        "values are NaN",
        "",
    )


# -- a GradScaler ----------------------------------------------------------------------------------


@rule(verdicts=("persistent-overflow",))
def loss_scale_too_large(e: Evidence) -> Cause | None:
    """After all those halvings the scale is still more than a GradScaler starts with."""
    scale, first = e.record.scale, e.record.first_scale
    if not scale > _MEDIUM_SCALE:
        return None
    quiet = int((e.step.gradients.values == 0).sum())
    zeros = f"; all gradients were 0 in {quiet} of the steps before" if quiet else ""
    return Cause(
        "the loss scale has grown far too large",
        f"it was {number(first)} in the first of {e.record.skips} skipped steps and is "
        f"{number(scale)} now; a GradScaler starts with {number(_MEDIUM_SCALE)}{zeros}",
        "a cap after scaler.update(): if scaler.get_scale() > 2**16: scaler.update(2.0**16)",
    )


@rule(verdicts=("persistent-overflow",))
def no_loss_scale_helps(e: Evidence) -> Cause | None:
    """The scale fell to 1 or less: gradients are bad without any scaling."""
    scale, first = e.record.scale, e.record.first_scale
    before = e.step.forward_before(e.row)
    if not scale <= 1 or not before.is_finite:
        return None
    return Cause(
        f"gradients are bad at a loss scale of {scale:g} as well: backward itself makes them so",
        f"the scale fell from {number(first)} to {scale:g} in {e.record.skips} skipped steps, and "
        f"there are still {bad_counts(e.stats)}; {before}",
        "",
    )
