"""Collector: from events of the running model to one StepRecord a step. No judgement here."""

from __future__ import annotations

import functools
import time
from typing import Any

import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim.optimizer import Optimizer

from nanscan._collect import torch_events
from nanscan._collect.backward_order import BackwardOrder
from nanscan._collect.closures import Closure, closure_of, with_closure
from nanscan._collect.costs import CostMeter
from nanscan._collect.held_tensors import HeldTensors
from nanscan._collect.inputs import KeptInputs
from nanscan._collect.listener import Listener, StepArguments
from nanscan._collect.modules import ModuleCalls, is_recomputing, is_tracing, running_node
from nanscan._collect.names import Registry
from nanscan._collect.optimizers import (
    Optimizers,
    Plan,
    Stepping,
    outcome_of,
)
from nanscan._collect.parameter_changes import ParameterChanges
from nanscan._collect.parameters import ParameterScans
from nanscan._collect.records import Consumer, RecordQueue
from nanscan._collect.roots import parameters_of
from nanscan._collect.scanner import Scanner
from nanscan._collect.schedule import Schedule, Turn
from nanscan._collect.skip_step import Gradients, SkipStep, is_stand_in
from nanscan._collect.snapshot import Outcome, Sweep
from nanscan._collect.steps import Decision, StepTracker
from nanscan._collect.table import Table
from nanscan._collect.training import Training
from nanscan._data.places import ModulePlace
from nanscan._data.site import Kind


class Collector(Listener):
    """Observes one model, or every module of the process.

    Args:
        registry: names of modules and parameters.
        table: where scans go.
        kinds: what to scan.
        schedule: which step scans what.
        skip_step: keeps optimizers from steps on non-finite gradients; None: nothing does.
        inputs: keeps what goes into outermost modules; None: nothing does.
        consumer: gets the records.
    """

    def __init__(  # noqa: PLR0913 - its parts, in one place
        self,
        registry: Registry,
        table: Table,
        kinds: frozenset[Kind],
        *,
        schedule: Schedule,
        skip_step: SkipStep | None,
        inputs: KeptInputs | None,
        consumer: Consumer,
    ) -> None:
        self.tracker = StepTracker()
        self._registry = registry
        self._table = table
        self._kinds = kinds
        self._schedule = schedule
        self._skip_step = skip_step
        self._inputs = inputs
        self._consumer = consumer
        self._scanner = Scanner(table)
        self.calls = ModuleCalls(
            registry, self._scanner, kinds, self, with_arguments=inputs is not None
        )
        self._order = BackwardOrder(lambda parameter: registry.parameter(parameter, ""))
        self.optimizers = Optimizers(registry, table, self._order)
        self._parameters = ParameterScans(registry, self._scanner, self.optimizers, kinds)
        self._changes = ParameterChanges(registry, table, is_on=Kind.PARAM in kinds)
        self._held = HeldTensors(registry, table, is_on=Kind.BUFFER in kinds)
        self._meter = CostMeter(
            self.calls.core,
            table.core,
            is_timed=schedule.max_overhead is not None,
            with_gradients=Kind.GRAD_OUTPUT in kinds,
        )
        self.set_turn(schedule.turn(0))
        self._stepping = Stepping()
        self._ran = False  # an outermost module, since the last step
        self._are_gradients_scanned = False  # of the last backward, where no optimizer steps
        self._bad_gradients = -1  # resets of the table before a gradient last went bad
        self.records = RecordQueue(
            registry, table, self.optimizers, self.tracker, inputs=inputs, consumer=consumer
        )
        self._training = Training(registry, self.optimizers, self.tracker, self.records, consumer)

    # -- attaching -------------------------------------------------------------------------------

    def open(self) -> None:
        """Begins to observe."""
        self.calls.open()
        self.resume()

    def pause(self) -> None:
        """Takes no notice of anything until `resume`."""
        self.calls.set_attached(attached=False)
        torch_events.forget(self)
        self._order.pause()

    def resume(self) -> None:
        """Observes again."""
        torch_events.listen(self)
        self.calls.set_attached(attached=True)
        self._meter.lap()  # a pause is no part of a step
        self._held.forget()
        self._order.resume()

    def close(self) -> None:
        """Observes no more; it is paused by then."""
        self.calls.close()

    def scan_fully(self, steps: int) -> None:
        """Scans everything in this step, as far as it is still to come, and the next ones."""
        self._schedule.scan_fully(self.tracker.step, steps)
        self._next_turn()

    def _next_turn(self) -> None:
        self.set_turn(self._schedule.turn(self.tracker.step))

    def set_turn(self, turn: Turn) -> None:
        """What to scan from now on."""
        self.turn = turn
        self.calls.set_turn(turn)

    def abandon_devices(self) -> None:
        """In a child process, which has no CUDA devices: rows there are its parent's alone."""
        self.records.clear()
        self._table.core.abandon_devices()

    # -- module calls ----------------------------------------------------------------------------

    def on_first_call(self, place: ModulePlace) -> None:
        """What do the parameters of a model hold before it first runs?"""
        sweep = self._parameters.sweep(place)
        if sweep is not None:
            self.records.add_untrained(sweep, self.turn)

    def on_before_forward(self, place: ModulePlace, args: Any, kwargs: Any) -> None:
        """Ends the step if other code than an optimizer has updated the parameters by now."""
        self._training.before_forward()
        self._act(self.tracker.on_before_forward(place))
        self._held.before_forward(place, args, kwargs)
        self._consumer.on_forward_start(self.tracker.step)

    def on_outermost_call(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Keeps the inputs; first judges what the same module did with others in this step."""
        if self._inputs is not None:
            self._act(self.tracker.on_before_forward())
            with self.records.lock:
                if self.tracker.may_be_probed:  # the step that has ended; this is the next one
                    self._inputs.forget()
                if self._inputs.knows(module) and self.records.may_be_bad:
                    self.records.look_ahead(self.turn)
                self._inputs.begin(module, args, kwargs)

    def on_after_forward(self, place: ModulePlace) -> None:
        """Ends the step if no optimizer will."""
        self._look_for_changes()
        self._held.after_forward()
        with_gradients = torch.is_grad_enabled()
        self._ran |= with_gradients
        if self._table.on_device:
            self._table.core.note_captures()  # a graph that holds no more than this forward
        self._training.after_forward(with_gradients=with_gradients)
        self._act(
            self.tracker.on_after_forward(
                place, with_gradients=with_gradients, is_recomputing=is_recomputing()
            )
        )

    def scan_single(self, x: Any, name: str, kind: Kind) -> None:
        """Scans a value that no module returned: the loss, or a probe."""
        if is_tracing():
            return
        if kind is Kind.PROBE and self.calls.is_attached and self.tracker.on_probe():
            self._next_turn()  # it is that of the step before, again
        if self.is_scanning(kind):
            self._scanner.visit(x, self._registry.single(name, kind).node)

    def is_scanning(self, kind: Kind) -> bool:
        """Whether this step scans values of a kind."""
        return self.calls.is_attached and kind in self._kinds and self.turn.period > 0

    def _look_for_changes(self) -> None:
        """Has what modules hold gone bad since its last scan? Asked once something else has."""
        for how, scans in (*self._changes.look(), *self._held.look()):
            with self.records.lock:  # what these made bad is judged after them
                self.records.add_sweep(Sweep(scans, is_selective=False), spoiled=how)

    # -- backward --------------------------------------------------------------------------------

    def on_before_backward(self, tensors: Any) -> None:
        """Scans the loss, unless it can only be another model's, or a checkpoint's."""
        if self.calls.is_attached and Kind.GRAD in self._kinds:
            self._order.on_before_backward(tensors, self._table.visits, running_node())
        if self._is_of_ours:
            self._training.before_backward(has_scans=self._table.visits > 0)
            self.scan_single(tensors, "loss", Kind.LOSS)
            self._look_for_changes()

    def on_after_backward(self) -> None:
        """Not called by `torch.autograd.grad`, nor by what torch.compile traced."""
        if not is_recomputing():
            self._order.on_after_backward()
        if not self._is_of_ours:
            return
        self._training.after_backward()
        if self.tracker.is_by_hand or not self._training.has_optimizer():
            self._act(self.tracker.on_after_backward())

    @property
    def _is_of_ours(self) -> bool:
        return bool(
            self.calls.is_attached
            and (self._ran or not self._registry.only or self._order.is_of_known)
            and not is_recomputing()
        )

    def on_before_clipping(self, parameters: list[torch.Tensor]) -> None:
        """Scans gradients as backward left them. Before the step they are scanned as they are."""
        if self.is_scanning(Kind.GRAD) and not self._are_gradients_scanned:
            self._parameters.scan_gradients(parameters)

    def _scan_all_gradients(self) -> None:
        """Where no optimizer will step: as after each backward."""
        if Kind.GRAD not in self._kinds or not self.turn.period:
            return
        began = time.perf_counter()
        self._parameters.scan_all_gradients()
        self._are_gradients_scanned = True
        self._meter.cost.rest += time.perf_counter() - began
        self._look_for_changes()

    def _scan_all_parameters(self) -> None:
        """Where no optimizer has stepped: as after an optimizer's step."""
        self._are_gradients_scanned = self._ran = False
        if self.turn.slow and self.calls.is_attached:
            began = time.perf_counter()
            self._parameters.scan_all_parameters()
            self._meter.cost.slow += time.perf_counter() - began

    # -- optimizer steps -------------------------------------------------------------------------

    def on_before_optimizer_step(
        self, optimizer: Optimizer, args: Any, kwargs: Any
    ) -> StepArguments | None:
        """Scans gradients in the order in which backward made them, as far as that is known."""
        if is_stand_in(optimizer):  # the step of a base class, inside of one that we know
            return None
        self._stepping.optimizer = 0
        self._stepping.stepped = True
        if is_tracing():
            return None
        plan = self.optimizers.plan_of_step(optimizer)
        if plan is None or not self.calls.is_attached:
            return None
        self._stepping.optimizer, self._stepping.plan = id(optimizer), plan
        self._training.before_optimizer_step(plan)
        closure = closure_of(args, kwargs)  # it makes the gradients
        look = functools.partial(self._look_at_gradients, optimizer, by_closure=closure is not None)
        if self._skip_step is not None:
            return self._skip_step.before(optimizer, args, kwargs, look)
        if closure is not None:
            return with_closure(args, kwargs, Closure(closure, look))
        self._scan_gradients(optimizer, plan)
        self._judge_gradients()
        return None

    def _scan_gradients(self, optimizer: Optimizer, plan: Plan) -> None:
        if Kind.GRAD in self._kinds and (self.turn.period or self._skip_step is not None):
            began, ticket = time.perf_counter(), self._table.last_ticket
            self._parameters.scan_gradients_of(optimizer, plan)
            if self._table.last_ticket != ticket:
                self._bad_gradients = self._table.resets
                self._look_for_changes()
            self._meter.cost.rest += time.perf_counter() - began

    def _judge_gradients(self) -> None:
        """Before the optimizer steps: what would be saved is as it was in the forward."""
        if self._inputs is not None and self.records.has_bad_rows:
            self.records.look_ahead(self.turn)

    def _look_at_gradients(
        self, optimizer: Optimizer, *, by_closure: bool
    ) -> tuple[Gradients, bool]:
        """Scans gradients; returns them, and whether those on the host are known to be finite."""
        plan = self._stepping.plan
        if by_closure:  # before it ran, its model may not have been known
            plan = self._stepping.plan = self.optimizers.plan(optimizer) or plan
        self._scan_gradients(optimizer, plan)
        self._judge_gradients()
        if by_closure:  # the optimizer may move parameters before it calls it again
            self._changes.note_step(id(optimizer), plan.watched, is_over=False)
        # A row takes a ticket once: after that it does not tell whether a later scan was bad.
        fine = self._bad_gradients != self._table.resets
        if fine and not self._table.on_device:
            return [], True
        parameters = parameters_of(optimizer)
        pairs = [(parameters[i].grad, place.grad.sites) for i, place in plan.backward]
        return [(grad, sites) for grad, sites in pairs if grad is not None], fine

    def on_after_optimizer_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Scans parameters, and moments when asked for, and ends the step."""
        if self._skip_step is not None:
            self._skip_step.after(optimizer, args, kwargs)
        if self._stepping.optimizer != id(optimizer) or not self.calls.is_attached:
            return
        self._stepping.optimizer = 0
        self._ran = False
        plan = self._stepping.plan
        closure = closure_of(args, kwargs)
        if isinstance(closure, Closure) and not closure.calls:
            self._scan_gradients(optimizer, plan)  # the optimizer has used those it found
        began = time.perf_counter()
        self._changes.note_step(id(optimizer), plan.watched, is_scanned=self.turn.slow)
        if self.turn.slow:
            self._parameters.scan_after_step(optimizer, plan)
        scanned = time.perf_counter()
        self._meter.cost.slow += scanned - began
        self._optimizer_stepped(optimizer, plan, outcome_of(optimizer, self._stepping.scaler))
        self._meter.cost.rest += time.perf_counter() - scanned

    def on_before_scaled_step(self, optimizer: Optimizer, scaler: GradScaler) -> None:
        """Nothing is known yet: the scaler looks for Inf itself."""
        self._stepping.stepped = False
        self._stepping.scaler = scaler

    def on_after_scaled_step(self, optimizer: Optimizer, scaler: GradScaler) -> None:
        """Scans the gradients that no optimizer's hook saw, if the scaler skipped the step."""
        self._stepping.scaler = None
        if self._stepping.stepped:
            return
        plan = self.optimizers.plan(optimizer)
        if plan is not None and self.calls.is_attached:
            self._training.before_optimizer_step(plan)
            self._scan_gradients(optimizer, plan)
            if self.turn.slow:
                self._parameters.scan_buffers()  # the forward has changed them all the same
            outcome = Outcome(id(optimizer), True, scaler.get_scale())
            self._optimizer_stepped(optimizer, plan, outcome)

    def _optimizer_stepped(self, optimizer: Optimizer, plan: Plan, outcome: Outcome) -> None:
        if self._inputs is not None and outcome.skipped is not True:
            self._inputs.note_step()
        if self.tracker.on_after_optimizer_step(plan.number).end:
            self._end_step(optimizer, outcome)

    # -- steps -----------------------------------------------------------------------------------

    def end_step(self) -> None:
        """The user ends the step here. From the first call on, nothing else does."""
        self._act(self.tracker.on_manual_step())

    def flush(self) -> None:
        """Delivers all that was scanned, the unfinished step included. Waits for the scans."""
        with self.records.lock:
            self._act(self.tracker.on_before_forward())
            self.records.look(self.turn)
            self.records.deliver(wait=True)

    def _act(self, decision: Decision) -> None:
        """Does what the tracker decided."""
        if decision.scan_gradients:
            self._scan_all_gradients()
        if decision.scan_parameters:
            self._scan_all_parameters()
        if decision.look != "never" and self._is_to_look(decision):
            self.records.look(self.turn, reset=decision.restart)
        if decision.end:
            self._end_step()

    def _is_to_look(self, decision: Decision) -> bool:
        if decision.look == "if known bad":
            return self.records.has_bad_rows
        return decision.look == "always" or self.records.has_ahead or self.records.may_be_bad

    def _end_step(
        self,
        optimizer: Optimizer | None = None,
        outcome: Outcome | None = None,
    ) -> None:
        with self.records.lock:
            if not self.records.end_step(self.turn, optimizer, outcome):
                return
            step, was_reopened = self.tracker.step, self.tracker.is_reopened
            self.tracker.ended()
            if self._inputs is not None and not self.tracker.may_be_probed:
                self._inputs.forget()
            if not was_reopened:  # else what came after the forward is counted with the next one
                self._schedule.note(self.turn, self._meter.take(), self._meter.lap())
            if self.tracker.step != step:  # all parts of a step are scanned alike
                self._next_turn()
            self.records.deliver()
            self._consumer.on_step_end(self.tracker.step)
