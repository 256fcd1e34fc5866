"""20,000 steps with all kinds: memory stays constant, and a NaN late in training is found."""

import collections
import dataclasses
import gc
import os
from pathlib import Path

import pytest
import torch
from torch import nn

import nanscan
from helpers.models import (
    NAN,
)
from nanscan._data.site import KINDS

STEPS, BAD_STEP = 20_000, 15_000
SETTLED = 5_000
MAX_GROWTH = 2 * 2**20  # bytes


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(2, 4, bias=False)
        self.norm = nn.BatchNorm1d(4, affine=False)
        self.fc2 = nn.Linear(4, 1, bias=False)

    def forward(self, x):
        return self.fc2(nanscan.probe("hidden", torch.relu(self.norm(self.fc1(x)))))


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def sizes(monitor: nanscan.Monitor) -> dict[str, int]:
    """Items in all containers of a monitor and of the objects of nanscan below it, by attribute."""
    found: collections.Counter[str] = collections.Counter()
    seen, stack = set(), [("monitor", monitor)]
    while stack:
        name, x = stack.pop()
        if id(x) in seen:
            continue
        seen.add(id(x))
        if isinstance(x, (list, tuple, set, frozenset, dict, collections.deque)):
            found[name] += len(x)
            items = [*x, *x.values()] if isinstance(x, dict) else x
            stack += [(name, item) for item in items]
        elif type(x).__module__.startswith("nanscan.") or dataclasses.is_dataclass(x):
            slots = [key for base in type(x).__mro__ for key in getattr(base, "__slots__", ())]
            for key in {*getattr(x, "__dict__", ()), *slots}:
                stack.append((f"{type(x).__name__}.{key}", getattr(x, key, None)))
    return dict(found)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="this system has no /proc")
def test_memory_stays_constant_and_a_late_nan_is_found(num_threads):
    num_threads(1)
    model = Tiny()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)
    batches = [(torch.randn(4, 2), torch.randn(4, 1)) for _ in range(16)]
    acted = []
    monitor = nanscan.enable(model, kinds=KINDS, action=acted.append)
    state = None
    resident, counted = {}, {}

    for step in range(STEPS):
        x, y = batches[step % len(batches)]
        if step == BAD_STEP:
            everything = [*model.parameters(), *model.buffers()]
            everything += [s["momentum_buffer"] for s in optimizer.state.values()]
            state = [value.clone() for value in everything]
            x = x.clone()
            x[2, 1] = NAN
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()
        if step == BAD_STEP:  # as one goes back to a checkpoint
            assert not monitor.healthy
            with torch.no_grad():
                for value, good in zip(everything, state, strict=True):
                    value.copy_(good)
        if step + 1 in (SETTLED, BAD_STEP, STEPS):
            gc.collect()
            resident[step + 1], counted[step + 1] = resident_bytes(), sizes(monitor)
            assert bool(monitor.findings) == (step + 1 > BAD_STEP)

    assert resident[STEPS] - resident[SETTLED] < MAX_GROWTH
    assert counted[BAD_STEP] == counted[SETTLED]
    kept = sum(len(f.history) + len(f.given) + len(f.before) for f in monitor.findings)
    assert sum(counted[STEPS].values()) - sum(counted[SETTLED].values()) < 20 * kept

    assert monitor.steps == STEPS
    assert monitor.healthy
    first, last = monitor.findings[0], monitor.findings[-1]
    assert (first.step, str(first.site), first.verdict) == (
        BAD_STEP,
        "Tiny input[0]",
        "propagated",
    )
    assert first.stats.first_nonfinite == (2, 1)
    assert first.history["step"].tolist() == list(range(BAD_STEP - 15, BAD_STEP + 1))
    kinds = {f.site.kind for f in monitor.findings}
    assert kinds == {*KINDS}
    assert (last.step, str(last.site), last.verdict) == (BAD_STEP + 1, "Tiny input[0]", "recovered")
    assert {f.step for f in monitor.findings[:-1]} == {BAD_STEP}
    kept = next(f for f in monitor.findings if str(f.site) == "norm.running_mean buffer")
    assert acted == [first, kept, last]  # running statistics are damaged for good
