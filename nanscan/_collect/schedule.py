"""Which step scans what: every N steps, not at first, or as much as a budget allows."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import nn

from nanscan import _C
from nanscan._collect import door

_LONGEST = 64  # steps between two scans of anything that is thinned
_SAMPLES = 8
_CALLS = 200
_ROUNDS = 9


@dataclass(frozen=True)
class Turn:
    """What one step scans.

    Attributes:
        period: one module in so many has its outputs and their gradients scanned. 0: nothing is
            scanned at all; 1: every module. The loss, gradients of parameters, and outputs of the
            outermost modules and of their direct children are scanned in any case but 0.
        number: position in the period, which moves on with each scanned step.
        slow: whether parameters, buffers and moments are scanned, too.
    """

    period: int
    number: int
    slow: bool

    @property
    def is_full(self) -> bool:
        """Whether nothing is left out."""
        return self.period == 1 and self.slow


FULL = Turn(1, 0, slow=True)


@dataclass
class Cost:
    """Seconds that one step spent in hooks.

    Attributes:
        calls: of modules, dispatch included.
        dispatch: torch's part of that, which no thinning saves.
        gradients: those of outputs, dispatch included: where none is scanned there is no hook.
        slow: parameters, buffers and moments.
        rest: gradients of parameters, snapshots and judgement.
        device: on devices, in the last step that was measured there.
    """

    calls: float = 0.0
    dispatch: float = 0.0
    gradients: float = 0.0
    slow: float = 0.0
    rest: float = 0.0
    device: float = 0.0

    @property
    def total(self) -> float:
        return self.calls + self.gradients + self.slow + self.rest


class Schedule:
    """Decides step by step.

    Args:
        every: scan one step in so many.
        warmup: scan nothing in so many first steps.
        max_overhead: share of a step's time, without hooks, that these may take, on the host and on
            the device each; None: no limit.
    """

    def __init__(self, every: int, warmup: int, max_overhead: float | None) -> None:
        self._every = every
        self._warmup = warmup
        self.max_overhead = max_overhead
        self._full_until = 0
        self._samples: dict[str, deque[float]] = {}
        self.period = self.slow_period = 1

    def turn(self, step: int) -> Turn:
        """What to scan in a step."""
        if step < self._full_until:
            return FULL
        if step < self._warmup or (step - self._warmup) % self._every:
            return Turn(0, 0, slow=False)
        number = (step - self._warmup) // self._every
        return Turn(self.period, number, slow=number % self.slow_period == 0)

    def scan_fully(self, step: int, steps: int) -> None:
        """Scans everything in the next steps, from `step` on, whatever it costs."""
        self._full_until = max(self._full_until, step + steps)

    def note(self, turn: Turn, cost: Cost, seconds: float) -> None:
        """Learns from a step that took so many seconds in all; chooses what later ones scan."""
        if self.max_overhead is None or not turn.period:
            return
        self._sample("net", seconds - cost.total)
        self._sample("fixed", cost.dispatch + cost.rest)
        thinned = max(cost.calls - cost.dispatch, 0.0) + cost.gradients
        self._sample("outputs", thinned * turn.period)
        self._sample("total", cost.total)
        if turn.slow:
            self._sample("slow", cost.slow)
        if cost.device:
            self._sample("device", cost.device * turn.period)
        left = self.max_overhead * self._median("net") - self._median("fixed")
        slow, outputs = self._median("slow"), self._median("outputs")
        self.slow_period = _steps(slow, left - outputs)
        # A step takes as long as the slower of the two takes, host or device.
        on_device = _steps(self._median("device"), self.max_overhead * self._median("net"))
        self.period = max(_steps(outputs, left - slow / self.slow_period), on_device)

    def describe(self) -> dict[str, str]:
        """What is not scanned in every step, and in which it is."""
        thinned = {}
        if self._warmup:
            thinned["everything"] = f"from step {self._warmup} on"
        if self._every > 1:
            thinned["everything"] = f"one step in {self._every}, from step {self._warmup} on"
        if self.slow_period > 1:
            thinned["parameters, buffers and moments"] = f"one scanned step in {self.slow_period}"
        if self.period > 1:
            thinned["outputs and their gradients"] = f"one module in {self.period}, by turns"
        return thinned

    def overhead(self) -> float:
        """Share of a step's time that hooks took of late; NaN while nothing was measured."""
        if not self._samples:
            return math.nan
        device = self._median("device") / self.period
        return max(self._median("total"), device) / self._median("net")

    def _sample(self, name: str, value: float) -> None:
        self._samples.setdefault(name, deque(maxlen=_SAMPLES)).append(value)

    def _median(self, name: str) -> float:
        return median(self._samples[name]) if name in self._samples else 0.0


def _steps(cost: float, budget: float) -> int:
    """One step in how many can bear a cost."""
    if cost <= budget:
        return 1
    return _LONGEST if budget <= cost / _LONGEST else math.ceil(cost / budget)


def dispatch_seconds() -> float:
    """Half of what it takes to observe a module call, which our clock does not see."""
    module, x, observer = nn.Identity(), torch.empty(0), _C.IdleObserver()

    def observed() -> float:
        door.observe(observer, observer)
        try:
            return _repeat(module, x)
        finally:
            door.forget(observer)

    return _difference(observed, lambda: _repeat(module, x)) / _CALLS / 2


def gradient_dispatch_seconds() -> float:
    """Seconds that torch takes to call a hook on a tensor in backward, and to free it."""
    return _difference(lambda: _backward(hook=True), lambda: _backward(hook=False)) / _CALLS


def _repeat(module: nn.Module, x: torch.Tensor) -> float:
    """Seconds of some calls, of this thread: others may keep the processor busy meanwhile."""
    start = time.thread_time()
    for _ in range(_CALLS):
        module(x)
    return time.thread_time() - start


@torch.inference_mode(mode=False)
@torch.enable_grad()
def _backward(*, hook: bool) -> float:
    """Of a backward through a chain of operations, with a hook on each or without any."""
    no_op: Callable[[Any], None] = {}.get
    x = y = torch.zeros(1, device="cpu", requires_grad=True)
    for _ in range(_CALLS):
        y = y.neg()
        if hook:
            y.register_hook(no_op)  # type: ignore[no-untyped-call]
    start = time.thread_time()
    torch.autograd.grad(y, x)
    del y
    return time.thread_time() - start


def _difference(more: Callable[[], float], less: Callable[[], float]) -> float:
    """By how much one time exceeds another: the median of rounds, as the clock rate may drift."""
    return max(median(more() - less() for _ in range(_ROUNDS)), 0.0)
