"""OpEvidence, the one argument of rules about an op, and `rule`, which makes a function a rule."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from fnmatch import fnmatchcase
from typing import TypeVar

from nanscan._data.location import Location
from nanscan._data.rules import Rule
from nanscan._locate.causes.op_call import OpCall, call_of

A = TypeVar("A")  # what a rule says: a Cause, or a sentence

_VERDICTS = ("origin", "wiped-out", "absorbed")
_DIRECTIONS = ("forward", "backward", "optimizer")


class OpEvidence:
    """What is known of an op that made, or read, non-finite values.

    Attributes:
        location: what the search found. It has no causes yet.
    """

    def __init__(self, location: Location) -> None:
        self.location = location

    @functools.cached_property
    def call(self) -> OpCall:
        """The call of the op."""
        return call_of(self.location.at)

    @functools.cached_property
    def forward_call(self) -> OpCall:
        """In backward the call of the forward op that created the node, if known; else `call`."""
        forward = self.location.forward
        return self.call if forward is None else call_of(forward)


def rule(
    *,
    verdicts: Collection[str] = _VERDICTS,
    directions: Collection[str] = _DIRECTIONS,
    functions: Collection[str] = ("*",),
    of_forward: bool = False,
) -> Callable[[Callable[[OpEvidence], A | None]], Rule[OpEvidence, A]]:
    """Makes a function a rule that is called only where all of these fit.

    Args:
        verdicts: of the location.
        directions: in which the op ran.
        functions: names of the op's function, or patterns as of fnmatch: "_fused_adam*".
        of_forward: these are functions of `forward_call`, not of `call`.
    """

    def applies(evidence: OpEvidence) -> bool:
        location = evidence.location
        if location.verdict not in verdicts or location.direction not in directions:
            return False
        function = (evidence.forward_call if of_forward else evidence.call).function
        return any(fnmatchcase(function, pattern) for pattern in functions)

    return lambda function: Rule(function, applies)
