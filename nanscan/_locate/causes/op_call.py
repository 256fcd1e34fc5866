"""OpCall: one call of an op with plain names, whichever variant of the op ran."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from nanscan._data.location import Op, Operand
from nanscan._data.result import ScanResult

_T = TypeVar("_T")

# Names that variants of an op have for an argument, and the name in the plain op.
_PLAIN_NAMES = {
    "scalar": "other",
    "scalars": "value",
    "tensors1": "end",
    "epsilon": "eps",
    "grads": "grad",
    "exp_avg_sqs": "exp_avg_sq",
}
_INDEX = re.compile(r"\[(\d+)\]$")


@dataclass
class OpCall:
    """One call of a function. Of a foreach op, only what belongs to its first bad result.

    Attributes:
        function: name of the op without namespace, variant and underscores at the end: "addcdiv" of
            "aten._foreach_addcdiv_.ScalarList".
        tensors: its tensor arguments by name.
        settings: its other arguments by name.
        results: the tensors that it returned or wrote.
    """

    function: str
    tensors: dict[str, Operand] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    results: tuple[Operand, ...] = ()

    def stats(self, name: str) -> ScanResult | None:
        """The scan of a tensor argument; None where there is none."""
        return self.tensors[name].stats if name in self.tensors else None

    def integers(self, name: str) -> ScanResult | None:
        """The extremes of an integer argument; None where it is none, or they are not known."""
        return self.tensors[name].integers if name in self.tensors else None

    def _extremes(self, name: str) -> ScanResult | None:
        stats = self.stats(name)  # which has no truth value
        return self.integers(name) if stats is None else stats

    def number(self, name: str) -> float | None:
        """A numeric argument; None where there is none."""
        value = self.settings.get(name)
        return value if isinstance(value, (int, float)) else None

    def absmax(self, *names: str) -> float | None:
        """Largest finite magnitude of the first of these arguments that the call has."""
        for name in names:
            if (stats := self._extremes(name)) is not None:
                return stats.absmax or 0.0
            if (number := self.number(name)) is not None:
                return abs(number)
        return None

    def smallest(self, name: str) -> float | None:
        """A lower bound of an argument's magnitude; None where it may be 0."""
        if (number := self.number(name)) is not None:
            return None if math.isnan(number) else abs(number) or None
        stats = self._extremes(name)
        if stats is None or stats.min is None or stats.max is None:
            return None
        return stats.min if stats.min > 0 else -stats.max if stats.max < 0 else None

    @property
    def result(self) -> Operand | None:
        """The first result that is not finite, else the first; None where there is no result."""
        return next(filter(is_bad, self.results), self.results[0] if self.results else None)

    @property
    def made(self) -> Operand:
        """`result`, of a call that has one.

        Raises:
            AssertionError: the call has no result.
        """
        if self.result is None:
            raise AssertionError("nanscan: internal: an op without results was judged")
        return self.result

    @property
    def has_bad_argument(self) -> bool:
        """Whether an argument was not finite already."""
        numbers = (x for x in self.settings.values() if isinstance(x, float))
        return any(map(is_bad, self.tensors.values())) or not all(map(math.isfinite, numbers))

    @property
    def reduced(self) -> int | None:
        """Elements of `self` for each element of the result: 0 where `self` is empty."""
        given = self.tensors.get("self")
        if given is None or not self.results:
            return None
        results = math.prod(self.results[0].shape)
        return math.prod(given.shape) // results if results else None


def call_of(op: Op) -> OpCall:
    """The call that an op was, with plain names of function and arguments."""
    function, is_list = _function(op.name)
    if not is_list:
        tensors = {operand.name: operand for operand in op.operands}
        return OpCall(function, _plain(tensors), _plain(op.settings), op.results)
    # Results are listed argument by argument, and each argument is a list of the same length.
    length = sum(operand.name.startswith("self[") for operand in op.operands) or 1
    bad = next((i for i, result in enumerate(op.results) if is_bad(result)), 0)
    index = bad % length
    operands = [operand for operand in op.operands if _has_index(operand, index)]
    tensors = {_INDEX.sub("", operand.name): operand for operand in operands}
    settings = {
        name: value[index] if isinstance(value, (list, tuple)) and index < len(value) else value
        for name, value in op.settings.items()
    }
    if "scalars" in settings and function not in ("addcdiv", "addcmul"):
        settings["scalar"] = settings.pop("scalars")
    return OpCall(function, _plain(tensors), _plain(settings), op.results[index::length])


def _function(name: str) -> tuple[str, bool]:
    """Plain name of an op's function, and whether the op takes lists of tensors."""
    namespace, _, rest = name.partition(".")
    if namespace != "aten":
        return name, False
    plain = rest.partition(".")[0].removesuffix("_")
    if plain.startswith("_foreach_"):
        return plain.removeprefix("_foreach_"), True
    return plain, plain.startswith("_fused_")


def op_function(name: str) -> str:
    """Plain name of an op's function: "clamp" of "aten.clamp_.default"."""
    return _function(name)[0]


def makers(operand: Operand | None) -> Iterator[OpCall]:
    """The call that made a tensor, that which made its first operand, and so on."""
    while operand is not None and operand.maker is not None:
        yield call_of(operand.maker)
        operand = next(iter(operand.maker.operands), None)


def _has_index(operand: Operand, index: int) -> bool:
    """Whether an operand belongs to this element of the lists."""
    found = _INDEX.search(operand.name)
    return found is None or int(found[1]) == index


def _plain(arguments: Mapping[str, _T]) -> dict[str, _T]:
    return {_PLAIN_NAMES.get(name, name): value for name, value in arguments.items()}


def node_function(node: str) -> str:
    """Function of an autograd node, without underscores: "linalgvectornorm"."""
    return re.sub(r"Backward\d*$", "", node).lower()


def is_bad(operand: Operand) -> bool:
    """Whether a tensor holds a non-finite value."""
    return operand.stats is not None and not operand.stats.is_finite


def numel(operand: Operand | None) -> int:
    """How many elements a tensor has; 0 of None."""
    return math.prod(operand.shape) if operand is not None else 0


def absmax(operand: Operand) -> float:
    """Largest finite magnitude of a tensor; 0 where it is not known."""
    return (operand.stats.absmax or 0.0) if operand.stats is not None else 0.0
