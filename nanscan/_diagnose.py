"""From a finding to its likely causes: one small function a cause, each resting on numbers.

A rule returns None unless the numbers it names are there. "No cause found" is an answer.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from nanscan._judge import Cause, Judged
from nanscan._sites import Site
from nanscan._table import OptimizerFacts
from nanscan._tensors import rounds_to_zero

_FAR_FROM_UNIT_SCALE = 50.0
_HALF = (torch.float16, torch.bfloat16)


def causes(judged: Judged, optimizer: OptimizerFacts | None) -> list[Cause]:
    """Likely causes of a finding, best first."""
    found = [rule(judged, optimizer) for rule in _RULES]
    return [cause for cause in found if cause is not None]


def _uninitialised_parameter(judged: Judged, _: OptimizerFacts | None) -> Cause | None:
    if not judged.untrained:
        return None
    stats = judged.finding.stats
    return Cause(
        "the parameter was never initialised, or loaded from a bad checkpoint",
        f"{stats.nonfinite_count:,} of {stats.numel:,} elements were non-finite before the first "
        "forward",
        "after to_empty(device=...) call reset_parameters() on every module or load a state_dict",
    )


def _adam_eps_rounds_to_zero(judged: Judged, optimizer: OptimizerFacts | None) -> Cause | None:
    finding = judged.finding
    if finding.site.kind != "param" or finding.verdict != "origin" or optimizer is None:
        return None
    eps = optimizer.options.get("eps")
    second = optimizer.moments.get("exp_avg_sq")
    if not eps or second is None or not rounds_to_zero(eps, second.dtype):
        return None
    if second.zero_count == 0:
        return None
    dtype = str(second.dtype).removeprefix("torch.")
    return Cause(
        f"{optimizer.name}'s eps={eps:g} is 0 in {dtype}: the update divides by sqrt(0) + 0",
        f"exp_avg_sq holds {second.zero_count:,} exact zeros of {second.numel:,}; the parameter "
        f"has {finding.stats.nonfinite_count:,} non-finite; the smallest {dtype} is "
        f"{_smallest(second.dtype):.1e}",
        f"{optimizer.name}(..., eps=1e-4), or keep parameters in float32 and use torch.autocast",
    )


def _smallest(dtype: torch.dtype) -> float:
    info = torch.finfo(dtype)
    return float(info.smallest_normal) * float(info.eps)


def _bad_input_batch(judged: Judged, _: OptimizerFacts | None) -> Cause | None:
    if not judged.from_outside:
        return None
    finding = judged.finding
    return Cause(
        "the batch was bad before the model saw it",
        f"{finding.site} came from the caller with {finding.stats.nonfinite_count:,} non-finite of "
        f"{finding.stats.numel:,} elements; nothing was bad earlier in step {finding.step}",
        "find the sample in the data loader; drop or repair it: "
        "assert torch.isfinite(batch).all() in the dataset",
    )


def _overflow(judged: Judged, _: OptimizerFacts | None) -> Cause | None:
    finding, stats = judged.finding, judged.finding.stats
    if finding.verdict != "origin" or finding.site.kind not in ("input", "output"):
        return None
    if not stats.inf_count or stats.absmax is None or stats.dtype.is_complex:
        return None
    limit = torch.finfo(stats.dtype).max
    past = finding.history.get("absmax", np.zeros(0))
    reached = float(np.nanmax([stats.absmax, *past]))
    if reached < limit / 16:
        return None
    dtype = str(stats.dtype).removeprefix("torch.")
    return Cause(
        f"overflow of {dtype}: values grew beyond {limit:g}",
        f"{stats.inf_count:,} Inf beside finite values up to {reached:,.6g} "
        f"({reached / limit:.0%} of the largest {dtype})",
        "use bfloat16, which reaches 3e38, or rescale what feeds this place"
        if stats.dtype == torch.float16
        else "rescale or normalise what feeds this place",
    )


def _undefined_derivative(judged: Judged, _: OptimizerFacts | None) -> Cause | None:
    finding = judged.finding
    if finding.site.kind != "grad" or finding.verdict != "origin":
        return None
    where = f"in the backward that made {finding.site}"
    if finding.between:
        where = f"between {finding.between[0]}, which is finite, and {finding.between[1]}"
    return Cause(
        "backward made it: a derivative is undefined or overflowed there",
        f"every value scanned in the forward of this step was finite; it went bad {where}",
        "look there for sqrt, log, norm or division at 0, and for torch.where, which does not stop "
        "0 * inf = NaN in backward: make the argument safe first, "
        "torch.sqrt(torch.where(x > 0, x, 1))",
    )


def _far_from_unit_scale(judged: Judged, _: OptimizerFacts | None) -> Cause | None:
    finding = judged.finding
    if finding.verdict != "origin" or finding.stats.dtype not in _HALF:
        return None
    largest: tuple[Site, float] | None = None
    for site, stats in judged.inputs_from_outside:
        if stats.absmax is not None and (largest is None or stats.absmax > largest[1]):
            largest = site, stats.absmax
    if largest is None or largest[1] < _FAR_FROM_UNIT_SCALE:
        return None
    return Cause(
        "inputs are far from unit scale for 16-bit training",
        f"{largest[0]} reaches {largest[1]:g}",
        "normalise the data (x / 255 for images), or train in float32 under torch.autocast",
    )


Rule = Callable[[Judged, OptimizerFacts | None], Cause | None]

_RULES: tuple[Rule, ...] = (
    _uninitialised_parameter,
    _adam_eps_rounds_to_zero,
    _bad_input_batch,
    _overflow,
    _undefined_derivative,
    _far_from_unit_scale,
)
