"""Shows what running a training step op by op costs, next to the other ways of doing it.

A step as in training_overhead.py, whole, and without the optimizer, where detect_anomaly sees all
that nanscan.locating() sees. Baselines, step by step in the same process: the plain step, a
TorchDispatchMode that does nothing, the same with the truth of isfinite(result).all() after each
op, and torch.autograd.detect_anomaly().
"""

from __future__ import annotations

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
from training_overhead import (
    Times,
    Training,
    conv_net,
    interleave,
    share_of_overhead,
    transformer,
)

import nanscan

SECONDS = 20  # of steps a model


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


class Searched(Training):
    """Enters and leaves a mode in every step, which is a part of what that costs."""

    mode: Callable[[], AbstractContextManager[object]]

    def step(self) -> None:
        """Forward, loss, backward, optimizer."""
        with self.mode():
            super().step()


def contenders(make: Callable[[], Any], *, whole: bool) -> dict[str, Training]:
    """The same training in all ways."""
    torch.manual_seed(0)
    parts = make()
    trainings: dict[str, Training] = {}
    for name, mode in WAYS.items():
        training = trainings[name] = Searched(*parts)
        training.mode = mode
        if not whole:
            training.optimizer.step = lambda: None
    return trainings


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
            title = f"{name}, {'whole step' if whole else 'forward and backward'}"
            times = interleave(contenders(make, whole=whole), SECONDS)
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
