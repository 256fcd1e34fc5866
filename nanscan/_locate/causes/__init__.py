"""From a location to its likely causes, and to what is unlikely.

Each rule is a small function in the file of its topic. It says nothing unless the numbers that it
names are there. So a location may have no cause.
"""

from __future__ import annotations

from nanscan._data.cause import Cause
from nanscan._data.location import Location
from nanscan._data.rules import Rule, answers
from nanscan._locate.causes.before import (
    bad_before_the_search,
    nonfinite_number,
    uninitialised_memory,
)
from nanscan._locate.causes.counts import (
    all_labels_ignored,
    ctc_target_too_long,
    mean_of_nothing,
    single_value_a_channel,
    variance_of_too_few,
    zero_variance,
)
from nanscan._locate.causes.evidence import OpEvidence
from nanscan._locate.causes.guards import eps_rounds_to_one, eps_rounds_to_zero
from nanscan._locate.causes.masks import (
    fully_masked_rows,
    inf_minus_inf,
    masked_query,
    masked_row_by_hand,
    nan_behind_a_mask,
    written_inf_that_counts,
    zero_times_inf,
)
from nanscan._locate.causes.overflow import (
    cast,
    denominator_zero,
    exponential,
    fused_denominator_zero,
    nonfinite_setting,
    overflow,
    second_moment_overflow,
    small_divisor,
    smallest_numbers_add_up,
    unequal_branches,
    update_overflow,
)
from nanscan._locate.causes.refutations import (
    no_division_by_zero,
    no_masked_row,
    no_overflow,
    no_where_trap,
)
from nanscan._locate.causes.undefined import (
    equal_singular_values,
    integer_zero,
    negative_base,
    outside_of_domain,
    scale_of_zeros,
    triangle_without_full_rank,
    undefined_derivative,
)

# Best first. The rules of a group are about the same thing: the first answer of a group counts.
_RULES: tuple[tuple[Rule[OpEvidence, Cause], ...], ...] = (
    (nan_behind_a_mask, bad_before_the_search, nonfinite_number),
    (uninitialised_memory,),
    (written_inf_that_counts,),
    (fully_masked_rows, masked_row_by_hand, masked_query, zero_times_inf, inf_minus_inf),
    (variance_of_too_few, mean_of_nothing, all_labels_ignored, ctc_target_too_long),
    (single_value_a_channel, zero_variance),
    (
        nonfinite_setting,
        denominator_zero,
        fused_denominator_zero,
        second_moment_overflow,
        update_overflow,
    ),
    (
        equal_singular_values,
        triangle_without_full_rank,
        eps_rounds_to_zero,
        eps_rounds_to_one,
        scale_of_zeros,
        undefined_derivative,
        outside_of_domain,
        integer_zero,
        negative_base,
    ),
    (smallest_numbers_add_up, unequal_branches),
    (exponential, cast, small_divisor, overflow),
)

_REFUTATIONS: tuple[Rule[OpEvidence, str], ...] = (
    no_overflow,
    no_division_by_zero,
    no_masked_row,
    no_where_trap,
)


def causes(location: Location) -> list[Cause]:
    """Likely causes of a location, best first."""
    evidence = OpEvidence(location)
    firsts = (next(answers(group, evidence), None) for group in _RULES)
    return [cause for cause in firsts if cause is not None]


def refuted(location: Location) -> list[str]:
    """Common suspicions that the numbers speak against, with these numbers."""
    return list(answers(_REFUTATIONS, OpEvidence(location)))
