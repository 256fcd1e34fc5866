"""A NaN planted in the backward of each module of each architecture, with the default kinds.

`make sweep` does the same for larger models, and for both scopes.
"""

import pytest
import torch

from helpers.architectures import ARCHITECTURES, loss_of
from helpers.plants import is_same_place, sweep


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the models are tiny
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_first_bad_gradient_is_the_first_in_backward(name):
    torch.manual_seed(0)
    make, batch = ARCHITECTURES[name]
    model, x = make(), batch()
    found = list(sweep(model, lambda: loss_of(model(x))))
    assert len(found) >= 3
    assert [plant for plant in found if not is_same_place(*plant[1:])] == []
