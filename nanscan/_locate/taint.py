"""Finds which op was the first to make non-finite values, from the ops of a step in their order.

Every non-finite value has a taint, which says where it comes from. What is computed from a tainted
value gets the same taint. A taint becomes a fault in one of two ways:

- NaN or +Inf out of finite values is a fault, unless other ops absorb it: they take all of these
  values and return finite ones, as torch.where does.
- Other taints may be meant, such as the -Inf of a mask. They are a fault only where they lead to
  NaN, or reach a value that counts: a loss, a gradient, a parameter, what the code returns. Of Inf
  that the code wrote, only a loss and a gradient count.
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
_RECENT = 8  # an op adds at most so many taints
_PRODUCTS = ("aten.mul.Tensor", "aten.bmm.default", "aten.mm.default", "aten.addmm.default")
# Their -Inf is an overflow. What adds a mask, such as baddbmm, is not among them.
_WEIGHTED_SUMS: tuple[str, ...] = (
    "aten.mm.default",
    "aten.addmm.default",
    "aten.bmm.default",
    "aten.mv.default",
)
_WEIGHTED_SUMS += ("aten.convolution.default", "aten.linear.default", "aten.mkldnn_linear.default")
# What these take is no mask, but for what they add.
_LAYERS = (*_WEIGHTED_SUMS, "aten.native_layer_norm.default", "aten.native_group_norm.default")
_LAYERS += ("aten.native_batch_norm.default", "aten._fused_rms_norm.default")
_ADDED = {"bias", "aten.addmm.default self"}
_MAX_NUMBERS = 1024  # integers of an operand that are kept

# Where non-finite values come from.
# made: NaN or +Inf out of finite values.
# negative-inf: only -Inf, out of finite values, and of no matrix product. It may become a mask.
# mask: Inf that the code wrote as a number, or only -Inf that was there before the search.
# uninitialised: memory that nothing has written to.
# outside: they were there before the search.
Source = Literal["made", "negative-inf", "mask", "uninitialised", "outside"]

# Where an op takes values of several taints, its result gets the first of these.
_PRECEDENCE: tuple[Source, ...] = ("made", "negative-inf", "uninitialised", "outside", "mask")


class Taint:
    """Where non-finite values come from.

    Attributes:
        source: the kind of origin.
        event: the op that made them, or that read them first; of "uninitialised": the op that
            allocated the memory.
        is_fault: the values are known to be a fault.
        consequence: the op that made NaN out of Inf, or the loss of a mask; of "uninitialised": the
            first op that computed with the memory.
        reached: the value that counts and holds them, in words; "" where none is known.
        values: the tensors of this step that hold them and that ops made.
        absorber: the first op that took some of them and returned finite values.
        is_forgiven: a GradScaler has seen them, and they are a part of its search for a scale.
        wiped_by: the op that returned 0 in the place of finite values, because of them.
    """

    __slots__ = (
        "absorber",
        "consequence",
        "event",
        "is_fault",
        "is_forgiven",
        "reached",
        "source",
        "values",
        "wiped_by",
    )

    def __init__(self, source: Source, event: Event) -> None:
        self.source = source
        self.event = event
        self.is_fault = False
        self.consequence: Event | None = None
        self.reached = ""
        self.values: list[Value] = []
        self.absorber: Event | None = None
        self.is_forgiven = False
        self.wiped_by: Event | None = None

    @property
    def is_fault_unless_absorbed(self) -> bool:
        """Whether the values are a fault even if they reach nothing that counts."""
        return self.source == "made" or (
            self.source in ("negative-inf", "outside") and self.consequence is not None
        )

    @property
    def is_inside_autograd(self) -> bool:
        """Whether torch's own formula of a backward made them, not a line of the user's code."""
        return self.event.node is not None and self.event.code is None

    @property
    def is_absorbed(self) -> bool:
        """Whether ops took all of the values, so that none of them is left."""
        return all(value.is_consumed for value in self.values)


class TaintTracker:
    """Follows taints through the ops of a search, in their order."""

    def __init__(self) -> None:
        self._taints: list[Taint] = []  # of this step, and all faults

    @property
    def has_suspects(self) -> bool:
        """Whether there was a non-finite value in this step."""
        return bool(self._taints)

    @property
    def first_fault(self) -> Taint | None:
        """The fault that comes first in the order of execution."""
        faults = [taint for taint in self._taints if taint.is_fault]
        return min(faults, key=lambda taint: taint.event.number, default=None)

    def judge(self, event: Event, operands: list[torch.Tensor] | None = None) -> list[Value]:
        """Gives a taint to each non-finite result of an op.

        Args:
            event: the op.
            operands: the tensors of `event.operands`, if they still hold what the op took; those
                that the op wrote to need not. Where the op made non-finite values, they are scanned
                again with moments, for the report.

        Returns:
            The results that are not finite.

        Synchronization: waits for the scans of the op.
        """
        bad = [value for value in event.results if value.is_bad]
        if self._taints and not event.info.is_view:
            _mark_consumed(event)
            if not bad:
                _note_absorber(event)
        if not bad:
            return bad
        taint = self._taint_of_results(event, bad)
        for value in bad:
            value.taint = taint
            if value.allocated_by is not None and value.allocated_by is not event:
                value.taint = self._taint_of_memory(value.allocated_by)
            elif not event.info.is_view:
                taint.values.append(value)
        is_news = taint.event is event or taint.consequence is event
        if operands is not None and is_news and taint.source != "mask":
            _add_moments_to_all(event, operands)
            if taint.source == "outside" and event.info.name in _PRODUCTS:
                event.hidden_values = _hidden_values(event, operands)
            is_made = taint.source in ("made", "negative-inf") and taint.event is event
            if is_made and not event.info.written and any(map(_is_stale, event.operands)):
                taint.source = "outside"
        return bad

    def mark_reached(
        self, values: Iterable[Value | None], what: str, *, may_be_masks: bool = False
    ) -> None:
        """Notes values that count. Where they are not finite and no mask, they are a fault.

        Args:
            values: the values.
            what: what holds them, such as "the loss".
            may_be_masks: -Inf that ops made may be meant, as in what a model returns: suppressed
                logits, the log of a probability of 0.
        """
        for value in values:
            if value is None or not value.is_bad:
                continue
            if value.taint is None:
                value.taint = self._taint_of_memory_or_view(value)
            taint: Taint | None = value.taint
            if taint is None or taint.is_forgiven or _may_be_meant(value, what, may_be_masks):
                continue
            if taint.source == "mask":
                _note_no_mask(taint)
                taint.consequence = taint.consequence or value.maker
            if not taint.is_fault:
                taint.is_fault, taint.reached = True, what
                if not any(known is taint for known in self._taints):
                    self._taints.append(taint)  # of an earlier step

    def end_step(self) -> None:
        """Marks as faults the taints of this step that should be absorbed by now, and are not."""
        for taint in self._taints:
            is_left = taint.is_fault_unless_absorbed and not taint.is_absorbed
            taint.is_fault |= is_left and not taint.is_forgiven

    @property
    def all(self) -> tuple[Taint, ...]:
        """The taints of this step, and all faults."""
        return tuple(self._taints)

    def has_others_before(self, taint: Taint) -> bool:
        """Whether ops before a fault made other non-finite values, such as an Inf of an exp."""
        number = taint.event.number
        return any(t.source != "mask" and t.event.number < number for t in self._taints)

    @property
    def absorbed(self) -> list[Taint]:
        """The taints of this step that would be faults if they were not absorbed, in their order.

        Formulas of torch's own backwards are left out: they absorb values on purpose.
        """
        absorbed = (
            taint
            for taint in self._taints
            if taint.is_fault_unless_absorbed
            and not taint.is_fault
            and not taint.is_forgiven
            and not taint.is_inside_autograd
        )
        return sorted(absorbed, key=lambda taint: taint.event.number)

    def forget(self, events: list[Event], *, is_end: bool) -> None:
        """Drops operands and results of ops that no report can name any more.

        Args:
            events: the ops.
            is_end: the step is over. All taints that are no fault are dropped too.
        """
        kept = {
            id(event)
            for taint in self._taints
            if taint.source != "mask"
            for event in (taint.event, taint.consequence, taint.absorber, taint.wiped_by)
        }
        for event in events:
            if id(event) not in kept:
                event.operands, event.results = [], []
        if is_end:
            for taint in self._taints:
                taint.values.clear()
            self._taints = [taint for taint in self._taints if taint.is_fault]

    def _taint_of_results(self, event: Event, bad: list[Value]) -> Taint:
        """The taint of an op's non-finite results: that of its operands, or a new one."""
        taken = [value for _, value in event.operands if value.is_bad]
        for value in taken:
            if value.taint is None:
                value.taint = self._taint_of_unseen(value, event)
        has_nan = any(_counts(value)[0] for value in bad)
        if not taken:
            is_written = any(is_nonfinite_number(x) for x in event.settings.values())
            if is_written and not event.in_optimizer:  # a learning rate is no mask
                return self._add("negative-inf" if has_nan else "mask", event)
            has_posinf = any(_counts(value)[1] for value in bad)
            is_made = has_nan or (has_posinf and not event.settings.get("zero_infinity"))
            is_made |= event.info.name in _WEIGHTED_SUMS
            return self._add("made" if is_made else "negative-inf", event)
        taint = _first_by_precedence(taken)
        if taint.source == "mask" and _takes_no_mask(event):
            _note_no_mask(taint)
        if taint.source == "uninitialised" and not event.info.is_view:
            taint.consequence = taint.consequence or event
        if taint.source == "outside" and taint.event.info.is_view:
            taint.event = event  # an op that computes says more than one that makes a view
        if not has_nan or any(_counts(value)[0] for value in taken):
            return taint
        if taint.source == "mask":
            return self._add("made", event)
        taint.consequence = taint.consequence or event
        return taint

    def _taint_of_unseen(self, value: Value, event: Event) -> Taint:
        """The taint of a value that no op of this search made."""
        nan, posinf, _ = _counts(value)
        source: Source = "outside" if nan or posinf else "mask"
        return self._taint_of_memory_or_view(value) or self._add(source, event)

    def _taint_of_memory_or_view(self, value: Value) -> Taint | None:
        """The taint of what was written through a view, or of memory that nothing has written."""
        written: Taint | None = None if value.bad_view is None else value.bad_view.taint
        if written is not None:
            return written
        if value.allocated_by is not None:
            return self._taint_of_memory(value.allocated_by)
        if value.is_rewritten and self._taints:
            return self._taints[-1]  # the latest is the likeliest
        return None

    def _taint_of_memory(self, event: Event) -> Taint:
        """The taint of memory that an op allocated, or received into from another process."""
        return self._add("outside" if event.info.late else "uninitialised", event)

    def _add(self, source: Source, event: Event) -> Taint:
        """A new taint, or the one that this op has already."""
        for taint in self._taints[-_RECENT:]:
            if taint.event is event and taint.source == source:
                return taint
        taint = Taint(source, event)
        self._taints.append(taint)
        return taint


def _takes_no_mask(event: Event) -> bool:
    """Whether an op multiplies or normalises -Inf, which is no use of a mask."""
    name = event.info.name
    bad = (argument for argument, value in event.operands if value.is_bad)
    return name in _LAYERS and not all({x, f"{name} {x}"} & _ADDED for x in bad)


def _note_no_mask(taint: Taint) -> None:
    """Inf that was taken for a mask is none: it was there before, or the code wrote it."""
    is_older = any(operand.is_bad for _, operand in taint.event.operands)
    taint.source = "outside" if is_older else "negative-inf"


def _may_be_meant(value: Value, what: str, may_be_masks: bool) -> bool:
    """Whether the Inf of a value may be meant: not where it is NaN, in a gradient, or a loss."""
    source, (nan, posinf, _) = value.taint.source, _counts(value)
    if source == "negative-inf":
        return may_be_masks and not nan and not posinf
    if source != "mask" or nan or what.startswith("the gradient of"):
        return False
    is_loss = what == "the loss" or (value.maker is not None and "loss" in value.maker.info.name)
    return not (is_loss and value.shape.numel() == 1)


def _mark_consumed(event: Event) -> None:
    """Marks the operands of an op that computes something else of them.

    A comparison or `.item()` has no floating-point result, and does not count.
    """
    if any(value.row is not None for value in event.results):
        for _, value in event.operands:
            value.is_consumed = True
            if value.base is not None:
                value.base.is_consumed = True


def _note_absorber(event: Event) -> None:
    """Notes an op that took non-finite values and returned finite ones."""
    if any(value.row is not None for value in event.results):
        for _, value in event.operands:
            if value.taint is not None and value.taint.absorber is None and value.is_bad:
                value.taint.absorber = event


def _counts(value: Value) -> tuple[int, int, int]:
    """Counts of NaN, +Inf and -Inf. Waits for the scan."""
    nan, posinf, neginf = _COUNTS.unpack(value.counts)
    return nan, posinf, neginf


def _first_by_precedence(values: list[Value]) -> Taint:
    taints: list[Taint] = [value.taint for value in values]
    return min(taints, key=lambda taint: (_PRECEDENCE.index(taint.source), taint.event.number))


def is_nonfinite_number(x: object) -> bool:
    """Whether an argument is a number that is NaN or Inf."""
    return isinstance(x, float) and not math.isfinite(x)


def _add_moments_to_all(event: Event, operands: list[torch.Tensor]) -> None:
    """Scans with moments what an op took and returned, but for operands that it wrote over."""
    results = [value.ref() for value in event.results]
    for (_, value), tensor in zip(event.operands, operands, strict=True):
        if not any(tensor is result for result in results):
            _add_moments(value, tensor)
    for value, result in zip(event.results, results, strict=True):
        if result is not None:
            _add_moments(value, result)


def _hidden_values(event: Event, operands: list[torch.Tensor]) -> int:
    """How many bad values of a product come of factors that are exactly 0, and of no other."""
    result = event.results[0].ref()
    if result is None or len(operands) < 2 or event.info.written:  # noqa: PLR2004 - a product
        return 0
    left, right = (x.detach() for x in operands[-2:])  # addmm has what it adds before them
    if left.is_sparse or right.is_sparse or left.device.type != "cpu":
        return 0
    bad = [(~x.isfinite()).float() for x in (left, right)]
    weights = [(x != 0).float() for x in (left, right)]
    multiply = torch.mul if event.info.name == "aten.mul.Tensor" else torch.matmul
    reached = multiply(weights[0], bad[1]) + multiply(bad[0], weights[1])
    return int(((reached == 0) & ~result.detach().isfinite()).sum())


def _add_moments(value: Value, tensor: torch.Tensor) -> None:
    if value.moments is not None:
        return
    if value.row is None and not tensor.dtype.is_floating_point and not tensor.dtype.is_complex:
        _note_integers(value, tensor)
    elif value.row is not None:
        row = scan_anywhere(tensor, moments=True)
        value.moments = None if isinstance(row, int) else row


def _note_integers(value: Value, tensor: torch.Tensor) -> None:
    """Of integers, which no op scans: how large they are, and of a few what they are."""
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type != "cpu":
        return
    row = scan_anywhere(tensor.detach().double(), moments=True)
    value.moments = None if isinstance(row, int) else row
    if tensor.numel() <= _MAX_NUMBERS and tensor.dtype != torch.bool:
        value.numbers = tuple(tensor.flatten().tolist())


def _is_stale(operand: tuple[str, Value]) -> bool:
    """Whether the second scan counts other values than the first: unseen code wrote in between."""
    value = operand[1]
    moments = value.moments
    if moments is None or isinstance(moments, _C.PendingScan):
        return False
    return counts_of(moments) != value.counts
