"""What only a GPU can show: that scans on it are right, that the host never waits, graphs, streams.

GPU_DRY=1 runs what can be run of this without one, on the CPU, to find mistakes in the tests
themselves; with NANSCAN_TEST_FAKE_CUDA=1 too, on the recording driver. NANSCAN_NEEDS_GPU=1 makes it
a failure that there is no usable GPU.
"""

import copy
import gc
import os
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import cases
import numpy as np
import pytest
import torch
from cases import Patterns, fields, name_of, real_dtype, reference
from models import (
    INF,
    NAN,
    SCOPES,
    Do,
    Gap,
    Net,
    enable_scope,
    seeded_and_without_trace,  # noqa: F401 - used by every test
    set_nan,
    sgd,
    verdicts,
)
from torch import nn

import nanscan
from nanscan import _C, NonFiniteError, _demo
from nanscan._data.finding import FAULTS
from nanscan._data.row import ROW
from nanscan._scan import cuda

pytestmark = pytest.mark.cuda

DRY = os.environ.get("GPU_DRY") == "1"
DEVICE = "cpu" if DRY else "cuda"
BUSY = 0.4  # seconds for which a stream is kept busy
FREE = 8 << 30  # bytes that the largest tensors need


class DryEvent:
    def record(self, stream=None):
        pass

    def query(self):
        return True


class DryStream:
    def wait_stream(self, other):
        pass


@contextmanager
def dry_stream(stream):
    yield


cuda = torch.cuda
if DRY:
    cuda = SimpleNamespace(
        Event=DryEvent,
        Stream=DryStream,
        stream=dry_stream,
        current_stream=DryStream,
        device_count=lambda: 1,
        synchronize=lambda: None,
        mem_get_info=lambda: (FREE, FREE),
        memory_stats=dict,
        set_sync_debug_mode=lambda mode: None,
        get_rng_state=torch.get_rng_state,
    )


# -- the device and what keeps it busy ---------------------------------------------------------


def _why_unusable() -> str | None:
    if DRY:
        return None
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    if not cuda.prepare(0):
        return f"nanscan has no kernels for cuda:0: {cuda.why_not(0)}"
    return None


@pytest.fixture(scope="module", autouse=True)
def usable_gpu():
    if reason := _why_unusable():
        (pytest.fail if os.environ.get("NANSCAN_NEEDS_GPU") == "1" else pytest.skip)(reason)


@pytest.fixture(autouse=True)
def context_survives(usable_gpu):
    """After an error that ends the CUDA context every later test of the process would fail."""
    yield
    try:
        cuda.synchronize()
    except RuntimeError as error:
        print(f"the CUDA context is lost: {error}", file=sys.__stderr__, flush=True)
        if "PYTEST_XDIST_WORKER" in os.environ:
            os._exit(1)  # the rest goes to another worker
        pytest.exit(f"the CUDA context is lost: {error}", 1)


needs_gpu = pytest.mark.skipif(DRY, reason="only a GPU can do this")


@pytest.fixture(scope="module")
def sleep_cycles(usable_gpu):
    """What torch.cuda._sleep must be given for BUSY seconds."""
    if DRY:
        return 0
    rates = []
    for cycles in (100_000_000, 20_000_000, 20_000_000):  # the first one wakes the clocks
        start, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        start.record()
        cuda._sleep(cycles)
        end.record()
        end.synchronize()
        rates.append(cycles / (start.elapsed_time(end) / 1000))
    return int(max(rates) * BUSY)


@contextmanager
def no_torch_sync():
    """torch raises at every synchronisation of its own that it knows of."""
    cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        cuda.set_sync_debug_mode("default")


class Stream:
    """The current stream while a long kernel occupies it."""

    def __init__(self, cycles):
        self.done = cuda.Event()
        if not DRY:
            cuda._sleep(cycles)
            self.done.record()

    def assert_busy(self):
        assert DRY or not self.done.query(), "the host waited for the device"

    def assert_idle(self):
        assert self.done.query(), "the host did not wait for the device"


@pytest.fixture
def host_never_waits(sleep_cycles):
    """A context whose body must return while its stream is still busy with what came before."""

    @contextmanager
    def context():
        cuda.synchronize()
        with no_torch_sync():
            stream = Stream(sleep_cycles)
            yield stream
            stream.assert_busy()

    yield context
    cuda.synchronize()


class Step:
    """A snapshot of a raw table, perhaps under way."""

    def __init__(self, table):
        self.memory = np.empty((len(table), ROW.itemsize), np.uint8)
        self.order = np.empty(len(table), np.uint64)
        _, self.arrival = table.snapshot(self.memory, self.order)

    def ready(self):
        return self.arrival is None or self.arrival.ready()

    def rows(self):
        if self.arrival is not None:
            self.arrival.wait()
            self.arrival.merge_into(self.memory, self.order)
            self.arrival = None
        return self.memory.view(ROW)[:, 0]


def normal(*shape, dtype=torch.float32):
    return torch.randn(shape, device=DEVICE).to(dtype)


def capture(function):
    """Records what a function sends to the device; returns what sends it again."""
    if DRY:
        return function
    side = cuda.Stream()
    side.wait_stream(cuda.current_stream())
    with cuda.stream(side):
        for _ in range(2):
            function()
    cuda.current_stream().wait_stream(side)
    graph = cuda.CUDAGraph()
    with cuda.graph(graph):
        function()
    return graph.replay


# -- right results ---------------------------------------------------------------------------------


def samples(dtype):
    """(name, tensor) of every layout with every content."""
    for layout, (_, dtypes) in cases.LAYOUTS.items():
        if dtype in dtypes and not layout.startswith("misaligned"):
            for content, x in cases.build(dtype, layout, DEVICE).items():
                yield f"{layout}, {content}", x


@cases.each_dtype
def test_every_layout_and_content_by_every_way_to_scan(dtype):
    tensors = dict(samples(dtype))
    expected = {name: fields(reference(x)) for name, x in tensors.items()}
    found = {name: fields(nanscan.check(x)) for name, x in tensors.items()}
    assert found == expected
    found = {name: fields(nanscan.check(x, moments=True)) for name, x in tensors.items()}
    assert found == expected
    found = {name: fields(result) for name, result in nanscan.check_many(tensors).items()}
    assert found == expected

    plain = {n: x for n, x in tensors.items() if not x.is_neg() and not x.is_conj()}
    for scan in (one_by_one, at_once):
        table = _C.Table()
        for _ in plain:
            table.add_row()
        scan(table, list(plain.values()))
        rows = Step(table).rows()
        results = zip(plain, (nanscan.ScanResult(row, (), dtype) for row in rows), strict=True)
        names = [name for name in cases.FIELDS if name != "shape"]
        found = {name: {key: getattr(row, key) for key in names} for name, row in results}
        assert found == {name: {key: expected[name][key] for key in names} for name in plain}


def one_by_one(table, tensors):
    assert [table.scan(x, row) for row, x in enumerate(tensors)] == [0] * len(tensors)


def at_once(table, tensors):
    assert table.scan_many(tensors, list(range(len(tensors)))) == []


@pytest.mark.parametrize("size", [1 << 20, (1 << 24) + 7] if not DRY else [4097])
@pytest.mark.parametrize("offset", [0, 1])
@cases.each_real_dtype
def test_large_tensors_with_bad_values_anywhere(dtype, offset, size):
    """Enough for every thread of the device, several rounds each."""
    rng = np.random.default_rng(size + offset)
    patterns = Patterns(dtype)
    memory = normal(offset + size, dtype=dtype)
    clean = memory[offset:]
    low, high = clean.float().aminmax() if dtype.itemsize < 8 else clean.aminmax()
    result = nanscan.check(clean)
    assert (result.is_finite, result.numel) == (True, size)
    assert (result.min, result.max) == (low.item(), high.item())
    for count in (1, 2, 50):
        x = memory.clone()[offset:]
        places = sorted(set(rng.integers(0, size, count).tolist()))
        for place in places:
            cases.plant(x, place, patterns.nans[0])
        for result in (nanscan.check(x), nanscan.check_many([x, x])[1]):
            assert (result.nan_count, result.nonfinite_count) == (len(places), len(places))
            assert result.first_nonfinite == (places[0],)
            assert result.min >= low.item()
            assert result.max <= high.item()


@pytest.mark.parametrize(
    "view",
    [
        pytest.param(lambda b: b.view(-1, 4096)[:, :3000], id="chunked"),
        pytest.param(lambda b: b.view(-1, 4096)[:, 5:3001], id="chunked, odd"),
        pytest.param(lambda b: b.view(8, 64, 64, -1).permute(0, 3, 1, 2), id="channels_last"),
        pytest.param(lambda b: b.view(1024, -1).t(), id="transposed"),
        pytest.param(lambda b: b[1::3], id="stepped"),
        pytest.param(lambda b: b.view(-1, 1, 64).expand(-1, 5, -1), id="expanded"),
    ],
)
@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.float32, torch.float64, torch.float8_e5m2], ids=name_of
)
def test_large_layouts(dtype, view):
    x = view(normal(1 << 20, dtype=dtype))
    cases.assert_same_as_reference(x)
    for place in (x.numel() // 3, x.numel() // 3 + 4099, -1):
        cases.plant(x, place, Patterns(dtype).bad[-1])
        cases.assert_same_as_reference(x)


@pytest.mark.parametrize("bad_every", [1, 3, 5000, None], ids=lambda n: f"bad every {n}")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=name_of)
def test_results_are_bitwise_the_same_every_time(dtype, bad_every):
    x = normal((1 << 22) + 3, dtype=dtype)
    if bad_every:
        x[::bad_every] = NAN
    first = fields(nanscan.check(x))
    results = [nanscan.check(x) for _ in range(50)] + nanscan.check_many([x] * 50)
    assert all(fields(result) == first for result in results)


def test_a_cleared_bad_value_is_gone():
    """Nothing stays behind in rows and results that are used again."""
    x = normal(1000)
    table = _C.Table()
    row = table.add_row()
    for step in range(600):  # more than there are results in one piece of memory
        x[step % 1000] = NAN if step % 3 == 0 else 1.0
        table.scan(x, row)
        bad = int(step % 3 == 0)
        result = nanscan.check(x)
        assert (result.nan_count, result.first_nonfinite) == (bad, (step,) if bad else None)
        assert Step(table).rows()[row]["nan"] == bad
        x[step % 1000] = 1.0


def test_calls_of_one_row_merge():
    table = _C.Table()
    row = table.add_row()
    x, y = normal(5000), normal(70, 3)
    y[60, 2] = NAN
    for tensor in (x, y, x):
        table.scan(tensor, row)
    found = Step(table).rows()[row]
    assert (found["calls"], found["elements"], found["nan"]) == (3, 10_210, 1)
    assert (found["first_bad_call"], ~found["first_bad"]) == (2, 182)


def test_tickets_tell_the_order_of_execution():
    table = _C.Table()
    rows = [table.add_row() for _ in range(40)]
    order = torch.randperm(len(rows)).tolist()
    for row in order:
        table.scan(torch.full((3000 + row,), NAN, device=DEVICE), row)
    tickets = Step(table).rows()["ticket"]
    assert np.argsort(tickets).tolist() == order


def test_a_table_of_more_rows_than_one_allocation_holds():
    """16,384 rows do not move when there are more."""
    table = _C.Table()
    values = normal(16_500, 8)
    bad = [0, 1, 511, 512, 16_383, 16_384, 16_385, 16_499]
    values[bad, 3] = INF
    tensors = list(values.unbind())
    before = 100
    rows = [table.add_row() for _ in range(before)]
    assert table.scan_many(tensors[:before], rows) == []
    while len(rows) < len(tensors):
        rows.append(table.add_row())
    assert table.scan_many(tensors[before:], rows[before:]) == []
    for _ in range(2):
        found = Step(table).rows()
        assert (found["calls"] == 1).all()
        assert (found["elements"] == 8).all()
        assert np.flatnonzero(found["posinf"]).tolist() == bad
        assert set((~found["first_bad"][bad]).tolist()) == {3}
        assert table.scan_many(tensors, rows) == []


# -- very large ------------------------------------------------------------------------------------


@pytest.fixture
def much_memory():
    gc.collect()
    if not DRY:
        torch.cuda.empty_cache()
        if (free := cuda.mem_get_info()[0]) < FREE:
            pytest.skip(f"needs {FREE >> 30} GiB of device memory, {free >> 30} are free")
    yield
    gc.collect()
    if not DRY:
        torch.cuda.empty_cache()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e5m2], ids=name_of)
def test_more_than_2_31_elements(dtype, much_memory):
    edge = 1 << (31 if not DRY else 16)
    n = edge + 4100
    patterns = Patterns(dtype)
    x = torch.full((n,), 1.5, dtype=torch.float16, device=DEVICE).to(dtype)
    result = nanscan.check(x)
    assert (result.numel, result.is_finite, result.min, result.max) == (n, True, 1.5, 1.5)
    cases.plant(x, n - 1, patterns.infs[0])
    assert nanscan.check(x).first_nonfinite == (n - 1,)
    cases.plant(x, edge + 1, patterns.nans[0])
    for result in (nanscan.check(x), nanscan.check_many([x, x])[0]):
        assert (result.nan_count, result.posinf_count) == (1, 1)
        assert result.first_nonfinite == (edge + 1,)
    turned = x.view(4, n // 4).t()
    result = nanscan.check(turned)
    assert (result.nan_count, result.posinf_count, result.numel) == (1, 1, n)
    row, column = divmod(edge + 1, n // 4)
    assert result.first_nonfinite == (column, row)
    result = nanscan.check(x.view(2, n // 2)[:, 1:])
    assert (result.nan_count, result.posinf_count, result.numel) == (1, 1, n - 2)
    assert result.first_nonfinite == (1, edge + 1 - n // 2 - 1)
    stepped = nanscan.check(x[1::2])
    assert (stepped.nan_count, stepped.posinf_count, stepped.numel) == (1, 1, n // 2)


def test_a_stride_of_0_counts_past_2_32():
    x = torch.tensor([1.0, NAN, 2.0], device=DEVICE).expand(1 << 33, 3)
    for moments in (False, True):
        result = nanscan.check(x, moments=moments)
        assert (result.numel, result.nan_count) == (3 << 33, 1 << 33)
        assert result.first_nonfinite == (0, 1)


# -- the host never waits --------------------------------------------------------------------------


def some_tensors():
    x = normal(60_000, dtype=torch.float16)
    x[59_000] = NAN
    return [
        *(x, x.view(200, 300).t(), x[::2], x.view(100, 600)[:, 3:500], x[:50].expand(9, 50)),
        *(x.float(), x.double(), x.to(torch.complex64), x.to(torch.float8_e5m2), x[:0]),
    ]


def test_checks_return_before_the_device_is_done(host_never_waits):
    tensors = some_tensors()
    expected = [fields(reference(x)) for x in tensors]

    def checks():
        results = [nanscan.check(x) for x in tensors]
        results += [nanscan.check(x, moments=True) for x in tensors]
        return results + nanscan.check_many(tensors)

    assert [fields(result) for result in checks()] == 3 * expected
    with host_never_waits() as stream:
        results = checks()
        ready = [result.ready() for result in results]
        assert DRY or ready == [result.shape == (0,) for result in results]
        stream.assert_busy()
    assert results[0].nan_count == 1
    stream.assert_idle()
    assert [fields(result) for result in results] == 3 * expected
    assert all(result.ready() for result in results)


def test_reading_waits_for_the_scan_only(host_never_waits):
    x = set_nan(normal(1000))
    nanscan.check(x).is_finite  # noqa: B018 - loads what is loaded once
    with host_never_waits() as stream:
        result = nanscan.check(x)
    assert DRY or not result.ready()
    assert repr(result).startswith("ScanResult(float32 [1000], numel=1000, nan_count=1,")
    stream.assert_idle()
    assert result.ready()


def test_ready_turns_true_without_anyone_waiting(host_never_waits):
    x = normal(1000)
    nanscan.check(x).is_finite  # noqa: B018
    with host_never_waits():
        result = nanscan.check(x)
        assert DRY or not result.ready()
    end = time.monotonic() + 30
    while not result.ready() and time.monotonic() < end:
        time.sleep(0.01)
    assert result.ready()
    assert result.is_finite


def test_tables_return_before_the_device_is_done(host_never_waits):
    tensors = some_tensors()
    table = _C.Table()
    rows = [table.add_row() for _ in range(3 * len(tensors))]
    first, second, third = (rows[i::3] for i in range(3))

    def scan_all():
        for i, x in enumerate(tensors):
            assert table.scan(x, first[i]) == 0
            assert table.visit(x, second[i]) == second[i]
        assert table.scan_many(tensors, third) == []
        return Step(table)

    expected = [fields(reference(x))["nan_count"] for x in tensors for _ in range(3)]
    for step in [scan_all(), scan_all()]:  # both under way at once, so that memory is there for two
        assert step.rows()["nan"].tolist() == expected
    with host_never_waits() as stream:
        steps = [scan_all(), scan_all()]
        assert DRY or not any(step.ready() for step in steps)
    found = steps[0].rows()
    stream.assert_idle()
    assert found["nan"].tolist() == expected
    assert steps[1].rows()["nan"].tolist() == expected


ALL_KINDS = ("input", "output", "grad", "param", "state")


class Training:
    """A model with AdamW and its own input."""

    def __init__(self):
        layers = nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64), nn.Dropout(0.1), nn.Linear(64, 8)
        self.model = nn.Sequential(*layers).to(DEVICE)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-3)
        self.x, self.target = normal(32, 64), normal(32, 8)

    def step(self):
        self.optimizer.zero_grad()
        nn.functional.mse_loss(self.model(self.x), self.target).backward()
        self.optimizer.step()


@SCOPES
def test_training_with_hooks_never_waits(scope, host_never_waits, sleep_cycles):
    training = Training()
    monitor = enable_scope(scope, training.model, kinds=ALL_KINDS)
    for _ in range(3):
        training.step()
    cuda.synchronize()
    with no_torch_sync():
        for _ in range(20):
            training.step()
            assert monitor.poll() == []
    Stream(sleep_cycles)  # so that memory is there for three steps under way at once
    for _ in range(3):
        training.step()
    monitor.flush()
    with host_never_waits():
        for _ in range(3):
            training.step()
            assert monitor.poll() == []
    assert monitor.flush() == []
    steps = monitor.history(monitor._table.nodes[0].site)["step"].tolist()
    assert steps == list(range(29 - len(steps), 29))
    assert monitor.coverage()["skipped"] == {}
    assert sum(site.endswith("exp_avg_sq") for site in monitor.coverage()["sites"]) == 6


def test_a_bad_step_is_found_without_waiting(host_never_waits):
    training = Training()
    monitor = nanscan.enable(training.model, action="log")
    for _ in range(3):
        training.step()
    monitor.flush()
    with host_never_waits():
        training.x[3, 5] = INF
        training.step()
        training.x[3, 5] = 0.0
    cuda.synchronize()
    found = monitor.poll()
    assert (found[0].step, str(found[0].site)) == (3, "Sequential input[0]")
    assert found[0].stats.first_nonfinite == (3, 5)


# -- memory ----------------------------------------------------------------------------------------


def test_10_000_scans_allocate_nothing():
    x = normal(4096, dtype=torch.bfloat16)
    views = [x, x.view(64, 64).t(), x[::2]]
    table = _C.Table()
    rows = [table.add_row() for _ in views]

    def scan(times):
        for i in range(times):
            for view, row in zip(views, rows, strict=True):
                table.scan(view, row)
                nanscan.check(view)  # and let go, perhaps before it is done
            if i % 10 == 0:
                Step(table)
        cuda.synchronize()

    scan(2000)
    before = cuda.memory_stats()
    free_before = cuda.mem_get_info()[0]
    scan(10_000 if not DRY else 1000)
    after = cuda.memory_stats()
    for name in ("allocation.all.allocated", "segment.all.allocated", "allocated_bytes.all.peak"):
        assert DRY or after[name] == before[name]
    assert abs(cuda.mem_get_info()[0] - free_before) <= 4 << 20


def test_closed_tables_give_their_memory_back():
    x = normal(100)

    def use():
        table = _C.Table()
        row = table.add_row()
        table.scan(x, row)
        Step(table).rows()

    for _ in range(20):
        use()
    gc.collect()
    free_before = cuda.mem_get_info()[0]
    for _ in range(200):  # 2 MiB each
        use()
    gc.collect()
    assert cuda.mem_get_info()[0] >= free_before - (16 << 20)


def faults(findings):
    """(site, verdict) of what is wrong."""
    return [(str(f.site), f.verdict) for f in findings if f.verdict in FAULTS]


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


# -- what a user sees ------------------------------------------------------------------------------


def infer_with_a_bad_batch(device, monitor_of):
    model = Net().to(device)
    monitor = monitor_of(model)
    with torch.no_grad():
        for step in range(5):
            x = torch.randn(6, 4)
            model((set_nan(x) if step == 3 else x).to(device))
    return monitor


def _train(device, monitor_of, model, spoil=lambda model, x, step: None, dtype=torch.float32):
    model = model.to(device, dtype)
    optimizer = sgd(model)
    monitor = monitor_of(model)
    for step in range(5):
        x = torch.randn(6, 4).to(dtype)
        spoil(model, x, step)
        optimizer.zero_grad()
        model(x.to(device)).square().mean().backward()
        optimizer.step()
    return monitor


def train_with_a_bad_batch(device, monitor_of):
    def spoil(model, x, step):
        if step == 2:
            x[1, 1] = NAN

    return _train(device, monitor_of, Net(), spoil)


def train_with_an_inf_in_a_weight(device, monitor_of):
    def spoil(model, x, step):
        if step == 2:
            model.fc2.weight.data[1, 2] = INF

    return _train(device, monitor_of, Net(), spoil)


def train_with_a_division_by_zero(device, monitor_of):
    return _train(device, monitor_of, Gap(lambda x: x / 0))


def train_with_an_overflow_of_half(device, monitor_of):
    def spoil(model, x, step):
        if step == 2:
            model.fc1.weight.data.fill_(3000)
            x.fill_(8)

    return _train(device, monitor_of, Net(), spoil, torch.float16)


@SCOPES
@pytest.mark.parametrize(
    ("scenario", "first"),
    [
        (infer_with_a_bad_batch, (3, "Net input[0]")),
        (train_with_a_bad_batch, (2, "Net input[0]")),
        (train_with_an_inf_in_a_weight, (2, "fc2 output")),
        (train_with_a_division_by_zero, (0, "fc2 input[0]")),
        (train_with_an_overflow_of_half, (2, "fc1 output")),
    ],
    ids=lambda value: value.__name__ if callable(value) else None,
)
def test_findings_are_those_of_the_cpu(scenario, first, scope):
    found = []
    for device in ("cpu", DEVICE):
        torch.manual_seed(0)
        monitor = scenario(device, lambda model: enable_scope(scope, model, action="log"))
        monitor.flush()
        nanscan.disable()
        found.append(verdicts(monitor))
    on_cpu, on_device = found
    assert on_device[0][:2] == first
    assert sorted(on_device) == sorted(on_cpu)


def test_the_first_bad_gradient_is_the_one_that_backward_made_first():
    """Although all gradients are scanned by one launch, and small ones are done sooner."""
    layers = nn.Linear(4, 8), nn.Linear(8, 512), Do(lambda x: (x * 0).sqrt()), nn.Linear(512, 4)
    model = nn.Sequential(*layers).to(DEVICE)
    optimizer = sgd(model)
    monitor = nanscan.enable(model, action="log")
    _training_step(model, optimizer, normal(6, 4))
    monitor.flush()
    gradients = [str(f.site) for f in monitor.findings if f.site.kind == "grad"]
    assert gradients[0] == "1.weight grad"


def _training_step(model, optimizer, x):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def test_raise_comes_from_a_later_step(host_never_waits):
    model = Net().to(DEVICE)
    optimizer = sgd(model)
    good, bad = normal(8, 4), set_nan(normal(8, 4))
    nanscan.enable(model, action="raise")
    for _ in range(2):
        _training_step(model, optimizer, good)
    returned = []

    def two_more():
        with host_never_waits():
            _training_step(model, optimizer, bad)
            returned.append(True)
        cuda.synchronize()
        _training_step(model, optimizer, good)

    with pytest.raises(NonFiniteError) as caught:
        two_more()
    assert DRY or returned
    assert (caught.value.finding.step, str(caught.value.finding.site)) == (2, "Net input[0]")


@needs_gpu
def test_flush_raises_at_once(host_never_waits):
    model = Net().to(DEVICE)
    optimizer = sgd(model)
    monitor = nanscan.enable(model, action="raise")
    _training_step(model, optimizer, normal(8, 4))
    monitor.flush()
    bad = set_nan(normal(8, 4))
    with host_never_waits() as stream:
        _training_step(model, optimizer, bad)
    with pytest.raises(NonFiniteError) as caught:
        monitor.flush()
    stream.assert_idle()
    assert caught.value.finding.step == 1


class Block(nn.Module):
    """Attention by plain operators, whose results are the same in every run."""

    def __init__(self, width=64, heads=4):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        batch, steps, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, steps, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / 4
        mixed = self.drop(scores.softmax(-1)) @ v
        x = x + self.drop(self.proj(mixed.transpose(1, 2).reshape(batch, steps, width)))
        return x + self.drop(self.mlp(self.norm2(x)))


def _transformer_training(*, watched, scope="model"):
    torch.manual_seed(7)
    model = nn.Sequential(Block(), Block(), nn.LayerNorm(64)).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    data = [(normal(4, 32, 64), normal(4, 32, 64)) for _ in range(4)]
    monitor = enable_scope(scope, model, kinds=ALL_KINDS) if watched else None
    losses = []
    for x, target in data:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    if monitor:
        assert monitor.flush() == []
        monitor.close()
    gradients = [p.grad for p in model.parameters()]
    return [*losses, *gradients, *model.parameters(), cuda.get_rng_state()]


@SCOPES
def test_hooks_change_no_bit(scope):
    without, again = (_transformer_training(watched=False) for _ in range(2))
    same = [torch.equal(a, b) for a, b in zip(without, again, strict=True)]
    assert all(same), "torch itself gives other results in each run"
    watched = _transformer_training(watched=True, scope=scope)
    assert all(torch.equal(a, b) for a, b in zip(without, watched, strict=True))


@SCOPES
def test_a_gradient_scaler_that_searches_its_scale_is_clean(scope):
    model = Net(16).to(DEVICE)
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**40, backoff_factor=2.0**-10)
    monitor = enable_scope(scope, model)
    for _ in range(8):
        with torch.autocast(DEVICE, torch.float16):
            loss = model(normal(8, 16)).float().square().mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    monitor.flush()
    assert scaler.get_scale() < 2.0**40, "no step was skipped: the test is void"
    assert monitor._step > 0
    assert faults(monitor.findings) == []


def test_the_demo(monkeypatch):
    pytest.importorskip("sklearn")
    net = _demo.Net
    monkeypatch.setattr(_demo, "Net", lambda: net().to(DEVICE))
    pixels = _demo.photographs().to(DEVICE)
    _, broken = _demo.train(pixels, torch.float16)
    first = next(f for f in broken.findings if f.verdict in FAULTS)
    assert (first.step, str(first.site), first.verdict) == (0, "fc1.weight param", "origin")
    assert "fc1.weight grad" in {str(site) for site, _ in first.given}
    _, repaired = _demo.train(pixels, torch.float32, scale=1 / 255)
    assert faults(repaired.findings) == []


def test_the_demo_is_diagnosed(monkeypatch):
    """What the optimizer held is looked at in time, although rows arrive later."""
    pytest.importorskip("sklearn")
    net = _demo.Net
    monkeypatch.setattr(_demo, "Net", lambda: net().to(DEVICE))
    _, broken = _demo.train(_demo.photographs().to(DEVICE), torch.float16)
    first = next(f for f in broken.findings if f.verdict in FAULTS)
    assert any("eps=1e-08 is 0 in float16" in cause.title for cause in first.causes)


def test_unusual_tensors_on_the_device():
    x = set_nan(normal(40, 50))
    assert nanscan.check(x.to_sparse()).nan_count == 1
    assert nanscan.check(torch._neg_view(x)).nan_count == 1
    assert nanscan.check(x.to(torch.complex64).conj()).nan_count == 1
    assert nanscan.check(nn.Parameter(x)).nan_count == 1
    assert nanscan.check(x[:0]).is_finite
    with pytest.raises(NonFiniteError, match="x is not finite: 1 NaN of 2,000"):
        nanscan.assert_finite(x, "x")
    with pytest.raises(TypeError, match=r"expected a floating-point tensor, got torch\.int64"):
        nanscan.check(torch.zeros(3, dtype=torch.int64, device=DEVICE))


# -- processes of their own ------------------------------------------------------------------------


def run_python(script, tmp_path, **environment):
    """Runs a script; its output, one line each, and its exit status."""
    path = tmp_path / "script.py"
    path.write_text(script)
    done = subprocess.run(
        [sys.executable, path],
        cwd=tmp_path,
        env={**os.environ, "DEVICE": DEVICE, **environment},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    print(done.stdout, done.stderr)
    return done.stdout.splitlines(), done.returncode


BY_NVRTC = """
from pathlib import Path
import torch, nanscan
from nanscan._scan import cuda
cuda.FATBIN = Path("there is none")
x = torch.ones(100_000, dtype=torch.float16, device="cuda")
x[77_777] = float("nan")
results = [nanscan.check(x), nanscan.check(x.view(100, 1000).t()), *nanscan.check_many([x, x])]
print(cuda.why_not(0) or "loaded")
print([result.nan_count for result in results], results[1].first_nonfinite)
"""


@needs_gpu
def test_kernels_that_nvrtc_makes(tmp_path):
    """And a second process finds them in the cache."""
    cache = tmp_path / "cache"
    for _ in range(2):
        lines, status = run_python(BY_NVRTC, tmp_path, NANSCAN_CACHE=str(cache))
        assert (lines, status) == (["loaded", "[1, 1, 1, 1] (777, 77)"], 0)
        assert len(list(cache.iterdir())) == 1


FIRST_IN_CAPTURE = """
import torch, nanscan
x = torch.ones(1000, device="cuda")
model = torch.nn.Linear(10, 10).cuda()
y = torch.ones(2, 10, device="cuda")
side = torch.cuda.Stream()
with torch.no_grad(), torch.cuda.stream(side):
    model(y)
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
monitor = nanscan.enable(model, action="log")
with torch.no_grad(), torch.cuda.graph(graph):
    result = nanscan.check(x)
    model(y)
x[5] = y[1, 3] = float("nan")
graph.replay()
monitor.step()
monitor.flush()
print(result.nan_count, monitor.findings[0].site)
"""


@needs_gpu
def test_a_capture_in_which_all_comes_first(tmp_path):
    """Kernels are loaded, memory is taken, parameters are swept, all amid the capture."""
    assert run_python(FIRST_IN_CAPTURE, tmp_path) == (["1 Linear input[0]"], 0)


STICKY = """
import sys
import torch, nanscan
from nanscan import _C
x = torch.ones(1000, device="cuda")
model = torch.nn.Linear(4, 4).cuda()
with torch.no_grad():
    monitor = nanscan.enable(model, action="log")
    monitor.step()
    model(torch.ones(2, 4, device="cuda"))
table = _C.Table()
row = table.add_row()
table.scan(x, row)
nanscan.check(x).is_finite
torch.cuda.synchronize()
torch._assert_async(torch.zeros((), dtype=torch.bool, device="cuda"))
calls = {
    "check": lambda: nanscan.check(x).is_finite,
    "check_many": lambda: nanscan.check_many([x, x])[0].is_finite,
    "assert_finite": lambda: nanscan.assert_finite(x),
    "scan": lambda: table.scan(x, row),
    "flush": monitor.flush,
}
for name, call in calls.items():
    try:
        call()
    except RuntimeError as error:
        print(name, error)
    else:
        print(name, "raised nothing")
print("the end", flush=True)
"""

STICKY_CONTROL = """
import torch
torch.ones(3, device="cuda")
torch._assert_async(torch.zeros((), dtype=torch.bool, device="cuda"))
try:
    torch.cuda.synchronize()
except RuntimeError:
    pass
"""


@needs_gpu
def test_an_error_that_ends_the_context(tmp_path):
    """Each call says so, and nothing hangs, at exit either."""
    lines, status = run_python(STICKY, tmp_path)
    assert [line.split()[0] for line in lines if "nanscan:" in line] == [
        *("check", "check_many", "assert_finite", "scan", "flush")
    ]
    assert all("CUDA_ERROR_" in line for line in lines if "nanscan:" in line)
    assert lines[-1] == "the end"
    if status != 0:  # is that torch alone?
        assert status == run_python(STICKY_CONTROL, tmp_path)[1]


FORK = """
import atexit, gc, os, sys, time
import torch, nanscan
from nanscan import _C
device = os.environ["DEVICE"]
x = torch.ones(1000, device=device)
model = torch.nn.Linear(4, 4).to(device)
monitor = nanscan.enable(action="log")
with torch.no_grad():
    model(torch.ones(2, 4, device=device))
table = _C.Table()
row = table.add_row()
table.scan(x, row)
pending = nanscan.check(x)
nanscan.check(x).is_finite

def in_child(work):
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        work()
        atexit._run_exitfuncs()  # what nanscan does at exit; CUDA's own end is not the matter
        sys.stdout.flush()
        os._exit(0)
    for _ in range(200):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            print("exit status", os.waitstatus_to_exitcode(status))
            return
        time.sleep(0.05)
    os.kill(child, 9)
    os.waitpid(child, 0)
    print("the child hung")

def on_the_host():
    print("child:", nanscan.check(torch.tensor([float("nan")])).nan_count)
    with torch.no_grad():
        torch.nn.Linear(4, 4)(torch.ones(2, 4))

def on_the_device():
    try:
        print("child:", nanscan.check(x).nan_count)
    except RuntimeError as error:
        print("child: RuntimeError")

def lets_go():
    global table, pending, monitor
    monitor.close()
    del table, pending, monitor
    gc.collect()
    print("child: let go")

def scans_into_the_table():
    try:
        table.scan(x, row)
        print("child: scanned")
    except RuntimeError as error:
        print("child: RuntimeError")

for work in (on_the_host, on_the_device, lets_go, scans_into_the_table):
    in_child(work)
x[5] = float("nan")
print("parent:", nanscan.check(x).nan_count, pending.is_finite, monitor.healthy)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_after_use(tmp_path):
    """A child scans host memory, is told when it tries the device, and ends; the parent goes on."""
    lines, status = run_python(FORK, tmp_path, OMP_NUM_THREADS="1")
    on_device = "child: RuntimeError" if not DRY else "child: 0"
    expected = ["child: 1", "exit status 0", on_device, "exit status 0"]
    expected += ["child: let go", "exit status 0"]
    expected += ["child: RuntimeError" if not DRY else "child: scanned", "exit status 0"]
    assert (lines, status) == ([*expected, "parent: 1 True True"], 0)


def test_complex_and_real_parts_agree():
    """A complex tensor counts its parts."""
    x = torch.view_as_complex(normal(3000, 2))
    x.real[5], x.imag[2999] = NAN, INF
    result = nanscan.check(x)
    assert (result.numel, result.nan_count, result.posinf_count) == (6000, 1, 1)
    assert result.first_nonfinite == (5,)
    assert real_dtype(result.dtype) == torch.float32
