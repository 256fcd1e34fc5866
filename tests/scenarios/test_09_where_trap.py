"""Scenario 9: torch.where(x > 0, x.sqrt(), 0) at 0: the forward is fine, the gradient is NaN."""

import pytest
import torch
from models import no_trace, train
from torch import nn

import nanscan


class Root(nn.Module):
    def __init__(self, safe):
        super().__init__()
        self.below = nn.Linear(4, 4, bias=False)
        self.above = nn.Linear(4, 4)
        self.safe = safe

    def forward(self, x):
        x = self.below(x)
        if self.safe:
            root = torch.where(x > 0, torch.where(x > 0, x, 1).sqrt(), 0)
        else:
            root = torch.where(x > 0, x.sqrt(), 0)
        return self.above(root)


def _train(scope, *, safe):
    torch.manual_seed(0)
    model = Root(safe)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with no_trace(), nanscan.watch(model if scope == "model" else None, action="log") as monitor:
        padded = torch.cat([torch.randn(8, 4), torch.zeros(1, 4)])
        losses = train(model, optimizer, [padded])
    return monitor, losses


@pytest.mark.parametrize("scope", ["model", "global"])
def test_backward_makes_it(scope):
    monitor, losses = _train(scope, safe=False)
    assert losses[0] < 100
    assert {f.site.kind for f in monitor.findings} == {"grad", "param"}
    first = monitor.findings[0]
    assert (first.step, str(first.site), first.verdict) == (0, "below.weight grad", "origin")
    assert [str(site) for site in first.between] == ["above.bias grad", "below.weight grad"]
    assert [f.verdict for f in monitor.findings[1:]] == ["propagated"] * (len(monitor.findings) - 1)
    cause = first.causes[0]
    assert cause.title == "backward made it: a derivative is undefined or overflowed there"
    assert "below" in cause.evidence
    assert "torch.where(x > 0, x, 1)" in cause.remedy


@pytest.mark.parametrize("scope", ["model", "global"])
def test_the_remedy_is_clean(scope):
    monitor, _ = _train(scope, safe=True)
    assert monitor.findings == []
