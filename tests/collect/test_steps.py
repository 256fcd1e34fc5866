"""When a step ends: events in order, and what is to be done after each. No model, no torch."""

import pytest
import torch
from torch import nn

import nanscan
from helpers.models import SCOPES, Do, Net, batch, enable, infer, set_nan, sgd, train, verdicts
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


def stepped(tracker, optimizer):
    tracker.on_before_optimizer_step(optimizer)
    return tracker.on_after_optimizer_step(optimizer)


class Steps(nanscan.Sink):
    """Notes the steps that it is told of."""

    def __init__(self, steps):
        self.on_step = steps.append


# Each event is a name here; it is played to the tracker, and the step is ended where that is said.
# A run has as many steps as ends, unless another number is given.
EVENTS = {
    "start": lambda t: t.on_before_forward(),
    "start of model": lambda t: t.on_before_forward(MODEL),
    "forward": forward,
    "forward of another": lambda t: forward(t, OTHER),
    "validation": lambda t: forward(t, with_gradients=False),
    "checkpoint": lambda t: forward(t, is_recomputing=True),
    "backward": lambda t: t.on_before_backward(is_trainable=True, has_scans=True),
    "backward of nothing": lambda t: t.on_before_backward(is_trainable=False, has_scans=True),
    "late backward": lambda t: t.on_before_backward(is_trainable=True, has_scans=False),
    "backward ended": lambda t: t.on_after_backward(),
    "optimizer": lambda t: stepped(t, 0),
    "another optimizer": lambda t: stepped(t, 1),
    "probe": lambda t: t.on_probe(),
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
            ("another optimizer", END),
            ("forward", NOTHING),
        ],
        1,
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
    "probes after a step of inference": (
        False,
        [
            ("probe", False),
            ("start of model", NOTHING),
            ("validation", END),
            ("probe", True),
            ("probe", False),
            ("start of model", END),
            ("probe", False),
            ("validation", END),
        ],
        2,
    ),
    "a probe in a step of training": (
        True,
        [("forward", NOTHING), ("probe", False), ("optimizer", END), ("probe", False)],
    ),
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
            ("monitor.step", UPDATED),  # no module was seen to run: compiled code may have
            ("start of model", NOTHING),
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
    waits, events, *steps = RUNS[name]
    tracker = StepTracker()
    tracker.waits_for_optimizer = waits
    decided, ends = [], 0
    for event, _ in events:
        decision = EVENTS[event](tracker)
        decided.append((event, decision))
        if isinstance(decision, Decision) and decision.end:
            tracker.ended()
            ends += 1
    assert decided == events
    assert tracker.step == (steps or [ends])[0]


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
@pytest.mark.parametrize("made", ["before the forward", "before the backward"])
def test_the_count_begins_with_the_training(scope, made):
    """An evaluation before the optimizer is made: its steps count backwards from there."""
    model = Net()
    monitor = enable(scope, model, action="log")
    infer(model, batch(), batch(1), batch(2))
    assert monitor.steps == 3  # it may be inference, for all that is known
    if made == "before the forward":
        train(model, sgd(model), [batch(), batch(1), set_nan(batch())])
    else:
        loss = model(batch()).sum()
        optimizer = sgd(model)
        loss.backward()
        optimizer.step()
        train(model, optimizer, [batch(1), set_nan(batch())])
    assert monitor.steps == 3
    assert {f.step for f in monitor.findings if f.is_fault} == {2}
    history = monitor.history("fc1 output")
    assert history["step"].tolist() == [-3, -2, -1, 0, 1, 2]
    assert history["calls"].tolist() == [1] * 6


@SCOPES
def test_no_two_findings_have_one_number_and_another_meaning(scope):
    model = Net()
    monitor = enable(scope, model, action="log")
    infer(model, batch(), set_nan(batch(1)), batch(2))
    train(model, sgd(model), [batch(), set_nan(batch(1))])
    assert monitor.steps == 5
    assert {f.step for f in monitor.findings if f.is_fault} == {1, 4}


@SCOPES
def test_inference_has_a_step_for_each_forward(scope):
    model = Net()
    monitor = enable(scope, model)
    infer(model, batch(), batch())
    assert monitor.steps == 2
    infer(model, batch(), batch())
    assert monitor.history("fc1 output")["step"].tolist() == [0, 1, 2, 3]


# -- probes between two steps of inference ---------------------------------------------------------


@SCOPES
def test_a_probe_after_a_forward_belongs_to_its_step(scope):
    """The logits of a decode loop, which code outside of any module works on."""
    model = Net()
    steps = []
    monitor = enable(scope, model, action=[Steps(steps), "log"])
    with torch.no_grad():
        for number in range(5):
            logits = nanscan.probe("logits", model(batch(number)))
            assert monitor.steps == number + 1
            chosen = logits * 0 / 0 if number == 3 else logits.softmax(-1)
            nanscan.probe("chosen", chosen)
            assert monitor.steps == number + 1
    monitor.flush()
    assert verdicts(monitor)[0] == (3, "chosen probe", "origin")
    assert [str(site) for site in monitor.findings[0].between] == ["logits probe", "chosen probe"]
    assert verdicts(monitor)[1:] == [(4, "chosen probe", "recovered")]
    history = monitor.history("chosen probe")
    assert (history["step"].tolist(), history["calls"].tolist()) == ([0, 1, 2, 3, 4], [1] * 5)
    assert history["nan"].tolist() == [0, 0, 0, 12, 0]
    assert monitor.history("fc2 output")["step"].tolist() == [0, 1, 2, 3, 4]
    assert steps == [0, 1, 2, 3, 4]


@SCOPES
def test_a_probe_that_follows_from_its_forward(scope):
    model = nn.Sequential(nn.Linear(4, 4), Do(lambda x: x))
    monitor = enable(scope, model, action="log")
    with torch.no_grad():
        for number in range(3):
            out = model(batch(number) if number != 1 else set_nan(batch()))
            nanscan.probe("out", out * 2)
    monitor.flush()
    found = [(f.step, str(f.site), f.verdict) for f in monitor.findings if f.is_fault]
    assert found[0] == (1, "Sequential input[0]", "propagated")
    assert found[-1] == (1, "out probe", "propagated")
    assert {f.episode for f in monitor.findings if f.is_fault} == {1}


@SCOPES
def test_a_probe_that_raises_does_so_before_the_next_forward(scope):
    model = Net()
    enable(scope, model, action="raise")
    infer(model, batch())
    nanscan.probe("chosen", set_nan(batch()))
    with pytest.raises(nanscan.NonFiniteError) as error:
        infer(model, batch())
    assert error.value.finding.step == 0


@SCOPES
def test_a_step_that_is_not_scanned_has_no_probes(scope):
    model = Net()
    monitor = enable(scope, model, every_n_steps=2)
    with torch.no_grad():
        for number in range(5):
            nanscan.probe("out", model(batch(number)))
    monitor.flush()
    for site in ("out probe", "fc2 output"):
        assert monitor.history(site)["step"].tolist() == [0, 2, 4]


def test_flushing_between_two_probes_changes_no_step():
    model = Net()
    monitor = nanscan.enable(model)
    for number in range(3):
        infer(model, batch(number))
        monitor.flush()
        nanscan.probe("first", batch())
        monitor.flush()
        nanscan.probe("second", batch(1))
    monitor.flush()
    assert monitor.steps == 3
    assert monitor.history("first probe")["step"].tolist() == [0, 1, 2]
    assert monitor.history("second probe")["step"].tolist() == [0, 1, 2]


def test_a_probe_of_the_loss_belongs_to_the_step_of_its_backward():
    """No optimizer holds the parameters: a forward may be a whole step."""
    model = Net()
    monitor = nanscan.enable(model)
    for number in range(3):
        loss = nanscan.probe("value", model(batch(number)).sum())
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(0.01 * parameter.grad)
    monitor.flush()
    assert monitor.steps == 3
    for site in ("value probe", "fc2 output", "fc1.weight grad"):
        assert monitor.history(site)["step"].tolist() == [0, 1, 2]
