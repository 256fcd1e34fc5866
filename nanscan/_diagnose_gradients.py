"""Causes of what goes bad in backward, or through the steps before: growth, derivatives, scale."""

from __future__ import annotations

import itertools

import torch

from nanscan._facts import Facts, name_of, number, option
from nanscan._judge import Cause, Judged

_BACKWARD = ("grad", "grad_output")
_TRAINED = (*_BACKWARD, "input", "output", "loss", "probe", "param")
_MEDIUM_SCALE = 2.0**16  # with which a GradScaler starts
_DEPTH = 3  # modules from which a growth from one to the next can be told


def learning_rate(judged: Judged, facts: Facts) -> Cause | None:
    """Loss, gradients and parameters grew together: each step makes the next one larger."""
    if judged.finding.verdict != "origin" or judged.finding.site.kind not in _TRAINED:
        return None
    optimizer = facts.optimizer(judged)
    lr = option(optimizer, "lr")
    losses, gradients, parameters = facts.losses, facts.gradients, facts.parameters
    if optimizer is None or lr is None or not losses.explodes or parameters.growth < 1.2:  # noqa: PLR2004
        return None
    return Cause(
        f"the learning rate is too high: training diverges at lr={lr:g}",
        f"the loss went {losses}, absmax of gradients {gradients}, absmax of parameters "
        f"{parameters}",
        f"{optimizer.name}(..., lr={lr / 10:.1g}), a warm-up, or clipped gradients",
    )


def exploding_gradients(judged: Judged, facts: Facts) -> Cause | None:
    """Gradients grew by orders of magnitude in the steps before."""
    if judged.finding.verdict != "origin" or judged.finding.site.kind not in _TRAINED:
        return None
    gradients = facts.gradients
    if not gradients.explodes:
        return None
    return Cause(
        "exploding gradients",
        f"absmax of all gradients went {gradients}; in the first half of these it was at most "
        f"{number(gradients.early)}",
        f"torch.nn.utils.clip_grad_value_(model.parameters(), {gradients.early:.1g}) before "
        "optimizer.step(), or a lower learning rate",
    )


def growth_on_the_way_back(judged: Judged, facts: Facts) -> Cause | None:
    """Within one backward, from module to module, up to where it went bad."""
    finding = judged.finding
    if finding.verdict != "origin" or finding.site.kind not in _BACKWARD:
        return None
    modules = facts.gradients_by_module(judged.node.row)
    if len(modules) < _DEPTH or facts.forward[1]:
        return None
    (first, small), (last, large) = modules[0], modules[-1]
    rises = sum(b > a for (_, a), (_, b) in itertools.pairwise(modules))
    limit = torch.finfo(facts.narrowest).max
    per_module = (large / small) ** (1 / (len(modules) - 1))
    # Two more modules at this pace would be beyond the limit.
    if rises < 0.6 * (len(modules) - 1) or large * per_module**2 < limit:
        return None
    return Cause(
        f"gradients grow from module to module on the way back, beyond {limit:g}",
        f"absmax of the gradient is {number(small)} at {first}, {number(large)} at {last}, "
        f"{len(modules) - 1} modules on: {per_module:.3g}-fold each; outputs are "
        f"{name_of(facts.narrowest)}",
        "a smaller initial gain, a normalisation between the modules, a smaller loss, or bfloat16",
    )


def undefined_derivative(judged: Judged, facts: Facts) -> Cause | None:
    """Backward made it, and neither a trend nor growth says that it overflowed."""
    finding = judged.finding
    if finding.verdict != "origin" or finding.site.kind not in _BACKWARD:
        return None
    scanned, bad, top = facts.forward
    if bad or facts.gradients.explodes or growth_on_the_way_back(judged, facts) is not None:
        return None
    where = f"in the backward that made {finding.site}"
    if finding.between:
        where = f"between {finding.between[0]}, which is finite, and {finding.between[1]}"
    return Cause(
        "backward made it: a derivative is undefined or overflowed there",
        f"all {scanned} tensors scanned in the forward of this step were finite, absmax "
        f"{number(top)}; it went bad {where}",
        "look there for sqrt, log, norm or division at 0, and for torch.where, which does not stop "
        "0 * inf = NaN in backward: make the argument safe first, "
        "torch.sqrt(torch.where(x > 0, x, 1))",
    )


# -- a GradScaler ----------------------------------------------------------------------------------


def loss_scale_too_large(judged: Judged, facts: Facts) -> Cause | None:
    """After all those halvings the scale is still more than a GradScaler starts with."""
    scale, first = facts.snapshot.scale, facts.snapshot.first_scale
    if judged.finding.verdict != "persistent-overflow" or not scale > _MEDIUM_SCALE:
        return None
    quiet = int((facts.gradients.values == 0).sum())
    zeros = f"; all gradients were 0 in {quiet} of the steps before" if quiet else ""
    return Cause(
        "the loss scale has grown far too large",
        f"it was {first:g} in the first of {facts.snapshot.skips} skipped steps and is {scale:g} "
        f"now; a GradScaler starts with {_MEDIUM_SCALE:g}{zeros}",
        "torch.amp.GradScaler(growth_interval=2000), and a cap after scaler.update(): "
        "if scaler.get_scale() > 2**24: scaler.update(2.0**24)",
    )


def no_loss_scale_helps(judged: Judged, facts: Facts) -> Cause | None:
    """The scale fell to 1 or less: gradients are bad without any scaling."""
    scale, first = facts.snapshot.scale, facts.snapshot.first_scale
    if judged.finding.verdict != "persistent-overflow" or not scale <= 1:
        return None
    stats, (scanned, _, top) = judged.finding.stats, facts.forward
    return Cause(
        "gradients are bad at any loss scale: backward itself makes them so",
        f"the scale fell from {first:g} to {scale:g} in {facts.snapshot.skips} skipped steps, and "
        f"there are still {stats.nan_count:,} NaN and {stats.inf_count:,} Inf; all {scanned} "
        f"tensors scanned in the forward are finite, absmax {number(top)}",
        "torch.autocast(..., dtype=torch.bfloat16) without a GradScaler; if it stays, look for "
        "sqrt, log, norm or division at 0",
    )
