"""The fault sweep: one bad value, at every place of two models, one at a time. Is it named?

The first fault that is found must name that very place, with the right verdict, and all later ones
must count as handed on. `pytest -s tests/collect/test_sweep.py` prints the score.

These places are named otherwise, for what can be seen are tensors between modules:

- What code of no module made is named where it next goes into a module, or where the module that
  runs the code returns it; `between` says where it was still fine.
- A gradient that code of no module made is named at the module output that backward reaches next;
  `between` says where it was still fine.
- The output of a container that returns its child's as it is has the child's gradient: one tensor.
- A bad input or target is nobody's making: propagated. The target goes into a function, the loss.
"""

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook

import nanscan
from helpers.models import (
    INF,
    NAN,
    SCOPES,
    enable,
)
from nanscan._data.finding import FAULTS
from nanscan._data.site import DEFAULT_KINDS, KINDS
from nanscan._judge import episode

# -- two models ------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x, tap, *, bias):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).transpose(1, 3).unbind(2)
        x = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return self.out(tap("core", x.transpose(1, 2).flatten(2)))


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attend = Attention(width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x, tap, *, bias):
        x = tap("add1", x + self.attend(self.norm1(x), tap, bias=bias))
        return tap("add2", x + self.mlp(self.norm2(x)))


class Transformer(nn.Module):
    def __init__(self, width=8, vocabulary=7):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(2)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.full((width,), 2.0))

    def forward(self, tokens, shift, *, bias, tap):
        x = tap("embedded", self.embed(tokens) * self.scale + shift)
        for number, block in enumerate(self.blocks):
            x = block(x, lambda name, x, i=number: tap(f"blocks.{i}.{name}", x), bias=bias)
        return self.head(self.norm(x))


class ConvNet(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(2, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
        )
        self.conv = nn.Conv2d(width, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(width, 3)

    def forward(self, x, *, tap):
        x = self.stem(x)
        x = tap("add", self.relu(self.norm(self.conv(x))) + x)
        return self.fc(tap("flat", self.pool(x).flatten(1)))


# -- training with faults --------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """One bad value.

    Attributes:
        kind: what it is planted in: a kind of site, "target", "code" (what code of no module made),
            "backward" (its gradient).
        name: of the module, parameter, moment, input or piece of code.
        site: what must be named.
        verdict: what it must be called.
        between: what it must lie between, if that matters.
    """

    kind: str
    name: str
    site: str
    verdict: str = "origin"
    between: tuple[str, str] | None = None


class Run:
    """A model in training, into which a bad value can be put wherever there is one at all.

    Args:
        model: gets `tap` as a keyword.
        optimizer: of its parameters.
        args: of the model.
        kwargs: of the model.
        target: of its output.
        code: by name of a tap, the module output before it, the site in which a bad value is seen
            next, and the module whose output gradient is the last one before backward comes here.
        passing: containers that return a child's output as it is.
    """

    def __init__(self, model, optimizer, *, args, kwargs, target, code, passing) -> None:
        self.model, self.optimizer = model, optimizer
        self.args, self.kwargs, self.target = args, kwargs, target
        self.code, self.passing = code, passing
        self.names = {module: name for name, module in model.named_modules()}
        self.ran: list[str] = []  # modules in the order in which they returned, in this step
        self.bad_gradients: list[str] = []
        self.fault: Fault | None = None
        self.value = NAN
        optimizer.register_step_post_hook(self._after_step)

    def step(self) -> None:
        args = [self._spoilt("input", f"[{i}]", x) for i, x in enumerate(self.args)]
        kwargs = {key: self._spoilt("input", f".{key}", x) for key, x in self.kwargs.items()}
        self.optimizer.zero_grad()
        self.ran.clear()
        out = self.model(*args, **kwargs, tap=self._tap)
        loss = F.mse_loss(out, self._spoilt("target", "", self.target))
        self._spoilt("loss", "", loss).backward()
        for name, parameter in self.model.named_parameters():
            if self._is_in("grad", name):
                self._spoil_inplace(parameter.grad)
        self.bad_gradients = [
            name for name, p in self.model.named_parameters() if not p.grad.isfinite().all()
        ]
        self.optimizer.step()

    def tensors(self) -> list[torch.Tensor]:
        """All that lives from step to step."""
        moments = [x for state in self.optimizer.state.values() for x in state.values()]
        return [*self.model.parameters(), *self.model.buffers(), *moments]

    def _is_in(self, kind: str, name: str) -> bool:
        return self.fault is not None and (self.fault.kind, self.fault.name) == (kind, name)

    def _spoilt(self, kind: str, name: str, x: torch.Tensor) -> torch.Tensor:
        return self._spoil(x) if self._is_in(kind, name) else x

    def _spoil(self, x: torch.Tensor) -> torch.Tensor:
        bad = torch.zeros(x.shape)
        self._spoil_inplace(bad)
        return x + bad

    def _spoil_inplace(self, x: torch.Tensor) -> None:
        with torch.no_grad():
            x.view(-1)[x.numel() // 2] = self.value

    def _tap(self, name: str, x: torch.Tensor) -> torch.Tensor:
        if self._is_in("backward", name):
            return SpoilsGradient.apply(x, self._spoil)
        return self._spoilt("code", name, x)

    def after_module(self, module: nn.Module, args: object, output: torch.Tensor) -> object:
        """The hook of all modules, to be registered before those of a monitor."""
        name = self.names[module]
        self.ran.append(name)
        if self._is_in("grad_output", name):
            output.register_hook(self._spoil)
        return self._spoilt("output", name, output)

    def _after_step(self, *_: object) -> None:
        fault = self.fault
        if fault is None:
            return
        if fault.kind == "param":
            self._spoil_inplace(self.model.get_parameter(fault.name))
        elif fault.kind == "buffer":
            buffer = self.model.get_buffer(
                fault.name
            )  # that of a BatchNorm changes unseen by torch
            self._spoil_inplace(buffer.data if "running" in fault.name else buffer)
        elif fault.kind == "state":
            name, moment = fault.name.split()
            self._spoil_inplace(self.optimizer.state[self.model.get_parameter(name)][moment])

    def faults(self) -> list[Fault]:
        """One for each place."""
        return [*self._faults_of_modules(), *self._faults_of_values(), *self._faults_of_state()]

    def _faults_of_modules(self) -> Iterator[Fault]:
        for module, name in self.names.items():
            if not isinstance(module, nn.ModuleList):
                label = name or type(self.model).__name__
                yield Fault("output", name, f"{label} output")
                if name not in self.passing:
                    yield Fault("grad_output", name, f"{label} grad_output")

    def _faults_of_values(self) -> Iterator[Fault]:
        paths = {f"[{i}]": x for i, x in enumerate(self.args)}
        paths |= {f".{key}": x for key, x in self.kwargs.items()}
        for path, x in paths.items():
            if x.is_floating_point():
                site = f"{type(self.model).__name__} input{path}"
                yield Fault("input", path, site, "propagated")
        yield Fault("target", "", "loss")
        yield Fault("loss", "", "loss")
        for name, (before, seen, after) in self.code.items():
            yield Fault("code", name, seen)
            gradients = f"{after} grad_output", f"{before} grad_output"
            yield Fault("backward", name, gradients[1], between=gradients)

    def _faults_of_state(self) -> Iterator[Fault]:
        moments = {"AdamW": ("exp_avg", "exp_avg_sq"), "SGD": ("momentum_buffer",)}
        for name, _ in self.model.named_parameters():
            yield Fault("grad", name, f"{name} grad")
            yield Fault("param", name, f"{name} param")
            for moment in moments[type(self.optimizer).__name__]:
                yield Fault("state", f"{name} {moment}", f"{name} {moment}")
        for name, buffer in self.model.named_buffers():
            if buffer.is_floating_point():
                yield Fault("buffer", name, f"{name} buffer")


class SpoilsGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, spoil):
        ctx.spoil = spoil
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.spoil(gradient), None


def transformer() -> Run:
    model = Transformer()
    code = {"embedded": ("embed", "blocks.0 input[0]", "blocks.0.norm1")}
    for block in ("blocks.0", "blocks.1"):
        attend, mlp = f"{block}.attend", f"{block}.mlp"
        code |= {
            f"{block}.core": (f"{attend}.qkv", f"{attend}.out input[0]", f"{attend}.out"),
            f"{block}.add1": (f"{attend}.out", f"{block}.norm2 input[0]", f"{block}.norm2"),
            f"{block}.add2": (f"{mlp}.2", f"{block} output", block),
        }
    return Run(
        model,
        torch.optim.AdamW(model.parameters(), 1e-3),
        args=(torch.randint(0, 7, (2, 5)), torch.randn(2, 5, 8)),
        kwargs={"bias": torch.randn(5, 5)},
        target=torch.randn(2, 5, 7),
        code=code,
        passing={"", *(f"blocks.{i}.{name}" for i in range(2) for name in ("attend", "mlp"))},
    )


def conv_net() -> Run:
    model = ConvNet()
    return Run(
        model,
        torch.optim.SGD(model.parameters(), 1e-2, momentum=0.9),
        args=(torch.randn(3, 2, 6, 6),),
        kwargs={},
        target=torch.randn(3, 3),
        code={"add": ("relu", "pool input[0]", "pool"), "flat": ("pool", "fc input[0]", "fc")},
        passing={"", "stem"},
    )


# -- the sweep -------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _one_thread(num_threads):
    num_threads(1)


@pytest.fixture
def start(monkeypatch):
    """Makes a run and the monitor that watches it.

    A monitor looks for an optimizer among all objects, once. Here are many monitors: it finds it
    at once.
    """
    handles = []

    def make(make_run, scope, value=NAN, kinds=KINDS):
        end()
        torch.manual_seed(0)
        run = make_run()
        run.value = value
        monkeypatch.setattr(gc, "get_objects", lambda: [run.optimizer])
        handles.append(register_module_forward_hook(run.after_module))
        return run, enable(scope, run.model, kinds=kinds, action=lambda _: None)

    def end():
        nanscan.disable()
        while handles:
            handles.pop().remove()

    yield make
    end()


def what_is_wrong(fault: Fault, step: int, findings: list) -> str:
    found = [f for f in findings if f.verdict in FAULTS]
    if not found:
        return "nothing found"
    first = found[0]
    if (first.step, str(first.site), first.verdict) != (step, fault.site, fault.verdict):
        return f"named {first.site} as {first.verdict} in step {first.step}"
    between = first.between and tuple(map(str, first.between))
    if fault.between and between != fault.between:
        return f"between {between}"
    if fault.kind == "code" and (between is None) != ("input" not in fault.site):
        return f"between {between}"
    wrong = [str(f.site) for f in found[1:] if f.verdict != "propagated"]
    return f"origins too: {', '.join(wrong)}" if wrong else ""


def score(title: str, faults: list[Fault], judge: Callable[[Fault], str]) -> None:
    """Judges every fault, prints how many were named, and fails unless all were."""
    wrong = {f"{fault.kind} {fault.name}": judge(fault) for fault in faults}
    wrong = {label: what for label, what in wrong.items() if what}
    print(f"{title}: {len(faults) - len(wrong)} of {len(faults)}")
    assert wrong == {}


MODELS = pytest.mark.parametrize("make", [transformer, conv_net])
VALUES = pytest.mark.parametrize("value", [NAN, INF])


@VALUES
@MODELS
@SCOPES
def test_faults_in_the_first_step(scope, make, value, start):
    def judge(fault):
        run, monitor = start(make, scope, value)
        run.fault = fault
        run.step()
        return what_is_wrong(fault, 0, monitor.poll())

    score(f"{make.__name__}, {scope}, {value} in step 0", make().faults(), judge)


@VALUES
@MODELS
@SCOPES
def test_faults_in_the_course_of_training(scope, make, value, start, monkeypatch):
    """Each is undone after its step, and the next step is clean."""
    monkeypatch.setattr(episode, "_WINDOW", 0)  # each is a fault of its own
    run, monitor = start(make, scope, value)
    for _ in range(3):
        run.step()
    assert monitor.poll() == []
    clean = [x.clone() for x in run.tensors()]

    def judge(fault):
        run.fault = fault
        run.step()
        what = what_is_wrong(fault, monitor.steps - 1, monitor.poll())
        run.fault = None
        with torch.no_grad():
            for x, good in zip(run.tensors(), clean, strict=True):
                x.copy_(good)
        run.step()
        after = [f.verdict for f in monitor.poll()]
        return what or ("" if after == ["recovered"] else f"then {after}")

    score(f"{make.__name__}, {scope}, {value} in training", run.faults(), judge)


@MODELS
@SCOPES
def test_bad_gradients_when_only_those_of_parameters_are_seen(scope, make, start):
    """As by default: named is the parameter that backward reaches first of those that go bad."""

    def judge(fault):
        run, monitor = start(make, scope, kinds=DEFAULT_KINDS)
        run.fault = fault
        run.step()
        owners = {name: name.rpartition(".")[0] for name in run.bad_gradients}
        last = max(map(run.ran.index, owners.values()))
        first = next(name for name, owner in owners.items() if owner == run.ran[last])
        expected = Fault("grad", first, f"{first} grad")
        return what_is_wrong(expected, 0, monitor.poll())

    faults = [f for f in make().faults() if f.kind in ("grad_output", "backward", "grad")]
    score(f"{make.__name__}, {scope}, gradients by default", faults, judge)


@MODELS
@SCOPES
def test_without_a_fault_nothing_is_found(scope, make, start):
    run, monitor = start(make, scope)
    for _ in range(5):
        run.step()
    assert monitor.findings == []
    assert monitor.coverage().not_called == (("blocks",) if make is transformer else ())
