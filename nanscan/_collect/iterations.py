"""Iterations: which optimizer steps make up one step of a training with several optimizers."""

from __future__ import annotations

_MAX_RUN = 128  # steps of one optimizer in a row that are told apart


class Iterations:
    """A step goes on until an optimizer steps that has stepped in it before.

    So a round of a GAN is one step, and so is that of several optimizers that step one after the
    other. The one that steps most often sets the count.

    Only the next optimizer shows whether a step went on. Until then it is expected to do as it did
    when the same optimizer had last stepped so many times in a row.

    Attributes:
        goes_on: an optimizer has stepped in the step at hand, and another is expected to.
    """

    def __init__(self) -> None:
        self.goes_on = False
        self._stepped: set[int] = set()  # optimizers, in the step at hand or the one that is over
        self._latest = (-1, 0)  # the optimizer that stepped last, and how often in a row
        self._went_on: dict[tuple[int, int], bool] = {}  # after such a step

    def begin(self, optimizer: int, *, may_join: bool = True) -> int:
        """An optimizer is about to step.

        Args:
            optimizer: its number.
            may_join: it may step in the step at hand, if it has not yet.

        Returns:
            What is to be added to the number of the step, where something else was expected.
        """
        if not self._stepped:
            return 0
        expected, self.goes_on = self.goes_on, may_join and optimizer not in self._stepped
        self._went_on[self._latest] = self.goes_on
        return expected - self.goes_on

    def end(self, optimizer: int) -> int:
        """An optimizer has stepped. Returns what is to be added to the number of the step."""
        if not self.goes_on:
            self._stepped.clear()
        self._stepped.add(optimizer)
        latest, run = self._latest
        self._latest = optimizer, min(run + 1, _MAX_RUN) if optimizer == latest else 1
        self.goes_on = self._went_on.get(self._latest, False)
        return not self.goes_on

    def interrupt(self) -> None:
        """The step ended in another way."""
        self.goes_on = False
        self._stepped.clear()
