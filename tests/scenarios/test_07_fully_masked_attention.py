"""Scenario 7: padding and a causal mask leave a row all -Inf: finite loss, NaN gradients."""

import math

import pytest
import torch
from torch import nn

import nanscan
from helpers.located import marked
from helpers.models import no_trace


class Attention(nn.Module):
    def __init__(self, fill=-math.inf):
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8)
        self.fill = fill

    def forward(self, x, padding):
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.transpose(-1, -2) / math.sqrt(8)
        causal = torch.ones(4, 4).triu(1).bool()
        scores = scores.masked_fill(causal | padding[:, None], self.fill)
        weights = scores.softmax(-1)  # softmax
        return self.out(weights @ v)


class Model(nn.Module):
    """Padded on the left: the first token of the first sample sees nothing."""

    def __init__(self, **options):
        super().__init__()
        self.attention = Attention(**options)

    def forward(self, x, padding):
        return self.attention(x, padding)[~padding].square().mean()


PADDING = torch.tensor([[True, False, False, False], [False] * 4])


def _step(model):
    torch.manual_seed(0)
    loss = model(torch.randn(2, 4, 8), PADDING)
    loss.backward()
    return loss


def test_op_by_op():
    torch.manual_seed(0)
    model = Model()
    assert _step(model).isfinite()
    assert model.attention.qkv.weight.grad.isnan().any()
    model.zero_grad()
    with no_trace():
        location = nanscan.locate(_step, model)
    assert (location.op, location.verdict) == ("aten._softmax.default", "origin")
    assert (location.file, location.line) == (__file__, marked(Attention, "softmax"))
    assert (location.module, location.direction) == ("attention", "forward")
    assert location.reached.startswith("the gradient of attention.")
    (scores,) = location.operands
    assert (scores.stats.neginf_count, scores.stats.nan_count) == (6 + 4 + 6, 0)
    assert location.at.results[0].stats.nan_count == 4
    assert location.at.settings["dim"] == -1
    assert location.causes[0].title == "1 row of the softmax is fully masked"


def test_the_remedy_is_clean():
    model = Model(fill=torch.finfo(torch.float32).min)
    assert nanscan.locate(_step, model) is None


@pytest.mark.parametrize("where", ["argument", "outside"])
def test_a_mask_that_leaves_something_is_clean(where):
    model = Model()
    x = torch.randn(2, 4, 8)
    padding = PADDING.flip(1)
    if where == "argument":
        assert nanscan.locate(lambda p: model(x, p).backward(), padding) is None
    else:
        assert nanscan.locate(lambda: model(x, padding).backward()) is None
