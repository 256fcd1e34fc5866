"""Shows how close a scan on a GPU comes to the speed of its memory, and how far usual checks are.

GB/s of input by the GPU's own clock; larger is better. Baselines, turn by turn in the same process:
a device-to-device copy (counted as bytes read and written: the ceiling), torch.sum, torch.aminmax,
torch.isnan(x).any(), and the five-op idiom (isnan.any, isinf.any, amin, amax, abs.amax), eager and
under torch.compile. Then what non-finite values, layouts and other dtypes cost.
"""

from __future__ import annotations

import os
from functools import partial

import torch
from _measure import Bar, Report, Spread, ratio
from gpu_timing import (
    GB,
    KB,
    MB,
    Device,
    Options,
    Runs,
    Times,
    gigabytes,
    label,
    options,
    size_label,
)

import nanscan
from nanscan import _C

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
MORE_DTYPES = [torch.float64, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64]
SIZES = [4 * KB, 64 * KB, MB, 16 * MB, 256 * MB, GB, 4 * GB]
SMALL_SIZES = [4 * KB, MB]

TABLE = _C.Table()
SCAN, ROW = TABLE.scan, TABLE.add_row()

Case = tuple[torch.dtype, int]  # of one comparison: dtype and bytes


def five_ops(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The usual idiom: five passes over the input and three temporaries."""
    return torch.isnan(x).any(), torch.isinf(x).any(), x.amin(), x.amax(), x.abs().amax()


def normal(dtype: torch.dtype, nbytes: int, device: Device) -> torch.Tensor:
    """Normal values."""
    count = nbytes // dtype.itemsize
    if dtype.itemsize > 1:
        return torch.empty(count, dtype=dtype, device=device.torch).normal_()
    block = torch.randn(min(count, 16 * MB), device=device.torch).to(dtype)
    return block.view(torch.uint8).repeat(count // len(block)).view(dtype)


def contenders(x: torch.Tensor, copy: torch.Tensor) -> Runs:
    """Everything that is compared on one tensor."""
    return {
        "copy, read + written": partial(copy.copy_, x),
        "nanscan": partial(SCAN, x, ROW),
        "sum": partial(torch.sum, x),
        "aminmax": partial(torch.aminmax, x),
        "isnan.any": lambda: torch.isnan(x).any(),
        "five ops": partial(five_ops, x),
    }


def traffic(name: str, nbytes: int) -> int:
    """Bytes that count for a contender."""
    return nbytes * (2 if name.startswith("copy") else 1)


def sizes_that_fit(chosen: Options) -> list[int]:
    """An input, its copy, and the temporaries of the five ops."""
    sizes = SMALL_SIZES if chosen.small else SIZES
    return [size for size in sizes if 5 * size <= chosen.device.free_bytes()]


def compare(report: Report, chosen: Options, sizes: list[int]) -> dict[Case, Times]:
    """All contenders over dtypes and sizes, cold; and hot where L2 holds the input."""
    times = {}
    for dtype in DTYPES:
        cold, hot = compare_sizes(chosen, dtype, sizes)
        show(report, f"{label(dtype)}, input not in L2", cold)
        show(report, f"{label(dtype)}, input in L2", hot)
        report.write()
        times |= cold
    return times


def compare_sizes(
    chosen: Options, dtype: torch.dtype, sizes: list[int]
) -> tuple[dict[Case, Times], dict[Case, Times]]:
    """Of one dtype: (cold, hot)."""
    device, rounds = chosen.device, chosen.rounds
    memory = normal(dtype, sizes[-1], device)
    copies = torch.empty_like(memory)
    cold, hot = {}, {}
    for size in sizes:
        count = size // dtype.itemsize
        runs = contenders(memory[:count], copies[:count])
        # What is many times as large as L2 leaves nothing behind for its next turn.
        flush = size < 8 * device.l2_bytes
        cold[dtype, size] = device.interleave(runs, cold=flush, rounds=rounds)
        if 2 * size <= device.l2_bytes:
            hot[dtype, size] = device.interleave(runs, cold=False, rounds=rounds)
    return cold, hot


def show(report: Report, title: str, times: dict[Case, Times]) -> None:
    """Table and JSON: GB/s over size."""
    names = list(dict.fromkeys(name for of_case in times.values() for name in of_case))
    sizes = [size for _, size in times]
    kept: dict[str, dict[str, Spread]] = {name: {} for name in names}
    for (_, size), of_case in times.items():
        for name, seconds in of_case.items():
            kept[name][size_label(size)] = gigabytes(seconds, traffic(name, size))
    rows = [
        [
            name,
            *(kept[name][s].text() if s in kept[name] else "n/a" for s in map(size_label, sizes)),
        ]
        for name in names
    ]
    report.table(f"{title}: GB/s", ["", *map(size_label, sizes)], rows)
    report.data.setdefault("gb_per_s", {})[title] = kept


def spoilt(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Copies of a clean tensor with non-finite values in them."""
    at_end, some, everywhere = x.clone(), x.clone(), torch.full_like(x, float("nan"))
    at_end[-1] = float("nan")
    some[:: len(x) // 1000] = float("inf")
    return {"one NaN at the end": at_end, "1,000 Inf": some, "all NaN": everywhere}


def layouts(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Views of memory twice as large; each scans as much as half of it, or all."""
    side = 64
    images = x.view(-1, side, side, 64)
    return {
        "channels_last": images.permute(0, 3, 1, 2),
        "transposed": x.view(-1, 1024).t(),
        "chunked, rows of 4 KB": x.view(-1, 8192 // x.itemsize)[:, : 4096 // x.itemsize],
        "chunked, odd rows": x.view(-1, 8192 // x.itemsize)[:, 3 : 4095 // x.itemsize],
        "every other element": x[::2],
    }


def compare_kinds(report: Report, chosen: Options) -> list[Bar]:
    """What contents and layouts cost, at one size."""
    device = chosen.device
    size = MB if chosen.small else 256 * MB
    bars = []
    for dtype in (torch.float16, torch.float32):
        x = normal(dtype, size, device)
        tensors = {"clean": x, **spoilt(x), **layouts(normal(dtype, 2 * size, device))}
        runs: Runs = {name: partial(SCAN, tensor, ROW) for name, tensor in tensors.items()}
        runs["clean, check(moments=True)"] = partial(nanscan.check, x, moments=True)
        tensors["clean, check(moments=True)"] = x
        sums: Runs = {name: partial(torch.sum, tensor) for name, tensor in tensors.items()}
        times = device.interleave(runs, cold=False, rounds=chosen.rounds)
        sum_times = device.interleave(sums, cold=False, rounds=chosen.rounds // 2)
        rows, kept = [], {}
        for name, seconds in times.items():
            nbytes = tensors[name].numel() * dtype.itemsize
            speed, of_sum = gigabytes(seconds, nbytes), gigabytes(sum_times[name], nbytes)
            kept[name] = {"nanscan": speed, "sum": of_sum}
            rows.append([name, size_label(nbytes), speed.text(), of_sum.text()])
        title = f"{label(dtype)}, contents and layouts"
        report.table(f"{title}: GB/s", ["", "scanned", "nanscan", "sum"], rows)
        report.data.setdefault("kinds_gb_per_s", {})[title] = kept
        slower = ratio(times["all NaN"], times["clean"])
        name = f"{label(dtype)}, {size_label(size)}: time, all NaN / clean"
        bars.append(Bar(name, 3, slower, at_least=False))
    report.write()
    return bars


def compare_dtypes(report: Report, chosen: Options) -> list[Bar]:
    """The other formats, at one size. No bars."""
    size = MB if chosen.small else GB
    runs: Runs = {}
    for dtype in MORE_DTYPES:
        x = normal(dtype, size, chosen.device)
        runs[label(dtype)] = partial(SCAN, x, ROW)
    times = chosen.device.interleave(runs, cold=False, rounds=chosen.rounds)
    speeds = {name: gigabytes(t, size) for name, t in times.items()}
    title = f"other dtypes, {size_label(size)}: GB/s"
    report.table(title, ["", "nanscan"], [[name, s.text()] for name, s in speeds.items()])
    report.data["other_dtypes_gb_per_s"] = speeds
    report.write()
    return []


def compare_compiled(report: Report, chosen: Options) -> None:
    """The five ops under torch.compile, at one size. Last, since compiling may fail or hang."""
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # leaves no process behind
    size = MB if chosen.small else GB
    compiled = torch.compile(five_ops, dynamic=False)
    rows, kept = [], {}
    for dtype in DTYPES[:1] if chosen.small else DTYPES:
        x = normal(dtype, size, chosen.device)
        try:
            compiled(x)
        except Exception as error:  # noqa: BLE001 - compilers fail in many ways
            print(f"five ops compiled: {label(dtype)} left out, {type(error).__name__}: {error}")
            continue
        runs: Runs = {
            "nanscan": partial(SCAN, x, ROW),
            "five ops": partial(five_ops, x),
            "five ops compiled": partial(compiled, x),
        }
        times = chosen.device.interleave(runs, cold=False, rounds=chosen.rounds)
        kept[label(dtype)] = {name: gigabytes(t, size) for name, t in times.items()}
        faster = ratio(times["five ops compiled"], times["nanscan"])
        texts = [spread.text() for spread in kept[label(dtype)].values()]
        rows.append([label(dtype), *texts, faster.text()])
        columns = ["", "nanscan", "five ops", "compiled", "nanscan / compiled"]
    if rows:
        report.table(f"under torch.compile, {size_label(size)}: GB/s", columns, rows)
    report.data["compiled_gb_per_s"] = kept
    report.write()


def bars_of(times: dict[Case, Times], sizes: list[int]) -> list[Bar]:
    """At 1 GB, or at the largest size of a dry run."""
    size = GB if GB in sizes else sizes[-1]
    bars = []
    for dtype in DTYPES:
        of_case = times[dtype, size]
        required = {"sum": 0.95}
        if dtype == torch.float16:
            required["five ops"] = 20
        for baseline, factor in required.items():
            if baseline in of_case:
                # A ratio of times is the inverse ratio of speeds. A copy moves twice the bytes.
                limit = 2 * ratio(of_case[baseline], of_case["copy, read + written"]).median
                name = f"{label(dtype)}, {size_label(size)}: nanscan / {baseline}"
                measured = ratio(of_case[baseline], of_case["nanscan"])
                bars.append(Bar(name, factor, measured, limit=limit))
    return bars


def main() -> None:
    """Runs all comparisons."""
    chosen = options(__doc__)
    report = chosen.report("gpu_bandwidth")
    if (status := SCAN(torch.zeros(3, device=chosen.device.torch), ROW)) != 0:
        raise SystemExit(f"nanscan cannot scan there: status {status}")
    sizes = sizes_that_fit(chosen)
    bars = bars_of(compare(report, chosen, sizes), sizes)
    for section in (compare_kinds, compare_dtypes):
        try:
            bars += section(report, chosen)
        except RuntimeError as error:  # noqa: PERF203 - most bars are measured already
            print(f"{section.__name__} is left out: {error}")
    report.bars(bars)
    report.write()
    compare_compiled(report, chosen)
    report.save()


if __name__ == "__main__":
    main()
