"""The engine of all rules: functions of some evidence that say one thing about it, or nothing.

A rule never stops a run: what it raises is logged, once, and counts as nothing.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

E = TypeVar("E")  # evidence
A = TypeVar("A")  # what a rule says: a Cause, or a sentence

_logger = logging.getLogger("nanscan")
_failed: set[str] = set()  # names of rules


class Rule(Generic[E, A]):
    """A function of evidence with a gate before it.

    Args:
        function: what the rule says; None: nothing.
        applies: the gate: whether the function is asked at all.
    """

    def __init__(self, function: Callable[[E], A | None], applies: Callable[[E], bool]) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        self._applies = applies

    def __call__(self, evidence: E) -> A | None:
        """What the rule says of this evidence; None where it does not apply or says nothing."""
        return self._function(evidence) if self._applies(evidence) else None

    @property
    def name(self) -> str:
        """Name of the function."""
        return self._function.__name__


def answers(rules: Iterable[Rule[E, A]], evidence: E) -> Iterator[A]:
    """What rules say, in their order; those that say nothing, or raise, are left out."""
    for rule in rules:
        try:
            answer = rule(evidence)
        except Exception:  # a module of the user's may raise from any attribute
            if rule.name not in _failed:
                _failed.add(rule.name)
                _logger.exception("nanscan: the rule %s failed; please report it", rule.name)
            continue
        if answer is not None:
            yield answer
