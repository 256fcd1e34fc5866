"""Training: whether an optimizer will step, and where the count of a training's steps begins."""

from __future__ import annotations

from nanscan._collect.names import Registry
from nanscan._collect.optimizers import Optimizers, Plan
from nanscan._collect.records import Consumer, RecordQueue
from nanscan._collect.steps import StepTracker
from nanscan._data.kept import version


class Training:
    """Finds out whether what runs is a training.

    Args:
        registry: the modules whose training counts.
        optimizers: those that step.
        tracker: is told.
        records: are numbered anew when a training begins.
        consumer: knows whether that may be.
    """

    def __init__(
        self,
        registry: Registry,
        optimizers: Optimizers,
        tracker: StepTracker,
        records: RecordQueue,
        consumer: Consumer,
    ) -> None:
        self._registry = registry
        self._optimizers = optimizers
        self._tracker = tracker
        self._records = records
        self._consumer = consumer
        self._has_inferred = False  # an outermost module ran without gradients
        self._has_begun = False
        self._has_stepped = False  # an optimizer, seen by its hooks
        self._version: int | None = None  # of a trained parameter after the last backward

    def before_forward(self) -> None:
        """An outermost module is about to run: has compiled code updated its parameters?"""
        before, self._version = self._version, None
        if before is not None and self._version_now() != before:
            self._tracker.on_unseen_update()
            self.begin()

    def after_backward(self) -> None:
        """A backward of a watched model ended."""
        if not (self._has_stepped or self._tracker.is_by_hand):
            self._version = self._version_now()

    def _version_now(self) -> int | None:
        """Of one parameter: an optimizer changes them all."""
        trained = (p for p, _ in self._registry.live_parameters() if p.requires_grad)
        parameter = next(trained, None)
        return None if parameter is None else version(parameter)

    def after_forward(self, *, with_gradients: bool) -> None:
        """An outermost module returned: is that a whole step? Looks for an optimizer once."""
        is_to_look = with_gradients or not self._has_inferred
        self._has_inferred |= not with_gradients
        if self._tracker.is_by_hand or not is_to_look:
            return
        if not (self.has_optimizer() or with_gradients):
            self._tracker.waits_for_optimizer = None  # one may come before the training

    def before_backward(self, *, has_scans: bool) -> None:
        """A backward of a watched model starts.

        Args:
            has_scans: something was scanned since the last step ended.
        """
        if self.has_optimizer():
            return
        self._tracker.on_before_backward(
            is_trainable=self._registry.is_trainable, has_scans=has_scans
        )
        if self._tracker.is_by_hand:
            self.begin()

    def before_optimizer_step(self, plan: Plan) -> None:
        """An optimizer is about to step, or a GradScaler has skipped that."""
        self._has_stepped, self._version = True, None
        with self._records.lock:
            may_join = self._optimizers.may_join(plan)
            self._tracker.on_before_optimizer_step(plan.number, may_join=may_join)
            self.begin()

    def has_optimizer(self) -> bool:
        """Whether an optimizer holds a watched parameter. Looks once."""
        if self._tracker.waits_for_optimizer is None:
            self._registry.rescan()  # it may hold adapters that were added since
            self._tracker.waits_for_optimizer = self._optimizers.is_any_watched()
            if self._tracker.waits_for_optimizer:
                self.begin()
        return self._tracker.waits_for_optimizer

    def begin(self) -> None:
        """An optimizer is known, or other code trains: counts from here.

        Unless something was told of a step before: no two steps that are told have one number.
        """
        if self._has_begun:
            return
        self._has_begun = True
        with self._records.lock:
            if self._tracker.step and self._consumer.on_training_start():
                self._records.count_anew()
