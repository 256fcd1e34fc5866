"""Scenario 16: one batch of a loader holds a NaN, in step 37."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import nanscan
from helpers.models import SCOPES, no_trace

BAD_STEP = 37


def _dataset():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(160, 3, 2, generator=generator)
    x[BAD_STEP * 4 + 2, 1, 0] = float("nan")
    return TensorDataset(x, torch.randn(160, 1, generator=generator))


@pytest.mark.parametrize("criterion_is_watched", [False, True])
@SCOPES
def test_the_input_of_the_model_is_named(scope, criterion_is_watched):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
    criterion = nn.MSELoss() if criterion_is_watched else nn.functional.mse_loss
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with no_trace(), nanscan.watch(model if scope == "model" else None, action="log") as monitor:
        for x, y in DataLoader(_dataset(), batch_size=4):
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()

    first = monitor.findings[0]
    assert (first.step, str(first.site)) == (BAD_STEP, "Sequential input[0]")
    assert first.shape == (4, 3, 2)
    assert first.stats.nan_count == 1
    assert first.stats.first_nonfinite == (2, 1, 0)
    assert {f.verdict for f in monitor.findings} == {"propagated"}
    assert first.history["step"].tolist() == list(range(22, 38))
    assert first.history["nan"].tolist() == [0] * 15 + [1]
    assert [cause.title for cause in first.causes] == ["the batch was bad before the model saw it"]
    assert "1 non-finite of 24 elements" in first.causes[0].evidence
    assert all(f.causes == () and f.unlikely == () for f in monitor.findings[1:])
    assert first.unlikely == ()
