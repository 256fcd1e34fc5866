"""From a fault that the search found to a complete Location: ops, lines, operands and causes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path

import torch

from nanscan._data.location import Direction, Location, Op, Operand, Verdict
from nanscan._data.places import ModulePlace
from nanscan._data.result import ScanResult
from nanscan._data.settings import BadSetting
from nanscan._locate.causes import causes, refuted
from nanscan._locate.taint import Source, Taint, is_nonfinite_number
from nanscan._locate.tensor_names import Named, TensorNames
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
    "mask": "Inf that the code wrote",
}
_HOW_OF: dict[str, str] = {
    "absorbed": "made here; ops that took them returned finite values",
    "wiped-out": "Inf here, and 0 in the place of what is divided by it: values are lost, and "
    "nothing non-finite is left",
}
_SELECTS = ("where", "masked_fill", "masked_select", "index", "index_put", "masked_scatter")
_MAX_DEPTH = 4  # of makers of operands
_MAX_TAKERS = 8  # ops that took one result
_MAX_WIDTH = 3  # an op with more operands is told without their makers


class LocationBuilder:
    """Builds locations.

    Args:
        names: names of tensors.
        trace: knows which forward op created an autograd node.

    Attributes:
        module_types: class names of the modules that ran.
        bad_settings: of the optimizer that stepped last, settings that are not finite.
    """

    def __init__(self, names: TensorNames, trace: OpTrace) -> None:
        self.module_types: dict[ModulePlace, str] = {}
        self.bad_settings: tuple[BadSetting, ...] = ()
        self._names = names
        self._trace = trace

    def build(
        self,
        taint: Taint,
        events: list[Event],
        verdict: Verdict | None = None,
        *,
        follows_others: bool = False,
    ) -> Location:
        """Builds a location with its causes.

        Args:
            taint: the fault.
            events: the ops of the step so far.
            verdict: another one than that of a fault.
            follows_others: other values of the step were bad before.

        Synchronization: waits for the scans of the ops that it names.
        """
        event = taint.event
        forward = self._forward_of(event)
        after, after_forward = taint.consequence, None
        if after is not None and after is not event:
            after_forward = self._forward_of(after)
        consumers = _consumers(forward, events)
        hidden_by = _hidden_by(taint, verdict, consumers)
        verdict = verdict or ("propagated" if taint.source == "outside" else "origin")
        found = Location(
            self.op(event),
            verdict,
            _HOW_OF.get(verdict, _how(taint)),
            _direction(event),
            node=_node_name(event.node) if event.node else "",
            output_index=_first_bad(event.outputs),
            forward=None if forward is None else self.op(forward),
            consumers=tuple(dict.fromkeys(consumer.info.name for consumer in consumers)),
            takers=self._takers(event, events),
            hidden_values=event.hidden_values,
            hidden_by=None if hidden_by is None else self.op(hidden_by),
            consequence=None if after is None else self.op(after),
            consequence_node="" if after is None or not after.node else _node_name(after.node),
            consequence_forward=None if after_forward is None else self.op(after_forward),
            reached=taint.reached,
            recomputed=event.recomputed,
            bad_settings=self.bad_settings if event.in_optimizer else (),
            follows_others=follows_others,
            step=event.step,
        )
        return dataclasses.replace(
            found,
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

    def _takers(self, event: Event, events: list[Event]) -> tuple[tuple[Op, ...], ...]:
        if event.node is not None:
            return ()
        first = _consumers(event, events)[:_MAX_TAKERS]
        second = [_consumers(taker, events)[:_MAX_TAKERS] for taker in first]
        flat = {id(taker): taker for takers in second for taker in takers}
        return tuple(
            tuple(self.op(taker, _MAX_DEPTH) for taker in takers)
            for takers in (first, flat.values())
        )

    def op(self, event: Event, depth: int = 0) -> Op:
        """What a report knows of an op.

        Args:
            event: the op.
            depth: how many ops lie between it and the one that a report is of.
        """
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
            tuple(self._operand(name, value, depth) for name, value in event.operands),
            tuple(
                self._operand(name, value, depth, is_result=True)
                for name, value in zip(results, event.results, strict=False)  # none: of old ones
            ),
            {name: x for name, x in settings.items() if _is_simple(x)},
            event.call,
        )

    def _operand(self, name: str, value: Value, depth: int, *, is_result: bool = False) -> Operand:
        named, made_by, maker = Named(), "", None
        if depth == 0:
            named = value.named or self._names.named_of(value)
        if not is_result and value.maker is not None:
            made_by = _op_and_line(value.maker)
            is_told = value.maker.results and len(value.maker.operands) <= _MAX_WIDTH
            if depth < _MAX_DEPTH and is_told:  # not of an op of an earlier step
                maker = self.op(value.maker, depth + 1)
        row = value.row if value.moments is None else value.moments
        stats, integers, shape = None, None, tuple(value.shape)
        has_moments = value.row is not None and value.moments is not None
        if value.row is not None and row is not None:
            stats = ScanResult(row, shape, value.dtype, moments=has_moments)
        elif row is not None:
            integers = ScanResult(row, shape, torch.float64, moments=True)
        known = (has_moments, made_by, named.kind, named.aliases, maker, integers, value.numbers)
        return Operand(name, named.name, value.dtype, shape, stats, *known)


def _how(taint: Taint) -> str:
    """Of a fault, what was made of what."""
    event = taint.event
    if taint.source not in ("made", "negative-inf"):
        return _HOW[taint.source]
    if any(value.is_bad for _, value in event.operands):
        return "NaN made here out of Inf"
    if not any(map(is_nonfinite_number, event.settings.values())):
        return _HOW[taint.source]
    has_nan = any(value.has_nan for value in event.results)
    by_number = "made here by a number that is not finite"
    return by_number if has_nan or event.in_optimizer else _HOW["mask"]


def _hidden_by(taint: Taint, verdict: str | None, consumers: list[Event]) -> Event | None:
    """The op that hid what is bad from the forward, so that only the backward shows it."""
    if verdict == "wiped-out":
        return taint.wiped_by
    if taint.event.node is not None:
        return next((event for event in consumers if _base_name(event) in _SELECTS), None)
    after = taint.consequence
    is_in_backward = after is not None and after.node is not None
    if is_in_backward or taint.reached.startswith("the gradient of") or verdict == "absorbed":
        return taint.absorber
    return None


def _consumers(forward: Event | None, events: Iterable[Event]) -> list[Event]:
    """The ops that took what a forward op returned."""
    if forward is None:
        return []
    return [
        event
        for event in events
        if event.node is None
        and event.info.name != _DETACH  # autograd detaches a result that it keeps
        and any(value.maker is forward for _, value in event.operands)
    ]


def _base_name(event: Event) -> str:
    """Name of an op without namespace, overload and the underscore of ops in place."""
    return event.info.name.split(".")[1].rstrip("_")


def _node_name(node: tuple[str, int]) -> str:
    return node[0].rpartition("::")[2]


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
