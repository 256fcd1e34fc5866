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


class Squash(nn.Module):
    """Makes a module anew in each forward, and calls its own parts."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(4, 4)])

    def forward(self, x):
        x = nn.Hardtanh()(x)
        for part in self.parts:
            x = part(x)
        return x

    def encode(self, x):
        return self.parts[-1](x)


@pytest.mark.parametrize("how", ["append", "insert", "replace", "assign"])
@SCOPES
def test_a_part_of_a_class_that_was_foreign(scope, how):
    """Modules of its class and caller that are no parts have run before."""
    model = nn.Sequential(Squash(), nn.Linear(4, 4))
    monitor = enable(scope, model, action="log")
    infer(model, batch(), batch())
    part = nn.Hardtanh()
    part.register_forward_hook(lambda *_: torch.full((3, 4), NAN))
    parts = model[0].parts
    {
        "append": lambda: parts.append(part),
        "insert": lambda: parts.insert(0, part),
        "replace": lambda: setattr(model[0], "parts", nn.ModuleList([nn.Linear(4, 4), part])),
        "assign": lambda: parts.__setitem__(0, part),
    }[how]()
    infer(model, batch())
    number = 1 if how in ("append", "replace") else 0
    assert verdicts(monitor)[0] == (2, f"0.parts.{number} output", "origin")


def test_a_part_that_ran_alone_before():
    model = nn.Sequential(Squash(), nn.Linear(4, 4))
    monitor = nanscan.enable(model, action="log")
    part = Do(lambda x: x * NAN)
    infer(part, torch.zeros(1))
    infer(model, batch())
    infer(part, torch.zeros(1))
    assert verdicts(monitor) == []
    model[0].parts.append(part)
    infer(model, batch())
    assert verdicts(monitor)[0] == (1, "0.parts.1 output", "origin")


@SCOPES
def test_a_new_part_that_a_method_calls_after_the_model_ran(scope):
    model = Squash()
    monitor = enable(scope, model, action="log")
    infer(model, batch())
    model.parts.append(Do(lambda x: x * NAN))
    with torch.no_grad():
        model.encode(batch())
    assert verdicts(monitor)[0][1:] == ("parts.1 output", "origin")


@SCOPES
def test_what_an_adapter_wraps_has_the_name_of_its_new_place(scope):
    model = Net()
    monitor = enable(scope, model, action="log")
    train(model, sgd(model), [batch()])
    model.fc1 = Adapted(model.fc1)
    optimizer = sgd(model)
    train(model, optimizer, [batch(), batch()])
    assert {name for name, _ in model.named_parameters()} == {
        site.removesuffix(" grad") for site in calls(monitor) if site.endswith(" grad")
    }
    assert monitor.history("fc1.base.weight grad")["step"].tolist() == [0, 1, 2]
    assert monitor.history("fc1.weight grad")["step"].tolist() == [0, 1, 2]
    assert calls(monitor)["fc1 output"] == calls(monitor)["fc1.base output"] == 1


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


@pytest.mark.parametrize("what", ["model", "layer"])
@pytest.mark.parametrize("scope", ["model", "all"])
def test_a_parameter_spoiled_after_the_model_was_compiled_in_place(scope, what):
    model = Net()
    monitor = nanscan.enable(model if scope == "model" else None, action="log")
    optimizer = sgd(model)
    train(model, optimizer, [batch()])
    (model if what == "model" else model.fc1).compile(backend="eager")
    train(model, optimizer, [batch(), batch()])
    with torch.no_grad():
        model.fc1.weight[0, 0] = NAN
    train(model, optimizer, [batch()])
    monitor.flush()
    assert str(monitor.findings[0].site) == "fc1.weight param"
