"""locate with tensors on a CUDA device: scans are launched and nothing waits until a step ends.

On the recording driver alone, and so in a process of its own: see test_cuda_fake_suite.py.
"""

import pytest
import torch
from torch import nn

import nanscan
from helpers import fake_cuda
from helpers.fake_cuda import LAUNCH, names
from helpers.located import marked, where

pytestmark = pytest.mark.skipif(
    not fake_cuda.wanted(), reason="runs on the recording driver, in test_cuda_fake_suite.py"
)
WAITS = {"EventSynchronize", "StreamSynchronize", "CtxSynchronize", "StreamWaitEvent"}


def _step(model, x):
    loss = model(x).square().mean()
    loss.backward()
    return loss


def test_no_op_waits(recording_driver):
    """While all that was launched lags behind, so that whoever wants a result has to wait."""
    cuda = recording_driver
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    nanscan.locate(_step, model, torch.ones(2, 4))  # memory for the rows is there now
    with nanscan.locating():
        cuda.set(record=1, lagging=1)
        _step(model, torch.ones(2, 4))
        calls = names(cuda.calls())
    assert calls.count(LAUNCH) > 20
    assert not WAITS & set(calls)
    assert not [name for name in calls if name.startswith("Memcpy") and "Async" not in name]
    assert WAITS & set(names(cuda.calls()))  # at the end of the block


def test_what_comes_first_is_told_though_all_arrives_late(recording_driver):
    """Memory of the host is not freed in stream order: the tensors are kept while scans lag."""
    recording_driver.set(lagging=1)
    kept = []

    def function():
        x = torch.full((3,), 100.0)
        y = x.exp()  # here
        z = y * 2
        kept.extend([x, y, z, y - z])

    location = nanscan.locate(function)
    expected = ("aten.exp.default", marked(function), "origin", "forward", "", None)
    assert where(location) == expected
    assert location.operands[0].stats.max == 100
    assert location.consequence.name == "aten.sub.Tensor"
