"""Scenario 8: a softmax by hand of an all -Inf row; scaled_dot_product_attention gets it right."""

import torch
from torch.nn import functional as F

import nanscan
from helpers.located import marked
from helpers.models import no_trace

VISIBLE = torch.ones(4, 4).tril(-1).bool()  # the first row sees nothing


def _softmax(scores):
    shifted = scores - scores.amax(-1, keepdim=True)  # shifted
    weights = shifted.exp()
    return weights / weights.sum(-1, keepdim=True)


def _queries():
    torch.manual_seed(0)
    return torch.randn(3, 1, 2, 4, 8, requires_grad=True)


def test_by_hand():
    def step():
        q, k, v = _queries()
        scores = (q @ k.transpose(-1, -2)).masked_fill(~VISIBLE, -torch.inf)
        (_softmax(scores) @ v).sum().backward()

    with no_trace():
        location = nanscan.locate(step)
    assert (location.op, location.verdict, location.direction) == (
        "aten.sub.Tensor",
        "origin",
        "forward",
    )
    assert (location.file, location.line) == (__file__, marked(_softmax, "shifted"))
    scores, highest = location.operands
    assert (scores.stats.neginf_count, highest.stats.neginf_count) == (2 * 10, 2)
    assert location.at.results[0].stats.nan_count == 2 * 4
    assert location.causes[0].title == ("2 rows of a hand-written softmax are fully masked")


def test_scaled_dot_product_attention_is_clean():
    def step():
        q, k, v = _queries()
        F.scaled_dot_product_attention(q, k, v, attn_mask=VISIBLE).sum().backward()

    with no_trace():
        assert nanscan.locate(step) is None
