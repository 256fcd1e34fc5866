"""Fixtures that several test files share."""

import gc
import os

import pytest
import torch

from helpers import fake_cuda
from helpers.models import no_trace
from nanscan import _C
from nanscan._scan import cuda
from nanscan._scan.dispatch import prepare

# Set before nanscan looks for a driver, which is once a process.
if fake_cuda.wanted():
    os.environ.setdefault("NANSCAN_CUDA_DRIVER", str(fake_cuda.library()))


def pytest_configure(config):
    config.addinivalue_line("markers", "host_only(reason): not with tensors on CUDA devices")


# They compile, or wait for other processes. Started last, they would be waited for by all.
SLOW = {"test_cuda_fake_suite.py", "test_simt.py", "test_packaging.py", "test_cli.py"}


def pytest_collection_modifyitems(config, items):
    """Slow files come first.

    On the recording driver: not what is host_only; of files that choose a device, what does.
    """
    items.sort(key=lambda item: item.path.name not in SLOW)
    if not fake_cuda.wanted():
        return

    def chooses(item):
        return "device" in item.fixturenames

    choosy = {item.path for item in items if chooses(item)}
    left_out = {
        item
        for item in items
        if item.get_closest_marker("host_only") or (item.path in choosy and not chooses(item))
    }
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture(autouse=True, scope="module")
def what_was_there_before():
    """Kept out of every later gc.collect(), which would walk all of torch: 0.1 to 0.2 s a call.

    What a test makes is collected as ever, and found by gc.get_objects().
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def recording_driver():
    """In a process on the recording driver each test sees every CPU tensor on a CUDA device."""
    if not fake_cuda.wanted():
        yield None
        return
    cuda = fake_cuda.load()
    cuda.use_device(0)
    cuda.reset()
    before = cuda.held()
    with cuda.tensors_on_device():
        yield cuda
    cuda.reset()
    cuda.progress()
    after = cuda.held()
    assert cuda.violations() == []
    assert (after.context_depth, after.capture_mode) == (before.context_depth, 0)


def _why_no_cuda() -> str | None:
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    if not prepare(torch.zeros(1, device="cuda")):
        return f"there are no kernels for it: {cuda.why_not(0)}"
    return None


@pytest.fixture(scope="session", params=["simt"] if fake_cuda.wanted() else ["cpu", "cuda"])
def device(request):
    """A device of torch. "simt": its CPU, whose tensors are CUDA tensors to nanscan."""
    if request.param == "cuda" and (reason := _why_no_cuda()):
        pytest.skip(reason)
    return "cpu" if request.param == "simt" else request.param


@pytest.fixture
def num_threads():
    """torch.set_num_threads, undone after the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def one_thread(num_threads):
    num_threads(1)


@pytest.fixture
def seeded_and_without_trace():
    """The test is seeded, and checked for hooks left behind."""
    torch.manual_seed(0)
    with no_trace():
        yield


@pytest.fixture
def use_variant():
    """_C.use_variant, undone after the test."""
    before = _C.variant()
    yield _C.use_variant
    _C.use_variant(before)
