"""locate and locating: the public functions that run code op by op."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from nanscan._data.location import Location
from nanscan._locate.search import Locating

_logger = logging.getLogger("nanscan")


def locating() -> Locating:
    """Runs the code of a `with` block op by op, forward, backward and optimizer steps.

        with nanscan.locating() as search:
            loss = criterion(model(x), y)
            loss.backward()
        print(search.location or "all finite")

    The limits of `locate` apply. Each step is judged as a whole: a location is set when an
    optimizer step or the block ends. After that ops run as usual.

    Returns:
        The search; its `location` is None as long as nothing was found.

    Synchronization: none an op; the end of each optimizer step, and of the block, waits for scans.
    """
    return Locating()


def locate(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Location | None:
    """Runs code once, op by op, and names the first op that made non-finite values out of finite.

    Every floating-point result of every op is scanned, in the forward, in backward and in optimizer
    steps; also inside of checkpoints, under autocast, in custom autograd Functions, and with ops in
    place. What torch.compile compiled runs eagerly meanwhile.

    What other ops absorb is no fault: NaN that torch.where or nan_to_num replaces, and that no
    backward brings back; `locating` has the first of these as `absorbed`. -Inf alone is taken for a
    mask until it turns into NaN, is multiplied by a layer, or reaches a loss, a gradient, a
    parameter or what `fn` returns. What modules return on the way may hold it, such as suppressed
    logits; what `fn` returns may hold Inf that the code wrote as a number, unless that is a loss.
    Values out of memory that was never written to, and values that were bad before anything ran
    ("propagated"), are a fault likewise only where they lead somewhere.

    An overflow to Inf that made 0 of finite values, as in the norm of a float16 layer, leaves
    nothing non-finite; where no fault was found it is returned as "wiped-out". Where a GradScaler
    skips a step since its scale makes float16 overflow in backward, that is no fault.

    Args:
        fn: code to run, such as one training step.
        *args: its arguments.
        **kwargs: its keyword arguments.

    Returns:
        Where it was made; None: no non-finite value was made, or none that led anywhere.

    Raises:
        Exception: what `fn` raises, unless something was found first: then that is returned, and
            the error logged.

    Synchronization: none an op; at the end of each optimizer step and of `fn` it waits for scans.
        A CUDA graph must not be recorded meanwhile.
    """
    return run(Locating(), fn, args, kwargs)


def run(
    search: Locating, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Location | None:
    """Calls a function inside of a search that has not begun yet.

    Raises:
        Exception: what `fn` raises, unless something was found first.
    """
    with search:
        try:
            search.returned(fn(*args, **kwargs))
        except Exception:
            search.settle()
            if search.location is None:
                raise
            _logger.warning("nanscan: the code that was searched raised", exc_info=True)
    return search.location
