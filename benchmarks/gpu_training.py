"""Shows what watching a GPT-2-small-sized training on a GPU costs, next to the usual hooks.

A step is forward, loss, backward and AdamW under bfloat16 autocast: 12 layers of width 768 with 12
heads over 1,024 tokens. One model; in turns, shuffled anew each round, it runs without hooks
(twice: the difference is noise), with empty forward hooks, with nanscan scanning every module's
output, with nanscan as it is by default (inputs, outputs, gradients, parameters), and with the hook
that people write first, which waits for the truth of torch.isnan(output).any(). Time of a step by
the GPU's clock, over several steps; the host's time until a step is sent to an idle GPU.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from _measure import Bar, Report, Spread, percent_over
from gpu_timing import Device, Options, options
from torch import Tensor, nn
from torch.nn import functional

import nanscan

STEP_MS = 50  # least length of a step; the batch grows until there


@dataclass
class Shape:
    """Of the model and its input."""

    layers: int = 12
    width: int = 768
    heads: int = 12
    tokens: int = 1024
    words: int = 50_304  # GPT-2's vocabulary, made a multiple of 128
    batch: int = 16


SMALL = Shape(layers=2, width=64, heads=4, tokens=64, words=512, batch=2)


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, tokens, width] to the same."""
        batch, tokens, width = x.shape
        qkv = self.qkv(x).view(batch, tokens, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(mixed.transpose(1, 2).reshape(batch, tokens, width))


class Mlp(nn.Module):
    """Two layers around a GELU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.act, self.down = (
            nn.Linear(width, 4 * width),
            nn.GELU(approximate="tanh"),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        """[batch, tokens, width] to the same."""
        return self.down(self.act(self.up(x)))


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.mlp = Attention(width, heads), Mlp(width)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, tokens, width] to the same."""
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Gpt(nn.Module):
    """A decoder with tied embeddings."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.words = nn.Embedding(shape.words, shape.width)
        self.places = nn.Embedding(shape.tokens, shape.width)
        self.blocks = nn.Sequential(*(Block(shape.width, shape.heads) for _ in range(shape.layers)))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.words, bias=False)
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)
        self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """[batch, tokens] to [batch, tokens, words]."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.blocks(self.words(tokens) + self.places(places))))


class Training:
    """The model, its optimizer and one batch."""

    def __init__(self, shape: Shape, device: Device) -> None:
        self.device = device
        self.shape = shape
        self.model = Gpt(shape).to(device.torch)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.take(shape.batch)

    def take(self, batch: int) -> None:
        """Another size of batch."""
        self.shape.batch = batch
        size = (batch, self.shape.tokens + 1)
        self.data = torch.randint(self.shape.words, size, device=self.device.torch)

    def step(self) -> None:
        """Forward, loss, backward, optimizer."""
        self.optimizer.zero_grad()
        with torch.autocast(self.device.torch.type, torch.bfloat16):
            logits = self.model(self.data[:, :-1])
            loss = functional.cross_entropy(logits.flatten(0, 1), self.data[:, 1:].flatten())
        loss.backward()
        self.optimizer.step()

    def seconds(self, steps: int) -> float:
        """By the device's clock, a step."""
        return self.device.hot(self.step, steps, 0)

    def host_seconds(self) -> float:
        """Until a step is sent to an idle device."""
        self.device.wait()
        begin = time.perf_counter()
        self.step()
        took = time.perf_counter() - begin
        self.device.wait()
        return took


def fit(training: Training) -> None:
    """Grows the batch until a step is long enough, as far as memory goes."""
    while True:
        training.step()
        took = training.seconds(2)
        if took * 1000 >= STEP_MS or training.shape.batch >= 128:
            return
        batch = training.shape.batch
        try:
            training.take(2 * batch)
            training.step()
            training.device.wait()
        except torch.OutOfMemoryError:
            training.optimizer.zero_grad()
            torch.cuda.empty_cache()
            training.take(batch)
            return


def empty_hook(_module: nn.Module, _args: object, _output: object) -> None:
    """Does nothing."""


def isnan_hook(module: nn.Module, _args: object, output: Tensor) -> None:
    """What people write first."""
    if torch.isnan(output).any():
        raise FloatingPointError(type(module).__name__)


@contextmanager
def hooks(model: nn.Module, hook: Callable[..., None]) -> Iterator[None]:
    """A forward hook on every module."""
    handles = [module.register_forward_hook(hook) for module in model.modules()]
    yield
    for handle in handles:
        handle.remove()


@contextmanager
def watched(
    model: nn.Module, found: list[nanscan.Finding], **kinds: tuple[str, ...]
) -> Iterator[None]:
    """nanscan, with its findings kept: there should be none."""
    with nanscan.watch(model, action="log", **kinds) as monitor:
        yield
    found += monitor.findings


@dataclass
class Turns:
    """Of one contender; figures in seconds a step, one a round."""

    active: Callable[[], AbstractContextManager[object]]
    device: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)


def interleave(training: Training, contenders: dict[str, Turns], seconds: float, steps: int) -> int:
    """Turns until the time is up, at least three rounds. Returns how many there were."""
    order = list(contenders)
    shuffle = random.Random(0).shuffle
    end = time.perf_counter() + seconds
    rounds = 0
    while rounds < 3 or time.perf_counter() < end:
        shuffle(order)
        for name in order:
            turns = contenders[name]
            with turns.active():
                training.step()  # meets the hooks for the first time
                turns.host.append(training.host_seconds())
                turns.device.append(training.seconds(steps))
        rounds += 1
    return rounds


def show(report: Report, contenders: dict[str, Turns], title: str) -> dict[str, Spread]:
    """Table and JSON. Returns overheads in percent."""
    base = contenders["no hooks"]
    rows, kept, overheads = [], {}, {}
    for name, turns in contenders.items():
        step, host = (
            Spread.of(1000 * np.array(turns.device)),
            Spread.of(1000 * np.array(turns.host)),
        )
        kept[name] = {"ms_a_step": step, "host_ms_a_step": host}
        cells = [name, step.text(), host.text()]
        if turns is base:
            rows.append([*cells, "", ""])
            continue
        over, host_over = (
            Spread.of_statistic(percent_over, np.stack([of, to], axis=-1))
            for of, to in ((turns.device, base.device), (turns.host, base.host))
        )
        overheads[name] = over
        kept[name] |= {"overhead_percent": over, "host_overhead_percent": host_over}
        cells += [f"{s.median:+.2f} %  ({s.low:+.2f} .. {s.high:+.2f})" for s in (over, host_over)]
        rows.append(cells)
    columns = ["", "ms a step", "host ms", "overhead (95 % of its median)", "of the host's time"]
    report.table(title, columns, rows)
    report.data["training"] = {"title": title, "contenders": kept}
    return overheads


def scanned_bytes(model: nn.Module, training: Training) -> int:
    """Of all module outputs of a step, each counted once."""
    seen: dict[tuple[int, torch.Size], int] = {}  # a container returns what its last part returned

    def hook(_module: nn.Module, _args: object, output: Tensor) -> None:
        seen[output.data_ptr(), output.shape] = output.nbytes

    with hooks(model, hook):
        training.step()
    return sum(seen.values())


def main() -> None:
    """Trains with every contender."""
    chosen = options(__doc__)
    report = chosen.report("gpu_training")
    training = Training(SMALL if chosen.small else Shape(), chosen.device)
    if not chosen.small:
        fit(training)
    compare(report, training, chosen)
    report.save()


def compare(report: Report, training: Training, chosen: Options) -> None:
    """All contenders on one model."""
    model, shape = training.model, training.shape
    found: list[nanscan.Finding] = []
    contenders = {
        "no hooks": Turns(nullcontext),
        "no hooks, again (the noise)": Turns(nullcontext),
        "empty hooks": Turns(partial(hooks, model, empty_hook)),
        "nanscan, outputs": Turns(partial(watched, model, found, kinds=("output",))),
        "nanscan, default": Turns(partial(watched, model, found)),
        "isnan.any hooks": Turns(partial(hooks, model, isnan_hook)),
    }
    training.step()
    nbytes = scanned_bytes(model, training)
    rounds = interleave(training, contenders, 1 if chosen.small else 30, 2 if chosen.small else 6)
    parameters = sum(p.numel() for p in model.parameters())
    title = (
        f"{shape.layers} layers of {shape.width}, {parameters / 1e6:.0f} M parameters, "
        f"{shape.batch} x {shape.tokens} tokens, bfloat16 autocast, {rounds} rounds; "
        f"outputs are {nbytes / 1e9:.2f} GB a step"
    )
    report.data |= {"shape": vars(shape), "output_bytes": nbytes, "findings": len(found)}
    overheads = show(report, contenders, title)
    for finding in found[:3]:
        report.console.print(f"a finding in a clean training: {finding}")
    report.bars(
        [
            Bar(f"overhead, {name}", 6, overheads[name], at_least=False, unit=" %")
            for name in ("nanscan, outputs", "nanscan, default")
        ]
    )
    if not all(math.isfinite(p.detach().float().abs().max().item()) for p in model.parameters()):
        report.console.print("the training itself diverged: its figures are of no use")


if __name__ == "__main__":
    main()
