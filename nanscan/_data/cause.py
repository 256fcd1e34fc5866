"""Cause: why something went bad."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cause:
    """A likely cause.

    Attributes:
        title: what happened, in one line.
        evidence: the numbers it rests on.
        remedy: what to change, as code where possible; "" where nothing is known to help.
    """

    title: str
    evidence: str
    remedy: str
