"""When a step ends: events in order, and what is to be done after each. No model, no torch."""

import pytest

from helpers.models import SCOPES, Net, batch, enable, infer, set_nan, sgd, train
from nanscan._collect.steps import END, NOTHING, Decision, StepTracker
from nanscan._data.places import ModulePlace

MODEL, OTHER = (ModulePlace(name, None) for name in ("model", "other"))

LOOK = Decision(look="always")
AFRESH = Decision(look="always", restart=True)
IF_BAD = Decision(look="if bad")
UPDATED = Decision(scan_parameters=True, end=True)
BACKWARD = Decision(scan_gradients=True, look="if known bad")


def forward(tracker, place=MODEL, **options):
    options = {"with_gradients": True, "is_recomputing": False, **options}
    return tracker.on_after_forward(place, **options)


# Each event is a name here; it is played to the tracker, and the step is ended where that is said.
EVENTS = {
    "start": lambda t: t.on_before_forward(),
    "forward": forward,
    "forward of another": lambda t: forward(t, OTHER),
    "validation": lambda t: forward(t, with_gradients=False),
    "checkpoint": lambda t: forward(t, is_recomputing=True),
    "backward": lambda t: t.on_before_backward(is_trainable=True, has_scans=True),
    "backward of nothing": lambda t: t.on_before_backward(is_trainable=False, has_scans=True),
    "late backward": lambda t: t.on_before_backward(is_trainable=True, has_scans=False),
    "backward ended": lambda t: t.on_after_backward(),
    "optimizer": lambda t: t.on_after_optimizer_step(),
    "monitor.step": lambda t: t.on_manual_step(),
}

RUNS = {
    "an optimizer": (True, [("forward", NOTHING), ("optimizer", END)] * 2),
    "no optimizer, no gradients": (False, [("validation", END)] * 2),
    "gradients, and nobody who uses them": (False, [("forward", END)] * 2),
    "accumulation": (
        True,
        [("forward", NOTHING), ("forward", IF_BAD), ("forward", IF_BAD), ("optimizer", END)],
    ),
    "several optimizers": (
        True,
        [
            ("forward", NOTHING),
            ("forward of another", NOTHING),
            ("optimizer", END),
            ("optimizer", END),
            ("forward", NOTHING),
        ],
    ),
    "a GradScaler that skips: its end of a step counts as well": (
        True,
        [("forward", NOTHING), ("optimizer", END), ("forward", NOTHING), ("optimizer", END)],
    ),
    "a closure that runs the model three times": (
        True,
        [("forward", NOTHING), ("forward", IF_BAD), ("forward", IF_BAD), ("optimizer", END)],
    ),
    "validation between steps, and a teacher amid one": (
        True,
        [
            ("forward", NOTHING),
            ("optimizer", END),
            ("validation", AFRESH),
            ("forward", NOTHING),
            ("validation", LOOK),
            ("optimizer", END),
        ],
    ),
    "a generate loop": (False, [("validation", END)] * 5),
    "a checkpoint in backward": (
        True,
        [("forward", NOTHING), ("checkpoint", NOTHING), ("optimizer", END)],
    ),
    "by hand: the update comes before the next forward": (
        False,
        [
            ("backward", None),
            ("backward ended", BACKWARD),
            ("start", UPDATED),
            ("forward", Decision(look="if known bad")),
            ("backward ended", BACKWARD),
            ("start", UPDATED),
        ],
    ),
    "an optimizer that comes late ends the training by hand": (
        False,
        [
            ("backward", None),
            ("backward ended", BACKWARD),
            ("optimizer", END),
            ("start", NOTHING),
            ("forward", NOTHING),
        ],
    ),
    "a backward of what nobody trains": (
        False,
        [("backward of nothing", None), ("backward ended", NOTHING), ("forward", END)],
    ),
    "Monitor.step, and nothing else from then on": (
        True,
        [
            ("monitor.step", END),
            ("forward", NOTHING),
            ("optimizer", NOTHING),
            ("validation", NOTHING),
            ("monitor.step", END),
        ],
    ),
    "Monitor.step by hand": (
        False,
        [
            ("backward", None),
            ("backward ended", BACKWARD),
            ("monitor.step", UPDATED),
            ("backward ended", BACKWARD),
            ("start", Decision(scan_parameters=True)),
        ],
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_what_is_decided(name):
    waits, events = RUNS[name]
    tracker = StepTracker()
    tracker.waits_for_optimizer = waits
    decided, ends = [], 0
    for event, _ in events:
        decision = EVENTS[event](tracker)
        decided.append((event, decision))
        if decision is not None and decision.end:
            tracker.ended()
            ends += 1
    assert decided == events
    assert tracker.step == ends


def test_a_forward_that_was_taken_for_a_whole_step_goes_on_with_its_backward():
    tracker = StepTracker()
    tracker.waits_for_optimizer = False
    assert forward(tracker) == END
    tracker.ended()
    EVENTS["late backward"](tracker)
    assert (tracker.step, tracker.continues, tracker.is_by_hand) == (0, True, True)
    assert tracker.on_after_backward() == BACKWARD
    assert tracker.on_before_forward() == UPDATED
    tracker.ended()
    assert (tracker.step, tracker.continues) == (1, False)


def test_something_else_in_between_keeps_the_steps_apart():
    tracker = StepTracker()
    tracker.waits_for_optimizer = False
    assert forward(tracker) == END
    tracker.ended()
    EVENTS["backward"](tracker)  # with scans since
    assert (tracker.step, tracker.continues) == (1, False)


@SCOPES
def test_forwards_before_the_first_optimizer_step_belong_to_step_0(scope):
    """Sanity checks of a trainer, and rollouts of an agent."""
    model = Net()
    optimizer = sgd(model)
    monitor = enable(scope, model, action="log")
    infer(model, batch(), batch(1), set_nan(batch(2)))
    assert monitor.steps == 0
    train(model, optimizer, [batch(), set_nan(batch())])
    assert monitor.steps == 2
    assert [f.step for f in monitor.findings if str(f.site) == "Net input[0]" and f.is_fault] == [
        0,
        1,
    ]


@SCOPES
def test_inference_without_an_optimizer_has_a_step_for_each_forward(scope):
    model = Net()
    monitor = enable(scope, model)
    infer(model, batch(), batch())
    optimizer = sgd(model)
    assert monitor.steps == 2
    train(model, optimizer, [batch()] * 2)
    assert monitor.steps == 4
