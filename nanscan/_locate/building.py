"""From a fault that the search found to a complete Location: ops, lines, operands and causes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path

from nanscan._data.location import Direction, Location, Op, Operand
from nanscan._data.places import ModulePlace
from nanscan._data.result import ScanResult
from nanscan._locate.causes import causes, refuted
from nanscan._locate.taint import Source, Taint
from nanscan._locate.tensor_names import TensorNames
from nanscan._locate.trace import OpTrace
from nanscan._locate.values import Event, Value

_MAX_UNLIKELY = 2
_COPY_SLICES = "torch::autograd::CopySlices"
_DETACH = "aten.detach.default"
_SIMPLE = (int, float, bool, str, type(None))

_HOW: dict[Source, str] = {
    "made": "made here out of finite values",
    "negative-inf": "made here out of finite values",
    "uninitialised": "memory that nothing was ever written to was read",
    "outside": "it was so when it was first read; nothing before made non-finite values",
    "mask": "",
}
_HOW_ABSORBED = "made here; ops that took them returned finite values"


class LocationBuilder:
    """Builds locations.

    Args:
        names: names of tensors.
        trace: knows which forward op created an autograd node.

    Attributes:
        module_types: class names of the modules that ran.
    """

    def __init__(self, names: TensorNames, trace: OpTrace) -> None:
        self.module_types: dict[ModulePlace, str] = {}
        self._names = names
        self._trace = trace

    def build(self, taint: Taint, events: list[Event], *, is_absorbed: bool = False) -> Location:
        """Builds a location with its causes.

        Args:
            taint: the fault.
            events: the ops of the step so far.
            is_absorbed: other ops replaced all of its values by finite ones.

        Synchronization: waits for the scans of the ops that it names.
        """
        event = taint.event
        forward = self._forward_of(event)
        found = Location(
            self._op(event),
            "propagated" if taint.source == "outside" else "origin",
            _HOW[taint.source],
            _direction(event),
            node=event.node[0].rpartition("::")[2] if event.node else "",
            output_index=_first_bad(event.outputs),
            forward=None if forward is None else self._op(forward),
            consumers=tuple(_consumers(forward, events)),
            consequence=None if taint.consequence is None else self._op(taint.consequence),
            reached=taint.reached,
            recomputed=event.recomputed,
            step=event.step,
        )
        return dataclasses.replace(
            found,
            verdict="absorbed" if is_absorbed else found.verdict,
            how=_HOW_ABSORBED if is_absorbed else found.how,
            causes=tuple(causes(found)),
            unlikely=tuple(refuted(found)[:_MAX_UNLIKELY]),
        )

    def _forward_of(self, event: Event) -> Event | None:
        """The forward op that created the node in which an op ran.

        Each thread counts its nodes by itself. So several ops can have the number of the node: the
        one whose name is like the node's is taken.
        """
        if event.node is None:
            return None
        name, number = event.node
        if name == _COPY_SLICES:  # of an op in place on a view, which made its own node just before
            number -= 1
        likely = name.rpartition("::")[2].partition("Backward")[0].lower()

        def is_unlikely(e: Event) -> bool:
            return likely != e.info.name.split(".")[1].replace("_", "")

        made = [e for (_, n), e in self._trace.forward.items() if n == number]
        if not made:  # an op in place first clones what it overwrites, and the clone made a node
            made = [e for (_, n), e in self._trace.forward.items() if n == number + 1]
            made = [e for e in made if not is_unlikely(e)]
        forward = min(made, key=is_unlikely, default=None)
        if forward is None or forward.node in (None, event.node):
            return forward
        return self._forward_of(forward) or forward  # a double backward: its first forward

    def _op(self, event: Event) -> Op:
        place = event.place
        results = ["result"]
        if len(event.results) > 1:
            results = [f"result[{i}]" for i in range(len(event.results))]
        settings = {**event.info.defaults, **event.settings}
        return Op(
            event.info.name,
            place.name if place is not None else "",
            self.module_types.get(place, "") if place is not None else "",
            event.code.co_filename if event.code is not None else "",
            event.line,
            event.code.co_name if event.code is not None else "",
            tuple(self._operand(name, value) for name, value in event.operands),
            tuple(
                self._operand(name, value, is_result=True)
                for name, value in zip(results, event.results, strict=True)
            ),
            {name: x for name, x in settings.items() if _is_simple(x)},
        )

    def _operand(self, name: str, value: Value, *, is_result: bool = False) -> Operand:
        what = self._names.name_of(value.ref())
        if not what and value.base is not None:
            what = self._names.name_of(value.base.ref())
        made_by = "" if is_result or value.maker is None else _op_and_line(value.maker)
        row = value.row if value.moments is None else value.moments
        stats, shape = None, tuple(value.shape)
        has_moments = value.moments is not None
        if row is not None:
            stats = ScanResult(row, shape, value.dtype, moments=has_moments)
        return Operand(name, what, value.dtype, shape, stats, has_moments, made_by)


def _consumers(forward: Event | None, events: Iterable[Event]) -> list[str]:
    """Names of the ops that took what a forward op returned."""
    if forward is None:
        return []
    names = [
        event.info.name
        for event in events
        if event.node is None
        and event.info.name != _DETACH  # autograd detaches a result that it keeps
        and any(value.maker is forward for _, value in event.operands)
    ]
    return list(dict.fromkeys(names))


def _direction(event: Event) -> Direction:
    if event.in_optimizer:
        return "optimizer"
    return "forward" if event.node is None else "backward"


def _first_bad(outputs: list[Value | None] | None) -> int | None:
    return next((i for i, v in enumerate(outputs or ()) if v is not None and v.is_bad), None)


def _op_and_line(event: Event) -> str:
    """An op and the line that called it: "aten.add.Tensor, net.py:12"."""
    if event.code is None:
        return event.info.name
    return f"{event.info.name}, {Path(event.code.co_filename).name}:{event.line}"


def _is_simple(x: object) -> bool:
    return isinstance(x, _SIMPLE) or (isinstance(x, (list, tuple)) and all(map(_is_simple, x)))
