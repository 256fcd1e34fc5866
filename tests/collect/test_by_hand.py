"""Training without an optimizer: `p -= lr * p.grad`, by code that nanscan does not see."""

import gc

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

import nanscan
from helpers.models import (
    INF,
    NAN,
    SCOPES,
    Net,
    batch,
    calls,
    enable,
    infer,
    sgd,
    train,
    verdicts,
)
from nanscan import Site
from nanscan._data.site import KINDS


@pytest.fixture(autouse=True)
def no_optimizers():
    """One of an earlier test would make a global monitor wait for it."""
    gc.collect()


def update(model, lr=0.1):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(lr * parameter.grad)
            parameter.grad = None


def step(model, x, clip=False, lr=0.1):
    model(x).square().mean().backward()
    if clip:
        clip_grad_norm_(model.parameters(), 1.0)
    update(model, lr)


def steps(monitor, name, kind):
    history = monitor.history(Site(name, kind))
    return dict(zip(history["step"].tolist(), history["calls"].tolist(), strict=True))


@pytest.mark.parametrize("clip", [False, True])
@SCOPES
def test_all_is_scanned_once_a_step(scope, clip):
    model = Net()
    monitor = enable(scope, model, kinds=KINDS)
    for seed in range(4):
        step(model, batch(seed), clip)
    monitor.flush()
    assert monitor.findings == []
    assert monitor.steps == 4
    once = dict.fromkeys(range(4), 1)
    for site in ("fc1.weight grad", "fc2.bias grad", "fc1.weight param", "fc2.bias param"):
        assert steps(monitor, *site.split()) == once
    # A first forward is taken for all of a step, until its backward begins.
    for site in ("fc1 output", "fc1 grad_output", "loss loss", "Net input"):
        name, kind = site.split()
        found = monitor.history(Site(name, kind, "[0]" if kind == "input" else ""))
        assert found["step"].tolist() == [0, 1, 2, 3]
        assert found["calls"].tolist() == [1] * 4


@SCOPES
def test_results_are_the_same(scope):
    def run(*, watched):
        torch.manual_seed(0)
        model = Net()
        if watched:
            enable(scope, model, kinds=KINDS)
        for seed in range(3):
            step(model, batch(seed))
        nanscan.disable()
        return list(model.parameters())

    assert all(map(torch.equal, run(watched=True), run(watched=False)))


@pytest.mark.parametrize("when", [0, 1, 3])
@SCOPES
def test_a_bad_gradient_is_an_origin(scope, when):
    model = Net()
    monitor = enable(scope, model, action="log")
    for seed in range(when):
        step(model, batch(seed))
    model.fc2.bias.register_hook(lambda grad: grad * NAN)
    loss = model(batch(when)).sum()
    assert monitor.findings == []
    loss.backward()
    assert verdicts(monitor) == [(when, "fc2.bias grad", "origin")]  # at once
    update(model)
    model(batch())
    assert verdicts(monitor)[1] == (when, "fc2.bias param", "propagated")
    assert verdicts(monitor)[2] == (when + 1, "fc2 output", "propagated")
    assert [v for *_, v in verdicts(monitor)].count("origin") == 1


@pytest.mark.parametrize("when", [0, 2])
@SCOPES
def test_a_parameter_that_the_update_spoils_is_an_origin(scope, when):
    model = Net()
    monitor = enable(scope, model, action="log")
    for seed in range(when):
        step(model, batch(seed))
    model(batch(when)).sum().backward()
    with torch.no_grad():
        model.fc2.bias.add_(INF)
    update(model)
    assert monitor.findings == []
    monitor.flush()
    assert verdicts(monitor) == [(when, "fc2.bias param", "origin")]
    model(batch())
    assert verdicts(monitor)[1] == (when + 1, "fc2 output", "propagated")


@pytest.mark.parametrize("when", [0, 2])
@SCOPES
def test_what_a_bad_forward_leads_to_is_handed_on(scope, when):
    model = nn.Sequential(nn.Linear(4, 4), Scale(), nn.Linear(4, 4))
    monitor = enable(scope, model, action="log", kinds=KINDS)
    for seed in range(when):
        step(model, batch(seed))
    model[1].factor = NAN
    out = model(batch(when))
    assert verdicts(monitor)[0] == (when, "1 output", "origin")  # at once
    out.sum().backward()
    update(model)
    monitor.flush()
    first, *others = monitor.findings
    assert str(first.site) == "1 output"
    assert {f.step for f in others} == {when}
    assert {f.verdict for f in others} <= {"propagated", "absorbed"}
    seen = {str(f.site) for f in others}
    assert {"loss", "0.weight grad", "0.weight param"} <= seen


class Scale(nn.Module):
    factor = 1.0

    def forward(self, x):
        return x * self.factor


@pytest.mark.parametrize("when", [0, 2])
@pytest.mark.parametrize("what", ["output", "grad", "param"])
@SCOPES
def test_verdicts_do_not_hang_on_when_they_come(scope, what, when):
    """On a device, a step is judged once its rows arrived."""
    model = nn.Sequential(nn.Linear(4, 4), Scale(), nn.Linear(4, 4))
    monitor = enable(scope, model, action="log", kinds=KINDS)
    for seed in range(when):
        step(model, batch(seed))
    if what == "output":
        model[1].factor = NAN
    if what == "grad":
        model[2].bias.register_hook(lambda grad: grad * NAN)
    step(model, batch(when), lr=INF if what == "param" else 0.1)
    monitor.flush()
    first, *others = monitor.findings
    site = {"output": "1 output", "grad": "2.bias grad", "param": "0.weight param"}[what]
    assert (first.step, str(first.site), first.verdict) == (when, site, "origin")
    assert {f.step for f in others} == {when}
    if what != "param":  # a factor of Inf makes each of them bad by itself
        assert {f.verdict for f in others} <= {"propagated", "absorbed"}


def test_the_action_is_taken_where_the_gradient_was_made():
    model = Net()
    nanscan.enable(model, action="raise")
    step(model, batch())
    model.fc1.bias.register_hook(lambda grad: grad * NAN)
    loss = model(batch(1)).sum()
    with pytest.raises(nanscan.NonFiniteError, match=r"fc1\.bias grad"):
        loss.backward()


def test_the_last_update_of_a_block_is_judged_when_that_ends():
    model = Net()
    with nanscan.watch(model, action="log") as monitor:
        step(model, batch())
        step(model, batch(1), lr=NAN)
    assert verdicts(monitor)[0] == (1, "fc1.weight param", "origin")
    assert {f.site.kind for f in monitor.findings} == {"param"}


@SCOPES
def test_an_optimizer_that_comes_later_takes_over(scope):
    model = Net()
    monitor = enable(scope, model, history=32)
    for seed in range(2):
        step(model, batch(seed))
    optimizer = sgd(model)
    before = monitor.steps
    train(model, optimizer, [batch(i) for i in range(3)])
    found = steps(monitor, "fc1.weight", "grad")
    assert all(count == 1 for number, count in found.items() if number > before + 1)
    found = steps(monitor, "fc1.weight", "param")
    assert set(found.values()) == {1}
    assert monitor.findings == []


@SCOPES
def test_what_autograd_grad_returns_is_not_seen(scope):
    model = Net()
    monitor = enable(scope, model)
    for seed in range(3):
        gradients = torch.autograd.grad(model(batch(seed)).sum(), list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.sub_(0.1 * gradient)
    assert monitor.steps == 3
    assert not any("grad" in site for site in monitor.coverage().sites)


@SCOPES
def test_a_backward_without_parameters_changes_nothing(scope):
    """As in the making of an adversarial example."""
    model = Net().requires_grad_(False)
    monitor = enable(scope, model)
    for seed in range(3):
        model(batch(seed).requires_grad_()).sum().backward()
    assert monitor.steps == 3


def test_steps_that_a_user_ends():
    model = Net()
    monitor = nanscan.enable(model, action="log")
    for seed in range(3):
        step(model, batch(seed))
        monitor.step()
    # The first forward ended a step before anyone could know.
    assert monitor.steps in (3, 4)
    assert len(steps(monitor, "fc1.weight", "grad")) == 3
    assert len(steps(monitor, "fc1.weight", "param")) == 3
    assert set(steps(monitor, "fc1.weight", "param").values()) == {1}


@SCOPES
def test_validation_between_steps(scope):
    model = Net()
    monitor = enable(scope, model, action="log")
    for seed in range(3):
        step(model, batch(seed))
        infer(model, batch(10), batch(11))
    assert monitor.steps == 3
    assert list(steps(monitor, "fc1.weight", "param").values()) == [1, 1, 1]
    with torch.no_grad():
        model(batch() * NAN)
    assert verdicts(monitor)[0] == (3, "Net input[0]", "propagated")


def test_accumulated_gradients_are_those_of_their_backward():
    model = Net()
    monitor = nanscan.enable(model, history=32)
    for seed in range(4):
        model(batch(seed)).sum().backward()
        if seed % 2:
            update(model)
    monitor.flush()
    assert steps(monitor, "fc1.weight", "grad") == dict.fromkeys(range(4), 1)


def test_two_backwards_of_one_forward():
    model = Net()
    monitor = nanscan.enable(model)
    for seed in range(2):
        loss = model(batch(seed)).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        update(model)
    monitor.flush()
    assert monitor.steps == 2
    assert calls(monitor)["fc1.weight grad"] == 2
    assert steps(monitor, "fc1.weight", "param") == {0: 1, 1: 1}


def test_only_some_steps_are_scanned():
    model = Net()
    monitor = nanscan.enable(model, every_n_steps=2)
    for seed in range(6):
        step(model, batch(seed))
    monitor.flush()
    for kind in ("grad", "param"):  # of step 0, only the first forward was known to be one
        assert set(steps(monitor, "fc1.weight", kind)) - {0} == {2, 4}


def test_no_kind_no_scan():
    model = Net()
    monitor = nanscan.enable(model, kinds=("output", "loss"))
    for seed in range(3):
        step(model, batch(seed))
    assert not any(s.endswith((" grad", " param")) for s in monitor.coverage().sites)


def test_another_models_backward_is_none_of_ours():
    model, other = Net(), Net()
    monitor = nanscan.enable(model)
    infer(model, batch())
    step(other, batch())
    infer(model, batch())
    assert monitor.steps == 2
    assert not monitor._collector.tracker.is_by_hand


def test_a_step_is_saved_with_its_inputs(tmp_path):
    model = Net()
    nanscan.enable(model, action="log", save_dir=tmp_path)
    step(model, batch())
    model.fc2.bias.register_hook(lambda grad: grad * NAN)
    step(model, batch(1))
    (folder,) = tmp_path.iterdir()
    saved = nanscan.load_saved(folder)
    assert folder.name == "step-1-rank-0"
    assert torch.equal(saved.args[0], batch(1))
