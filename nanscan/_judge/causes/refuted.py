"""What is commonly suspected and, by the numbers, is not the cause. Rules that give a sentence."""

from __future__ import annotations

import math
from functools import partial

import torch

from nanscan._data.site import Kind
from nanscan._data.text import dtype_name, number
from nanscan._judge.evidence import Evidence
from nanscan._judge.rule import rule

_suspicion = partial(rule, verdicts=("origin", "persistent-overflow"))


@_suspicion()
def not_the_batch(e: Evidence) -> str | None:
    """Every input of the model is finite."""
    inputs = [stats for _, stats in e.inputs_from_outside]
    if not inputs or not all(stats.is_finite for stats in inputs):
        return None
    top = max((stats.absmax or 0.0 for stats in inputs), default=0.0)
    return f"bad input batch: every input of the step is finite, absmax {number(top)}"


@_suspicion(kinds=lambda kind: kind.is_gradient or kind.is_forward)
def not_exploding(e: Evidence) -> str | None:
    """Gradients did not grow in the steps before."""
    gradients = e.step.gradients
    if len(gradients) < 4 or gradients.growth > 2 or gradients.early == 0:  # noqa: PLR2004
        return None
    if e.kind is Kind.GRAD and e.stats.inf_count:
        return None
    return f"exploding gradients: their absmax went {gradients}"


@_suspicion(kinds=lambda kind: kind is Kind.PARAM)
def not_this_gradient(e: Evidence) -> str | None:
    """Of a parameter: its square fits, so that no moment of it overflows."""
    gradient = e.gradient
    top = math.inf if gradient is None else gradient.absmax or 0.0
    if top * top > torch.finfo(e.finding.dtype).max:
        return None
    return f"exploding gradients: the gradient is finite, absmax {number(top)}"


def _no_overflow(e: Evidence) -> str | None:
    """Where even the exponential of the largest value that was seen is far from the limit."""
    dtype = e.step.narrowest
    scanned, bad, top = e.step.forward_before(e.row)
    top = max([top, *(size for _, size in e.step.gradients_by_module(e.row))])
    limit = float(torch.finfo(dtype).max)
    if e.stats.inf_count or bad or not scanned or top > math.log(limit) / 2:
        return None
    return (
        f"overflow: finite values of the step reach {number(top)}; {dtype_name(dtype)} ends at "
        f"{number(limit)}"
    )


not_overflow_of_values = _suspicion(kinds=lambda kind: kind.is_forward)(_no_overflow)
not_overflow_of_gradients = _suspicion(kinds=lambda kind: kind.is_gradient)(_no_overflow)
