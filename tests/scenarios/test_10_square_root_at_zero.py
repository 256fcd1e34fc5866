"""Scenario 10: sqrt((x ** 2).sum()) at 0: its backward divides by zero."""

import torch
from torch import nn

import nanscan
from helpers.located import marked
from helpers.models import no_trace


class Length(nn.Module):
    def __init__(self, eps=0.0):
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.eps = eps
        nn.init.zeros_(self.fc.bias)

    def forward(self, x):
        y = self.fc(x)
        return torch.sqrt((y**2).sum() + self.eps)  # the root


def _step(model):
    loss = model(torch.zeros(2, 3))
    loss.backward()
    return loss


def test_op_by_op():
    model = Length()
    with no_trace():
        location = nanscan.locate(_step, model)
    assert (location.op, location.verdict, location.direction) == (
        "aten.div.Tensor",
        "origin",
        "backward",
    )
    assert (location.node, location.output_index) == ("SqrtBackward0", 0)
    assert (location.file, location.line) == (__file__, marked(Length, "the root"))
    assert (location.forward.name, location.module) == ("aten.sqrt.default", "Length")
    (argument,) = location.forward.operands
    assert (argument.stats.min, argument.stats.max) == (0, 0)
    assert location.at.results[0].stats.posinf_count == 1
    assert location.consequence.name == "aten.mul.Tensor"  # Inf * 0, in the backward of the square
    assert location.causes[0].title == "the derivative of square root is not finite at zero"


def test_the_remedy_is_clean():
    with no_trace():
        assert nanscan.locate(_step, Length(eps=1e-12)) is None
