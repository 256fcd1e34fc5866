"""Fixtures of the tests of the op-by-op search."""

import pytest
import torch
from torch.utils._python_dispatch import _len_torch_dispatch_stack

from helpers.consistency import consistent_locations  # noqa: F401 - a fixture
from nanscan._collect import torch_events


@pytest.fixture(autouse=True)
def _nothing_left(seeded_and_without_trace, consistent_locations):  # noqa: F811
    """No test leaves a hook, a mode or a wrapped function behind."""
    yield
    assert _len_torch_dispatch_stack() == 0
    assert torch_events._listeners == ()
    assert torch_events._wrapped == []
    assert torch.compiler.is_compiling() is False
    assert torch._dynamo.eval_frame._stance.stance == "default"
