"""Scenario 17: the learning rate is too high. Gradients explode over 20 steps, then overflow."""

import pytest
import torch
from torch import nn

import nanscan
from helpers.models import SCOPES, no_trace
from nanscan import Site

GROWTH = 1.4  # of the error, each step


def _rate(features, growth):
    """With which SGD on the summed squared error multiplies its largest component by -growth."""
    with_bias = torch.cat([features, torch.ones(len(features), 1)], 1).double()
    return (1 + growth) / (2 * torch.linalg.eigvalsh(with_bias.T @ with_bias)[-1].item())


def _train(scope, growth, steps=40):
    """The last layer alone is trained, too fast. Returns the parameters with bad gradients too."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).half()
    x, y = torch.randn(256, 8).half(), torch.randn(256, 1)
    with torch.no_grad():
        rate = _rate(model[:2](x), growth)
    model[0].requires_grad_(requires_grad=False)
    optimizer = torch.optim.SGD(model[2].parameters(), rate)
    target = model if scope == "model" else None
    with no_trace(), nanscan.watch(target, action="log", history=steps) as monitor:
        for _ in range(steps):
            optimizer.zero_grad()
            loss = (model(x).float() - y).square().sum()
            loss.backward()
            bad = [
                n for n in ("weight", "bias") if not model[2].get_parameter(n).grad.isfinite().all()
            ]
            optimizer.step()
            if bad:
                break
    assert loss.isfinite()
    return monitor, bad


@SCOPES
def test_the_gradient_is_named_and_its_growth_told(scope, num_threads):
    num_threads(1)
    monitor, bad = _train(scope, GROWTH)
    faults = [f for f in monitor.findings if f.verdict != "near-limit"]
    first = faults[0]
    assert bad
    assert (str(first.site), first.verdict) == (f"2.{bad[0]} grad", "origin")
    assert 12 <= first.step <= 30
    assert {f.verdict for f in faults[1:]} == {"propagated"}
    assert [f.site.name for f in faults if f.site.kind == "grad"] == [f"2.{n}" for n in bad]
    assert "output" not in {f.site.kind for f in faults}  # the forward was fine to the end

    trend = first.history["absmax"]
    assert first.history["step"].tolist() == list(range(first.step + 1))
    growth = trend[-10:-1] / trend[-11:-2]
    assert growth == pytest.approx(GROWTH, rel=0.1)
    warned = [f for f in monitor.findings if f.verdict == "near-limit"]
    assert first.site in [f.site for f in warned]
    assert first.stats.inf_count > 0

    rate, exploding = first.causes[:2]
    assert rate.title.startswith("the learning rate is too high: training diverges at lr=")
    assert "the loss went from" in rate.evidence
    assert exploding.title == "exploding gradients"
    assert f"in {first.step} steps; in the first half" in exploding.evidence
    assert "clip_grad_value_(model.parameters()," in exploding.remedy
    assert warned[0].causes[0].title == rate.title  # said before it happened


@SCOPES
def test_a_lower_rate_is_clean(scope, num_threads):
    num_threads(1)
    monitor, bad = _train(scope, -0.5)
    assert bad == []
    assert monitor.findings == []
    trend = monitor.history(Site("2.weight", "grad"))["absmax"]
    assert trend[-1] < trend[0]
