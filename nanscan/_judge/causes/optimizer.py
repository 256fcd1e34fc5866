"""Causes of bad parameters and moments: how they began, and what the optimizer did."""

from __future__ import annotations

import math

import torch

from nanscan._data import causes
from nanscan._data.cause import Cause
from nanscan._data.dtypes import rounds_to_zero, smallest
from nanscan._data.settings import bad_settings
from nanscan._data.site import Kind
from nanscan._data.text import dtype_name, largest, number, rounded_down, share
from nanscan._judge.causes.gradients import overflow_in_backward
from nanscan._judge.evidence import Evidence
from nanscan._judge.rule import rule

_SQUARES = ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum")  # of Adam, RMSprop, Adagrad, ...


@rule(verdicts=("origin", "near-limit"))
def uninitialised_parameter(e: Evidence) -> Cause | None:
    """Non-finite or absurd before anything ran."""
    if not e.from_start:
        return None
    stats = e.stats
    if stats.is_finite and stats.absmax == torch.finfo(stats.dtype).max:
        return None  # filled on purpose, as masks are
    evidence = (
        f"it reaches {stats.absmax:.3g}, {share(stats.absmax or 0, torch.finfo(stats.dtype).max)} "
        f"of the largest {dtype_name(stats.dtype)}, before the first forward"
        if stats.is_finite
        else f"{stats.nonfinite_count:,} of {stats.numel:,} elements were non-finite before the "
        "first forward"
    )
    if e.kind is Kind.BUFFER:
        name = e.finding.site.name
        return Cause(
            "the buffer was never filled, or loaded from a bad checkpoint",
            evidence,
            f"compute {name} before the model runs, or load a state_dict that holds it",
        )
    return Cause(
        "the parameter was never initialised, or loaded from a bad checkpoint",
        evidence,
        "after to_empty(device=...) call reset_parameters() on every module that has it, or load a "
        "state_dict that is finite",
    )


@rule(kinds=lambda kind: kind in (Kind.PARAM, Kind.STATE))
def setting_not_finite(e: Evidence) -> Cause | None:
    """A learning rate or the like that is Inf or NaN makes parameters so, whatever the gradient."""
    facts = e.optimizer
    if facts is None:
        return None
    bad = next(bad_settings(facts.name, facts.group, facts.options), None)
    return None if bad is None else causes.setting_not_finite(bad, str(e.finding.site))


@rule(kinds=lambda kind: kind is Kind.PARAM)
def eps_rounds_to_zero(e: Evidence) -> Cause | None:
    """A zero gradient then gives 0 / 0."""
    finding, optimizer, eps = e.finding, e.optimizer, e.option("eps")
    if optimizer is None or not eps or optimizer.options.get("fused"):
        return None  # a fused optimizer computes in float32
    name = next((name for name in _SQUARES if name in optimizer.moments), "")
    second = optimizer.moments.get(name)
    if second is None or not rounds_to_zero(eps, second.dtype) or second.zero_count == 0:
        return None
    dtype = dtype_name(second.dtype)
    return Cause(
        f"{optimizer.name}'s eps={eps:g} is 0 in {dtype}: the update divides by sqrt(0) + 0",
        f"{name} holds {second.zero_count:,} exact zeros of {second.numel:,}; the parameter "
        f"has {finding.stats.nonfinite_count:,} non-finite; the smallest {dtype} is "
        f"{smallest(second.dtype):.1e}",
        f"{optimizer.name}(..., eps=1e-4), or keep parameters in float32 and use torch.autocast",
    )


@rule(kinds=lambda kind: kind in (Kind.PARAM, Kind.STATE))
def second_moment_overflow(e: Evidence) -> Cause | None:
    """The square of a finite gradient does not fit."""
    finding, optimizer = e.finding, e.optimizer
    gradient = e.gradient
    if optimizer is None or gradient is None or not gradient.is_finite or not gradient.absmax:
        return None
    names = [name for name in _SQUARES if name in optimizer.moments]
    bad = [name for name in names if optimizer.moments[name].inf_count]
    if not bad or (e.kind is Kind.STATE and finding.site.path not in bad):
        return None
    moment, top = optimizer.moments[bad[0]], gradient.absmax
    limit, dtype = torch.finfo(moment.dtype).max, dtype_name(moment.dtype)
    betas = optimizer.options.get("betas", (0.0, 0.0))
    square = (1 - float(betas[1])) * top**2
    if square < limit / 4:
        return None
    share = f"(1 - {betas[1]:g}) * {number(top)}^2 = " if betas[1] else f"{number(top)}^2 = "
    return causes.second_moment_overflow(
        f"{bad[0]} has {moment.inf_count:,} Inf; the gradient is finite with absmax {number(top)}, "
        f"and {share}{number(square)} > {largest(moment.dtype)}; updates of Inf are 0 from now on",
        dtype,
        optimizer.name,
        bad[0],
    )


@rule(kinds=lambda kind: kind is Kind.PARAM)
def update_too_large(e: Evidence) -> Cause | None:
    """Plain SGD: learning rate times gradient is beyond the parameter's dtype."""
    finding, optimizer, gradient = e.finding, e.optimizer, e.gradient
    lr = e.option("lr")
    if optimizer is None or optimizer.name != "SGD" or lr is None or not math.isfinite(lr):
        return None
    if gradient is None or not gradient.is_finite:
        return None
    top, limit = gradient.absmax or 0.0, torch.finfo(finding.dtype).max
    if lr * top <= limit / 2:
        return None
    return Cause(
        f"the learning rate is too high: one update of lr={number(lr)} does not fit into "
        f"{dtype_name(finding.dtype)}",
        f"lr times the gradient's absmax of {number(top)} is {number(lr * top)}; the largest "
        f"{dtype_name(finding.dtype)} is {largest(finding.dtype)}",
        f"SGD(..., lr={rounded_down(0.01 / top)}), with which an update is at most 0.01",
    )


@rule()
def trained_in_half_precision(e: Evidence) -> Cause | None:
    """Parameters that an optimizer steps are float16: moments or gradients do not fit."""
    if e.finding.dtype != torch.float16:
        return None
    rules = (eps_rounds_to_zero, second_moment_overflow, overflow_in_backward)
    half = e.record.model.trained.count(torch.float16)
    if e.optimizer is None or not half or all(each(e) is None for each in rules):
        return None  # a forward overflows under autocast as well
    return Cause(
        "parameters are trained in float16 itself, without autocast and GradScaler",
        f"{half} of {len(e.record.model.trained)} trained parameters are float16, which ends at "
        f"65504 and at {smallest(torch.float16):.1e}; under torch.autocast they are float32",
        "model.float(); with torch.autocast(device, torch.float16): ...; "
        "torch.amp.GradScaler().scale(loss).backward()",
    )
