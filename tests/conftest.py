"""Fixtures that several test files share."""

import pytest
import torch

from nanscan import _C


def _why_no_cuda() -> str | None:
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    if _C.scan_once(torch.zeros(1, device="cuda"), False) == _C.OTHER_DEVICE:
        return "this version of nanscan has no CUDA kernels"
    return None


@pytest.fixture(scope="session", params=["cpu", "cuda"])
def device(request):
    if request.param == "cuda" and (reason := _why_no_cuda()):
        pytest.skip(reason)
    return request.param


@pytest.fixture
def num_threads():
    """torch.set_num_threads, undone after the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def use_variant():
    """_C.use_variant, undone after the test."""
    before = _C.variant()
    yield _C.use_variant
    _C.use_variant(before)
