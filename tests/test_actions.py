"""What is done about a bad step: the optimizer does not take it, and it is saved for a replay."""

import gc
import inspect
import json
import random
import subprocess
import sys
import textwrap
import threading
import weakref
from collections import OrderedDict
from typing import NamedTuple

import numpy as np
import pytest
import torch
from models import (
    INF,
    NAN,
    SCOPES,
    Do,
    Gap,
    Net,
    batch,
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
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import nanscan
from nanscan import NonFiniteError, Site
from nanscan._collect import skip_step
from nanscan._collect.snapshot import Snapshot
from nanscan._collect.table import Table
from nanscan._output import save

# -- steps that are not taken ----------------------------------------------------------------------

OPTIMIZERS = sorted(
    name
    for name, kind in vars(torch.optim).items()
    if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer)
    if kind is not torch.optim.Optimizer
)
VARIANTS = [
    *[(name, {}) for name in OPTIMIZERS],
    *[
        (name, {option: True})
        for name in OPTIMIZERS
        for option in ("foreach", "fused", "amsgrad", "maximize")
        if option in inspect.signature(getattr(torch.optim, name)).parameters
    ],
    ("SGD", {"momentum": 0.9}),
    ("SGD", {"momentum": 0.9, "nesterov": True, "foreach": True}),
    ("SGD", {"momentum": 0.9, "fused": True}),
    ("RMSprop", {"momentum": 0.9, "centered": True}),
    ("Adam", {"foreach": False, "weight_decay": 0.1}),
    ("LBFGS", {"line_search_fn": "strong_wolfe"}),
]


def optimizers(variants):
    names = [f"{name}-{'-'.join(options)}" for name, options in variants]
    return pytest.mark.parametrize(("name", "options"), variants, ids=names)


EVERY_OPTIMIZER = optimizers(VARIANTS)
EVERY_OTHER_OPTIMIZER = optimizers([v for v in VARIANTS if v[0] != "LBFGS"])  # it wants a closure


class Learner:
    """A small model with an optimizer of some class, which takes steps on given gradients."""

    def __init__(self, name, options):
        torch.manual_seed(0)
        kind = getattr(torch.optim, name)
        self.sparse = name == "SparseAdam"
        self.model = nn.Embedding(5, 4, sparse=True) if self.sparse else Net()
        parameters = [p for p in self.model.parameters() if name != "Muon" or p.dim() == 2]
        options = dict(options)
        if "weight_decay" in inspect.signature(kind).parameters:
            options.setdefault("weight_decay", 0.01)
        if name == "LBFGS":
            options["lr"] = 0.1
            groups = parameters
        else:
            groups = [{"params": parameters[:1], "lr": 0.05}, {"params": parameters[1:]}]
            groups = groups if parameters[1:] else groups[:1]
        self.optimizer = kind(groups, **options)
        self.parameters = parameters

    def set_gradients(self, seed, bad):
        generator = torch.Generator().manual_seed(seed)
        for p in self.parameters:
            p.grad = torch.randn(p.shape, generator=generator)
            if self.sparse:
                p.grad = p.grad.to_sparse(1)
        if bad is not None:
            grad = self.parameters[-1].grad
            (grad._values() if self.sparse else grad).view(-1)[1] = bad

    def step(self, seed, bad=None):
        """One step on gradients of that seed; those of LBFGS are the loss's own."""
        if isinstance(self.optimizer, torch.optim.LBFGS):
            return self.lbfgs_step(seed, 0 if bad is not None else None)
        self.set_gradients(seed, bad)
        return self.optimizer.step()

    def lbfgs_step(self, seed, bad_call):
        calls = 0

        def closure():
            nonlocal calls
            self.optimizer.zero_grad()
            loss = (self.model(batch(seed)) - batch(seed + 1)).square().mean()
            loss.backward()
            if calls == bad_call:
                self.parameters[-1].grad[1] = NAN
            calls += 1
            return loss

        loss = self.optimizer.step(closure)
        assert bad_call is None or calls == bad_call + 1
        return loss

    def state(self):
        """Every bit of parameters and optimizer state."""
        index = {id(p): i for i, p in enumerate(self.parameters)}
        return {
            "parameters": [bits(p) for p in self.parameters],
            "state": {index[id(p)]: bits(s) for p, s in self.optimizer.state.items()},
            "groups": [
                {key: bits(value) for key, value in group.items() if key != "params"}
                for group in self.optimizer.param_groups
            ],
            "attributes": sorted(vars(self.optimizer)),
        }


def bits(x):
    if isinstance(x, torch.Tensor):
        data = x.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
        return str(x.dtype), tuple(x.shape), data
    if isinstance(x, dict):
        return {key: bits(value) for key, value in x.items()}
    return [bits(item) for item in x] if isinstance(x, (list, tuple)) else x


@EVERY_OPTIMIZER
@pytest.mark.parametrize(("before", "bad"), [(0, NAN), (2, -INF)])
def test_a_skipped_step_leaves_every_bit_as_it_was(name, options, before, bad):
    learner, other = Learner(name, options), Learner(name, options)
    monitor = nanscan.enable(learner.model, skip_step=True, action="log")
    for seed in range(before):
        learner.step(seed)
        other.step(seed)
    start = learner.state()
    assert start == other.state()
    learner.step(7, bad)
    assert learner.state() == start
    assert not all(p.grad is None for p in learner.parameters)
    assert verdicts(monitor) == [(before, str(monitor.findings[0].site), "origin")]
    assert monitor.findings[0].site.kind == "grad"
    for seed in range(10, 13):
        learner.step(seed)
        other.step(seed)
        assert learner.state() == other.state()
    assert learner.state() != start
    assert monitor.healthy
    assert [f.verdict for f in monitor.findings] == ["origin", "recovered"]


@EVERY_OTHER_OPTIMIZER
def test_without_skip_step_the_same_step_is_taken(name, options):
    learner = Learner(name, options)
    nanscan.enable(learner.model, action="log")
    learner.step(0)
    start = learner.state()
    learner.step(7, NAN)
    assert learner.state() != start


@EVERY_OTHER_OPTIMIZER
def test_a_closure_makes_the_gradients_that_count(name, options):
    learner, other = Learner(name, options), Learner(name, options)
    monitor = nanscan.enable(learner.model, skip_step=True, action="log")

    def step(of, seed, bad, keyword):
        def closure():
            assert torch.is_grad_enabled()
            of.optimizer.zero_grad()
            of.set_gradients(seed, bad)
            return seed

        assert (
            of.optimizer.step(closure=closure) if keyword else of.optimizer.step(closure)
        ) == seed

    for seed, keyword in ((0, False), (1, True)):
        step(learner, seed, None, keyword)
        step(other, seed, None, keyword)
        start = learner.state()
        assert start == other.state()
        step(learner, 7, INF, keyword)
        assert learner.state() == start
    # What the bad step left in .grad is none of the next one's: its closure makes its own.
    assert [f.verdict for f in monitor.findings] == ["origin", "recovered", "origin"]


def test_of_two_calls_of_a_closure_the_last_counts():
    class Twice(torch.optim.SGD):
        def step(self, closure):
            closure()
            return super().step(closure)

    model = Net()
    optimizer = Twice(model.parameters())
    nanscan.enable(model, skip_step=True, action="log")
    for first, second in ((NAN, 1.0), (1.0, NAN), (1.0, 1.0)):
        values = iter((first, second))
        before = bits(model.state_dict())

        def closure(values=values):
            value = next(values)
            for p in model.parameters():
                p.grad = torch.full_like(p, value)

        optimizer.step(closure)
        assert (bits(model.state_dict()) == before) == (second is NAN)


def test_a_model_that_first_runs_in_a_closure_has_its_names():
    model = Net()
    optimizer = sgd(model)
    monitor = nanscan.enable(skip_step=True, action="log")

    def closure():
        loss = model(batch()).sum()
        loss.backward()
        model.fc1.bias.grad[0] = NAN
        return loss

    before = bits(model.state_dict())
    optimizer.step(closure)
    assert bits(model.state_dict()) == before
    assert verdicts(monitor) == [(0, "fc1.bias grad", "origin")]


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
@pytest.mark.parametrize("bad_call", [0, 1, 3])
@pytest.mark.parametrize("before", [0, 1])
def test_a_step_of_lbfgs_is_taken_back(search, bad_call, before):
    learner, other = (Learner("LBFGS", {"line_search_fn": search}) for _ in range(2))
    monitor = nanscan.enable(learner.model, skip_step=True, action="log")
    for of in (learner, other):
        for seed in range(before):
            of.lbfgs_step(seed, None)
    start = learner.state()
    loss = learner.lbfgs_step(5, bad_call)
    assert torch.isfinite(loss)
    assert learner.state() == start
    assert learner.parameters[-1].grad.isnan().any()
    assert [f.verdict for f in monitor.findings] == ["origin"]
    for of in (learner, other):
        of.lbfgs_step(9, None)
    assert learner.state() == other.state()


@SCOPES
def test_a_run_with_a_bad_batch_equals_one_without_it(scope):
    def run(inputs, **options):
        torch.manual_seed(0)
        model = Net()
        monitor = enable(scope, model, action="log", **options)
        train(model, torch.optim.Adam(model.parameters(), 0.1), inputs)
        monitor.close()
        return model.state_dict(), monitor

    good = [batch(i) for i in range(4)]
    expected, _ = run(good)
    same, _ = run(good, skip_step=True)
    assert bits(same) == bits(expected)
    skipped, monitor = run([*good[:2], set_nan(batch(9)), *good[2:]], skip_step=True)
    assert bits(skipped) == bits(expected)
    assert monitor.findings[0].step == 2
    assert monitor._step == 5
    spoilt, _ = run([*good[:2], set_nan(batch(9)), *good[2:]])
    assert not all(torch.isfinite(x).all() for x in spoilt.values())


def test_gradients_stay_the_very_same():
    learner = Learner("SGD", {})
    nanscan.enable(learner.model, skip_step=True, action="log")
    learner.set_gradients(0, NAN)
    grads = [p.grad for p in learner.parameters]
    before = [(bits(g), g._version) for g in grads]
    learner.optimizer.step()
    assert all(p.grad is g for p, g in zip(learner.parameters, grads, strict=True))
    assert [(bits(g), g._version) for g in grads] == before


def test_a_bad_activation_alone_skips_nothing():
    model = Net()
    optimizer = sgd(model)
    monitor = nanscan.enable(model, skip_step=True, action="log")
    before = bits(model.state_dict())
    model(batch()).sum().backward()
    nanscan.probe("bad", set_nan(batch()))
    optimizer.step()
    assert [f.site.kind for f in monitor.findings] == ["probe"]
    assert bits(model.state_dict()) != before


def test_only_the_optimizer_with_the_bad_gradient_is_kept_from_its_step():
    model = Net()
    first, second = sgd(model.fc1), sgd(model.fc2)
    nanscan.enable(model, skip_step=True, action="log")
    model(batch()).sum().backward()
    model.fc2.bias.grad[0] = INF
    before = bits(model.fc1.state_dict()), bits(model.fc2.state_dict())
    first.step()
    second.step()
    assert bits(model.fc1.state_dict()) != before[0]
    assert bits(model.fc2.state_dict()) == before[1]


def test_within_one_step_of_the_user_each_step_is_judged_by_itself():
    """A row that is bad stays so until the step ends, and later gradients may be fine."""
    learner = Learner("SGD", {})
    monitor = nanscan.enable(learner.model, skip_step=True, action="log")
    monitor.step()
    for bad in (NAN, None, INF, None):
        before = learner.state()["parameters"]
        learner.step(1, bad)
        assert (learner.state()["parameters"] == before) == (bad is not None)
    monitor.step()
    assert [f.step for f in monitor.findings] == [1]


def test_what_a_scaler_saw_bad_in_the_same_step_counts_as_well():
    learner = Learner("SGD", {})
    monitor = nanscan.enable(learner.model, skip_step=True, action="log")
    monitor.step()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.zeros(()))
    learner.set_gradients(0, INF)
    scaler.step(learner.optimizer)  # which skips by itself
    before = learner.state()
    learner.step(1, INF)
    assert learner.state() == before


def test_clean_steps_are_not_scanned_twice(monkeypatch):
    """With a mask that goes in at each step, which takes a ticket as well."""
    monkeypatch.setattr(skip_step, "_any_nonfinite", lambda tensors: pytest.fail("a second scan"))
    model = Do(lambda x, mask: x.sum() + mask.exp().sum())
    model.fc = nn.Linear(4, 4)
    model.function = lambda x, mask: (model.fc(x) + mask).softmax(-1)[:, :2].sum()
    optimizer = sgd(model)
    monitor = nanscan.enable(model, skip_step=True)
    mask = torch.tensor([0.0, 0.0, -INF, 0.0])
    for i in range(3):
        model(batch(i), mask).backward()
        optimizer.step()
    assert monitor._table.last_ticket > 0
    assert monitor.findings == []


@pytest.mark.parametrize("options", [{"every": 5}, {"warmup": 9}])
def test_gradients_count_in_steps_that_scan_nothing_else(options):
    model = Net()
    monitor = nanscan.enable(model, skip_step=True, action="log", **options)
    optimizer = sgd(model)
    train(model, optimizer, [batch()])
    before = bits(model.state_dict())
    train(model, optimizer, [set_nan(batch())])
    assert bits(model.state_dict()) == before
    assert monitor.findings[0].site.kind == "grad"
    train(model, optimizer, [batch()])
    assert bits(model.state_dict()) != before


def test_what_is_ignored_is_no_reason_to_skip():
    learner = Learner("SGD", {})
    nanscan.enable(learner.model, skip_step=True, action="log", ignore="fc2.*")
    before = learner.state()
    learner.step(0, NAN)
    assert learner.state() != before


def test_gradients_of_no_watched_model_are_no_reason_to_skip():
    learner = Learner("SGD", {})
    nanscan.enable(Net(), skip_step=True, action="log")
    before = learner.state()
    learner.step(0, NAN)
    assert learner.state() != before


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64])
def test_gradients_of_every_type_count(dtype):
    model = nn.Module()
    model.p = nn.Parameter(torch.ones(5, dtype=dtype))
    optimizer = sgd(model)
    nanscan.enable(model, skip_step=True, action="log")
    for bad in (NAN, None):
        model.p.grad = torch.full((5,), 1e4, dtype=dtype)
        if bad:
            model.p.grad[2] = complex(0, bad) if dtype.is_complex else bad
        before = bits(model.p)
        optimizer.step()
        assert (bits(model.p) == before) == bool(bad)


def test_empty_and_missing_gradients_do_no_harm():
    model = nn.Module()
    model.p = nn.Parameter(torch.ones(0))
    model.q = nn.Parameter(torch.ones(3))
    model.r = nn.Parameter(torch.ones(2))
    optimizer = sgd(model)
    nanscan.enable(model, skip_step=True, action="log")
    model.p.grad, model.q.grad = torch.ones(0), torch.tensor([1.0, NAN, 1.0])
    optimizer.step()
    assert model.q.tolist() == [1, 1, 1]


def test_the_action_raise_raises_with_the_parameters_unharmed():
    learner = Learner("Adam", {})
    monitor = nanscan.enable(learner.model, skip_step=True, action="raise")
    before = learner.state()
    with pytest.raises(NonFiniteError):
        learner.step(0, NAN)
    assert learner.state() == before
    assert monitor._step == 1


def test_hooks_of_the_user_that_raise_find_everything_as_it_was():
    learner = Learner("Adam", {"fused": True})
    nanscan.enable(learner.model, skip_step=True, action="log")
    learner.step(0)
    before = learner.state()

    def raises(optimizer, args, kwargs):
        raise KeyError("mine")

    for register in ("register_step_pre_hook", "register_step_post_hook"):
        handle = getattr(learner.optimizer, register)(raises)
        with pytest.raises(KeyError, match="mine"):
            learner.step(1, NAN)
        handle.remove()
        assert learner.state() == before
        assert all(p.grad is not None for p in learner.parameters)
    learner.step(2)
    assert learner.state() != before


@pytest.mark.parametrize("when", ["pre", "closure", "post"])
def test_disable_in_between_leaves_nothing(when):
    learner = Learner("SGD", {"momentum": 0.9})
    nanscan.enable(learner.model, skip_step=True, action="log")
    disable = lambda *_: nanscan.disable()
    before = learner.state()
    if when == "closure":
        learner.optimizer.step(lambda: (learner.set_gradients(0, NAN), nanscan.disable()))
    else:
        getattr(learner.optimizer, f"register_step_{when}_hook")(disable)
        learner.step(0, NAN)
    assert learner.state() == before
    learner.step(0, NAN)
    assert learner.state() != before


def test_two_monitors_skip_for_each_other():
    model = nn.Sequential(Net(), Net())
    optimizer = sgd(model, momentum=0.9)
    for order in ((0, 1), (1, 0)):
        for i in order:
            nanscan.enable(model[i], skip_step=True, action="log")
        for bad in (0, 1, None):
            for p in model.parameters():
                p.grad = torch.ones_like(p)
            if bad is not None:
                model[bad].fc1.bias.grad[0] = NAN
            before = bits(model.state_dict())
            optimizer.step()
            assert (bits(model.state_dict()) == before) == (bad is not None)
            optimizer.step(lambda: 1)
            assert (bits(model.state_dict()) == before) == (bad is not None)
        nanscan.disable()
    assert not [key for key in vars(optimizer) if "nanscan" in key]


class Counting(torch.optim.Adam):
    """A subclass that runs its base's step inside of its own, and counts on itself."""

    count = 0

    def step(self, closure=None):
        self.count = self.count + 1
        assert isinstance(self, Counting)
        return super().step(closure)


def test_a_subclass_that_calls_its_base_is_kept_from_its_step_too():
    model = Net()
    torch.optim.Adam(model.parameters())  # from now on the base's step runs hooks of its own
    optimizer = Counting(model.parameters())
    monitor = nanscan.enable(model, skip_step=True, action="log")
    for number, bad in enumerate((False, True, False)):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        if bad:
            model.fc1.bias.grad[1] = NAN
        before = bits(model.state_dict()), optimizer.count
        optimizer.step()
        assert (bits(model.state_dict()) == before[0]) == bad
        assert optimizer.count == before[1] + (not bad)
        assert monitor._step == number + 1
    assert monitor.findings[0].step == 1
    optimizer.step(lambda: model.fc1.bias.grad.fill_(1))  # what it sets on a stand-in, it keeps
    assert optimizer.count == 3


def test_a_step_that_raises_leaves_gradients_and_hooks():
    class Broken(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            raise OSError("mine")

    model = Net()
    optimizer = Broken(model.parameters())
    nanscan.enable(model, skip_step=True, action="log")
    for _ in range(2):
        for p in model.parameters():
            p.grad = torch.full_like(p, NAN)
        before = bits(model.state_dict())
        with pytest.raises(OSError, match="mine"):
            optimizer.step()
        assert bits(model.state_dict()) == before
        assert all(p.grad.isnan().all() for p in model.parameters())


def test_no_gradients_no_skip_step():
    with pytest.raises(ValueError, match="grad"):
        nanscan.enable(Net(), skip_step=True, kinds=("output",))
    with pytest.raises(TypeError, match="skip_step"):
        nanscan.enable(Net(), skip_step="yes")


# -- with a GradScaler, and as on a device ---------------------------------------------------------


@pytest.fixture
def as_on_a_device(monkeypatch):
    """Lets CPU tensors be taken for such that the host knows nothing of without waiting."""
    monkeypatch.setattr(skip_step, "_is_on_host", lambda x: False)
    monkeypatch.setattr(Table, "on_device", True)


FUSED = [
    ("Adam", {}),
    ("Adam", {"amsgrad": True}),
    ("AdamW", {}),
    ("Adagrad", {}),
    ("SGD", {}),
    ("SGD", {"momentum": 0.9}),
]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("device", [False, True])
def test_a_scaler_skips_by_itself_too(fused, device, request):
    if device:
        request.getfixturevalue("as_on_a_device")
    learner = Learner("Adam", {"fused": fused})
    monitor = nanscan.enable(learner.model, skip_step=True, action="log")
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    scales = []
    for bad in (None, INF, None, NAN, None):
        scaler.scale(torch.zeros(()))
        learner.set_gradients(3, bad)
        before = learner.state()
        scaler.step(learner.optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        after = learner.state()
        assert (after["parameters"] == before["parameters"]) == (bad is not None)
        assert after["attributes"] == before["attributes"]
        if bad is not None:
            assert after == before
    assert scales == [64, 32, 32, 16, 16]
    assert monitor._step == 5
    scaler.scale(torch.zeros(()))
    learner.set_gradients(3, None)
    scaler.unscale_(learner.optimizer)
    learner.parameters[0].grad[0] = NAN  # after the scaler looked
    before = learner.state()
    scaler.step(learner.optimizer)
    assert learner.state() == before


class Syncs(TorchDispatchMode):
    """Counts how often the host reads a tensor's value."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def takes_found_inf(learner):
    """Adagrad does not in every version of torch."""
    return getattr(learner.optimizer, "_step_supports_amp_scaling", False)


@pytest.mark.parametrize(("name", "options"), FUSED)
def test_fused_optimizers_skip_without_a_sync(name, options, as_on_a_device):
    """The path for CUDA tensors, which torch's fused kernels have on the CPU too."""
    learner, other = (Learner(name, {"fused": True, **options}) for _ in range(2))
    nanscan.enable(learner.model, skip_step=True, action="log")
    for number, bad in enumerate((NAN, None, None, INF, None, NAN)):
        before = learner.state()
        with Syncs() as syncs:
            learner.step(number, bad)
        makes_state = number < 2 and not (name == "SGD" and not options) and name != "Adagrad"
        assert syncs.count == (makes_state or not takes_found_inf(learner))
        if bad is None:
            other.step(number)
        else:
            assert learner.state() == before
        assert learner.state()["parameters"] == other.state()["parameters"]
        assert learner.state()["state"] == other.state()["state"]
        assert "found_inf" not in learner.state()["attributes"]


@pytest.mark.parametrize(("name", "options"), FUSED)
def test_fused_optimizers_skip_without_a_sync_in_closures(name, options, as_on_a_device):
    learner = Learner(name, {"fused": True, **options})
    nanscan.enable(learner.model, skip_step=True, action="log")
    learner.step(0)
    for bad in (NAN, None):
        before = learner.state()
        with Syncs() as syncs:
            learner.optimizer.step(lambda bad=bad: learner.set_gradients(1, bad))
        assert syncs.count == (not takes_found_inf(learner))
        assert (learner.state() == before) == bool(bad)
        assert learner.state()["attributes"] == before["attributes"]


@pytest.mark.parametrize("name", ["Adam", "RMSprop", "Rprop"])
def test_other_optimizers_skip_with_one_sync(name, as_on_a_device):
    learner = Learner(name, {"foreach": True})
    nanscan.enable(learner.model, skip_step=True, action="log")
    learner.step(0)
    own = []
    for bad in (None, NAN, None):
        before = learner.state()
        with Syncs() as syncs:
            learner.step(1, bad)
        own.append(syncs.count)
        assert (learner.state() == before) == bool(bad)
    nanscan.disable()
    with Syncs() as syncs:
        learner.step(1)
    assert own == [syncs.count + 1, 1, syncs.count + 1]


def test_what_the_scaler_saw_stays(as_on_a_device):
    """Though all is fine in what is watched."""
    learner = Learner("Adam", {"fused": True})
    nanscan.enable(learner.model, skip_step=True, action="log", ignore="fc2.bias")
    learner.step(0)
    scaler = torch.amp.GradScaler("cpu")
    for bad in (INF, None):
        scaler.scale(torch.zeros(()))
        learner.set_gradients(1, bad)  # in fc2.bias
        before = learner.state()
        scaler.step(learner.optimizer)
        scaler.update()
        assert (learner.state() == before) == bool(bad)


def test_the_flag_alone_is_no_promise(as_on_a_device):
    """Others than torch's own may want found_inf as an argument, or not at all."""
    learner = Learner("RMSprop", {})
    learner.optimizer._step_supports_amp_scaling = True
    nanscan.enable(learner.model, skip_step=True, action="log")
    learner.step(0)
    before = learner.state()
    learner.step(1, NAN)
    assert learner.state() == before


def test_a_run_on_a_device(device):
    torch.manual_seed(0)
    model = Net().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    monitor = nanscan.enable(model, skip_step=True, action="log")
    train(model, optimizer, [batch(i).to(device) for i in range(2)])
    before = bits(model.state_dict())
    train(model, optimizer, [set_nan(batch(3)).to(device)])
    assert bits(model.state_dict()) == before
    monitor.flush()
    assert monitor.findings[0].step == 2
    train(model, optimizer, [batch(4).to(device)])
    monitor.flush()
    assert monitor.healthy


# -- before a checkpoint ---------------------------------------------------------------------------


def test_only_healthy_models_become_checkpoints(tmp_path):
    torch.manual_seed(0)
    model = Net()
    optimizer = sgd(model)
    monitor = nanscan.enable(model, action="log", skip_step=True)

    def save_checkpoint(path):
        monitor.flush()  # judges all that was scanned; waits for a GPU's last steps
        if monitor.healthy:
            torch.save(model.state_dict(), path)

    for step, x in enumerate([batch(0), set_nan(batch(1)), batch(2), batch(3)]):
        train(model, optimizer, [x])
        if step == 3:  # a forward that no optimizer step followed yet
            run_quiet(model, set_nan(batch(4)))
        save_checkpoint(tmp_path / f"{step}.pt")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.pt", "2.pt"]


# -- steps that are saved --------------------------------------------------------------------------

EXAMPLE = """
    import random
    import numpy as np
    import torch
    from torch import nn

    class Model(nn.Module):
        '''NaN where the second of two masks drops all that the first kept.'''

        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(6, 6)
            self.drop = nn.Dropout(0.6)
            self.last = nn.Linear(6, 1)
            self.drawn = []

        def forward(self, x, *, scale):
            self.drawn.append([torch.rand(()).item(), random.random(), float(np.random.rand())])
            x = self.drop(self.fc(x * scale["factor"])).relu()
            return self.last(x / self.drop(x).sum())

    def data(step):
        return torch.randn(1, 6, generator=torch.Generator().manual_seed(step))
"""


def train_example(model, optimizer, monitor, data):
    for step in range(200):
        optimizer.zero_grad()
        model(data(step), scale={"factor": 1.5}).sum().backward()
        optimizer.step()
        if monitor.findings:
            return
    pytest.fail("nothing went bad")


@pytest.mark.parametrize(("scope", "skip_step"), [("model", True), ("global", False)])
def test_a_saved_step_does_the_same_in_another_process(scope, skip_step, tmp_path):
    names: dict = {"__name__": "example"}
    exec(textwrap.dedent(EXAMPLE), names)  # so that both processes have the same class
    random.seed(3)
    np.random.seed(3)  # noqa: NPY002 - what the model draws from
    model = names["Model"]()
    monitor = enable(scope, model, action="log", skip_step=skip_step, save=tmp_path / "bad")
    train_example(model, sgd(model), monitor, names["data"])
    finding = monitor.findings[0]
    (folder,) = (tmp_path / "bad").iterdir()
    assert folder.name == f"step-{finding.step}-rank-0"
    script = textwrap.dedent(EXAMPLE) + textwrap.dedent("""
        import json, sys
        import nanscan

        saved = nanscan.load_saved(sys.argv[1])
        model = Model()
        model.load_state_dict(saved.state_dict)
        saved.restore_rng()
        with nanscan.watch(model, action="log") as monitor:
            model(*saved.args, **saved.kwargs)
        again = monitor.findings[0]
        print(json.dumps([str(again.site), again.verdict, again.how, again.stats.to_dict()]))
        print(json.dumps(model.drawn))
    """)
    done = subprocess.run(
        [sys.executable, "-c", script, str(folder)], capture_output=True, text=True, check=True
    )
    again, drawn = (json.loads(line) for line in done.stdout.splitlines())
    stats = json.loads(json.dumps(finding.stats.to_dict()))
    assert again == [str(finding.site), finding.verdict, finding.how, stats]
    assert drawn == model.drawn[-1:]


def only_saved(folder):
    (path,) = folder.iterdir()
    return nanscan.load_saved(path)


def save_one(tmp_path, model, *args, mode=torch.no_grad, **kwargs):
    """Runs a model once without an optimizer; what was saved of that."""
    with nanscan.watch(model, action="log", save=tmp_path), mode():
        model(*args, **kwargs)
    return only_saved(tmp_path)


class Pair(NamedTuple):
    a: object
    b: object


def test_what_is_saved_tells_all(tmp_path):
    model = Net().eval()
    model.act.train()
    saved = save_one(tmp_path, model, set_nan(batch()))
    assert bits(saved.args[0]) == bits(set_nan(batch()))
    assert (saved.step, saved.rank, saved.site) == (0, 0, Site("Net", "input", "[0]"))
    assert saved.verdict == "propagated"
    assert "Net input[0] is non-finite in step 0" in saved.text
    assert saved.kwargs == {}
    assert saved.notes == {}
    assert saved.autocast == {}
    assert saved.training == {"": False, "fc1": False, "act": True, "fc2": False}
    assert saved.versions == {"nanscan": nanscan.__version__, "torch": str(torch.__version__)}
    assert bits(saved.state_dict) == bits(dict(model.state_dict()))
    (folder,) = tmp_path.iterdir()
    assert saved.text in (folder / "finding.txt").read_text()


@SCOPES
def test_containers_are_as_they_were_when_the_call_began(scope, tmp_path):
    def forward(x, nested, *, options, pair):
        nested[1]["a"] = nested[1].pop("b")
        options.clear()
        return x * NAN

    model = Do(forward)
    options = {"n": 3, "name": "x", "t": batch(2), 5: (True, None, 1.5, b"x", torch.float16)}
    nested = [batch(1), OrderedDict(b=batch(3))]
    monitor = enable(scope, model, action="log", save=tmp_path)
    model(batch(0), nested, options=options, pair=Pair(batch(4), 2))
    assert options == {}
    assert len(monitor.findings) == 1
    saved = only_saved(tmp_path)
    assert bits(saved.args) == bits((batch(0), [batch(1), {"b": batch(3)}]))
    assert type(saved.args[1][1]) is OrderedDict
    expected = {"n": 3, "name": "x", "t": batch(2), 5: (True, None, 1.5, b"x", torch.float16)}
    assert bits(saved.kwargs) == bits({"options": expected, "pair": (batch(4), 2)})
    assert saved.notes == {"kwargs['pair']": "a test_actions.Pair, kept as a tuple"}


def test_what_cannot_be_loaded_is_left_out_and_listed(tmp_path):
    class Own:
        pass

    class Sub(torch.Tensor):
        pass

    deep: list = []
    for _ in range(40):
        deep = [deep]
    saved = save_one(
        tmp_path,
        Do(lambda x, *rest, **_: x * NAN),
        batch(),
        [1, Own(), {"f": len, Own: 1}],
        np.ones(3),
        batch().as_subclass(Sub),
        deep,
        key=range(3),
    )
    assert bits(saved.args[0]) == bits(batch())
    assert saved.args[1] == [1, None, None]
    assert saved.args[2:4] == (None, None)
    assert saved.kwargs == {"key": None}
    here = "test_actions.test_what_cannot_be_loaded_is_left_out_and_listed.<locals>"
    assert saved.notes.pop("args[4]" + "[0]" * 15) == "a list: left out"
    assert saved.notes == {
        "args[1][1]": f"a {here}.Own: left out",
        "args[1][2]": "a dict: left out",
        "args[2]": "a numpy.ndarray: left out",
        "args[3]": f"a {here}.Sub: left out",
        "kwargs['key']": "a range: left out",
    }


def test_an_input_changed_in_place_is_not_taken_for_what_it_was(tmp_path):
    def forward(x, y, z):
        y.mul_(2)
        z[0].add_(1)
        return x * NAN

    x, y, z = batch(0), batch(1), batch(2)
    saved = save_one(tmp_path, Do(forward), x, y, z)
    assert bits(saved.args[0]) == bits(x)
    assert saved.args[1:] == (None, None)
    changed = "changed in place since the call began: left out"
    assert saved.notes == {"args[1]": changed, "args[2]": changed}


def test_inference_tensors_have_no_version(tmp_path):
    with torch.inference_mode():
        x = batch()
    saved = save_one(tmp_path, Do(lambda x: x * NAN), x, mode=torch.inference_mode)
    assert bits(saved.args[0]) == bits(batch())
    assert "inference tensor" in saved.notes["args[0]"]


def test_views_bring_no_storage_along_and_parameters_keep_their_ties(tmp_path):
    model = Net(8)
    model.fc2.weight = model.fc1.weight
    model.register_buffer("kept", torch.ones(2))
    model.register_buffer("scratch", torch.ones(2), persistent=False)
    big = torch.randn(100_000, 8)
    x = big[3:5].requires_grad_()
    x.data[0, 0] = NAN
    saved = save_one(tmp_path, model, x)
    (folder,) = tmp_path.iterdir()
    assert (folder / "call.pt").stat().st_size < 100_000
    assert saved.args[0].requires_grad
    assert list(saved.state_dict) == list(model.state_dict())
    model.load_state_dict(saved.state_dict)
    weights = [saved.state_dict[f"fc{i}.weight"] for i in (1, 2)]
    assert weights[0].data_ptr() == weights[1].data_ptr()


def test_a_large_state_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(save, "_MAX_STATE_BYTES", 100)
    saved = save_one(tmp_path, Net(), set_nan(batch()))
    assert saved.state_dict is None
    assert saved.notes == {"state_dict": "of 160 bytes: left out"}


def test_autocast_is_told(tmp_path):
    with torch.autocast("cpu", torch.bfloat16):
        saved = save_one(tmp_path, Net(), set_nan(batch()))
    assert saved.autocast == {"cpu": torch.bfloat16}


@pytest.mark.parametrize("bad", [0, 2, 4])
@SCOPES
def test_a_bad_microbatch_is_the_one_that_is_saved(scope, bad, tmp_path):
    model = Net()
    optimizer = sgd(model)
    told = []
    monitor = enable(scope, model, action=told.append, save=tmp_path, skip_step=True)
    train(model, optimizer, [batch()])
    for i in range(5):
        out = model(batch(i))
        assert bool(told) == (i > bad)  # as soon as without `save`
        (out.sum() * (NAN if i == bad else 1)).backward()
    optimizer.step()
    assert [(f.step, f.site.kind) for f in told] == [(1, "loss")]
    assert monitor.findings[0] is told[0]
    assert bits(only_saved(tmp_path).args) == bits((batch(bad),))


@SCOPES
def test_parameters_are_saved_as_they_were_before_the_step(scope, tmp_path):
    model = Gap(lambda x: x / 0)
    monitor = enable(scope, model, action="log", save=tmp_path)
    before = bits(dict(model.state_dict()))
    train(model, sgd(model), [batch()])
    assert not torch.isfinite(model.fc1.weight).all()
    saved = only_saved(tmp_path)
    assert bits(saved.state_dict) == before
    assert saved.notes == {}
    # The findings that users get are the same as without `save`.
    affected = [str(site) for site in monitor.findings[0].affected]
    assert "fc1.weight param" in affected
    monitor.close()
    torch.manual_seed(0)
    other = Gap(lambda x: x / 0)
    plain = enable(scope, other, action="log")
    train(other, sgd(other), [batch()])
    assert [str(site) for site in plain.findings[0].affected] == affected
    assert verdicts(plain) == verdicts(monitor)


def test_what_is_absorbed_is_told_once(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), Do(torch.nan_to_num), nn.Linear(4, 4))
    told = []
    nanscan.enable(model, action=told.append, save=tmp_path)
    train(model, sgd(model), [set_nan(batch())])
    assert [f.verdict for f in told] == ["propagated", "absorbed"]


def test_what_an_optimizer_made_is_saved_after_its_step(tmp_path):
    model = Net()
    monitor = nanscan.enable(model, action="log", save=tmp_path)
    train(model, sgd(model, lr=INF), [batch()])
    assert monitor.findings[0].site.kind == "param"
    saved = only_saved(tmp_path)
    assert saved.notes["state_dict"].startswith("as it was after the optimizer's step")
    assert bits(saved.args) == bits((batch(),))


def test_actions_come_when_they_would_without_save(tmp_path):
    events = []
    model = Net()
    optimizer = sgd(model)
    optimizer.register_step_post_hook(lambda *_: events.append("stepped"))
    action = lambda finding: events.append(f"{finding.site} {len(list(tmp_path.iterdir()))}")
    monitor = nanscan.enable(model, action=action, save=tmp_path)
    train(model, optimizer, [batch(), set_nan(batch())])
    assert events == ["stepped", "stepped", "Net input[0] 1"]
    monitor.close()
    model = Gap(lambda x: x / 0)
    monitor = nanscan.enable(model, action="raise", save=tmp_path)
    before = bits(model.state_dict())
    with pytest.raises(NonFiniteError):
        train(model, sgd(model), [batch()])
    assert bits(model.state_dict()) != before
    assert monitor._step == 1


@SCOPES
def test_a_step_that_is_judged_late_has_its_own_inputs(scope, tmp_path, monkeypatch):
    """As on CUDA, where a step is judged when its rows arrived."""
    model = Net()
    monitor = enable(scope, model, action="log", save=tmp_path, skip_step=True)
    monkeypatch.setattr(Snapshot, "ready", lambda self: False)
    monkeypatch.setattr(monitor, "_gradients_scanned", lambda: None)
    optimizer = sgd(model)
    monitor._hooks._on_gradients = lambda: None
    train(model, optimizer, [batch(0), set_nan(batch(1)), batch(2), batch(3)])
    assert not list(tmp_path.iterdir())
    monitor.flush()
    saved = only_saved(tmp_path)
    assert (saved.step, bits(saved.args)) == (1, bits((set_nan(batch(1)),)))
    assert "after the optimizer's step" in saved.notes["state_dict"]


@pytest.mark.parametrize("late", [False, True])
def test_inputs_are_let_go_when_their_step_is_judged(late, tmp_path, monkeypatch):
    model = Net()
    monitor = nanscan.enable(model, save=tmp_path)
    optimizer = sgd(model)
    if late:
        monkeypatch.setattr(Snapshot, "ready", lambda self: False)
    x = batch()
    alive = weakref.ref(x)
    model(x).sum().backward()
    del x
    assert alive() is not None
    optimizer.step()
    if late:
        assert alive() is not None
        monitor.flush()
    assert alive() is None


def test_inputs_of_validation_are_let_go_with_its_judgement(tmp_path):
    model = Net()
    nanscan.enable(model, save=tmp_path)
    train(model, sgd(model), [batch()])
    x = batch()
    alive = weakref.ref(x)
    infer(model, x)
    del x
    assert alive() is None


def test_inputs_are_not_kept_without_save():
    model = Net()
    nanscan.enable(model)
    x = batch()
    alive = weakref.ref(x)
    with torch.no_grad():
        model.fc1(x)
    del x
    assert alive() is None


@SCOPES
def test_the_model_that_went_bad_is_the_one_that_is_saved(scope, tmp_path):
    both = nn.ModuleDict({"a": Net(), "b": Net()})
    if scope == "global":
        both = {"a": Net(), "b": Net()}
    enable(scope, both, action="log", save=tmp_path, skip_step=True)
    parameters = [p for key in "ab" for p in both[key].parameters()]
    optimizer = torch.optim.SGD(parameters, 0.1)
    x, y = batch(1), batch(2)
    loss = both["b"](set_nan(x)).sum() + both["a"](y).sum()
    loss.backward()
    optimizer.step()
    saved = only_saved(tmp_path)
    assert bits(saved.args) == bits((set_nan(x),))
    assert bits(saved.state_dict) == bits(dict(both["b"].state_dict()))


@SCOPES
def test_a_recomputation_is_not_taken_for_a_call(scope, tmp_path):
    inner = Net()
    model = Do(lambda x: checkpoint(inner, x.tanh(), use_reentrant=False) * 1)
    model.inner = inner
    enable(scope, model, action="log", save=tmp_path)
    optimizer = sgd(model)
    model(batch()).sum().backward()
    inner.fc1.bias.grad[0] = NAN
    optimizer.step()
    assert bits(only_saved(tmp_path).args) == bits((batch(),))


def test_validation_does_not_replace_the_call_that_trains(tmp_path):
    model = Net()
    enable("model", model, action="log", save=tmp_path)
    optimizer = sgd(model)
    train(model, optimizer, [batch(0)])
    infer(model, batch(1))
    train(model, optimizer, [set_nan(batch(2))])
    assert bits(only_saved(tmp_path).args) == bits((set_nan(batch(2)),))


def test_three_steps_of_a_run_are_saved(tmp_path):
    model = Net()
    monitor = nanscan.enable(model, action="log", save=tmp_path, skip_step=True)
    optimizer = sgd(model)
    for i in range(5):
        train(model, optimizer, [set_nan(batch(i)), set_nan(batch(i)), batch(i)])
    assert len([f for f in monitor.findings if f.verdict == "recovered"]) == 5
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"step-{step}-rank-0" for step in (0, 3, 6)
    ]
    model(batch())
    assert monitor._saver.calls == ()  # nothing is kept that would never be written


def test_what_an_earlier_run_saved_stays(tmp_path):
    for x in (set_nan(batch(0)), set_nan(batch(1))):
        with nanscan.watch(Net(), action="log", save=str(tmp_path)) as monitor, torch.no_grad():
            monitor._model()(x)
    names = ["step-0-rank-0", "step-0-rank-0-2"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    for seed, name in enumerate(names):
        assert bits(nanscan.load_saved(tmp_path / name).args) == bits((set_nan(batch(seed)),))


def test_a_scale_search_is_not_saved(tmp_path):
    learner = Learner("SGD", {})
    monitor = nanscan.enable(learner.model, action="log", save=tmp_path, skip_step=True)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.zeros(()))
    learner.set_gradients(0, INF)
    scaler.step(learner.optimizer)
    assert [f.verdict for f in monitor.findings] == ["scale-search"]
    assert not list(tmp_path.iterdir())


def warnings_logged(caplog):
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def test_a_folder_that_cannot_be_written_is_logged_once(tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    model = Net()
    monitor = nanscan.enable(model, action="log", save=tmp_path / "file", skip_step=True)
    optimizer = sgd(model)
    for i in range(3):
        train(model, optimizer, [set_nan(batch(i)), batch(i)])
    (message,) = warnings_logged(caplog)
    assert message.startswith("nanscan: could not save step 0: ")
    assert monitor.healthy
    assert len(monitor.findings) == 6 * 2 + 3 or len(monitor.findings) > 3


def test_where_it_was_saved_is_logged(tmp_path, caplog):
    save_one(tmp_path, Net(), set_nan(batch()))
    assert warnings_logged(caplog) == [f"nanscan: saved step 0 to {tmp_path / 'step-0-rank-0'}"]


def test_a_full_disk_leaves_nothing_half_written(tmp_path):
    script = """
        import resource, sys, warnings, torch, nanscan
        from torch import nn
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
        model = nn.Sequential(nn.Linear(200, 200), nn.Linear(200, 200))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        monitor = nanscan.enable(model, action="log", save=sys.argv[1], skip_step=True)
        for i in range(6):
            optimizer.zero_grad()
            (model(torch.randn(4, 200)).sum() * (float("nan") if i % 2 else 1)).backward()
            optimizer.step()
        assert monitor._step == 6
        assert all(torch.isfinite(p).all() for p in model.parameters())
        print("done")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "done\n"
    assert done.stderr.count("could not save step") == 1
    assert "could not save step 1: OSError: [Errno 27] File too large" in done.stderr
    assert not list(tmp_path.iterdir())


def test_an_interrupt_while_writing_leaves_nothing_half_written(tmp_path, monkeypatch):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", interrupted)
    model = Net()
    nanscan.enable(model, action="log", save=tmp_path)
    with pytest.raises(KeyboardInterrupt):
        infer(model, set_nan(batch()))
    assert not list(tmp_path.iterdir())


def test_containers_that_cannot_be_read_break_nothing(tmp_path, caplog):
    class Broken(dict):
        def items(self):
            raise RuntimeError("no")

    model = Do(lambda x, extra: x * NAN)
    with nanscan.watch(model, action="log", save=tmp_path, kinds="output"), torch.no_grad():
        for _ in range(2):
            model(batch(), Broken(a=1))
    saved = only_saved(tmp_path)
    assert saved.args == ()
    assert saved.notes == {"": "the call in which it was found is not known"}
    with pytest.raises(ValueError, match="no states of random number generators"):
        saved.restore_rng()
    assert [m for m in warnings_logged(caplog) if "could not" in m] == [
        "nanscan: could not keep the inputs of a step: RuntimeError: no"
    ]


def test_calls_in_threads_are_each_thread_s_own(tmp_path):
    models = [Net() for _ in range(4)]
    nanscan.enable(action="log", save=tmp_path)
    go = threading.Barrier(4)

    def work(i):
        go.wait()
        for step in range(20):
            infer(models[i], set_nan(batch(i)) if step == 10 and i == 2 else batch(i))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # A forward that ends a step cuts those of other threads in two, each with a finding perhaps.
    saved = [nanscan.load_saved(path) for path in tmp_path.iterdir()]
    assert saved
    for one in saved:
        assert one.notes or bits(one.args) == bits((set_nan(batch(2)),))


def test_a_model_that_is_watched_and_saved_can_go(tmp_path):
    model = Net()
    alive = weakref.ref(model)
    nanscan.enable(model, save=tmp_path, skip_step=True)
    train(model, sgd(model), [batch()])
    del model
    gc.collect()
    assert alive() is None


def test_bad_arguments_are_told():
    with pytest.raises(TypeError, match="save must be the path"):
        nanscan.enable(Net(), save=True)


def test_there_must_be_something_to_load(tmp_path):
    with pytest.raises(FileNotFoundError, match="no saved step"):
        nanscan.load_saved(tmp_path)
