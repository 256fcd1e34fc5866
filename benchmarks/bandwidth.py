"""Shows how close a scan comes to a plain read of memory, and how far the usual checks are from it.

GB/s of input; larger is better. Baselines, turn by turn in the same process: a plain vectorised
read (the limit), torch.aminmax, torch.isnan(x).any(), torch.isfinite(x).all(), the five-op idiom
(isnan.any, isinf.any, amin, amax, abs.amax), the same five under torch.compile, and NumPy. Then
what non-finite values and layouts cost, every instruction set that this machine has, and moments
against a plain scan and torch.std_mean.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from _measure import ALL_THREADS, Bar, Report, Spread, arguments, interleave, ratio
from matplotlib.figure import Figure

import nanscan
from nanscan import _C

KB, MB = 1 << 10, 1 << 20
SIZES = [4 * KB, 32 * KB, 256 * KB, MB, 8 * MB, 64 * MB, 256 * MB]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
MORE_DTYPES = [*DTYPES, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2]
THREADS = sorted({1, ALL_THREADS})

TABLE = _C.Table()
SCAN, ROW = TABLE.scan, TABLE.add_row()

STYLES = {
    "plain read": {"color": "black", "linestyle": "--"},
    "nanscan": {"color": "tab:red", "linewidth": 2.5},
    "nanscan.check": {"color": "tab:red", "linestyle": ":", "linewidth": 2},
    "aminmax": {"color": "tab:blue"},
    "isnan.any": {"color": "tab:green"},
    "isfinite.all": {"color": "tab:olive"},
    "five ops": {"color": "tab:orange"},
    "five ops compiled": {"color": "tab:brown"},
    "NumPy isnan.any": {"color": "tab:purple"},
}

Runs = dict[str, Callable[[], object]]
Times = dict[str, list[float]]
Case = tuple[torch.dtype, int, int]  # of one comparison: dtype, threads, bytes


def five_ops(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The usual idiom: five passes over the input and three temporaries."""
    return torch.isnan(x).any(), torch.isinf(x).any(), x.amin(), x.amax(), x.abs().amax()


compiled_five_ops = torch.compile(five_ops, dynamic=True)


def normal(dtype: torch.dtype, nbytes: int) -> torch.Tensor:
    """Normal values, repeated from 2^20 on."""
    count = nbytes // dtype.itemsize
    block = torch.randn(min(count, MB)).to(dtype)
    return block.view(torch.uint8).repeat(count // block.numel()).view(dtype)


def memory(x: torch.Tensor) -> np.ndarray:
    """A dense tensor's bytes, for plain_read."""
    return x.view(torch.uint8).numpy()


def label(dtype: torch.dtype) -> str:
    """Name of a dtype without its module."""
    return str(dtype).removeprefix("torch.")


def size_label(nbytes: int) -> str:
    """4 KB, 256 MB."""
    return f"{nbytes // MB} MB" if nbytes >= MB else f"{nbytes // KB} KB"


def threads_label(threads: int) -> str:
    """1 thread, 2 threads."""
    return f"{threads} thread{'s' * (threads > 1)}"


def case_label(case: Case) -> str:
    """float32, 1 thread, 256 MB."""
    dtype, threads, size = case
    return f"{label(dtype)}, {threads_label(threads)}, {size_label(size)}"


def gigabytes(times: list[float], nbytes: int) -> Spread:
    """GB/s of input."""
    return Spread.of(nbytes / np.array(times) / 1e9)


def contenders(x: torch.Tensor) -> Runs:
    """Everything that is compared on one tensor."""
    runs: Runs = {
        "plain read": partial(_C.plain_read, memory(x)),
        "nanscan": partial(SCAN, x, ROW),
        "aminmax": partial(torch.aminmax, x),
        "isnan.any": lambda: torch.isnan(x).any(),
        "isfinite.all": lambda: torch.isfinite(x).all(),
        "five ops": partial(five_ops, x),
        "five ops compiled": partial(compiled_five_ops, x),
    }
    if x.nbytes <= MB:
        runs["nanscan.check"] = partial(nanscan.check, x)
    if x.dtype != torch.bfloat16:
        array = x.numpy()
        runs["NumPy isnan.any"] = lambda: np.isnan(array).any()
    return runs


def compare(report: Report) -> dict[Case, Times]:
    """All contenders over dtypes, threads and sizes."""
    times = {}
    for threads in THREADS:
        torch.set_num_threads(threads)
        for dtype in DTYPES:
            compiled_five_ops(normal(dtype, 8 * MB))  # large, so that it compiles parallel loops
            for size in SIZES:
                budget = 0.5 if size == SIZES[-1] else 0.06
                x = normal(dtype, size)
                times[dtype, threads, size] = interleave(contenders(x), budget_s=budget)
            show(report, dtype, threads, times)
    return times


def show(
    report: Report,
    dtype: torch.dtype,
    threads: int,
    times: dict[Case, Times],
) -> None:
    """Table and JSON of one dtype and number of threads."""
    title = f"{label(dtype)}, {threads_label(threads)}"
    rows, kept = [], {}
    for name in STYLES:
        by_size = {
            size_label(s): gigabytes(times[dtype, threads, s][name], s)
            for s in SIZES
            if name in times[dtype, threads, s]
        }
        cells = [
            by_size[size_label(s)].text() if size_label(s) in by_size else "n/a" for s in SIZES
        ]
        rows.append([name, *cells])
        kept[name] = by_size
    report.table(f"{title}: GB/s of input", ["", *map(size_label, SIZES)], rows)
    report.data.setdefault("gb_per_s", {})[title] = kept


def spoilt(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Copies of a flat tensor with more and more that is not finite."""
    bad = torch.tensor([torch.nan, torch.inf, -torch.inf]).to(x.dtype)
    copies = {"clean": x, "one NaN, last": x.clone()}
    copies["one NaN, last"][-1] = torch.nan
    for percent in (1, 50, 100):
        chosen = (torch.rand(MB) * 100 < percent).repeat(x.numel() // MB)
        copies[f"{percent} %"] = torch.where(chosen, bad.repeat(x.numel() // 3 + 1)[: x.numel()], x)
    return copies


def compare_spoilt(report: Report) -> list[Bar]:
    """What non-finite values cost. Each scan has a new row, so it also looks for the first one."""
    bars, rows = [], []
    names: list[str] = []
    for threads in THREADS:
        torch.set_num_threads(threads)
        for dtype in DTYPES:
            size = 64 * MB
            runs = {
                name: partial(_C.scan_once, x, False)
                for name, x in spoilt(normal(dtype, size)).items()
            }
            times = interleave(runs, budget_s=0.2)
            names = list(times)
            case = f"{label(dtype)}, {threads_label(threads)}"
            spreads = {name: gigabytes(t, size) for name, t in times.items()}
            rows.append([case, *(s.text() for s in spreads.values())])
            report.data.setdefault("nonfinite_gb_per_s", {})[case] = spreads
            worst = max(("1 %", "50 %", "100 %"), key=lambda n: np.median(times[n]))
            cost = ratio(times[worst], times["clean"])
            bars.append(Bar(f"{case}, 64 MB: {worst} non-finite / clean, time", 3, cost, False))
    report.table("64 MB with non-finite values (NaN, Inf and -Inf): GB/s", ["", *names], rows)
    return bars


def layouts(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Views of 16 MB each."""
    n = 16 * MB // dtype.itemsize
    flat = normal(dtype, 64 * MB)
    return {
        "contiguous": flat[:n],
        "unaligned": flat[1 : n + 1],
        "channels_last": flat[:n].view(16, -1, 64, 64).to(memory_format=torch.channels_last),
        "transposed": flat[:n].view(1024, -1).t(),
        "rows cut in half": flat[: 2 * n].view(-1, 2048)[:, :1024],
        "16 of 32 columns": flat[: 2 * n].view(-1, 32)[:, :16],
        "every 2nd element": flat[: 2 * n : 2],
        "one column of 4": flat.view(-1, 4)[:n, 0],
        "rows expanded": flat[: n // 64].view(-1, 1, 256).expand(-1, 64, 256),
    }


def compare_layouts(report: Report) -> None:
    """What a layout costs, in GB/s of logical elements, which for an expanded one beat memory."""
    torch.set_num_threads(1)
    views = {label(dtype): layouts(dtype) for dtype in (torch.float32, torch.bfloat16)}
    rows: dict[str, list[str]] = {}
    for dtype, group in views.items():
        runs: Runs = {}
        for name, x in group.items():
            runs[name] = partial(SCAN, x, ROW)
            runs[f"aminmax {name}"] = partial(torch.aminmax, x)
        times = interleave(runs, budget_s=0.1)
        spreads = {name: gigabytes(t, 16 * MB) for name, t in times.items()}
        report.data.setdefault("layout_gb_per_s", {})[dtype] = spreads
        for name in group:
            cells = [spreads[name].text(), spreads[f"aminmax {name}"].text()]
            rows.setdefault(name, [name]).extend(cells)
    columns = [f"{who} {dtype}" for dtype in views for who in ("nanscan", "aminmax")]
    report.table("layouts, 16 MB, 1 thread: GB/s", ["", *columns], list(rows.values()))


def compare_variants(report: Report) -> None:
    """Every instruction set against a plain read with the same one."""
    torch.set_num_threads(1)
    chosen = _C.variant()
    columns = ["", "plain read", *map(label, MORE_DTYPES)]
    for size in (32 * KB, MB, 64 * MB):
        rows = []
        inputs = {label(dtype): normal(dtype, size) for dtype in MORE_DTYPES}
        for variant in _C.variants():
            _C.use_variant(variant)
            runs: Runs = {"plain read": partial(_C.plain_read, memory(inputs["float32"]))}
            runs |= {name: partial(SCAN, x, ROW) for name, x in inputs.items()}
            times = interleave(runs, budget_s=0.1)
            spreads = {name: gigabytes(t, size) for name, t in times.items()}
            rows.append([variant, *(s.text() for s in spreads.values())])
            case = f"{variant}, {size_label(size)}"
            report.data.setdefault("variant_gb_per_s", {})[case] = spreads
        report.table(f"instruction sets, {size_label(size)}, 1 thread: GB/s", columns, rows)
    _C.use_variant(chosen)


def compare_moments(report: Report) -> list[Bar]:
    """Moments, of finite data and of data with NaN, against torch.std_mean and a scan of float32.

    Elements a second: a scan without moments of a smaller dtype reads fewer bytes.
    """
    count = 16 * MB
    bars, rows = [], []
    names: list[str] = []
    plain = normal(torch.float32, count * 4)
    for threads in THREADS:
        torch.set_num_threads(threads)
        for dtype in DTYPES:
            x = normal(dtype, count * dtype.itemsize)
            runs: Runs = {
                "scan of float32": partial(_C.scan_once, plain, False),
                "moments": partial(_C.scan_once, x, True),
                "moments, 1 % non-finite": partial(_C.scan_once, spoilt(x)["1 %"], True),
                "std_mean": partial(torch.std_mean, x),
            }
            times = interleave(runs, budget_s=0.3)
            names = list(times)
            case = f"{label(dtype)}, {threads_label(threads)}"
            spreads = {name: Spread.of(count / np.array(t) / 1e9) for name, t in times.items()}
            rows.append([case, *(s.text() for s in spreads.values())])
            report.data.setdefault("moments_gelements_per_s", {})[case] = spreads
            scan, moments, spoilt_moments, _ = times.values()
            bars += [
                Bar(f"{case}, 16 M: moments / scan of float32", 0.3, ratio(scan, moments)),
                Bar(
                    f"{case}, 16 M: moments, 1 % non-finite / finite, time",
                    3,
                    ratio(spoilt_moments, moments),
                    at_least=False,
                ),
            ]
    report.table("moments of 16 M elements: 10^9 elements a second", ["", *names], rows)
    return bars


def bars_of(times: dict[Case, Times]) -> list[Bar]:
    """The bars on clean, dense data."""
    bars = []
    for case, of_case in times.items():
        dtype, threads, size = case
        required: dict[str, float] = {}
        if size == SIZES[-1]:
            of_isnan = 4 if dtype == torch.float32 else 10
            required = {"plain read": 0.9, "isnan.any": of_isnan, "aminmax": 1.5}
        elif size == MB and threads == 1:
            required = {"aminmax": 3}
        for baseline, factor in required.items():
            # A ratio of times is the inverse ratio of speeds.
            measured = ratio(of_case[baseline], of_case["nanscan"])
            limit = None
            if baseline != "plain read":
                limit = ratio(of_case[baseline], of_case["plain read"]).median
            name = f"{case_label(case)}: nanscan / {baseline}"
            bars.append(Bar(name, factor, measured, limit=limit))
    return bars


def plot(times: dict[Case, Times]) -> Figure:
    """GB/s over size, one panel for each dtype and number of threads."""
    figure = Figure(figsize=(15, 4.6 * len(THREADS)), layout="constrained")
    axes = figure.subplots(len(THREADS), len(DTYPES), sharex=True, sharey=True, squeeze=False)
    for i, threads in enumerate(THREADS):
        for j, dtype in enumerate(DTYPES):
            ax = axes[i][j]
            for name, style in STYLES.items():
                sizes = [s for s in SIZES if name in times[dtype, threads, s]]
                if not sizes:
                    continue
                spreads = [gigabytes(times[dtype, threads, s][name], s) for s in sizes]
                ax.plot(sizes, [s.median for s in spreads], marker="o", ms=3, label=name, **style)
                low, high = [s.low for s in spreads], [s.high for s in spreads]
                ax.fill_between(sizes, low, high, color=style["color"], alpha=0.12, linewidth=0)
            ax.set(xscale="log", yscale="log", title=f"{label(dtype)}, {threads_label(threads)}")
            ax.set_xticks(SIZES, [size_label(s) for s in SIZES], rotation=35)
            ax.minorticks_off()
            ax.set_yticks([0.1, 1, 10, 100], ["0.1", "1", "10", "100"])
            ax.grid(alpha=0.3)
            ax.set_ylim(0.05, 400)
    for ax in axes[-1]:
        ax.set_xlabel("size of the input")
    for row in axes:
        row[0].set_ylabel("GB/s of input")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    return figure


def main() -> None:
    """Runs all comparisons."""
    report = Report("bandwidth", arguments(__doc__))
    torch.manual_seed(0)
    times = compare(report)
    nonfinite_bars = compare_spoilt(report)
    compare_layouts(report)
    compare_variants(report)
    moments_bars = compare_moments(report)
    report.bars(bars_of(times) + nonfinite_bars + moments_bars)
    report.save(plot(times))


if __name__ == "__main__":
    main()
