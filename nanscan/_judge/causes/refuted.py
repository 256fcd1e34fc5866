"""What is commonly suspected and is proven not to be the cause. Rules that give a sentence.

That what was scanned is finite proves little: code between modules may have overflowed, and data
may be at fault by their labels, counts or scale. So neither is ever denied.
"""

from __future__ import annotations

import math

import torch

from nanscan._data.site import Kind
from nanscan._data.text import number
from nanscan._judge.evidence import Evidence
from nanscan._judge.rule import rule

# They take each element of a gradient by itself, and none of them adds more than a multiple of it.
_ELEMENTWISE = ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "RMSprop", "Adagrad")


@rule(kinds=lambda kind: kind.is_forward)
def not_exploding(e: Evidence) -> str | None:
    """All gradients of all steps before were scanned, and did not grow."""
    gradients = e.step.gradients
    if len(gradients) < 4 or not e.step.has_all_gradients or e.step.losses.explodes:  # noqa: PLR2004
        return None
    if gradients.early == 0 or gradients.values.max() > 2 * gradients.early:
        return None
    return f"exploding gradients: their absmax went {gradients}"


@rule(kinds=lambda kind: kind is Kind.PARAM)
def not_this_gradient(e: Evidence) -> str | None:
    """Neither the square of a parameter's gradient nor its update overflows."""
    gradient, optimizer, lr = e.gradient, e.optimizer, e.option("lr")
    if gradient is None or not gradient.is_finite or optimizer is None or lr is None:
        return None
    moments = optimizer.moments.values()
    keeps_none = optimizer.name == "SGD" and not optimizer.options.get("momentum")
    if optimizer.name not in _ELEMENTWISE or not (moments or keeps_none):
        return None
    if not all(moment.is_finite for moment in moments) or e.step.gradients.explodes:
        return None
    top, limit = gradient.absmax or 0.0, torch.finfo(e.finding.dtype).max
    if not math.isfinite(lr) or max(top * top, lr * top) > limit / 2:
        return None
    return f"exploding gradients: the gradient is finite, absmax {number(top)}"
