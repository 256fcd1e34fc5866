"""The host never waits for a GPU: neither scans, nor steps, nor findings."""

import time

import pytest
import torch
from torch import nn

import nanscan
from helpers.cases import fields, reference
from helpers.gpu import (
    DEVICE,
    DRY,
    Step,
    Stream,
    cuda,
    needs_gpu,
    no_torch_sync,
    normal,
    training_step,
)
from helpers.models import (
    COMMON_KINDS,
    INF,
    NAN,
    SCOPES,
    Net,
    enable,
    set_nan,
    sgd,
)
from nanscan import _C, NonFiniteError

pytestmark = pytest.mark.cuda


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
    monitor = enable(scope, training.model, kinds=COMMON_KINDS)
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
    assert monitor.coverage().skipped == {}
    assert sum(site.endswith("exp_avg_sq") for site in monitor.coverage().sites) == 6


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


def test_raise_comes_from_a_later_step(host_never_waits):
    model = Net().to(DEVICE)
    optimizer = sgd(model)
    good, bad = normal(8, 4), set_nan(normal(8, 4))
    nanscan.enable(model, action="raise")
    for _ in range(2):
        training_step(model, optimizer, good)
    returned = []

    def two_more():
        with host_never_waits():
            training_step(model, optimizer, bad)
            returned.append(True)
        cuda.synchronize()
        training_step(model, optimizer, good)

    with pytest.raises(NonFiniteError) as caught:
        two_more()
    assert DRY or returned
    assert (caught.value.finding.step, str(caught.value.finding.site)) == (2, "Net input[0]")


@needs_gpu
def test_flush_raises_at_once(host_never_waits):
    model = Net().to(DEVICE)
    optimizer = sgd(model)
    monitor = nanscan.enable(model, action="raise")
    training_step(model, optimizer, normal(8, 4))
    monitor.flush()
    bad = set_nan(normal(8, 4))
    with host_never_waits() as stream:
        training_step(model, optimizer, bad)
    with pytest.raises(NonFiniteError) as caught:
        monitor.flush()
    stream.assert_idle()
    assert caught.value.finding.step == 1
