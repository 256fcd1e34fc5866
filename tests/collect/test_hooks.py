"""What hooks see, what they leave alone, and that they leave nothing behind."""

import copy
import gc
import io
import os
import pickle
import threading
import time
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import nanscan
from helpers.models import (
    COMMON_KINDS,
    NAN,
    SCOPES,
    Do,
    Gap,
    Mixed,
    Net,
    batch,
    calls,
    enable,
    hook_dicts,
    infer,
    train,
)
from nanscan._collect.table import Table
from nanscan._data.places import ModulePlace, Node

# -- results ---------------------------------------------------------------------------------------


def _run(watched, scope="model"):
    torch.manual_seed(0)
    model = Mixed()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    monitor = enable(scope, model, kinds=COMMON_KINDS) if watched else None
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
    enable(scope, model, kinds=COMMON_KINDS)
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
            sizes.add((len(coverage.sites), coverage.nbytes))
    assert len(sizes) == 1
    sites = monitor.coverage().sites
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
        sizes.append(len(monitor.coverage().sites))
    assert len(set(sizes)) == 1


def test_models_alive_together_have_names_of_their_own():
    first, second = Net(), Net()
    monitor = nanscan.enable()
    infer(first, batch())
    infer(second, batch())
    sites = monitor.coverage().sites
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
    assert len(monitor.coverage().sites) <= 257


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
    sites, steps = len(monitor.coverage().sites), monitor.steps
    with torch.no_grad():
        assert torch.equal(twin(batch()), model(batch()))
        infer(twin, torch.full((3, 4), NAN)) if scope == "model" or not still_on else None
    train(twin, torch.optim.SGD(twin.parameters(), 0.1), [batch()])
    if scope == "model":
        assert len(monitor.coverage().sites) == sites
        assert monitor.steps == steps + still_on
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
    assert monitor.steps == 2
    rows = calls(monitor)
    assert rows["fc1.weight grad"] == rows["fc1.weight param"] == 1
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
    assert monitor.steps == 3
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
    assert monitor.steps == 2


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
    place = ModulePlace("place", None)

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
    sites = monitor.coverage().sites
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
        assert monitor.steps == 10
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
            code = 0 if monitor.steps == 2 and not monitor.findings else 2
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert monitor.steps == 1


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
    assert {"0 output", "1 output"} <= set(monitor.coverage().sites)
