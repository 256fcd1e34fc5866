"""Shows what running a training step op by op costs, next to the other ways of doing it.

A step as in training_overhead.py, whole, and without the optimizer, where detect_anomaly sees all
that nanscan.locating() sees. Baselines, step by step in the same process: the plain step, a
TorchDispatchMode that does nothing, the same with the truth of isfinite(result).all() after each
op, and torch.autograd.detect_anomaly().
"""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from _measure import Bar, Report, Spread, arguments, percent_over
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from training_overhead import Training, conv_net, transformer

import nanscan

SECONDS = 20  # of steps a model
WARM_UP = 2  # rounds not counted

Times = dict[str, list[float]]


class EmptyMode(TorchDispatchMode):
    """What torch itself takes to show each op to Python."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Runs the op."""
        return func(*args, **(kwargs or {}))


class IsFiniteMode(TorchDispatchMode):
    """What people write."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Runs the op, and looks at its results."""
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.is_floating_point() and not x.isfinite().all():
                raise FloatingPointError(str(func))
        return out


WAYS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "plain": nullcontext,
    "empty mode": EmptyMode,
    "nanscan.locating": nanscan.locating,
    "isfinite().all() an op": IsFiniteMode,
    "detect_anomaly": partial(torch.autograd.detect_anomaly, check_nan=True),
}


def interleave(training: Training) -> Times:
    """Seconds a step, one figure a round; order shuffled anew each round."""
    times: Times = {name: [] for name in WAYS}
    order = list(WAYS)
    shuffle = random.Random(0).shuffle
    end = time.perf_counter() + SECONDS
    while time.perf_counter() < end or len(times["plain"]) < WARM_UP + 3:
        shuffle(order)
        for name in order:
            with WAYS[name]():
                begin = time.perf_counter()
                training.step()
                times[name].append(time.perf_counter() - begin)
    return {name: t[WARM_UP:] for name, t in times.items()}


def share_of_overhead(triples: np.ndarray) -> np.ndarray:
    """One overhead over another; [..., rounds, (time, other time, plain time)]."""
    return percent_over(triples[..., [0, 2]]) / percent_over(triples[..., [1, 2]])


def median_ratio(pairs: np.ndarray) -> np.ndarray:
    """Of [..., rounds, (time, other time)]."""
    return np.median(pairs[..., 0] / pairs[..., 1], axis=-1)


def bars_of(title: str, times: Times, *, whole: bool) -> list[Bar]:
    """What the search may cost."""

    def ratio(of: str, to: str) -> Spread:
        return Spread.of_statistic(median_ratio, np.stack([times[of], times[to]], axis=-1))

    search = "nanscan.locating"
    triples = [times[name] for name in ("isfinite().all() an op", search, "plain")]
    overhead = Spread.of_statistic(share_of_overhead, np.stack(triples, axis=-1))
    bars = [
        Bar(f"{title}: step, locating / plain", 4, ratio(search, "plain"), at_least=False),
        Bar(f"{title}: overhead, isfinite an op / locating", 3, overhead),
    ]
    if not whole:
        name = f"{title}: step, locating / detect_anomaly"
        bars.append(Bar(name, 1, ratio(search, "detect_anomaly"), at_least=False))
    return bars


def main() -> None:
    """Trains the two models, with and without an optimizer."""
    report = Report("locate", arguments(__doc__))
    warnings.filterwarnings("ignore", message="Anomaly Detection")
    bars: list[Bar] = []
    kept = report.data["models"] = {}
    for name, make in (("transformer", transformer), ("conv net", conv_net)):
        for whole in (True, False):
            torch.manual_seed(0)
            training = Training(*make())
            if not whole:
                training.optimizer.step = lambda: None
            title = f"{name}, {'whole step' if whole else 'forward and backward'}"
            times = interleave(training)
            steps = {way: Spread.of(1000 * np.array(t)) for way, t in times.items()}
            over = {
                way: Spread.of_statistic(percent_over, np.stack([t, times["plain"]], axis=-1))
                for way, t in times.items()
            }
            rows = [
                [way, spread.text(), f"{over[way].median:+.0f} %"] for way, spread in steps.items()
            ]
            report.table(f"{title}, {steps['plain'].rounds} rounds", ["", "ms", "overhead"], rows)
            kept[title] = {"ms": steps, "overhead_percent": over}
            bars += bars_of(title, times, whole=whole)
    report.bars(bars)
    report.save()


if __name__ == "__main__":
    main()
