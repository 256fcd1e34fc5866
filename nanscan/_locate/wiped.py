"""Finds the op that returned 0 in the place of finite values, because a divisor had overflowed.

A norm of squares that overflows is Inf, and what is divided by it is 0. Nothing non-finite is left,
and the values are lost. That is told apart from functions that end in 0 on purpose, such as
1 / (1 + exp(x)), by two proofs: the divisor has a known bound, so that the quotient is not 0 in its
dtype; and what is divided is what the divisor was computed from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

import torch

from nanscan._data.location import Op
from nanscan._data.result import ScanResult
from nanscan._locate.causes.bounds import bound, overflows
from nanscan._locate.causes.op_call import OpCall, call_of
from nanscan._locate.taint import Taint
from nanscan._locate.values import Event, Value

_DEPTH = 4  # how many ops lie at most between what is divided and what overflowed
_KEEP: tuple[str, ...] = (
    "mean",
    "amax",
    "max",
    "maximum",
    "clamp",
    "clamp_min",
    "clamp_max",
    "_to_copy",
    "clone",
)
_KEEP += ("neg", "abs", "stack", "cat", "detach", "alias")


def wiped_by(taint: Taint, events: Iterable[Event], op_of: Callable[[Event], Op]) -> Event | None:
    """The first op that returned 0 for values that are not 0; None where none is known to.

    Args:
        taint: values that ops absorbed.
        events: the ops of the step, in their order.
        op_of: what a report knows of an op.
    """
    if taint.source != "made" or taint.event.node is not None:
        return None
    call = call_of(op_of(taint.event))
    largest = bound(call) if overflows(call) else None
    if largest is None or not math.isfinite(largest):
        return None
    return _Followed(taint.event, largest).first_wiped(events, op_of)


class _Followed:
    """What follows from an overflow.

    Attributes:
        ceilings: of values that are Inf, how large they would be at most.
        floors: of values that are 0, how large they would be at least.
        sources: the values that the overflow was computed from.
    """

    def __init__(self, made: Event, largest: float) -> None:
        self._number = made.number
        self.ceilings = {_key(value): largest for value in made.results if value.is_bad}
        self.floors: dict[int, float] = {}
        self.sources = {_key(value) for value in _ancestors(made, _DEPTH)}

    def first_wiped(self, events: Iterable[Event], op_of: Callable[[Event], Op]) -> Event | None:
        for event in events:
            keys = [_key(value) for _, value in event.operands]
            if event.number <= self._number or event.info.is_view or event.node is not None:
                continue
            if not any(key in self.ceilings or key in self.floors for key in keys):
                continue
            call = call_of(op_of(event))
            if self._is_wiped(event, call):
                return event
            self._follow(event, call)
        return None

    def _is_wiped(self, event: Event, call: OpCall) -> bool:
        """Whether it multiplies by 0, or divides by Inf, what the overflow was computed from."""
        if call.function not in ("mul", "div") or any(value.is_bad for value in event.results):
            return False
        divided = [value for name, value in event.operands if name.startswith("self")]
        others = [value for name, value in event.operands if not name.startswith("self")]
        if call.function == "mul" and not any(_key(v) in self.sources for v in divided):
            divided, others = others, divided
        tops = [_absmax(value) for value in divided if _key(value) in self.sources]
        if not tops or not event.results:
            return False
        factors = [self.floors.get(_key(value), 0.0) for value in others]
        if call.function == "div":
            ceilings = [self.ceilings.get(_key(value), math.inf) for value in others]
            factors = [1 / ceiling if ceiling else 0.0 for ceiling in ceilings]
        least = torch.finfo(event.results[0].dtype).tiny
        return max(tops) * max(factors, default=0.0) >= least

    def _follow(self, event: Event, call: OpCall) -> None:
        ceilings = [
            self.ceilings[key] for _, v in event.operands if (key := _key(v)) in self.ceilings
        ]
        floors = [self.floors[key] for _, v in event.operands if (key := _key(v)) in self.floors]
        above = _ceiling(call, max(ceilings)) if ceilings else None
        below = _floor(call, max(ceilings)) if ceilings else None
        if floors:
            below = _scaled(call, max(floors))
        for value in event.results:
            if value.is_bad and above is not None:
                self.ceilings[_key(value)] = above
            elif not value.is_bad and below is not None:
                self.floors[_key(value)] = below


def _ceiling(call: OpCall, most: float) -> float | None:
    """How large a result is at most, of an operand that is at most so large."""
    function, number = call.function, call.number("other")
    if function in ("sum", "linalg_vector_norm", "norm"):
        return most * (call.reduced or 1)
    if function == "add":
        return most + (call.absmax("other") or 0.0)
    if function in ("mul", "div") and number:
        return most * abs(number) if function == "mul" else most / abs(number)
    if function == "sqrt":
        return math.sqrt(most)
    return most if function in _KEEP else None


def _floor(call: OpCall, most: float) -> float | None:
    """How large a result is at least, of a divisor that is at most so large."""
    exponent = call.number("exponent")
    if call.function == "rsqrt":
        return 1 / math.sqrt(most)
    if call.function == "reciprocal":
        return 1 / most
    return most**exponent if call.function == "pow" and exponent and exponent < 0 else None


def _scaled(call: OpCall, least: float) -> float | None:
    number = call.number("other")
    if call.function in ("clamp", "clamp_max"):
        top = call.number("max")
        return least if top is None else min(least, abs(top))
    if call.function in _KEEP:
        return least
    return least * abs(number) if call.function == "mul" and number else None


def _key(value: Value) -> int:
    return id(value.base or value)


def _ancestors(event: Event, depth: int) -> Iterator[Value]:
    for _, value in event.operands:
        yield value
        if value.maker is not None and depth > 1:
            yield from _ancestors(value.maker, depth - 1)


def _absmax(value: Value) -> float:
    row = value.row
    if row is None or value.is_bad:
        return 0.0
    return ScanResult(value.row, tuple(value.shape), value.dtype, moments=False).absmax or 0.0
