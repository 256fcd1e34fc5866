"""CUDA graphs, on the recording driver: what is captured, and what replays count.

Runs in a process of its own; test_cuda_fake_suite.py starts it.
"""

import gc

import pytest
import torch

import nanscan
from helpers import fake_cuda
from helpers.fake_cuda import (
    LAUNCH,
    ROWS_A_CHUNK,
    launches,
    record,
    run_in_thread,
    take,
    with_nan,
)
from helpers.models import NAN
from nanscan import _C

if not fake_cuda.wanted():
    pytest.skip("test_cuda_fake_suite.py runs it, on the recording driver", allow_module_level=True)


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
