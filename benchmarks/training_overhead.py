"""Shows what watching a training step costs, next to the usual ways of looking for NaN.

A step is forward, loss, backward and optimizer.step(). Three models: a stack of transformer blocks,
a small residual conv net, and an MLP of tiny layers, the worst case for hooks. Baselines, step by
step in the same process, each on its own copy of the model with the same seed and data: no hooks,
empty forward hooks, forward hooks with the truth of torch.isnan(output).any() or with
torch.aminmax(output), torch.autograd.detect_anomaly(), and transformers' DebugUnderflowOverflow.
"""

from __future__ import annotations

import copy
import math
import random
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from _measure import Bar, Report, Spread, arguments, percent_over, significant
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional
from transformers.debug_utils import DebugUnderflowOverflow

import nanscan
from nanscan._data.site import DEFAULT_KINDS, KINDS

SECONDS = 40  # of steps a model
WARM_UP = 3  # rounds not counted

ALONE = ("input", "grad_output", "loss", "grad", "param", "buffer", "state")

Times = dict[str, list[float]]


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """[batch, time, width] to the same."""
        batch, steps, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, steps, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(batch, steps, width))
        return x + self.mlp(self.norm2(x))


class Residual(nn.Module):
    """Two 3 x 3 convolutions around a shortcut."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """[N, C, H, W] to the same."""
        return self.relu(x + self.body(x))


def transformer() -> tuple[nn.Module, Tensor, Tensor]:
    """Four blocks of width 256 over 2 x 128 tokens."""
    model = nn.Sequential(*(Block(256, 4) for _ in range(4)), nn.LayerNorm(256))
    return model, torch.randn(2, 128, 256), torch.randn(2, 128, 256)


def conv_net() -> tuple[nn.Module, Tensor, Tensor]:
    """Three residual blocks, on 16 images of 3 x 32 x 32."""
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        Residual(32),
        nn.Conv2d(32, 64, 3, stride=2, padding=1),
        Residual(64),
        nn.Conv2d(64, 128, 3, stride=2, padding=1),
        Residual(128),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(128, 10),
    )
    return model, torch.randn(16, 3, 32, 32), torch.randn(16, 10)


def tiny_mlp() -> tuple[nn.Module, Tensor, Tensor]:
    """100 layers of 16 x 16 weights, a batch of 8."""
    layers = [layer for _ in range(100) for layer in (nn.Linear(16, 16), nn.ReLU())]
    return nn.Sequential(*layers), torch.randn(8, 16), torch.randn(8, 16)


def empty_hook(_module: nn.Module, _args: object, _output: object) -> None:
    """Does nothing."""


def isnan_hook(module: nn.Module, _args: object, output: Tensor) -> None:
    """What people write first."""
    if torch.isnan(output).any():
        raise FloatingPointError(type(module).__name__)


def aminmax_hook(module: nn.Module, _args: object, output: Tensor) -> None:
    """The fastest check that PyTorch offers."""
    low, high = torch.aminmax(output)
    if not (math.isfinite(low.item()) and math.isfinite(high.item())):
        raise FloatingPointError(type(module).__name__)


class Training:
    """One copy of a model with its optimizer, and what watches it."""

    def __init__(self, model: nn.Module, x: Tensor, target: Tensor) -> None:
        self.model = copy.deepcopy(model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.x, self.target = x, target
        self.watched: Callable[[], AbstractContextManager[object]] = nullcontext

    def step(self) -> None:
        """Forward, loss, backward, optimizer."""
        self.optimizer.zero_grad()
        functional.mse_loss(self.model(self.x), self.target).backward()
        self.optimizer.step()

    def with_hooks(self, hook: Callable[..., None]) -> Training:
        """A forward hook on every module."""
        for module in self.model.modules():
            module.register_forward_hook(hook)
        return self

    def with_nanscan(self, *kinds: str, **options: Any) -> Training:
        """Monitored during its own turns: hooks on optimizers see the steps of all models."""
        monitor = nanscan.enable(self.model, kinds=kinds, **options)
        monitor.pause()

        @contextmanager
        def watched() -> Iterator[None]:
            monitor.resume()
            yield
            monitor.pause()

        self.watched = watched
        return self

    def with_anomaly_mode(self) -> Training:
        """PyTorch's own search for NaN in backward."""
        self.watched = partial(torch.autograd.detect_anomaly, check_nan=True)
        return self

    def with_transformers(self) -> Training:
        """Abs-min and abs-max of all inputs, outputs and weights as text, at every module call."""
        self.debugger = DebugUnderflowOverflow(self.model)
        return self


def contenders(make: Callable[[], tuple[nn.Module, Tensor, Tensor]]) -> dict[str, Training]:
    """The same training with all ways of watching it."""
    torch.manual_seed(0)
    training = partial(Training, *make())
    return {
        "no hooks": training(),
        "no hooks, again (the noise)": training(),
        "empty hooks": training().with_hooks(empty_hook),
        "nanscan, outputs": training().with_nanscan("output"),
        "nanscan, default": training().with_nanscan(*DEFAULT_KINDS),
        "nanscan, all kinds": training().with_nanscan(*KINDS),
        "nanscan, all, budget 2 %": training().with_nanscan(*KINDS, max_overhead=0.02),
        **{f"nanscan, {kind} alone": training().with_nanscan(kind) for kind in ALONE},
        "aminmax hooks": training().with_hooks(aminmax_hook),
        "isnan.any hooks": training().with_hooks(isnan_hook),
        "detect_anomaly": training().with_anomaly_mode(),
        "DebugUnderflowOverflow": training().with_transformers(),
    }


def interleave(trainings: dict[str, Training], seconds: float) -> Times:
    """Seconds a step, one figure a round; order shuffled anew each round."""
    times: Times = {name: [] for name in trainings}
    order = list(trainings)
    shuffle = random.Random(0).shuffle
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[order[0]]) < WARM_UP + 3:
        shuffle(order)
        for name in order:
            training = trainings[name]
            with training.watched():
                begin = time.perf_counter()
                training.step()
                times[name].append(time.perf_counter() - begin)
    return {name: t[WARM_UP:] for name, t in times.items()}


def share_of_overhead(triples: np.ndarray) -> np.ndarray:
    """One overhead over another; [..., rounds, (time, other time, time without hooks)]."""
    return percent_over(triples[..., [0, 2]]) / percent_over(triples[..., [1, 2]])


def overheads(times: Times) -> dict[str, Spread]:
    """Of all but the baseline."""
    return {
        name: Spread.of_statistic(percent_over, np.stack([t, times["no hooks"]], axis=-1))
        for name, t in times.items()
        if name != "no hooks"
    }


def bars_of(title: str, times: Times) -> list[Bar]:
    """What outputs alone, the default, and all kinds may cost."""
    triples = [times[name] for name in ("nanscan, outputs", "isnan.any hooks", "no hooks")]
    share = Spread.of_statistic(share_of_overhead, np.stack(triples, axis=-1))
    name = f"{title}: overhead, nanscan outputs / isnan.any hooks"
    bars = [Bar(name, 0.25, share, at_least=False)]
    if title == "tiny MLP":
        return bars
    over = overheads(times)
    for contender, limit in (
        ("nanscan, default", 6),
        ("nanscan, all kinds", 10),
        ("nanscan, all, budget 2 %", 3),
    ):
        name = f"{title}: overhead, {contender}"
        bars.append(Bar(name, limit, over[contender], at_least=False, unit=" %"))
    for other in ("detect_anomaly", "DebugUnderflowOverflow"):
        triples = [times[name] for name in ("nanscan, all kinds", other, "no hooks")]
        share = Spread.of_statistic(share_of_overhead, np.stack(triples, axis=-1))
        name = f"{title}: overhead, nanscan all kinds / {other}"
        bars.append(Bar(name, 0.2, share, at_least=False))
    return bars


def show(report: Report, all_times: dict[str, Times]) -> None:
    """Table and JSON."""
    kept = report.data["models"] = {}
    for title, times in all_times.items():
        base = Spread.of(1000 * np.array(times["no hooks"]))
        over = overheads(times)
        rows = [["no hooks", base.text(), ""]]
        for name, spread in over.items():
            step = Spread.of(1000 * np.array(times[name]))
            interval = f"{spread.median:+.1f} %  ({spread.low:+.1f} .. {spread.high:+.1f})"
            rows.append([name, step.text(), interval])
        columns = ["", "ms a step", "overhead (95 % of its median)"]
        report.table(f"{title}, {base.rounds} rounds", columns, rows)
        kept[title] = {"ms_without_hooks": base, "overhead_percent": over}


def plot(all_times: dict[str, Times]) -> Figure:
    """Overheads, one panel a model."""
    figure = Figure(figsize=(15, 7), layout="constrained")
    axes = figure.subplots(1, len(all_times), sharey=True)
    for ax, (title, times) in zip(axes, all_times.items(), strict=True):
        over = overheads(times)
        medians = [s.median for s in over.values()]
        errors = [
            [s.median - s.low for s in over.values()],
            [s.high - s.median for s in over.values()],
        ]
        colors = ["tab:red" if "nanscan" in name else "silver" for name in over]
        bars = ax.barh(list(over), medians, xerr=errors, color=colors, ecolor="black", capsize=3)
        ax.bar_label(bars, [f"{m:+.1f} %" for m in medians], padding=8)
        step = significant(1000 * float(np.median(times["no hooks"])), 2)
        ax.set(title=f"{title}, {step} ms a step", xlabel="overhead of a training step, %")
        ax.set_xscale("symlog", linthresh=10)
        ax.set_xlim(-10, 5000)
        ax.set_xticks([0, 5, 10, 100, 1000], ["0", "5", "10", "100", "1000"])
        ax.grid(axis="x", alpha=0.3)
    axes[0].invert_yaxis()
    return figure


def main() -> None:
    """Trains the three models."""
    report = Report("training_overhead", arguments(__doc__))
    warnings.filterwarnings("ignore", message="Anomaly Detection")
    models = {"transformer": transformer, "conv net": conv_net, "tiny MLP": tiny_mlp}
    all_times = {title: interleave(contenders(make), SECONDS) for title, make in models.items()}
    nanscan.disable()
    show(report, all_times)
    report.bars([bar for title, times in all_times.items() for bar in bars_of(title, times)])
    report.save(plot(all_times))


if __name__ == "__main__":
    main()
