"""Fixtures of what only a GPU can show: right scans, a host that never waits, graphs, streams.

GPU_DRY=1 runs what can be run of these tests without one, on the CPU, to find mistakes in the tests
themselves; with NANSCAN_TEST_FAKE_CUDA=1 too, on the recording driver. NANSCAN_NEEDS_GPU=1 makes it
a failure that there is no usable GPU.
"""

import os
import sys
from contextlib import contextmanager

import pytest
import torch

from helpers.gpu import BUSY, DRY, Stream, cuda, no_torch_sync
from nanscan._scan import cuda as kernels


def _why_unusable() -> str | None:
    if DRY:
        return None
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    if not kernels.prepare(0):
        return f"nanscan has no kernels for cuda:0: {kernels.why_not(0)}"
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


@pytest.fixture(autouse=True)
def _seeded_and_without_trace(seeded_and_without_trace):
    pass
