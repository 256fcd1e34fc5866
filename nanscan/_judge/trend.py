"""Trend: how large some values were in the steps before."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nanscan._data.row import Floats
from nanscan._data.text import number

_EXPLODES = 10.0  # from the largest value of the first half to the last
_JUMPS = 100.0  # the same in one step


@dataclass(frozen=True)
class Trend:
    """Largest finite magnitudes of some rows, one a step, oldest first; the finding's step aside.

    Attributes:
        values: the magnitudes; steps without any are left out.
    """

    values: Floats

    @property
    def early(self) -> float:
        """The largest of the first half, 0 where that is empty.

        Where two optimizers alternate, the first half so holds steps of both.
        """
        return float(self.values[: len(self.values) // 2].max(initial=0.0))

    @property
    def growth(self) -> float:
        """From the first half to the last step; 1 where there is nothing to compare."""
        early = self.early
        return self.last / early if early > 0 else 1.0

    @property
    def explodes(self) -> bool:
        """Whether it grew by orders of magnitude: from step to step, or in one jump."""
        rises = float(np.mean(np.diff(self.values) > 0)) if len(self.values) > 1 else 0.0
        return self.growth >= _JUMPS or (self.growth >= _EXPLODES and rises >= 0.6)  # noqa: PLR2004

    @property
    def pace(self) -> float:
        """The largest growth from one step to the next; 1 where it never grew."""
        before = np.maximum(self.values[:-1], np.finfo(np.float64).tiny)
        return float((self.values[1:] / before).max(initial=1.0))

    @property
    def last(self) -> float:
        """Of the latest step."""
        return float(self.values[-1])

    def and_now(self, value: float | None) -> Trend:
        """With the finding's own step."""
        return self if value is None else Trend(np.append(self.values, value))

    def __len__(self) -> int:
        return len(self.values)

    def __str__(self) -> str:
        first = number(float(self.values[0]))
        return f"from {first} to {number(self.last)} in {len(self)} steps"
