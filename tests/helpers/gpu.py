"""What tests on a GPU share. With GPU_DRY=1 its place is taken by the CPU, to try the tests."""

import os
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from nanscan._data.finding import FAULTS
from nanscan._data.row import ROW

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


needs_gpu = pytest.mark.skipif(DRY, reason="only a GPU can do this")


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


def faults(findings):
    """(site, verdict) of what is wrong."""
    return [(str(f.site), f.verdict) for f in findings if f.verdict in FAULTS]


def training_step(model, optimizer, x):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
