"""Numbers of an op as rules put them into words."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from nanscan._data import text
from nanscan._data.location import Location, Operand
from nanscan._data.result import ScanResult, bad_counts
from nanscan._data.text import dtype_name, figure, share
from nanscan._locate.causes.bounds import PRODUCTS, bound, limit, summed_products
from nanscan._locate.causes.op_call import OpCall, absmax, op_function


def named(operand: Operand) -> str:
    """A tensor by the name of its argument, and what it is: "self (fc.weight)"."""
    return f"{operand.name} ({operand.what})" if operand.what else operand.name


def bad_of(stats: ScanResult) -> str:
    """Counts of non-finite values and of all: "3 NaN, 1 Inf of 12"."""
    return f"{bad_counts(stats)} of {stats.numel:,}"


def hidden(location: Location) -> str:
    """What hid the values from the forward, and its line: "torch.clamp (net.py:10)"; "" else."""
    op = location.hidden_by
    if op is None or location.verdict != "origin":
        return ""
    line = f" ({Path(op.file).name}:{op.line})" if op.file else ""
    name = op_function(op.name)
    name = _BY_INDEX.get(name) or f"{'torch' if hasattr(torch, name) else 'F'}.{name}"
    return f"{name}{line}"


_BY_INDEX = {"index": "indexing", "index_put": "an assignment by index"}


def but_not_in_backward(location: Location) -> str:
    """Says, at the end of a title, what hid Inf from the forward only; "" where nothing did."""
    by = hidden(location)
    if not by or not location.consequence_node:
        return ""
    return f"; {by} hides that, but not 0 * Inf = NaN in its backward"


def made_counts(call: OpCall) -> str:
    """Counts of non-finite values in the result of a call."""
    stats = call.result.stats if call.result is not None else None
    return "" if stats is None else f"the result has {bad_of(stats)}"


def reaches(call: OpCall) -> str:
    """How large operands are, and how large the result can get, next to the limit of its dtype."""
    dtype, largest = call.made.dtype, bound(call)
    most = limit(dtype)
    parts = [
        f"{named(o)} reaches {figure(absmax(o), most)}, {share(absmax(o), most)} of the largest "
        f"{dtype_name(dtype)}"
        for o in call.tensors.values()
        if absmax(o)
    ]
    parts += [
        f"{name} is {call.settings[name]:g}" for name in ("other", "exponent") if call.number(name)
    ]
    products = summed_products(call) if call.function in PRODUCTS else None
    of = f", {products:,} products a value" if products else ""
    get_to = figure(math.inf if largest is None else largest, most)
    parts.append(
        f"the result can get to {get_to}{of}; {dtype_name(dtype)} ends at {text.largest(dtype)}"
    )
    return "; ".join(parts)
