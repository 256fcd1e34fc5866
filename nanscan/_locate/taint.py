"""Which op was the first to make non-finite values out of finite ones, told from a trace of ops.

Every non-finite value has a taint: the reason why it is so. It travels along with what is computed
from it. NaN or +Inf out of finite values is a fault, unless other ops take all of it and make
finite values of it again, as torch.where does in a forward. Other reasons may be meant, and become
a fault only if they lead to NaN, or to what counts: a loss, a gradient, a parameter.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable
from typing import Literal

import torch

from nanscan import _C
from nanscan._locate.values import Event, Value, counts_of
from nanscan._scan.dispatch import scan_anywhere

_COUNTS = struct.Struct("<3Q")
_RECENT = 8  # taints that one op may have brought up

# made: out of finite values. minus: -Inf alone, out of finite values; maybe a mask in the making.
# mask: Inf that somebody wrote down, or -Inf alone that came from outside. raw: memory that nobody
# wrote to. outside: it was so before anything was watched.
Kind = Literal["made", "minus", "mask", "raw", "outside"]

_GRAVEST: tuple[Kind, ...] = ("made", "minus", "raw", "outside", "mask")


class Taint:
    """Why values are not finite.

    Attributes:
        kind: what kind of reason.
        event: where it came up; of "raw": what made the memory.
        blamed: it is a fault.
        consequence: the op that made NaN out of Inf; of "raw": the first that computed with it.
        reached: what it got to, in words.
        values: that are bad for this reason, as far as ops made them in this step.
    """

    __slots__ = ("blamed", "consequence", "event", "kind", "reached", "values")

    def __init__(self, kind: Kind, event: Event) -> None:
        self.kind = kind
        self.event = event
        self.blamed = False
        self.consequence: Event | None = None
        self.reached = ""
        self.values: list[Value] = []

    @property
    def is_fault(self) -> bool:
        """Whether it is one by itself, unless all that came of it is absorbed."""
        return self.kind == "made" or (
            self.kind in ("minus", "outside") and self.consequence is not None
        )

    @property
    def is_inner(self) -> bool:
        """Whether it came up in a node of autograd, in no line of the user's."""
        return self.event.node is not None and self.event.code is None

    @property
    def is_absorbed(self) -> bool:
        """Whether ops took whatever is bad, and made finite values of it in the end."""
        return all(value.is_consumed for value in self.values)


class Blame:
    """Judges the events of a trace, in their order."""

    def __init__(self) -> None:
        self._taints: list[Taint] = []  # of this step, and faults

    @property
    def has_suspects(self) -> bool:
        """Whether anything was bad in this step."""
        return bool(self._taints)

    @property
    def first(self) -> Taint | None:
        """The fault that comes first in the order of execution."""
        faults = [taint for taint in self._taints if taint.blamed]
        return min(faults, key=lambda taint: taint.event.number, default=None)

    def judge(self, event: Event, operands: list[torch.Tensor] | None = None) -> list[Value]:
        """Says why results are bad, where they are.

        Args:
            event: the op. Waits for its scans.
            operands: tensors of its operands, if they are still what they were, those aside that
                the op wrote to. Where it made something bad they are scanned with moments.

        Returns:
            The results that are bad.
        """
        bad = [value for value in event.results if value.is_bad]
        if self._taints and not event.info.is_view:
            _consume(event)
        if not bad:
            return bad
        taint = self._why(event, bad)
        for value in bad:
            value.taint = taint
            if value.raw is not None and value.raw is not event:
                value.taint = self._of_memory(value.raw)
            elif not event.info.is_view:
                taint.values.append(value)
        is_news = taint.event is event or taint.consequence is event
        if operands is not None and is_news and taint.kind != "mask":
            _take_moments(event, operands)
            is_made = taint.kind in ("made", "minus") and taint.event is event
            if is_made and not event.info.written and any(map(_is_stale, event.operands)):
                taint.kind = "outside"
        return bad

    def reached(self, values: Iterable[Value | None], what: str) -> None:
        """What counts holds these values: a fault, where they are bad, and no mask."""
        for value in values:
            if value is None or not value.is_bad:
                continue
            if value.taint is None:
                value.taint = self._by_another_way(value)
            taint: Taint | None = value.taint
            if taint is not None and taint.kind != "mask" and not taint.blamed:
                taint.blamed, taint.reached = True, what
                if not any(known is taint for known in self._taints):
                    self._taints.append(taint)  # of an earlier step

    def end_step(self) -> None:
        """What of this step's values is left over, and was not absorbed by now, is a fault."""
        for taint in self._taints:
            taint.blamed |= taint.is_fault and not taint.is_absorbed

    @property
    def first_absorbed(self) -> Taint | None:
        """The first in this step that is no fault for that alone; torch's own inside of a backward,
        whose formulas do so on purpose, left out.
        """  # noqa: D205
        absorbed = (t for t in self._taints if t.is_fault and not t.blamed and not t.is_inner)
        return min(absorbed, key=lambda taint: taint.event.number, default=None)

    def forget(self, events: list[Event], *, is_end: bool) -> None:
        """Lets go of what ops took and returned.

        Args:
            events: the ops.
            is_end: the step is over: all that is no fault is forgotten.
        """
        kept = {
            id(event)
            for taint in self._taints
            if taint.kind != "mask"
            for event in (taint.event, taint.consequence)
        }
        for event in events:
            if id(event) not in kept:
                event.operands, event.results = [], []
        if is_end:
            for taint in self._taints:
                taint.values.clear()
            self._taints = [taint for taint in self._taints if taint.blamed]

    def _why(self, event: Event, bad: list[Value]) -> Taint:
        handed = [value for _, value in event.operands if value.is_bad]
        for value in handed:
            if value.taint is None:
                value.taint = self._of_unknown(value, event)
        nan = any(_counts(value)[0] for value in bad)
        if not handed:
            if any(_is_infinite(x) for x in event.settings.values()):  # somebody wrote it down
                return self._add("minus" if nan else "mask", event)
            posinf = any(_counts(value)[1] for value in bad)
            is_fault = nan or (posinf and not event.settings.get("zero_infinity"))
            return self._add("made" if is_fault else "minus", event)
        taint = _gravest(handed)
        if taint.kind == "raw" and taint.consequence is None:
            taint.consequence = event
        if taint.kind == "outside" and taint.event.info.is_view:
            taint.event = event  # who computes with it says more than who looks at it
        if not nan or any(_counts(value)[0] for value in handed):
            return taint
        if taint.kind == "mask":
            return self._add("made", event)
        taint.consequence = taint.consequence or event
        return taint

    def _of_unknown(self, value: Value, event: Event) -> Taint:
        """The reason of a value that no op made before our eyes."""
        nan, posinf, _ = _counts(value)
        kind: Kind = "outside" if nan or posinf else "mask"
        return self._by_another_way(value) or self._add(kind, event)

    def _by_another_way(self, value: Value) -> Taint | None:
        """The reason of what was written through a view, or is memory that was not written."""
        via: Taint | None = None if value.via is None else value.via.taint
        if via is not None:
            return via
        if value.raw is not None:
            return self._of_memory(value.raw)
        if value.is_rewritten and self._taints:  # most likely by the latest
            return self._taints[-1]
        return None

    def _of_memory(self, event: Event) -> Taint:
        """The reason of what was found in memory that an op made, or received something into."""
        return self._add("outside" if event.info.late else "raw", event)

    def _add(self, kind: Kind, event: Event) -> Taint:
        for taint in self._taints[-_RECENT:]:
            if taint.event is event and taint.kind == kind:
                return taint
        taint = Taint(kind, event)
        self._taints.append(taint)
        return taint


def _consume(event: Event) -> None:
    """Notes what an op took in to make something else of it; a comparison, or .item(), does not."""
    if any(value.row is not None for value in event.results):
        for _, value in event.operands:
            value.is_consumed = True
            if value.base is not None:
                value.base.is_consumed = True


def _counts(value: Value) -> tuple[int, int, int]:
    """Of NaN, +Inf and -Inf."""
    nan, posinf, neginf = _COUNTS.unpack(value.counts)
    return nan, posinf, neginf


def _gravest(values: list[Value]) -> Taint:
    taints: list[Taint] = [value.taint for value in values]
    return min(taints, key=lambda taint: (_GRAVEST.index(taint.kind), taint.event.number))


def _is_infinite(x: object) -> bool:
    return isinstance(x, float) and not math.isfinite(x)


def _take_moments(event: Event, operands: list[torch.Tensor]) -> None:
    """Of all that an op took and made, and did not write over."""
    results = [value.ref() for value in event.results]
    for (_, value), tensor in zip(event.operands, operands, strict=True):
        if not any(tensor is result for result in results):
            _add_moments(value, tensor)
    for value, result in zip(event.results, results, strict=True):
        if result is not None:
            _add_moments(value, result)


def _is_stale(operand: tuple[str, Value]) -> bool:
    """Whether a value holds other things than a row says: code that is not seen wrote to it."""
    value = operand[1]
    moments = value.moments
    if moments is None or isinstance(moments, _C.PendingScan):
        return False
    return counts_of(moments) != value.counts


def _add_moments(value: Value, tensor: torch.Tensor) -> None:
    if value.row is not None and value.moments is None:
        row = scan_anywhere(tensor, moments=True)
        value.moments = None if isinstance(row, int) else row
