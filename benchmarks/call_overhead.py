"""Shows what one call costs when the tensor is tiny: a raw scan, a check, and a watched call.

ns a call of the calling thread's CPU time, which other processes disturb least; smaller is better.
Baselines, turn by turn in the same process: an empty pybind11 function for the raw calls,
bool(torch.isnan(x).any()) for the check, a loop of checks for check_many, and for watched calls the
same modules bare and with an empty Python forward hook: each module's own, or global. Calls run
under no_grad, but for those called "gradients", where the hook of each output's gradient is set,
too. Then what the end of a step costs, over the number of sites.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from _measure import Bar, Report, Spread, arguments, significant
from matplotlib.figure import Figure
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

import nanscan
from nanscan import _C

CALLS = 1000  # of a function a turn
MANY = 5000  # tensors of a check_many
DEPTH = 50  # modules in a stack
FORWARDS = 5  # of a stack a turn
SITES = [10, 100, 1000]

Times = dict[str, list[float]]


@dataclass
class Contender:
    """Something to time: `run` makes `calls` calls.

    `active` holds around the turn and `prepare` comes before `run`, both untimed.
    """

    run: Callable[[], object]
    calls: int
    active: Callable[[], AbstractContextManager[object]] = nullcontext
    prepare: Callable[[], object] | None = None


def interleave(contenders: dict[str, Contender], rounds: int) -> Times:
    """CPU time of this thread in ns a call, one figure a round; order shuffled anew each round."""
    times: Times = {name: [] for name in contenders}
    order = list(contenders)
    shuffle = random.Random(0).shuffle
    for _ in range(rounds):
        shuffle(order)
        for name in order:
            contender = contenders[name]
            with contender.active():
                (contender.prepare or contender.run)()
                begin = time.thread_time_ns()
                contender.run()
                times[name].append((time.thread_time_ns() - begin) / contender.calls)
    return times


def repeat(call: Callable[..., object], *args: object) -> Contender:
    """The same call CALLS times, with only a loop around it."""

    def run() -> None:
        for _ in range(CALLS):
            call(*args)

    return Contender(run, CALLS)


def function_calls() -> dict[str, Contender]:
    """Calls on a 4 x 4 tensor."""
    x = torch.randn(4, 4)
    table, other_table = _C.Table(), _C.Table()
    row, other_row = table.add_row(), other_table.add_row()
    rows, order = np.zeros(128, np.uint8), np.zeros(1, np.uint64)
    tensors = [x.clone() for _ in range(CALLS)]
    visit = other_table.visit

    def visit_new() -> None:
        for tensor in tensors:
            visit(tensor, other_row)
        other_table.snapshot(rows, order)  # forgets what was seen

    return {
        "empty pybind11 call": repeat(_C.noop, x, 0),
        "raw scan": repeat(table.scan, x, row),
        "raw visit, seen tensor": repeat(table.visit, x, row),
        "raw visit, new tensor": Contender(visit_new, CALLS),
        "nanscan.check(x), not read": repeat(nanscan.check, x),
        "nanscan.check(x).is_finite": repeat(lambda: nanscan.check(x).is_finite),
        "bool(isnan(x).any())": repeat(lambda: bool(torch.isnan(x).any())),
    }


def many_checks() -> dict[str, Contender]:
    """Checks of MANY tensors of 4 x 4, in containers of three kinds. No result is read."""
    tensors = [torch.randn(4, 4) for _ in range(MANY)]
    parameters = {f"block.{i}.weight": nn.Parameter(x) for i, x in enumerate(tensors)}
    nested = [
        {"weights": tensors[i : i + 25], "state": tuple(tensors[i + 25 : i + 50])}
        for i in range(0, MANY, 50)
    ]

    def loop() -> None:
        results = []
        for tensor in tensors:
            results.append(nanscan.check(tensor))  # noqa: PERF401 - what users write

    def isnan_loop() -> None:
        results = []
        for tensor in tensors:
            results.append(torch.isnan(tensor).any())  # noqa: PERF401 - what users write

    return {
        "isnan(x).any() in a loop": Contender(isnan_loop, MANY),
        "check in a loop": Contender(loop, MANY),
        "check_many of a list": Contender(lambda: nanscan.check_many(tensors), MANY),
        "check_many of parameters": Contender(lambda: nanscan.check_many(parameters), MANY),
        "check_many, nested": Contender(lambda: nanscan.check_many(nested), MANY),
    }


def empty_hook(_module: nn.Module, _args: object, _output: object) -> None:
    """Does nothing."""


def isnan_hook(module: nn.Module, _args: object, output: torch.Tensor) -> None:
    """What people write first."""
    if torch.isnan(output).any():
        raise FloatingPointError(type(module).__name__)


@contextmanager
def own_hooks(model: nn.Module, hook: Callable[..., None]) -> Iterator[None]:
    """A forward hook on each module."""
    handles = [module.register_forward_hook(hook) for module in model.modules()]
    yield
    for handle in handles:
        handle.remove()


@contextmanager
def global_empty_hook() -> Iterator[None]:
    """An empty forward hook on all modules of the process."""
    handle = register_module_forward_hook(empty_hook)
    yield
    handle.remove()


@contextmanager
def hooks_alone(model: nn.Module | None, **options: Any) -> Iterator[None]:
    """Watched by nanscan, with the end of the step left to the end of the turn."""
    with nanscan.watch(model, **options) as monitor:
        monitor.step()
        yield


@contextmanager
def grad_mode(active: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
    """The same with autograd on."""
    with active(), torch.enable_grad():
        yield


def module_calls(make: Callable[[], nn.Module]) -> dict[str, Contender]:
    """Calls of a module, averaged over a stack of them, with hooks of every kind."""
    x = torch.randn(4, 4)
    stack = nn.Sequential(*(make() for _ in range(DEPTH)))

    def contender(active: Callable[[], AbstractContextManager[object]]) -> Contender:
        def run() -> None:
            for _ in range(FORWARDS):
                stack(x.requires_grad_(torch.is_grad_enabled()))

        return Contender(run, FORWARDS * DEPTH, active)

    def with_gradients(active: Callable[[], AbstractContextManager[object]]) -> Contender:
        return contender(partial(grad_mode, active))

    contexts = {
        "bare": nullcontext,
        "empty hook": partial(own_hooks, stack, empty_hook),
        "isnan.any hook": partial(own_hooks, stack, isnan_hook),
        "nanscan, outputs": partial(hooks_alone, stack, kinds=("output",)),
        "nanscan": partial(hooks_alone, stack),
        f"nanscan, a step every {DEPTH} calls": partial(nanscan.watch, stack),
        "global empty hook": global_empty_hook,
        "global nanscan, outputs": partial(hooks_alone, None, kinds=("output",)),
        "global nanscan": partial(hooks_alone, None),
    }
    contenders = {name: contender(active) for name, active in contexts.items()}
    all_kinds = partial(hooks_alone, stack, kinds=tuple(nanscan.Kind))
    return contenders | {
        "bare, gradients": with_gradients(nullcontext),
        "empty hook, gradients": with_gradients(partial(own_hooks, stack, empty_hook)),
        "nanscan, gradients": with_gradients(all_kinds),
    }


def step_ends() -> dict[str, Contender]:
    """The end of a step after one forward of so many modules."""
    x = torch.randn(4, 4)
    contenders = {}
    for sites in SITES:
        stack = nn.Sequential(*(nn.Linear(4, 4) for _ in range(sites)))
        monitor = nanscan.enable(stack, kinds=("output",))
        monitor.step()
        contenders[f"{sites} sites"] = Contender(monitor.step, 1, prepare=partial(stack, x))
    return contenders


def difference(of: list[float], to: list[float]) -> Spread:
    """Round by round."""
    return Spread.of(np.subtract(of, to))


def quotient(of: list[float], to: list[float]) -> Spread:
    """Round by round."""
    return Spread.of(np.divide(of, to))


def show(report: Report, title: str, times: Times) -> None:
    """Table and JSON of one comparison."""
    spreads = {name: Spread.of(t) for name, t in times.items()}
    rows = [[name, significant(min(times[name])), s.text()] for name, s in spreads.items()]
    report.table(f"{title}: ns a call", ["", "min", "median"], rows)
    report.data.setdefault("ns_per_call", {})[title] = {
        name: {"min": min(times[name]), "median": s} for name, s in spreads.items()
    }


def plot(groups: dict[str, Times]) -> Figure:
    """Medians with p10 .. p90."""
    figure = Figure(figsize=(9, 10), layout="constrained")
    sizes = [len(times) for times in groups.values()]
    axes = figure.subplots(len(groups), 1, sharex=True, height_ratios=sizes)
    for ax, (title, times) in zip(axes, groups.items(), strict=True):
        spreads = [Spread.of(t) for t in times.values()]
        medians = [s.median for s in spreads]
        errors = [[s.median - s.low for s in spreads], [s.high - s.median for s in spreads]]
        baselines = ("bare", "empty", "isnan", "bool", "global empty", "check in a loop")
        colors = ["silver" if name.startswith(baselines) else "tab:red" for name in times]
        bars = ax.barh(list(times), medians, xerr=errors, color=colors, ecolor="gray")
        ax.bar_label(bars, [f"{m:.0f}" for m in medians], padding=6)
        ax.set(title=title, xscale="log")
        ax.set_xlim(20, 5e6)
        ax.invert_yaxis()
        ax.grid(axis="x", alpha=0.3)
    axes[-1].set_xlabel("ns a call, median and p10 .. p90 over rounds")
    return figure


def main() -> None:
    """Runs all comparisons."""
    report = Report("call_overhead", arguments(__doc__))
    torch.set_num_threads(1)
    gc.disable()
    calls = interleave(function_calls(), rounds=100)
    extra = difference(calls["raw scan"], calls["empty pybind11 call"])
    many = interleave(many_checks(), rounds=30)
    bars = [Bar("raw scan - empty pybind11 call", 250, extra, at_least=False, unit=" ns")]
    ratio = quotient(calls["nanscan.check(x).is_finite"], calls["bool(isnan(x).any())"])
    bars.append(Bar("check(x).is_finite / bool(isnan(x).any())", 0.35, ratio, at_least=False))
    for name in ("check_many of a list", "check_many of parameters", "check_many, nested"):
        ratio = quotient(many[name], many["check in a loop"])
        bars.append(Bar(f"{name} / check in a loop", 1, ratio, at_least=False))
    groups = {"function calls": calls, f"{MANY} tensors": many}
    for title, make in {"Identity": nn.Identity, "Linear(4, 4)": partial(nn.Linear, 4, 4)}.items():
        with torch.no_grad():
            times = interleave(module_calls(make), rounds=100)
        groups[f"call of {title}"] = times
        for kind, case, most in (("", "", 0.8), ("global ", "", 0.8), ("", ", gradients", 1.5)):
            bare = times[f"bare{case}"]
            ours = difference(times[f"{kind}nanscan{case}"], bare).median
            hook = difference(times[f"{kind}empty hook{case}"], bare).median
            name = f"{title}{case}: {kind}nanscan / {kind}empty hook, time added"
            bars.append(Bar(name, most, Spread.of([ours / hook]), at_least=False))
    groups["end of a step"] = interleave(step_ends(), rounds=50)
    nanscan.disable()
    for title, times in groups.items():
        show(report, title, times)
    report.bars(bars)
    report.save(plot(groups))


if __name__ == "__main__":
    main()
