"""Where a value went bad, op by op: what a search concluded, and its report."""

from __future__ import annotations

import linecache
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from nanscan._data.cause import Cause
from nanscan._data.result import ScanResult

Direction = Literal["forward", "backward", "optimizer"]


@dataclass
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
    """

    name: str
    what: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    stats: ScanResult | None
    has_moments: bool = False
    made_by: str = ""


@dataclass
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
    """

    name: str
    module: str = ""
    module_type: str = ""
    file: str = ""
    line: int = 0
    function: str = ""
    operands: list[Operand] = field(default_factory=list)
    results: list[Operand] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def code(self) -> str:
        """The source line, stripped; "" where it cannot be read."""
        return linecache.getline(self.file, self.line).strip() if self.file else ""


@dataclass
class Location:
    """The first op that made non-finite values out of finite ones. `str()` is the report.

    Attributes:
        at: the op.
        verdict: "origin": it made them; "propagated": nothing did: what it read, from outside of
            what was watched (a batch, a parameter), was bad already; "absorbed": it made them, and
            other ops took all of them and returned finite values.
        how: the verdict in words.
        direction: "forward", "backward" or "optimizer".
        node: of backward: the autograd node that ran it, such as "AddBackward0".
        output_index: of backward: which of the node's gradients is the first bad one.
        forward: of backward: the forward op that created the node, with its operands as they were.
        consumers: of backward: names of ops that took what `forward` returned.
        consequence: the op that turned Inf into NaN, where `at` made Inf alone; where `at` gave
            memory that nothing was written to, the op that computed with it.
        reached: what the values got to, where `at` made nothing that is a fault by itself: "the
            loss", "what it returned", ...
        recomputed: it ran again inside backward, for a checkpoint.
        step: number of the step, from 0; of those that ended while it was searched.
        causes: likely causes, best first; empty when no evidence points to one.
        unlikely: what is commonly suspected and, by the numbers, is not it; two at most.
    """

    at: Op
    verdict: Literal["origin", "propagated", "absorbed"]
    how: str
    direction: Direction
    node: str = ""
    output_index: int | None = None
    forward: Op | None = None
    consumers: list[str] = field(default_factory=list)
    consequence: Op | None = None
    reached: str = ""
    recomputed: bool = False
    step: int = 0
    causes: list[Cause] = field(default_factory=list)
    unlikely: list[str] = field(default_factory=list)

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
    def operands(self) -> list[Operand]:
        """The tensors that the op took."""
        return self.at.operands

    def __str__(self) -> str:
        from nanscan._data.report import located

        return located(self)

    @property
    def source(self) -> Op:
        """The op whose line tells most: in backward the forward op, unless a user's line ran it."""
        return self.at if self.at.file or self.forward is None else self.forward
