"""Monitor: wires the stages. Events → records (_collect) → findings (_judge) → sinks (_output)."""

from __future__ import annotations

import dataclasses
import difflib
import logging
import os
import weakref
from collections import deque
from typing import Any

import numpy.typing as npt
import torch
from torch import nn

from nanscan._collect.collector import Collector
from nanscan._collect.coverage import Coverage, coverage_of
from nanscan._collect.inputs import KeptInputs
from nanscan._collect.names import Registry
from nanscan._collect.schedule import Schedule
from nanscan._collect.skip_step import SkipStep
from nanscan._collect.snapshot import Snapshot, StepRecord
from nanscan._collect.table import Table
from nanscan._data.finding import Finding, Located
from nanscan._data.location import Location
from nanscan._data.site import Kind, Site
from nanscan._judge.judge import Judge
from nanscan._locate.follow_up import FollowUp
from nanscan._options import Options, ignores, wants
from nanscan._output.save import Saver
from nanscan._output.sinks import sinks_of, without_raising

_MAX_FINDINGS = 10_000
_NEAREST = 3  # names to suggest

_logger = logging.getLogger("nanscan")
open_monitors: list[Monitor] = []


class Monitor:
    """Watches one model, or every module of the process. Made by `enable` and `watch`.

    When a step ends: at `optimizer.step()`, if an optimizer holds the parameters. Optimizers
    that step in turn, as in a GAN, make one step: a part of it is judged when one has stepped, and
    the next step begins when one of them steps again. If none holds the parameters, a step ends at
    the end of the outermost forward. If there was a backward but no optimizer holds the parameters,
    other code updates them: the step then ends before the next outermost forward. After the first
    call of `Monitor.step()`, only that call ends a step.

    In a training run, an outermost forward without gradients (validation) does not end a step. It
    is judged when it returns, and belongs to the current step.
    """

    def __init__(self, model: nn.Module | None, options: Options) -> None:
        ignored = ignores(options.ignore)
        self._schedule = Schedule(options.every_n_steps, options.warmup_steps, options.max_overhead)
        self._table = Table(options.history, options.near_limit)
        self._registry = Registry(model, wants(options.include, options.exclude))
        self._inputs = None if options.folder is None else KeptInputs(self._registry)
        self._collector = Collector(
            self._registry,
            self._table,
            options.all_kinds,
            schedule=self._schedule,
            skip_step=SkipStep(ignored) if options.skip_step else None,
            inputs=self._inputs,
            consumer=self,
        )
        self._judge = Judge(
            options.near_limit, _rank(), max_skips=options.max_skipped_steps, ignores=ignored
        )
        self._follow_up = FollowUp(self._registry, self._on_location) if options.locate else None
        self._saver = None if options.folder is None else Saver(options.folder)
        self._sinks = sinks_of(options.action)
        self._findings: deque[Finding] = deque(maxlen=_MAX_FINDINGS)
        self._located: deque[Located] = deque(maxlen=_MAX_FINDINGS)
        self._found = self._polled = 0  # findings ever made, and those that poll() returned
        self._told = -1  # the step that sinks were told of last
        self._ahead: list[Finding] = []  # made amid a step, whose end they wait for
        self._to_report: deque[Finding] = deque()  # to sinks
        self._model = None if model is None else weakref.ref(model)
        self._collector.open()
        open_monitors.append(self)

    # -- what a user asks ------------------------------------------------------------------------

    @property
    def findings(self) -> list[Finding]:
        """All findings so far, oldest first; the last 10,000 are kept. Never blocks.

        Those of the step at hand are among them, as far as their scans have arrived on the host.
        """
        self._look()
        return [*self._findings, *self._ahead]

    @property
    def located(self) -> list[Located]:
        """The ops behind findings that `enable(locate=True)` found, oldest first."""
        return list(self._located)

    @property
    def steps(self) -> int:
        """How many steps have ended: the number of the current one."""
        tracker = self._collector.tracker
        return tracker.step + tracker.is_reopened  # a probe belongs to the step that has ended

    @property
    def healthy(self) -> bool | None:
        """Whether all that a checkpoint would hold was finite when it was last scanned.

        That is parameters, buffers and, where they are scanned, moments of optimizers. A bad batch
        that left no trace in them changes nothing. None while nothing was scanned. Never blocks.
        """
        self._look()
        return self._judge.is_healthy if self._table.nodes else None

    def _look(self) -> None:
        """Judges what the step at hand has scanned so far, if something in it is bad."""
        self._collector.records.look_at_bad(self._collector.turn)

    def history(self, site: Site | str) -> dict[str, npt.NDArray[Any]]:
        """Returns the statistics of one site in the last steps.

        Args:
            site: a Site, such as a finding's, or the text that reports print: "encoder.0 output".
                Where weights are tied, each of their names will do; and so does a name that a
                report had before the whole model was known.

        Returns:
            Arrays of one length, oldest step first: step, calls, nan, posinf, neginf, min, max,
            absmax (NaN where no value was finite).

        Raises:
            KeyError: nothing was scanned at this site; the message suggests similar names.
        """
        name = str(site)
        nodes = [*reversed(self._table.nodes)]
        # The names of today win, then those of before, and other names of tied weights.
        names = {str(site): node.row for node in nodes for site in node.other_sites}
        names |= {str(node.site): node.row for node in nodes}
        if name not in names:
            nearest = difflib.get_close_matches(name, names, _NEAREST, cutoff=0.4)
            hint = f"; did you mean {' or '.join(map(repr, nearest))}?" if nearest else ""
            raise KeyError(f"nanscan: nothing was scanned at {name!r}{hint}")
        return dict(self._table.history.of(names[name]))

    def coverage(self) -> Coverage:
        """Returns what is watched, and what is not watched and why."""
        return coverage_of(self._registry, self._table, self._schedule)

    def step(self) -> None:
        """Ends the current step. After the first call, only this method ends steps.

        Synchronization: none.
        """
        self._collector.end_step()

    def poll(self) -> list[Finding]:
        """Returns the findings since the last `poll`, oldest first. Never blocks.

        Scans of CPU tensors are judged when their step ends. Scans of CUDA tensors are judged when
        their rows have arrived on the host: in this call, or when a later step ends.

        Raises:
            NonFiniteError: under the action "raise", when something bad has just arrived.
        """
        self._collector.records.deliver()
        new = self._found - self._polled
        self._polled = self._found
        return self._latest(new)

    def flush(self) -> list[Finding]:
        """Judges everything scanned so far, the unfinished step included, and acts on it.

        Returns:
            The findings that this call made, oldest first.

        Raises:
            NonFiniteError: under the action "raise".

        Synchronization: waits for the scans.
        """
        with self._collector.records.lock:
            before = self._found
            self._collector.flush()
            for sink in self._sinks:
                sink.flush()
            return self._latest(self._found - before)

    def _latest(self, count: int) -> list[Finding]:
        return list(self._findings)[max(len(self._findings) - count, 0) :]

    def probe(self, name: str, x: Any) -> None:
        """Scans `x` under a name, as `nanscan.probe` does, but for this monitor only."""
        self._collector.scan_single(x, name, Kind.PROBE)

    def scan_fully(self, steps: int = 3) -> None:
        """Scans everything in the rest of this step and in the next steps."""
        self._collector.scan_fully(steps)

    def pause(self) -> None:
        """Watches nothing until `resume`."""
        self._collector.pause()
        if self._follow_up is not None:
            self._follow_up.stop()

    def resume(self) -> None:
        """Watches on after `pause`. Does nothing on a closed monitor."""
        if self in open_monitors:
            self._collector.resume()

    def close(self) -> None:
        """Ends the watch for good. Findings and history stay readable."""
        self.pause()
        self._collector.close()
        if self in open_monitors:
            open_monitors.remove(self)
            for sink in self._sinks:
                sink.close()

    def __repr__(self) -> str:
        model = None if self._model is None else self._model()
        target = "all modules" if self._model is None else type(model).__name__
        state = "" if self in open_monitors else ", closed"
        overhead = self._schedule.overhead()
        cost = "" if overhead != overhead else f", overhead {overhead:.1%}"  # noqa: PLR0124 - NaN
        return (
            f"<nanscan.Monitor of {target}: step {self.steps}, "
            f"{len(self._table.nodes)} sites, {self._found} findings{cost}{state}>"
        )

    # -- for _api.py -----------------------------------------------------------------------------

    def _watches(self, model: nn.Module | None) -> bool:
        """Whether this is the monitor of that model; None: of every module of the process."""
        return (
            self._model is None if model is None else bool(self._model and self._model() is model)
        )

    def _judge_rest(self) -> None:
        """Judges the remaining steps. Raises nothing, so that an error of the user's code shows."""
        self._sinks = without_raising(self._sinks)
        try:
            self.flush()
        except RuntimeError:  # of the CUDA driver; what failed there is known already
            _logger.exception("nanscan: the last step could not be read")

    def _after_fork(self) -> None:
        self._collector.abandon_devices()

    # -- what the collector delivers -------------------------------------------------------------

    @property
    def has_news(self) -> bool:
        """Whether a record matters in which no row is notable."""
        return bool(self._ahead or self._to_report) or self._judge.is_waiting

    def on_training_start(self) -> bool:
        """The count begins anew, unless something was told: no two steps of findings are alike."""
        self._told = -1
        return not (self._found or self._ahead)

    def knows(self, rows: Snapshot) -> bool:
        """Whether all that is notable is known to mean nothing, as masks do."""
        return self._judge.knows(rows)

    def on_clean_step(self, step: int) -> None:
        """Nothing was notable, and nothing is remembered that could be over."""
        self._tell_step(step)

    def _tell_step(self, step: int) -> None:
        """Tells sinks of a step, once: other optimizers may step in it yet, or a probe follows."""
        if step < self.steps and step != self._told:
            self._told = step
            for sink in self._sinks:
                sink.on_step(step)

    def on_record(self, record: StepRecord) -> None:
        """Judges a record and, unless it is judged ahead, hands what is new to the sinks."""
        new = self._judge.judge(record)
        if self._judge.is_unsure:
            self.scan_fully(1)
        if any(finding.news == "new" for finding in new):
            self.scan_fully()
        self._save(new, record)
        self._add_affected(new)
        self._ahead += new
        if not record.is_ahead:
            self._release(record)

    def on_step_end(self, step: int) -> None:
        """A step ended: a search may begin or end."""
        if self._follow_up is not None:
            self._follow_up.on_step_end(step)

    def on_forward_start(self, step: int) -> None:
        """An outermost module is about to run: a search may begin."""
        if self._follow_up is not None:
            self._follow_up.on_before_forward(step)

    def _save(self, new: list[Finding], record: StepRecord) -> None:
        """Saves the first new fault of a step, while inputs still are what they were."""
        first = next((finding for finding in new if finding.news == "new"), None)
        if self._saver is None or self._inputs is None or first is None:
            return
        if any(finding.news == "new" for finding in self._ahead):
            return
        node = next((node for node in record.nodes if node.site == first.site), None)
        self._saver.save(first, None if node is None else node.place, record.calls)
        self._inputs.is_needed = not self._saver.is_done

    def _add_affected(self, new: list[Finding]) -> None:
        """Adds what went bad later in a step to the faults that were found ahead in it."""
        for position, finding in enumerate(self._ahead):
            if finding.news:
                later = [f.site for f in new if f.episode == finding.episode and not f.news]
                affected = (*finding.affected, *later)
                self._ahead[position] = dataclasses.replace(finding, affected=affected)

    def _release(self, record: StepRecord) -> None:
        """Keeps findings; reports faults that are news, and what is no fault."""
        new, self._ahead = self._ahead, []
        first = next((finding for finding in new if finding.news == "new"), None)
        if first is not None and self._follow_up is not None:
            self._follow_up.want(first)
        self._findings.extend(new)
        self._found += len(new)
        self._to_report += [finding for finding in new if finding.news or not finding.is_fault]
        while self._to_report:
            finding = self._to_report.popleft()
            for sink in self._sinks:
                sink.on_finding(finding)
        if record.is_whole:
            self._tell_step(record.step)

    def _on_location(self, finding: Finding, location: Location) -> None:
        """A later step showed the op. Or that nothing can be seen there any more."""
        replay = ""
        if location.verdict == "propagated":
            saved = self._saver.latest if self._saver is not None else None
            path = saved or f"bad/step-{finding.step}-rank-{finding.rank}"
            replay = (
                f"what went bad in step {finding.step} had spoiled this step before it began; "
                + ("" if saved else 'with enable(..., save_dir="bad/") in the next run: ')
                + f"nanscan.replay({str(path)!r}, model, step_fn)"
            )
        located = Located(finding, location, replay)
        self._located.append(located)
        for sink in self._sinks:
            sink.on_located(located)


def _rank() -> int:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return int(torch.distributed.get_rank())
    rank = os.environ.get("RANK", "0")
    return int(rank) if rank.isdecimal() else 0
