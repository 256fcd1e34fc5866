"""HeldTensors: buffers, tensor attributes and handed-in objects that were bad before a forward.

A KV cache, a lookup table or a scale that other code has spoiled shows only in what reads it. The
module that holds it may write into it as well, and must not be blamed for what it was given, nor
its cache for what the module made. So what is in a tensor is looked at before a forward begins, and
only if other code has changed it since the last forward ended, as its version shows.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from nanscan import _C
from nanscan._collect.holders import Holder, attributes_of, next_search, objects_in
from nanscan._collect.names import Registry
from nanscan._collect.newly_bad import NewlyBad
from nanscan._collect.snapshot import BY_NO_OPTIMIZER, Scans
from nanscan._collect.table import Table
from nanscan._data.kept import version
from nanscan._data.places import ModulePlace, SinglePlace
from nanscan._data.row import ROW
from nanscan._data.text import indices

_CHANGED = "it was so before this forward: changed after the last one"
_FROM_START = "it was so before its model first ran"
_HANDED_IN = "it was so when the caller handed it in"

# What changes before each forward, such as moving averages, is scanned in one of so many forwards.
_INTERVAL, _BURST = 32, 8


@dataclass(eq=False)
class _Held(Holder):
    """A buffer, an attribute or an argument that is watched.

    Attributes:
        owner: place of the module.
        buffer: place of a buffer; None: another, with a place for each tensor in it.
        is_argument: `module` is an object that is handed to an outermost module.
        states: of its tensors when the last forward ended; None: not known.
        bad: how many values were NaN or +Inf when they were last looked at, by path, and in which
            parts of dimension 0, as bits.
        next_scan: the number of the forward that pays for another scan.
    """

    owner: ModulePlace
    buffer: SinglePlace | None = None
    is_argument: bool = False
    states: bytes | None = None
    bad: dict[str, tuple[int, int]] = field(default_factory=dict)
    next_scan: int = 0

    @property
    def value(self) -> Any:
        """What is there now."""
        return self.module() if self.is_argument else super().value

    def changed(self, states: bytes | None) -> list[tuple[str, torch.Tensor]]:
        """Tensors that are new, or were written, since their states were noted."""
        numbers = np.frombuffer(states or b"", np.int64)
        known = dict(zip(numbers[::2].tolist(), numbers[1::2].tolist(), strict=True))
        return [(path, x) for path, x in self.tensors() if known.get(id(x)) != version(x)]

    def users_among(self, makers: set[ModulePlace]) -> set[ModulePlace]:
        """Which of some modules may have read it."""
        if self.is_argument:
            return {maker for maker in makers if maker.is_inside(self.owner)}
        user = self.owner.user_of(makers)
        return set() if user is None else {user}


@dataclass(frozen=True)
class _Candidate:
    """A tensor that was bad before the forward that runs."""

    holder: _Held
    path: str
    how: str
    row: bytes
    described: tuple[str, tuple[int, ...]]


class HeldTensors:
    """Tells which of them are the reason for what went bad. On the CPU only.

    Args:
        registry: names of modules.
        table: what was scanned in this step.
        is_on: False: buffers are not scanned, so nothing is told.
    """

    def __init__(self, registry: Registry, table: Table, *, is_on: bool) -> None:
        self._is_on = is_on
        self._registry = registry
        self._table = table
        self._holders: dict[tuple[ModulePlace, str], _Held] = {}
        # Running statistics change without a version. They are read in eval mode only, in which
        # no call changes them.
        self._statistics: dict[SinglePlace, _Held] = {}
        self._handed: list[tuple[_Held, bytes]] = []  # objects, and their states before the call
        self._candidates: list[_Candidate] = []
        self._blamed: dict[SinglePlace, tuple[_Held, str]] = {}  # until they are fine
        self._mended: Scans = []
        self._running: set[int] = set()  # threads in a forward
        self._is_settled = False  # the last forward ended, and the states are those of then
        self._forwards = 0
        self._next_search = 0
        self._is_bad = False  # something went bad in the forward at hand
        self._ticket = table.last_ticket  # when it was last asked

    # -- around each forward -----------------------------------------------------------------------

    def before_forward(self, place: ModulePlace, args: Any, kwargs: Any) -> None:
        """An outermost module is about to run: what was changed since the last one ended?"""
        if not self._is_on:
            return
        self._candidates.clear()
        thread = threading.get_ident()
        if self._running:
            self._is_settled &= self._running == {thread}
        self._running.add(thread)
        self._is_bad = False
        for blamed, (holder, path) in list(self._blamed.items()) if self._blamed else ():
            self._look_at_blamed(blamed, holder, path)
        for holder in self._holders.values() if self._is_settled else ():
            states = holder.states
            if states is not None and states != holder.read_states():
                self._look_into(holder, holder.changed(states), _CHANGED)
        self._note_objects(place, args, kwargs)
        if self._forwards >= self._next_search:
            self._search()
        self._forwards += 1
        self._is_settled = False

    def after_forward(self) -> None:
        """An outermost module returned, and `look` was called."""
        if not self._is_on:
            return
        self._running.discard(threading.get_ident())
        if self._running:
            return  # what changes until it ends is not known to be the doing of other code
        for holder in self._holders.values():
            before, holder.states = holder.states, holder.read_states()
            if self._is_bad:  # the forward may have written bad values into it
                for path, x in holder.changed(before):
                    row = _scan(x)
                    if row is not None:
                        holder.bad[path] = _badness(x, row)
        self._is_settled = True

    def forget(self) -> None:
        """Forwards may have been missed."""
        self._is_settled = False

    def _note_objects(self, place: ModulePlace, args: Any, kwargs: Any) -> None:
        """Objects in the arguments: a KV cache, a batch. What containers hold is scanned anyway."""
        self._handed.clear()
        for path, x in objects_in(args, kwargs):
            key = place, f"argument {path}"
            holder = self._holders.get(key)
            if holder is None or holder.value is not x:
                scans = 0 if holder is None else holder.next_scan
                holder = _of_argument(x, path, place)
                if holder is None:
                    continue
                holder.next_scan = scans
                self._holders[key] = holder
                self._look_into(holder, holder.tensors(), _HANDED_IN)
            self._handed.append((holder, holder.read_states()))

    def _look_into(self, holder: _Held, pairs: list[tuple[str, torch.Tensor]], how: str) -> None:
        """Scans tensors of a holder, unless that was done in most of the latest forwards."""
        if not pairs or holder.next_scan > self._forwards + _INTERVAL * _BURST:
            return
        holder.next_scan = max(holder.next_scan, self._forwards) + _INTERVAL
        for path, x in pairs:
            row = _scan(x)
            if row is not None:
                self._judge(holder, path, x, row, how)

    def _judge(self, holder: _Held, path: str, x: torch.Tensor, row: bytes, how: str) -> None:
        """Makes a candidate of a tensor that holds more bad values than it did."""
        count_before, parts_before = holder.bad.get(path, (0, 0))
        count, parts = holder.bad[path] = _badness(x, row)
        if count > count_before:
            described = _C.describe(x) or ("float32", ())
            new = indices(parts & ~parts_before, (described[1] or (1,))[0])
            if new and count_before:
                how = f"{how}, now also at index {new} of dimension 0"
            self._candidates.append(_Candidate(holder, path, how, row, described))

    def _look_at_blamed(self, place: SinglePlace, holder: _Held, path: str) -> None:
        x = dict(holder.tensors()).get(path)
        row = _NOTHING if x is None else _scan(x)
        if row is not None and not _count(row):
            del self._blamed[place]
            described = (x is not None and _C.describe(x)) or ("float32", ())
            self._mended.append((place.node, row, described))

    def _search(self) -> None:
        """Finds buffers, and attributes with tensors, that are new."""
        self._next_search = next_search(self._forwards)
        for reference, key, place in self._registry.buffer_owners():
            owner = place.parent
            if isinstance(owner, ModulePlace) and place.is_statistic:
                self._add_statistic(place, _Held(reference, key, True, owner, place))
            elif isinstance(owner, ModulePlace):
                self._add(_Held(reference, key, True, owner, place))
        for module, owner in self._registry.modules():
            for key in attributes_of(module) if owner.watched else ():
                self._add(_Held(weakref.ref(module), key, False, owner))

    def _add(self, holder: _Held) -> None:
        key = holder.owner, holder.key
        pairs = [] if key in self._holders else holder.tensors()
        if not pairs:
            return
        self._holders[key] = holder
        is_first = self._forwards == 0 or not holder.owner.called
        if is_first and holder.buffer is None:  # buffers are swept then
            self._look_into(holder, pairs, _FROM_START)

    def _add_statistic(self, place: SinglePlace, holder: _Held) -> None:
        if place not in self._statistics:
            self._statistics[place] = holder
            holder.bad |= {p: _badness(x, row) for p, x in holder.tensors() if (row := _scan(x))}

    # -- once something is bad ---------------------------------------------------------------------

    def look(self) -> Iterator[tuple[str, Scans]]:
        """Scans of those that are the reason, as they were before the forward, and how it came.

        And of those that were, and are fine again. Nearly always none.
        """
        if self._mended:
            found, self._mended = self._mended, []
            yield "", found
        if self._table.last_ticket == self._ticket:
            return
        since, self._ticket = self._ticket, self._table.last_ticket
        newly = NewlyBad(self._table, since)
        if not newly:
            return
        self._is_bad = True
        makers = newly.makers()
        self._look_into_handed()
        scans: dict[str, Scans] = {}
        for candidate in (*self._candidates, *self._bad_statistics(makers)):
            holder = candidate.holder
            users = holder.users_among(makers)
            if users and not self._has_bad_parameter({*users, holder.owner}):
                place = holder.buffer or self._registry.attribute(holder.owner, candidate.path)
                if place.watched and place not in self._blamed:
                    self._table.add(place.node)
                self._blamed[place] = holder, candidate.path
                scan = place.node, candidate.row, candidate.described
                scans.setdefault(candidate.how, []).append(scan)
        yield from scans.items()

    def _look_into_handed(self) -> None:
        """Makes candidates of what is still as the caller handed it in: it was bad then, too.

        All of an object has to be: a new tensor may have the id of one that is gone.
        """
        for holder, states in self._handed:
            for path, x in holder.tensors() if states == holder.read_states() else ():
                row = _scan(x) if version(x) >= 0 else None
                if row is not None:
                    self._judge(holder, path, x, row, _HANDED_IN)
        self._handed.clear()

    def _bad_statistics(self, makers: set[ModulePlace]) -> Iterator[_Candidate]:
        """Running statistics that were not bad when they were last scanned."""
        for place, holder in self._statistics.items():
            module = holder.module()
            if module is None or module.training or holder.owner.user_of(makers) is None:
                continue
            for path, x in holder.tensors():
                row = _scan(x)
                was_bad = holder.bad.get(path, (0, 0))[0] or self._was_bad(place)
                if row and _count(row) and not was_bad:
                    yield _Candidate(
                        holder, path, BY_NO_OPTIMIZER, row, _C.describe(x) or ("float32", ())
                    )

    def _was_bad(self, place: SinglePlace) -> bool:
        if place in self._blamed or place.node.row < 0:
            return place in self._blamed
        past = self._table.history.of(place.node.row)
        bad = past["nan"] + past["posinf"]
        return bool(len(bad) and bad[-1])

    def _has_bad_parameter(self, owners: set[ModulePlace]) -> bool:
        """Whether a parameter of modules explains what they made."""
        rows = (_scan(p) for p, place in self._registry.live_parameters() if place.parent in owners)
        return any(row is not None and _count(row) for row in rows)


def _of_argument(x: Any, path: str, owner: ModulePlace) -> _Held | None:
    """None of an object to which no weak reference can be made."""
    try:
        return _Held(weakref.ref(x), path, False, owner, is_argument=True)
    except TypeError:
        return None


_NOTHING = np.zeros(1, ROW).tobytes()  # a scan of a tensor that is gone


def _scan(x: torch.Tensor) -> bytes | None:
    """A scan of a tensor on the CPU; None of any other."""
    row = _C.scan_once(x, False) if x.device.type == "cpu" else None
    return row if isinstance(row, bytes) else None


def _count(row: bytes) -> int:
    """How many values are NaN or +Inf; -Inf may be a mask."""
    values = np.frombuffer(row, ROW)[0]
    return int(values["nan"] + values["posinf"])


def _badness(x: torch.Tensor, row: bytes) -> tuple[int, int]:
    count = _count(row)
    return count, _C.bad_parts(x)[0] if count else 0
