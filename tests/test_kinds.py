"""Every kind of site, alone and together: what is seen there, and that it changes nothing."""

import contextlib
import functools
import gc
import threading
import weakref

import pytest
import torch
from models import (
    INF,
    NAN,
    SCOPES,
    Beside,
    Do,
    Gap,
    Net,
    batch,
    calls,
    infer,
    run_quiet,
    seeded_and_without_trace,  # noqa: F401 - used by every test
    set_nan,
    sgd,
    train,
    verdicts,
)
from models import (
    enable_scope as enable,
)
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.utils.checkpoint import checkpoint

import nanscan
from nanscan import Site
from nanscan._collect.schedule import Turn
from nanscan._data.site import DEFAULT_KINDS, KINDS


@pytest.fixture(autouse=True)
def _one_thread(num_threads):
    num_threads(1)


ALL_OR_ONE = pytest.mark.parametrize(
    "kinds", [*KINDS, KINDS], ids=lambda k: k if k in KINDS else "all"
)


def sites(monitor, kind=None):
    """What was scanned so far, of one kind."""
    return {str(n.site) for n in monitor._table.nodes if kind in (None, n.kind)}


def history(monitor, name, kind, path=""):
    return monitor.history(Site(name, kind, path))


# -- each alone, and all together ------------------------------------------------------------------


class Everything(nn.Module):
    """Has all that is observed, and changes hooked outputs in place."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3, padding=1)
        self.norm = nn.BatchNorm2d(3)
        self.act = nn.ReLU(inplace=True)
        self.drop = nn.Dropout(0.3)
        self.lstm = nn.LSTM(12, 4, batch_first=True)
        self.attend = nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, 2)
        self.register_buffer(
            "mask", torch.zeros(3, 3).masked_fill(torch.ones(3, 3).triu(1) > 0, -INF)
        )

    def forward(self, x):
        x = self.drop(self.act(self.norm(self.conv(x))))
        x = x.mul_(1.5)
        x, _ = self.lstm(x.flatten(2))
        x = x + self.attend(x, x, x, attn_mask=self.mask, need_weights=False)[0]
        x = nanscan.probe("attended", x)
        x = self.head(x)
        x[:, 0] = 0
        return x.add_(1).relu_()


def _train_everything(kinds=None, scope="model"):
    torch.manual_seed(0)
    model = Everything()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    monitor = enable(scope, model, kinds=kinds) if kinds else None
    inputs = [torch.randn(2, 1, 3, 4) for _ in range(3)]
    losses = train(model, optimizer, inputs)
    grads = [p.grad for p in model.parameters()]
    state = [value for state in optimizer.state.values() for value in state.values()]
    nanscan.disable()
    return (
        monitor,
        [torch.tensor(losses), *grads, *model.state_dict().values(), *state],
        (torch.get_rng_state()),
    )


@ALL_OR_ONE
@SCOPES
def test_training_is_bit_identical(scope, kinds):
    _, expected, rng = _train_everything()
    monitor, values, rng2 = _train_everything(kinds, scope)
    assert monitor.findings == []
    assert torch.equal(rng, rng2)
    for value, right in zip(values, expected, strict=True):
        assert torch.equal(value, right)


@ALL_OR_ONE
@SCOPES
def test_only_what_is_asked_for_is_scanned(scope, kinds):
    monitor, _, _ = _train_everything(kinds, scope)
    seen = {node.kind for node in monitor._table.nodes}
    assert seen == ({kinds} if kinds in KINDS else set(KINDS))
    assert monitor.coverage()["skipped"] == {}
    expected = {
        "input": {"Everything input[0]", "lstm input[0]"},
        "output": {"conv output", "act output", "lstm output[0]", "lstm output[1][1]"},
        "grad_output": {"conv grad_output", "act grad_output", "lstm grad_output[0]"},
        "grad": {"conv.weight grad", "lstm.bias_hh_l0 grad", "attend.out_proj.bias grad"},
        "param": {"conv.weight param", "attend.in_proj_weight param"},
        "buffer": {"norm.running_mean buffer", "norm.running_var buffer", "mask buffer"},
        "state": {"conv.weight exp_avg", "head.bias exp_avg_sq"},
        "loss": {"loss"},
        "probe": {"attended probe"},
    }
    for kind in KINDS if kinds == KINDS else [kinds]:
        assert expected[kind] <= sites(monitor, kind), kind
    assert "norm.num_batches_tracked buffer" not in sites(monitor)
    assert not any(" step" in site for site in sites(monitor, "state"))


def test_by_default_all_but_the_costly():
    assert set(KINDS) - set(DEFAULT_KINDS) == {"grad_output", "state"}
    monitor = nanscan.enable(Net())
    assert monitor._hooks._kinds == set(DEFAULT_KINDS)


@ALL_OR_ONE
@SCOPES
def test_rows_and_hooks_are_constant_over_steps(scope, kinds):
    model = Everything()
    monitor = enable(scope, model, kinds=kinds)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    inputs = [torch.randn(2, 1, 3, 4) for _ in range(3)]
    train(model, optimizer, inputs)
    seen, counted = sites(monitor), calls(monitor)
    train(model, optimizer, inputs)
    assert sites(monitor) == seen
    assert calls(monitor) == counted
    assert set(counted.values()) <= {1}


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
    references = [weakref.ref(monitor), weakref.ref(monitor._hooks), weakref.ref(monitor._table)]
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


# -- buffers ---------------------------------------------------------------------------------------


@SCOPES
def test_running_statistics_are_scanned_in_every_step(scope):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    monitor = enable(scope, model, kinds="buffer")
    means = []
    optimizer = sgd(model)
    for seed in range(3):
        train(model, optimizer, [batch(seed)])
        means.append(model[1].running_mean.max().item())
    found = history(monitor, "1.running_mean", "buffer")
    assert found["step"].tolist() == [0, 1, 2]
    assert found["max"].tolist() == means


@pytest.mark.parametrize("kinds", ["buffer", KINDS])
@SCOPES
def test_running_statistics_that_go_bad(scope, kinds):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = sgd(model, 0.0)
    monitor = enable(scope, model, kinds=kinds, action="log")
    train(model, optimizer, [batch(), set_nan(batch(1))])
    assert [v for v in verdicts(monitor) if v[1].endswith("buffer")] == [
        (1, "1.running_mean buffer", "origin" if kinds == "buffer" else "propagated"),
        (1, "1.running_var buffer", "propagated"),
    ]
    # The damage stays, and so does the episode, though nothing else of it remains.
    for parameter in model.parameters():
        parameter.data.nan_to_num_(0.1)
    train(model, optimizer, [batch(2), batch(3)])
    assert not monitor.healthy
    assert {f.step for f in monitor.findings} == {1}
    model[1].reset_running_stats()
    train(model, optimizer, [batch(4)])
    assert monitor.healthy
    assert monitor.findings[-1].verdict == "recovered"


@SCOPES
def test_a_running_mean_of_minus_inf_is_no_mask(scope):
    model = nn.Sequential(nn.BatchNorm1d(4))
    monitor = enable(scope, model, kinds="buffer", action="log")
    optimizer = sgd(model, 0.0)
    bad = batch(1)
    bad[0, 2] = -INF
    model[0].running_var.fill_(1.0)
    train(model, optimizer, [batch(), bad])
    assert verdicts(monitor)[0] == (1, "0.running_mean buffer", "origin")


@SCOPES
def test_masks_and_other_constants_are_scanned_once(scope):
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)
            self.register_buffer("mask", torch.tensor([0.0, -INF, 0.0, -INF]))
            self.register_buffer("table", torch.arange(4.0), persistent=False)
            self.register_buffer("none", None)
            self.register_buffer("count", torch.tensor(3))

        def forward(self, x):
            return torch.softmax(self.fc(x) * self.table + self.mask, -1)

    model = Masked()
    monitor = enable(scope, model)
    optimizer = sgd(model)
    train(model, optimizer, [batch(i) for i in range(3)])
    assert monitor.findings == []
    assert monitor.healthy
    assert sites(monitor, "buffer") == {"mask buffer", "table buffer"}
    assert history(monitor, "mask", "buffer")["step"].tolist() == [0]

    model.table.mul_(2)  # changed in place
    train(model, optimizer, [batch(3)])
    model.table = torch.arange(1.0, 5.0)  # replaced
    train(model, optimizer, [batch(4), batch(5)])
    table = history(monitor, "table", "buffer")
    assert (table["step"].tolist(), table["max"].tolist()) == ([0, 3, 4], [3, 6, 4])

    model.none = torch.tensor([NAN])
    del model.table
    model.table = torch.tensor(1.0)
    run_quiet(train, model, optimizer, [batch(6)])
    assert verdicts(monitor) == [(6, "none buffer", "origin")]


@SCOPES
def test_a_mask_that_goes_nan_is_no_mask(scope):
    model = nn.BatchNorm1d(4)
    model.register_buffer("mask", torch.full((4,), -INF))
    monitor = enable(scope, model, action="log")
    optimizer = sgd(model)
    train(model, optimizer, [batch()])
    assert monitor.findings == []
    model.mask[2] = NAN
    train(model, optimizer, [batch()])
    assert verdicts(monitor) == [(1, "mask buffer", "origin")]
    assert monitor.findings[0].stats.nan_count == 1
    assert monitor.findings[0].stats.neginf_count == 3


# -- the loss --------------------------------------------------------------------------------------


@SCOPES
def test_a_loss_that_no_module_made(scope):
    model = Net()
    monitor = enable(scope, model, action="log")
    optimizer = sgd(model)
    losses = train(model, optimizer, [batch(), batch(1)])
    found = history(monitor, "loss", "loss")
    assert found["max"].tolist() == pytest.approx(losses)
    train(model, optimizer, [batch(2)], lambda out: (out - out.detach()).sum().log())
    first = monitor.findings[0]
    assert (first.step, str(first.site), first.verdict) == (2, "loss", "origin")
    assert first.how == "made by code of no module"
    assert first.between == (Site("fc2", "output"), Site("loss", "loss"))
    assert "loss is non-finite in step 2 (origin: made by code of no module)" in str(first)
    assert {f.verdict for f in monitor.findings[1:]} == {"propagated"}


@SCOPES
def test_the_loss_of_a_criterion(scope):
    model, criterion = Net(), nn.MSELoss()
    monitor = enable(scope, model, action="log")
    target = torch.zeros(3, 4)
    train(model, sgd(model), [batch()] * 2, lambda out: criterion(out, target))
    if scope == "global":  # a module made it: that is its place
        assert "loss" not in sites(monitor)
        assert calls(monitor)["MSELoss output"] == 1
    else:
        assert calls(monitor)["loss"] == 1
    target[0, 0] = NAN
    train(model, sgd(model), [batch()], lambda out: criterion(out, target))
    first = monitor.findings[0]
    assert (first.step, str(first.site), first.verdict) == (
        (2, "MSELoss input[1]", "propagated") if scope == "global" else (2, "loss", "origin")
    )


@SCOPES
def test_several_losses(scope):
    model = Net()
    monitor = enable(scope, model, action="log")
    optimizer = sgd(model)

    def step(values):
        out = model(batch())
        losses = [out.sum() * value for value in values]
        torch.autograd.backward(losses)
        optimizer.step()

    step([1.0, 2.0])
    assert {"loss[0]", "loss[1]"} <= set(calls(monitor))
    step([1.0, NAN])
    assert verdicts(monitor)[0] == (1, "loss[1]", "origin")
    assert str(monitor.findings[0]).startswith("loss[1] is non-finite")


@SCOPES
def test_a_loss_that_is_no_scalar(scope):
    model = Net()
    monitor = enable(scope, model, kinds="loss")
    optimizer = sgd(model)
    out = 2 * model(batch())
    out.backward(torch.ones_like(out))
    optimizer.step()
    assert history(monitor, "loss", "loss")["max"].tolist() == [out.max().item()]


def test_the_loss_of_another_model():
    watched, other = Net(), Net()
    monitor = nanscan.enable(watched)
    run_quiet(train, other, sgd(other), [batch()], lambda out: out.sum() * NAN)
    assert monitor.findings == []
    assert sites(monitor) == set()
    with pytest.warns(nanscan.NonFiniteWarning):
        train(watched, sgd(watched), [batch()], lambda out: out.sum() * NAN)
    assert verdicts(monitor)[0] == (0, "loss", "origin")


@SCOPES
def test_a_scaled_loss(scope):
    model = Net()
    monitor = enable(scope, model, kinds="loss")
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu", init_scale=1024.0)
    loss = model(batch()).square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert history(monitor, "loss", "loss")["max"].tolist() == [1024 * loss.item()]
    assert monitor._step == 1


# -- probes ----------------------------------------------------------------------------------------


class Probed(nn.Module):
    """Says what it makes of its layers' outputs."""

    def __init__(self, function=torch.tanh):
        super().__init__()
        self.fc1 = nn.Linear(4, 4)
        self.fc2 = nn.Linear(4, 4)
        self.function = function

    def forward(self, x):
        x = nanscan.probe("hidden", self.function(self.fc1(x)))
        return self.fc2(x * 1)


@SCOPES
def test_a_probe_in_a_forward(scope):
    model = Probed(lambda x: x / (x - x))
    monitor = enable(scope, model, action="log")
    infer(model, batch())
    assert verdicts(monitor) == [
        (0, "hidden probe", "origin"),
        (0, "fc2 input[0]", "propagated"),
        (0, "fc2 output", "propagated"),
    ]
    first = monitor.findings[0]
    assert first.between == (Site("fc1", "output"), Site("hidden", "probe"))
    assert first.how.startswith("made by code of no module")
    assert first.stats.inf_count == 12


@SCOPES
def test_a_probe_of_what_a_module_returned_is_that_modules_place(scope):
    model = Probed(lambda x: x)
    monitor = enable(scope, model)
    infer(model, batch())
    assert "hidden probe" not in sites(monitor)


@SCOPES
def test_probes_of_containers(scope):
    def function(x):
        held = {"a": x + 1, "b": [x + 2, (None, "text", x.long())]}
        assert nanscan.probe("parts", held) is held
        return x * 1

    model = Probed(function)
    monitor = enable(scope, model)
    infer(model, batch())
    assert {"parts probe.a", "parts probe.b[0]", "hidden probe"} == sites(monitor, "probe")


@SCOPES
def test_one_name_many_times_is_one_place(scope):
    def function(x):
        for i in range(5):
            nanscan.probe("many", x + 10 * i)
        return x * 1

    model = Probed(function)
    monitor = enable(scope, model)
    infer(model, batch(), batch(1))
    assert sites(monitor, "probe") == {"many probe", "hidden probe"}
    found = history(monitor, "many", "probe")
    assert found["calls"].tolist() == [5, 5]
    assert (found["max"] > 39).all()


def test_without_a_monitor_a_probe_does_nothing():
    value = object()
    assert nanscan.probe("nothing", value) is value
    x = torch.tensor([NAN])
    assert nanscan.probe("nothing", x) is x
    monitor = nanscan.enable(Net())
    nanscan.probe("outside", torch.ones(2))
    monitor.pause()
    nanscan.probe("paused", torch.ones(2))
    monitor.resume()
    nanscan.probe("resumed", torch.ones(2))
    nanscan.disable()
    nanscan.probe("closed", torch.ones(2))
    monitor.probe("closed", torch.ones(2))
    assert sites(monitor) == {"outside probe", "resumed probe"}


@pytest.mark.filterwarnings(
    "error:Dynamo does not know:UserWarning", "ignore:.*global hooks on modules:UserWarning"
)
@pytest.mark.parametrize("fullgraph", [True, False])
@SCOPES
def test_a_probe_in_a_compiled_model(scope, fullgraph):
    torch._dynamo.reset()
    model = Probed()
    expected = model(batch()).detach()
    compiled = torch.compile(model, backend="eager", fullgraph=fullgraph)
    monitor = enable(scope, model, kinds=KINDS)
    assert torch.equal(compiled(batch()).detach(), expected)
    train(compiled, sgd(model), [batch(), batch(1)])
    assert monitor.findings == []
    nanscan.disable()
    assert compiled(batch()).shape == (3, 4)
    torch._dynamo.reset()


def test_probes_of_two_monitors_and_threads():
    first, second = Net(), Net()
    monitors = [nanscan.enable(first), nanscan.enable(second)]

    def run():
        for _ in range(200):
            nanscan.probe("shared", torch.ones(3))

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for monitor in monitors:
        monitor.step()
        assert history(monitor, "shared", "probe")["calls"].tolist() == [600]


# -- moments of optimizers -------------------------------------------------------------------------


@SCOPES
def test_moments(scope):
    model = Net()
    monitor = enable(scope, model, kinds=("state", "param"), action="log")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, amsgrad=True)
    train(model, optimizer, [batch(), batch(1)])
    assert sites(monitor, "state") == {
        f"{layer}.{name} {moment}"
        for layer in ("fc1", "fc2")
        for name in ("weight", "bias")
        for moment in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    }
    found = history(monitor, "fc1.weight", "state", "exp_avg_sq")
    assert found["max"][1] == optimizer.state[model.fc1.weight]["exp_avg_sq"].max().item()
    optimizer.state[model.fc2.bias]["exp_avg_sq"][1] = INF  # the update is 0 there
    train(model, optimizer, [batch(2)])
    assert verdicts(monitor)[0] == (2, "fc2.bias exp_avg_sq", "origin")
    assert {v for _, _, v in verdicts(monitor)[1:]} == {"propagated"}
    assert not monitor.healthy


# -- names and calls -------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.twin = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.twin.weight = self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.embed(x) + self.twin(x))


@SCOPES
def test_every_name_of_a_tied_weight_is_told(scope):
    model = Tied()
    monitor = enable(scope, model, kinds=KINDS, action="log")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    model.head.weight.register_hook(lambda grad: grad * NAN)
    train(model, optimizer, [torch.tensor([1, 2])])
    found = {str(f.site): f for f in monitor.findings}
    assert set(found) == {
        f"embed.weight {what}" for what in ("grad", "param", "exp_avg", "exp_avg_sq")
    }
    for finding in found.values():
        assert sorted(finding.aliases) == ["head.weight", "twin.weight"]
        assert "tied to   head.weight, twin.weight" in str(finding) or (
            "tied to   twin.weight, head.weight" in str(finding)
        )


@SCOPES
def test_what_is_not_tied_has_no_aliases(scope):
    model = Gap(lambda x: x / 0)
    monitor = enable(scope, model, kinds=KINDS, action="log")
    train(model, sgd(model), [batch()])
    assert {len(f.aliases) for f in monitor.findings} == {0}
    assert "tied to" not in str(monitor.findings[0])


@SCOPES
def test_weights_tied_across_two_models(scope):
    first, second = nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4))
    second[0].weight = first[0].weight
    both = nn.ModuleDict({"a": first, "b": second})
    monitor = enable(scope, both, action="log")
    optimizer = sgd(both)
    first[0].weight.register_hook(lambda grad: grad * NAN)
    train(lambda x: second(first(x)), optimizer, [batch()])
    first_found = monitor.findings[0]
    names = {first_found.site.name, *first_found.aliases}
    expected = (
        {"a.0.weight", "b.0.weight"} if scope == "model" else {"0.weight", "Sequential#2.0.weight"}
    )
    assert names == expected


@SCOPES
def test_a_cell_that_goes_bad_in_one_of_its_calls(scope):
    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = nn.GRUCell(4, 4)
            self.bad = -1

        def forward(self, xs):
            h = torch.zeros(3, 4)
            for i, x in enumerate(xs):
                h = self.cell(x, h)
                if i == self.bad:
                    h = h * NAN
            return h

    model = Loop()
    monitor = enable(scope, model, kinds=KINDS, action="log")
    optimizer = sgd(model)
    train(model, optimizer, [torch.randn(5, 3, 4)] * 2)
    assert history(monitor, "cell", "output")["calls"].tolist() == [5, 5]
    assert history(monitor, "cell", "grad_output")["calls"].tolist() == [5, 5]
    model.bad = 2
    train(model, optimizer, [torch.randn(5, 3, 4)])
    first, second, *_ = monitor.findings
    assert (first.step, str(first.site), first.verdict) == (2, "cell input[1]", "origin")
    assert first.between in (None, (Site("cell", "output"), Site("cell", "input", "[1]")))
    assert first.how == "made by code of no module, in the forward of Loop"
    assert (str(second.site), second.verdict) == ("cell output", "propagated")
    assert (second.stats.calls, second.stats.nan_count) == (5, 2 * 12)


@SCOPES
def test_accumulation_over_micro_batches(scope):
    model = Net()
    monitor = enable(scope, model, kinds=KINDS, action="log")
    optimizer = sgd(model)

    def step(inputs):
        optimizer.zero_grad()
        for x in inputs:
            (model(x).square().mean() / len(inputs)).backward()
        optimizer.step()

    step([batch(i) for i in range(4)])
    step([batch(i) for i in range(4)])
    assert monitor._step == 2
    rows = calls(monitor)
    for site in ("Net input[0]", "fc1 output", "fc2 grad_output", "loss"):
        assert rows[site] == 4, site
    assert rows["fc1.weight grad"] == rows["fc1.weight param"] == 1

    step([batch(0), batch(1), set_nan(batch(2)), batch(3)])
    found = verdicts(monitor)
    assert found[0] == (2, "Net input[0]", "propagated")
    assert {verdict for _, _, verdict in found} == {"propagated"}
    assert {step for step, _, _ in found} == {2}
    assert len({site for _, site, _ in found}) == len(found)
    assert monitor.findings[0].stats.calls == 4 or monitor.findings[0].stats.calls == 3
    assert monitor.findings[0].stats.first_nonfinite == (0, 1)


@SCOPES
def test_a_bad_micro_batch_that_backward_makes(scope):
    model = Gap()
    monitor = enable(scope, model, kinds=KINDS, action="log")
    optimizer = sgd(model)
    for number in range(4):
        model.function = (lambda x: (x * 0).sqrt()) if number == 2 else torch.tanh
        model(batch(number)).sum().backward()
    optimizer.step()
    assert verdicts(monitor)[0] == (0, "fc1 grad_output", "origin")
    assert [v for _, _, v in verdicts(monitor)[1:]] == ["propagated"] * (len(verdicts(monitor)) - 1)
    assert monitor._step == 1


@SCOPES
def test_a_step_that_the_user_leaves_out(scope):
    """As `if not loss.isfinite(): continue`: the step goes on with the next batch."""
    model = Net()
    monitor = enable(scope, model, kinds=KINDS, action="log")
    optimizer = sgd(model)
    for x in (batch(), set_nan(batch(1)), batch(2), batch(3)):
        optimizer.zero_grad()
        loss = model(x).sum()
        if loss.isfinite():
            loss.backward()
            optimizer.step()
    assert monitor._step == 3
    found = verdicts(monitor)
    assert found[0] == (1, "Net input[0]", "propagated")
    assert {v for _, _, v in found[:-1]} == {"propagated"}
    assert found[-1] == (2, "Net input[0]", "recovered")
    assert monitor.healthy


@SCOPES
def test_two_optimizers_of_one_model(scope):
    model = Net()
    monitor = enable(scope, model, kinds=KINDS, action="log")
    first, second = sgd(model.fc1), torch.optim.Adam(model.fc2.parameters(), 1e-3)
    for _ in range(2):
        model(batch()).sum().backward()
        first.step()
        second.step()
        model.zero_grad()
    assert monitor.findings == []
    model.fc2.bias.register_hook(lambda grad: grad * NAN)
    model(batch()).sum().backward()
    first.step()
    assert monitor.findings == []  # the gradients of the second were not looked at yet
    second.step()
    assert verdicts(monitor)[0][1:] == ("fc2.bias grad", "origin")
    assert {v for _, _, v in verdicts(monitor)[1:]} == {"propagated"}


@SCOPES
def test_two_models_that_train_against_each_other(scope):
    generator, critic = Net(), Net()
    pair = Beside(generator, critic)
    monitor = enable(scope, pair, kinds=KINDS, action="log")
    ours, theirs = sgd(generator), sgd(critic)
    for _ in range(2):
        theirs.zero_grad()
        (critic(generator(batch()).detach()).mean() - critic(batch(1)).mean()).backward()
        theirs.step()
        ours.zero_grad()
        (-critic(generator(batch(2))).mean()).backward()
        ours.step()
    assert monitor.findings == []
    critic.act = Gap(lambda x: (x * 0).sqrt()) if scope == "model" else Do(lambda x: (x * 0).sqrt())
    ours.zero_grad()
    (-critic(generator(batch(2))).mean()).backward()
    ours.step()
    first = monitor.findings[0]
    prefix = {"model": "aside", "global": "Net#2"}[scope]
    assert (str(first.site), first.verdict) == (f"{prefix}.fc1 grad_output", "origin")
    assert {f.verdict for f in monitor.findings[1:]} == {"propagated"}


@SCOPES
def test_a_module_that_two_models_share(scope):
    shared = nn.Linear(4, 4)
    first, second = nn.Sequential(shared, nn.Tanh()), nn.Sequential(shared, Do(lambda x: x / 0))
    both = nn.ModuleList([first, second])
    monitor = enable(scope, both, kinds=KINDS, action="log")
    infer(first, batch())
    with torch.no_grad():
        second(batch())
    assert [verdict for _, _, verdict in verdicts(monitor)] == ["origin"]
    name = "1.1" if scope == "model" else "Sequential#2.1"
    assert str(monitor.findings[0].site) == f"{name} output"
    shared_sites = {s for s in sites(monitor, "output") if s.endswith("0 output")}
    assert shared_sites == {"0.0 output" if scope == "model" else "0 output"}


@SCOPES
def test_modules_of_torch_that_are_not_called_are_listed(scope):
    class Attends(nn.Module):
        def __init__(self):
            super().__init__()
            self.attend = nn.MultiheadAttention(4, 2)
            self.unused = nn.Linear(4, 4)

        def forward(self, x):
            return self.attend(x, x, x)[0]

    model = Attends()
    monitor = enable(scope, model, kinds=KINDS, action="log")
    optimizer = sgd(model.attend)
    train(model, optimizer, [batch()])
    assert monitor.coverage()["not_called"] == ["attend.out_proj", "unused"]
    model.attend.out_proj.bias.register_hook(lambda grad: grad * NAN)
    train(model, optimizer, [batch()])
    assert verdicts(monitor) == [
        (1, "attend.out_proj.bias grad", "origin"),
        (1, "attend.out_proj.bias param", "propagated"),
    ]


@SCOPES
def test_a_bad_tied_weight_is_handed_to_every_module_that_has_it(scope):
    model = Tied()
    monitor = enable(scope, model, kinds=KINDS, action="log")
    optimizer = sgd(model)
    model.embed.weight.register_hook(lambda grad: grad * torch.tensor([1, 1, 1, 1, NAN])[:, None])
    tokens = torch.tensor([1, 2])  # row 4 goes bad, and only the head reads it
    train(model, optimizer, [tokens, tokens])
    assert verdicts(monitor)[0] == (0, "embed.weight grad", "origin")
    later = [(site, verdict) for step, site, verdict in verdicts(monitor) if step == 1]
    assert later[0] == ("head output", "propagated")


@SCOPES
def test_gradients_that_go_bad_independently(scope):
    """The one of a parameter needs no bad gradient from above: sums overflow, too."""
    model = nn.Sequential(nn.Linear(4, 4), Do(lambda x: (x * 0).sqrt()), nn.Linear(4, 4))
    model[2].bias.register_hook(lambda grad: grad * INF)
    monitor = enable(scope, model, kinds=KINDS, action="log")
    train(model, sgd(model), [batch()])
    found = {site: verdict for _, site, verdict in verdicts(monitor)}
    assert found == {
        "0 grad_output": "origin",
        "0.weight grad": "propagated",
        "0.bias grad": "propagated",
        "2.bias grad": "origin",
        "0.weight param": "propagated",
        "0.bias param": "propagated",
        "2.bias param": "propagated",
    }


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
    monitor._hooks.set_turn(Turn(1, 1, slow=False))
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


OTHERS = ["Adafactor", "Adagrad", "Adamax", "ASGD", "LBFGS", "NAdam", "RAdam", "RMSprop", "Rprop"]


@pytest.mark.parametrize("name", OTHERS)
def test_moments_of_all_optimizers_are_clean(name):
    model = Net()
    monitor = nanscan.enable(model, kinds=KINDS)
    optimizer = getattr(torch.optim, name)(model.parameters())

    def closure():
        optimizer.zero_grad()
        loss = model(batch()).square().mean()
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
    assert monitor._step == 3
    assert monitor.findings == []
    assert sites(monitor, "state")


@SCOPES
def test_parametrised_weights(scope):
    model = nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
        nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)),
    )
    monitor = enable(scope, model, kinds=KINDS, action="log")
    optimizer = sgd(model)
    train(model, optimizer, [batch(i) for i in range(3)])
    assert monitor.findings == []
    assert "1.parametrizations.weight.0._u buffer" in calls(monitor)  # changes in each step
    scale = model[0].parametrizations.weight.original0
    scale.register_hook(lambda grad: grad * NAN)
    train(model, optimizer, [batch()])
    assert verdicts(monitor) == [
        (3, "0.parametrizations.weight.original0 grad", "origin"),
        (3, "0.parametrizations.weight.original0 param", "propagated"),
    ]


# -- checkpointing ---------------------------------------------------------------------------------

REENTRANT = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "saved"])


class Checkpointed(nn.Module):
    def __init__(self, reentrant, function=torch.tanh):
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.block = Gap(function)
        self.head = nn.Linear(4, 4)
        self.reentrant = reentrant

    def forward(self, x):
        return self.head(checkpoint(self.block, self.stem(x), use_reentrant=self.reentrant))


@REENTRANT
@SCOPES
def test_a_recomputed_forward_is_told_from_the_first(scope, reentrant):
    model = Checkpointed(reentrant)
    monitor = enable(scope, model, kinds=KINDS)
    optimizer = sgd(model, momentum=0.9)
    train(model, optimizer, [batch()])
    seen = sites(monitor)
    first = calls(monitor)
    assert {"block.fc1 output", "block.fc1 output (recomputed)"} <= seen
    assert first["block.fc1 output"] == first["block.fc1 output (recomputed)"] == 1
    assert first["loss"] == 1
    train(model, optimizer, [batch(1), batch(2)])
    assert monitor._step == 3
    assert sites(monitor) == seen  # the second time round is as the first
    assert calls(monitor) == first
    assert {"block.fc1 grad_output", "stem grad_output"} <= seen
    assert not any("grad_output (recomputed)" in site for site in seen)


@REENTRANT
@SCOPES
def test_a_checkpointed_training_is_bit_identical(scope, reentrant):
    def run(*, watched):
        torch.manual_seed(0)
        model = Checkpointed(reentrant, lambda x: F.dropout(x, 0.5).relu_())
        if watched:
            enable(scope, model, kinds=KINDS)
        losses = train(model, sgd(model), [batch(i) for i in range(3)])
        nanscan.disable()
        return losses, [p.grad for p in model.parameters()]

    losses, gradients = run(watched=False)
    losses2, gradients2 = run(watched=True)
    assert losses2 == losses
    assert all(map(torch.equal, gradients2, gradients))


@REENTRANT
@SCOPES
def test_what_a_checkpointed_forward_makes_is_found_once(scope, reentrant):
    model = Checkpointed(reentrant)
    monitor = enable(scope, model, kinds=KINDS, action="log")
    optimizer = sgd(model)
    train(model, optimizer, [batch()])
    model.block.function = lambda x: x / 0
    train(model, optimizer, [batch()])
    found = verdicts(monitor)
    assert found[0] == (1, "block.fc2 input[0]", "origin")
    assert [v for _, _, v in found[1:]] == ["propagated"] * (len(found) - 1)
    assert len({site for _, site, _ in found}) == len(found)
    again = [site for _, site, _ in found if "recomputed" in site]
    # The other kind of checkpoint stops as soon as it has what backward needs.
    assert again == (["block.fc2 output (recomputed)"] if reentrant else [])
    assert {step for step, _, _ in found} == {1}


@REENTRANT
@SCOPES
def test_what_only_the_recomputation_makes(scope, reentrant):
    """Such as with a random or a changed state: the first time was fine."""
    model = Checkpointed(reentrant)
    times = []

    def function(x):
        times.append(x)
        return torch.tanh(x) * (NAN if len(times) == 2 else 1.0)

    model.block.function = function
    monitor = enable(scope, model, kinds=KINDS, action="log")
    train(model, sgd(model), [batch()])
    first = monitor.findings[0]
    assert first.verdict == "origin"
    # The other kind of checkpoint stops before it, for it has all that backward needs.
    assert str(first.site) == (
        "block.fc2 output (recomputed)" if reentrant else "block.fc2.weight grad"
    )
    assert {f.verdict for f in monitor.findings[1:]} == {"propagated"}


@REENTRANT
@SCOPES
def test_the_loss_is_what_backward_starts_from_not_what_a_checkpoint_does(scope, reentrant):
    block, head = nn.Linear(4, 4), nn.Linear(4, 1)

    def run(x):
        return head(checkpoint(lambda x: block(x) * 2, x, use_reentrant=reentrant))

    model = Do(run)
    model.block, model.head = block, head
    monitor = enable(scope, model, kinds=("loss", "output"), action="log")
    losses = train(model, sgd(model), [batch().requires_grad_()], lambda out: out.sum())
    assert sites(monitor, "loss") == {"loss"}
    found = history(monitor, "loss", "loss")
    assert found["calls"].tolist() == [1]
    assert found["max"].tolist() == losses


@REENTRANT
@SCOPES
def test_what_the_backward_of_a_checkpoint_makes(scope, reentrant):
    model = Checkpointed(reentrant, lambda x: (x * 0).sqrt())
    monitor = enable(scope, model, kinds=KINDS, action="log")
    train(model, sgd(model), [batch(), batch()])
    found = verdicts(monitor)
    assert found[0] == (0, "block.fc1 grad_output", "origin")
    assert {v for _, _, v in found[1:]} == {"propagated"}


# -- functions of torch that are wrapped -----------------------------------------------------------


def wrapped():
    """What nanscan wraps, as it is now."""
    return (
        torch.autograd.backward,
        torch.amp.GradScaler.step,
        torch.nn.utils.clip_grad._clip_grads_with_norm_,
    )


@pytest.fixture
def originals():
    """Those functions of torch; it also sees to it that they are back in the end."""
    found = wrapped()
    assert all(function.__module__.startswith("torch.") for function in found)
    assert not any(hasattr(function, "__wrapped__") for function in found[:2])
    yield found
    torch.autograd.backward, torch.amp.GradScaler.step = found[:2]
    torch.nn.utils.clip_grad._clip_grads_with_norm_ = found[2]


def train_scaled(model, optimizer, inputs, scale=8.0):
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    for x in inputs:
        optimizer.zero_grad()
        scaler.scale(model(x).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    return scaler


class Steep(nn.Module):
    """A model whose gradients reach `slope`."""

    def __init__(self, slope=1.0):
        super().__init__()
        self.fc = nn.Linear(4, 1, bias=False)
        self.slope = slope

    def forward(self, x):
        return self.fc(x).sum() * self.slope


def steps_of_scaler(scaler, model, optimizer, count, *, unscale=False):
    for _ in range(count):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(2, 4))).backward()
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()


@pytest.mark.parametrize("end", ["disable", "close", "pause", "watch", "error"])
@SCOPES
def test_functions_of_torch_are_as_before(scope, end, originals):
    model = Net()
    target = model if scope == "model" else None
    if end in ("watch", "error"):
        with contextlib.suppress(ZeroDivisionError), nanscan.watch(target, kinds=KINDS):
            assert wrapped() != originals
            train_scaled(model, sgd(model), [batch()])
            if end == "error":
                raise ZeroDivisionError
    else:
        monitor = nanscan.enable(target, kinds=KINDS)
        assert wrapped() != originals
        train_scaled(model, sgd(model), [batch()])
        {"disable": nanscan.disable, "close": monitor.close, "pause": monitor.pause}[end]()
    assert wrapped() == originals
    if end == "pause":
        monitor.resume()
        assert wrapped() != originals
        monitor.close()
        assert wrapped() == originals


def test_functions_of_torch_stay_wrapped_until_the_last_monitor_closes(originals):
    first, second = Net(), Net()
    monitors = [nanscan.enable(first, kinds=KINDS), nanscan.enable(second, kinds=KINDS)]
    ours = wrapped()
    monitors[0].close()
    assert wrapped() == ours
    train_scaled(second, sgd(second), [batch()])
    assert "loss" in sites(monitors[1])
    monitors[1].close()
    assert wrapped() == originals
    again = nanscan.enable(first, kinds=KINDS)
    train_scaled(first, sgd(first), [batch()])
    assert calls(again)["loss"] == 1
    nanscan.disable()
    assert wrapped() == originals


@pytest.mark.parametrize("wraps", [True, False])
def test_what_someone_else_wraps_around_ours_is_left_to_them(originals, wraps):
    seen = []
    model = Net()
    monitor = nanscan.enable(model, kinds=KINDS)
    ours = torch.autograd.backward

    def theirs(*args, **kwargs):
        seen.append("theirs")
        return ours(*args, **kwargs)

    if wraps:
        functools.update_wrapper(theirs, ours)
    torch.autograd.backward = theirs
    train(model, sgd(model), [batch()])
    monitor.close()
    assert torch.autograd.backward is theirs
    assert torch.amp.GradScaler.step is originals[1]
    train(model, sgd(model), [batch()])  # ours is idle now, and lets all through
    assert seen == ["theirs"] * 2

    again = nanscan.enable(model, kinds=KINDS)
    train(model, sgd(model), [batch(), batch(1)])
    assert seen == ["theirs"] * 4
    assert history(again, "loss", "loss")["calls"].tolist() == [1, 1]
    again.close()
    assert torch.autograd.backward is theirs
    torch.autograd.backward = originals[0]
    last = nanscan.enable(model, kinds=KINDS)
    train(model, sgd(model), [batch()])
    assert calls(last)["loss"] == 1
    last.close()
    assert wrapped() == originals


def test_a_scaler_step_wrapped_twice_is_one_step(originals):
    model = Steep(INF)
    nanscan.enable(model)
    ours = torch.amp.GradScaler.step
    torch.amp.GradScaler.step = lambda *args: ours(*args)  # noqa: PLW0108 - not ours
    nanscan.disable()
    monitor = nanscan.enable(model, kinds="grad", action="log", max_skips=3)
    steps_of_scaler(torch.amp.GradScaler("cpu"), model, sgd(model), 3)
    assert monitor._step == 3
    assert [(f.step, f.verdict) for f in monitor.findings] == [
        (0, "scale-search"),
        (2, "persistent-overflow"),
    ]


def test_wrapped_functions_look_like_those_of_torch(originals):
    import inspect

    nanscan.enable(Net())
    for ours, theirs in zip(wrapped(), originals, strict=True):
        assert inspect.signature(ours) == inspect.signature(theirs)
        assert ours.__doc__ == theirs.__doc__
        assert ours.__name__ == theirs.__name__


@SCOPES
def test_arguments_of_backward_and_of_a_scalers_step_go_through(scope):
    class Returns(torch.optim.SGD):
        def step(self, closure=None, *, extra=None):
            super().step()
            return extra

    model = Net()
    enable(scope, model, kinds=KINDS)
    optimizer = Returns(model.parameters(), 0.1)
    out = model(batch())
    gradients = [torch.ones_like(out)]
    torch.autograd.backward(tensors=[out], grad_tensors=gradients, retain_graph=True)
    torch.autograd.backward(out, gradients[0], inputs=[model.fc1.weight])
    assert torch.equal(model.fc1.weight.grad, 2 * model.fc1.weight.grad / 2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    scaler.scale(model(batch()).sum()).backward()
    assert scaler.step(optimizer, extra="result") == "result"
    off = torch.amp.GradScaler("cpu", enabled=False)
    assert off.step(optimizer, extra="more") == "more"


# -- what is ignored -------------------------------------------------------------------------------


def _bad_everywhere(ignore, scope="model", **options):
    model = Gap(lambda x: x / 0)
    monitor = enable(scope, model, kinds=KINDS, action="log", ignore=ignore, **options)
    train(model, sgd(model), [batch()])
    monitor.close()
    return monitor


@pytest.mark.parametrize(
    ("ignore", "left"),
    [
        ((), None),
        ("*", set()),
        ("fc2*", {"fc1", "loss"}),
        (["fc2*", "loss"], {"fc1"}),
        (["fc?.weight"], {"fc1", "fc2", "loss"}),
        (torch.float32, set()),
        (torch.float16, None),
        ([torch.float16, "nothing"], None),
        (lambda site, dtype: site.kind != "loss", {"loss"}),
        (lambda site, dtype: dtype == torch.float32 and site.name.startswith("fc"), {"loss"}),
    ],
)
@SCOPES
def test_ignored_places(scope, ignore, left):
    monitor = _bad_everywhere(ignore, scope)
    found = {f.site.name.partition(".")[0] for f in monitor.findings}
    assert found == ({"fc1", "fc2", "loss"} if left is None else left)
    if left == set():
        assert monitor.healthy
    if left == {"fc1", "fc2", "loss"}:
        assert not any(f.site.name.endswith("weight") for f in monitor.findings)


@pytest.mark.parametrize("kind", KINDS)
def test_ignored_kinds(kind):
    model = nn.Sequential(
        nn.Linear(4, 4), nn.BatchNorm1d(4), Do(lambda x: nanscan.probe("p", x + 0) * 1)
    )
    monitor = nanscan.enable(model, kinds=KINDS, action="log", ignore=f"kind:{kind}")
    train(model, sgd(model, momentum=0.9), [set_nan(batch())])
    assert {f.site.kind for f in monitor.findings if f.verdict != "absorbed"} == set(KINDS) - {kind}


@SCOPES
def test_what_an_ignored_place_made_is_called_made_where_it_is_seen_next(scope):
    """It is no place to blame; what comes next is named, not taken for handed on."""
    model = nn.Sequential(nn.Linear(4, 4), Do(lambda x: x / 0), Do(lambda x: x * 1))
    monitor = enable(scope, model, action="log", ignore="1")
    infer(model, batch())
    assert [site for _, site, _ in verdicts(monitor)] == ["2 output"]


@SCOPES
def test_ignored_places_do_not_come_near_the_limit_either(scope):
    model = Do(lambda x: x * 1.0)
    for ignore, count in [((), 1), ("Do", 0), (torch.float16, 0), ("kind:output", 0)]:
        monitor = enable(scope, model, kinds="output", action="log", ignore=ignore)
        infer(model, torch.tensor([60000.0]).half())
        assert len(monitor.findings) == count


@pytest.mark.parametrize(
    ("ignore", "error", "message"),
    [
        (3, TypeError, "not iterable"),
        ([3], TypeError, "ignore takes names, dtypes or a function, got 3"),
        ("kind:moments", ValueError, "unknown kind in 'kind:moments'"),
    ],
)
def test_bad_rules(ignore, error, message):
    with pytest.raises(error, match=message):
        nanscan.enable(Net(), ignore=ignore)


# -- verdicts --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "function",
    [
        torch.nan_to_num,
        lambda x: torch.where(x.isfinite(), x, 0),
        lambda x: x.masked_fill(~x.isfinite(), 0.0),
        lambda x: x[1:] if not x[0].isfinite().all() else x,
    ],
)
@SCOPES
def test_what_is_absorbed(scope, function):
    model = nn.Sequential(Do(set_nan), Do(lambda x: x * 1), Do(function), nn.Linear(4, 4))
    monitor = enable(scope, model, action="log")
    infer(model, batch(), batch())
    assert verdicts(monitor) == [
        (0, "0 output", "origin"),
        (0, "1 output", "propagated"),
        (0, "2 output", "absorbed"),
    ]
    absorbed = monitor.findings[2]
    assert absorbed.stats.is_finite
    assert [str(site) for site, _ in absorbed.given] == ["1 output"]
    assert absorbed.given[0][1].nan_count == 1
    assert "2 output is finite in step 0 (absorbed:" in str(absorbed)
    assert monitor.findings[0].affected == [Site("1", "output")]


@SCOPES
def test_the_first_that_absorbs_is_named(scope):
    model = nn.ModuleList([Do(set_nan), Do(torch.nan_to_num), Do(torch.nan_to_num)])
    model.forward = lambda x: [absorb(bad) for bad in [model[0](x)] for absorb in model[1:]]
    monitor = enable(scope, model, action="log")
    infer(model, batch())
    assert verdicts(monitor) == [(0, "0 output", "origin"), (0, "1 output", "absorbed")]


@SCOPES
def test_what_absorbs_only_a_part_does_not_absorb(scope):
    model = nn.Sequential(Do(set_nan), Do(lambda x: (torch.nan_to_num(x), x * 1)))
    monitor = enable(scope, model, action="log")
    infer(model, batch())
    assert verdicts(monitor) == [(0, "0 output", "origin"), (0, "1 output[1]", "propagated")]


@SCOPES
def test_a_bad_input_that_the_model_absorbs(scope):
    model = nn.Sequential(Do(torch.nan_to_num), nn.Linear(4, 4))
    monitor = enable(scope, model, action="log")
    infer(model, set_nan(batch()))
    assert verdicts(monitor) == [
        (0, "Sequential input[0]", "propagated"),
        (0, "0 output", "absorbed"),
    ]


@SCOPES
def test_nothing_is_absorbed_where_nothing_was_handed_on(scope):
    """A mask of -Inf is nothing bad; nor did what never saw the bad values absorb them."""
    model = Beside(nn.Linear(4, 4), nn.Linear(4, 4))
    model.forward = lambda x, bad: (model.main(x), model.aside(x), bad * 1)
    monitor = enable(scope, model, action="log")
    with torch.no_grad():
        model(batch(), torch.full((2,), NAN))
    assert {f.verdict for f in monitor.findings} == {"propagated"}
    masked = Do(lambda x, mask: torch.softmax(x + mask, -1))
    monitor = enable(scope, masked, action="log")
    with torch.no_grad():
        masked(batch(), torch.tensor([0.0, -INF, 0.0, 0.0]))
    assert monitor.findings == []


@SCOPES
def test_recovery_is_told_once_an_episode(scope):
    model = Net()
    told = []
    monitor = enable(scope, model, action=told.append)
    good, bad = batch(), set_nan(batch(1))
    infer(model, good, bad, bad, good, good, good, bad, good)
    assert [(f.step, f.verdict) for f in told] == [
        (1, "propagated"),
        (3, "recovered"),
        (6, "propagated"),
        (7, "recovered"),
    ]
    recovered = told[1]
    assert str(recovered.site) == "Net input[0]"
    assert recovered.stats.is_finite
    assert recovered.history["nan"].tolist() == [0, 1, 1, 0]
    assert "Net input[0] is finite in step 3 (recovered:" in str(recovered)
    assert monitor.healthy


@SCOPES
def test_there_is_no_recovery_while_a_parameter_is_bad_that_is_not_read(scope):
    model = nn.Embedding(5, 4)
    model.weight.data[4, 1] = NAN
    monitor = enable(scope, model, action="log")
    infer(model, torch.tensor([4]), torch.tensor([1]), torch.tensor([2, 3]))
    assert verdicts(monitor) == [
        (0, "weight param", "origin"),
        (0, "Embedding output", "propagated"),
    ]
    assert not monitor.healthy


@SCOPES
def test_there_is_no_recovery_while_a_parameter_is_bad(scope):
    model = Net()
    monitor = enable(scope, model, kinds=KINDS, action="log")
    optimizer = sgd(model)
    train(model, optimizer, [set_nan(batch())])
    model.fc1.bias.register_hook(torch.nan_to_num)
    train(model, optimizer, [batch(), batch(1)])
    assert "recovered" not in {f.verdict for f in monitor.findings}
    assert not monitor.healthy
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.nan_to_num_(0.1)
    train(model, optimizer, [batch(2)])
    assert [(f.step, f.verdict) for f in monitor.findings[-1:]] == [(3, "recovered")]
    assert monitor.healthy


OPTIMIZERS = {
    "plain": lambda model: sgd(model, 1e-33),
    "fused": lambda model: sgd(model, 1e-33, fused=True),  # is always called, and skips itself
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("unscale", [False, True])
@SCOPES
def test_the_search_of_a_scale(scope, unscale, optimizer):
    model = Steep(1e30)
    monitor = enable(scope, model, kinds=KINDS, action="raise")
    optimizer = OPTIMIZERS[optimizer](model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30, growth_interval=1000)
    weight = model.fc.weight.detach().clone()
    steps_of_scaler(scaler, model, optimizer, 1, unscale=unscale)
    assert torch.equal(model.fc.weight, weight)  # skipped
    first = monitor.findings[0]
    assert (first.step, first.verdict) == (0, "scale-search")
    assert first.how == ("the GradScaler skipped the step and lowered its scale of 1.07374e+09")
    assert monitor.healthy
    steps_of_scaler(scaler, model, optimizer, 8, unscale=unscale)
    assert not torch.equal(model.fc.weight, weight)
    assert [f.verdict for f in monitor.findings if f.verdict != "near-limit"] == ["scale-search"]
    assert monitor._step == 9


@pytest.mark.parametrize("max_skips", [2, 3, 8])
@SCOPES
def test_too_many_skipped_steps(scope, max_skips):
    model = Steep(INF)
    told = []
    monitor = enable(scope, model, kinds=("grad", "param"), action=told.append, max_skips=max_skips)
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    steps_of_scaler(scaler, model, optimizer, max_skips + 3)
    assert [(f.step, str(f.site), f.verdict) for f in told] == [
        (0, "fc.weight grad", "scale-search"),
        (max_skips - 1, "fc.weight grad", "persistent-overflow"),
    ]
    scale = 2.0 ** (16 - max_skips + 1)
    assert told[1].how == (
        f"the GradScaler skipped {max_skips} steps in a row, this one at a scale of {scale:g}"
    )
    assert monitor._step == max_skips + 3


@SCOPES
def test_too_many_skipped_steps_of_one_optimizer_of_two(scope):
    model = Net()
    monitor = enable(scope, model, kinds="grad", action="log", max_skips=3)
    first, second = sgd(model.fc1), sgd(model.fc2)
    scaler = torch.amp.GradScaler("cpu")
    model.fc1.weight.register_hook(lambda grad: grad * INF)
    for _ in range(5):
        model.zero_grad()
        scaler.scale(model(batch()).sum()).backward()
        scaler.step(first)
        scaler.step(second)
        scaler.update()
    assert [(str(f.site), f.verdict) for f in monitor.findings] == [
        ("fc1.weight grad", "scale-search"),
        ("fc1.weight grad", "persistent-overflow"),
    ]


@SCOPES
def test_a_step_that_goes_through_ends_the_count_of_skips(scope):
    model = Steep()
    monitor = enable(scope, model, kinds="grad", action="log", max_skips=3)
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    for slopes in ([INF, INF, 1.0] * 3, [INF] * 3):
        for slope in slopes:
            model.slope = slope
            steps_of_scaler(scaler, model, optimizer, 1)
    assert [(f.step, f.verdict) for f in monitor.findings] == [
        (0, "scale-search"),
        (3, "scale-search"),
        (6, "scale-search"),
        (9, "scale-search"),
        (11, "persistent-overflow"),
    ]


@SCOPES
def test_persistent_overflow_raises(scope):
    model = Steep(INF)
    enable(scope, model, kinds="grad", action="raise", max_skips=2)
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(nanscan.NonFiniteError, match="persistent-overflow") as caught:
        steps_of_scaler(scaler, model, optimizer, 3)
    assert caught.value.finding.step == 1


@SCOPES
def test_what_forward_makes_is_no_scale_search(scope):
    model = nn.Sequential(nn.Linear(4, 4), Do(lambda x: x / 0), nn.Linear(4, 1))
    monitor = enable(scope, model, kinds=KINDS, action="log")
    train_scaled(model, sgd(model), [batch(), batch(1)])
    assert verdicts(monitor)[0] == (0, "1 output", "origin")
    assert "scale-search" not in {f.verdict for f in monitor.findings}


@SCOPES
def test_near_the_limit_with_its_history(scope):
    model = nn.Sequential(Do(lambda x: x * 1.0))
    monitor = enable(scope, model, action="log", history=4)
    infer(model, *[torch.tensor([top, 1.0]).half() for top in (2e3, 4e3, 8e3, 1.6e4, 3.3e4, 6e4)])
    near = [f for f in monitor.findings if str(f.site) == "0 output"]
    assert [(f.step, f.verdict) for f in near] == [(4, "near-limit")]
    assert near[0].history["step"].tolist() == [1, 2, 3, 4]
    assert near[0].history["absmax"].tolist() == [4e3, 8e3, 1.6e4, 32992]
    assert "0 output is near the limit in step 4 (50% of 65504)" in str(near[0])
    assert "step 3: 16000, step 4: 32992" in str(near[0])
    assert monitor.healthy


@SCOPES
def test_made_between_two_modules_in_the_forward_of_a_third(scope):
    model = nn.Sequential(nn.Linear(4, 4), Gap(lambda x: x / 0))
    monitor = enable(scope, model, action="log")
    infer(model, batch())
    first = monitor.findings[0]
    assert (str(first.site), first.verdict) == ("1.fc2 input[0]", "origin")
    assert first.between == (Site("1.fc1", "output"), Site("1.fc2", "input", "[0]"))
    assert first.how == "made by code of no module, in the forward of 1"
    assert "between   1.fc1 output  and  1.fc2 input[0]" in str(first)


@SCOPES
def test_made_between_modules_with_others_in_between(scope):
    """What ran last before is told, which need not be where the values came from."""

    class Skips(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right, self.last = (nn.Linear(4, 4) for _ in range(3))

        def forward(self, x):
            left, right = self.left(x), self.right(x)
            return self.last(left / 0 + right)

    model = Skips()
    monitor = enable(scope, model, action="log")
    infer(model, batch())
    first = monitor.findings[0]
    assert first.between == (Site("right", "output"), Site("last", "input", "[0]"))
    assert first.how == "made by code of no module, in the forward of Skips"
