"""The launch path of the real extension, on the recording driver: what it asks of CUDA, and when.

Runs in a process of its own; test_cuda_fake_suite.py starts it.
"""

import gc
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import cases
import fake_cuda
import numpy as np
import pytest
import torch
from fake_cuda import (
    ASK,
    CAPTURING,
    LAUNCH,
    MODE,
    NAN,
    POP,
    PUSH,
    ROWS_A_CHUNK,
    ManyScan,
    StridedScan,
    names,
    record,
    take,
    with_nan,
)

import nanscan
from nanscan import _C
from nanscan._data.row import ROW

if not fake_cuda.wanted():
    pytest.skip("test_cuda_fake_suite.py runs it, on the recording driver", allow_module_level=True)

THREADS, LOADS = fake_cuda.constant("kThreads"), fake_cuda.constant("kLoads")


@pytest.fixture
def cuda(recording_driver):
    recording_driver.set(record=1)
    recording_driver.calls()
    yield recording_driver
    gc.collect()


@pytest.fixture
def table():
    return _C.Table()


def launches(cuda):
    return [call for call in cuda.calls() if call.function == LAUNCH]


# -- what a launch is given ------------------------------------------------------------------------


def scan_and_launches(cuda, x, *, moments=False):
    pending = _C.scan_once(x, moments)
    assert record(pending)["elements"] == x.numel() * (2 if x.is_complex() else 1)
    return launches(cuda)


def blocks_for(threads, kind):
    most = fake_cuda.MULTIPROCESSORS * fake_cuda.constant(f"k{kind}BlocksPerSm")
    return max(1, min(-(-threads // THREADS), most))


@pytest.mark.parametrize("size", [1, 1000, 4096, 4097, 15 * 4096, 300_000])
@cases.each_real_dtype
def test_a_flat_tensor(dtype, size, cuda):
    x = torch.zeros(size, dtype=dtype)
    (call,) = scan_and_launches(cuda, x)
    assert call.kernel == f"nanscan_flat_{cases.name_of(dtype)}"
    assert (call.scan.data, call.scan.count) == (x.data_ptr(), size)
    assert (call.grid, call.block) == (blocks_for(-(-x.nbytes // 16), "Flat"), THREADS)
    assert (call.device, call.stream) == (0, 0)


def places(scan: StridedScan, itemsize: int):
    """(address, row-major index) of each stored element, by the words of scan_args.h."""
    stored = scan.units // scan.pieces * scan.run
    for place in range(stored):
        outer, inner = divmod(place, scan.run)
        offset = inner * scan.run_stride
        for size, stride in reversed(scan.outer):
            outer, digit = divmod(outer, size)
            offset += digit * stride
        index, rest = place, place
        if scan.index:
            index = 0
            for size, weight in reversed(scan.index):
                rest, digit = divmod(rest, size)
                index += digit * weight
        yield scan.data + offset * itemsize, index


def logical_addresses(x: torch.Tensor) -> np.ndarray:
    """Of each element, in row-major order; a complex one is two."""
    real = torch.view_as_real(x) if x.is_complex() else x
    strides = np.array(real.stride(), np.int64) * real.itemsize
    grid = np.indices(real.shape).reshape(real.ndim, real.numel())
    return x.data_ptr() + (strides[:, None] * grid).sum(axis=0, dtype=np.int64)


PLAIN_LAYOUTS = [
    name
    for name in cases.LAYOUTS
    if not name.startswith(("misaligned", "empty", "negative", "conjugate", "imaginary"))
]


@pytest.mark.parametrize("layout", PLAIN_LAYOUTS)
@pytest.mark.parametrize(
    "dtype", [torch.float8_e5m2, torch.float32, torch.complex128], ids=cases.name_of
)
def test_a_tensor_of_any_layout(dtype, layout, cuda):
    """What the kernel is told is exactly the tensor: each element, as often as it is there."""
    x = cases.LAYOUTS[layout].view(torch.zeros(cases.BUFFER).to(dtype))
    (call,) = scan_and_launches(cuda, x, moments=True)
    scan, item = call.scan, x.itemsize // (2 if x.is_complex() else 1)
    assert call.kernel == f"nanscan_strided_moments_{cases.name_of(cases.real_dtype(dtype))}"
    expected = logical_addresses(x)
    assert scan.elements == len(expected)
    walked = list(places(scan, item))
    repeated = Counter({a: n * scan.repeat for a, n in Counter(a for a, _ in walked).items()})
    assert repeated == Counter(expected.tolist())
    assert [int(expected[index]) for _, index in walked] == [address for address, _ in walked]
    if len(set(expected.tolist())) * scan.repeat == len(expected):  # no overlap: which one is clear
        first = dict(zip(expected[::-1].tolist(), range(len(expected))[::-1], strict=True))
        assert all(index == first[address] for address, index in walked)

    assert scan.lanes in (1, 2, 4, 8, 16, 32)
    loads = -(-scan.run * item // 16) if scan.vectors else scan.run
    assert (scan.pieces - 1) * scan.lanes * LOADS < loads <= scan.pieces * scan.lanes * LOADS
    assert call.grid == blocks_for(scan.units * scan.lanes, "Other")
    if scan.vectors:
        assert scan.run_stride == 1
        assert scan.run * item >= 16
        assert all(value % 16 == 0 for value in (scan.data, *(s * item for _, s in scan.outer)))


@pytest.mark.parametrize(
    ("view", "kind", "repeat", "vectors"),
    [
        (lambda b: b[:360].view(3, 4, 5, 6), "flat", 1, None),
        (lambda b: b[:360].view(3, 5, 6, 4).permute(0, 3, 1, 2), "strided", 1, 1),
        (lambda b: b.view(32, 256)[:, 3:200], "strided", 1, 0),
        (lambda b: b.view(32, 256)[:, 4:200], "strided", 1, 1),
        (lambda b: b.view(32, 256)[:, 2:200], "strided", 1, 0),
        (lambda b: b[::2], "strided", 1, 0),
        (lambda b: b[:32].expand(9, 32), "strided", 9, 1),
        (lambda b: b[7].expand(4, 5), "strided", 20, 0),
    ],
    ids=[
        *("contiguous", "permuted", "odd rows", "aligned rows", "rows at 8 bytes", "stepped"),
        *("expanded", "one value"),
    ],
)
def test_which_kernel_and_how(view, kind, repeat, vectors, cuda):
    (call,) = scan_and_launches(cuda, view(torch.zeros(cases.BUFFER)))
    assert call.kernel == f"nanscan_{kind}_float32"
    if kind == "strided":
        assert (call.scan.repeat, call.scan.vectors) == (repeat, vectors)


def test_many_tensors(cuda, table):
    """One launch; each block of the grid belongs to one tensor."""
    tensors = [
        torch.zeros(7),
        torch.zeros(50_000, dtype=torch.float16),
        torch.zeros(20, 30).t(),
        with_nan(4, 5, 6, at=35).permute(0, 2, 1),
    ]
    rows = [table.add_row() for _ in tensors]
    assert table.scan_many(tensors, rows) == []
    (call,) = launches(cuda)
    scan = call.scan
    assert isinstance(scan, ManyScan)
    assert (call.kernel, call.block, scan.tensors) == ("nanscan_many", THREADS, 4)
    assert [entry.data for entry in scan.entries] == [x.data_ptr() for x in tensors]
    assert [entry.count for entry in scan.entries] == [7, 50_000, 600, 120]
    assert [entry.dtype for entry in scan.entries] == [2, 0, 2, 2]
    blocks = [blocks_for(-(-x.nbytes // 16) / LOADS, "Other") for x in tensors]
    assert [entry.first_block for entry in scan.entries] == [0, *np.cumsum(blocks)[:-1]]
    assert call.grid == scan.blocks == sum(blocks)
    assert [entry.index_count for entry in scan.entries] == [0, 0, 2, 3]
    dims = [(d.size, d.weight) for d in scan.index]
    begins = [entry.index_begin for entry in scan.entries]
    assert dims[begins[2] :][:2] == [(20, 1), (30, 20)]
    assert dims[begins[3] :][:3] == [(4, 30), (5, 1), (6, 5)]
    found = take(table).read()
    assert len({entry.row for entry in scan.entries}) == 4
    assert found.notable == [rows[3]]
    assert found[rows[3]]["first_bad"] ^ ((1 << 64) - 1) == 30 + 0 + 5 * 5


@pytest.mark.parametrize(
    ("count", "expected"), [(1, 1), (95, 1), (96, 1), (97, 2), (192, 2), (193, 3)]
)
def test_how_many_launches_many_tensors_take(count, expected, cuda, table):
    tensors = [torch.zeros(5) for _ in range(count)]
    rows = [table.add_row() for _ in tensors]
    assert table.scan_many(tensors, rows) == []
    assert len(launches(cuda)) == expected
    assert all(record(scan)["elements"] == 5 for scan in _C.scan_once_many(tensors, False))
    assert len(launches(cuda)) == expected


def test_tensors_that_do_not_go_with_many(cuda):
    """Layouts that are not flat go alone; dimensions run out before tensors do."""
    flat, strided = torch.zeros(100), torch.zeros(100)[::2]
    _C.scan_once_many([flat, strided, flat, flat], False)
    assert Counter(call.kernel for call in launches(cuda)) == {
        "nanscan_many": 1,
        "nanscan_strided_float32": 1,
    }
    _C.scan_once_many([torch.zeros(4, 6).t()] * 20, False)
    assert len(launches(cuda)) == 1
    _C.scan_once_many([torch.zeros(4, 6).t()] * 21, False)
    assert len(launches(cuda)) == 2


def test_moments_of_many(cuda):
    scans = _C.scan_once_many([torch.full((10,), 2.0), torch.zeros(3)], True)
    assert [call.kernel for call in launches(cuda)] == ["nanscan_many_moments"]
    assert [(record(s)["sum"], record(s)["zeros"]) for s in scans] == [(20, 0), (0, 3)]


# -- contexts and streams --------------------------------------------------------------------------


@pytest.mark.parametrize("ordinal", [0, 1])
@pytest.mark.parametrize("current", [-1, 0, 1], ids=["no context", "cuda:0", "cuda:1"])
def test_the_context_is_pushed_only_when_another_is_current(ordinal, current, cuda, table):
    row, x = table.add_row(), with_nan(50)
    with cuda.placed(x, ordinal):
        table.scan(x, row)
        take(table).read()
        record(_C.scan_once(x, False))
        cuda.calls()
        with cuda.current_device(current):
            table.scan(x, row)
            table.visit(x, row)
            table.scan(x.view(5, 10).t(), row)
            table.scan_many([x, x], [row, row])
            step, scan = take(table), _C.scan_once(x, False)
            step.ready()
            assert (step.read()[row]["nan"], record(scan)["nan"]) == (5, 1)
            calls = cuda.calls()
        del step, scan
    pushes = names(calls).count(PUSH)
    assert pushes == names(calls).count(POP)
    assert (pushes == 0) == (current == ordinal)
    stack = [current]
    for call in calls:
        assert call.device == stack[-1]
        if call.function == PUSH:
            stack.append(ordinal)
        elif call.function == POP:
            stack.pop()
        elif call.function not in (ASK, "EventQuery"):
            assert call.device == ordinal
    assert stack == [current]


@pytest.mark.parametrize("current", [-1, 0, 1])
def test_the_context_is_popped_after_errors(current, cuda, table):
    row, x = table.add_row(), with_nan(50)
    table.scan(x, row)
    record(_C.scan_once(x, False))
    take(table).read()
    failing = {
        "cuLaunchKernel": (
            lambda: table.scan(x, row),
            lambda: table.visit(torch.ones(3), row),
            lambda: table.scan_many([x], [row]),
            lambda: _C.scan_once(x, False),
            lambda: _C.scan_once_many([x, x], False),
        ),
        "cuMemcpyDtoHAsync_v2": (lambda: take(table),),
        "cuMemsetD8Async": (lambda: take(table),),
        "cuEventRecord": (lambda: take(table),),
        "cuCtxGetCurrent": (lambda: table.scan(x, row), lambda: take(table)),
    }
    for function, attempts in failing.items():
        for attempt in attempts:
            cuda.fail(function, error=fake_cuda.ILLEGAL_ADDRESS)
            with (
                cuda.current_device(current),
                pytest.raises(RuntimeError, match="failed: CUDA_ERROR_ILLEGAL_ADDRESS"),
            ):
                attempt()
            cuda.heal()


def test_the_current_stream_of_the_device_of_the_tensor(cuda, table):
    row, x, y = table.add_row(), torch.ones(4), torch.ones(4)
    streams = [cuda.new_stream(0), cuda.new_stream(1)]
    with cuda.placed(y, 1), cuda.stream(streams[0], 0), cuda.stream(streams[1], 1):
        for scan in (lambda t: table.scan(t, row), lambda t: _C.scan_once(t, False)):
            scan(x)
            scan(y)
            calls = launches(cuda)
            assert [(c.device, c.stream) for c in calls] == [(0, streams[0]), (1, streams[1])]
        _C.scan_once_many([x, y, x, y], False)
        assert sorted((c.device, c.stream) for c in launches(cuda)) == [
            (0, streams[0]),
            (1, streams[1]),
        ]


def test_torch_that_names_no_stream(cuda, table):
    row, x = table.add_row(), torch.ones(4)
    table.scan(x, row)
    cuda.set(no_stream=1)
    for attempt in (
        lambda: table.scan(x, row),
        lambda: table.scan_many([x], [row]),
        lambda: _C.scan_once(x, False),
        lambda: _C.scan_once_many([x], False),
        lambda: take(table),
    ):
        with pytest.raises(RuntimeError, match="torch names no current stream of cuda:0"):
            attempt()


# -- nothing but launches --------------------------------------------------------------------------


class Warm(NamedTuple):
    table: _C.Table
    row: int
    x: torch.Tensor


@pytest.fixture
def warm(cuda, table):
    """A table in its third step, on the legacy stream; one scan of this step is done."""
    row, x = table.add_row(), with_nan(3000, at=70)
    for _ in range(2):
        table.scan(x, row)
        take(table).read()
        record(_C.scan_once(x, False))
    table.scan(x, row)
    cuda.calls()
    return Warm(table, row, x)


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x,
        lambda x: x.view(50, 60).t(),
        lambda x: x[::2],
        lambda x: x.expand(3, -1),
        lambda x: x.to(torch.complex64),
    ],
    ids=["flat", "permuted", "strided", "expanded", "complex"],
)
def test_a_scan_is_one_launch_and_nothing_else(view, cuda, warm):
    x = view(warm.x)
    warm.table.scan(x, warm.row)
    assert names(cuda.calls()) == [ASK, LAUNCH]
    assert warm.table.visit(x, warm.row) == warm.row
    assert names(cuda.calls()) == [ASK, LAUNCH]
    assert warm.table.visit(x, warm.row) == warm.row  # seen, and not changed since
    assert cuda.calls() == []
    warm.table.scan_many([x], [warm.row])
    assert names(cuda.calls()) == [ASK, LAUNCH]
    cuda.use_device(1)
    warm.table.scan(x, warm.row)
    assert names(cuda.calls()) == [ASK, PUSH, LAUNCH, POP]


def test_the_first_scan_of_a_step(cuda, warm):
    """One launch, too; on another stream than the snapshot's it is put in order with that."""
    stream = cuda.new_stream()
    for _ in range(2):
        take(warm.table).read()
        cuda.calls()
        warm.table.scan(warm.x, warm.row)
        assert names(cuda.calls()) == [ASK, LAUNCH]
        with cuda.stream(stream):
            warm.table.scan(warm.x, warm.row)
            work = [call for call in cuda.calls() if call.function not in (ASK, "EventCreate")]
            assert [(call.function, call.stream) for call in work] == [
                (CAPTURING, stream),
                (CAPTURING, 0),
                ("EventRecord", 0),
                ("StreamWaitEvent", stream),
                (LAUNCH, stream),
            ]
            warm.table.scan(warm.x, warm.row)
            assert names(cuda.calls()) == [ASK, LAUNCH]


@pytest.mark.parametrize("moments", [False, True])
def test_a_check_is_one_launch_and_the_question_for_a_capture(moments, cuda, warm):
    result = nanscan.check(warm.x, moments=moments)
    assert names(cuda.calls()) == [ASK, CAPTURING, ASK, LAUNCH]
    assert (result.ready(), result.nan_count) == (True, 1)
    assert cuda.calls() == []


def test_checks_of_many(cuda, warm):
    results = nanscan.check_many({"a": [warm.x, None], "b": (warm.x.view(50, 60).t(), warm.x)})
    assert names(cuda.calls()) == [ASK, CAPTURING, ASK, LAUNCH]
    assert results["b"][0].first_nonfinite == (10, 1)
    assert results["a"][1] is None


def test_a_snapshot_is_one_copy_one_reset_and_one_event(cuda, warm):
    step = take(warm.table)
    work = [name for name in names(cuda.calls()) if name != ASK]
    assert work == [CAPTURING, "MemcpyDtoHAsync", "MemsetD8Async", "EventRecord"]
    assert step.ready()
    assert [name for name in names(cuda.calls()) if name not in (ASK, MODE)] == ["EventQuery"]
    assert step.ready()
    assert step.read()[warm.row]["nan"] == 1
    assert cuda.calls() == []  # it is known to be there
    del step
    take(warm.table, reset=False)
    work = [name for name in names(cuda.calls()) if name != ASK]
    assert work == [CAPTURING, "MemcpyDtoHAsync", "EventRecord"]


def test_a_snapshot_of_two_streams(cuda, warm):
    """Four more calls a stream: it comes before the copy and after the reset, unless captured."""
    stream = cuda.new_stream()
    for expected in (3, 2):  # one of the fixture
        warm.table.scan(warm.x, warm.row)
        with cuda.stream(stream):
            warm.table.scan(warm.x, warm.row)
        cuda.calls()
        step = take(warm.table)
        calls = [call for call in cuda.calls() if call.function not in (ASK, "EventCreate")]
        assert [(call.function, call.stream) for call in calls] == [
            (CAPTURING, 0),
            (CAPTURING, stream),
            ("EventRecord", stream),
            ("StreamWaitEvent", 0),
            ("MemcpyDtoHAsync", 0),
            ("MemsetD8Async", 0),
            ("EventRecord", 0),
            ("StreamWaitEvent", stream),
        ]
        assert step.read()[warm.row]["calls"] == expected
        del step


def test_a_table_of_more_rows_than_a_chunk(cuda, warm):
    while len(warm.table) < ROWS_A_CHUNK + 7:
        last = warm.table.add_row()
    warm.table.scan(warm.x, last)
    assert names(cuda.calls()).count("MemAlloc") == 1
    step = take(warm.table)
    calls = cuda.calls()
    copies = [call.bytes for call in calls if call.function == "MemcpyDtoHAsync"]
    assert copies == [ROWS_A_CHUNK * ROW.itemsize, 7 * ROW.itemsize]
    assert names(calls).count("MemsetD8Async") == 2
    rows = step.read()
    assert (rows[warm.row]["nan"], rows[last]["nan"], rows.notable) == (1, 1, [warm.row, last])


QUESTIONS = {ASK, CAPTURING, MODE, "EventQuery", "EventSynchronize"}
WORK = {LAUNCH, "MemcpyDtoHAsync", "MemsetD8Async", "EventRecord"}


def test_nothing_is_allocated_and_nothing_leaks_after_the_warm_up(cuda, warm):
    held = cuda.held()
    cuda.set(seed=0)
    called = Counter()
    for turn in range(10_000):
        warm.table.scan(warm.x, warm.row)
        if turn % 10 == 0:
            assert _C.scan_once(warm.x, False).ready()
        if turn % 100 == 99:
            row = take(warm.table).read()[warm.row]
            assert row["calls"] == 100 + (turn == 99)  # one of the fixture
            called.update(names(cuda.calls()))
    assert called[LAUNCH] == 11_000
    assert set(called) <= QUESTIONS | WORK
    assert cuda.held() == held


def test_a_monitored_training_step_is_launches_and_one_snapshot(cuda):
    """Nothing is waited for, nor asked twice; four steps take the same calls."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = []
    with nanscan.watch(model, action="log") as monitor:
        for _ in range(8):
            cuda.calls()
            model(torch.ones(5, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            steps.append(Counter(names(cuda.calls())))
        monitor.poll()
        assert monitor.findings == []
    assert all(step == steps[-1] for step in steps[-4:])
    assert {name: steps[-1][name] for name in WORK} == {
        LAUNCH: 7,  # one input, three outputs, the loss, the gradients, the parameters
        "MemcpyDtoHAsync": 1,
        "MemsetD8Async": 1,
        "EventRecord": 1,
    }
    assert set(steps[-1]) <= WORK | {ASK, CAPTURING, MODE, "EventQuery"}
    assert (steps[-1][CAPTURING], steps[-1]["EventQuery"]) == (2, 1)


def test_results_that_nobody_reads(cuda, warm):
    """Dropped while under way, 2000 of them, 200 at a time: their slots are used again."""
    cuda.set(lagging=1, seed=5)
    small = torch.ones(3)
    record(_C.scan_once(warm.x, False))
    held = cuda.held()
    for _ in range(10):
        dropped = [_C.scan_once(warm.x, False) for _ in range(200)]
        del dropped
        kept = _C.scan_once(small, False)
        assert cuda.progress(200) == 200
        assert not kept.ready()  # what was dropped is done, and not mistaken for it
        assert cuda.progress() == 1
        assert kept.ready()
        assert record(kept)["elements"] == 3
    assert cuda.held() == held


def test_checks_that_failed_use_nothing_up(cuda, warm):
    """More of them than there are slots."""
    held = cuda.held()
    for _ in range(600):
        cuda.fail("cuLaunchKernel")
        with pytest.raises(RuntimeError, match="launching a scan on cuda:0 failed"):
            _C.scan_once(warm.x, False)
    assert record(_C.scan_once(warm.x, False))["nan"] == 1
    assert cuda.held() == held


def test_a_slot_begins_anew(cuda):
    """Whatever a slot held before: nothing of it is left."""
    for x in (with_nan(500), torch.full((3,), -7.0), with_nan(2, 2), torch.zeros(1)) * 3:
        row = record(_C.scan_once(x, True))
        assert (row["calls"], row["elements"]) == (1, x.numel())
        assert row["nan"] == x.isnan().sum()
        assert row["sum"] == x.nansum()
        assert (row["pending"], row["call_first_bad"], row["mirror"], row["arrived"]) == (0,) * 4


# -- snapshots -------------------------------------------------------------------------------------


@pytest.fixture
def lagging(cuda):
    cuda.set(lagging=1)
    return cuda


def test_an_arrival_is_ready_when_its_copy_is_done(lagging, table):
    row, x = table.add_row(), with_nan(4, 5, at=7)
    table.scan(x, row)
    step = take(table)
    assert (step.notable, step.ready()) == ([], False)
    for _ in range(3):  # scan, copy, reset; then the event
        assert lagging.progress(1) == 1
        assert not step.ready()
    assert lagging.progress(1) == 1
    assert step.ready()
    rows = step.read()
    assert rows.notable == [row]
    assert (rows[row]["nan"], rows[row]["first_bad"] ^ ((1 << 64) - 1)) == (1, 7)
    assert rows.describe(row) == ("float32", (4, 5))


def test_waiting_does_the_rest(lagging, table):
    row, x = table.add_row(), with_nan(9)
    table.scan(x, row)
    assert take(table).read()[row]["nan"] == 1
    scan = _C.scan_once(x, False)
    assert not scan.ready()
    assert record(scan)["nan"] == 1


@pytest.mark.parametrize("seed", range(20))
def test_steps_stay_apart(seed, lagging, table):
    """Step k scans k + 1 times and finds k NaN, whatever is still under way."""
    lagging.set(seed=seed)
    rows = [table.add_row() for _ in range(3)]
    streams = [0, lagging.new_stream(), lagging.new_stream()]
    alive, steps = [], []
    rng = np.random.default_rng(seed)
    for k in range(8):
        x = torch.ones(10 + k)
        x[:k] = NAN
        alive.append(x)
        for row, stream in zip(rows, streams, strict=True):
            with lagging.stream(stream):
                for _ in range(k + 1):
                    table.scan(x, row)
        with lagging.stream(streams[rng.integers(3)]):
            steps.append(take(table))
        lagging.progress(int(rng.integers(12)))
    for k, step in enumerate(steps):
        found = step.read()
        for row in rows:
            assert (found[row]["calls"], found[row]["nan"]) == (k + 1, (k + 1) * k)
            assert found.describe(row) == ("float32", (10 + k,))
    assert take(table).read().rows["calls"].sum() == 0


@pytest.mark.parametrize("seed", range(20))
def test_steps_stay_apart_on_streams_that_change(seed, lagging, table):
    """Scans and snapshots go to streams that may have been idle for steps."""
    lagging.set(seed=seed)
    row, x = table.add_row(), with_nan(5)
    streams = [0, lagging.new_stream(), lagging.new_stream()]
    rng = np.random.default_rng(seed)
    steps, calls = [], []
    for k in range(12):
        calls.append(int(rng.integers(3)) if k else 1)
        for _ in range(calls[-1]):
            with lagging.stream(streams[rng.integers(3)]):
                table.scan(x, row)
        with lagging.stream(streams[rng.integers(3)]):
            steps.append(take(table))
        lagging.progress(int(rng.integers(4)))
    assert [int(step.read()[row]["calls"]) for step in steps] == calls


@pytest.mark.parametrize("seed", range(5))
def test_one_row_on_two_streams(seed, lagging, table):
    lagging.set(seed=seed)
    row, x = table.add_row(), with_nan(100)
    streams = [lagging.new_stream() for _ in range(2)]
    for _ in range(5):
        for stream in streams:
            with lagging.stream(stream):
                table.scan(x, row)
        with lagging.stream(streams[0]):
            step = take(table)
        lagging.progress(3)
        found = step.read()
        assert (found[row]["calls"], found[row]["nan"], found[row]["pending"]) == (2, 2, 0)
        assert found[row]["ticket"] != 0


def test_rows_of_the_host_and_of_a_device_merge(lagging, table):
    row, other = table.add_row(), table.add_row()
    on_host, on_device = torch.tensor([-5.0, NAN, NAN]), torch.tensor([9.0, NAN, 1.0, 2.0])
    with lagging.placed(on_host, -1):
        table.scan(on_host, row)
        table.scan(on_device, row)
        table.scan(on_host, other)
        step = take(table)
        assert step.notable == [row, other]
        found = step.read()
    assert found.notable == [row, other]
    assert found.describe(row) == ("float32", (3,))  # of the first bad one
    merged = found[row]
    assert (merged["calls"], merged["elements"], merged["nan"]) == (2, 7, 3)
    result = nanscan.ScanResult(merged, (3,), torch.float32)
    assert (result.min, result.max) == (-5.0, 9.0)
    assert merged["first_bad"] ^ ((1 << 64) - 1) == 1
    assert found[other]["nan"] == 2


def test_one_row_on_two_devices(lagging, table):
    row = table.add_row()
    x, y = with_nan(10, at=3), with_nan(20, at=5)
    with lagging.placed(y, 1):
        for _ in range(3):
            table.scan(x, row)
            table.scan(y, row)
        step = take(table)
        lagging.progress()
        found = step.read()
    assert (found[row]["calls"], found[row]["elements"], found[row]["nan"]) == (6, 90, 6)
    assert found[row]["ticket"] != 0


def test_tickets_give_one_order_over_devices(lagging, table):
    """Each device counts for itself; between them goes the order of the first visits."""
    rows = [table.add_row() for _ in range(6)]
    devices = [0, 1, 1, -1, 0, 1]
    tensors = [with_nan(5) for _ in rows]
    visited = [4, 0, 2, 5, 3, 1]
    for x, device in zip(tensors, devices, strict=True):
        lagging._driver.fake_place(x.data_ptr(), x.nbytes, device)
    for row in visited:
        table.scan(tensors[row], rows[row])
    found = take(table).read()
    for x in tensors:
        lagging._driver.fake_unplace(x.data_ptr())
    assert sorted(found.rows["ticket"]) == [1, 2, 3, 4, 5, 6]
    assert sorted(rows, key=lambda row: found[row]["ticket"]) == visited


@pytest.mark.parametrize("seed", range(8))
def test_tickets_of_one_launch_follow_the_list(seed, lagging, table):
    """Its blocks end in any order, and so do its tensors: what came first, only the host knows."""
    lagging.set(seed=seed)
    rows = [table.add_row() for _ in range(12)]
    alone, many = with_nan(4), [with_nan(3000), *(with_nan(5) for _ in range(9))]
    for _ in range(2):
        table.scan(alone, rows[7])
        table.scan_many(many, [*rows[:7], *rows[8:11]])
        table.scan(alone, rows[11])
        found = take(table).read()
        in_order = sorted(rows, key=lambda row: found[row]["ticket"])
        assert in_order == [rows[7], *rows[:7], *rows[8:12]]


@pytest.mark.parametrize("bad_call", range(5))
def test_the_first_bad_element_is_told_in_the_shape_of_its_call(bad_call, lagging, table):
    """Five calls of four shapes in one step: the row went bad in one of them."""
    row = table.add_row()
    shapes = [(4, 6), (4, 6), (3, 7), (5, 5), (30,)]
    for step in range(3):
        alive = []
        for call, shape in enumerate(shapes):
            x = torch.ones(shape)
            if call >= bad_call:
                x.view(-1)[17] = NAN
            alive.append(x)
            table.scan(x, row)
        found = take(table).read()
        assert found[row]["first_bad_call"] == bad_call + 1, step
        dtype, shape = found.describe(row)
        assert shape == shapes[bad_call]
        result = nanscan.ScanResult(found[row], shape, getattr(torch, dtype))
        assert result.first_nonfinite == tuple(np.unravel_index(17, shapes[bad_call]))
    last = with_nan(2, 9)
    table.scan(last, row)
    assert take(table).read().describe(row) == ("float32", (2, 9))  # no step knows another's


def test_other_dtypes_in_one_step(lagging, table):
    row = table.add_row()
    good, bad = torch.ones(8, dtype=torch.float16), with_nan(4, dtype=torch.complex64)
    table.scan(good, row)
    table.scan(bad, row)
    table.scan(good, row)
    found = take(table).read()
    assert found.describe(row) == ("complex64", (4,))
    table.scan(good, row)
    assert take(table).read().describe(row) == ("float16", (8,))


def test_tensors_without_elements(lagging, table):
    row, x, y = table.add_row(), torch.ones(0, 3), with_nan(3)
    assert table.scan(x, row) == 0
    table.scan_many([x, x], [row, row])
    assert table.visit(x, row) == row
    assert _C.scan_once(x, True) == _C.scan_once_many([x], True)[0]
    assert record(_C.scan_once(x, True))["calls"] == 1
    assert lagging.calls() == []
    table.scan(y, row)
    found = take(table).read()
    assert (found[row]["calls"], found[row]["elements"], found[row]["nan"]) == (5, 3, 1)
    assert found.describe(row) == ("float32", (3,))


def test_a_look_leaves_the_step_in_one_piece(lagging, table):
    row, x = table.add_row(), with_nan(3)
    table.scan(x, row)
    look = take(table, reset=False)
    table.scan(x, row)
    whole = take(table)
    assert (look.read()[row]["calls"], whole.read()[row]["calls"]) == (1, 2)
    assert whole.order[row] == 1


def test_a_row_that_grew_near_its_limit_is_notable(lagging):
    table = _C.Table(0.5)
    row, fine = table.add_row(), table.add_row()
    large = torch.tensor([1.0, -40000.0], dtype=torch.float16)
    table.scan(large, row)
    table.scan(large.float(), fine)
    assert take(table).read().notable == [row]


def test_snapshots_that_nobody_reads(lagging, table):
    """Buffers that were given up while under way are used again once their copies are done."""
    row, x = table.add_row(), with_nan(3)
    for _ in range(3):
        table.scan(x, row)
        take(table)
    held = lagging.held()
    for _ in range(50):
        lagging.progress()
        for _ in range(3):
            table.scan(x, row)
            take(table)
    assert lagging.held()._replace(queued=0) == held._replace(queued=0)
    table.scan(x, row)
    assert take(table).read()[row]["calls"] == 1


def test_a_table_is_freed(lagging):
    held = lagging.held()
    table = _C.Table()
    row, x, y = table.add_row(), with_nan(3), with_nan(3)
    with lagging.placed(y, 1):
        with lagging.stream(lagging.new_stream()):
            table.scan(x, row)
        table.scan(x, row)
        table.scan(y, row)
        steps = [take(table) for _ in range(3)]
        table.scan(x, row)
        steps[0].read()
        del steps[1], table
        gc.collect()
        assert steps[1].read()[row]["calls"] == 0  # an arrival outlives its table
        del steps
        gc.collect()
    assert lagging.held()._replace(streams=0) == held._replace(streams=0)


def test_a_stream_that_was_destroyed(lagging, table):
    row, x = table.add_row(), with_nan(3)
    stream = lagging.new_stream()
    with lagging.stream(stream):
        table.scan(x, row)
    table.scan(x, row)
    lagging.destroy_stream(stream)
    assert take(table).read()[row]["calls"] == 2
    table.scan(x, row)
    assert take(table).read()[row]["calls"] == 1


# -- CUDA graphs -----------------------------------------------------------------------------------


@pytest.fixture
def captured(lagging, table):
    """A graph with one scan into a row, and the stream on which it was captured."""
    row, x = table.add_row(), with_nan(6)
    table.scan(x, row)
    take(table).read()
    with lagging.capture(lagging.new_stream()) as graph:
        table.scan(x, row)
    assert len(graph) == 1
    return graph, table, row, x


def test_replays_count_as_calls(captured, lagging):
    graph, table, row, x = captured
    assert table.captured
    stream = lagging.new_stream()
    for replays in (0, 1, 5):
        for _ in range(replays):
            graph.replay(stream)
        lagging.progress()
        found = take(table).read()
        assert (found[row]["calls"], found[row]["nan"]) == (replays, replays)
    x.fill_(1.0)
    graph.replay(stream)
    lagging.progress()
    assert take(table).read()[row]["nan"] == 0


@pytest.mark.parametrize("snapshot", [False, True], ids=["same step", "next step"])
def test_a_capture_on_a_stream_that_scans_went_to_before(snapshot, lagging):
    """As after a warm-up: the graph is known to write into rows, which outlive the table."""
    table = _C.Table()
    row, x, stream = table.add_row(), with_nan(6), lagging.new_stream()
    with lagging.stream(stream):
        table.scan(x, row)
        if snapshot:
            take(table).read()
    with lagging.capture(stream) as graph:
        table.scan(x, row)
        assert not table.note_captures()  # as a monitor does whenever a forward ends
    assert table.captured
    del table
    gc.collect()
    graph.replay(stream)
    lagging.progress()


def test_a_monitor_judges_the_replays_of_a_graph(lagging):
    """Of one forward, on a stream that was used before: each replay is a step of its own."""
    model, stream = torch.nn.Identity(), lagging.new_stream()
    good, x = torch.ones(6), with_nan(6)
    with nanscan.watch(model, action="log") as monitor, lagging.stream(stream), torch.no_grad():
        model(good)
        with lagging.capture(stream) as graph:
            model(x)
        for _ in range(3):
            monitor.step()
            lagging.progress()
            graph.replay(stream)
        monitor.step()
        monitor.flush()
    (finding,) = monitor.findings
    assert str(finding.site) == "Identity input[0]"
    assert monitor.history(finding.site)["nan"].tolist() == [0, 1, 1, 1]


def test_rows_of_replays_have_the_order_of_the_capture(captured, lagging):
    graph, table, row, _ = captured
    stream = lagging.new_stream()
    take(table).read()  # of the step of the capture
    graph.replay(stream)
    lagging.progress()
    found = take(table).read()
    assert (found.order[row], found.notable, found.describe(row)) == (1, [row], ("float32", (6,)))


def test_no_snapshot_while_a_graph_is_recorded(lagging, table):
    row, x = table.add_row(), with_nan(6)
    table.scan(x, row)
    with lagging.capture(lagging.new_stream()) as graph:
        assert take(table) is None
        table.scan(x, row)
        assert take(table, reset=False) is None
        scan = _C.scan_once(x, False)
        assert not scan.ready()
    assert len(graph) == 2
    assert take(table).read()[row]["calls"] == 1  # what came before survived
    graph.replay(lagging.new_stream())
    lagging.progress()
    assert take(table).read()[row]["calls"] == 1


@pytest.mark.parametrize("mode", [fake_cuda.GLOBAL, fake_cuda.THREAD_LOCAL, fake_cuda.RELAXED])
def test_first_things_may_happen_in_a_capture(mode, lagging):
    """New tables, new chunks of rows, new slots: all within a capture, which stays whole."""
    x = with_nan(6)
    taken = []
    with lagging.capture(lagging.new_stream(), mode) as graph:
        table = _C.Table()
        row = table.add_row()
        table.scan(x, row)
        while len(table) < ROWS_A_CHUNK + 1:
            last = table.add_row()
        table.scan_many([x, x], [last, row])
        taken += [_C.scan_once(x, False) for _ in range(300)]
    graph.replay(lagging.new_stream())
    lagging.progress()
    assert all(record(scan)["nan"] == 1 for scan in taken)
    found = take(table).read()
    assert (found[row]["calls"], found[last]["calls"]) == (2, 1)


@pytest.mark.parametrize("mode", [fake_cuda.GLOBAL, fake_cuda.THREAD_LOCAL])
def test_another_thread_works_on_while_a_graph_is_recorded(mode, lagging, table):
    """Asking for a snapshot, waiting, freeing: none may break the capture of another thread."""
    row, x = table.add_row(), with_nan(6)
    table.scan(x, row)
    before, scan = take(table), _C.scan_once(x, False)
    other = _C.Table()
    other.scan(x, other.add_row())

    def work():
        nonlocal other
        lagging.use_device(0)
        assert not before.ready()
        assert before.read()[row]["calls"] == 1
        assert record(scan)["nan"] == 1
        other = None
        gc.collect()
        new = _C.Table()
        new.scan(x, new.add_row())
        assert take(new).read()[0]["calls"] == 1

    with lagging.capture(lagging.new_stream(), mode):
        table.scan(x, row)
        run_in_thread(work)


@pytest.mark.parametrize("mode", [fake_cuda.GLOBAL, fake_cuda.THREAD_LOCAL])
def test_a_snapshot_of_the_step_before_is_read_while_a_graph_is_recorded(mode, lagging, table):
    row, x = table.add_row(), with_nan(6)
    table.scan(x, row)
    before = take(table)
    with lagging.capture(lagging.new_stream(), mode):
        table.scan(x, row)
        assert not before.ready()
        lagging.progress()
        assert before.ready()
        assert before.read()[row]["calls"] == 1


def test_a_snapshot_on_a_stream_beside_the_one_that_is_captured(lagging, table):
    """Neither is the snapshot drawn into the graph, nor the capture broken."""
    row, x = table.add_row(), with_nan(6)
    with lagging.capture(lagging.new_stream()) as graph:
        table.scan(x, row)
        with lagging.stream(lagging.new_stream()):
            table.scan(x, row)
            assert take(table).read()[row]["calls"] == 1
    assert len(graph) == 1
    graph.replay(lagging.new_stream())
    lagging.progress()
    assert take(table).read()[row]["calls"] == 1


@pytest.mark.parametrize("seed", range(3))
def test_a_check_in_a_graph(seed, lagging):
    lagging.set(seed=seed)
    x = torch.ones(8)
    record(_C.scan_once(x, False))
    with lagging.capture(lagging.new_stream()) as graph:
        scan = _C.scan_once(x, False)
        (many,) = _C.scan_once_many([x], False)
    for pending in (scan, many):
        assert not pending.ready()
        with pytest.raises(RuntimeError, match="CUDA graph that has not run"):
            pending.wait()
    stream = lagging.new_stream()
    x[3] = NAN
    graph.replay(stream)
    assert record(scan)["nan"] == 1  # it waits for the replay, on whatever stream that is
    assert record(many)["nan"] == 1
    x.fill_(1.0)
    graph.replay(stream)
    lagging.progress()
    assert record(scan)["nan"] == 0
    # Its slot stays its own, when it is dropped too: the graph may run at any time.
    address = {call.scan.row for call in graph_launches(lagging)}
    del scan, many, pending
    others = [_C.scan_once(x, False) for _ in range(600)]
    used = {call.scan.row for call in launches(lagging)}
    assert len(used) == 600
    assert not used & address
    x[5] = NAN
    graph.replay(stream)
    assert all(record(other)["elements"] == 8 for other in others)


def graph_launches(cuda):
    """All launches so far into streams other than the legacy one."""
    return [call for call in cuda.calls() if call.function == LAUNCH and call.stream]


# -- threads ---------------------------------------------------------------------------------------


def run_in_thread(function):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def test_a_thread_without_a_context(cuda, table):
    row, x = table.add_row(), with_nan(6)

    def work():
        assert cuda.held().context_depth == 0
        table.scan(x, row)
        found = take(table).read()
        assert record(_C.scan_once(x, False))["nan"] == 1
        assert cuda.held().context_depth == 0
        return found[row]["nan"]

    assert run_in_thread(work) == 1


@pytest.mark.parametrize("lag", [0, 1], ids=["eager", "lagging"])
def test_eight_threads(lag, cuda, table):
    """Scans into own and shared rows, checks, snapshots: nothing is lost or counted twice."""
    cuda.set(lagging=lag, seed=lag, record=0)
    workers, repeats = 8, 40
    shared, own = table.add_row(), [table.add_row() for _ in range(workers)]
    tensors = [with_nan(50 + i) for i in range(workers)]
    streams = [0, 0, 0, 0, *(cuda.new_stream() for _ in range(4))]
    taken, barrier = [], threading.Barrier(workers)

    def work(i):
        barrier.wait()
        with cuda.stream(streams[i]):
            for turn in range(repeats):
                table.scan(tensors[i], shared)
                table.scan(tensors[i], own[i])
                table.scan_many([tensors[i]] * 2, [own[i]] * 2)
                assert record(_C.scan_once(tensors[i], False))["elements"] == 50 + i
                if i % 4 == 0 or turn % 10 == 0:
                    taken.append(take(table))
                if turn % 7 == 0:
                    cuda.progress(5)

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(work, range(workers)))
    cuda.progress()
    found = [step.read() for step in [*taken, take(table)]]
    assert sum(int(rows[shared]["calls"]) for rows in found) == workers * repeats
    assert sum(int(rows[shared]["nan"]) for rows in found) == workers * repeats
    for i, row in enumerate(own):
        assert sum(int(rows[row]["calls"]) for rows in found) == 3 * repeats
        assert sum(int(rows[row]["elements"]) for rows in found) == 3 * repeats * (50 + i)
    assert all((rows.rows["pending"] == 0).all() for rows in found)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("many", [False, True], ids=["scan", "scan_many"])
def test_snapshots_while_another_thread_launches(many, seed, lagging, table):
    """One before its launch, one after it: the scan is in one piece, and in one step."""
    row, x, stream = table.add_row(), with_nan(6), lagging.new_stream()
    table.scan(x, row)
    take(table).read()
    lagging.set(seed=seed, launch_delay=100, return_delay=100)
    lagging.calls()

    def scan():
        with lagging.stream(stream):
            table.scan_many([x], [row]) if many else table.scan(x, row)

    seen = []

    def wait_for(name):
        while name not in seen and not scanning.done():
            time.sleep(0.001)
            seen.extend(names(lagging.calls()))

    with ThreadPoolExecutor(1) as pool:
        scanning = pool.submit(scan)
        wait_for(CAPTURING)
        steps = [take(table)]
        wait_for(LAUNCH)
        steps.append(take(table))
        scanning.result()
    steps.append(take(table))
    found = [step.read()[row] for step in steps]
    assert [row["calls"] for row in found] in ([0, 1, 0], [0, 0, 1])
    assert [row["pending"] for row in found] == [0, 0, 0]
