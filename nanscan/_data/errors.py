"""Exceptions and warnings that nanscan raises on its own account."""

from __future__ import annotations

from nanscan._data.finding import Finding
from nanscan._data.result import ScanResult


class NonFiniteError(FloatingPointError):
    """A tensor that had to be finite is not.

    Attributes:
        result: what the scan found, when `assert_finite` raised.
        finding: what the monitor concluded, when the end of a step raised.
    """

    def __init__(
        self, message: str, *, result: ScanResult | None = None, finding: Finding | None = None
    ) -> None:
        super().__init__(message)
        self.result = result
        self.finding = finding


class NonFiniteWarning(RuntimeWarning):
    """What the action "warn" emits, once an episode."""
