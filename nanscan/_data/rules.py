"""Asks the rules of a diagnosis, which must never stop a run that goes on without them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

_Answer = TypeVar("_Answer")

_logger = logging.getLogger("nanscan")
_failed: set[str] = set()  # names of rules


def ask(rule: Callable[..., _Answer | None], *args: object) -> _Answer | None:
    """What a rule says; None where it has nothing to say, or raised, which is logged once."""
    try:
        return rule(*args)
    except Exception:  # a module of the user's may raise from any attribute
        if rule.__name__ not in _failed:
            _failed.add(rule.__name__)
            _logger.exception("nanscan: the rule %s failed; please report it", rule.__name__)
        return None
