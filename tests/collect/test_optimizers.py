"""Gradients and parameters at the step of an optimizer."""

import gc

import pytest
import torch
from torch import nn

import nanscan
from helpers.models import (
    COMMON_KINDS,
    NAN,
    SCOPES,
    Net,
    alone,
    batch,
    calls,
    enable,
    train,
    verdicts,
)

# -- optimizers ------------------------------------------------------------------------------------


@SCOPES
def test_gradients_before_and_parameters_after_the_step(scope):
    model = nn.Linear(2, 1, bias=False)
    nn.init.constant_(model.weight, 3.0)
    monitor = enable(scope, model, kinds=COMMON_KINDS)
    optimizer = torch.optim.SGD(model.parameters(), 0.5, momentum=0.9)
    train(model, optimizer, [torch.tensor([[1.0, 2.0]])] * 2, lambda out: out.sum())
    name = alone(scope, model)
    grad = monitor.history(nanscan.Site(name, "grad"))
    assert (grad["min"].tolist(), grad["max"].tolist()) == ([1.0, 1.0], [2.0, 2.0])
    param = monitor.history(nanscan.Site(name, "param"))
    assert param["calls"].tolist() == [1, 1]
    assert param["min"].tolist() == [2.0, pytest.approx(0.1)]
    momentum = monitor.history(nanscan.Site(name, "state", "momentum_buffer"))
    assert momentum["max"].tolist() == [2.0, pytest.approx(3.8)]


def test_only_the_kinds_asked_for_are_scanned():
    for kind, sites in [
        ("input", {"Net input[0]"}),
        ("output", {"fc1 output", "act output", "fc2 output"}),
        ("grad", {f"{p} grad" for p in ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias")}),
        ("param", {f"{p} param" for p in ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias")}),
    ]:
        model = Net()
        monitor = nanscan.enable(model, kinds=kind)
        train(model, torch.optim.SGD(model.parameters(), 0.1), [batch()])
        seen = set(calls(monitor))
        if kind == "input":
            assert "Net input[0]" in seen
            assert {site.split()[1].partition("[")[0] for site in seen} == {"input"}
        else:
            assert seen == sites
        monitor.close()


@SCOPES
def test_several_optimizers_of_one_model(scope):
    model = Net()
    monitor = enable(scope, model)
    first = torch.optim.SGD(model.fc1.parameters(), 0.1)
    second = torch.optim.Adam(model.fc2.parameters(), 0.1)
    model(batch()).sum().backward()
    first.step()
    assert {s for s in calls(monitor) if "param" in s} == {"fc1.weight param", "fc1.bias param"}
    second.step()
    assert monitor.steps == 1
    parts = {site: n for site, n in calls(monitor).items() if "grad" in site or "param" in site}
    assert parts == {
        f"{layer}.{name} {kind}": 1
        for layer in ("fc1", "fc2")
        for name in ("weight", "bias")
        for kind in ("grad", "param")
    }


@SCOPES
def test_closures(scope):
    model = Net()
    monitor = enable(scope, model)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    x = batch()

    def closure():
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
    rows = calls(monitor)
    assert monitor.steps == 2
    assert rows["fc1.weight param"] == 1
    assert rows["fc2 output"] >= 3
    assert not any("LBFGS" in site for site in monitor.coverage().sites)
    assert monitor.findings == []


@SCOPES
def test_sparse_gradients(scope):
    model = nn.Embedding(5, 3, sparse=True)
    monitor = enable(scope, model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    train(model, optimizer, [torch.tensor([1, 2])], lambda out: 7 * out.sum())
    name = alone(scope, model)
    history = monitor.history(nanscan.Site(name, "grad", ".values"))
    assert history["max"].tolist() == [7.0]
    assert monitor.coverage().skipped == {}
    with pytest.warns(nanscan.NonFiniteWarning):
        train(model, optimizer, [torch.tensor([1, 2])], lambda out: NAN * out.sum())
    assert verdicts(monitor) == [
        (1, "loss", "origin"),
        (1, f"{name} grad.values", "propagated"),
        (1, f"{name} param", "propagated"),
    ]


@SCOPES
def test_a_parameter_without_gradient(scope):
    model = Net()
    model.fc1.requires_grad_(requires_grad=False)
    monitor = enable(scope, model)
    train(model, torch.optim.SGD(model.parameters(), 0.1), [batch()])
    rows = calls(monitor)
    assert "fc1.weight grad" not in rows
    assert rows["fc1.weight param"] == rows["fc2.weight grad"] == 1


@SCOPES
def test_a_parameter_replaced_in_model_and_optimizer_keeps_its_name(scope):
    model = Net()
    monitor = enable(scope, model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    train(model, optimizer, [batch()])
    model.fc1.weight = nn.Parameter(torch.full((4, 4), 5.0))
    optimizer.param_groups[0]["params"][0] = model.fc1.weight
    train(model, optimizer, [batch()])
    param = monitor.history(nanscan.Site("fc1.weight", "param"))
    assert param["step"].tolist() == [0, 1]
    assert param["max"][1] > 4.0
    assert set(calls(monitor)) >= {"fc1.weight grad", "fc2.bias param"}


def test_parameters_added_to_an_optimizer_are_seen():
    model = Net()
    monitor = nanscan.enable(model)
    optimizer = torch.optim.SGD(model.fc1.parameters(), 0.1)
    train(model, optimizer, [batch()])
    assert "fc2.weight param" not in calls(monitor)
    optimizer.add_param_group({"params": model.fc2.parameters(), "lr": 0.2})
    train(model, optimizer, [batch()])
    assert calls(monitor)["fc2.weight param"] == 1


def test_loose_parameters():
    latent = nn.Parameter(torch.full((3,), 2.0))
    optimizer = torch.optim.SGD([latent], 1.0)
    monitor = nanscan.enable()
    latent.square().sum().backward()
    optimizer.step()
    assert calls(monitor) == {
        "loss": 1,
        "SGD parameter 0 grad": 1,
        "SGD parameter 0 param": 1,
    }
    assert monitor.history(nanscan.Site("SGD parameter 0", "grad"))["max"].tolist() == [4.0]


def test_parameters_of_another_model_are_ignored():
    watched, other = Net(), Net()
    monitor = nanscan.enable(watched)
    train(other, torch.optim.SGD(other.parameters(), 0.1), [batch()])
    assert monitor.steps == 0
    both = torch.optim.SGD([*other.parameters(), *watched.parameters()], 0.1)
    train(lambda x: watched(x) + other(x), both, [batch()])
    rows = calls(monitor)
    assert sum("param" in site for site in rows) == 4
    assert sum("output" in site for site in rows) == 3


def test_a_parameter_that_is_gone_leaves_no_name_for_its_id():
    """Its id may be used again, by a parameter of anybody."""
    model = Net()
    monitor = nanscan.enable(model)
    weight = id(model.fc1.weight)
    assert monitor._registry._known(weight).name == "fc1.weight"
    model.fc1.weight = None
    gc.collect()
    assert monitor._registry._known(weight) is None


@pytest.fixture
def _swapping():
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


@SCOPES
@pytest.mark.usefixtures("_swapping")
def test_parameters_can_be_swapped_while_watched(scope):
    """Module.to swaps subclasses, or all when asked, and refuses what has weak references."""
    model = Net()
    monitor = enable(scope, model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    train(model, optimizer, [batch()])
    model.double()
    optimizer.zero_grad()
    model(batch().double()).sum().backward()
    optimizer.step()
    assert model.fc1.weight.dtype == torch.float64
    assert calls(monitor)["fc1.weight param"] == 1
    assert monitor.history(nanscan.Site("fc1.weight", "grad"))["step"].tolist() == [0, 1]


def test_a_replaced_parameter_keeps_its_name():
    model = Net()
    monitor = nanscan.enable(model)
    model.fc1.weight = nn.Parameter(torch.ones(4, 4))
    train(model, torch.optim.SGD(model.parameters(), 0.1), [batch()])
    assert calls(monitor)["fc1.weight grad"] == 1


@SCOPES
def test_accumulated_gradients_make_one_step(scope):
    model = Net()
    monitor = enable(scope, model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        for micro in range(3):
            model(batch(micro)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert monitor.steps == 2
    rows = calls(monitor)
    assert (rows["fc1 output"], rows["fc1.weight grad"], rows["fc1.weight param"]) == (3, 1, 1)


@SCOPES
def test_tied_weights_are_scanned_once_under_their_first_name(scope):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(5, 4)
            self.head = nn.Linear(4, 5, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x):
            return self.head(self.embed(x))

    model = Tied()
    monitor = enable(scope, model)
    train(model, torch.optim.SGD(model.parameters(), 0.1), [torch.tensor([1, 2])])
    rows = calls(monitor)
    assert rows["embed.weight param"] == rows["embed.weight grad"] == 1
    assert "head.weight param" not in rows


def test_an_optimizer_around_another_makes_one_step():
    class Outer(torch.optim.Optimizer):
        def __init__(self, inner):
            super().__init__(inner.param_groups, {})
            self.inner = inner

        def step(self, closure=None):
            return self.inner.step(closure)

    model = Net()
    monitor = nanscan.enable(model)
    train(model, Outer(torch.optim.SGD(model.parameters(), 0.1)), [batch(), batch()])
    assert monitor.steps == 2
    assert calls(monitor)["fc1.weight param"] == 1
