"""CUDA graphs, streams, devices and threads."""

import copy
import threading

import pytest
import torch

import nanscan
from helpers.gpu import (
    DEVICE,
    DRY,
    Step,
    capture,
    cuda,
    faults,
    needs_gpu,
    normal,
)
from helpers.models import (
    INF,
    NAN,
    Net,
    set_nan,
)
from nanscan import _C
from nanscan._data.finding import FAULTS

pytestmark = pytest.mark.cuda


# -- CUDA graphs -----------------------------------------------------------------------------------


def test_a_captured_forward_with_hooks_on():
    """Replays find what eager calls of the same model find."""
    model = Net().to(DEVICE)
    good, bad = normal(8, 4), set_nan(normal(8, 4))
    twin = copy.deepcopy(model)
    with torch.no_grad(), nanscan.watch(twin, action="log") as monitor:
        twin(good)
        twin(bad)
    expected = faults(monitor.findings)
    assert expected[0] == ("Net input[0]", "propagated")

    x = good.clone()
    with torch.no_grad(), nanscan.watch(model, action="log") as monitor:
        replay = capture(lambda: model(x))
        monitor.step()
        assert monitor.flush() == []

        def found(values):
            x.copy_(values)
            replay()
            monitor.step()
            monitor.flush()
            return faults(monitor.poll())

        assert found(good) == []
        assert found(bad) == expected
        assert not monitor.healthy
        assert found(good) == []
        assert monitor.healthy
        assert found(bad) == expected
        assert monitor.findings[-1].stats.numel > 0


def test_what_was_seen_before_a_capture_is_scanned_in_it():
    """Even within one step: replays run without what came before."""
    model = Net().to(DEVICE)
    x = normal(8, 4)
    monitor = nanscan.enable(model, action="log")
    monitor.step()  # from here on steps end by hand: warm-up and capture are in the same one
    with torch.no_grad():
        replay = capture(lambda: model(x))
        monitor.step()
        x[2, 1] = NAN
        replay()
        monitor.step()
    monitor.flush()
    assert "Net input[0]" in [str(finding.site) for finding in monitor.findings]


def test_replays_without_the_host_count_as_one_step():
    model = Net().to(DEVICE)
    x = normal(8, 4)
    monitor = nanscan.enable(model, action="log")
    with torch.no_grad():
        replay = capture(lambda: model(x))
        monitor.step()
        monitor.flush()
        for _ in range(5):
            replay()
        monitor.step()
    assert monitor.flush() == []
    output = next(node for node in monitor._table.nodes if str(node.site) == "fc1 output")
    assert monitor.history(output.site)["calls"][-1] == 5


def test_a_captured_check():
    x = normal(5000)
    results = []
    replay = capture(lambda: results.append(nanscan.check(x)))
    if not DRY:
        assert not results[-1].ready()
        with pytest.raises(RuntimeError, match="CUDA graph that has not run since"):
            results[-1].is_finite  # noqa: B018
    x[4321] = -INF
    replay()
    assert (results[-1].neginf_count, results[-1].first_nonfinite) == (1, (4321,))
    assert nanscan.check(x).neginf_count == 1


def test_captured_scans_of_a_table():
    table = _C.Table()
    rows = [table.add_row() for _ in range(4)]
    x, y = normal(5000), normal(60, 70)

    def scan():
        table.scan(x, rows[0])
        table.scan(y.t(), rows[1])
        assert table.scan_many([x, y], rows[2:]) == []

    replay = capture(scan)
    Step(table).rows()
    for step in range(20):
        x[step], y[step, step] = NAN, INF
        for _ in range(step % 3 + 1):
            replay()
        found = Step(table).rows()
        assert found["calls"].tolist() == [step % 3 + 1] * 4
        assert (found["nan"] / found["calls"]).tolist() == [step + 1, 0, step + 1, 0]
        assert (found["posinf"] / found["calls"]).tolist() == [0, step + 1, 0, step + 1]


@needs_gpu
def test_polling_and_checking_in_another_thread_does_not_break_a_capture():
    """torch's default mode forbids unsafe calls to every thread of the process."""
    model = Net().to(DEVICE)
    x = normal(8, 4)
    monitor = nanscan.enable(model, action="log")
    with torch.no_grad():
        model(x)
    stop, errors = threading.Event(), []
    other = cuda.Stream()

    def poll():
        try:
            while not stop.is_set():
                monitor.poll()
                with cuda.stream(other):
                    nanscan.check(x).ready()
        except BaseException as error:  # noqa: BLE001 - shown below
            errors.append(error)

    thread = threading.Thread(target=poll)
    with torch.no_grad():
        side = cuda.Stream()
        side.wait_stream(cuda.current_stream())
        with cuda.stream(side):
            model(x)
        cuda.synchronize()
        graph = cuda.CUDAGraph()
        thread.start()
        try:
            with cuda.graph(graph):
                for _ in range(20):
                    model(x)
        finally:
            stop.set()
            thread.join()
    graph.replay()
    cuda.synchronize()
    assert errors == []


# -- streams, devices, threads ---------------------------------------------------------------------


def test_scans_of_two_streams_in_steps_that_nobody_waits_for():
    streams = [cuda.Stream(), cuda.Stream()]
    table = _C.Table()
    rows = [table.add_row() for _ in range(4)]
    tensors = [set_nan(normal(1 << 18)), normal(1000)]
    cuda.synchronize()
    steps = []
    for _ in range(50):
        for number, stream in enumerate(streams):
            with cuda.stream(stream):
                for i, x in enumerate(tensors):
                    table.scan(x, rows[2 * number + i])
        steps.append(Step(table))
    for step in steps:
        found = step.rows()
        assert found["calls"].tolist() == [1] * 4
        assert found["nan"].tolist() == [1, 0, 1, 0]


def test_hooks_on_a_stream_of_its_own_and_steps_on_another():
    model, stream = Net().to(DEVICE), cuda.Stream()
    good, bad = normal(8, 4), set_nan(normal(8, 4))
    monitor = nanscan.enable(model, action="log")
    monitor.step()
    cuda.synchronize()
    with torch.no_grad():
        for step in range(30):
            with cuda.stream(stream):
                model(bad if step in (7, 20) else good)
            monitor.step()
    monitor.flush()
    found = [f for f in monitor.findings if f.verdict in FAULTS and str(f.site) == "Net input[0]"]
    assert [finding.step for finding in found] == [8, 21]


def test_the_other_device_is_current():
    if cuda.device_count() < 2:
        pytest.skip("there is only one CUDA device")
    model = Net().to("cuda:1")
    x = set_nan(torch.randn(8, 4, device="cuda:1"))
    torch.cuda.set_device(0)
    result = nanscan.check(x)
    both = nanscan.check_many([x, x.to("cuda:0"), x.cpu()])
    monitor = nanscan.enable(model, action="log")
    with torch.no_grad():
        model(x)
    assert torch.cuda.current_device() == 0
    assert [r.nan_count for r in (result, *both)] == [1, 1, 1, 1]
    monitor.flush()
    assert str(monitor.findings[0].site) == "Net input[0]"
    assert torch.cuda.current_device() == 0


def test_host_and_device_in_one_table():
    table = _C.Table()
    row, other = table.add_row(), table.add_row()
    x = set_nan(torch.randn(500))
    table.scan(x, row)
    table.scan(x.to(DEVICE), row)
    table.scan(torch.zeros(7), other)
    found = Step(table).rows()
    assert found["calls"].tolist() == [2, 1]
    assert found["nan"].tolist() == [2, 0]


class Scanned(torch.autograd.Function):
    """Hands a gradient on and scans it, in the thread in which autograd runs."""

    @staticmethod
    def forward(ctx, x, seen):
        ctx.seen = seen
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.seen(grad)
        return grad, None


@pytest.mark.parametrize("on_side_stream", [False, True])
def test_scans_in_the_threads_of_autograd(on_side_stream):
    table = _C.Table()
    row = table.add_row()
    threads, results = set(), []

    def seen(grad):
        threads.add(threading.get_ident())
        results.append(nanscan.check(grad))
        table.scan(grad, row)

    x = normal(3000).requires_grad_()
    weight = set_nan(normal(3000))
    cuda.synchronize()
    side = cuda.Stream()
    for _ in range(10):
        with cuda.stream(side if on_side_stream else cuda.current_stream()):
            y = Scanned.apply(x, seen)
            (y * weight).sum().backward()
    assert [result.nan_count for result in results] == [1] * 10
    assert [result.first_nonfinite for result in results] == [(1,)] * 10
    assert Step(table).rows()["nan"].tolist() == [10]
    assert DRY or threading.get_ident() not in threads


def test_many_threads_at_once():
    """Each with its own stream; all with one table."""
    table = _C.Table()
    threads, errors = [], []
    rows = [table.add_row() for _ in range(8)]

    def work(number):
        try:
            x = normal(10_000 + number)
            x[number] = NAN
            cuda.synchronize()
            with cuda.stream(cuda.Stream()):
                for _ in range(200):
                    table.scan(x, rows[number])
                    assert nanscan.check(x).first_nonfinite == (number,)
            cuda.synchronize()
        except BaseException as error:  # noqa: BLE001 - shown below
            errors.append(error)

    for number in range(len(rows)):
        threads.append(threading.Thread(target=work, args=(number,)))
        threads[-1].start()
    for thread in threads:
        thread.join()
    assert errors == []
    found = Step(table).rows()
    assert found["calls"].tolist() == [200] * len(rows)
    assert found["nan"].tolist() == [200] * len(rows)
