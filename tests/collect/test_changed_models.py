"""A model that changes after `enable`: layers are replaced, adapters added, modules compiled."""

import pytest
import torch
from torch import nn

import nanscan
from helpers.models import NAN, SCOPES, Do, Net, batch, calls, enable, infer, sgd, train, verdicts


class Adapted(nn.Module):
    """LoRA around a layer."""

    def __init__(self, base):
        super().__init__()
        self.base, self.down, self.up = base, nn.Linear(4, 2), nn.Linear(2, 4)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class Lit(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 4)

    def training_step(self, x):
        return self.net(x).sum()


@SCOPES
def test_a_replaced_layer_is_watched_from_its_first_call(scope):
    model = Net()
    monitor = enable(scope, model, action="log")
    infer(model, batch())
    model.act = Do(lambda x: x / 0)
    infer(model, batch())
    assert verdicts(monitor)[0] == (1, "act output", "origin")
    assert monitor.coverage().not_called == ()


@SCOPES
def test_a_layer_replaced_before_the_first_call(scope):
    model = Net()
    monitor = enable(scope, model, action="log")
    model.act = nn.Sequential(nn.Tanh(), Do(lambda x: x * NAN))
    infer(model, batch())
    assert verdicts(monitor)[0] == (0, "act.1 output", "origin")


@SCOPES
def test_adapters_with_an_optimizer_of_their_own(scope):
    model = Net()
    model.requires_grad_(requires_grad=False)
    monitor = enable(scope, model, action="log")
    model.fc1 = Adapted(model.fc1)
    optimizer = sgd(model.fc1.up)
    train(model, optimizer, [batch(), batch(1)])
    assert monitor.steps == 2
    rows = calls(monitor)
    assert rows["fc1.down output"] == rows["fc1.up.weight grad"] == rows["fc1.up.weight param"] == 1
    assert monitor.coverage().not_called == ()
    model.fc1.up.weight.register_hook(lambda gradient: gradient * NAN)
    train(model, optimizer, [batch()])
    assert verdicts(monitor)[0] == (2, "fc1.up.weight grad", "origin")


def test_parameters_that_the_model_gets_from_an_optimizer_that_has_stepped():
    model, layer = Net(), nn.Linear(4, 4)
    monitor = nanscan.enable(model)
    optimizer = torch.optim.SGD([*model.parameters(), *layer.parameters()], 0.1)
    train(model, optimizer, [batch()])
    model.act = layer
    train(model, optimizer, [batch()])
    assert calls(monitor)["act.weight grad"] == calls(monitor)["act.weight param"] == 1


@SCOPES
def test_a_new_part_of_a_container_that_never_runs(scope):
    model = Lit()
    monitor = enable(scope, model, action="log")
    optimizer = sgd(model)
    model.training_step(batch()).backward()
    optimizer.step()
    model.net = nn.Sequential(nn.Linear(4, 4), Do(lambda x: x * NAN))
    model.training_step(batch()).backward()
    sgd(model).step()
    assert verdicts(monitor)[0] == (1, "net.1 output", "origin")


def test_not_called_lists_what_the_model_has_now():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    monitor = nanscan.enable(model)
    del model[1]
    model.append(nn.Tanh())
    model.append(nn.Dropout())
    infer(model[0], batch())
    assert monitor.coverage().not_called == ("Sequential", "1", "2")


def test_modules_that_are_no_part_of_the_model_stay_unwatched():
    other = nn.Linear(4, 4)

    def function(x):
        return nn.Hardtanh()(other(x))

    model = nn.Sequential(nn.Linear(4, 4), Do(function))
    monitor = nanscan.enable(model, kinds=("input", "output"))
    looks = []
    rescan = monitor._registry.rescan
    monitor._registry.rescan = lambda: (looks.append(1), rescan())
    infer(model, *[batch()] * 5)
    infer(other, batch())
    assert {site.split()[0] for site in monitor.coverage().sites} == {"Sequential", "0", "1"}
    assert len(looks) <= 4  # one a class, one for optimizers, and that of coverage


@pytest.mark.parametrize("what", ["model", "layer"])
def test_compiled_in_place(what):
    model = Net()
    monitor = nanscan.enable(model)
    optimizer = sgd(model)
    train(model, optimizer, [batch()])
    (model if what == "model" else model.fc1).compile(backend="eager")
    train(model, optimizer, [batch(), batch(1)])
    assert monitor.steps == 3
    assert monitor.history(nanscan.Site("fc2.weight", "grad"))["step"].tolist() == [0, 1, 2]
