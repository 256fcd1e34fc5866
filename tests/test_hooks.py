"""What hooks see, what they leave alone, and that they leave nothing behind."""

import collections
import copy
import dataclasses
import gc
import io
import os
import pickle
import threading
import time
import weakref
from typing import NamedTuple

import pytest
import torch
from models import (
    NAN,
    SCOPES,
    Do,
    Gap,
    Net,
    batch,
    calls,
    hook_dicts,
    infer,
    seeded_and_without_trace,  # noqa: F401 - used by every test
    train,
    verdicts,
)
from models import (
    enable_scope as enable,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

import nanscan
from nanscan._collect.table import Table
from nanscan._data.places import ModulePlace, Node

ALL_KINDS = ("input", "output", "grad", "param", "state")


# -- results ---------------------------------------------------------------------------------------


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3, padding=1)
        self.norm = nn.BatchNorm2d(3)
        self.act = nn.ReLU(inplace=True)
        self.drop = nn.Dropout(0.3)
        self.lstm = nn.LSTM(12, 5, batch_first=True)
        self.attend = nn.MultiheadAttention(5, 1, batch_first=True)

    def forward(self, x):
        x = self.drop(self.act(self.norm(self.conv(x))))
        x, _ = self.lstm(x.flatten(2))
        return self.attend(x, x, x, need_weights=False)[0]


def _run(watched, scope="model"):
    torch.manual_seed(0)
    model = Mixed()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    monitor = enable(scope, model, kinds=ALL_KINDS) if watched else None
    losses = train(model, optimizer, [torch.randn(2, 1, 3, 4) for _ in range(4)])
    if monitor:
        assert len(calls(monitor)) > 20
        assert monitor.findings == []
        monitor.close()
    return losses, model.state_dict(), torch.get_rng_state(), torch.is_grad_enabled()


@SCOPES
def test_training_is_bit_identical_with_hooks(scope):
    losses, weights, rng, grad = _run(watched=False)
    losses2, weights2, rng2, grad2 = _run(watched=True, scope=scope)
    assert losses2 == losses
    assert torch.equal(rng2, rng)
    assert grad2 is grad is True
    for name, value in weights.items():
        assert torch.equal(weights2[name], value), name


@SCOPES
def test_outputs_are_the_very_same_objects(scope):
    held = torch.zeros(2)
    out = {"a": (held, None), "b": [3, "text"]}
    model = Do(lambda x, y=None: out)
    enable(scope, model)
    assert model(torch.ones(2), y=1) is out
    assert out["a"][0] is held


# -- hook dicts ------------------------------------------------------------------------------------


def _leave(how, model):
    if how == "disable":
        nanscan.enable(model)
        infer(model or Net(), batch())
        nanscan.disable()
    elif how == "close":
        monitor = nanscan.enable(model)
        infer(model or Net(), batch())
        monitor.close()
        monitor.close()
    elif how == "pause":
        monitor = nanscan.enable(model)
        monitor.pause()
        monitor.resume()
        monitor.pause()
        monitor.pause()
    elif how == "watch":
        with nanscan.watch(model):
            infer(model or Net(), batch())
    elif how == "error":
        with pytest.raises(RuntimeError, match="shapes"), nanscan.watch(model):
            (model or Net())(torch.ones(2, 7))


@pytest.mark.parametrize("how", ["disable", "close", "pause", "watch", "error"])
@SCOPES
def test_hook_dicts_are_as_before(scope, how):
    model = Net()
    model.fc1.register_forward_hook(lambda *_: None)
    model.act.register_forward_pre_hook(lambda *_: None, with_kwargs=True)
    model.register_full_backward_hook(lambda *_: None)
    foreign = nn.modules.module.register_module_forward_hook(lambda *_: None)
    before = hook_dicts(model)
    try:
        _leave(how, model if scope == "model" else None)
        assert hook_dicts(model) == before
    finally:
        foreign.remove()


@SCOPES
def test_hooks_of_users_keep_their_place_and_effect(scope):
    model = Net()
    seen = []
    model.fc1.register_forward_hook(lambda *_: seen.append("before"))
    enable(scope, model)
    doubled = model.fc1.register_forward_hook(lambda _, args, out: 2 * out)
    x = batch()
    model(x)
    doubled.remove()
    nanscan.disable()
    model(x)
    assert seen == ["before", "before"]
    assert len(model.fc1._forward_hooks) == 1


@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")
def test_full_backward_hooks_of_users_work_beside_ours():
    model = Gap(torch.relu)
    grads = []
    model.fc1.register_full_backward_hook(lambda _m, _i, out: grads.append(out[0].shape))
    monitor = nanscan.enable(model)
    train(model, torch.optim.SGD(model.parameters(), 0.1), [batch()])
    assert grads == [(3, 4)]
    assert monitor.findings == []


# -- nothing is kept alive -------------------------------------------------------------------------


@SCOPES
def test_tensors_die_when_the_user_lets_go(scope):
    model = Net()
    inner = []
    model.act.register_forward_hook(lambda _m, args, out: inner.append(weakref.ref(out)))
    enable(scope, model)
    x = batch()
    out = model(x)
    references = [weakref.ref(x), weakref.ref(out)]
    del x, out
    gc.collect()
    assert [reference() for reference in [*references, *inner]] == [None] * 3


@SCOPES
def test_model_and_optimizer_die_when_the_user_lets_go(scope):
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    enable(scope, model, kinds=ALL_KINDS)
    train(model, optimizer, [batch()])
    references = [weakref.ref(model), weakref.ref(model.fc1.weight), weakref.ref(optimizer)]
    del model, optimizer
    gc.collect()
    assert [reference() for reference in references] == [None] * 3


def test_a_failed_optimizer_step_keeps_nothing_alive():
    class Failing(torch.optim.SGD):
        def step(self, closure=None):
            raise RuntimeError("no step")

    model = Net()
    nanscan.enable()
    optimizer = Failing(model.parameters(), 0.1)
    with pytest.raises(RuntimeError, match="no step"):
        train(model, optimizer, [batch()])
    references = [weakref.ref(model), weakref.ref(model.fc1.weight), weakref.ref(optimizer)]
    del model, optimizer
    gc.collect()
    assert [reference() for reference in references] == [None] * 3


class MakesModules(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        return nn.Sequential(nn.ReLU(), nn.Tanh())(nn.ReLU()(self.fc(x)))


def test_rows_are_constant_over_many_steps():
    model = MakesModules()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    monitor = nanscan.enable()
    sizes = set()
    for step in range(200):
        criterion = nn.MSELoss()
        x = batch(step)
        train(model, optimizer, [x], lambda out, f=criterion: f(out, torch.zeros(3, 4)))
        if step >= 1:
            coverage = monitor.coverage()
            sizes.add((len(coverage["sites"]), coverage["bytes"]))
    assert len(sizes) == 1
    sites = monitor.coverage()["sites"]
    assert len(sites) == len(set(sites))
    assert "MakesModules.<ReLU> output" in sites
    assert "MakesModules.<Sequential>.<Tanh> output" in sites
    assert "MSELoss output" in sites
    assert monitor.findings == []


def test_models_made_one_after_another_share_their_rows():
    monitor = nanscan.enable()
    sizes = []
    for _ in range(10):
        model = Net()
        train(model, torch.optim.SGD(model.parameters(), 1e-3), [batch()])
        del model
        gc.collect()
        sizes.append(len(monitor.coverage()["sites"]))
    assert len(set(sizes)) == 1


def test_models_alive_together_have_names_of_their_own():
    first, second = Net(), Net()
    monitor = nanscan.enable()
    infer(first, batch())
    infer(second, batch())
    sites = monitor.coverage()["sites"]
    assert {"fc1 output", "Net#2.fc1 output", "Net input[0]", "Net#2 input[0]"} <= set(sites)


def test_a_long_list_takes_a_bounded_number_of_rows():
    model = Do(sum)
    monitor = nanscan.enable(model)
    infer(model, [torch.full((2,), float(i)) for i in range(1000)])
    rows = calls(monitor)
    assert len(rows) == 257
    assert rows["Do input[0][0]"] == rows["Do input[0][254]"] == 1
    assert rows["Do input[0][255+]"] == 745
    rest = nanscan.Site("Do", "input", "[0][255+]")
    assert monitor.history(rest)["max"].tolist() == [999.0]


def test_a_mapping_with_ever_new_keys_takes_a_bounded_number_of_rows():
    model = Do(lambda xs: None)
    monitor = nanscan.enable(model)
    for step in range(5):
        infer(model, {step * 100 + i: torch.ones(1) for i in range(100)})
    assert len(monitor.coverage()["sites"]) <= 257


# -- each tensor is scanned once -------------------------------------------------------------------


@SCOPES
def test_what_several_hooks_see_unchanged_is_scanned_once(scope):
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Identity(), nn.Linear(4, 4)), nn.Tanh())
    monitor = enable(scope, model)
    infer(model, batch(0), batch(1))
    assert calls(monitor) == {
        "Sequential input[0]": 1,
        "0 output": 1,
        "1.1 output": 1,
        "2 output": 1,
    }


@SCOPES
def test_the_result_of_a_function_is_an_input(scope):
    model = Gap()
    monitor = enable(scope, model)
    infer(model, batch())
    assert calls(monitor) == {
        "Gap input[0]": 1,
        "fc1 output": 1,
        "fc2 input[0]": 1,
        "fc2 output": 1,
    }
    out = monitor.history(nanscan.Site("fc2", "input", "[0]"))
    with torch.no_grad():
        assert out["absmax"].tolist() == [torch.tanh(model.fc1(batch())).abs().max().item()]


@SCOPES
def test_an_inplace_change_is_scanned_again_and_backward_works(scope):
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(inplace=True), nn.Conv2d(2, 1, 1))
    monitor = enable(scope, model)
    train(model, torch.optim.SGD(model.parameters(), 0.1), [torch.randn(2, 1, 5, 5)])
    rows = calls(monitor)
    assert (rows["0 output"], rows["1 output"], rows["2 output"]) == (1, 1, 1)
    assert "2 input[0]" not in rows
    assert monitor.history(nanscan.Site("0", "output"))["min"][0] < 0
    assert monitor.history(nanscan.Site("1", "output"))["min"][0] >= 0


@SCOPES
def test_a_shared_module_has_one_row_for_all_its_calls(scope):
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)
            self.act = nn.ReLU()

        def forward(self, x):
            return self.act(self.fc(self.act(self.fc(x))))

    model = Shared()
    monitor = enable(scope, model)
    infer(model, batch())
    assert calls(monitor) == {"Shared input[0]": 1, "fc output": 2, "act output": 2}


@SCOPES
def test_a_loop_over_a_cell_has_one_row(scope):
    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = nn.GRUCell(4, 4)

        def forward(self, xs):
            h = torch.zeros(3, 4)
            for x in xs:
                h = self.cell(x, h)
            return h

    model = Loop()
    monitor = enable(scope, model)
    infer(model, torch.randn(6, 3, 4))
    rows = calls(monitor)
    assert rows["cell output"] == 6
    assert rows["cell input[0]"] == 6  # views of the root's input
    assert rows["cell input[1]"] == 1  # the first state; later ones are its own output
    assert set(rows) == {"Loop input[0]", "cell output", "cell input[0]", "cell input[1]"}


def test_inference_tensors_are_scanned_each_time_they_are_seen():
    model = nn.Sequential(nn.Linear(4, 4), nn.Identity())
    monitor = nanscan.enable(model)
    with torch.inference_mode():
        model(torch.ones(2, 4))
    rows = calls(monitor)
    assert rows["0 output"] == 1
    assert monitor.history(nanscan.Site("0", "output"))["calls"].tolist() == [1]
    assert monitor.findings == []


# -- arguments and outputs of any shape ------------------------------------------------------------


class Pair(NamedTuple):
    left: torch.Tensor
    right: dict


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    hidden: tuple = ()
    note: str = "text"
    missing: torch.Tensor | None = None


class ModelOutput(collections.OrderedDict):
    """As in transformers: a dataclass and a mapping at once, with fields of None left out."""

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None:
                collections.OrderedDict.__setitem__(self, field.name, value)


@dataclasses.dataclass
class CausalOutput(ModelOutput):
    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    past: tuple | None = None


class Tuple(tuple):
    __slots__ = ()


def one():
    return torch.ones(2)


@pytest.mark.parametrize(
    ("output", "paths"),
    [
        ((one(), (one(), one())), {"[0]", "[1][0]", "[1][1]"}),
        ({"a": one(), 3: [one()], ("k",): one()}, {".a", "[3][0]", "[('k',)]"}),
        (Pair(one(), {"x": one()}), {".left", ".right.x"}),
        (Tuple((one(), one())), {"[0]", "[1]"}),
        (Output(one(), (one(),)), {".logits", ".hidden[0]"}),
        (
            CausalOutput(logits=one(), past=((one(), one()),)),
            {".logits", ".past[0][0]", ".past[0][1]"},
        ),
        (torch.ones(2, 3).max(0), {"[0]"}),
        ([None, True, 1, 1.5, "s", b"b", 1j, object(), one()], {"[8]"}),
        ((torch.ones(2, dtype=torch.int64), torch.ones(2, dtype=torch.bool)), set()),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, set) else "",
)
@SCOPES
def test_containers_are_walked(scope, output, paths):
    model = Do(lambda: output)
    monitor = enable(scope, model)
    with torch.no_grad():
        assert model() is output
    assert monitor.coverage()["sites"] == [f"Do output{path}" for path in sorted(paths)] or set(
        monitor.coverage()["sites"]
    ) == {f"Do output{path}" for path in paths}


@SCOPES
def test_containers_come_in_as_arguments_too(scope):
    model = Do(lambda *args, **kwargs: args[0])
    monitor = enable(scope, model)
    with torch.no_grad():
        model(
            one(), None, 3, "s", [one(), {"x": one()}], mask=one(), cache=(one(), None), flag=True
        )
    assert set(monitor.coverage()["sites"]) == {
        "Do input[0]",
        "Do input[4][0]",
        "Do input[4][1].x",
        "Do input.mask",
        "Do input.cache[0]",
    }


@SCOPES
def test_lstm_and_attention(scope):
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(4, 4, num_layers=2)
            self.attend = nn.MultiheadAttention(4, 2)

        def forward(self, x):
            x, _ = self.lstm(x)
            return self.attend(query=x, key=x, value=x, need_weights=True)

    model = Both()
    monitor = enable(scope, model)
    train(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        [torch.randn(3, 2, 4)],
        lambda o: o[0].sum(),
    )
    rows = calls(monitor)
    assert {
        "lstm output[0]",
        "lstm output[1][0]",
        "lstm output[1][1]",
        "attend output[0]",
        "attend output[1]",
        "lstm.weight_ih_l1 grad",
        "attend.in_proj_weight param",
        "attend.out_proj.weight grad",
    } <= set(rows)
    assert not any("attend input" in site for site in rows)
    assert set(rows.values()) == {1}
    assert monitor.coverage()["not_called"] == ["attend.out_proj"]


@dataclasses.dataclass
class Branch:
    value: torch.Tensor
    parent: "Branch | None" = None
    children: list = dataclasses.field(default_factory=list)

    def grow(self, depth):
        if depth:
            self.children = [Branch(one(), self).grow(depth - 1) for _ in range(3)]
        return self


@SCOPES
def test_containers_that_contain_themselves(scope):
    ring = [one()]
    ring += [ring] * 5
    model = Do(lambda *args: args)
    monitor = enable(scope, model)
    with torch.no_grad():
        model(ring, Branch(one()).grow(3))
    sites = monitor.coverage()["sites"]
    assert len(sites) == 1 + (1 + 3 + 9 + 27)
    assert {"Do input[0][0]", "Do input[1].value", "Do input[1].children[2].value"} < set(sites)


class Hostile(collections.abc.Mapping):
    def __getitem__(self, key):
        raise RuntimeError("not for you")

    def __iter__(self):
        raise RuntimeError("not for you")

    def __len__(self):
        return 1


@SCOPES
def test_an_argument_that_cannot_be_read_does_not_stop_the_model(scope):
    model = Do(lambda *args, **kwargs: args[1])
    monitor = enable(scope, model)
    with torch.no_grad():
        out = model(Hostile(), one(), key=Hostile())
    assert out.tolist() == [1.0, 1.0]
    assert "Do input[1]" in monitor.coverage()["sites"]
    skipped = monitor.coverage()["skipped"]
    assert set(skipped) == {"Do input[0]", "Do input.key"}
    assert all(why == "reading it raised RuntimeError: not for you" for why in skipped.values())


# -- tensors that cannot be scanned, or not as they are --------------------------------------------


class Scaled(torch.Tensor):
    """A subclass without a wrapper: its own memory."""


def test_subclasses_are_scanned_over_their_memory():
    model = Net()
    model.fc1.weight = nn.Parameter(model.fc1.weight.detach().as_subclass(Scaled))
    monitor = nanscan.enable(model)
    train(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        [batch()],
        lambda o: o.sum().as_subclass(torch.Tensor),
    )
    rows = calls(monitor)
    assert {"fc1.weight param", "fc1.weight grad", "fc1 output"} <= set(rows)
    assert monitor.coverage()["skipped"] == {}


@SCOPES
def test_sparse_and_lazy_tensors(scope):
    model = Do(lambda *args: args)
    monitor = enable(scope, model)
    sparse = torch.sparse_coo_tensor([[0, 1]], [1.0, NAN], (3,), check_invariants=True)
    negative = torch.tensor([1 + 1j, 1 + 2j]).conj().imag
    assert negative.is_neg()
    with pytest.warns(nanscan.NonFiniteWarning, match=r"Do input\[0\].values"), torch.no_grad():
        model(sparse, negative)
    assert monitor.findings[0].stats.nan_count == 1
    assert monitor.history(nanscan.Site("Do", "input", "[1]"))["min"].tolist() == [-2.0]


@SCOPES
def test_torch_func_transforms_run_and_are_listed_as_skipped(scope):
    model = Net()
    monitor = enable(scope, model)
    x = batch()
    params = dict(model.named_parameters())
    batched = torch.func.vmap(lambda row: torch.func.functional_call(model, params, row))(x)
    grads = torch.func.grad(lambda p: torch.func.functional_call(model, p, x).sum(), has_aux=False)(
        params
    )
    nanscan.disable()
    assert torch.allclose(batched, model(x))
    model(x).sum().backward()
    assert torch.equal(grads["fc1.weight"], model.fc1.weight.grad)
    skipped = monitor.coverage()["skipped"]
    assert skipped["fc1 output"] == "it is inside a torch.func transform, which hides its values"
    assert monitor.findings == []


@SCOPES
def test_fake_and_meta_tensors_pass_through(scope):
    from torch._subclasses.fake_tensor import FakeTensorMode

    model = Net().to("meta")
    monitor = enable(scope, model)
    assert model(torch.ones(2, 4, device="meta")).shape == (2, 4)
    skipped = monitor.coverage()["skipped"]
    assert skipped["fc1 output"] == "it is on the meta device, which has no data"
    assert skipped["fc1.weight param"] == "it is on the meta device, which has no data"
    with FakeTensorMode():
        fake = Net()
        monitor = enable(scope, fake)
        assert fake(torch.ones(2, 4)).shape == (2, 4)
        monitor.flush()
    assert monitor.findings == []
    assert (
        "fc2 output" in monitor.coverage()["skipped"]
        or "Net#2.fc2 output" in monitor.coverage()["skipped"]
    )


def test_complex_and_float8_modules():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4, dtype=torch.complex64)
            self.quantise = Do(lambda x: x.abs().clamp(max=4).to(torch.float8_e4m3fn))

        def forward(self, x):
            return self.quantise(self.fc(x))

    model = Both()
    monitor = nanscan.enable(model)
    infer(model, torch.ones(2, 4, dtype=torch.complex64))
    assert set(calls(monitor)) == {"Both input[0]", "fc output", "quantise output"}
    assert monitor.findings == []


# -- optimizers ------------------------------------------------------------------------------------


@SCOPES
def test_gradients_before_and_parameters_after_the_step(scope):
    model = nn.Linear(2, 1, bias=False)
    nn.init.constant_(model.weight, 3.0)
    monitor = enable(scope, model, kinds=ALL_KINDS)
    optimizer = torch.optim.SGD(model.parameters(), 0.5, momentum=0.9)
    train(model, optimizer, [torch.tensor([[1.0, 2.0]])] * 2, lambda out: out.sum())
    grad = monitor.history(nanscan.Site("weight", "grad"))
    assert (grad["min"].tolist(), grad["max"].tolist()) == ([1.0, 1.0], [2.0, 2.0])
    param = monitor.history(nanscan.Site("weight", "param"))
    assert param["calls"].tolist() == [1, 1]
    assert param["min"].tolist() == [2.0, pytest.approx(0.1)]
    momentum = monitor.history(nanscan.Site("weight", "state", "momentum_buffer"))
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
    assert calls(monitor) == {
        "fc2.weight grad": 1,
        "fc2.bias grad": 1,
        "fc2.weight param": 1,
        "fc2.bias param": 1,
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
    assert monitor._step == 2
    assert rows["fc1.weight param"] == 1
    assert rows["fc2 output"] >= 3
    assert not any("LBFGS" in site for site in monitor.coverage()["sites"])
    assert monitor.findings == []


@SCOPES
def test_sparse_gradients(scope):
    model = nn.Embedding(5, 3, sparse=True)
    monitor = enable(scope, model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    train(model, optimizer, [torch.tensor([1, 2])], lambda out: 7 * out.sum())
    history = monitor.history(nanscan.Site("weight", "grad", ".values"))
    assert history["max"].tolist() == [7.0]
    assert monitor.coverage()["skipped"] == {}
    with pytest.warns(nanscan.NonFiniteWarning):
        train(model, optimizer, [torch.tensor([1, 2])], lambda out: NAN * out.sum())
    assert verdicts(monitor) == [
        (1, "loss", "origin"),
        (1, "weight grad.values", "propagated"),
        (1, "weight param", "propagated"),
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
    assert monitor._step == 0
    both = torch.optim.SGD([*other.parameters(), *watched.parameters()], 0.1)
    train(lambda x: watched(x) + other(x), both, [batch()])
    rows = calls(monitor)
    assert sum("param" in site for site in rows) == 4
    assert sum("output" in site for site in rows) == 3


def test_a_parameter_that_is_gone_leaves_no_name_for_its_id():
    """Its id may be used again, by a parameter of anybody."""
    model = Net()
    monitor = nanscan.enable(model)
    assert monitor._registry.parameters_known == 4
    model.fc1.weight = None
    gc.collect()
    assert monitor._registry.parameters_known == 3


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
    assert monitor._step == 2
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
    assert monitor._step == 2
    assert calls(monitor)["fc1.weight param"] == 1


# -- copies, scripts, compilers --------------------------------------------------------------------


@pytest.mark.parametrize("still_on", [True, False])
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "save"])
@SCOPES
def test_copies_run_and_are_not_watched(scope, how, still_on):
    model = Net()
    monitor = enable(scope, model)
    infer(model, batch())
    if how == "deepcopy":
        twin = copy.deepcopy(model)
    elif how == "pickle":
        twin = pickle.loads(pickle.dumps(model))
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    if not still_on:
        nanscan.disable()
    sites, steps = len(monitor.coverage()["sites"]), monitor._step
    with torch.no_grad():
        assert torch.equal(twin(batch()), model(batch()))
        infer(twin, torch.full((3, 4), NAN)) if scope == "model" or not still_on else None
    train(twin, torch.optim.SGD(twin.parameters(), 0.1), [batch()])
    if scope == "model":
        assert len(monitor.coverage()["sites"]) == sites
        assert monitor._step == steps + still_on
    assert monitor.findings == []


def test_a_pickled_model_does_not_bring_the_monitor_along():
    model = Net()
    plain = len(pickle.dumps(model))
    nanscan.enable(model)
    train(model, torch.optim.SGD(model.parameters(), 0.1), [batch()])
    assert len(pickle.dumps(model)) < plain + 2000


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@SCOPES
def test_scripted_and_traced_modules(scope):
    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.scripted = torch.jit.script(nn.Linear(4, 4))
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            return self.fc(self.scripted(x))

    model = Holder()
    expected = model(batch()).detach()
    monitor = enable(scope, model)
    infer(model, batch())
    if scope == "model":
        assert {"fc input[0]", "fc output"} <= set(calls(monitor))
        why = monitor.coverage()["skipped"]["scripted output"]
        assert why == "torch takes no hooks on a scripted module"
    else:
        assert {"scripted output", "fc output"} <= set(calls(monitor))
    plain = Net()
    if scope == "model":
        monitor = nanscan.enable(plain)
    traced = torch.jit.trace(plain, batch())
    monitor.close()
    assert torch.equal(model(batch()).detach(), expected)
    assert torch.equal(traced(batch(1)), plain(batch(1)))


@pytest.mark.filterwarnings("ignore:.*global hooks on modules:UserWarning")
@SCOPES
def test_compiled_models_run_whole_and_give_the_same(scope):
    torch._dynamo.reset()
    model = Gap()
    expected = model(batch()).detach()
    monitor = enable(scope, model)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    assert torch.equal(compiled(batch()).detach(), expected)
    train(compiled, optimizer, [batch(), batch(1)])
    assert monitor._step == 2
    rows = calls(monitor)
    prefix = "" if scope == "model" else "_orig_mod."  # the compiled module is the outermost one
    assert rows[f"{prefix}fc1.weight grad"] == rows[f"{prefix}fc1.weight param"] == 1
    assert monitor.findings == []
    torch._dynamo.reset()


@pytest.mark.parametrize("reentrant", [True, False])
@SCOPES
def test_checkpointing_makes_no_steps_of_its_own(scope, reentrant):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.Linear(4, 4)
            self.block = Gap()
            self.head = nn.Linear(4, 4)

        def forward(self, x):
            return self.head(checkpoint(self.block, self.stem(x), use_reentrant=reentrant))

    model = Checkpointed()
    monitor = enable(scope, model)
    train(model, torch.optim.SGD(model.parameters(), 0.1), [batch(i) for i in range(3)])
    assert monitor._step == 3
    assert (
        calls(monitor)["block.fc1 output"] == calls(monitor)["block.fc1 output (recomputed)"] == 1
    )
    assert monitor.findings == []


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_forward_within_backward_is_no_step_without_an_optimizer_either(reentrant):
    gc.collect()  # an optimizer of an earlier test would make forwards wait for it
    block = Gap()
    model = Do(lambda x: checkpoint(block, x, use_reentrant=reentrant))
    monitor = nanscan.enable()
    for seed in range(2):
        model(batch(seed).requires_grad_()).sum().backward()
    assert monitor._step == 2


# -- threads and processes -------------------------------------------------------------------------


def _in_threads(*functions):
    errors = []

    def guarded(function):
        try:
            function()
        except BaseException as error:  # noqa: BLE001 - reported by the main thread
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert errors == []


@pytest.fixture
def _switch_often():
    import sys

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("_switch_often")
def test_rows_added_in_several_threads_belong_to_their_nodes():
    table = Table(history=1, near_limit=0.5)
    place = ModulePlace("place", None, late_keywords=False)

    def run():
        for _ in range(3000):
            table.add(Node(place, "output"))

    _in_threads(run, run, run)
    assert len(table.nodes) == 9000
    assert [node.row for node in table.nodes] == list(range(9000))


@pytest.mark.usefixtures("_switch_often")
@SCOPES
def test_one_model_in_two_threads(scope):
    model = nn.Sequential(*[Net() for _ in range(20)])
    with torch.no_grad():
        tops = [model[: i + 1](batch()).abs().max().item() for i in range(20)]
        expected = model(batch())
    monitor = enable(scope, model)

    def run():
        with torch.no_grad():
            for _ in range(5):
                assert torch.equal(model(batch()), expected)

    _in_threads(run, run)
    sites = monitor.coverage()["sites"]
    assert len(sites) == len(set(sites))
    assert {f"{i}.{layer} output" for i in range(20) for layer in ("fc1", "act", "fc2")} < set(
        sites
    )
    assert monitor.findings == []
    for i in range(20):
        layer = monitor.history(nanscan.Site(f"{i}.fc2", "output"))
        assert set(layer["absmax"].tolist()) == {tops[i]}


@pytest.mark.usefixtures("_switch_often")
def test_two_models_train_in_two_threads():
    models = [Net(), Net()]
    monitors = [nanscan.enable(model) for model in models]

    def run(model):
        return lambda: train(
            model, torch.optim.SGD(model.parameters(), 0.01), [batch(i) for i in range(10)]
        )

    _in_threads(*map(run, models))
    for monitor in monitors:
        assert monitor._step == 10
        assert calls(monitor)["fc1.weight param"] == 1
        assert monitor.findings == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@SCOPES
def test_a_forked_child_goes_on(scope):
    model = Net()
    monitor = enable(scope, model)
    infer(model, batch())
    child = os.fork()
    if child == 0:
        code = 1
        try:
            infer(model, batch())
            code = 0 if monitor._step == 2 and not monitor.findings else 2
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert monitor._step == 1


def test_threads_that_meet_a_model_at_once():
    class Slow(dict):
        def __setitem__(self, key, value):
            time.sleep(0.005)  # another thread may look while a module is half named
            super().__setitem__(key, value)

    model, errors = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), []
    monitor = nanscan.enable()
    monitor._registry._lifetimes = Slow()

    def run():
        try:
            model(torch.randn(3, 4))
        except Exception as error:  # noqa: BLE001 - any is a failure
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert {"0 output", "1 output"} <= set(monitor.coverage()["sites"])
