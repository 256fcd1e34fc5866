"""Where a value went bad, op by op: what a search concluded, and its report."""

from __future__ import annotations

import contextlib
import linecache
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from nanscan._data import report
from nanscan._data.cause import Cause
from nanscan._data.result import ScanResult, bad_counts
from nanscan._data.settings import BadSetting
from nanscan._data.text import dtype_name, figure

_NEXT = (
    'watch what goes into this line in every step: x = nanscan.probe("operand", x) before it, and '
    "nanscan.enable(); the report then shows its values over the steps before"
)

Direction = Literal["forward", "backward", "optimizer"]
Verdict = Literal["origin", "propagated", "wiped-out", "absorbed"]


@dataclass(frozen=True)
class Operand:
    """A tensor that an op took or returned.

    Attributes:
        name: of the argument in the op's schema, such as "self", "weight" or "tensors[3]"; of a
            result "result", or "result[1]".
        what: what it is, where that is known: the name of a parameter, "gradient of fc.weight",
            "exp_avg of fc.weight"; "" otherwise.
        dtype: of the tensor.
        shape: of the tensor.
        stats: counts and extremes before the op ran; with mean, std and zero_count where
            `has_moments`. None: it is not floating point, or could not be scanned.
        has_moments: `stats` has moments. Not of what an op changed in place, on the CPU.
        made_by: the op that made it, and its line: "aten.add.Tensor, net.py:12"; "" where it came
            from outside.
        kind: "parameter", "buffer", "attribute" (a tensor that a module holds, and that is not in
            its state_dict); "" where it is none of these.
        aliases: other names of the parameter, where weights are tied.
        maker: the op that made it, as far as that is known; None likewise. Its operands know their
            own makers, a few ops deep.
        integers: of an integer tensor on the CPU, `stats` of its values; None of any other.
        numbers: of a small integer tensor its values, in row-major order; () of any other.
    """

    name: str
    what: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    stats: ScanResult | None
    has_moments: bool = False
    made_by: str = ""
    kind: str = ""
    aliases: tuple[str, ...] = ()
    maker: Op | None = field(default=None, repr=False)
    integers: ScanResult | None = field(default=None, repr=False)
    numbers: tuple[int, ...] = field(default=(), repr=False)


@dataclass(frozen=True)
class Op:
    """One op that ran.

    Attributes:
        name: with namespace and overload: "aten.add.Tensor".
        module: qualified name of the innermost module that ran; "" outside of any.
        module_type: its class; "" likewise.
        file: of the innermost line of user code that called it; "" where none is known.
        line: its number, from 1; 0 likewise.
        function: its function.
        operands: the tensors it took, in the order of its schema.
        results: the tensors it returned or wrote.
        settings: its other arguments by the schema's name, defaults included, as far as they are
            numbers, bools, strings, None, or lists of them: dim, eps, exponent, value, alpha, ...
        call: which call of the module in its step it ran in, from 1; 0 outside of any.
    """

    name: str
    module: str = ""
    module_type: str = ""
    file: str = ""
    line: int = 0
    function: str = ""
    operands: tuple[Operand, ...] = ()
    results: tuple[Operand, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    call: int = 0

    @property
    def code(self) -> str:
        """The source line, stripped; "" where it cannot be read."""
        return linecache.getline(self.file, self.line).strip() if self.file else ""


@dataclass(frozen=True)
class Location:
    """The first op that made non-finite values out of finite ones. `str()` is the report.

    Attributes:
        at: the op.
        verdict: "origin": it made them; "propagated": nothing did: what it read, from outside of
            what was watched (a batch, a parameter), was bad already; "wiped-out": it overflowed to
            Inf, and a division by that gave 0 in the place of values that are not 0, so nothing
            non-finite is left; "absorbed": it made them, and other ops took all of them and
            returned finite values, which is no fault.
        how: the verdict in words.
        direction: "forward", "backward" or "optimizer".
        node: of backward: the autograd node that ran it, such as "AddBackward0".
        output_index: of backward: which of the node's gradients is the first bad one.
        forward: of backward: the forward op that created the node, with its operands as they were.
        consumers: of backward: names of ops that took what `forward` returned.
        takers: of forward: the ops that took what `at` returned, and those that took what these
            returned.
        hidden_values: of a product of non-finite values, how many bad values of the result come of
            weights that are all 0.
        hidden_by: the op that dropped the non-finite values of the forward and returned finite
            ones, such as torch.where or clamp; where `at` ran in backward and the forward was
            finite, an op that selects from what `forward` returned. Of "wiped-out": the op that
            returned 0. None: there is none, or it is not known.
        consequence: the op that turned Inf into NaN, where `at` made Inf alone, or into a loss,
            where the code wrote it as a number; where `at` gave
            memory that nothing was written to, the op that computed with it.
        consequence_node: where `consequence` ran in backward, the autograd node that ran it.
        consequence_forward: likewise the forward op that created this node, if it is known.
        reached: what the values got to, where `at` made nothing that is a fault by itself: "the
            loss", "what it returned", ...
        recomputed: it ran again inside backward, for a checkpoint.
        bad_settings: where `at` ran in an optimizer step: settings of the optimizer that are not
            finite.
        follows_others: ops before `at` made NaN or Inf in this step, of which others left nothing.
        step: number of the step, from 0; of those that ended while it was searched. With several
            optimizers each one's step counts, but for what `enable(locate=True)` found.
        causes: likely causes, best first; empty when no evidence points to one.
        unlikely: what is commonly suspected and, by the numbers, is not it; two at most.
    """

    at: Op
    verdict: Verdict
    how: str
    direction: Direction
    node: str = ""
    output_index: int | None = None
    forward: Op | None = None
    consumers: tuple[str, ...] = ()
    takers: tuple[tuple[Op, ...], ...] = field(default=(), repr=False)
    hidden_values: int = 0
    hidden_by: Op | None = None
    consequence: Op | None = None
    consequence_node: str = ""
    consequence_forward: Op | None = None
    reached: str = ""
    recomputed: bool = False
    bad_settings: tuple[BadSetting, ...] = field(default=(), repr=False)
    follows_others: bool = field(default=False, repr=False)
    step: int = 0
    causes: tuple[Cause, ...] = ()
    unlikely: tuple[str, ...] = ()

    @property
    def op(self) -> str:
        """Name of the op: "aten.add.Tensor"."""
        return self.at.name

    @property
    def module(self) -> str:
        """Qualified name of the module it ran in; in backward, that of the forward op."""
        return self.at.module or ("" if self.forward is None else self.forward.module)

    @property
    def file(self) -> str:
        """File of the user's line; in backward, of the forward line that created the node."""
        return self.source.file

    @property
    def line(self) -> int:
        """Its number."""
        return self.source.line

    @property
    def code(self) -> str:
        """Its source."""
        return self.source.code

    @property
    def operands(self) -> tuple[Operand, ...]:
        """The tensors that the op took."""
        return self.at.operands

    def __str__(self) -> str:
        return "\n".join(_report(self))

    @property
    def source(self) -> Op:
        """The op whose line tells most: in backward the forward op, unless a user's line ran it."""
        return self.at if self.at.file or self.forward is None else self.forward


def _report(location: Location) -> list[str]:
    """The op, its line, and what it took and made, side by side."""
    lines = [_headline(location)]
    source = location.source
    label = "line" if source is location.at else "made at"
    lines += report.block(label, [_line(source)] if source.file else ["no line of user code"])
    if location.forward is not None and source is not location.forward:
        lines += report.block("made at", [_line(location.forward)])
    lines += report.block("with", _settings(location.at))
    forward = () if location.forward is None else location.forward.operands
    tensors = {"took": location.at.operands, "made": location.at.results, "forward": forward}
    lines += report.table({label: [*map(_cells, shown)] for label, shown in tensors.items()})
    if location.hidden_by is not None:
        label = "zero at" if location.verdict == "wiped-out" else "hidden by"
        lines += report.block(label, [_name_and_line(location.hidden_by)])
    if location.consequence is not None:
        lines += report.block(_label_of_consequence(location), [_consequence(location)])
    lines += report.block("tied to", _ties(location))
    lines += report.causes(location.causes)
    lines += report.block("unlikely", location.unlikely)
    return lines + report.block("next", [_NEXT] if not location.causes else [])


def _headline(location: Location) -> str:
    how, what = location.how, "made non-finite values"
    if location.verdict == "propagated":
        names = [o.what or o.name for o in location.at.operands if _is_bad(o)]
        what = f"read non-finite values of {', '.join(names)}"
    elif location.verdict == "wiped-out":
        what = "overflowed"
    elif location.reached:
        how += f"; it reached {location.reached}"
    return f"{location.op} {what}{_where(location)}, step {location.step} ({how})"


def _is_bad(operand: Operand) -> bool:
    return operand.stats is not None and not operand.stats.is_finite


def _label_of_consequence(location: Location) -> str:
    op, made = location.consequence, location.at.results
    if made and made[0].stats is None:
        return "read by"
    has_nan = op is None or any(r.stats is not None and r.stats.nan_count for r in op.results)
    return "NaN at" if has_nan else "Inf at"


def _consequence(location: Location) -> str:
    """The op that made NaN of Inf: its line, or the node that ran it and the line of that."""
    op, forward = location.consequence, location.consequence_forward
    if op is None:
        return ""
    if op.file or not location.consequence_node:
        return _name_and_line(op)
    text = f"{op.name} in {location.consequence_node}"
    return text if forward is None else f"{text}: backward of {_name_and_line(forward)}"


def _ties(location: Location) -> list[str]:
    """Other names of the parameters that are in the report."""
    tied = {o.what: o.aliases for o in location.at.operands if o.aliases}
    return [f"{name} is also {', '.join(aliases)}" for name, aliases in tied.items()]


def _name_and_line(op: Op) -> str:
    return f"{op.name}, {_line(op)}" if op.file else op.name


def _where(location: Location) -> str:
    call = f" (call {location.at.call} of this step)" if location.at.call > 1 else ""
    where = f" in {location.at.module}{call}" if location.at.module else ""
    if location.direction == "optimizer":
        where = " in an optimizer step"
    if location.node:
        module = f" in {location.module}" if location.module else ""
        output = "" if location.output_index is None else f", output {location.output_index}"
        op = "an unknown op" if location.forward is None else location.forward.name
        where = f" in {location.node}{output}: backward of {op}{module}"
    return where + (" (recomputed for a checkpoint)" if location.recomputed else "")


def _line(op: Op) -> str:
    """Where an op was called, relative to the current directory if it lies below that."""
    path = Path(op.file)
    with contextlib.suppress(ValueError, OSError):
        path = path.relative_to(Path.cwd())
    code = op.code
    return f"{path}:{op.line} in {op.function}" + (f": {code}" if code else "")


def _settings(op: Op) -> list[str]:
    """Arguments that are no tensors; those that have their default left out."""
    plain = {"alpha": 1, "beta": 1}
    shown = {
        name: x
        for name, x in op.settings.items()
        if x is not None and x is not False and x != [] and plain.get(name) != x
    }
    return [", ".join(f"{name}={x!r}" for name, x in shown.items())] if shown else []


def _cells(operand: Operand) -> list[str]:
    """Name, dtype and shape, what is bad, five numbers, and what is known of it."""
    stats, known = operand.stats, operand.what or operand.made_by
    stats = operand.integers if stats is None else stats
    row = [operand.name, f"{dtype_name(operand.dtype)} {list(operand.shape)}"]
    if stats is None:
        return [*row, "", "", "", "", "", "", known]
    bad = bad_counts(stats)
    if bad and stats.first_nonfinite and math.prod(operand.shape) > 1:
        bad += f", first at {stats.first_nonfinite}"
    if stats.absmax is None:
        return [*row, bad, "no finite value" if stats.numel else "empty", *[""] * 4, known]
    numbers = {"min": stats.min, "max": stats.max, "absmax": stats.absmax}
    if operand.has_moments or operand.stats is None:
        numbers |= {"mean": stats.mean, "std": stats.std}
    values = [f"{name} {figure(x or 0.0)}" for name, x in numbers.items()]
    values += [""] * (5 - len(values))
    return [*row, bad, *values, known]
