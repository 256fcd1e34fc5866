"""Filters, every N steps, warm-up and the budget: what is scanned when, and what of it is told."""

import math

import pytest
import torch
from torch import nn

import nanscan
from helpers.models import (
    NAN,
    SCOPES,
    Do,
    Net,
    batch,
    calls,
    infer,
    sgd,
    train,
)
from nanscan._collect.schedule import (
    FULL,
    Cost,
    Schedule,
    Turn,
    dispatch_seconds,
    gradient_dispatch_seconds,
)
from nanscan._data.site import KINDS


def names(monitor):
    return set(monitor.coverage().sites)


# -- the schedule alone ----------------------------------------------------------------------------


def test_every_and_warmup():
    schedule = Schedule(every=3, warmup=2, max_overhead=None)
    assert [schedule.turn(step).period for step in range(10)] == [0, 0, 1, 0, 0, 1, 0, 0, 1, 0]
    assert schedule.turn(2).is_full
    assert not schedule.turn(3).slow
    assert schedule.describe() == {"everything": "one step in 3, from step 2 on"}
    assert Schedule(1, 5, None).describe() == {"everything": "from step 5 on"}
    assert Schedule(1, 0, None).describe() == {}


def test_a_fault_is_followed_by_full_steps():
    schedule = Schedule(every=10, warmup=0, max_overhead=None)
    schedule.scan_fully(4, 3)
    assert [schedule.turn(step).period for step in range(4, 9)] == [1, 1, 1, 0, 0]


def run(schedule, steps, *, net, outputs, slow, fixed=0.0, device=0.0):
    """Steps whose true costs are these seconds when all is scanned."""
    spent = []
    for step in range(steps):
        turn = schedule.turn(step)
        cost = Cost(
            calls=outputs / turn.period,
            slow=slow if turn.slow else 0.0,
            rest=fixed,
            device=device / turn.period if step % 4 == 0 else 0.0,
        )
        schedule.note(turn, cost, net + cost.total)
        spent.append(cost.total)
    return spent


def test_a_budget_that_suffices_changes_nothing():
    schedule = Schedule(1, 0, 0.02)
    run(schedule, 50, net=1.0, outputs=0.01, slow=0.005)
    assert (schedule.period, schedule.slow_period) == (1, 1)
    assert schedule.describe() == {}
    assert schedule.overhead() == pytest.approx(0.015)


def test_parameters_are_thinned_first():
    schedule = Schedule(1, 0, 0.02)
    spent = run(schedule, 400, net=1.0, outputs=0.01, slow=0.05)
    assert schedule.period == 1
    assert schedule.slow_period == 5
    assert sum(spent[100:]) / 300 == pytest.approx(0.02)
    assert list(schedule.describe()) == ["parameters, buffers and moments"]


def test_then_outputs():
    schedule = Schedule(1, 0, 0.02)
    spent = run(schedule, 400, net=1.0, outputs=0.08, slow=0.05, fixed=0.004)
    assert schedule.slow_period == 64
    assert schedule.period == 6
    assert sum(spent[100:]) / 300 <= 0.0201
    assert schedule.overhead() <= 0.02


def test_a_budget_that_cannot_be_held_thins_as_far_as_it_goes():
    schedule = Schedule(1, 0, 0.01)
    run(schedule, 100, net=1.0, outputs=0.1, slow=0.1, fixed=0.05)
    assert (schedule.period, schedule.slow_period) == (64, 64)
    assert schedule.overhead() > 0.05


def test_the_device_has_the_same_budget():
    schedule = Schedule(1, 0, 0.02)
    run(schedule, 200, net=1.0, outputs=0.001, slow=0.001, device=0.1)
    assert schedule.period == 5
    assert schedule.overhead() == pytest.approx(0.02)


def test_it_relaxes_when_steps_get_longer():
    schedule = Schedule(1, 0, 0.02)
    run(schedule, 100, net=1.0, outputs=0.08, slow=0.0)
    assert schedule.period == 4
    run(schedule, 100, net=10.0, outputs=0.08, slow=0.0)
    assert schedule.period == 1


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_dispatch_costs_something(mode):
    with mode():
        assert 0 < dispatch_seconds() < 1e-4
        assert 0 < gradient_dispatch_seconds() < 1e-4


def test_gradients_of_outputs_are_thinned_with_outputs():
    schedule = Schedule(1, 0, 0.02)
    for step in range(200):
        turn = schedule.turn(step)
        cost = Cost(calls=0.02 / turn.period, gradients=0.06 / turn.period)
        schedule.note(turn, cost, 1.0 + cost.total)
    assert schedule.period == 4
    assert schedule.overhead() == pytest.approx(0.02)


# -- in a run --------------------------------------------------------------------------------------


def test_every_second_step_is_scanned():
    model = Net()
    monitor = nanscan.enable(model, every_n_steps=2, warmup_steps=1)
    train(model, sgd(model), [batch(i) for i in range(6)])
    site = nanscan.Site("fc1", "output")
    assert monitor.history(site)["step"].tolist() == [1, 3, 5]
    assert monitor.history(nanscan.Site("fc1.weight", "param"))["step"].tolist() == [1, 3, 5]
    assert monitor.history(nanscan.Site("loss", "loss"))["step"].tolist() == [1, 3, 5]
    assert monitor.steps == 6


def test_sentinels_are_scanned_in_every_step_and_others_by_turns():
    blocks = [nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))) for _ in range(2)]
    model = nn.Sequential(*blocks)
    monitor = nanscan.enable(model, kinds=KINDS, history=32)
    monitor._schedule.period, monitor._schedule.slow_period = 4, 8
    monitor._collector._next_turn()
    train(model, sgd(model), [batch(i) for i in range(16)])

    def steps(name, kind="output"):
        return monitor.history(nanscan.Site(name, kind))["step"].tolist()

    every = list(range(16))
    assert monitor.history(nanscan.Site("loss", "loss"))["step"].tolist() == every
    assert steps("0.0.weight", "grad") == every
    assert steps("0.0.weight", "param") == [0, 8]
    turns = [steps(f"{block}.{layer}") for block in range(2) for layer in range(3)]
    assert all(len(taken) == 4 for taken in turns)
    assert len({tuple(taken) for taken in turns}) > 1
    # The last layer of a block returns the block's own output: it is seen in each step.
    seen = {step for name in ("0", "0.3") for step in _steps_of(monitor, name)}
    assert seen == set(every)


def test_hooks_on_tensors_are_there_by_turns_even_on_sentinels():
    """A hook on a tensor costs more than its scan, and a flat model is sentinels throughout."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(8)), Head())
    monitor = nanscan.enable(model, kinds=KINDS, history=32)
    monitor._schedule.period = 4
    monitor._collector._next_turn()
    train(model, sgd(model), [batch(i) for i in range(16)])

    def steps(name, kind):
        return monitor.history(nanscan.Site(name, kind))["step"].tolist()

    every = list(range(16))
    for name in map(str, range(8)):
        assert steps(name, "output") == every
        taken = steps(name, "grad_output")
        assert taken == every[taken[0] :: 4]
    head = nanscan.Site("8", "grad_output", ".out")
    assert len(monitor.history(head)["step"]) == 4
    first = {min(steps(name, "grad_output")) for name in map(str, range(8))}
    assert first == {0, 1, 2, 3}


class Head(nn.Module):
    """Returns a container, and so takes the other way into a hook."""

    def forward(self, x):
        return Outputs(x * 2)


class Outputs(dict):
    """A mapping that a loss can be made from."""

    def __init__(self, x):
        super().__init__(out=x)

    def sum(self):
        return self["out"].sum()

    def square(self):
        return self["out"].square()


@pytest.mark.parametrize("kinds", [KINDS, ["grad_output"]])
def test_what_gradient_hooks_cost_is_counted(kinds):
    model = Net()
    monitor = nanscan.enable(model, kinds=kinds, max_overhead=0.5)
    monitor._collector._meter.take()
    loss = model(batch()).sum()
    cost = monitor._collector._meter.take()
    assert cost.calls > cost.dispatch > 0
    assert cost.gradients == 0
    loss.backward()
    cost = monitor._collector._meter.take()
    assert cost.calls == 0
    hooks = 3 + ("output" not in kinds)  # without outputs, Net and fc2 both have one
    assert cost.gradients > hooks * monitor._collector._meter.gradient_dispatch > 0
    assert cost.total >= cost.gradients
    nanscan.enable(model, kinds=kinds)  # no budget, no clock
    model(batch()).sum().backward()
    assert monitor._collector._meter.take().gradients == 0


def test_a_flat_model_comes_close_to_its_budget():
    """All of its layers are sentinels; what may be thinned must be all that costs much."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(50)))
    monitor = nanscan.enable(model, kinds=KINDS, max_overhead=0.001)
    train(model, sgd(model), [batch(i) for i in range(30)])
    assert (monitor._schedule.period, monitor._schedule.slow_period) == (64, 64)
    assert monitor._collector.calls._gradients._nodes
    before = monitor._table.nodes[:]
    hooked = [n for n in before if n.kind == "grad_output"]
    counts = [len(monitor.history(n.site)["step"]) for n in hooked]
    assert sum(counts) < 30 * 50 / 2


def _steps_of(monitor, name):
    try:
        return monitor.history(nanscan.Site(name, "output"))["step"].tolist()
    except KeyError:
        return []


def test_a_finding_of_a_thinned_step_says_what_was_not_scanned():
    factor = [1.0]  # no parameter: a bad one would be found by itself
    parts = [nn.Linear(4, 4) for _ in range(6)]
    model = nn.Sequential(nn.Sequential(parts[0], Do(lambda x: x * factor[0]), *parts[2:]))
    monitor = nanscan.enable(model, action="log")
    infer(model, batch())  # in full: the order is known
    monitor._schedule.period = 3
    monitor._collector.set_turn(Turn(3, 1, slow=False))
    factor[0] = NAN
    infer(model, batch())
    first = next(f for f in monitor.findings if f.verdict == "origin")
    between = [str(site) for site in first.unscanned]
    assert between, first
    assert "unscanned" in str(first)
    assert first.how == "made here or where this step did not scan"
    scanned = {str(first.site), *between}
    assert "0.1 output" in scanned
    # The next steps are scanned in full.
    assert monitor._collector.turn == FULL


def test_a_parameter_that_is_read_in_a_part_that_a_thinned_step_did_not_scan():
    model = nn.Sequential(nn.Sequential(*(nn.Linear(4, 4) for _ in range(6))))
    monitor = nanscan.enable(model, action="log")
    infer(model, batch())
    monitor._schedule.period = 3
    monitor._collector.set_turn(Turn(3, 1, slow=False))
    with torch.no_grad():
        model[0][1].bias[0] = NAN
    infer(model, batch())
    first = monitor.findings[0]
    assert (str(first.site), first.verdict) == ("0.1.bias param", "origin")
    assert first.how == "changed between two steps, by no optimizer"


def test_a_budget_is_measured_and_told():
    model = Net()
    with nanscan.watch(model, max_overhead=0.001) as monitor:
        train(model, sgd(model), [batch(i) for i in range(30)])
        coverage = monitor.coverage()
    assert coverage.overhead > 0
    assert coverage.thinned  # steps of microseconds cannot bear it
    with nanscan.watch(model) as monitor:
        infer(model, batch())
        assert math.isnan(monitor.coverage().overhead)


def test_more_can_be_asked_for():
    model = Net()
    monitor = nanscan.enable(model, every_n_steps=100)
    infer(model, batch())
    monitor.scan_fully(2)
    infer(model, *[batch(i) for i in range(4)])
    assert monitor.history(nanscan.Site("fc1", "output"))["step"].tolist() == [0, 1, 2]


# -- filters ---------------------------------------------------------------------------------------


@SCOPES
def test_include_and_exclude(scope):
    def model():
        return nn.ModuleDict({"enc": Net(), "dec": Net()})

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = model()

        def forward(self, x):
            return self.parts["dec"](self.parts["enc"](x))

    def seen(**options):
        both = Both()
        with nanscan.watch(both if scope == "model" else None, **options) as monitor:
            train(both, sgd(both), [batch()])
            return names(monitor), monitor.coverage().left_out, monitor.steps

    sites, left_out, steps = seen(include="parts.dec")
    assert steps == 1
    assert {"parts.dec.fc1 output", "parts.dec.fc1.weight grad", "loss"} <= sites
    assert not any("enc" in site for site in sites)
    assert "parts.enc.fc1" in left_out
    sites, _, _ = seen(exclude=["*.fc1", nn.Tanh])
    assert "parts.dec.fc2.weight param" in sites
    assert not any("fc1" in site or "act" in site for site in sites)
    sites, _, _ = seen(exclude="*.bias")
    assert "parts.enc.fc1.weight grad" in sites
    assert not any("bias" in site for site in sites)
    sites, _, _ = seen(include=nn.Linear, exclude="parts.enc")
    assert "parts.dec.fc1 output" in sites
    assert not any("enc" in site or "act" in site for site in sites)


@pytest.mark.parametrize("option", ["include", "exclude"])
def test_a_filter_of_another_type(option):
    with pytest.raises(TypeError, match="filters are names or types of modules, got 3"):
        nanscan.enable(**{option: [3]})


def test_ignored_findings():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    bad = torch.full((2, 4), NAN)
    for ignore in (["0", "1", "Sequential"], torch.float32, ["kind:input", "kind:output"]):
        with nanscan.watch(model, ignore=ignore) as monitor:
            infer(model, bad)
            assert monitor.findings == []
            assert calls(monitor)
    with nanscan.watch(model, action="log", ignore=lambda site, _: site.kind == "input") as monitor:
        infer(model, bad)
        assert [str(f.site) for f in monitor.findings] == ["0 output", "1 output"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every_n_steps": 0}, "every_n_steps must be a positive number of steps, got 0"),
        ({"warmup_steps": -1}, "warmup_steps must be a number of steps, got -1"),
        ({"max_overhead": 0}, r"max_overhead must be in \(0, 1\), got 0"),
        ({"max_overhead": 1.5}, r"max_overhead must be in \(0, 1\), got 1.5"),
    ],
)
def test_numbers_out_of_range(options, message):
    with pytest.raises(ValueError, match=message):
        nanscan.enable(**options)
