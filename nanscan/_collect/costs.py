"""CostMeter: what hooks and scans cost in each step, where there is a budget."""

from __future__ import annotations

import time

from nanscan import _C
from nanscan._collect.schedule import Cost, dispatch_seconds, gradient_dispatch_seconds

_DEVICE_EVERY = 16  # steps between two whose scans are timed on the device


class CostMeter:
    """Adds up the cost of a step.

    Args:
        calls: counts the cost of module calls and of gradient hooks.
        table: measures scans on devices.
        is_timed: whether to measure those; the rest is measured anyway.
        with_gradients: whether gradients of outputs are scanned.

    Attributes:
        cost: of the current step; callers add what they spend to its fields.
    """

    def __init__(
        self, calls: _C.Calls, table: _C.Table, *, is_timed: bool, with_gradients: bool
    ) -> None:
        self._calls = calls
        self._table = table
        self._is_timed = is_timed
        # Seconds beside those of our own work: at the begin or end of a module call, and to call a
        # hook of a tensor.
        self.dispatch = dispatch_seconds() if is_timed else 0.0
        self.gradient_dispatch = gradient_dispatch_seconds() if is_timed and with_gradients else 0.0
        self.cost = Cost()
        self._began = time.perf_counter()
        self._steps = 0
        self._device_seconds = 0.0
        if is_timed:
            calls.set_timed(True)

    def lap(self) -> float:
        """Seconds since the last time."""
        began, self._began = self._began, time.perf_counter()
        return self._began - began

    def take(self) -> Cost:
        """What was spent since the last time."""
        cost, self.cost = self.cost, Cost()
        nanoseconds, count = self._calls.take_cost()
        cost.dispatch = count * self.dispatch
        cost.calls = nanoseconds * 1e-9 + cost.dispatch
        nanoseconds, count = self._calls.take_gradient_cost()
        cost.gradients = nanoseconds * 1e-9 + count * self.gradient_dispatch
        if self._is_timed:
            self._measure_device(cost)
        return cost

    def _measure_device(self, cost: Cost) -> None:
        """Times the device's part in one full step of many; events tell of it steps later."""
        measured = self._steps % _DEVICE_EVERY
        self._steps += 1
        self._table.set_timed(measured == 0)
        self._device_seconds += self._table.take_device_seconds()
        if measured == _DEVICE_EVERY - 1:
            cost.device, self._device_seconds = self._device_seconds, 0.0
