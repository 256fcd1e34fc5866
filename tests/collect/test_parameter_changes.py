"""Gradients and parameters that other code changes between two scans."""

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import nanscan
from helpers.models import (
    INF,
    NAN,
    SCOPES,
    Do,
    Net,
    batch,
    enable,
    set_nan,
    sgd,
    train,
    verdicts,
)
from nanscan._collect.schedule import Turn
from nanscan._data.site import DEFAULT_KINDS, KINDS

pytestmark = pytest.mark.usefixtures("one_thread")


# -- gradients and parameters that others change ---------------------------------------------------


@pytest.mark.parametrize("kinds", [DEFAULT_KINDS, KINDS], ids=["default", "all"])
@SCOPES
def test_clipping_does_not_hide_where_a_gradient_went_bad(scope, kinds):
    """It multiplies all gradients by their norm, and so one NaN makes all of them NaN."""
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
    monitor = enable(scope, model, kinds=kinds, action="log")
    optimizer = sgd(model)

    def step():
        optimizer.zero_grad()
        model(batch()).square().sum().backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    step()
    model[1].weight.register_hook(set_nan)
    step()
    first, *others = monitor.findings
    assert (first.step, str(first.site), first.verdict) == (1, "1.weight grad", "origin")
    assert {f.verdict for f in others} == {"propagated"}


@pytest.mark.parametrize("kinds", [DEFAULT_KINDS, KINDS], ids=["default", "all"])
@SCOPES
def test_clipping_does_not_hide_what_backward_made(scope, kinds):
    model = nn.Sequential(
        nn.Linear(4, 4), nn.Linear(4, 4), Do(lambda x: (x * 0).sqrt()), nn.Linear(4, 4)
    )
    monitor = enable(scope, model, kinds=kinds, action="log")
    optimizer = sgd(model)
    model(batch()).square().sum().backward()
    clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    first, *others = monitor.findings
    expected = "1 grad_output" if kinds == KINDS else "1.weight grad"
    assert (str(first.site), first.verdict) == (expected, "origin")
    assert {f.verdict for f in others} == {"propagated"}


@SCOPES
def test_gradients_that_are_clipped_by_value(scope):
    model = Net()
    monitor = enable(scope, model, kinds=KINDS, action="log")
    optimizer = sgd(model)
    model.fc1.bias.register_hook(set_nan)
    model(batch()).sum().backward()
    clip_grad_value_(model.parameters(), 1.0)
    optimizer.step()
    assert verdicts(monitor) == [
        (0, "fc1.bias grad", "origin"),
        (0, "fc1.bias param", "propagated"),
    ]


@SCOPES
def test_a_parameter_that_the_user_spoils_between_steps(scope):
    """As a bad checkpoint that is loaded in the course of training does."""
    model = Net()
    monitor = enable(scope, model, action="log")
    optimizer = sgd(model)
    train(model, optimizer, [batch()])
    with torch.no_grad():
        model.fc2.weight[0, 0] = NAN
    train(model, optimizer, [batch(1)])
    first = monitor.findings[0]
    assert first.step == 1
    if str(first.site) == "fc2.weight param":
        assert first.verdict == "origin"
    else:
        assert str(first.site) == "fc2 output"
        given = {str(site): stats for site, stats in first.given}
        assert given["fc2.weight param"].nan_count == 1


def first_two(monitor):
    return [(str(f.site), f.verdict) for f in monitor.findings[:2]]


@SCOPES
def test_what_a_spoiled_parameter_makes_is_handed_on(scope):
    model = Net()
    monitor = enable(scope, model, action="log", kinds=KINDS)
    optimizer = sgd(model, momentum=0.9)
    train(model, optimizer, [batch()])
    with torch.no_grad():
        model.fc2.weight[1, 2] = INF
    train(model, optimizer, [batch(1)])
    first, second, *others = monitor.findings
    assert (first.step, str(first.site), first.verdict) == (1, "fc2.weight param", "origin")
    assert first.how == "changed between two steps, by no optimizer"
    assert (first.stats.posinf_count, first.stats.first_nonfinite) == (1, (1, 2))
    assert (str(second.site), second.verdict) == ("fc2 output", "propagated")
    given = {str(site): stats for site, stats in second.given}
    assert given["fc2.weight param"].posinf_count == 1
    assert {f.verdict for f in others} == {"propagated"}
    assert "fc2.weight param" not in {str(f.site) for f in others}
    assert not monitor.healthy


class Shifted(nn.Module):
    """Uses its own parameter, and that of a module it never calls, in its forward."""

    def __init__(self, function=lambda x: x):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.shift = nn.Parameter(torch.zeros(4))
        self.never = nn.Linear(4, 4)
        self.function = function

    def forward(self, x):
        x = self.function(x + self.shift)
        return self.inner(nn.functional.linear(x, self.never.weight))


@pytest.mark.parametrize("name", ["inner.bias", "shift", "never.weight"])
@pytest.mark.parametrize("kinds", [DEFAULT_KINDS, ("output", "param"), ("grad", "param")])
@SCOPES
def test_a_spoiled_parameter_of_any_place_is_named(scope, name, kinds):
    model = nn.Sequential(nn.Linear(4, 4), Shifted(), nn.Tanh())
    monitor = enable(scope, model, action="log", kinds=kinds)
    optimizer = sgd(model)
    train(model, optimizer, [batch()])
    with torch.no_grad():
        model[1].get_parameter(name).view(-1)[0] = NAN
    train(model, optimizer, [batch(1)])
    first = monitor.findings[0]
    assert (str(first.site), first.verdict) == (f"1.{name} param", "origin")
    # What the optimizer makes of bad gradients is its doing where nobody looks at these.
    later = [f for f in monitor.findings[1:] if "grad" in kinds or f.site.kind != "param"]
    assert {f.verdict for f in later} == {"propagated"}


@SCOPES
def test_a_module_that_makes_nan_of_good_parameters_stays_the_origin(scope):
    model = nn.Sequential(nn.Linear(4, 4), Shifted(), nn.Tanh())
    monitor = enable(scope, model, action="log", kinds=KINDS)
    optimizer = sgd(model)
    train(model, optimizer, [batch()])
    model[1].function = lambda x: x / 0
    loss = model(batch(1)).sum()
    with torch.no_grad():  # after the fact
        model[1].shift.fill_(NAN)
    loss.backward()
    optimizer.step()
    assert first_two(monitor) == [("1.inner input[0]", "origin"), ("1.inner output", "propagated")]
    assert "changed" not in "".join(f.how for f in monitor.findings)


@SCOPES
def test_what_an_optimizer_made_bad_keeps_its_verdict(scope):
    model = Net()
    monitor = enable(scope, model, action="log")
    optimizer = torch.optim.SGD(model.parameters(), lr=INF)
    train(model, optimizer, [batch(), batch(1)])
    first = monitor.findings[0]
    assert (first.step, first.site.kind, first.verdict) == (0, "param", "origin")
    assert first.how == "made here"
    bad = [f for f in monitor.findings if f.site.kind == "param"]
    assert len(bad) == len({f.site for f in bad}) == 4
    assert not any("changed" in f.how for f in bad)
    assert {f.verdict for f in monitor.findings if f.step == 1} <= {"propagated"}


@SCOPES
def test_a_mask_makes_no_parameter_a_suspect(scope):
    model = nn.MultiheadAttention(4, 1, batch_first=True)
    mask = torch.triu(torch.full((3, 3), -INF), 1)
    monitor = enable(scope, model, action="log")
    x = torch.randn(2, 3, 4)

    def step():
        optimizer.zero_grad()
        model(x, x, x, attn_mask=mask, need_weights=False)[0].sum().backward()
        optimizer.step()

    optimizer = sgd(model)
    step()
    assert monitor.findings == []
    with torch.no_grad():
        model.out_proj.bias[0] = NAN  # used, though never called
    step()
    assert first_two(monitor)[0] == ("out_proj.bias param", "origin")


@pytest.mark.parametrize("grad", [True, False])
@SCOPES
def test_parameters_spoiled_and_mended_between_forwards(scope, grad):
    model = Net()
    monitor = enable(scope, model, action="log")
    with torch.set_grad_enabled(grad):
        model(batch())
        for seed in (1, 2):
            with torch.no_grad():
                model.fc1.bias[0] = NAN
            model(batch(seed))
            model(batch(seed + 1))
            assert not monitor.healthy
            with torch.no_grad():
                model.fc1.bias[0] = 0
            model(batch(seed + 2))
            assert monitor.healthy
    named = [f for f in monitor.findings if f.verdict == "origin"]
    assert [str(f.site) for f in named] == ["fc1.bias param"] * 2
    assert [f.step for f in named] == [1, 4]
    assert [f.step for f in monitor.findings if f.verdict == "recovered"] == [3, 6]


@SCOPES
def test_a_parameter_spoiled_amid_a_step_is_seen_by_its_gradients(scope):
    model = Net()
    monitor = enable(scope, model, action="log", kinds=KINDS)
    optimizer = sgd(model)
    train(model, optimizer, [batch()])
    optimizer.zero_grad()
    loss = model(batch(1)).sum()
    model.fc2.weight.data[0, 0] = NAN
    loss.backward()
    optimizer.step()
    first = monitor.findings[0]
    assert (str(first.site), first.verdict) == ("fc2.weight param", "origin")
    assert "origin" not in {f.verdict for f in monitor.findings[1:]}


def test_a_step_after_which_parameters_were_not_scanned():
    model = Net()
    monitor = nanscan.enable(model, action="log", kinds=("output", "param"))
    optimizer = sgd(model)
    train(model, optimizer, [batch()])
    monitor._collector.set_turn(Turn(1, 1, slow=False))
    model(batch(1)).sum().backward()
    model.fc2.bias.grad.fill_(NAN)
    optimizer.step()
    assert monitor.findings == []
    train(model, optimizer, [batch(2)])
    first = monitor.findings[0]
    assert (first.step, str(first.site), first.verdict) == (2, "fc2.bias param", "origin")
    assert first.how == "it went bad in a step after which it was not scanned"


def test_a_spoiled_parameter_is_raised_before_what_it_made():
    model = Net()
    nanscan.enable(model, action="raise")
    optimizer = sgd(model)
    train(model, optimizer, [batch()])
    with torch.no_grad():
        model.fc1.weight[0, 0] = NAN
    with pytest.raises(nanscan.NonFiniteError, match=r"fc1\.weight param") as caught:
        train(model, optimizer, [batch(1)])
    assert caught.value.finding.verdict == "origin"
