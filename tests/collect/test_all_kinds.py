"""Every kind of site, alone and together: what is seen there, and that it changes nothing."""

import threading

import pytest
import torch
from torch import nn

import nanscan
from helpers.models import (
    INF,
    NAN,
    SCOPES,
    Mixed,
    Net,
    alone,
    batch,
    calls,
    enable,
    history,
    infer,
    run_quiet,
    set_nan,
    sgd,
    sites,
    train,
    verdicts,
)
from nanscan import Site
from nanscan._data.site import DEFAULT_KINDS, KINDS

pytestmark = pytest.mark.usefixtures("one_thread")

ALL_OR_ONE = pytest.mark.parametrize(
    "kinds", [*KINDS, KINDS], ids=lambda k: k if k in KINDS else "all"
)


# -- each alone, and all together ------------------------------------------------------------------


class Everything(Mixed):
    """Has all that is observed, and changes hooked outputs in place."""

    def __init__(self):
        super().__init__(width=4, heads=2)
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
    assert monitor.coverage().skipped == {}
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
    assert monitor._collector._kinds == set(DEFAULT_KINDS)


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
    assert verdicts(monitor) == [(1, f"{alone(scope, model, 'mask')} buffer", "origin")]
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
    assert first.how == "made by code outside of any module"
    assert first.between == (Site("fc2", "output"), Site("loss", "loss"))
    assert "loss is non-finite in step 2 (origin: made by code outside of any module)" in str(first)
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
    assert monitor.steps == 1


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
    assert first.how.startswith("made by code outside of any module")
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
    assert monitor.steps == 3
    assert monitor.findings == []
    assert sites(monitor, "state")
