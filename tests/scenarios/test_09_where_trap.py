"""Scenario 9: torch.where(x > 0, x.sqrt(), 0) at 0: the forward is fine, the gradient is NaN."""

import pytest
import torch
from torch import nn

import nanscan
from helpers.located import marked
from helpers.models import SCOPES, no_trace, train


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
            root = torch.where(x > 0, x.sqrt(), 0)  # the trap
        return self.above(root)


def _train(scope, *, safe):
    torch.manual_seed(0)
    model = Root(safe)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with no_trace(), nanscan.watch(model if scope == "model" else None, action="log") as monitor:
        padded = torch.cat([torch.randn(8, 4), torch.zeros(1, 4)])
        losses = train(model, optimizer, [padded])
    return monitor, losses


@SCOPES
def test_backward_makes_it(scope):
    monitor, losses = _train(scope, safe=False)
    assert losses[0] < 100
    assert {f.site.kind for f in monitor.findings} == {"grad", "param"}
    first = monitor.findings[0]
    assert (first.step, str(first.site), first.verdict) == (0, "below.weight grad", "origin")
    assert [str(site) for site in first.between] == ["above.bias grad", "below.weight grad"]
    assert [f.verdict for f in monitor.findings[1:]] == ["propagated"] * (len(monitor.findings) - 1)
    cause = first.causes[0]
    assert cause.title == "a derivative is not finite: it is undefined there, or too large"
    assert "below" in cause.evidence
    assert cause.remedy == ""  # that it is torch.where, only the op itself can tell
    assert "nanscan.locate" in str(first)


@SCOPES
def test_the_remedy_is_clean(scope):
    monitor, _ = _train(scope, safe=True)
    assert monitor.findings == []


def _locate(*, safe, positive):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Identity(), Root(safe))
    padded = torch.cat([torch.randn(8, 4), torch.zeros(1, 4)])
    if positive:  # nothing is below zero, so that the forward is finite throughout
        padded.abs_()
        model[1].below.weight.data.abs_()

    def step():
        loss = model(padded).square().mean()
        loss.backward()
        assert loss.isfinite()

    with no_trace():
        return nanscan.locate(step)


def test_op_by_op():
    location = _locate(safe=False, positive=True)
    assert (location.op, location.verdict, location.direction) == (
        "aten.div.Tensor",
        "origin",
        "backward",
    )
    assert (location.node, location.output_index) == ("SqrtBackward0", 0)
    assert (location.file, location.line) == (__file__, marked(Root, "the trap"))
    assert (location.module, location.forward.name) == ("1", "aten.sqrt.default")
    assert location.forward.operands[0].stats.min == 0
    assert location.causes[0].title == (
        "torch.where does not stop 0 * Inf = NaN in the backward of square root"
    )


def test_op_by_op_below_zero():
    """The NaN of a square root that torch.where drops in the forward comes back in the backward."""
    location = _locate(safe=False, positive=False)
    assert (location.op, location.verdict, location.direction) == (
        "aten.sqrt.default",
        "origin",
        "forward",
    )
    assert (location.file, location.line) == (__file__, marked(Root, "the trap"))
    assert location.reached == "the gradient of 1.below.weight"
    assert location.causes[0].title == "square root of negative values"


@pytest.mark.parametrize("positive", [True, False])
def test_op_by_op_the_remedy_is_clean(positive):
    assert _locate(safe=True, positive=positive) is None
