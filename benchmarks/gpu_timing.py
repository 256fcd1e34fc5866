"""What the gpu_*.py benchmarks share: a GPU's own clock, turns, options. Shows nothing by itself.

Device time is taken between CUDA events while the GPU has a backlog: a waiting kernel lets the host
get ahead, so that the gaps between launches stay out of the figure. "cold" calls find nothing of
their input in L2, since a read of four times its size came before each; "hot" ones follow each
other. --device cpu --small tries a script without a GPU; its figures then mean nothing.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _measure import LOCAL, Report, Spread

from nanscan import _C
from nanscan._scan import cuda

KB, MB, GB = 1 << 10, 1 << 20, 1 << 30
MOST_CALLS = 30  # a turn: a stream takes about 1,000 launches before it makes the host wait

Runs = dict[str, Callable[[], object]]
Times = dict[str, list[float]]


class Device:
    """The device that is measured, and its clock."""

    def __init__(self, name: str) -> None:
        self.torch = torch.device(name)
        self.is_cuda = self.torch.type == "cuda"
        self.l2_bytes = MB
        if not self.is_cuda:
            return
        if not torch.cuda.is_available():
            raise SystemExit("torch sees no CUDA device; --device cpu --small tries the script")
        if not cuda.prepare(0):
            raise SystemExit(f"nanscan has no kernels for cuda:0: {cuda.why_not(0)}")
        properties = torch.cuda.get_device_properties(0)
        self.l2_bytes = int(getattr(properties, "L2_cache_size", 0)) or 64 * MB
        self._scratch = torch.zeros(4 * self.l2_bytes // 4, device=self.torch)
        self._cycles_per_s = 0.0
        for cycles in (100_000_000, 20_000_000):  # the first one wakes the clocks
            begin, end = self._events()
            torch.cuda._sleep(cycles)
            took = self._seconds_since(begin, end)
            self._cycles_per_s = max(self._cycles_per_s, cycles / took)

    def facts(self) -> dict[str, Any]:
        """What figures depend on, for the report."""
        if not self.is_cuda:
            return {"gpu": "none: a dry run, whose figures mean nothing"}
        properties = torch.cuda.get_device_properties(0)
        image = f"image by nvcc {_C.CUDA_TOOLKIT}" if cuda.FATBIN.exists() else "by NVRTC"
        return {
            "gpu": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory_gib": round(properties.total_memory / GB, 1),
            "l2_mib": round(self.l2_bytes / MB, 1),
            "cuda": torch.version.cuda,
            "kernels": image,
        }

    def wait(self) -> None:
        """For all that was sent to the device."""
        if self.is_cuda:
            torch.cuda.synchronize()

    def free_bytes(self) -> int:
        """Of device memory."""
        return torch.cuda.mem_get_info()[0] if self.is_cuda else 256 * MB

    def let_host_get_ahead(self, seconds: float) -> None:
        """Occupies the stream for about so long."""
        if self.is_cuda:
            torch.cuda._sleep(int(min(seconds, 0.1) * self._cycles_per_s))

    def hot(self, run: Callable[[], object], count: int, host_s: float) -> float:
        """Seconds a call, of `count` in a row; `host_s`: what the host needs to send one."""
        if not self.is_cuda:
            return _host_seconds(run, count)
        self.let_host_get_ahead(2 * count * host_s + 1e-4)
        begin, end = self._events()
        for _ in range(count):
            run()
        return self._seconds_since(begin, end) / count

    def cold(self, run: Callable[[], object], count: int, host_s: float) -> float:
        """Seconds a call, each after a read that leaves nothing of its input in L2."""
        if not self.is_cuda:
            return _host_seconds(run, count)
        self.let_host_get_ahead(2 * count * (host_s + 5e-5) + 1e-4)
        marks = []
        for _ in range(count):
            self._scratch.sum()  # reading leaves no line that must be written back
            begin, end = self._events()
            run()
            end.record()
            marks.append((begin, end))
        self.wait()
        return sum(begin.elapsed_time(end) for begin, end in marks) / 1000 / count

    def interleave(
        self, runs: Runs, *, cold: bool, rounds: int = 12, turn_s: float = 0.004
    ) -> Times:
        """Seconds a call, one figure a round; order shuffled anew each round.

        What raises is left out, and said.
        """
        measure = self.cold if cold else self.hot
        plans: dict[str, tuple[int, float]] = {}
        for name, run in runs.items():
            try:
                host_s = self._host_cost(run)
            except RuntimeError as error:
                print(f"{name}: left out, since it raised {type(error).__name__}: {error}")
                continue
            took = measure(run, 2, host_s)
            count = max(1, min(round(turn_s / max(took, 1e-7)), MOST_CALLS))
            plans[name] = (count, host_s)
        times: Times = {name: [] for name in plans}
        order = list(plans)
        shuffle = random.Random(0).shuffle
        for _ in range(rounds):
            shuffle(order)
            for name in order:
                times[name].append(measure(runs[name], *plans[name]))
        return times

    def _host_cost(self, run: Callable[[], object]) -> float:
        run()
        self.wait()
        costs = []
        for _ in range(3):
            begin = time.perf_counter()
            run()
            costs.append(time.perf_counter() - begin)
            self.wait()
        return min(costs)

    def _events(self) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        return begin, end

    @staticmethod
    def _seconds_since(begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1000


def _host_seconds(run: Callable[[], object], count: int) -> float:
    begin = time.perf_counter()
    for _ in range(count):
        run()
    return (time.perf_counter() - begin) / count


@dataclass
class Options:
    """Of the command line."""

    device: Device
    small: bool
    out: Path

    @property
    def rounds(self) -> int:
        """Of a comparison."""
        return 2 if self.small else 12

    def report(self, name: str) -> Report:
        """With what is known of the GPU."""
        return Report(name, self.out, **self.device.facts())


def options(description: str | None) -> Options:
    """Parses --device, --small and --out."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="%(default)s")
    parser.add_argument("--small", action="store_true", help="tiny sizes, to try the script")
    parser.add_argument("--out", type=Path, default=LOCAL, help="folder for results (%(default)s)")
    chosen = parser.parse_args()
    torch.manual_seed(0)
    return Options(Device(chosen.device), chosen.small, chosen.out)


def gigabytes(times: list[float], nbytes: int) -> Spread:
    """GB/s."""
    return Spread.of(nbytes / np.array(times) / 1e9)


def size_label(nbytes: int) -> str:
    """4 KB, 256 MB, 1 GB."""
    for unit, name in ((GB, "GB"), (MB, "MB")):
        if nbytes >= unit:
            return f"{nbytes // unit} {name}"
    return f"{nbytes // KB} KB"


def label(dtype: torch.dtype) -> str:
    """Name of a dtype without its module."""
    return str(dtype).removeprefix("torch.")
