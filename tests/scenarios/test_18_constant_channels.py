"""Scenario 18: normalisation of a constant channel, whose variance is 0, with an eps of 0."""

import pytest
import torch
from torch import nn

import nanscan
from helpers.models import SCOPES, no_trace
from nanscan import Site


class HandWritten(nn.Module):
    """Normalises as research code does, without any eps."""

    def forward(self, x):
        return (x - x.mean((0, 2), keepdim=True)) / x.std((0, 2), keepdim=True)


# torch refuses a BatchNorm whose eps is 0; one that is 0 in float32 it takes.
NORMS = {
    "batch": lambda: nn.BatchNorm1d(3, eps=1e-300),
    "group": lambda: nn.GroupNorm(3, 3, eps=0.0),
    "hand-written": HandWritten,
}


def _train(scope, norm, *, constant):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(3, 3, 1, groups=3, bias=False), norm, nn.Conv1d(3, 2, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    target = model if scope == "model" else None
    with no_trace(), nanscan.watch(target, action="log") as monitor:
        for step in range(4):
            x = torch.randn(4, 3, 5)
            if constant and step == 2:
                x[:, 1] = 0.5
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    return monitor


@pytest.mark.parametrize("kind", NORMS)
@SCOPES
def test_the_normalisation_is_named(scope, kind):
    monitor = _train(scope, NORMS[kind](), constant=True)
    first = monitor.findings[0]
    assert (first.step, str(first.site), first.verdict) == (2, "1 output", "origin")
    assert first.stats.nonfinite_count == 4 * 5  # one channel of three
    assert first.stats.first_nonfinite == (0, 1, 0)
    given = dict(first.given)
    assert given[Site("0", "output")].is_finite
    assert {f.verdict for f in monitor.findings[1:]} == {"propagated"}
    assert first.history["nan"].tolist()[:2] == [0, 0]
    if kind == "hand-written":  # nothing but the op itself can tell
        assert first.causes == ()
    else:
        assert first.causes[0].title.count("divides by a variance of 0")
        assert "that is 1 of 3 channels" in first.causes[0].evidence
        assert "eps=1e-5" in first.causes[0].remedy
    assert first.unlikely == ()


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(3), nn.GroupNorm(3, 3)])
@SCOPES
def test_the_remedy_is_clean(scope, norm):
    assert _train(scope, norm, constant=True).findings == []


@pytest.mark.parametrize("kind", NORMS)
@SCOPES
def test_channels_that_vary_are_clean(scope, kind):
    assert _train(scope, NORMS[kind](), constant=False).findings == []
