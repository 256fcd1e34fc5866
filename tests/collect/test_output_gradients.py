"""Gradients of outputs: those of autograd, whatever becomes of the output."""

import gc
import weakref

import pytest
import torch
from torch import nn

import nanscan
from helpers.models import (
    SCOPES,
    Do,
    Net,
    batch,
    calls,
    enable,
    history,
    infer,
    sgd,
    sites,
    train,
)
from nanscan import Site
from nanscan._data.site import KINDS

pytestmark = pytest.mark.usefixtures("one_thread")


# -- gradients of outputs --------------------------------------------------------------------------


def _gradient_at(module):
    """A list that gets the gradients that reach a module's output."""
    seen = []
    module.register_forward_hook(lambda _m, _a, out: out.register_hook(seen.append) and None)
    return seen


@SCOPES
def test_gradients_of_outputs_are_those_of_autograd(scope):
    model = Net()
    right = {name: _gradient_at(model.get_submodule(name)) for name in ("fc1", "act", "fc2")}
    monitor = enable(scope, model, kinds="grad_output")
    train(model, sgd(model), [batch(i) for i in range(3)])
    assert sites(monitor) == {f"{name} grad_output" for name in right}
    for name, gradients in right.items():
        found = history(monitor, name, "grad_output")
        assert found["calls"].tolist() == [1, 1, 1]
        assert found["max"].tolist() == [g.max().item() for g in gradients]
        assert found["min"].tolist() == [g.min().item() for g in gradients]


def set_first(x):
    x[0] = 0.5


INPLACE = {
    "relu_": torch.relu_,
    "add_": lambda x: x.add_(1),
    "mul_": lambda x: x.mul_(torch.arange(1.0, 5.0)),
    "item": set_first,
    "masked_fill_": lambda x: x.masked_fill_(x.detach() > 0, 2.0),
    "copy_": lambda x: x[1:].copy_(x[:-1].clone()),
    "t_": lambda x: x.t_(),
    "part": lambda x: x[:, 1].mul_(3),
    "view": lambda x: x.view(-1).clamp_(-0.1, 0.1),
    "detached": lambda x: x.detach().mul_(1.0),
    "data": lambda x: x.data.mul_(2.0),
}


@pytest.mark.parametrize("output", ["linear", "view", "tuple"])
@pytest.mark.parametrize("change", INPLACE.values(), ids=list(INPLACE))
@SCOPES
def test_outputs_may_be_changed_in_place(scope, change, output):
    class Changes(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)
            self.pick = {
                "linear": nn.Identity(),
                "view": nn.Flatten(),
                "tuple": Do(lambda x: (x * 1, x * 2)),
            }[output]

        def forward(self, x):
            x = self.pick(self.fc(x))
            x = x[0] if output == "tuple" else x
            change(x)
            return x * x

    def run(*, watched):
        torch.manual_seed(0)
        model = Changes()
        monitor = enable(scope, model, kinds=KINDS) if watched else None
        optimizer = sgd(model)
        train(model, optimizer, [batch(), batch(1)])
        nanscan.disable()
        return monitor, [p.grad for p in model.parameters()]

    _, expected = run(watched=False)
    monitor, gradients = run(watched=True)
    assert all(map(torch.equal, gradients, expected))
    assert monitor.findings == []
    assert history(monitor, "fc", "grad_output")["step"].tolist() == [0, 1]


@SCOPES
def test_an_output_and_what_it_became_in_place_have_gradients_of_their_own(scope):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 1))
    monitor = enable(scope, model, kinds=KINDS)
    train(model, sgd(model), [batch(), batch(1)], lambda out: out.sum())
    with torch.no_grad():
        positive = model[0](batch(1)) > 0
    assert positive.any()
    assert not positive.all()
    before, after = history(monitor, "0", "grad_output"), history(monitor, "1", "grad_output")
    assert before["calls"].tolist() == after["calls"].tolist() == [1, 1]
    assert before["absmax"].tolist() == after["absmax"].tolist()
    assert (after["min"] * after["max"] != 0).all()
    assert (before["min"] * before["max"] == 0).any() or (before["min"] < 0).any()


@SCOPES
def test_gradients_of_the_parts_of_a_nested_output(scope):
    class Parts(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            x = self.fc(x)
            return {"a": x * 2, "b": (x * 3, x.detach(), x.argmax())}

    model = nn.Sequential(Parts(), Do(lambda d: d["a"].sum() + 5 * d["b"][0].sum()))
    monitor = enable(scope, model, kinds="grad_output")
    train(model, sgd(model), [batch(), batch(1)], lambda out: out)
    assert calls(monitor) == {
        "0.fc grad_output": 1,
        "0 grad_output.a": 1,
        "0 grad_output.b[0]": 1,
        "1 grad_output": 1,
    }
    assert history(monitor, "0", "grad_output", ".a")["max"].tolist() == [1, 1]
    assert history(monitor, "0", "grad_output", ".b[0]")["max"].tolist() == [5, 5]
    assert history(monitor, "0.fc", "grad_output")["max"].tolist() == [17, 17]


@SCOPES
def test_two_backwards_through_one_forward(scope):
    model = Net()
    monitor = enable(scope, model, kinds=("grad_output", "loss"))
    optimizer = sgd(model)
    for _ in range(2):
        out = model(batch())
        out.sum().backward(retain_graph=True)
        (3 * out.sum()).backward()
        optimizer.step()
    found = history(monitor, "fc2", "grad_output")
    assert (found["calls"].tolist(), found["max"].tolist()) == ([2, 2], [3, 3])
    assert history(monitor, "loss", "loss")["calls"].tolist() == [2, 2]


@SCOPES
def test_gradients_of_gradients(scope):
    def run(*, watched):
        torch.manual_seed(0)
        model = Net()
        monitor = enable(scope, model, kinds=KINDS) if watched else None
        optimizer = sgd(model)
        for seed in range(3):
            optimizer.zero_grad()
            x = batch(seed).requires_grad_()
            out = model(x).sum()
            (gradient,) = torch.autograd.grad(out, x, create_graph=True)
            (out + gradient.square().sum()).backward()
            optimizer.step()
        nanscan.disable()
        return monitor, [p.grad for p in model.parameters()]

    _, expected = run(watched=False)
    monitor, gradients = run(watched=True)
    assert all(map(torch.equal, gradients, expected))
    assert history(monitor, "fc1", "grad_output")["step"].tolist() == [0, 1, 2]
    assert monitor.findings == []


@pytest.mark.parametrize("early", [False, True])
@SCOPES
def test_hooks_of_a_user_on_an_output_keep_their_order(scope, early):
    order, outputs = [], []

    def hook(name, factor):
        return lambda gradient: order.append(name) or gradient * factor

    def keep(_module, _args, out):
        outputs.append(out)
        if early:
            out.register_hook(hook("early", 2))

    def run():
        order.clear()
        model.zero_grad()
        loss = model(batch()).sum()
        out = outputs.pop()
        assert (out._backward_hooks is None) is not early
        out.register_hook(hook("late", 3))
        with out.register_hook(hook("gone", 5)):
            pass
        out.register_hook(hook("last", 7))
        out.retain_grad()
        loss.backward(retain_graph=True)
        loss.backward()
        return order[:], [out.grad, model.fc1.weight.grad, model.fc1.bias.grad]

    model = Net()
    model.fc1.register_forward_hook(keep)
    expected, gradients = run()
    assert expected == ["early", "late", "last"][not early :] * 2
    monitor = enable(scope, model, kinds=KINDS)
    order2, gradients2 = run()
    assert order2 == expected
    assert all(map(torch.equal, gradients2, gradients))
    monitor.step()
    assert history(monitor, "fc1", "grad_output")["calls"].tolist() == [2]


@SCOPES
def test_outputs_that_are_not_the_first_of_their_operation(scope):
    model = nn.Sequential(
        nn.Linear(4, 8), Do(lambda x: x.split(4, 1)), Do(lambda p: 2 * p[0] + 3 * p[1])
    )
    second = nn.Sequential(nn.Linear(4, 8), Do(lambda x: x.chunk(2, 1)[1]), nn.Identity())
    for net in (model, second):
        monitor = enable(scope, net, kinds=KINDS)
        train(net, sgd(net), [batch(), batch(1)], lambda out: out.sum())
        nanscan.disable()
        if net is model:
            assert history(monitor, "1", "grad_output", "[0]")["max"].tolist() == [2, 2]
            assert history(monitor, "1", "grad_output", "[1]")["max"].tolist() == [3, 3]
        else:
            found = history(monitor, "1", "grad_output")
            assert found["calls"].tolist() == [1, 1]
            assert found["max"].tolist() == [1, 1]


def test_two_monitors_see_the_same_gradients():
    model = Net()
    monitors = [nanscan.enable(model, kinds=KINDS), nanscan.enable(kinds=KINDS)]
    train(model, sgd(model), [batch(), batch(1)])
    first, second = (history(monitor, "fc1", "grad_output") for monitor in monitors)
    assert first["calls"].tolist() == second["calls"].tolist() == [1, 1]
    assert first["max"].tolist() == second["max"].tolist()


def test_a_graph_outlives_the_monitor_that_hooked_it():
    """And does not keep it alive: hooks know their places by number alone."""
    model = Net()
    monitor = nanscan.enable(model, kinds=KINDS)
    train(model, sgd(model), [batch()])
    loss = model(batch()).sum()
    references = [
        weakref.ref(monitor),
        weakref.ref(monitor._collector),
        weakref.ref(monitor._table),
    ]
    monitor.close()
    del monitor
    gc.collect()
    assert [reference() for reference in references] == [None] * 3
    loss.backward()
    assert model.fc1.weight.grad is not None


def test_sparse_and_missing_gradients_of_outputs():
    class Unused(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, gradient):
            return None

    model = nn.Sequential(nn.Linear(4, 4), Do(Unused.apply))
    monitor = nanscan.enable(model, kinds=KINDS)
    out = model(batch())
    (out.sum() + model[0].weight.sum()).backward()
    monitor.flush()
    assert monitor.findings == []
    assert sites(monitor, "grad_output") == {"1 grad_output"}


@SCOPES
def test_a_leaf_gets_no_hook(scope):
    """It would keep it for good: one more at each call."""

    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self):
            return self.weight

    model = Table()
    monitor = enable(scope, model, kinds=KINDS)
    optimizer = sgd(model)
    for _ in range(3):
        optimizer.zero_grad()
        model().square().sum().backward()
        optimizer.step()
    assert calls(monitor)["Table output"] == 1
    assert not model.weight._backward_hooks


@SCOPES
def test_without_gradients_there_are_no_hooks_on_tensors(scope):
    model = Net()
    outputs = []
    model.fc2.register_forward_hook(lambda _m, _a, out: outputs.append(out))
    monitor = enable(scope, model, kinds=KINDS)
    infer(model, batch(), batch(1))
    model.requires_grad_(requires_grad=False)
    model(batch(2))
    assert [out._backward_hooks for out in outputs] == [None] * 3
    assert sites(monitor, "grad_output") == set()


@SCOPES
def test_graphs_and_tensors_die_with_kinds_of_all_sorts(scope):
    class Marker:
        """A place in the graph that can be asked whether it lives."""

    class Marks(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.marker = Marker()
            references.append(weakref.ref(ctx.marker))
            return x * 1

        @staticmethod
        def backward(ctx, gradient):
            gradient = gradient * 1
            references.append(weakref.ref(gradient))
            return gradient

    references = []
    model = nn.Sequential(nn.Linear(4, 4), Do(Marks.apply), nn.ReLU(inplace=True), nn.Linear(4, 4))
    enable(scope, model, kinds=KINDS)
    optimizer = sgd(model, momentum=0.9)
    for seed in range(3):
        out = nanscan.probe("out", model(batch(seed)))
        references.append(weakref.ref(out))
        if seed != 1:  # or it is dropped without a backward
            optimizer.zero_grad()
            loss = out.sum()
            references.append(weakref.ref(loss))
            loss.backward()
            optimizer.step()
            del loss
        del out
    gc.collect()
    assert len(references) >= 9
    assert [reference() for reference in references] == [None] * len(references)


@SCOPES
def test_a_bad_gradient_is_named_where_it_arrives_first(scope):
    model = nn.Sequential(nn.Linear(4, 4), Do(torch.sqrt), nn.Linear(4, 4), nn.Tanh())
    monitor = enable(scope, model, kinds=KINDS, action="log")
    model[1].function = lambda x: (x * 0).sqrt()
    train(model, sgd(model, momentum=0.9), [batch()])
    first, *others = monitor.findings
    assert (str(first.site), first.verdict) == ("0 grad_output", "origin")
    assert first.between == (Site("1", "grad_output"), Site("0", "grad_output"))
    assert {f.verdict for f in others} == {"propagated"}
    assert {str(f.site) for f in others} == {
        f"0.{name} {kind}"
        for name in ("weight", "bias")
        for kind in ("grad", "param", "momentum_buffer")
    }


def test_gradients_after_the_monitor_is_closed_or_paused():
    model = Net()
    monitor = nanscan.enable(model, kinds="grad_output")
    loss = model(batch()).sum()
    monitor.pause()
    loss.backward()
    assert monitor._table.visits == 0
    monitor.resume()
    loss = model(batch()).sum()
    monitor.close()
    loss.backward()
    assert monitor._table.visits == 0
