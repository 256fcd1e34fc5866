"""Shows how many instructions a watched module call adds, against an empty forward hook.

Instructions depend on no neighbour and no clock rate. Each way runs in processes of its own, once
with few forwards and once with many: the difference leaves out what starting takes. The counter is
`perf stat -e instructions:u`; where the machine has none, valgrind counts, in about 10 minutes.

A module multiplies a tensor of 8 values by 1, under no_grad. Watched are inputs and outputs.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys

import torch
from _measure import Bar, Report, Spread, arguments
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

import nanscan

MODULES = 500
FORWARDS = 2, 42
WAYS = ["bare", "empty hook", "nanscan"]
PERF = ["perf", "stat", "-x,", "-e", "instructions:u"]
VALGRIND = ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null"]


class Tick(nn.Module):
    """A module that does next to nothing."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One op."""
        return x * 1


def run(way: str, forwards: int) -> None:
    """What is counted."""
    torch.set_num_threads(1)
    model = nn.Sequential(*(Tick() for _ in range(MODULES)))
    if way == "empty hook":
        register_module_forward_hook(lambda _module, _args, _output: None)
    elif way == "nanscan":
        nanscan.enable(model, kinds=["input", "output"])
    x = torch.ones(8)
    with torch.no_grad():
        for _ in range(forwards):
            model(x)


def count(counter: list[str], way: str, forwards: int) -> int:
    """Instructions of a process."""
    command = [*counter, sys.executable, __file__, "--run", way, str(forwards)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    found = re.search(r"^(\d+),.*instructions|Collected : (\d+)", said, re.MULTILINE)
    if found is None:
        raise RuntimeError(f"{counter[0]} counted nothing:\n{said}")
    return int(found[1] or found[2])


def find_counter() -> list[str]:
    """Perf where the machine has a counter, else valgrind."""
    if shutil.which("perf"):
        said = subprocess.run([*PERF, "true"], capture_output=True, text=True, check=False)
        if re.search(r"^\d+,", said.stderr, re.MULTILINE):
            return PERF
    if shutil.which("valgrind"):
        return VALGRIND
    raise SystemExit("needs perf and a machine with a counter of instructions, or valgrind")


def main() -> None:
    """Counts all ways."""
    report = Report("call_instructions", arguments(__doc__))
    counter = find_counter()
    calls = (FORWARDS[1] - FORWARDS[0]) * (MODULES + 1)
    counts = {}
    for way in WAYS:
        few, many = (count(counter, way, forwards) for forwards in FORWARDS)
        counts[way] = (many - few) / calls
    rows = [[way, f"{n:.0f}", f"{n - counts['bare']:.0f}"] for way, n in counts.items()]
    report.table(f"instructions a call, by {counter[0]}", ["", "all", "added"], rows)
    report.data["instructions_per_call"] = counts
    ratio = (counts["nanscan"] - counts["bare"]) / (counts["empty hook"] - counts["bare"])
    report.bars(
        [Bar("nanscan / empty hook, instructions added", 0.5, Spread.of([ratio]), at_least=False)]
    )
    report.save()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        run(sys.argv[2], int(sys.argv[3]))
    else:
        main()
