"""Shows what one call costs the host when the tensor is on a GPU, and what many small tensors cost.

us a call of wall time until the call returns, in turns short enough that the GPU never makes the
host wait; smaller is better. Baselines, turn by turn in the same process: torch.empty(0) and an
in-place addition to a tiny tensor (the least that torch does), torch.isnan(x).any() without reading
it. Then 1,000 and 10,000 small parameters at once: one scan_many against a scan each, check_many
and torch._foreach_norm, until the call returns and until the GPU is done. (Thousands of launches in
a row do make the host wait: a stream takes about 1,000.)
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from _measure import Bar, Report, Spread
from gpu_timing import Options, Times, options

import nanscan
from nanscan import _C
from nanscan._data.row import ROW

CALLS = 200  # a turn: a stream takes about 1,000 launches before it makes the host wait
ELEMENTS = 1024  # of a small parameter


@dataclass
class Contender:
    """Something to time: `run` makes `calls` calls; `after` follows, untimed."""

    run: Callable[[], object]
    calls: int = 1
    after: Callable[[], object] | None = None


class Host:
    """Times of the host: until calls return, and until the device is done."""

    def __init__(self, chosen: Options) -> None:
        self._wait = chosen.device.wait
        self.returned: dict[str, Times] = {}
        self.done: dict[str, Times] = {}

    def interleave(self, title: str, contenders: dict[str, Contender], rounds: int) -> None:
        """Microseconds a call, one figure a round; order shuffled anew each round."""
        returned: Times = {name: [] for name in contenders}
        done: Times = {name: [] for name in contenders}
        for contender in contenders.values():
            self._turn(contender)
        order = list(contenders)
        shuffle = random.Random(0).shuffle
        for _ in range(rounds):
            shuffle(order)
            for name in order:
                for times, seconds in zip(
                    (returned, done), self._turn(contenders[name]), strict=True
                ):
                    times[name].append(1e6 * seconds / contenders[name].calls)
        self.returned[title], self.done[title] = returned, done

    def _turn(self, contender: Contender) -> tuple[float, float]:
        self._wait()
        begin = time.perf_counter()
        contender.run()
        returned = time.perf_counter() - begin
        self._wait()
        done = time.perf_counter() - begin
        if contender.after:
            contender.after()
        return returned, done


def repeat(call: Callable[..., object], *args: object) -> Contender:
    """The same call CALLS times, with only a loop around it."""

    def run() -> None:
        for _ in range(CALLS):
            call(*args)

    return Contender(run, CALLS)


class Scans:
    """A table with a row for each of some tensors."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.table = _C.Table()
        self.tensors = tensors
        self.rows = [self.table.add_row() for _ in tensors]
        self._memory = np.empty((len(tensors), ROW.itemsize), np.uint8)
        self._order = np.empty(len(tensors), np.uint64)
        self._arrival: _C.Arrival | None = None

    def at_once(self) -> None:
        """All tensors in few launches."""
        self.table.scan_many(self.tensors, self.rows)

    def one_by_one(self) -> None:
        """Each in a launch of its own."""
        scan = self.table.scan
        for tensor, row in zip(self.tensors, self.rows, strict=True):
            scan(tensor, row)

    def visit_all(self) -> None:
        """As hooks do: a tensor is scanned unless it was seen."""
        visit = self.table.visit
        for tensor, row in zip(self.tensors, self.rows, strict=True):
            visit(tensor, row)

    def end_step(self) -> None:
        """Sends all rows to the host; what was seen is forgotten."""
        taken = self.table.snapshot(self._memory, self._order)
        self._arrival = taken[1] if taken else None

    def read(self) -> None:
        """The rows of the last step."""
        if self._arrival is not None:
            self._arrival.wait()
            self._arrival = None


def function_calls(chosen: Options) -> dict[str, Contender]:
    """Calls on a 4 x 4 tensor."""
    device = chosen.device.torch
    x = torch.randn(4, 4, device=device)
    one = Scans([x])
    new = Scans([x.clone() for _ in range(CALLS)])
    seen = Scans([x])
    seen.visit_all()
    transposed = torch.randn(8, 8, device=device)[:4, :4]
    return {
        "torch.empty(0)": repeat(lambda: torch.empty(0, device=device)),
        "x.add_(0)": repeat(x.add_, 0),
        "isnan(x).any(), not read": repeat(lambda: torch.isnan(x).any()),
        "Table.scan": repeat(one.table.scan, x, one.rows[0]),
        "Table.scan, strided": repeat(one.table.scan, transposed, one.rows[0]),
        "Table.visit, seen tensor": repeat(seen.table.visit, x, seen.rows[0]),
        "Table.visit, new tensor": Contender(new.visit_all, CALLS, new.end_step),
        "nanscan.check, not read": repeat(nanscan.check, x),
    }


def step_ends(chosen: Options) -> dict[str, Contender]:
    """The end of a step, over the number of rows."""
    contenders = {}
    for count in (10, 1000) if chosen.small else (10, 100, 1000, 10_000):
        scans = Scans([torch.zeros(4, device=chosen.device.torch)] * count)
        scans.at_once()
        contenders[f"{count:,} rows"] = Contender(scans.end_step, 1, scans.read)
    return contenders


def many_tensors(chosen: Options, count: int) -> dict[str, Contender]:
    """Small parameters, all at once."""
    block = torch.randn(count, ELEMENTS, device=chosen.device.torch)
    tensors = list(block.unbind())
    scans = Scans(tensors)

    def isnan_each() -> None:
        for tensor in tensors:
            torch.isnan(tensor).any()

    contenders = {
        "Table.scan_many": Contender(scans.at_once, count),
        "Table.scan, each": Contender(scans.one_by_one, count),
        "check_many, not read": Contender(lambda: nanscan.check_many(tensors), count),
        "torch._foreach_norm": Contender(lambda: torch._foreach_norm(tensors), count),
    }
    if count <= 1000:
        contenders["isnan(x).any(), each, not read"] = Contender(isnan_each, count)
    return contenders


def show(report: Report, host: Host) -> None:
    """Tables and JSON."""
    for title, times in host.returned.items():
        rows, kept = [], {}
        for name, us in times.items():
            returned, done = Spread.of(us), Spread.of(host.done[title][name])
            kept[name] = {"returned": returned, "done": done, "least": min(us)}
            rows.append([name, f"{min(us):.2f}", returned.text(), done.text()])
        report.table(f"{title}: us each", ["", "returned, least", "returned", "GPU done too"], rows)
        report.data.setdefault("us_per_call", {})[title] = kept


def bars_of(host: Host) -> list[Bar]:
    """A scan costs the host less than 5 us."""
    calls = host.returned["calls on a 4 x 4 tensor"]
    return [
        Bar(f"host, {name}", 5, Spread.of(calls[name]), at_least=False, unit=" us")
        for name in ("Table.scan", "Table.scan, strided", "Table.visit, new tensor")
    ]


def main() -> None:
    """Runs all comparisons."""
    chosen = options(__doc__)
    report = chosen.report("gpu_call_overhead")
    gc.disable()
    host = Host(chosen)
    host.interleave("calls on a 4 x 4 tensor", function_calls(chosen), 5 if chosen.small else 100)
    host.interleave("end of a step", step_ends(chosen), 5 if chosen.small else 30)
    for count in (100,) if chosen.small else (1000, 10_000):
        title = f"{count:,} tensors of {ELEMENTS:,} float32"
        host.interleave(title, many_tensors(chosen, count), 3 if chosen.small else 15)
        gc.collect()
    show(report, host)
    report.bars(bars_of(host))
    report.save()


if __name__ == "__main__":
    main()
