"""Episode: a fault with all that follows from it. Episodes: those that are on, and those over."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from nanscan._data.text import plural

_INTERVAL = 100  # steps until what goes on is told again; doubled each time
_WINDOW = 100  # steps: what comes again within them is the same episode
_MAX_PAST = 1000
_STEADY = 2  # steps in which the same samples were bad


@dataclass(frozen=True)
class BadParts:
    """The parts of dimension 0 of a row that were bad when it was bad last.

    Attributes:
        step: that step.
        bits: one for each part.
        size: of the dimension; 0: it is not known.
        steps: how many steps in a row were bad in just these parts.
    """

    step: int = -1
    bits: int = 0
    size: int = 0
    steps: int = 0

    def then(self, step: int, bits: int, size: int) -> BadParts:
        """The same in a later step."""
        goes_on = step <= self.step + 1 and (bits, size) == (self.bits, self.size)
        return BadParts(step, bits, size, self.steps + (step != self.step) if goes_on else 1)

    def new_in(self, later: BadParts) -> int:
        """Parts that went bad in the next step, beside these, which were steady; 0 for none."""
        is_next = later.step == self.step + 1 and later.size == self.size
        is_steady = self.steps >= _STEADY and self.bits and not self.bits & ~later.bits
        return later.bits & ~self.bits if is_next and is_steady else 0


@dataclass(eq=False)
class Episode:
    """A fault, and all that follows from it, until a step in which none of it is bad.

    Attributes:
        number: of the episode, from 1.
        root: the row with which it began.
        began: the step in which it did.
        rows: those that are bad in it.
        parts: which samples of each row are bad.
        after: what spoiled the buffer with which it began: that is over no sooner.
        latest: the last step in which it was bad.
        part: number of the optimizer that ended the part of that step in which it was bad first.
        steps: in how many it was.
        comebacks: how often it was over and came again.
        is_in_forward: whether a value of a forward was bad in it.
    """

    number: int
    root: int
    began: int
    rows: set[int] = field(default_factory=set)
    parts: dict[int, BadParts] = field(default_factory=dict)
    after: Episode | None = None
    latest: int = -1
    part: int = -1
    steps: int = 0
    comebacks: int = 0
    is_in_forward: bool = False
    _told: int = -1
    _interval: int = _INTERVAL

    def note(self, step: int, part: int) -> None:
        """It is bad in this step, in the part that an optimizer ended."""
        if step != self.latest or self.part < 0:
            self.part = part
        self.steps += step != self.latest
        self.latest = step

    def may_end(self, step: int, part: int) -> bool:
        """Whether a part of a step may be the end of it: one like that in which it was bad."""
        is_alike = self.part < 0 or part in (-1, self.part)
        return is_alike or step > self.latest + 1

    @property
    def flaps(self) -> bool:
        """Whether it came again so often that it is told at intervals only."""
        return self.comebacks > 1

    def is_due(self, step: int) -> bool:
        """Whether it is to be told again."""
        return 0 <= self._told <= step - self._interval

    def tell(self, step: int) -> None:
        """It is told in this step."""
        self._interval *= 2 if self.is_due(step) else 1
        self._told = step

    @property
    def count(self) -> str:
        """How often it was bad, in words."""
        return f"bad in {self.steps:,} of the last {plural(self.latest - self.began + 1, 'step')}"


class Episodes:
    """The episodes of a run, by the rows that are bad in them."""

    def __init__(self) -> None:
        self._on: dict[int, Episode] = {}  # by each of their rows
        self._past: dict[int, Episode] = {}  # those that are over, by their root
        self._count = 0

    def __bool__(self) -> bool:
        """Whether one is on."""
        return bool(self._on)

    def __iter__(self) -> Iterator[Episode]:
        """Those that are on, the oldest first."""
        return iter(sorted(set(self._on.values()), key=lambda episode: episode.number))

    def of(self, row: int) -> Episode | None:
        """The one that is on and has a row."""
        return self._on.get(row)

    def begin(self, root: int, step: int) -> tuple[Episode, bool]:
        """An episode that begins in a step, and whether it is new: not one that flaps."""
        past = self._past.pop(root, None)
        if past is not None and step - past.latest <= _WINDOW:
            past.comebacks += 1
            past.rows.clear()
            return past, not past.flaps
        self._count += 1
        return Episode(self._count, root, step), True

    def add(self, episode: Episode, row: int) -> None:
        """A row is bad in an episode."""
        self._on[row] = episode
        episode.rows.add(row)

    def end(self, episode: Episode) -> None:
        """Nothing of it is bad any more."""
        self._on = {row: other for row, other in self._on.items() if other is not episode}
        self._past[episode.root] = episode
        if len(self._past) > _MAX_PAST:
            self._past.pop(next(iter(self._past)))
