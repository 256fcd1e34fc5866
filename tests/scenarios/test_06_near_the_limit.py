"""Scenario 6: activations double from layer to layer, up to 62.7k of 65.5k, and never overflow."""

import numpy as np
import pytest
import torch
from torch import nn

import nanscan
from helpers.models import SCOPES, infer, no_trace

LAYERS, TOP = 8, 62_700.0


class Layer(nn.Module):
    """Adds what it makes of its input to that, as the layers of a T5 encoder do."""

    def __init__(self, width=16):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wi = nn.Linear(width, 2 * width, bias=False)
        self.wo = nn.Linear(2 * width, width, bias=False)

    def forward(self, x):
        return x + self.wo(torch.relu(self.wi(self.norm(x))))


@pytest.fixture
def model(num_threads):
    """In float16; the output of layer i reaches TOP / 2**(LAYERS - 1 - i)."""
    num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(*[Layer() for _ in range(LAYERS)])
    with torch.no_grad():
        x = _input()
        for i, layer in enumerate(model):
            wanted = TOP / 2 ** (LAYERS - 1 - i)
            low, high = 0.0, 1e6
            weight = layer.wo.weight.clone()
            for _ in range(25):
                middle = (low + high) / 2
                layer.wo.weight.copy_(weight * middle)
                low, high = (low, middle) if layer(x).abs().max() > wanted else (middle, high)
            x = layer(x)
    return model.half()


def _input():
    return torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))


@SCOPES
def test_near_the_limit_with_its_trend_and_no_fault(model, scope):
    steps = np.linspace(0.3, 1.0, 12)
    weights = [layer.wo.weight.detach().clone() for layer in model]
    with no_trace(), nanscan.watch(model if scope == "model" else None, action="raise") as monitor:
        for share in steps:
            with torch.no_grad():  # as training makes them grow
                for layer, weight in zip(model, weights, strict=True):
                    layer.wo.weight.copy_(weight * share)
            infer(model, _input().half())
    assert [(str(f.site), f.verdict) for f in monitor.findings] == [
        ("7 output", "near-limit"),
        ("7.wo output", "near-limit"),
    ]
    first = monitor.findings[0]
    assert first.step == 4  # the first with half of the largest float16
    assert 0.5 * 65504 <= first.stats.absmax < 0.55 * 65504
    assert first.stats.is_finite
    trend = first.history["absmax"]
    assert len(trend) == 5
    assert (trend[1:] > trend[:-1]).all()
    assert str(first).startswith("7 output is near the limit in step 4 (5")
    assert "of the largest float16, 65504)" in str(first).splitlines()[0]
    assert f"step 3: {trend[3]:,.0f}" in str(first).replace("\n            ", " ")
    assert [str(site) for site, _ in first.given] == ["6 output"]
    assert [cause.title for cause in first.causes] == ["values grow towards the largest float16"]
    assert f"absmax went from {trend[0]:,.0f} to {trend[-1]:,.0f} in 5 steps" in (
        first.causes[0].evidence
    )
    assert first.unlikely == ()

    top = monitor.history(first.site)["absmax"]
    assert len(top) == len(steps)
    assert top[-1] == pytest.approx(TOP, rel=0.01)
    assert monitor.healthy


@SCOPES
def test_bfloat16_is_far_from_its_limit(model, scope):
    model.bfloat16()
    with no_trace(), nanscan.watch(model if scope == "model" else None) as monitor:
        infer(model, _input().bfloat16())
    assert monitor.findings == []
