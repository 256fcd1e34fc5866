"""The launch path of the real extension, on the recording driver: what it asks of CUDA, and when.

Runs in a process of its own; test_cuda_fake_suite.py starts it.
"""

import copy
import pickle
from collections import Counter, OrderedDict
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree

import nanscan
from helpers import cases, fake_cuda
from helpers.fake_cuda import (
    ASK,
    CAPTURING,
    LAUNCH,
    MODE,
    POP,
    PUSH,
    ROWS_A_CHUNK,
    ManyScan,
    StridedScan,
    launches,
    names,
    record,
    take,
    with_nan,
)
from nanscan import _C
from nanscan._data.row import ROW

if not fake_cuda.wanted():
    pytest.skip("test_cuda_fake_suite.py runs it, on the recording driver", allow_module_level=True)

THREADS, LOADS = fake_cuda.constant("kThreads"), fake_cuda.constant("kLoads")


def pickled(x):
    return pickle.loads(pickle.dumps(x))


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


class Named(NamedTuple):
    """A pytree node that the core does not walk itself."""

    x: object
    y: object


def test_checks_of_many_in_other_nodes_share_the_launch(cuda, warm):
    """Its results can be read while the node is made again: the scans were started before."""
    read = []

    class Reader(dict):
        pass

    def make(results, _):
        read.extend(result.nan_count for result in results)
        return Reader(zip("ab", results, strict=True))

    pytree.register_pytree_node(Reader, lambda node: (list(node.values()), None), make)
    tree = (Named(warm.x, [OrderedDict(k=warm.x)]), Reader(a=warm.x, b=torch.zeros(5)))
    results = nanscan.check_many(tree)
    assert names(cuda.calls()).count(LAUNCH) == 1
    assert type(results[0]) is Named
    assert type(results[0].y[0]) is OrderedDict
    assert read == [1, 0]
    assert [r.nan_count for r in pytree.tree_leaves(results)[:2]] == [1, 1]


@pytest.mark.parametrize("read_again", [pickled, copy.copy, copy.deepcopy])
def test_a_copy_of_a_running_check_waits_for_it(read_again, cuda, warm):
    result = nanscan.check(warm.x, moments=True)
    assert result._pending is not None
    copied = read_again(result)
    assert copied._pending is None
    assert result._pending is None
    warm.x.zero_()
    assert repr(copied) == repr(result)
    assert copied.nan_count == 1


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
