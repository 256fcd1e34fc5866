"""Compiled models, seen from outside: names, verdicts, coverage; no recompile, no graph break."""

import copy
import logging
import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import nanscan
from helpers.models import NAN, SCOPES, batch, calls, enable, set_nan, sgd, verdicts

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.fixture
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def wrap(model, **options):
    return torch.compile(model, **options)


def in_place(model, **options):
    model.compile(**options)
    return model


def blocks_in_place(model, **options):
    for block in model.blocks:
        block.compile(**options)
    return model


def wrap_blocks(model, **options):
    for index, block in enumerate(model.blocks):
        model.blocks[index] = torch.compile(block, **options)
    return model


def function(model, **options):
    code = {"model": model}
    exec("def run(x): return model(x)", code)  # a code object of its own: Dynamo would share one
    return torch.compile(code["run"], **options)


WAYS = {each.__name__: each for each in (wrap, in_place, blocks_in_place, wrap_blocks, function)}
ways = pytest.mark.parametrize("way", WAYS)
orders = pytest.mark.parametrize("order", ["enabled first", "compiled first"])


def set_up(way, scope, order, **options):
    torch.manual_seed(0)
    model = Model()
    block = model.blocks[1]
    optimizer = sgd(model)
    monitor = enable(scope, model, action="log", **options) if order == "enabled first" else None
    compiled = WAYS[way](model, backend="aot_eager", fullgraph=True)
    monitor = monitor or enable(scope, model, action="log", **options)
    return compiled, block, optimizer, monitor


def step(compiled, optimizer, x):
    optimizer.zero_grad()
    loss = compiled(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()


@contextmanager
def no_recompile():
    """Nor a new graph."""
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


def names(monitor):
    return {site.partition(" ")[0] for site in map(str, monitor.coverage().sites)}


EAGER = {"Model", "loss", "head", *(f"blocks.{i}" for i in range(3))}
PARAMETERS = {name for name, _ in Model().named_parameters()}


# -- names and verdicts ----------------------------------------------------------------------------


@orders
@ways
@SCOPES
def test_names_are_those_of_the_eager_model(way, scope, order):
    compiled, _, optimizer, monitor = set_up(way, scope, order)
    for number in range(3):
        step(compiled, optimizer, batch(number))
        assert monitor.steps == number + 1
    assert names(monitor) <= EAGER | PARAMETERS
    assert names(monitor) >= PARAMETERS | {"loss"}
    rows = calls(monitor)
    assert all(rows[f"{name} grad"] == rows[f"{name} param"] == 1 for name in PARAMETERS)
    if way != "function":
        output = "head output" if "blocks" in way else "Model output"  # each tensor has one row
        assert {"Model input[0]", output} <= rows.keys()
    if "blocks" in way:
        assert {f"blocks.{i} output" for i in range(3)} <= rows.keys()
    assert monitor.findings == []


@orders
@ways
@SCOPES
def test_a_fault_inside_is_made_in_the_compiled_module(way, scope, order):
    compiled, block, optimizer, monitor = set_up(way, scope, order)
    step(compiled, optimizer, batch())
    with torch.no_grad():
        block.down.weight.fill_(3e38)  # finite: the block overflows
    step(compiled, optimizer, batch())
    monitor.flush()
    first = monitor.findings[0]
    region = "blocks.1" if "blocks" in way else "Model"
    if way == "function":
        assert (str(first.site), first.verdict) == ("loss", "origin")
        assert first.how.startswith("made before it: nothing of the forward was scanned")
    else:
        assert (str(first.site), first.verdict) == (f"{region} output", "origin")
        assert first.how == f"made in {region} (compiled)"
    assert {f.verdict for f in monitor.findings[1:]} == {"propagated"}


@ways
@SCOPES
def test_a_spoiled_parameter_is_named(way, scope):
    compiled, block, optimizer, monitor = set_up(way, scope, "compiled first")
    step(compiled, optimizer, batch())
    with torch.no_grad():
        block.up.weight[0, 0] = NAN
    step(compiled, optimizer, batch())
    monitor.flush()
    assert verdicts(monitor)[0] == (1, "blocks.1.up.weight param", "origin")


@pytest.mark.parametrize("way", [way for way in WAYS if way != "function"])
@SCOPES
def test_a_bad_batch_is_the_callers(way, scope):
    compiled, _, optimizer, monitor = set_up(way, scope, "compiled first")
    step(compiled, optimizer, batch())
    step(compiled, optimizer, set_nan(batch()))
    monitor.flush()
    first = monitor.findings[0]
    assert (str(first.site), first.verdict) == ("Model input[0]", "propagated")
    assert first.how == "the caller gave it non-finite values"


class BadBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * NAN


@pytest.mark.parametrize("way", ["wrap", "in_place"])
@SCOPES
def test_a_gradient_that_goes_bad_inside(way, scope):
    compiled, block, optimizer, monitor = set_up(way, scope, "enabled first")
    block.norm = nn.Sequential(block.norm)
    block.norm.forward = BadBackward.apply
    step(compiled, optimizer, batch())
    monitor.flush()
    first = monitor.findings[0]
    assert (first.site.kind, first.verdict) == ("grad", "origin")
    assert first.site.name.startswith("blocks.0.")
    assert first.how == "made in Model (compiled)"


# -- nothing of ours in compiled code --------------------------------------------------------------


@pytest.mark.parametrize("fullgraph", [True, False])
@pytest.mark.parametrize("is_training", [True, False])
@ways
@SCOPES
def test_toggles_recompile_nothing(way, scope, is_training, fullgraph):
    torch.manual_seed(0)
    model = Model()
    optimizer = sgd(model)
    compiled = WAYS[way](model, backend="aot_eager", fullgraph=fullgraph)

    def run():
        if is_training:
            step(compiled, optimizer, batch())
        else:
            with torch.no_grad():
                compiled(batch())

    run()
    run()
    breaks = dict(torch._dynamo.utils.counters["graph_break"])
    with no_recompile():
        for number in range(5):
            monitor = enable(scope, model)
            run()
            monitor.pause()
            run()
            monitor.resume()
            run()
            monitor.close() if number % 2 else nanscan.disable()
            run()
    assert torch._dynamo.utils.counters["graph_break"] == breaks


@ways
@SCOPES
def test_the_numbers_are_the_same(way, scope):
    torch.manual_seed(0)
    plain, watched = Model(), Model()
    watched.load_state_dict(plain.state_dict())
    enable(scope, watched)
    pairs = [(WAYS[way](model, backend="aot_eager"), sgd(model)) for model in (plain, watched)]
    for number in range(3):
        first, second = (step(compiled, opt, batch(number)) for compiled, opt in pairs)
        assert first == second


@SCOPES
def test_a_copy_that_is_compiled_beside(scope):
    """As a reference model or a moving average."""
    model = Model()
    monitor = enable(scope, model, action="log")
    other = copy.deepcopy(model)
    compiled, reference = (torch.compile(m, backend="aot_eager") for m in (model, other))
    optimizer = sgd(model)
    for number in range(3):
        with torch.no_grad():
            reference(batch())
        step(compiled, optimizer, batch())
        assert monitor.steps == number + 1
    with torch.no_grad():
        model.blocks[1].down.weight.fill_(3e38)
    with torch.no_grad():
        reference(batch())
    step(compiled, optimizer, batch())
    monitor.flush()
    first = monitor.findings[0]
    expected = "Model output" if scope == "model" else first.site
    assert str(first.site) == str(expected)
    assert first.how.endswith("(compiled)")
    assert monitor.steps == 4


# -- what is said ----------------------------------------------------------------------------------


@ways
@SCOPES
def test_coverage_says_what_is_compiled_and_since_when(way, scope):
    model = Model()
    optimizer = sgd(model)
    monitor = enable(scope, model)
    step(model, optimizer, batch())
    step(model, optimizer, batch())
    compiled = WAYS[way](model, backend="aot_eager")
    step(compiled, optimizer, batch())
    expected = {"function": {}}.get(
        way, {f"blocks.{i}": 2 for i in range(3)} if "blocks" in way else {"Model": 2}
    )
    assert monitor.coverage().compiled == expected
    for name in expected:
        assert f"compiled: {name}, since step 2" in str(monitor.coverage())


@SCOPES
def test_it_is_said_once(scope, caplog):
    with caplog.at_level(logging.WARNING, "nanscan"):
        compiled, _, optimizer, _ = set_up("blocks_in_place", scope, "enabled first")
        for _ in range(3):
            step(compiled, optimizer, batch())
    said = [r.getMessage() for r in caplog.records if "compiled code" in r.getMessage()]
    assert len(said) == 1
    assert said[0].startswith("nanscan: blocks.0 runs as compiled code")


@SCOPES
def test_what_is_not_seen_is_listed(scope):
    compiled, _, optimizer, monitor = set_up("in_place", scope, "enabled first")
    step(compiled, optimizer, batch())
    assert {"blocks.1", "blocks.1.up", "head"} <= set(monitor.coverage().not_called)


@SCOPES
def test_as_the_remedy_says_the_inside_is_seen(scope):
    """The message names `torch.compiler.set_stance("force_eager")`."""
    compiled, block, optimizer, monitor = set_up("wrap", scope, "enabled first")
    step(compiled, optimizer, batch())
    with torch.no_grad():
        block.down.weight.fill_(3e38)
    with torch.compiler.set_stance("force_eager"):
        step(compiled, optimizer, batch())
    monitor.flush()
    assert str(monitor.findings[0].site) == "blocks.1.down output"


@SCOPES
def test_a_model_that_torch_compile_returned_can_be_given(scope):
    model = Model()
    compiled = torch.compile(model, backend="aot_eager")
    monitor = enable(scope, compiled)
    step(compiled, sgd(model), batch())
    assert names(monitor) <= EAGER | PARAMETERS
    assert monitor.coverage().compiled == {"Model": 0}


# -- more of what runs compiled --------------------------------------------------------------------


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
@SCOPES
def test_a_compiled_optimizer_step(scope, kind):
    """Nobody sees it: a step lasts until the next forward."""
    model = Model()
    monitor = enable(scope, model, action="log")
    optimizer = kind(model.parameters(), 0.01)
    update = torch.compile(optimizer.step, backend="eager")
    for number in range(5):
        optimizer.zero_grad()
        loss = model(batch()).square().mean()
        assert monitor.steps == number
        (loss * NAN if number == 3 else loss).backward()
        update()
    monitor.flush()
    assert verdicts(monitor)[0] == (3, "loss", "origin")
    assert {"blocks.0.up.weight grad", "blocks.0.up.weight param"} <= {
        str(site) for site in monitor.coverage().sites
    }


@SCOPES
def test_a_whole_step_compiled(scope):
    """Nothing of it is seen. `Monitor.step()` scans parameters all the same."""
    model = Model()
    monitor = enable(scope, model, action="log")
    optimizer = sgd(model)
    factor = torch.ones(())

    @torch.compile(backend="eager")
    def whole(x, factor):
        optimizer.zero_grad()
        loss = (model(x) * factor).square().mean()
        loss.backward()
        optimizer.step()

    assert monitor.healthy is None  # and not True
    for number in range(5):
        whole(batch(number), factor * NAN if number == 3 else factor)
        monitor.step()
    monitor.flush()
    if scope == "model":
        assert monitor.findings[0].site.kind == "param"
        assert monitor.findings[0].step == 3
    else:
        assert monitor.healthy is None  # no module was ever called


@SCOPES
def test_a_probe_inside_is_no_graph_break(scope):
    class Probed(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            return self.fc(nanscan.probe("inner", x))

    model = Probed()
    enable(scope, model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(batch()), model.fc(batch()))


SCRIPT = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), 1e-9)
compiled = torch.compile(model, backend="aot_eager")
for step in range(3):
    if step == 2:
        with torch.no_grad():
            model[1].weight.fill_(3e38)
    compiled(torch.full((2, 4), 100.0)).square().mean().backward()
    optimizer.step()
"""


def test_a_script_that_compiles(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-m", "nanscan", "run", str(script)],
        capture_output=True,
        text=True,
        check=True,
    )
    print(done.stderr)
    assert "Sequential output is non-finite in step 2 (origin: made in Sequential" in done.stderr
    assert "Sequential output was the first to go bad, in step 2" in done.stderr
