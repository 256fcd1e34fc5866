"""From a finding to its likely causes, and to what it is not.

A cause is one small function in the files of its topic, and rests on numbers: it returns None
unless they are there. "No likely cause found" is an answer.
"""

from __future__ import annotations

import itertools

from nanscan._collect.snapshot import BY_NO_OPTIMIZER
from nanscan._data.cause import Cause
from nanscan._data.rules import Rule, answers
from nanscan._judge.causes.forward import (
    bad_buffer,
    bad_input_batch,
    branches_of_different_scale,
    far_from_unit_scale,
    growing_to_the_limit,
    mask_on_mask,
    overflow,
)
from nanscan._judge.causes.gradients import (
    all_gradients_nan,
    exploding_gradients,
    learning_rate,
    loss_scale_too_large,
    no_loss_scale_helps,
    overflow_in_backward,
    spread_by_clipping,
    undefined_derivative,
)
from nanscan._judge.causes.layers import (
    fully_masked_rows,
    mean_over_nothing,
    nan_loss_of_finite_outputs,
    single_sample,
    spoiled_statistics,
    wiped_out,
    zero_variance,
)
from nanscan._judge.causes.optimizer import (
    eps_rounds_to_zero,
    second_moment_overflow,
    setting_not_finite,
    trained_in_half_precision,
    uninitialised_parameter,
    update_too_large,
)
from nanscan._judge.causes.refuted import not_exploding, not_this_gradient
from nanscan._judge.evidence import Evidence

_MAX_CAUSES = 3

# Best first: what is certain where it applies, then what was going on in the steps before, then
# what the place itself shows, then conditions that favour trouble.
RULES: tuple[Rule[Evidence, Cause], ...] = (
    uninitialised_parameter,
    setting_not_finite,
    eps_rounds_to_zero,
    second_moment_overflow,
    bad_input_batch,
    bad_buffer,
    spoiled_statistics,
    wiped_out,
    spread_by_clipping,
    loss_scale_too_large,
    no_loss_scale_helps,
    mean_over_nothing,
    zero_variance,
    single_sample,
    fully_masked_rows,
    mask_on_mask,
    update_too_large,
    learning_rate,
    branches_of_different_scale,
    exploding_gradients,
    overflow_in_backward,
    overflow,
    growing_to_the_limit,
    all_gradients_nan,
    undefined_derivative,
    nan_loss_of_finite_outputs,
    far_from_unit_scale,
    trained_in_half_precision,
)

SUSPICIONS: tuple[Rule[Evidence, str], ...] = (not_this_gradient, not_exploding)


def causes(e: Evidence) -> list[Cause]:
    """Up to three likely causes, best first. What was handed on has its cause where it began."""
    if e.record.spoiled == BY_NO_OPTIMIZER:
        return []  # no scan explains what other code did to a parameter
    rules = RULES[:1] if e.from_start else RULES  # nothing else has happened yet
    if e.record.spoiled:
        rules = (setting_not_finite,)  # scans are of before or after that step of the optimizer
    return [*itertools.islice(answers(rules, e), _MAX_CAUSES)]


def unlikely(e: Evidence) -> list[str]:
    """Common suspicions that the numbers refute."""
    if e.record.spoiled or e.from_start:
        return []
    return [*answers(SUSPICIONS, e)]
