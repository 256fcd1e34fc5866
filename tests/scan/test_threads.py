"""Python threads and torch's threads: exact totals, a released GIL, the same bytes."""

import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import nanscan
from helpers import cases
from helpers.cases import Content, Patterns
from nanscan import _C

WORKERS = 8
LARGE = (1 << 20) // 4 + 17  # float32 elements: scanned with the GIL released
SMALL = 100


def tensor_with_nans(size, nans):
    x = cases.buffer(torch.float32, Content(), size)
    for i in range(nans):
        cases.plant(x, i * 7, Patterns(torch.float32).nans[0])
    return x


def run_together(function):
    """function(i) on WORKERS threads that start at once; raises what any of them raised."""
    barrier = threading.Barrier(WORKERS)

    def start(i):
        barrier.wait()
        return function(i)

    with ThreadPoolExecutor(WORKERS) as pool:
        return list(pool.map(start, range(WORKERS)))


@pytest.mark.parametrize("size", [SMALL, LARGE], ids=["small", "large"])
def test_check_on_own_and_shared_tensors(size):
    own = [tensor_with_nans(size, nans=i) for i in range(WORKERS)]
    shared = tensor_with_nans(size, nans=3)
    expected = [cases.fields(nanscan.check(x)) for x in own]
    expected_shared = cases.fields(nanscan.check(shared))

    def scan(i):
        for _ in range(10):
            assert cases.fields(nanscan.check(own[i])) == expected[i]
            assert cases.fields(nanscan.check(shared)) == expected_shared

    run_together(scan)


@pytest.mark.parametrize("size", [SMALL, LARGE], ids=["small", "large"])
def test_rows_take_every_scan(size):
    table = _C.Table()
    shared = table.add_row()
    own = [table.add_row() for _ in range(WORKERS)]
    tensors = [tensor_with_nans(size, nans=i) for i in range(WORKERS)]
    repeats = 20

    def scan(i):
        for _ in range(repeats):
            assert table.scan(tensors[i], shared) == 0
            assert table.scan(tensors[i], own[i]) == 0

    run_together(scan)
    rows = cases.take_snapshot(table).rows
    total = repeats * sum(range(WORKERS))
    assert rows[shared]["calls"] == repeats * WORKERS
    assert rows[shared]["elements"] == repeats * WORKERS * size
    assert rows[shared]["nan"] == total
    for i in range(WORKERS):
        assert (rows[own[i]]["calls"], rows[own[i]]["nan"]) == (repeats, repeats * i)
    tickets = sorted(rows["ticket"][rows["ticket"] > 0].tolist())
    assert tickets == list(range(1, WORKERS + 1))  # all but the row of no NaN


def test_snapshots_amid_scans_lose_and_double_nothing():
    table = _C.Table()
    rows = [table.add_row() for _ in range(WORKERS)]
    x = tensor_with_nans(LARGE, nans=2)
    repeats = 20
    taken = []

    def work(i):
        for _ in range(repeats):
            if i == 0:
                taken.append(cases.take_snapshot(table).rows)
            else:
                assert table.scan(x, rows[i]) == 0

    run_together(work)
    taken.append(cases.take_snapshot(table).rows)
    scans = repeats * (WORKERS - 1)
    assert sum(int(part["calls"].sum()) for part in taken) == scans
    assert sum(int(part["nan"].sum()) for part in taken) == 2 * scans
    assert sum(int(part["elements"].sum()) for part in taken) == LARGE * scans


@pytest.mark.parametrize("size", [SMALL, LARGE], ids=["small", "large"])
def test_visits_from_many_threads(size):
    """Threads that meet may each scan a shared tensor once, into the row that they then hold."""
    table = _C.Table()
    rows = [table.add_row() for _ in range(WORKERS)]
    shared = tensor_with_nans(size, nans=1)
    own = [tensor_with_nans(size, nans=1) for _ in range(WORKERS)]

    def visit(i):
        assert table.visit(own[i], rows[i]) == rows[i]
        return [table.visit(shared, rows[i]) for _ in range(20)]

    holders = {row for found in run_together(visit) for row in found}
    seen = cases.take_snapshot(table).rows
    assert holders
    assert {row for row in rows if seen[row]["calls"] == 2} == holders
    assert seen["nan"].sum() == seen["calls"].sum() == WORKERS + len(holders)


def test_visits_amid_snapshots():
    """Rows of inference tensors, which have no version and so are scanned each time, are exact."""
    table = _C.Table()
    rows = [table.add_row() for _ in range(2 * WORKERS)]
    with torch.inference_mode():
        unversioned = tensor_with_nans(SMALL, nans=1)
    repeats = 2000
    taken = []

    def work(i):
        plain = tensor_with_nans(SMALL, nans=0)
        for _ in range(repeats):
            if i < 2:
                taken.append(cases.take_snapshot(table).rows)
                continue
            assert table.visit(unversioned, rows[i]) == rows[i]
            assert table.visit(plain, rows[i + WORKERS]) == rows[i + WORKERS]

    run_together(work)
    taken.append(cases.take_snapshot(table).rows)
    scans = repeats * (WORKERS - 2)
    assert sum(int(part["calls"][:WORKERS].sum()) for part in taken) == scans
    assert sum(int(part["nan"].sum()) for part in taken) == scans


class Bystander:
    """A thread that counts whenever it gets the GIL, and gives it back at once."""

    def __init__(self):
        self.count = 0
        self.stopping = False
        self.thread = threading.Thread(target=self.run)

    def run(self):
        while not self.stopping:
            self.count += 1
            time.sleep(0)

    def progress_during(self, function, *args):
        before = self.count
        function(*args)
        return self.count - before


@pytest.fixture
def bystander():
    """Meanwhile Python takes the GIL from nobody: the bystander runs only when it is released."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    bystander = Bystander()
    bystander.thread.start()
    yield bystander
    bystander.stopping = True
    bystander.thread.join()
    sys.setswitchinterval(interval)


def test_the_scan_of_a_large_tensor_releases_the_gil(bystander):
    small, large = torch.ones(1000), torch.ones(16 << 20)
    small.is_neg = large.is_neg = lambda: False  # torch's own, which a scan asks, releases the GIL
    assert all(bystander.progress_during(_C.scan_once, small, False) == 0 for _ in range(100))
    table = _C.Table()
    row = table.add_row()
    for scan, argument in ((_C.scan_once, False), (table.scan, row)):
        assert any(bystander.progress_during(scan, large, argument) > 0 for _ in range(200))


def test_the_number_of_torch_threads_does_not_change_a_byte(num_threads):
    x = cases.buffer(torch.bfloat16, Content(), 5_000_000).view(2000, 2500)
    for place in (3, 1_234_567, 4_999_999):
        cases.plant(x, place, Patterns(torch.bfloat16).bad[place % 4])
    for view in (x, x.t(), x[:, 3:2400], x[::2, ::2]):
        rows = set()
        for count in (1, 2, 3, 4, 8):
            num_threads(count)
            rows |= {_C.scan_once(view, False) for _ in range(3)}
        assert len(rows) == 1
