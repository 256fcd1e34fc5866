"""Causes of what goes bad in backward, or through the steps before: growth, derivatives, scale."""

from __future__ import annotations

import itertools

import torch

from nanscan._data import causes
from nanscan._data.cause import Cause
from nanscan._data.text import dtype_name, number, rounded
from nanscan._judge.evidence import Evidence
from nanscan._judge.rule import rule

_MEDIUM_SCALE = 2.0**16  # with which a GradScaler starts
_DEPTH = 3  # fewest modules that show a growth from one to the next


@rule(verdicts=("origin", "near-limit"), kinds=lambda kind: kind.is_trained)
def learning_rate(e: Evidence) -> Cause | None:
    """Loss, gradients and parameters grew together: each step makes the next one larger."""
    optimizer = e.optimizer
    lr = e.option("lr")
    losses, gradients, parameters = e.step.losses, e.step.gradients, e.step.parameters
    if optimizer is None or lr is None or not losses.explodes or parameters.growth < 1.2:  # noqa: PLR2004
        return None
    return Cause(
        f"the learning rate is too high: training diverges at lr={lr:g}",
        f"the loss went {losses}, absmax of gradients {gradients}, absmax of parameters "
        f"{parameters}",
        f"{optimizer.name}(..., lr={rounded(lr / 10)}), a warm-up, or clipped gradients",
    )


@rule(kinds=lambda kind: kind.is_trained)
def exploding_gradients(e: Evidence) -> Cause | None:
    """Gradients grew by orders of magnitude in the steps before."""
    gradients = e.step.gradients
    if not gradients.explodes:
        return None
    return Cause(
        "exploding gradients",
        f"absmax of all gradients went {gradients}; in the first half of these it was at most "
        f"{number(gradients.early)}",
        f"torch.nn.utils.clip_grad_value_(model.parameters(), {rounded(gradients.early)}) before "
        "optimizer.step(), or a lower learning rate",
    )


@rule(kinds=lambda kind: kind.is_gradient)
def overflow_in_backward(e: Evidence) -> Cause | None:
    """Inf, where gradients of this backward were large for the dtype that it ran in."""
    finding, limit = e.finding, torch.finfo(e.step.narrowest).max
    modules = e.step.gradients_by_module(e.row)
    if not finding.stats.inf_count or not modules or e.step.forward_before(e.row)[1]:
        return None
    name, top = max(modules, key=lambda module: module[1])
    beside = finding.stats.absmax or 0.0 if finding.dtype == e.step.narrowest else 0.0
    pace = _pace([size for _, size in modules])
    if max(top, beside) < limit / 16 and modules[-1][1] * pace**2 < limit:
        return None
    dtype = dtype_name(e.step.narrowest)
    growth = f", {pace:.3g}-fold from module to module" if pace > 1 else ""
    near = f"finite values up to {number(beside)} beside it; " if beside else ""
    return Cause(
        f"gradients overflow {dtype} on the way back",
        f"{finding.stats.inf_count:,} Inf; {near}the largest gradient before it is {number(top)}, "
        f"of {name}{growth}; values are {dtype}, which ends at {limit:g}",
        "a torch.amp.GradScaler, which finds a scale for the loss; bfloat16; or a smaller gain or "
        "a normalisation in these modules",
    )


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
    finding = e.finding
    scanned, bad, top = e.step.forward_before(e.row)
    if bad or e.step.gradients.explodes or overflow_in_backward(e) is not None:
        return None
    where = f"in the backward that made {finding.site}"
    if finding.between:
        where = f"between {finding.between[0]}, which is finite, and {finding.between[1]}"
    return causes.undefined_derivative(
        f"all {scanned} tensors scanned in the forward of this step were finite, absmax "
        f"{number(top)}; it went bad {where}"
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
        f"it was {first:g} in the first of {e.record.skips} skipped steps and is {scale:g} "
        f"now; a GradScaler starts with {_MEDIUM_SCALE:g}{zeros}",
        "torch.amp.GradScaler(growth_interval=2000), and a cap after scaler.update(): "
        "if scaler.get_scale() > 2**24: scaler.update(2.0**24)",
    )


@rule(verdicts=("persistent-overflow",))
def no_loss_scale_helps(e: Evidence) -> Cause | None:
    """The scale fell to 1 or less: gradients are bad without any scaling."""
    scale, first = e.record.scale, e.record.first_scale
    if not scale <= 1:
        return None
    stats, (scanned, _, top) = e.stats, e.step.forward_before(e.row)
    return Cause(
        "gradients are bad at any loss scale: backward itself makes them so",
        f"the scale fell from {first:g} to {scale:g} in {e.record.skips} skipped steps, and "
        f"there are still {stats.nan_count:,} NaN and {stats.inf_count:,} Inf; all {scanned} "
        f"tensors scanned in the forward are finite, absmax {number(top)}",
        "torch.autocast(..., dtype=torch.bfloat16) without a GradScaler; if it stays, look for "
        "sqrt, log, norm or division at 0",
    )
