"""The monitor: steps, snapshots, and what is done about findings."""

from __future__ import annotations

import atexit
import contextlib
import gc
import logging
import os
import sys
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, cast

import numpy.typing as npt
import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from nanscan._collect.hooks import Hooks
from nanscan._collect.names import Registry, Wants
from nanscan._collect.schedule import Schedule
from nanscan._collect.skip_step import Skipper
from nanscan._collect.snapshot import OptimizerFacts, Outcome, Scans, Snapshot, Sweep
from nanscan._collect.table import Table
from nanscan._data.errors import NonFiniteError, NonFiniteWarning
from nanscan._data.finding import FAULTS, Finding
from nanscan._data.frames import is_library
from nanscan._data.location import Location
from nanscan._data.places import ModulePlace, ParameterPlace, Place
from nanscan._data.site import DEFAULT_KINDS, Kind, Site
from nanscan._judge.causes import causes, unlikely
from nanscan._judge.facts import Facts
from nanscan._judge.judge import Judge, Judged
from nanscan._locate.follow_up import FollowUp
from nanscan._options import Filter, Ignore, ignores, wants
from nanscan._output.save import Call, Saver

Action = Literal["warn", "raise", "log"] | Callable[[Finding], object]

_MAX_FINDINGS = 10_000
_MAX_EXPLAINED = 8  # parameters of one step whose moments are scanned

_logger = logging.getLogger("nanscan")
_active: list[Monitor] = []


class Monitor:
    """Watches one model, or every module of the process, until closed.

    Made by `enable` and `watch`. A step ends at `optimizer.step()` while an optimizer is stepping,
    at the end of the outermost forward while none is, and only at `Monitor.step()` once that was
    called. Where a backward ran though no optimizer holds the parameters, other code updates them:
    a step then ends before the next outermost forward. An outermost forward without gradients in a
    training run (validation) is judged when it ends and counts to the step it runs in.
    """

    def __init__(  # noqa: PLR0913 - the options of `enable`
        self,
        model: nn.Module | None,
        *,
        kinds: frozenset[str],
        action: Action,
        history: int,
        near_limit: float,
        max_skips: int,
        schedule: Schedule,
        wants: Wants,
        ignores: Callable[[Site, torch.dtype], bool],
        skip_step: bool,
        save: Path | None,
        locate: bool,
    ) -> None:
        self._action = action
        self._lock = threading.RLock()
        self._table = Table(history, near_limit)
        self._registry = Registry(model, wants)
        self._judge = Judge(self._table, near_limit, _rank(), max_skips=max_skips, ignores=ignores)
        self._hooks = Hooks(
            self._registry,
            self._table,
            kinds,
            on_sweep=self._parameters_swept,
            on_spoiled=self._parameters_spoiled,
            on_start=self._call_starts if not locate else self._forward_starts,
            on_forward=self._forward_ended,
            on_backward=self._backward_seen,
            on_step=self._optimizer_stepped,
            on_call=None if save is None else self._call_begins,
            on_gradients=self._gradients_scanned,
            skipper=Skipper(ignores) if skip_step else None,
        )
        self._saver = None if save is None else Saver(save, self._registry)
        self._follow_up = FollowUp(self._registry, self._located) if locate else None
        self._holds = False  # acts on nothing for now
        self._held: list[Finding] = []  # to act on when the step ends
        self._schedule = schedule
        self._step_began = time.perf_counter()
        self._hooks.set_turn(schedule.turn(0))
        if schedule.max_overhead is not None:
            self._hooks.measure()
        self._findings: deque[Finding] = deque(maxlen=_MAX_FINDINGS)
        self._found = self._polled = 0  # findings ever made, and those that poll() returned
        self._step = 0
        # By id(optimizer): steps in a row that were skipped, and the scale in the first of them.
        self._skips: dict[int, tuple[int, float]] = {}
        self._pending: deque[Snapshot | Sweep] = deque()  # oldest first; they arrive in order
        self._judged_ticket = 0
        # Outermost modules whose forward with gradients ended since the last step did.
        self._ended: set[ModulePlace] = set()
        self._manual = False
        self._waits_for_optimizer: bool | None = None  # None: not known yet
        # No optimizer steps what a backward was seen to make gradients of: other code does, between
        # the end of a backward and the next forward, and so the step lasts until that.
        self._by_hand = False
        self._is_update_due = False
        self._forward_ended_step = -1  # by number
        self._continues = False  # this step's forward was judged as a step by itself
        self._announced = False
        self._model = None if model is None else weakref.ref(model)
        self._hooks.attach()
        _active.append(self)

    # -- what a user asks ------------------------------------------------------------------------

    @property
    def findings(self) -> list[Finding]:
        """All findings so far, oldest first; the last 10,000 are kept."""
        return list(self._findings)

    @property
    def healthy(self) -> bool:
        """Whether nothing was bad in the last judged step, and no parameter is. Never blocks."""
        return not self._judge.in_episode

    def watches(self, model: nn.Module | None) -> bool:
        """Whether this is the monitor of that model; None: of every module of the process."""
        return (
            self._model is None if model is None else bool(self._model and self._model() is model)
        )

    def history(self, site: Site) -> dict[str, npt.NDArray[Any]]:
        """What a site held in the last steps.

        Args:
            site: such as a finding's.

        Returns:
            Arrays of one length, oldest step first: step, calls, nan, posinf, neginf, min, max,
            absmax (NaN where no value was finite).

        Raises:
            KeyError: nothing was ever scanned there.
        """
        for node in self._table.nodes:
            if node.site == site:
                return self._table.history(node.row)
        raise KeyError(f"nanscan: nothing was scanned at {site}")

    def coverage(self) -> dict[str, Any]:
        """What is watched, and what is not and why.

        Returns:
            "sites": names of all rows; "skipped": reason by site, for tensors that were seen and
            could not be scanned; "not_called": modules that never ran through their own call;
            "left_out": modules that a filter leaves out; "thinned": what is scanned in some steps
            only; "overhead": share of a step's time that hooks took of late, where there is a
            budget; "bytes": of the table and its history.
        """
        skipped: dict[str, str] = {}
        idle: list[str] = []
        left_out: list[str] = []
        for place in self._registry.all_places():
            if not place.watched:
                left_out.append(place.name)
                continue
            if isinstance(place, ModulePlace) and not place.called:
                idle.append(place.name)
            skipped |= {str(node.site): node.skipped for node in place.nodes() if node.skipped}
        return {
            "sites": [str(node.site) for node in self._table.nodes],
            "skipped": skipped,
            "not_called": idle,
            "left_out": left_out,
            "thinned": self._schedule.describe(),
            "overhead": self._schedule.overhead(),
            "bytes": self._table.nbytes,
        }

    def step(self) -> None:
        """Ends a step here. From the first call on, nothing else does.

        Synchronization: none.
        """
        self._manual = True
        if self._is_update_due:
            self._is_update_due = False
            self._hooks.scan_parameters()
        self._end_step(None)

    def poll(self) -> list[Finding]:
        """Findings that are new since the last call, oldest first. Never blocks.

        Rows of CPU tensors are judged when their step ends; those of CUDA tensors once they arrived
        on the host: here, or when a later step ends.

        Raises:
            NonFiniteError: under the action "raise", when something bad has just arrived.
        """
        self._judge_arrived()
        new = self._found - self._polled
        self._polled = self._found
        return self._latest(new)

    def _latest(self, count: int) -> list[Finding]:
        return list(self._findings)[max(len(self._findings) - count, 0) :]

    def flush(self) -> list[Finding]:
        """Judges everything scanned so far, the unfinished step included, and acts on it.

        Returns:
            What is new.

        Raises:
            NonFiniteError: under the action "raise".

        Synchronization: waits for the scans.
        """
        with self._lock:
            before = self._found
            self._call_starts()  # as far as a training by hand is concerned
            self._look()
            self._judge_arrived(wait=True)
            return self._latest(self._found - before)

    def probe(self, name: str, x: Any) -> None:
        """What `probe` does, for this monitor alone."""
        self._hooks.watch(x, name, Kind.PROBE)

    def scan_fully(self, steps: int = 3) -> None:
        """Scans everything in this step, as far as it is still to come, and the next ones."""
        self._schedule.scan_fully(self._step, steps)
        self._hooks.set_turn(self._schedule.turn(self._step))

    def pause(self) -> None:
        """Removes all hooks; `resume` puts them back."""
        self._hooks.detach()
        self._stop_search()

    def resume(self) -> None:
        """Undoes `pause`."""
        if self in _active:
            self._hooks.attach()
            self._step_began = time.perf_counter()  # a pause is no part of a step

    def close(self) -> None:
        """Removes all hooks for good. What was found stays readable."""
        self._hooks.detach()
        self._stop_search()
        if self in _active:
            _active.remove(self)

    def _stop_search(self) -> None:
        if self._follow_up is not None:
            self._follow_up.stop()

    def last_words(self) -> None:
        """Judges what is left and never raises on its account: a crash is often the NaN's doing."""
        if self._action == "raise":
            self._action = "warn"
        try:
            self.flush()
        except RuntimeError:  # of the CUDA driver; what failed there is known already
            _logger.exception("nanscan: the last step could not be read")

    def after_fork(self) -> None:
        """In a child, which has no CUDA devices: rows there are its parent's alone."""
        self._pending.clear()
        self._table.core.abandon_devices()

    # -- steps -----------------------------------------------------------------------------------

    def _parameters_swept(self, scans: Scans) -> None:
        with self._lock:
            if self._may_be_bad():
                self._look()  # what other models did before comes first
            self._pending.append(Sweep(self._step, scans, self._calls()))
            self._judge_arrived()

    def _parameters_spoiled(self, scans: Scans, how: str) -> None:
        with self._lock:  # what these made bad is judged after them
            self._pending.append(Sweep(self._step, scans, self._calls(), how))

    def _optimizer_stepped(self, optimizer: Optimizer, outcome: Outcome) -> None:
        self._waits_for_optimizer = True
        self._by_hand = self._is_update_due = False
        if self._saver is not None and outcome.skipped is not True:
            self._saver.steps += 1
        if not self._manual:
            self._end_step(optimizer, outcome)

    def _call_begins(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._saver is not None:
            self._call_starts(before_forward=True)
            with self._lock:
                if self._saver.knows(module) and self._may_be_bad():
                    self._look_ahead()
                self._saver.begin(module, args, kwargs)

    def _gradients_scanned(self) -> None:
        if self._saver is not None and self._table.last_ticket != self._judged_ticket:
            self._look_ahead()

    def _look_ahead(self) -> None:
        """Judges, and saves while inputs and parameters still are what they were in the step.

        Whoever is to be told is told when the step ends, as if this had not been.
        """
        with self._lock:
            self._holds = True
            try:
                self._look()
            finally:
                self._holds = False

    def _calls(self) -> tuple[Call, ...]:
        return () if self._saver is None else self._saver.calls

    def _forward_ended(self, place: ModulePlace) -> None:
        if self._table.on_device:
            self._table.core.note_captures()  # a graph that holds no more than this forward
        if self._manual or torch._C._current_autograd_node() is not None:  # noqa: SLF001
            return  # the latter: a checkpointed forward runs again inside backward
        waits = self._by_hand or (torch.is_grad_enabled() and self._expects_optimizer())
        if not (waits or self._waits_for_optimizer):
            self._forward_ended_step = self._step + 1 if torch.is_grad_enabled() else -1
            self._end_step(None)
        elif self._by_hand and torch.is_grad_enabled():
            if self._has_bad_rows():
                self._look()
            self._ended.add(place)
        elif torch.is_grad_enabled():
            # Its last call led to no optimizer step: accumulation, or a GradScaler skipped it.
            if place in self._ended and (self._held or self._may_be_bad()):
                self._look()
            self._ended.add(place)
        else:  # validation, which starts afresh, or a teacher amid a step, which must not split it
            self._look(reset=not self._ended)

    def _expects_optimizer(self) -> bool:
        if self._waits_for_optimizer is None:
            self._waits_for_optimizer = _any_optimizer(self._registry)
        return self._waits_for_optimizer

    def _backward_seen(self, ended: bool) -> None:
        """A backward of our models begins or has ended. Is there an optimizer to wait for?"""
        if self._expects_optimizer():
            return
        if not (self._by_hand or ended) and self._registry.is_trainable:
            self._by_hand = True
            if self._step == self._forward_ended_step and not self._table.visits:
                self._step -= 1  # its forward was taken for the whole
                self._continues = True
        if self._by_hand and ended:
            self._is_update_due = True
            self._hooks.scan_gradients()
            if self._has_bad_rows():
                self._look()

    def _call_starts(self, *, before_forward: bool = False) -> None:
        """Before a forward, or when all is asked for: other code has made its update by now."""
        if self._is_update_due:
            self._is_update_due = False
            self._hooks.scan_parameters()
            if not self._manual:
                self._end_step(None, before_forward=before_forward)

    def _forward_starts(self) -> None:
        self._call_starts(before_forward=True)
        if self._follow_up is not None:
            self._follow_up.on_before_forward(self._step)

    def _may_be_bad(self) -> bool:
        """Whether a row went bad since the last judgement, as far as the host can know."""
        return self._table.on_device or self._has_bad_rows()

    def _has_bad_rows(self) -> bool:
        """Whether a row on the host did."""
        return self._table.last_ticket != self._judged_ticket

    def _end_step(
        self,
        optimizer: Optimizer | None,
        outcome: Outcome | None = None,
        *,
        before_forward: bool = False,
    ) -> None:
        with self._lock:
            if self._table.has_news:
                snapshot = self._table.take(self._step, keep=True)
                if snapshot is None:  # a CUDA graph is being recorded: its replays are the steps
                    return
                snapshot.outcome = outcome
                snapshot.continues = self._continues
                snapshot.turn = self._hooks.turn
                snapshot.calls = self._calls()
                if optimizer is not None and snapshot.arrival is not None:
                    snapshot.facts = self._hooks.facts_of_suspects(optimizer)
                self._pending.append(snapshot)
            self._step += 1
            self._continues = False
            if self._saver is not None:
                self._saver.forget()
            self._next_turn()
            self._ended.clear()
            self._judge_arrived(optimizer)
            if self._follow_up is not None:
                self._follow_up.on_step_end(self._step, before_forward=before_forward)

    def _next_turn(self) -> None:
        now = time.perf_counter()
        self._schedule.note(self._hooks.turn, self._hooks.take_cost(), now - self._step_began)
        self._step_began = now
        self._hooks.set_turn(self._schedule.turn(self._step))

    def _look(self, *, reset: bool = False) -> None:
        """Judges a step so far and, unless `reset`, lets it go on in one piece."""
        with self._lock:
            if self._table.has_news:
                snapshot = self._table.take(self._step, keep=False, reset=reset)
                if snapshot is not None:
                    snapshot.turn = self._hooks.turn
                    snapshot.calls = self._calls()
                    snapshot.continues = self._continues
                    self._pending.append(snapshot)
            if reset and self._saver is not None:
                self._saver.forget()
            self._judge_arrived()

    def _judge_arrived(self, optimizer: Optimizer | None = None, *, wait: bool = False) -> None:
        """Judges, diagnoses, keeps and acts on what arrived on the host.

        Args:
            optimizer: whose step has just ended.
            wait: for all that is on its way.
        """
        with self._lock:
            while self._pending and (wait or self._pending[0].ready()):
                snapshot = self._table.complete(self._pending.popleft())
                self._count_skips(snapshot)
                if snapshot.whole and snapshot.turn.is_full:
                    self._table.full_order = snapshot.order.copy()
                # What an optimizer holds now explains the step that it has just made, no other.
                current = optimizer if snapshot.whole and not self._pending else None
                self._conclude(self._judge.judge(snapshot), snapshot, current)

    def _count_skips(self, snapshot: Snapshot) -> None:
        """Synchronization: none; what a device knows of an arrived step has long been computed."""
        outcome = snapshot.outcome
        if outcome is None:
            return
        if not bool(outcome.skipped):
            self._skips.pop(outcome.optimizer, None)
            return
        snapshot.scale = float(outcome.scale)
        count, first = self._skips.get(outcome.optimizer, (0, snapshot.scale))
        snapshot.skips, snapshot.first_scale = count + 1, first
        self._skips[outcome.optimizer] = snapshot.skips, first

    def _conclude(
        self,
        judged: list[Judged],
        snapshot: Snapshot,
        optimizer: Optimizer | None,
    ) -> None:
        moments = snapshot.facts
        self._judged_ticket = self._table.last_ticket
        for item in judged[:_MAX_EXPLAINED]:
            place = item.node.place
            if item.node.kind in ("param", "state") and isinstance(place, ParameterPlace):
                if optimizer is not None and place not in moments:
                    moments |= self._hooks.facts(optimizer, place)
                if item.node.kind == "param":
                    self._add_given(item, moments.get(place))
        facts = Facts(snapshot, self._table, self._registry, self._hooks.optimizers)
        # What other code did to a parameter is explained by no numbers of ours.
        for item in () if snapshot.spoiled else judged:
            item.finding.causes = tuple(causes(item, facts))
            item.finding.unlikely = tuple(unlikely(item, facts))
        new = [item.finding for item in judged]
        faults = [finding for finding in new if finding.verdict in FAULTS]
        if faults:
            self.scan_fully()
            if self._follow_up is not None:
                self._follow_up.want(faults[0])
        self._findings.extend(new)
        self._found += len(new)
        self._act(new, snapshot.calls)

    def _add_given(self, judged: Judged, facts: OptimizerFacts | None) -> None:
        for name, moment in facts.moments.items() if facts is not None else ():
            place = cast("ParameterPlace", judged.node.place)
            judged.finding.given += ((place.moment(name).site, moment),)

    # -- actions ---------------------------------------------------------------------------------

    def _act(self, new: list[Finding], calls: tuple[Call, ...]) -> None:
        """Acts on the first fault of an episode, and on what is no fault, each time."""
        faults = [finding for finding in new if finding.verdict in FAULTS]
        first = faults[0] if faults and not self._announced else None
        self._announced = self._judge.in_episode  # before acting: an action may raise
        if first is not None and self._saver is not None:
            self._saver.save(first, self._place_of(first.site), calls)
        for finding in self._held:  # the first fault of this step, if that was judged ahead
            if finding.verdict in FAULTS:
                finding.affected += tuple(fault.site for fault in faults)
        self._held += [f for f in new if f.verdict not in FAULTS or f is first]
        while self._held and not self._holds:
            self._act_on(self._held.pop(0))

    def _located(self, finding: Finding, location: Location) -> None:
        """A later step showed the op. Or that nothing can be seen there any more."""
        finding.location = location
        if location.verdict == "propagated":
            saved = self._saver.latest if self._saver is not None else None
            path = saved or f"bad/step-{finding.step}-rank-{finding.rank}"
            finding.replay = (
                f"what went bad in step {finding.step} had spoiled this step before it began; "
                + ("" if saved else 'with enable(..., save="bad/") in the next run: ')
                + f"nanscan.replay({str(path)!r}, model, step_fn)"
            )
        text = f"nanscan: why {finding.site} went bad in step {finding.step}: {location}"
        if finding.replay:
            text += f"\n  replay    {finding.replay}"
        self._tell(finding, text)

    def _place_of(self, site: Site) -> Place | None:
        return next((node.place for node in self._table.nodes if node.site == site), None)

    def _act_on(self, finding: Finding) -> None:
        text = f"nanscan: {finding}"
        is_fault = finding.verdict in FAULTS
        if is_fault and self._action == "raise":
            raise NonFiniteError(text, finding=finding)
        if is_fault or callable(self._action):
            self._tell(finding, text)
        elif finding.verdict == "near-limit":
            _logger.warning(text)
        else:
            _logger.info(text)

    def _tell(self, finding: Finding, text: str) -> None:
        """Of a fault, or of anything to a callable. Never raises by itself."""
        if callable(self._action):
            self._action(finding)
        elif self._action == "log":
            _logger.error(text)
        else:
            warnings.warn(text, NonFiniteWarning, stacklevel=_user_stacklevel())


def _user_stacklevel() -> int:
    """The stacklevel, for a warning of the caller, of the innermost frame of user code."""
    frame, level = sys._getframe(1), 1  # noqa: SLF001
    while frame.f_back is not None and is_library(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    return level


def _any_optimizer(registry: Registry) -> bool:
    """Whether an optimizer holds a watched parameter, asked once: is a forward a whole step?"""
    optimizers = (thing for thing in gc.get_objects() if issubclass(type(thing), Optimizer))
    return any(
        registry.parameter(parameter, "") is not None
        for optimizer in optimizers
        for group in getattr(optimizer, "param_groups", ())  # it may be in the making elsewhere
        for parameter in group["params"]
    )


def _rank() -> int:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return int(torch.distributed.get_rank())
    rank = os.environ.get("RANK", "0")
    return int(rank) if rank.isdecimal() else 0


def _check_target(model: object, kinds: frozenset[str], action: object) -> None:
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(f"nanscan: expected a torch.nn.Module or None, got {type(model).__name__}")
    for kind in kinds:
        Kind(kind)
    if not callable(action) and action not in ("warn", "raise", "log"):
        raise ValueError(
            f"nanscan: action must be 'warn', 'raise', 'log' or a callable, got {action!r}"
        )


def _check_actions(kinds: frozenset[str], skip_step: object, save: object) -> None:
    if not isinstance(skip_step, bool):
        raise TypeError(f"nanscan: skip_step must be True or False, got {skip_step!r}")
    if skip_step and "grad" not in kinds:
        raise ValueError('nanscan: skip_step needs gradients: add "grad" to kinds')
    if save is not None and not isinstance(save, (str, os.PathLike)):
        raise TypeError(f"nanscan: save must be the path of a folder or None, got {save!r}")


def _check_count(name: str, value: object, least: int, what: str) -> None:
    if not isinstance(value, int) or value < least:
        raise ValueError(f"nanscan: {name} must be {what}, got {value!r}")


def enable(  # noqa: PLR0913 - options by name
    model: nn.Module | None = None,
    *,
    kinds: Iterable[Kind] = DEFAULT_KINDS,
    action: Action = "warn",
    history: int = 16,
    near_limit: float = 0.5,
    max_skips: int = 20,
    ignore: Ignore = (),
    include: Filter | None = None,
    exclude: Filter = (),
    every: int = 1,
    warmup: int = 0,
    max_overhead: float | None = None,
    skip_step: bool = False,
    save: str | os.PathLike[str] | None = None,
    locate: Literal["next"] | None = None,
) -> Monitor:
    """Turns the hooks on, for one model or for every module of the process.

    Args:
        model: the model to watch; None: every module that is called from now on. Enabling the same
            target again replaces its monitor.
        kinds: what to scan: module "input" (only tensors that no watched module returned) and
            "output", the "loss" that a backward starts from, each `probe`, parameter "grad" before
            an optimizer step, "param" and "buffer" (where it changed) after it; and, not by
            default, "grad_output", the gradient that reaches each output, and "state", the
            optimizer's moments. On the CPU a parameter that other code made bad between two steps
            is named as well; on other devices what the next forward makes of it is the origin.
            Where no optimizer holds the parameters, gradients are scanned after each backward, and
            parameters before the next forward: but not what `torch.autograd.grad` returns, which
            nobody sees but the caller.
        action: what to do on the first bad step of an episode: "warn", "raise" a NonFiniteError
            from the call that ends the step, "log" to the logger "nanscan", or a callable that
            gets the Finding. Values near the limit never raise: they are logged, or given to the
            callable.
        history: steps kept of each site.
        near_limit: share of a dtype's largest value from which a finite value is reported.
        max_skips: optimizer steps in a row that a GradScaler may skip: that many are a fault. From
            its first scale of 65536 down to 1 it takes 16.
        ignore: what never to report: patterns of qualified names ("*.attn.softmax", "encoder.*"),
            dtypes, kinds as "kind:grad", or a function of (Site, dtype) that returns True.
        include: watch only modules of these types or names, and what lies inside the named ones:
            patterns of qualified names ("decoder.layers.*"). None: all.
        exclude: the same of modules, and of parameters and buffers by name, not to watch.
        every: scan one step in so many.
        warmup: scan nothing in so many first steps.
        max_overhead: share of a step's time, such as 0.02, that hooks may take on the host, and
            scans on the device.
            Parameters, buffers and moments are then scanned in some steps only, and if that is not
            enough, module outputs and their gradients by turns; the loss, gradients of parameters,
            and outputs of the outermost modules and of those right inside them in every step. After
            a fault the next steps are scanned in full. `coverage` tells what is thinned out.
        skip_step: an optimizer does not take a step in which a gradient that it is about to use is
            non-finite: parameters and state stay bit for bit as if `step()` had not been called,
            and gradients as they are. All else goes on: the closure's loss is returned, a scheduler
            steps, the finding is acted on. Gradients are then scanned in every step. For any
            optimizer that finds its parameters in `param_groups`; where a closure makes the
            gradients, it is called once, or this is LBFGS, which needs memory for a copy of the
            parameters then; not for a step that torch.compile compiled. Each process decides by its
            own gradients: not for sharded ones, where others would take the step. What `ignore`
            matches is no reason to skip.
        save: a folder. The first bad step of an episode, and of a run the first three of these, is
            written to "step-<n>-rank-<r>" in it, for `load_saved`: inputs of the outermost module's
            last call, states of random number generators before that, parameters and buffers up
            to 1 GiB. Until a step is judged, the inputs of its calls are kept alive; no tensor is
            copied until it is bad, but the states are, in 0.1 ms a call. What was changed in place
            since the call, and what torch.load does not take with weights_only=True, is left out
            with a note. If the folder cannot be written, that is logged, once, and nothing else
            happens.
        locate: "next": after a fault the next steps run op by op, as `nanscan.locate` does it,
            until the op is known that makes the bad values, at most 16; then the monitor is as
            cheap as before. After 64 such steps, only one step in 50 is spent so. The finding gets
            its `location` and is acted on once more, though never by raising. Where the fault left
            nothing to be seen (its optimizer's step spoiled the parameters), the finding says so,
            and how to replay it. Not in steps that begin within a TorchDispatchMode of the user's.

    Returns:
        The monitor; `close` it or call `disable`.

    Raises:
        TypeError: `model` is no module.
        ValueError: an unknown kind or action, or a number out of range.

    Synchronization: none, in hooks either, with these exceptions. Under `skip_step`, gradients on
        the CPU need none, and on CUDA devices a fused Adam, AdamW, Adagrad or SGD none from the
        second step on: it gets `found_inf`, computed on the device. All others wait once a step
        for their gradients. Writing a step under `save` waits for what it writes, and a step that
        is searched under `locate` for its scans, when it ends.
    """
    wanted = frozenset((kinds,) if isinstance(kinds, str) else kinds)
    _check_target(model, wanted, action)
    _check_actions(wanted, skip_step, save)
    if locate not in (None, "next"):
        raise ValueError(f'nanscan: locate must be "next" or None, got {locate!r}')
    _check_count("history", history, 1, "a positive number of steps")
    _check_count("max_skips", max_skips, 2, "at least 2")
    _check_count("every", every, 1, "a positive number of steps")
    _check_count("warmup", warmup, 0, "a number of steps")
    if not 0 < near_limit <= 1:
        raise ValueError(f"nanscan: near_limit must be in (0, 1], got {near_limit!r}")
    if max_overhead is not None and not 0 < max_overhead < 1:
        raise ValueError(f"nanscan: max_overhead must be in (0, 1), got {max_overhead!r}")
    for monitor in tuple(_active):
        if monitor.watches(model):
            monitor.close()
    return Monitor(
        model,
        kinds=wanted,
        action=action,
        history=history,
        near_limit=near_limit,
        max_skips=max_skips,
        schedule=Schedule(every, warmup, max_overhead),
        wants=wants(include, exclude),
        ignores=ignores(ignore),
        skip_step=skip_step,
        save=None if save is None else Path(save),
        locate=locate is not None,
    )


def probe(name: str, x: Any) -> Any:
    """A named place inside a forward: scans `x`, a tensor or a container of some, and returns it.

    Args:
        name: what findings call it; the same name is the same place.
        x: what to scan.

    Returns:
        `x` itself. While no monitor is open this does nothing.

    Synchronization: none.
    """
    if not torch.compiler.is_dynamo_compiling():
        for monitor in tuple(_active):
            monitor.probe(name, x)
    return x


def disable() -> None:
    """Closes every monitor of the process. No hook of nanscan is left anywhere."""
    for monitor in tuple(_active):
        monitor.close()


@contextlib.contextmanager
def watch(model: nn.Module | None = None, **options: Any) -> Iterator[Monitor]:
    """Watches a model inside a `with` block; takes the options of `enable`.

    On the way out what is left is judged; when the block raised, its error goes on and findings are
    warned of instead of raised.
    """
    monitor = enable(model, **options)
    try:
        yield monitor
    except BaseException:
        monitor.last_words()
        raise
    else:
        monitor.flush()
    finally:
        monitor.close()


def _after_fork() -> None:
    for monitor in _active:
        monitor.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


@atexit.register
def _at_exit() -> None:
    for monitor in tuple(_active):
        monitor.last_words()
        monitor.close()
