"""Small models and training loops that the tests of hooks and monitors share."""

import contextlib

import pytest
import torch
from torch import nn
from torch.nn.modules import module as module_hooks
from torch.optim import optimizer as optimizer_hooks

import nanscan
from nanscan import Site

NAN = float("nan")
INF = float("inf")

_OF_A_MODULE = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)


def hook_dicts(*models: nn.Module) -> dict[str, dict]:
    """Copies of every hook dict of torch, and of every module of some models."""
    found = {
        f"{owner.__name__}.{name}": dict(value)
        for owner in (module_hooks, optimizer_hooks)
        for name, value in vars(owner).items()
        if name.startswith("_global_") and isinstance(value, dict)
    }
    for number, model in enumerate(models):
        for name, module in model.named_modules():
            found |= {f"{number}.{name}.{key}": dict(getattr(module, key)) for key in _OF_A_MODULE}
    return found


@contextlib.contextmanager
def no_trace():
    """Closes every monitor at the end; fails if a hook of one is left anywhere in torch."""
    before = hook_dicts()
    try:
        yield
    finally:
        nanscan.disable()
    assert hook_dicts() == before


class Net(nn.Module):
    """Two linear layers with a module between them."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, width)
        self.act = nn.Tanh()
        self.fc2 = nn.Linear(width, width)

    def forward(self, x):
        return self.fc2(self.act(self.fc1(x)))


class Gap(nn.Module):
    """Two linear layers with a function between them, which belongs to no module."""

    def __init__(self, function=torch.tanh, width: int = 4) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, width)
        self.fc2 = nn.Linear(width, width)
        self.function = function

    def forward(self, x):
        return self.fc2(self.function(self.fc1(x)))


class Do(nn.Module):
    """A module that applies a function, and can be watched."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args, **kwargs):
        return self.function(*args, **kwargs)


class Mixed(nn.Module):
    """A module of each sort: in place, random, with statistics, with a tuple as its output."""

    def __init__(self, width: int = 5, heads: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3, padding=1)
        self.norm = nn.BatchNorm2d(3)
        self.act = nn.ReLU(inplace=True)
        self.drop = nn.Dropout(0.3)
        self.lstm = nn.LSTM(12, width, batch_first=True)
        self.attend = nn.MultiheadAttention(width, heads, batch_first=True)

    def forward(self, x):
        x = self.drop(self.act(self.norm(self.conv(x))))
        x, _ = self.lstm(x.flatten(2))
        return self.attend(x, x, x, need_weights=False)[0]


class Beside(nn.Module):
    """Runs one model; another is a part of it that only the user calls."""

    def __init__(self, main: nn.Module, aside: nn.Module) -> None:
        super().__init__()
        self.main = main
        self.aside = aside

    def forward(self, x):
        return self.main(x)


# The default kinds, and the state of optimizers.
COMMON_KINDS = ("input", "output", "grad", "param", "state")
# Watching one model registers hooks on its modules; watching all uses torch's global ones.
SCOPES = pytest.mark.parametrize("scope", ["model", "global"])


def enable(scope, model, **options):
    return nanscan.enable(model if scope == "model" else None, **options)


def alone(scope, model, name="weight"):
    """What a parameter or buffer of a module without parts is called: no model is around it."""
    return name if scope == "model" else f"{type(model).__name__}.{name}"


def sgd(model, lr=0.01, **options):
    return torch.optim.SGD(model.parameters(), lr, **options)


def set_nan(x):
    """A copy with one NaN in it, at index 1 of the flattened tensor."""
    x = x.clone()
    x.view(-1)[1] = NAN
    return x


def batch(seed: int = 0, rows: int = 3, width: int = 4) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


def train(model, optimizer, inputs, loss=lambda out: out.square().mean()) -> list[float]:
    """One step an input; the losses."""
    losses = []
    for x in inputs:
        optimizer.zero_grad()
        value = loss(model(x))
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses


def infer(model, *inputs) -> None:
    """One forward without gradients an input."""
    with torch.no_grad():
        for x in inputs:
            model(x)


def calls(monitor: nanscan.Monitor) -> dict[str, int]:
    """How often each site was scanned in the last whole step; 0 ones left out."""
    found = {}
    for node in monitor._table.nodes:
        history = monitor.history(node.site)
        if len(history["step"]) and history["step"][-1] == monitor.steps - 1:
            found[str(node.site)] = int(history["calls"][-1])
    return found


def verdicts(monitor: nanscan.Monitor) -> list[tuple[int, str, str]]:
    """(step, site, verdict) of every finding, in order."""
    return [(f.step, str(f.site), f.verdict) for f in monitor.findings]


def run_quiet(function, *args, **kwargs):
    """Calls a function for which a warning of nanscan is no failure."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", nanscan.NonFiniteWarning)
        return function(*args, **kwargs)


def diagnosed(model, run, **options):
    """A closed monitor of what `run` did; findings are kept, and nothing is printed."""
    with nanscan.watch(model, action=lambda _: None, **options) as monitor:
        run()
    return monitor


def first_fault(monitor: nanscan.Monitor) -> nanscan.Finding:
    return next(f for f in monitor.findings if f.verdict != "near-limit")


def titles(finding: nanscan.Finding) -> list[str]:
    return [cause.title for cause in finding.causes]


def sites(monitor, kind=None):
    """What was scanned so far, of one kind."""
    return {str(n.site) for n in monitor._table.nodes if kind in (None, n.kind)}


def history(monitor, name, kind, path=""):
    return monitor.history(Site(name, kind, path))


class HandMadeNorm(nn.Module):
    """A layer norm that someone wrote by hand."""

    def __init__(self, eps):
        super().__init__()
        self.eps = eps

    def forward(self, x):
        return (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + self.eps).sqrt()
