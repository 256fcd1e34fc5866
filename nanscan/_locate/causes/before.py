"""Rules about what was bad before: data, parameters, and memory that nothing has written to."""

from __future__ import annotations

import math

from nanscan._data.cause import Cause
from nanscan._data.location import Location, Operand
from nanscan._data.result import ScanResult
from nanscan._locate.causes.bounds import PRODUCTS
from nanscan._locate.causes.evidence import OpEvidence, rule
from nanscan._locate.causes.op_call import OpCall, call_of, is_bad, op_function
from nanscan._locate.causes.wording import bad_of, made_counts, named


@rule(verdicts=("propagated",))
def bad_before_the_search(evidence: OpEvidence) -> Cause | None:
    """A parameter, a gradient or other data was bad before any op ran."""
    location = evidence.location
    bad = next(filter(is_bad, location.operands), None)
    if bad is None or bad.stats is None:
        return None
    held = f"{named(bad)} held {bad_of(bad.stats)} when {location.op} first read it"
    if bad.what.startswith("gradient of "):
        return Cause(
            f"the {bad.what} was bad before it was watched",
            held,
            "watch its backward too: nanscan.locate(lambda: loss_of(batch).backward())",
        )
    if bad.what:
        return Cause(
            f"{bad.what} was bad before anything ran",
            f"{held}; it is {_ARTICLES.get(bad.kind, 'known by that name')}",
            _before_remedy(bad),
        )
    return None if location.direction == "optimizer" else _data(location, bad, bad.stats, held)


def _data(location: Location, bad: Operand, stats: ScanResult, held: str) -> Cause:
    """A tensor that is known by no name, and that no optimizer read."""
    function = op_function(location.op)
    is_product = function in PRODUCTS or "norm" in function
    if not is_product and not stats.nan_count and not stats.posinf_count:
        return Cause("-Inf was there before anything ran", held, "")  # it may have been a mask
    if not bad.shape:
        return Cause("a number that the code computes with was bad before", held, "")
    remedy = "drop or repair the sample where it is loaded: assert torch.isfinite(batch).all()"
    if location.hidden_by is not None and location.reached.startswith("the gradient of "):
        hider = op_function(location.hidden_by.name)
        remedy = (
            f"x = torch.nan_to_num(x) before this op: {hider} drops what is bad in forward only, "
            "and 0 * NaN in backward is NaN"
        )
    return Cause("the data was bad before anything ran", held, remedy)


_ARTICLES = {"parameter": "a parameter", "buffer": "a buffer"}
_ARTICLES["attribute"] = "a tensor that its module holds"


def _before_remedy(bad: Operand) -> str:
    if bad.kind == "attribute":
        return "reset it, or write all of it before it is read"
    text = (
        "load a checkpoint in which it is finite; if an earlier step of this run made it so, "
        "nanscan.replay that one"
    )
    if bad.kind == "parameter":
        text += ". If it was never initialised, call reset_parameters() after to_empty()"
    return text


@rule(directions=("forward", "backward"), verdicts=("origin",))
def nonfinite_number(evidence: OpEvidence) -> Cause | None:
    """An op was given a number that is NaN, or a layer a setting that is Inf."""
    call = evidence.call
    numbers = {k: x for k, x in call.settings.items() if isinstance(x, float)}
    bad = [
        f"{k}={x:g}"
        for k, x in numbers.items()
        if math.isnan(x) or (math.isinf(x) and k in _FINITE_SETTINGS)
    ]
    if not bad or any(map(is_bad, call.tensors.values())):
        return None
    return Cause(
        f"{call.function} was given {bad[0]}",
        f"the tensors that it took are finite; {made_counts(call)}",
        "",
    )


_FINITE_SETTINGS = ("eps", "momentum")


@rule(functions=("empty*", "new_empty*", "resize*", "set*"))
def uninitialised_memory(evidence: OpEvidence) -> Cause | None:
    """An op read memory that nothing had written to."""
    function, result = evidence.call.function, evidence.call.result
    held = f" of {list(result.shape)}" if result is not None else ""
    reader = evidence.location.consequence
    read = f"{reader.name} read it" if reader is not None else "it was read"
    seen = "" if reader is None else _bad_argument_of(call_of(reader))
    return Cause(
        "memory was read that nothing had been written to",
        f"{evidence.location.op} returns memory{held} as it was found; {read}{seen}, and nothing "
        "wrote it",
        f"torch.zeros in the place of {_python_name(function)}, or write all of it first",
    )


def _bad_argument_of(reader: OpCall) -> str:
    bad = next(filter(is_bad, reader.tensors.values()), None)
    return "" if bad is None or bad.stats is None else f" with {bad_of(bad.stats)}"


def _python_name(function: str) -> str:
    if function in ("resize", "set"):
        return f"tensor.{function}_"
    return f"tensor.{function}" if function.startswith("new_") else f"torch.{function}"
