"""Interleaved timing, bars, and the JSON, text and PNG that every benchmark here writes."""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

import nanscan
from nanscan import _C

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LOCAL = Path(__file__).parent / "results" / "local"
ALL_THREADS = torch.get_num_threads()


@dataclass
class Spread:
    """Median over the rounds of a run, and from where to where they lie."""

    median: float
    low: float
    high: float
    rounds: int

    @classmethod
    def of(cls, values: Any) -> Spread:
        """Low and high are the tenth and the ninetieth percentile of values, one a round."""
        low, median, high = np.percentile(np.asarray(values, dtype=float), [10, 50, 90])
        return cls(float(median), float(low), float(high), len(values))

    @classmethod
    def of_statistic(cls, statistic: Callable[[Any], Any], values: Any) -> Spread:
        """Low and high are where a statistic of the rounds is, at 95 % (bootstrap).

        Args:
            statistic: maps an array [..., rounds, k] to [...].
            values: [rounds, k], k figures of each round.
        """
        values = np.asarray(values, dtype=float)
        chosen = np.random.default_rng(0).integers(len(values), size=(2000, len(values)))
        low, high = np.percentile(statistic(values[chosen]), [2.5, 97.5])
        return cls(float(statistic(values)), float(low), float(high), len(values))

    def text(self, digits: int = 3) -> str:
        """`18.9 ±4%`: the median to some significant digits and half of low..high."""
        half = 50 * (self.high - self.low) / self.median
        return f"{significant(self.median, digits)} ±{half:.0f}%"


def significant(value: float, digits: int = 3) -> str:
    """A number without exponent, to some significant digits."""
    if value == 0:
        return "0"
    decimals = digits - 1 - int(np.floor(np.log10(abs(value))))
    return f"{round(value, decimals):.{max(decimals, 0)}f}"


@dataclass
class Bar:
    """A ratio or difference that a run must reach, decided by the median.

    `limit` is what a plain read reaches against the same baseline: a bar above it is out of reach.
    """

    name: str
    required: float
    measured: Spread
    at_least: bool = True
    unit: str = "x"
    limit: float | None = None

    @property
    def passed(self) -> bool:
        """Whether the median reaches it."""
        ahead = self.measured.median - self.required
        return ahead >= 0 if self.at_least else ahead <= 0

    @property
    def verdict(self) -> str:
        """For a person: also whether the rounds are of one mind."""
        noisy = self.measured.low < self.required < self.measured.high
        return ("pass" if self.passed else "FAIL") + (", noisy" if noisy else "")


def interleave(
    contenders: dict[str, Callable[[], object]],
    *,
    budget_s: float,
    turn_s: float = 0.002,
    min_rounds: int = 2,
    max_rounds: int = 100,
) -> dict[str, list[float]]:
    """Times every contender once a round, in an order shuffled anew, until its budget is spent.

    A slow contender leaves early; until then, item i of all lists is of one round, or one apart.

    Args:
        contenders: what to call, by name.
        budget_s: seconds of timed calls for each contender.
        turn_s: a turn repeats a faster call until it lasts about this long.
        min_rounds: turns each contender gets even when they take longer than its budget.
        max_rounds: turns no contender exceeds.

    Returns:
        Seconds a call, one figure a turn.
    """
    times: dict[str, list[float]] = {}
    repeats: dict[str, int] = {}
    left = dict.fromkeys(contenders, budget_s)
    for name, run in contenders.items():
        took = _time(run, 1)
        if took < 0.2:
            took = min(_time(run, 1), _time(run, 1))
        repeats[name] = max(1, round(turn_s / max(took, 1e-7)))
        # NOTES: a call this long is its own warm-up, and too dear to throw away.
        times[name] = [took] if took >= 0.2 else []
        left[name] -= sum(times[name])
    order = list(contenders)
    shuffle = random.Random(0).shuffle
    for _ in range(max_rounds):
        order = [n for n in order if left[n] > 0 or len(times[n]) < min_rounds]
        if not order:
            break
        shuffle(order)
        for name in order:
            run, count = contenders[name], repeats[name]
            if count > 1:
                run()  # finds the caches as this contender leaves them, not as the one before did
            took = _time(run, count)
            times[name].append(took)
            left[name] -= took * count
    return times


def _time(run: Callable[[], object], count: int) -> float:
    begin = time.perf_counter()
    for _ in range(count):
        run()
    return (time.perf_counter() - begin) / count


def ratio(of: list[float], to: list[float]) -> Spread:
    """How many times longer `of` takes than `to`, over the rounds that had both."""
    both = min(len(of), len(to))
    return Spread.of(np.divide(of[:both], to[:both]))


def percent_over(pairs: np.ndarray) -> np.ndarray:
    """Median overhead in percent; pairs are [..., rounds, (time, time without hooks)]."""
    return 100 * (np.median(pairs[..., 0] / pairs[..., 1], axis=-1) - 1)


def machine() -> dict[str, Any]:
    """What the figures depend on, and how busy the machine was before them."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    model = next((line.split(":")[1].strip() for line in lines if "model name" in line), "")
    return {
        "cpu": model or platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": ALL_THREADS,
        "nanscan": nanscan.__version__,
        "variant": _C.variant(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "load_before": round(os.getloadavg()[0], 2),
    }


class Report:
    """Collects the tables, figures and bars of one benchmark and writes them to a folder.

    Args:
        name: of the files.
        out: the folder.
        more: what else to say of the machine.
    """

    def __init__(self, name: str, out: Path, **more: Any) -> None:
        self.name = name
        self.out = out
        self.data: dict[str, Any] = {"machine": machine() | more}
        self.console = Console(record=True, width=150)
        self.begin = time.perf_counter()
        self.others_before = _cpu_seconds_of_others()
        out.mkdir(parents=True, exist_ok=True)
        self.console.print(
            "  ".join(f"{k}: {v}" for k, v in self.data["machine"].items()), style="dim"
        )

    def table(self, title: str, columns: list[str], rows: list[list[str]]) -> None:
        """Prints a table; the first column holds names."""
        table = Table(title=title, title_justify="left")
        for i, column in enumerate(columns):
            table.add_column(column, justify="right" if i else "left", no_wrap=True)
        for row in rows:
            table.add_row(*row)
        self.console.print(table)

    def bars(self, bars: list[Bar]) -> None:
        """Prints what had to be reached and what was, and keeps both."""
        rows = [
            [
                bar.name,
                f"{'>=' if bar.at_least else '<='} {bar.required:g}{bar.unit}",
                f"{significant(bar.measured.median)}{bar.unit}",
                f"{significant(bar.measured.low)} .. {significant(bar.measured.high)}",
                "" if bar.limit is None else f"{significant(bar.limit)}{bar.unit}",
                str(bar.measured.rounds),
                bar.verdict,
            ]
            for bar in bars
        ]
        self.table(
            f"{self.name}: bars",
            ["bar", "required", "measured", "low .. high", "limit", "rounds", ""],
            rows,
        )
        self.data["bars"] = [{**asdict(bar), "passed": bar.passed} for bar in bars]

    def write(self) -> None:
        """Writes NAME.json and NAME.txt as far as they are: nothing is lost if the rest fails."""
        path = self.out / self.name
        path.with_suffix(".json").write_text(json.dumps(self.data, default=asdict, indent=1) + "\n")
        path.with_suffix(".txt").write_text(self.console.export_text(clear=False))

    def save(self, figure: Figure | None = None) -> None:
        """Writes NAME.json, NAME.txt and, of a figure, NAME.png."""
        took = time.perf_counter() - self.begin
        others = round(max(_cpu_seconds_of_others() - self.others_before, 0) / took, 2)
        self.data |= {"took_s": round(took, 1), "cores_busy_with_others": others}
        path = self.out / self.name
        if figure is not None:
            figure.savefig(path.with_suffix(".png"), dpi=130, bbox_inches="tight")
        self.console.print(
            f"{self.name}: {took:.0f} s, in which other processes kept {others} of "
            f"{os.cpu_count()} cores busy; written to {path}.json .txt{' .png' if figure else ''}"
        )
        self.write()


def _cpu_seconds_of_others() -> float:
    """CPU time that other processes used since boot, and a hypervisor took; Linux alone says."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0.0
    ticks = [int(field) for field in stat.read_text().split("\n", 1)[0].split()[1:9]]
    busy = sum(ticks) - ticks[3] - ticks[4]  # without idle and iowait
    return busy / os.sysconf("SC_CLK_TCK") - sum(os.times()[:4])


def arguments(description: str | None) -> Path:
    """Parses --out, the folder for results."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=LOCAL, help="folder for results (%(default)s)")
    out: Path = parser.parse_args().out
    return out
