"""From a location to its likely causes: one small function a cause, each resting on numbers.

A rule returns None unless the numbers it names are there. "No cause found" is an answer.
"""

from __future__ import annotations

from collections.abc import Callable

from nanscan._data.cause import Cause
from nanscan._data.location import Location
from nanscan._data.rules import ask
from nanscan._data.text import dtype_name, plural, share
from nanscan._locate.causes.calls import (
    Call,
    absmax,
    bad_of,
    bound,
    call,
    forward_call,
    is_bad,
    limit,
    named,
)
from nanscan._locate.causes.domain import (
    equal_singular_values,
    integer_zero,
    masked_by,
    negative_base,
    outside_of_domain,
    undefined_derivative,
)
from nanscan._locate.causes.domains import domain
from nanscan._locate.causes.overflow import (
    cast,
    denominator_zero,
    exponential,
    fused_denominator_zero,
    overflow,
    second_moment_overflow,
    small_divisor,
    unequal_branches,
    update_overflow,
)
from nanscan._locate.causes.shape import (
    SOFTMAX,
    all_labels_ignored,
    ctc_target_too_long,
    fully_masked_rows,
    masked_query,
    masked_row_by_hand,
    mean_of_nothing,
    single_value_a_channel,
    variance_of_too_few,
    zero_times_inf,
    zero_variance,
)

Rule = Callable[[Location], Cause | None]

_EMPTY = ("empty", "new_empty", "resize", "set")
_FAR_FROM_LIMIT = 0.01
_NARROW = 2  # bytes: overflow is a common suspicion of 16-bit types and narrower ones


def causes(location: Location) -> list[Cause]:
    """Likely causes of a location, best first."""
    groups = _RULES if location.verdict == "origin" else ((_bad_from_outside,),)
    found = ((ask(rule, location) for rule in group) for group in groups)
    firsts = (next((cause for cause in group if cause is not None), None) for group in found)
    return [cause for cause in firsts if cause is not None]


def refuted(location: Location) -> list[str]:
    """Common suspicions that the numbers speak against, with these numbers."""
    if location.verdict != "origin":
        return []
    found = [ask(check, location) for check in _REFUTATIONS]
    return [line for line in found if line]


# What was bad before ----------------------------------------------------------------------------


def _bad_from_outside(location: Location) -> Cause | None:
    bad = next(filter(is_bad, location.operands), None)
    if bad is None or bad.stats is None:
        return None
    held = f"{named(bad)} held {bad_of(bad.stats)} when {location.op} first read it"
    if bad.what.startswith("gradient of "):
        return Cause(
            f"the {bad.what} was bad before it was watched",
            held,
            "watch its backward too: nanscan.locate(lambda: loss_of(batch).backward())",
        )
    if bad.what:
        return Cause(
            f"{bad.what} was bad before anything ran",
            held,
            "it went bad in an earlier step: nanscan.replay that one, or load a checkpoint that is "
            "finite. If it was never initialised, call reset_parameters() after to_empty()",
        )
    return Cause(
        "the data was bad before anything ran",
        held,
        "drop or repair the sample where it is loaded: assert torch.isfinite(batch).all()",
    )


def _uninitialised_memory(location: Location) -> Cause | None:
    function = call(location.at).function
    if not function.startswith(_EMPTY):
        return None
    result = call(location.at).result
    held = f" of {list(result.shape)}" if result is not None else ""
    reader = location.consequence
    read = f"{reader.name} read it" if reader is not None else "it was read"
    seen = "" if reader is None else _seen_by(call(reader))
    return Cause(
        "memory was read that nothing had been written to",
        f"{location.op} returns memory{held} as it was found; {read}{seen}, and nothing wrote it",
        f"torch.zeros in the place of {_python_name(function)}, or write all of it first",
    )


def _seen_by(reader: Call) -> str:
    bad = next(filter(is_bad, reader.tensors.values()), None)
    return "" if bad is None or bad.stats is None else f" with {bad_of(bad.stats)}"


def _python_name(function: str) -> str:
    if function in ("resize", "set"):
        return f"tensor.{function}_"
    return f"tensor.{function}" if function.startswith("new_") else f"torch.{function}"


# What speaks against a common suspicion ---------------------------------------------------------


def _no_overflow(location: Location) -> str:
    c = call(location.at)
    operands = [o for o in c.tensors.values() if o.stats is not None and o.stats.absmax is not None]
    if c.result is None or not operands or not c.result.dtype.is_floating_point:
        return ""
    largest = max(map(absmax, operands))
    most, reached = limit(c.result.dtype), bound(c)
    if (most * _FAR_FROM_LIMIT if reached is None else most) <= (reached or largest):
        return ""
    if exponential(location) is not None or c.result.dtype.itemsize > _NARROW:
        return ""
    return (
        f"overflow: unlikely because operands reach {largest:.6g}, {share(largest, most)} of "
        f"{dtype_name(c.result.dtype)}'s largest {most:.6g}"
    )


def _no_bad_data(location: Location) -> str:
    known = [o for o in location.operands if o.stats is not None]
    if not known or any(map(is_bad, known)):
        return ""
    return (
        f"bad data or weights: unlikely because {location.op} was given "
        f"{plural(len(known), 'tensor')} without a non-finite value"
    )


def _no_division_by_zero(location: Location) -> str:
    c = call(location.at)
    name = {"div": "other", "addcdiv": "tensor2"}.get(c.function, "")
    if (least := c.smallest(name)) is None:
        return ""
    return f"division by zero: unlikely because the smallest magnitude of {name} is {least:.3g}"


def _no_masked_row(location: Location) -> str:
    c = forward_call(location)
    stats = c.stats("self")
    if c.function not in SOFTMAX or stats is None or stats.neginf_count:
        return ""
    return "a fully masked row: unlikely because the softmax was given no -Inf"


def _no_where_trap(location: Location) -> str:
    if location.direction != "backward" or location.forward is None or not location.consumers:
        return ""
    if domain(call(location.forward)) is None or masked_by(location):
        return ""
    taken = ", ".join(location.consumers)
    return (
        f"the torch.where trap: unlikely because only {taken} took what {location.forward.name} "
        "returned"
    )


# Rules of one group speak of the same thing: the first that fits is named.
_RULES: tuple[tuple[Rule, ...], ...] = (
    (_uninitialised_memory,),
    (fully_masked_rows, masked_row_by_hand, masked_query, zero_times_inf),
    (variance_of_too_few, mean_of_nothing, all_labels_ignored, ctc_target_too_long),
    (single_value_a_channel, zero_variance),
    (denominator_zero, fused_denominator_zero, second_moment_overflow, update_overflow),
    (equal_singular_values, undefined_derivative),
    (outside_of_domain, integer_zero, negative_base),
    (unequal_branches,),
    (exponential, cast, small_divisor, overflow),
)

_REFUTATIONS: tuple[Callable[[Location], str], ...] = (
    _no_overflow,
    _no_bad_data,
    _no_division_by_zero,
    _no_masked_row,
    _no_where_trap,
)
