"""From a finding to its likely causes, and to what it is not.

A cause is one small function in the files of its topic, and rests on numbers: it returns None
unless they are there. "No likely cause found" is an answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from nanscan._data.cause import Cause
from nanscan._data.rules import ask
from nanscan._data.text import dtype_name, number
from nanscan._judge.causes.forward import (
    bad_input_batch,
    branches_of_different_scale,
    far_from_unit_scale,
    fully_masked_rows,
    growing_to_the_limit,
    mean_over_nothing,
    nan_loss_of_finite_outputs,
    overflow,
    single_sample,
    zero_variance,
)
from nanscan._judge.causes.gradients import (
    exploding_gradients,
    learning_rate,
    loss_scale_too_large,
    no_loss_scale_helps,
    overflow_in_backward,
    undefined_derivative,
)
from nanscan._judge.causes.optimizer import (
    adam_eps_rounds_to_zero,
    second_moment_overflow,
    trained_in_half_precision,
    uninitialised_parameter,
    update_too_large,
)
from nanscan._judge.facts import Facts
from nanscan._judge.judge import Judged

Rule = Callable[[Judged, Facts], Cause | None]
Suspicion = Callable[[Judged, Facts], str | None]

_MAX_CAUSES = 3
_MAX_UNLIKELY = 2

# Best first: what is certain where it applies, then what was going on in the steps before, then
# what the place itself shows, then conditions that favour trouble.
_RULES: tuple[Rule, ...] = (
    uninitialised_parameter,
    adam_eps_rounds_to_zero,
    second_moment_overflow,
    bad_input_batch,
    loss_scale_too_large,
    no_loss_scale_helps,
    mean_over_nothing,
    zero_variance,
    single_sample,
    fully_masked_rows,
    update_too_large,
    learning_rate,
    branches_of_different_scale,
    exploding_gradients,
    overflow_in_backward,
    overflow,
    growing_to_the_limit,
    undefined_derivative,
    nan_loss_of_finite_outputs,
    far_from_unit_scale,
    trained_in_half_precision,
)


def causes(judged: Judged, facts: Facts) -> list[Cause]:
    """Up to three likely causes, best first. What was handed on has its cause where it began."""
    explains = ("origin", "near-limit", "persistent-overflow")
    if judged.finding.verdict not in explains and not judged.from_outside:
        return []
    rules = _RULES[:1] if judged.untrained else _RULES  # nothing else has happened yet
    found = [ask(rule, judged, facts) for rule in rules]
    return [cause for cause in found if cause is not None][:_MAX_CAUSES]


def unlikely(judged: Judged, facts: Facts) -> list[str]:
    """Common suspicions that the numbers refute, the first two."""
    if judged.finding.verdict not in ("origin", "persistent-overflow") or judged.untrained:
        return []
    suspicions = _SUSPICIONS.get(judged.finding.site.kind, (_not_the_batch,))
    found = [ask(suspicion, judged, facts) for suspicion in suspicions]
    return [text for text in found if text is not None][:_MAX_UNLIKELY]


def _not_the_batch(judged: Judged, _: Facts) -> str | None:
    inputs = [stats for _, stats in judged.inputs_from_outside]
    if not inputs or not all(stats.is_finite for stats in inputs):
        return None
    top = max((stats.absmax or 0.0 for stats in inputs), default=0.0)
    return f"bad input batch: every input of the step is finite, absmax {number(top)}"


def _not_exploding(judged: Judged, facts: Facts) -> str | None:
    gradients = facts.gradients
    if len(gradients) < 4 or gradients.growth > 2 or gradients.early == 0:  # noqa: PLR2004
        return None
    if judged.node.kind == "grad" and judged.finding.stats.inf_count:
        return None
    return f"exploding gradients: their absmax went {gradients}"


def _not_this_gradient(judged: Judged, _: Facts) -> str | None:
    """Of a parameter: its square fits, so that no moment of it overflows."""
    gradients = [stats for site, stats in judged.finding.given if site.kind == "grad"]
    limit = torch.finfo(judged.finding.dtype).max
    top = max((stats.absmax or 0.0 for stats in gradients), default=math.inf)
    if top * top > limit:
        return None
    return f"exploding gradients: the gradient is finite, absmax {number(top)}"


def _not_overflow(judged: Judged, facts: Facts) -> str | None:
    """Where even the exponential of the largest value that was seen is far from the limit."""
    dtype = facts.narrowest
    scanned, bad, top = facts.forward_before(judged.node.row)
    top = max([top, *(size for _, size in facts.gradients_by_module(judged.node.row))])
    limit = float(torch.finfo(dtype).max)
    if judged.finding.stats.inf_count or bad or not scanned or top > math.log(limit) / 2:
        return None
    return (
        f"overflow: finite values of the step reach {number(top)}; {dtype_name(dtype)} ends at "
        f"{number(limit)}"
    )


_SUSPICIONS: dict[str, tuple[Suspicion, ...]] = {
    "grad": (_not_overflow, _not_the_batch, _not_exploding),
    "grad_output": (_not_overflow, _not_the_batch, _not_exploding),
    "param": (_not_this_gradient, _not_the_batch),
    "state": (_not_the_batch,),
    "input": (_not_the_batch, _not_exploding, _not_overflow),
    "output": (_not_the_batch, _not_exploding, _not_overflow),
    "loss": (_not_the_batch, _not_exploding, _not_overflow),
    "probe": (_not_the_batch, _not_exploding, _not_overflow),
}
