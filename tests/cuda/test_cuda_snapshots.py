"""Snapshots of tables, on the recording driver: steps stay apart, rows merge, also over threads.

Runs in a process of its own; test_cuda_fake_suite.py starts it.
"""

import ctypes
import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

import nanscan
from helpers import fake_cuda
from helpers.fake_cuda import (
    CAPTURING,
    LAUNCH,
    names,
    record,
    run_in_thread,
    take,
    with_nan,
)
from helpers.models import NAN
from nanscan import _C
from nanscan._data.row import ROW

if not fake_cuda.wanted():
    pytest.skip("test_cuda_fake_suite.py runs it, on the recording driver", allow_module_level=True)


# -- snapshots -------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("shapes", [[(4, 6), (4, 6)], [(4, 6), (3, 7)], [(3, 7), (4, 6), (30,)]])
def test_a_bad_call_that_is_not_known_gives_no_index_of_another_shape(shapes, lagging, table):
    """As scans of several streams leave a row that went bad while they overlapped."""
    row, alive = table.add_row(), [with_nan(*shape, at=17) for shape in shapes]
    for x in alive:
        table.scan(x, row)
    lagging.progress()
    (address,) = {call.scan.row for call in lagging.calls() if call.function == LAUNCH}
    ctypes.c_uint32.from_address(address + ROW.fields["first_bad_call"][1]).value = 0
    found = take(table).read()
    assert (found[row]["first_bad_call"], found[row]["ticket"]) == (0, 1)
    assert found.notable == [row]
    dtype, shape = found.describe(row)
    assert shape == shapes[-1]  # the latest
    index = (2, 5) if len(set(shapes)) == 1 else None
    assert nanscan.ScanResult(found[row], shape, getattr(torch, dtype)).first_nonfinite == index


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


# -- threads ---------------------------------------------------------------------------------------


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
