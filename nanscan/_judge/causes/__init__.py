"""From a finding to its likely causes, and to what it is not.

A cause is one small function in the files of its topic, and rests on numbers: it returns None
unless they are there. "No likely cause found" is an answer.
"""

from __future__ import annotations

import itertools

from nanscan._data.cause import Cause
from nanscan._data.rules import Rule, answers
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
from nanscan._judge.causes.refuted import (
    not_exploding,
    not_overflow_of_gradients,
    not_overflow_of_values,
    not_the_batch,
    not_this_gradient,
)
from nanscan._judge.evidence import Evidence

_MAX_CAUSES = 3
_MAX_UNLIKELY = 2

# Best first: what is certain where it applies, then what was going on in the steps before, then
# what the place itself shows, then conditions that favour trouble.
RULES: tuple[Rule[Evidence, Cause], ...] = (
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

# In this order for every kind: a suspicion that does not concern a kind is left out.
SUSPICIONS: tuple[Rule[Evidence, str], ...] = (
    not_overflow_of_gradients,
    not_this_gradient,
    not_the_batch,
    not_exploding,
    not_overflow_of_values,
)


def causes(e: Evidence) -> list[Cause]:
    """Up to three likely causes, best first. What was handed on has its cause where it began."""
    if e.record.spoiled:
        return []  # no scan explains what other code did to a parameter
    rules = RULES[:1] if e.from_start else RULES  # nothing else has happened yet
    return [*itertools.islice(answers(rules, e), _MAX_CAUSES)]


def unlikely(e: Evidence) -> list[str]:
    """Common suspicions that the numbers refute, the first two."""
    if e.record.spoiled or e.from_start:
        return []
    return [*itertools.islice(answers(SUSPICIONS, e), _MAX_UNLIKELY)]
