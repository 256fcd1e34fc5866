"""StepTracker: the one place that knows when a step begins and ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from nanscan._collect.iterations import Iterations
from nanscan._data.places import ModulePlace


@dataclass(frozen=True)
class Decision:
    """What is to be done after an event, in this order.

    Attributes:
        scan_gradients: scan the gradients of all parameters: no optimizer will step them.
        scan_parameters: scan all parameters: other code than an optimizer has updated them.
        look: judge what the step has scanned so far; the step goes on. "if bad": where something
            may be bad; "if known bad": where the host knows that something is.
        restart: after the look all rows begin anew, in the same step.
        end: the step ends.
    """

    scan_gradients: bool = False
    scan_parameters: bool = False
    look: Literal["never", "if known bad", "if bad", "always"] = "never"
    restart: bool = False
    end: bool = False


NOTHING = Decision()
END = Decision(end=True)


class StepTracker:
    """Follows a run event by event and decides. It calls nobody.

    A step ends at `optimizer.step()` while an optimizer is stepping; at the end of the outermost
    forward while none is; and only at `Monitor.step()` once that was called. Several optimizers
    that step in turn end parts of one step, which have its number. Where a backward ran
    though no optimizer holds the parameters, other code updates them between the end of that
    backward and the next forward: the step lasts until then; so it is with an optimizer whose step
    was compiled, which nobody sees. An outermost forward without gradients
    in a training run (validation) is judged when it ends and belongs to the step it runs in. Where
    code calls the parts of a model that never runs itself, a step of inference lasts until a part
    is called again. A probe after a step of inference belongs to it.

    Attributes:
        step: number of the current step, from 0.
        is_reopened: it had ended with a forward, and a probe came after that.
        stepped: number of the optimizer whose step ends it; -1: none does.
        waits_for_optimizer: whether an optimizer holds the parameters; None: nobody has looked yet.
        is_by_hand: other code than an optimizer updates the parameters.
        entered: outermost modules that returned in the current step.
    """

    def __init__(self) -> None:
        self.step = 0
        self.is_reopened = False
        self.stepped = -1
        self.waits_for_optimizer: bool | None = None
        self.is_by_hand = False
        self.entered: set[ModulePlace] = set()
        self._is_update_due = False  # by other code, before the next forward
        self._is_split = False  # the step has the calls of a model that is called in parts
        self._is_manual = False
        # Outermost modules whose forward with gradients ended since the last step did.
        self._ended: set[ModulePlace] = set()
        self._step_after_forward = -1  # the last one ended with a forward; a backward may follow
        self._probed = -1  # the same; a probe may follow
        self._has_run = False  # an outermost module, in this step or part of one
        self._was_judged = False  # the forward of this step, as a step by itself
        self._iterations = Iterations()

    @property
    def continues(self) -> bool:
        """Whether the forward of the current step was judged before, in a record of its own."""
        return self._was_judged or (self._iterations.goes_on and not self._has_run)

    @property
    def may_be_probed(self) -> bool:
        """Whether a probe that comes now belongs to the step that has ended."""
        return self.step == self._probed and not self._is_manual

    def count_anew(self) -> int:
        """The current step becomes number 0, unless a user counts. Returns by how much it fell."""
        before = 0 if self._is_manual else self.step
        self.step -= before
        self._step_after_forward = self._probed = -1
        return before

    def on_before_forward(self, place: ModulePlace | None = None) -> Decision:
        """An outermost module is about to run; None: all that was scanned is asked for."""
        if place is not None:
            self._has_run, self._probed = True, -1
        if self.is_reopened:
            return END
        if self._is_split and place in self.entered and not (self._is_manual or self.is_by_hand):
            return END
        if not self._is_update_due:
            return NOTHING
        self._is_update_due = False
        return Decision(scan_parameters=True, end=not self._is_manual)

    def on_after_forward(
        self, place: ModulePlace, *, with_gradients: bool, is_recomputing: bool
    ) -> Decision:
        """An outermost module returned.

        Args:
            place: the module.
            with_gradients: autograd was recording.
            is_recomputing: a checkpoint runs the module again, inside of a backward.
        """
        if is_recomputing:
            return NOTHING
        self.entered.add(place)
        if self._is_manual:
            return NOTHING
        if not (self.is_by_hand or self.waits_for_optimizer):
            return self._after_inference(place, with_gradients=with_gradients)
        if not with_gradients:  # validation starts afresh; a teacher amid a step must not split it
            return Decision(look="always", restart=not self._ended)
        was_there = place in self._ended
        self._ended.add(place)
        if self.is_by_hand:
            return Decision(look="if known bad")
        # Its last call led to no optimizer step: accumulation, or a GradScaler skipped it.
        return Decision(look="if bad") if was_there else NOTHING

    def _after_inference(self, place: ModulePlace, *, with_gradients: bool) -> Decision:
        if place.parent is not None and not any(around.called for around in place.parents()):
            self._is_split = True
            return Decision(look="if bad")
        self._step_after_forward = self.step + 1 if with_gradients else -1
        self._probed = self.step + 1
        return END

    def on_probe(self) -> bool:
        """A value is about to be scanned that may be outside of any module.

        Returns:
            Whether it belongs to the step that has ended, which is the current one again.
        """
        if not self.may_be_probed:
            return False
        self.step -= 1
        self.is_reopened = self._was_judged = True
        return True

    def on_before_backward(self, *, is_trainable: bool, has_scans: bool) -> None:
        """A backward of a watched model starts, and no optimizer holds the parameters.

        Args:
            is_trainable: some parameter requires a gradient.
            has_scans: something was scanned since the last step ended.
        """
        if self.is_by_hand or not is_trainable:
            return
        self.is_by_hand = True
        self.is_reopened = False
        if self.step == self._step_after_forward and not has_scans:
            self.step -= 1  # its forward was taken for the whole step
            self._was_judged = True

    def on_unseen_update(self) -> None:
        """An optimizer holds the parameters, and they changed though none was seen to step."""
        self.is_by_hand = self._is_update_due = True

    def on_after_backward(self) -> Decision:
        """That backward ended."""
        if not self.is_by_hand:
            return NOTHING
        self._is_update_due = True
        return Decision(scan_gradients=True, look="if known bad")

    def on_before_optimizer_step(self, optimizer: int, *, may_join: bool = True) -> None:
        """An optimizer of watched parameters is about to step, or a GradScaler has skipped that.

        Args:
            optimizer: its number.
            may_join: it may step in the step in which another did.
        """
        self.is_reopened = False
        self.stepped = -1
        if not self._is_manual:
            self.step += self._iterations.begin(optimizer, may_join=may_join)

    def on_after_optimizer_step(self, optimizer: int) -> Decision:
        """It stepped, or a GradScaler skipped that."""
        self.waits_for_optimizer = True
        self.is_by_hand = self._is_update_due = False
        if self._is_manual:
            return NOTHING
        self.stepped = optimizer
        return END

    def on_manual_step(self) -> Decision:
        """The user ends a step. From the first time on, nothing else does."""
        self._is_manual = True
        self.stepped = -1
        is_due = self.on_before_forward().scan_parameters
        # Where no module was seen to run, compiled code may have: it leaves nothing but parameters.
        return Decision(scan_parameters=is_due or not self._has_run, end=True)

    def ended(self) -> None:
        """The step was ended, as decided; the next one begins, or the next part of this one."""
        if self.stepped < 0:
            self._iterations.interrupt()
            self.step += 1
        else:
            self.step += self._iterations.end(self.stepped)
        self.stepped = -1
        self.is_reopened = self._was_judged = self._has_run = False
        self._is_split = False
        self._ended.clear()
        self.entered.clear()
