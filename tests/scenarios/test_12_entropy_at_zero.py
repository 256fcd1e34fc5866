"""Scenario 12: (p * p.log()).sum() with p = 0 is 0 * -Inf."""

import torch
from torch import nn

import nanscan
from helpers.located import marked
from helpers.models import no_trace


class Entropy(nn.Module):
    def __init__(self, safe):
        super().__init__()
        self.safe = safe

    def forward(self, p):
        if self.safe:
            return torch.special.entr(p).sum()
        logs = p.log()  # the log
        return -(p * logs).sum()  # the product


class Model(nn.Module):
    def __init__(self, *, safe=False):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.entropy = Entropy(safe)

    def forward(self, x):
        return self.entropy(torch.relu(self.fc(x)).softmax(-1).masked_fill(x > 1, 0))


def _step(model):
    loss = model(torch.tensor([[0.0, 0.5, 2.0, 0.1]]))
    loss.backward()
    return loss


def test_op_by_op():
    torch.manual_seed(0)
    with no_trace():
        location = nanscan.locate(_step, Model())
    assert (location.op, location.verdict, location.direction) == (
        "aten.log.default",
        "origin",
        "forward",
    )
    assert (location.file, location.line) == (__file__, marked(Entropy, "the log"))
    assert (location.module, location.at.module_type) == ("entropy", "Entropy")
    made = location.at.results[0].stats
    assert (made.neginf_count, made.nan_count) == (1, 0)
    assert location.consequence.name == "aten.mul.Tensor"
    assert location.consequence.line == marked(Entropy, "the product")
    assert location.causes[0].title == "log of zero, then 0 * -Inf"


def test_the_remedy_is_clean():
    model = Model(safe=True)
    with no_trace(), torch.no_grad():  # the gradient of entr at 0 is Inf, and rightly so
        assert nanscan.locate(model, torch.tensor([[0.0, 0.5, 2.0, 0.1]])) is None
