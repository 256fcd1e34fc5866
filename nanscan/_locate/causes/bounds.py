"""How large the result of an op can get, from its arguments: whether it can only be overflow."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from nanscan._locate.causes.op_call import OpCall, is_bad


def limit(dtype: torch.dtype) -> float:
    """Largest finite value of a dtype."""
    return float(torch.finfo(dtype).max)


def bound(call: OpCall) -> float | None:
    """Upper bound of the magnitude of a result of finite arguments; None where it is not known.

    It is known only for functions whose result is finite for these arguments unless it overflows.
    So where a result is not finite and the bound is beyond its dtype, it can only be overflow.
    """
    of_function = _BOUNDS.get(call.function)
    try:
        return of_function(call) if of_function else None
    except OverflowError:
        return math.inf


def _sum_of(call: OpCall) -> float | None:
    a, b = call.absmax("self"), call.absmax("other")
    return None if a is None or b is None else a + abs(call.number("alpha") or 1) * b


def _product(call: OpCall) -> float | None:
    a, b = call.absmax("self"), call.absmax("other")
    return None if a is None or b is None else a * b


def _quotient(call: OpCall) -> float | None:
    a, b = call.absmax("self"), call.smallest("other")
    return None if a is None or b is None else a / b


def _cast(call: OpCall) -> float | None:
    return call.absmax("src", "self")


def _reduction(call: OpCall) -> float | None:
    a, count = call.absmax("self"), call.reduced
    return None if a is None or count is None else a * count


def _range(call: OpCall) -> float | None:
    """Of arange and linspace."""
    return max(abs(call.number("start") or 0.0), abs(call.number("end") or 0.0))


def _scan(call: OpCall) -> float | None:
    """Of cumsum."""
    a, dim = call.absmax("self"), call.number("dim")
    shape = call.tensors["self"].shape if "self" in call.tensors else ()
    return None if a is None or dim is None or not shape else a * shape[int(dim)]


def _power(call: OpCall) -> float | None:
    """Of a power that has no singularity; singularities.py has the others."""
    a, exponent = call.absmax("self"), call.number("exponent")
    base, exponents = call.stats("self"), call.stats("exponent")
    if base is not None and base.min is not None and base.min >= 0 and exponents is not None:
        exponent = exponents.max if (exponents.min or 0) >= 0 else None
    return None if a is None or exponent is None or exponent < 0 else a**exponent


def _square(call: OpCall) -> float | None:
    a = call.absmax("self")
    return None if a is None else a * a


def _squares(call: OpCall) -> float | None:
    """Of norms and variances: sums of squares, which 16-bit types compute in float32."""
    a, count = call.absmax("self"), call.reduced
    if a is None or count is None or call.result is None:
        return None
    if call.result.dtype.itemsize < 4:  # noqa: PLR2004 - bytes of float32
        return (2 * a) ** 2 if call.function.startswith("var") else 2 * a * math.sqrt(count)
    return (2 * a) ** 2 * count


def _products(call: OpCall) -> float | None:
    """Of matrix products and convolutions: the products that are summed, and what is added."""
    left = call.absmax("mat1", "batch1", "input", "self")
    right = call.absmax("mat2", "batch2", "weight", "vec", "tensor", "other")
    count = summed_products(call)
    if left is None or right is None or count is None:
        return None
    added = call.absmax("self" if call.function in _ADDS_SELF else "bias") or 0.0
    alpha, beta = call.number("alpha"), call.number("beta")
    scale = 1.0 if alpha is None else abs(alpha)
    return count * left * right * scale + added * (1.0 if beta is None else abs(beta))


def summed_products(call: OpCall) -> int | None:
    """How many products are summed for one element of a matrix product or convolution."""
    if call.function.endswith("convolution"):
        weight = call.tensors["weight"].shape
        return math.prod(weight) // (weight[1] if call.settings.get("transposed") else weight[0])
    for name in ("mat1", "batch1", "input", "self"):
        if name in call.tensors:
            return call.tensors[name].shape[-1] if call.tensors[name].shape else None
    return None


def _convolution_backward(call: OpCall) -> float | None:
    grad = call.absmax("grad_output")
    if grad is None:
        return None
    most = max(call.absmax("input") or 0.0, call.absmax("weight") or 0.0, 1.0)
    return grad * most * math.prod(call.tensors["grad_output"].shape)


def _fused_product(call: OpCall) -> float | None:
    """Of addcmul."""
    numbers = call.absmax("self"), call.absmax("tensor1"), call.absmax("tensor2")
    if None in numbers:
        return None
    a, b, d = (number or 0.0 for number in numbers)
    value = call.number("value")
    return a + (1.0 if value is None else abs(value)) * b * d


def _fused_quotient(call: OpCall) -> float | None:
    """Of addcdiv."""
    a, b, d = call.absmax("self"), call.absmax("tensor1"), call.smallest("tensor2")
    if a is None or b is None or d is None:
        return None
    value = call.number("value")
    return a + (1.0 if value is None else abs(value)) * b / d


def _lerp(call: OpCall) -> float | None:
    a, b, weight = call.absmax("self"), call.absmax("end"), call.absmax("weight")
    return None if a is None or b is None or weight is None else a + weight * (a + b)


def _fused_step(call: OpCall) -> float | None:
    """Of SGD."""
    a, b, rate = call.absmax("self"), call.absmax("grad"), call.absmax("lr")
    return None if a is None or b is None or rate is None else a + rate * b


def _squared_difference(call: OpCall) -> float | None:
    """Of mse_loss."""
    a, b = call.absmax("self"), call.absmax("target")
    if a is None or b is None:
        return None
    count = 1 if call.number("reduction") == 0 else math.prod(call.tensors["self"].shape)
    return (a + b) ** 2 * count


_ADDS_SELF = ("addmm", "addmv", "baddbmm", "addbmm", "_addmm_activation")
PRODUCTS: tuple[str, ...] = ("mm", "bmm", "mv", "dot", "linear", "mkldnn_linear", *_ADDS_SELF)
PRODUCTS += ("convolution", "cudnn_convolution", "mkldnn_convolution")

RANGES = ("arange", "linspace")

_BOUNDS: dict[str, Callable[[OpCall], float | None]] = {
    **dict.fromkeys(("add", "sub", "rsub"), _sum_of),
    "mul": _product,
    "div": _quotient,
    **dict.fromkeys(("_to_copy", "copy"), _cast),
    **dict.fromkeys(("sum", "mean"), _reduction),
    "cumsum": _scan,
    **dict.fromkeys(RANGES, _range),
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

# Exponential functions, which overflow for small arguments, and their bases.
_EXPONENTIALS = {"exp": math.e, "expm1": math.e, "exp2": 2.0, "sinh": math.e, "cosh": math.e}


def largest_exponent(call: OpCall) -> float | None:
    """The smallest argument for which an exponential overflows; None of another function."""
    base = _EXPONENTIALS.get(call.function)
    if call.function == "pow":
        base = call.number("self")
    if base is None or base <= 1 or call.result is None:
        return None
    half = math.log(2) if call.function in ("sinh", "cosh") else 0.0
    return (math.log(limit(call.result.dtype)) + half) / math.log(base)


def overflows(call: OpCall) -> bool:
    """Whether a non-finite result can only be overflow."""
    if call.result is None or not is_bad(call.result) or call.has_bad_argument:
        return False
    if not call.result.dtype.is_floating_point:
        return False
    largest = bound(call)
    return largest is not None and largest >= limit(call.result.dtype)
