"""The door beside compiled code, exports, copies and traces; and hooks where torch has no door."""

import contextlib
import copy
import io
import logging
import pickle
import threading
import traceback

import pytest
import torch
import torch._dynamo as dynamo
from torch import nn
from torch.utils.checkpoint import checkpoint

import nanscan
from helpers.models import NAN, SCOPES, Net, batch, calls, enable, hook_dicts, infer
from nanscan._hooks import _Inert

SLOT = "_compiled_call_impl"
BACKENDS = pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)

    def forward(self, x):
        return x + self.fc(self.norm(x)).relu()


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def x16(*, grad=True):
    return torch.ones(2, 16, requires_grad=grad)


@pytest.fixture(autouse=True)
def _torch_is_as_before():
    assert vars(nn.Module)[SLOT] is None
    dynamo.reset()
    yield
    nanscan.disable()
    dynamo.reset()
    assert vars(nn.Module)[SLOT] is None


# -- compiled code ---------------------------------------------------------------------------------


def _toggled(call, scope, model):
    """Calls with nanscan on, off, paused and on again, under options that allow no recompile."""
    dynamo.utils.counters.clear()
    with dynamo.config.patch(error_on_recompile=True):
        for _ in range(2):
            monitor = enable(scope, model)
            call()
            assert not _hooks_of_modules(model)
            monitor.pause()
            call()
            monitor.resume()
            call()
            monitor.close()
            call()
    assert not dynamo.utils.counters["graph_break"]
    assert not _hooks_of_modules(model)


def _hooks_of_modules(*models):
    """Those of optimizer steps left out."""
    found = hook_dicts(*models).items()
    return [name for name, hooks in found if hooks and not name.startswith("torch.optim")]


def _whole(model, how):
    return torch.compile(model, **how)


def _in_place(model, how):
    model.compile(**how)
    return model


def _blocks_in_place(model, how):
    for block in model.blocks:
        block.compile(**how)
    return model


def _blocks_wrapped(model, how):
    model.blocks = nn.ModuleList(torch.compile(block, **how) for block in model.blocks)
    return model


def _in_a_function(model, how):
    def function(x):
        return model(x)

    return torch.compile(function, **how)


@BACKENDS
@pytest.mark.parametrize(
    "compiled", [_whole, _in_place, _blocks_in_place, _blocks_wrapped, _in_a_function]
)
@pytest.mark.parametrize("enabled", ["first", "later"])
@SCOPES
def test_compiled_code_is_never_recompiled_or_broken(scope, enabled, compiled, backend):
    model = Blocks()
    expected = model(x16()).detach()
    early = enable(scope, model) if enabled == "first" else None
    function = compiled(model, {"backend": backend, "fullgraph": True})
    if early:
        early.close()
    grads = compiled in (_whole, _in_place, _in_a_function)
    with contextlib.nullcontext() if grads else torch.no_grad():
        if enabled == "later":
            function(x16(grad=grads))
        _toggled(lambda: function(x16(grad=grads)), scope, model)
        got = function(x16(grad=grads))
    assert torch.allclose(got, expected, atol=1e-5)
    if grads:
        got.sum().backward()


@SCOPES
def test_of_compiled_code_the_outermost_call_is_seen(scope):
    model = Blocks()
    monitor = enable(scope, model, action="log")
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        compiled(torch.full((2, 16), NAN))
    monitor.flush()
    assert str(monitor.findings[0].site) == "Blocks input[0]"


def test_graphs_that_a_compiler_runs_are_no_modules_of_the_user():
    monitor = enable("global", None)
    model = Blocks()
    compiled = torch.compile(model, backend="aot_eager")
    compiled(x16()).sum().backward()

    def with_checkpoint(x):  # a higher-order op: its body is a graph module that is called
        return checkpoint(model.head, x, use_reentrant=False).sum()

    torch.compile(with_checkpoint, backend="aot_eager")(x16()).backward()
    named = {site.partition(" ")[0] for site in calls(monitor)}
    assert not [name for name in named if "GraphModule" in name or "lambda" in name]


def test_a_graph_module_that_the_user_calls_is_seen():
    graph = torch.fx.symbolic_trace(Blocks())
    monitor = enable("global", None)
    infer(graph, x16(grad=False))
    assert {"Blocks input[0]", "head output"} <= set(calls(monitor))


def test_exports_traces_and_transforms_are_as_without():
    def results():
        torch.manual_seed(0)
        model = Blocks()
        yield [len(torch.export.export(model, (x16(),), strict=s).graph.nodes) for s in (0, 1)]
        yield str(torch.fx.symbolic_trace(model).graph)
        yield [node.kind() for node in torch.jit.trace(model, (x16(),)).inlined_graph.nodes()]
        yield torch.func.vmap(model)(x16()).tolist()
        parameters = dict(model.named_parameters())

        def loss(parameters):
            return torch.func.functional_call(model, parameters, (x16(),)).sum()

        yield {k: g.tolist() for k, g in torch.func.grad(loss)(parameters).items()}
        yield checkpoint(model, x16(), use_reentrant=False).tolist()

    expected = list(results())
    enable("global", None)
    assert list(results()) == expected


# -- what is left as it was ------------------------------------------------------------------------


@SCOPES
def test_copies_and_pickles_are_those_of_an_unwatched_model(scope):
    torch.manual_seed(0)
    model = Net()

    def saved():
        file = io.BytesIO()
        torch.save(model, file)
        return file.getvalue(), pickle.dumps(model), sorted(copy.deepcopy(model).__dict__)

    expected = saved()
    enable(scope, model)
    infer(model, batch())
    assert saved() == expected
    assert not _hooks_of_modules(model)
    assert SLOT not in vars(copy.deepcopy(model))


def test_models_that_were_saved_with_hooks_of_older_versions_still_load():
    model = Net()
    inert = _Inert()
    model.register_forward_pre_hook(inert.before, with_kwargs=True)
    model.register_forward_hook(inert.after, with_kwargs=True, always_call=True)
    model.fc1.register_forward_hook(inert.leaf, with_kwargs=True)
    data = pickle.dumps(model)
    assert b"nanscan._hooks" in data
    assert b"_Inert" in data
    loaded = pickle.loads(data)
    assert torch.equal(loaded(batch()), model(batch()))
    monitor = enable("model", loaded)
    infer(loaded, batch())
    assert calls(monitor)["fc1 output"] == 1


def test_who_asks_gets_what_the_module_holds():
    model = Net()
    enable("model", model)
    assert model._compiled_call_impl is None
    assert nn.Module._compiled_call_impl is None
    model.compile(backend="eager")
    mine = vars(model)[SLOT]
    assert model._compiled_call_impl is mine is not None
    nanscan.disable()
    assert model._compiled_call_impl is mine
    enable("model", model)
    del model._compiled_call_impl
    assert SLOT not in vars(model)
    with pytest.raises(AttributeError):
        del model._compiled_call_impl
    model._compiled_call_impl = calling = lambda x: x + 1
    assert model(1) == 2
    assert model._compiled_call_impl is calling


def test_a_class_or_object_with_its_own_call_is_obeyed():
    class Own(nn.Module):
        def _call_impl(self, *args, **kwargs):
            return "class", args, kwargs

    model = Own()
    enable("global", None, action="log")
    assert model(1, b=2) == ("class", (1,), {"b": 2})
    model._call_impl = lambda *args, **kwargs: ("object", args, kwargs)
    assert model(*range(12), b=2, c=3) == ("object", tuple(range(12)), {"b": 2, "c": 3})


def test_tracebacks_are_as_without():
    class Bad(nn.Module):
        def forward(self, x):
            raise ValueError("mine")

    model = nn.Sequential(Bad())

    def frames():
        with pytest.raises(ValueError, match="mine") as caught:
            model(batch())
        return [(frame.filename, frame.name) for frame in traceback.extract_tb(caught.tb)]

    expected = frames()
    enable("global", None)
    assert frames() == expected


def test_pre_hooks_and_hooks_of_the_user_run_inside():
    model = Net()
    model.register_forward_pre_hook(lambda _, args: (args[0] * NAN,))
    model.register_forward_hook(lambda *_: torch.zeros(3, 4))
    monitor = enable("model", model, action="log")
    infer(model, batch())
    monitor.flush()
    assert str(monitor.findings[0].site) == "fc1 input[0]"  # not the input as the caller gave it
    history = monitor.history("Net output")
    assert (history["nan"].tolist(), history["absmax"].tolist()) == ([0], [0.0])


# -- who may come, go and fail ---------------------------------------------------------------------


class Interrupting(nn.Module):
    def forward(self, x):
        raise KeyboardInterrupt


def test_an_interrupted_call_leaves_nothing_running():
    model = nn.Sequential(nn.Linear(4, 4), Interrupting())
    monitor = enable("model", model)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            infer(model, batch())
        assert monitor._collector.calls.core.running is None
    model[1] = nn.Identity()
    infer(model, batch())
    assert monitor.steps == 1


def test_a_monitor_that_opens_or_closes_amid_a_call():
    opened = []

    class Opening(nn.Module):
        def forward(self, x):
            if not opened:
                opened.append(nanscan.enable(self.owner[0]))
            else:
                opened.pop().close()
            return x

    inner = Opening()
    model = nn.Sequential(nn.Linear(4, 4), inner, nn.Linear(4, 4))
    inner.owner = [model]
    other = enable("global", None)
    for _ in range(4):
        infer(model, batch())
    assert not opened
    assert other.steps == 4
    assert other._collector.calls.core.running is None


def test_several_monitors_see_each_call_once():
    models = [Net() for _ in range(4)]
    monitors = [enable("model", model) for model in models] + [enable("global", None)]
    for model in models:
        infer(model, batch())
    for monitor in monitors[:4]:
        assert calls(monitor)["fc1 output"] == 1
    sites = monitors[4].coverage().sites
    assert sum(site.endswith("fc1 output") for site in sites) == 4
    assert monitors[4].steps == 4


def test_modules_that_die_and_whose_addresses_come_again():
    monitor = enable("global", None)
    for i in range(300):
        module = nn.Identity() if i % 2 else nn.ReLU()
        infer(module, batch())
        del module
    assert monitor.steps == 300
    assert len(monitor._collector.calls._registry.places) <= 2


def test_threads_that_call_while_monitors_come_and_go():
    model, stop, errors = Net(), threading.Event(), []

    def run():
        try:
            while not stop.is_set():
                infer(model, batch())
        except Exception as error:  # noqa: BLE001 - told below
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for i in range(100):
        monitor = enable(("model", "global")[i % 2], model)
        infer(model, batch())
        monitor.pause()
        monitor.resume()
        monitor.close()
    stop.set()
    for thread in threads:
        thread.join(30)
    assert errors == []


# -- a torch without the door ----------------------------------------------------------------------


def _old_call(self, *args, **kwargs):
    return self._call_impl(*args, **kwargs)


def _without_attribute(monkeypatch):
    monkeypatch.delattr(nn.Module, SLOT)
    monkeypatch.setattr(nn.Module, "__call__", _old_call)


def _without_asking(monkeypatch):
    monkeypatch.setattr(nn.Module, "_wrapped_call_impl", _old_call)
    monkeypatch.setattr(nn.Module, "__call__", _old_call)


def _taken(monkeypatch):
    monkeypatch.setattr(nn.Module, SLOT, property(lambda _: None))


@pytest.mark.parametrize("change", [_without_attribute, _without_asking, _taken])
@SCOPES
def test_hooks_serve_where_torch_has_no_door(scope, change, caplog):
    with pytest.MonkeyPatch.context() as monkeypatch:
        change(monkeypatch)
        model = Net()
        before = hook_dicts(model)
        with caplog.at_level(logging.WARNING, "nanscan"):
            monitor = enable(scope, model, action="log", kinds=("input", "output"))
        assert [SLOT in record.message for record in caplog.records] == [True]
        infer(model, batch())
        infer(model, torch.full((3, 4), NAN))
        assert str(monitor.findings[0].site) == "Net input[0]"
        assert calls(monitor)["fc1 output"] == 1
        model.act = Interrupting()
        with pytest.raises(KeyboardInterrupt):
            infer(model, batch())
        model.act = nn.ReLU()
        steps = monitor.steps
        with torch.no_grad():
            model(x=batch())
        assert monitor.steps == steps + 1
        assert "Net input.x" in calls(monitor)
        monitor.close()
        assert hook_dicts(model) == before
