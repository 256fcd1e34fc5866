"""Cause: why something went bad."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cause:
    """A likely cause.

    Attributes:
        title: what happened, in one line.
        evidence: the numbers it rests on.
        remedy: what to change, as code where possible; "" where none is known to be right.
    """

    title: str
    evidence: str
    remedy: str
