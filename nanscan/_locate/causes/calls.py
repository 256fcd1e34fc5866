"""Of an op, whatever its variant: its arguments, how large its result can get, its domain."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from nanscan._data.location import Location, Op, Operand
from nanscan._data.result import ScanResult, bad_counts
from nanscan._data.text import dtype_name, share

_T = TypeVar("_T")

# What a variant calls an argument that the plain op calls otherwise.
_OTHER_NAMES = {
    "scalar": "other",
    "scalars": "value",
    "tensors1": "end",
    "epsilon": "eps",
    "grads": "grad",
    "exp_avg_sqs": "exp_avg_sq",
}
_INDEX = re.compile(r"\[(\d+)\]$")


@dataclass
class Call:
    """One call of a function, whatever variant of it ran.

    Attributes:
        function: "addcdiv" of "aten._foreach_addcdiv_.ScalarList".
        tensors: its tensor arguments by name; of a foreach op those of the first bad result.
        settings: its other arguments; likewise.
        results: what it returned or wrote; likewise.
    """

    function: str
    tensors: dict[str, Operand] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    results: tuple[Operand, ...] = ()

    def stats(self, name: str) -> ScanResult | None:
        """Of a tensor argument."""
        return self.tensors[name].stats if name in self.tensors else None

    def number(self, name: str) -> float | None:
        """A numeric argument."""
        value = self.settings.get(name)
        return value if isinstance(value, (int, float)) else None

    def absmax(self, *names: str) -> float | None:
        """Largest finite magnitude of the first of these arguments that there is."""
        for name in names:
            if (stats := self.stats(name)) is not None:
                return stats.absmax or 0.0
            if (number := self.number(name)) is not None:
                return abs(number)
        return None

    def smallest(self, name: str) -> float | None:
        """A lower bound of an argument's magnitude; None where it may be 0."""
        if (number := self.number(name)) is not None:
            return abs(number) or None
        stats = self.stats(name)
        if stats is None or stats.min is None or stats.max is None:
            return None
        return stats.min if stats.min > 0 else -stats.max if stats.max < 0 else None

    @property
    def result(self) -> Operand | None:
        """The first result that is not finite, else the first."""
        return next(filter(is_bad, self.results), self.results[0] if self.results else None)

    @property
    def reduced(self) -> int | None:
        """Elements of `self` behind each element of the result; 0: it is empty."""
        given = self.tensors.get("self")
        if given is None or not self.results:
            return None
        results = math.prod(self.results[0].shape)
        return math.prod(given.shape) // results if results else None


def is_bad(operand: Operand) -> bool:
    """Whether it holds something that is not finite."""
    return operand.stats is not None and not operand.stats.is_finite


def call(op: Op) -> Call:
    """The function that an op calls, with plain names for its arguments."""
    function, is_list = _function(op.name)
    if not is_list:
        tensors = {operand.name: operand for operand in op.operands}
        return Call(function, _plain(tensors), _plain(op.settings), op.results)
    # What it wrote is listed argument by argument, each as long as the first.
    length = sum(operand.name.startswith("self[") for operand in op.operands) or 1
    bad = next((i for i, result in enumerate(op.results) if is_bad(result)), 0)
    index = bad % length
    operands = [operand for operand in op.operands if _is_of(operand, index)]
    tensors = {_INDEX.sub("", operand.name): operand for operand in operands}
    settings = {
        name: value[index] if isinstance(value, (list, tuple)) and index < len(value) else value
        for name, value in op.settings.items()
    }
    if "scalars" in settings and function not in ("addcdiv", "addcmul"):
        settings["scalar"] = settings.pop("scalars")
    return Call(function, _plain(tensors), _plain(settings), op.results[index::length])


def _function(name: str) -> tuple[str, bool]:
    """Plain name of an op's function, and whether the op takes lists of tensors."""
    namespace, _, rest = name.partition(".")
    if namespace != "aten":
        return name, False
    plain = rest.partition(".")[0].removesuffix("_")
    if plain.startswith("_foreach_"):
        return plain.removeprefix("_foreach_"), True
    return plain, plain.startswith("_fused_")


def _is_of(operand: Operand, index: int) -> bool:
    found = _INDEX.search(operand.name)
    return found is None or int(found[1]) == index


def _plain(arguments: Mapping[str, _T]) -> dict[str, _T]:
    return {_OTHER_NAMES.get(name, name): value for name, value in arguments.items()}


def node_function(node: str) -> str:
    """Function of an autograd node, without underscores: "linalgvectornorm"."""
    return re.sub(r"Backward\d*$", "", node).lower()


# How large a result can get -------------------------------------------------------------------


def limit(dtype: torch.dtype) -> float:
    """Largest value of a dtype."""
    return float(torch.finfo(dtype).max)


def bound(c: Call) -> float | None:
    """How large a magnitude the result of finite arguments can have; None: not known.

    Only of functions that are finite for all finite arguments given here but for overflow. So a
    result that is not finite, where the bound is beyond the dtype, is overflow and nothing else.
    """
    of_function = _BOUNDS.get(c.function)
    try:
        return of_function(c) if of_function else None
    except OverflowError:
        return math.inf


def _sum_of(c: Call) -> float | None:
    a, b = c.absmax("self"), c.absmax("other")
    return None if a is None or b is None else a + abs(c.number("alpha") or 1) * b


def _product(c: Call) -> float | None:
    a, b = c.absmax("self"), c.absmax("other")
    return None if a is None or b is None else a * b


def _quotient(c: Call) -> float | None:
    a, b = c.absmax("self"), c.smallest("other")
    return None if a is None or b is None else a / b


def _cast(c: Call) -> float | None:
    return c.absmax("src", "self")


def _reduction(c: Call) -> float | None:
    a, count = c.absmax("self"), c.reduced
    return None if a is None or count is None else a * count


def _scan(c: Call) -> float | None:
    """Of cumsum."""
    a, dim = c.absmax("self"), c.number("dim")
    shape = c.tensors["self"].shape if "self" in c.tensors else ()
    return None if a is None or dim is None or not shape else a * shape[int(dim)]


def _power(c: Call) -> float | None:
    """Of a power that is not singular: `domain` knows those."""
    a, exponent = c.absmax("self"), c.number("exponent")
    base, exponents = c.stats("self"), c.stats("exponent")
    if base is not None and base.min is not None and base.min >= 0 and exponents is not None:
        exponent = exponents.max if (exponents.min or 0) >= 0 else None
    return None if a is None or exponent is None or exponent < 0 else a**exponent


def _square(c: Call) -> float | None:
    a = c.absmax("self")
    return None if a is None else a * a


def _squares(c: Call) -> float | None:
    """Of norms and variances: squares are summed, for 16-bit types in float32."""
    a, count = c.absmax("self"), c.reduced
    if a is None or count is None or c.result is None:
        return None
    if c.result.dtype.itemsize < 4:  # noqa: PLR2004 - bytes of float32
        return (2 * a) ** 2 if c.function.startswith("var") else 2 * a * math.sqrt(count)
    return (2 * a) ** 2 * count


def _products(c: Call) -> float | None:
    """Of matrix products and convolutions: as many products as are summed, and what is added."""
    left = c.absmax("mat1", "batch1", "input", "self")
    right = c.absmax("mat2", "batch2", "weight", "vec", "tensor", "other")
    count = summed_products(c)
    if left is None or right is None or count is None:
        return None
    added = (c.absmax("self") or 0.0) if c.function in _ADDS_SELF else c.absmax("bias") or 0.0
    alpha, beta = c.number("alpha"), c.number("beta")
    scale = 1.0 if alpha is None else abs(alpha)
    return count * left * right * scale + added * (1.0 if beta is None else abs(beta))


def summed_products(c: Call) -> int | None:
    """How many products are summed for one element of a matrix product or convolution."""
    if c.function.endswith("convolution"):
        weight = c.tensors["weight"].shape
        return math.prod(weight) // (weight[1] if c.settings.get("transposed") else weight[0])
    for name in ("mat1", "batch1", "input", "self"):
        if name in c.tensors:
            return c.tensors[name].shape[-1] if c.tensors[name].shape else None
    return None


def _convolution_backward(c: Call) -> float | None:
    grad = c.absmax("grad_output")
    if grad is None:
        return None
    most = max(c.absmax("input") or 0.0, c.absmax("weight") or 0.0, 1.0)
    return grad * most * math.prod(c.tensors["grad_output"].shape)


def _fused_product(c: Call) -> float | None:
    """Of addcmul."""
    numbers = c.absmax("self"), c.absmax("tensor1"), c.absmax("tensor2")
    if None in numbers:
        return None
    a, b, d = (number or 0.0 for number in numbers)
    value = c.number("value")
    return a + (1.0 if value is None else abs(value)) * b * d


def _fused_quotient(c: Call) -> float | None:
    """Of addcdiv."""
    a, b, d = c.absmax("self"), c.absmax("tensor1"), c.smallest("tensor2")
    if a is None or b is None or d is None:
        return None
    value = c.number("value")
    return a + (1.0 if value is None else abs(value)) * b / d


def _lerp(c: Call) -> float | None:
    a, b, weight = c.absmax("self"), c.absmax("end"), c.absmax("weight")
    return None if a is None or b is None or weight is None else a + weight * (a + b)


def _fused_step(c: Call) -> float | None:
    """Of SGD."""
    a, b, rate = c.absmax("self"), c.absmax("grad"), c.absmax("lr")
    return None if a is None or b is None or rate is None else a + rate * b


def _squared_difference(c: Call) -> float | None:
    """Of mse_loss."""
    a, b = c.absmax("self"), c.absmax("target")
    if a is None or b is None:
        return None
    count = 1 if c.number("reduction") == 0 else math.prod(c.tensors["self"].shape)
    return (a + b) ** 2 * count


_ADDS_SELF = ("addmm", "addmv", "baddbmm", "addbmm", "_addmm_activation")
PRODUCTS: tuple[str, ...] = ("mm", "bmm", "mv", "dot", "linear", "mkldnn_linear", *_ADDS_SELF)
PRODUCTS += ("convolution", "cudnn_convolution", "mkldnn_convolution")

_BOUNDS: dict[str, Callable[[Call], float | None]] = {
    **dict.fromkeys(("add", "sub", "rsub"), _sum_of),
    "mul": _product,
    "div": _quotient,
    **dict.fromkeys(("_to_copy", "copy"), _cast),
    **dict.fromkeys(("sum", "mean"), _reduction),
    "cumsum": _scan,
    "pow": _power,
    "square": _square,
    **dict.fromkeys(("linalg_vector_norm", "norm", "var", "std"), _squares),
    **dict.fromkeys(PRODUCTS, _products),
    "convolution_backward": _convolution_backward,
    "addcmul": _fused_product,
    "addcdiv": _fused_quotient,
    "lerp": _lerp,
    "mse_loss": _squared_difference,
    "_fused_sgd": _fused_step,
}

# Functions that overflow for small arguments: the base of the power that they are.
_EXPONENTIALS = {"exp": math.e, "expm1": math.e, "exp2": 2.0, "sinh": math.e, "cosh": math.e}


def largest_exponent(c: Call) -> float | None:
    """The argument from which an exponential overflows the dtype of its result."""
    base = _EXPONENTIALS.get(c.function)
    if c.function == "pow":
        base = c.number("self")
    if base is None or base <= 1 or c.result is None:
        return None
    half = math.log(2) if c.function in ("sinh", "cosh") else 0.0
    return (math.log(limit(c.result.dtype)) + half) / math.log(base)


# What the numbers say ----------------------------------------------------------------------


def numel(operand: Operand | None) -> int:
    """Elements; 0 of None."""
    return math.prod(operand.shape) if operand is not None else 0


def absmax(operand: Operand) -> float:
    """Largest finite magnitude; 0 where it is not known."""
    return (operand.stats.absmax or 0.0) if operand.stats is not None else 0.0


def overflows(c: Call) -> bool:
    """Whether a result that is not finite can only be overflow."""
    if c.result is None or not is_bad(c.result) or given_bad(c):
        return False
    if not (c.result.dtype.is_floating_point):
        return False
    largest = bound(c)
    return largest is not None and largest >= limit(c.result.dtype)


def given_bad(c: Call) -> bool:
    """Whether an argument was not finite already."""
    numbers = (x for x in c.settings.values() if isinstance(x, float))
    return any(map(is_bad, c.tensors.values())) or not all(map(math.isfinite, numbers))


def made_by(c: Call) -> Operand:
    """What a call returned."""
    if c.result is None:
        raise AssertionError("nanscan: internal: an op without results was judged")
    return c.result


def reaches(c: Call) -> str:
    """How large the operands are, and the result can get, against its dtype."""
    dtype, largest = made_by(c).dtype, bound(c)
    most = limit(dtype)
    parts = [
        f"{named(o)} reaches {absmax(o):.6g}, {share(absmax(o), most)} of the largest "
        f"{dtype_name(dtype)}"
        for o in c.tensors.values()
        if absmax(o)
    ]
    parts += [f"{name} is {c.settings[name]:g}" for name in ("other", "exponent") if c.number(name)]
    products = summed_products(c) if c.function in PRODUCTS else None
    of = f", {products:,} products a value" if products else ""
    parts.append(f"the result can get to {largest:.3g}{of}; {dtype_name(dtype)} ends at {most:.6g}")
    return "; ".join(parts)


def forward_call(location: Location) -> Call:
    """The forward op: of backward the one that made the node, where it is known."""
    return call(location.forward if location.forward is not None else location.at)


def named(operand: Operand) -> str:
    """Its name, and what is known of it."""
    return f"{operand.name} ({operand.what})" if operand.what else operand.name


def bad_of(stats: ScanResult) -> str:
    """How many of each kind, of how many."""
    return f"{bad_counts(stats)} of {stats.numel:,}"


def made_counts(c: Call) -> str:
    """The same of what a call returned."""
    stats = c.result.stats if c.result is not None else None
    return "" if stats is None else f"the result has {bad_of(stats)}"
