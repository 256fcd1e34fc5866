"""Parameters that went bad between two steps, by other hands than an optimizer's.

They are scanned after an optimizer's step, and not again before it is known that something is bad.
Then those that may be the reason are looked at while they still are what they were in the forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from nanscan import _C
from nanscan._collect.names import Registry
from nanscan._collect.newly_bad import NewlyBad
from nanscan._collect.snapshot import BY_NO_OPTIMIZER, Scans
from nanscan._collect.table import Table
from nanscan._data.places import ParameterPlace
from nanscan._data.row import ROW, nonfinite

_UNSCANNED = "it went bad in a step after which it was not scanned"
_AMID = "its optimizer made it so within this step, before it called the closure again"
_MAX_STEPS = 64  # of optimizers that are remembered

Watched = list[tuple[int, ParameterPlace]]  # by position in the optimizer


@dataclass(frozen=True)
class _Stepped:
    """An optimizer's last step.

    Attributes:
        watched: its parameters.
        resets: of the table then.
        is_scanned: the parameters were scanned after it.
        is_over: else it has called its closure, and may call it again.
    """

    watched: Watched
    resets: int
    is_scanned: bool
    is_over: bool


_NO_STEP = _Stepped([], -1, is_scanned=True, is_over=True)


class ParameterChanges:
    """Tells which parameters are the reason for what went bad.

    Args:
        registry: names of modules and parameters.
        table: what was scanned in this step.
        is_on: False: parameters are not scanned, so nothing is told.
    """

    def __init__(self, registry: Registry, table: Table, *, is_on: bool) -> None:
        self._is_on = is_on
        self._registry = registry
        self._table = table
        self._ticket = table.last_ticket  # when it was last asked
        self._spoiled: set[ParameterPlace] = set()  # looked at until they are fine
        self._steps: dict[int, _Stepped] = {}  # by id(optimizer), the last to step comes last

    def note_step(
        self, optimizer: int, watched: Watched, *, is_scanned: bool = True, is_over: bool = True
    ) -> None:
        """Notes a step of an optimizer, by id.

        Args:
            optimizer: the optimizer.
            watched: its parameters.
            is_scanned: they are scanned after the step.
            is_over: False: the optimizer may change parameters, and call its closure again.
        """
        self._steps.pop(optimizer, None)
        if len(self._steps) >= _MAX_STEPS:
            self._steps.pop(next(iter(self._steps)))
        self._steps[optimizer] = _Stepped(watched, self._table.resets, is_scanned, is_over)

    def look(self) -> Iterator[tuple[str, Scans]]:
        """Scans of parameters on the CPU that are bad by now, or fine again, and how it came.

        Nearly always none: nothing went bad since the last call.
        """
        if not self._is_on or (self._table.last_ticket == self._ticket and not self._spoiled):
            return
        since, self._ticket = self._ticket, self._table.last_ticket
        steps = {place: step for step in self._steps.values() for _, place in step.watched}
        scans: dict[str, Scans] = {BY_NO_OPTIMIZER: [], _UNSCANNED: [], _AMID: []}
        for parameter, place in self._suspects(since):
            step = steps.get(place, _NO_STEP)
            is_amid = step.resets == self._table.resets
            if is_amid and (step.is_over or self._has_bad_gradients):
                continue  # an optimizer has changed it since the forward, or for this reason
            row = _C.scan_once(parameter, False)
            if isinstance(row, bytes) and self._is_news(row, place):
                described = _C.describe(parameter) or ("float32", ())
                how = _AMID if is_amid else BY_NO_OPTIMIZER if step.is_scanned else _UNSCANNED
                scans[how].append((place.param, row, described))
        yield from ((how, found) for how, found in scans.items() if found)

    @property
    def _has_bad_gradients(self) -> bool:
        return any(self._table.nodes[row].kind.is_gradient for row, *_ in self._table.core.bad_rows)

    def _is_news(self, row: bytes, place: ParameterPlace) -> bool:
        was_bad, is_bad = place in self._spoiled, bool(nonfinite(np.frombuffer(row, ROW))[0])
        (self._spoiled.add if is_bad else self._spoiled.discard)(place)
        return is_bad is not was_bad

    def _suspects(self, since: int) -> list[tuple[torch.Tensor, ParameterPlace]]:
        wanted = self._places(since) | self._spoiled
        if not wanted:
            return []
        return [
            (parameter, place)
            for parameter, place in self._registry.live_parameters()
            if place in wanted and place.param.row >= 0 and parameter.device.type == "cpu"
        ]

    def _places(self, since: int) -> set[ParameterPlace]:
        """Parameters used where something went bad after a ticket was taken."""
        newly = NewlyBad(self._table, since)
        if not newly:
            return set()
        if newly.is_of_backward:
            return {place for _, place in self._registry.live_parameters()}
        return set(self._own_parameters(newly))

    def _own_parameters(self, newly: NewlyBad) -> Iterator[ParameterPlace]:
        """Those of modules, and of others inside them that do not run through their own call."""
        owners = newly.owners()
        for place in self._registry.places.values():
            if place.user_of(owners, newly.runs) is not None:
                yield from place.parameters.values()
