"""Scenario 5: a float16 feed-forward layer outgrows 65504; LayerNorm makes NaN of its Inf."""

import pytest
import torch
from torch import nn

import nanscan
from helpers.located import marked
from helpers.models import infer, no_trace


class Block(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.wi = nn.Linear(width, 4 * width, bias=False)
        self.wo = nn.Linear(4 * width, width, bias=False)
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        y = torch.relu(self.wi(x))
        y = self.wo(y)  # outgrows float16
        return self.norm(y)  # norm


def _model_and_steps():
    """Five inputs, each larger than the one before; with the last one `wo` overflows."""
    torch.manual_seed(0)
    model = Block()
    x = torch.randn(2, 16)
    with torch.no_grad():
        model.wo.weight *= 500
        top = model.wo(torch.relu(model.wi(x))).abs().max()
    model.half()
    return model, [(x * (scale / top)).half() for scale in (1e3, 1e4, 4e4, 5e4, 3e5)]


@pytest.mark.parametrize("scope", ["model", "global"])
def test_the_linear_layer_overflows_after_it_was_near_the_limit(scope):
    model, steps = _model_and_steps()
    with no_trace(), nanscan.watch(model if scope == "model" else None, action="log") as monitor:
        infer(model, *steps)

    near = [f for f in monitor.findings if f.verdict == "near-limit"]
    assert [(f.step, str(f.site)) for f in near] == [(2, "wo output")]
    assert 30000 < near[0].stats.absmax < 65504

    first, second = [f for f in monitor.findings if f.verdict != "near-limit"]
    assert (first.step, str(first.site), first.verdict) == (4, "wo output", "origin")
    assert (second.step, str(second.site), second.verdict) == (4, "norm output", "propagated")
    assert first.stats.inf_count > 0
    assert first.stats.nan_count == 0
    assert second.stats.nan_count > 0
    growth = first.history["absmax"][:4]
    assert (growth[1:] > growth[:-1]).all()

    cause = first.causes[0]
    assert cause.title == "overflow of float16: values grew beyond 65504"
    assert f"{first.stats.inf_count:,} Inf beside finite values" in cause.evidence
    assert "absmax before went from" in cause.evidence
    assert "bfloat16" in cause.remedy
    assert first.unlikely == ()
    assert [c.title for c in near[0].causes] == ["values grow towards the largest float16"]
    assert second.causes == ()


def test_op_by_op():
    model, steps = _model_and_steps()
    with no_trace():
        assert [nanscan.locate(model, x) for x in steps[:-1]] == [None] * 4
        location = nanscan.locate(model, steps[-1])
    assert (location.op, location.verdict, location.direction) == (
        "aten.mm.default",
        "origin",
        "forward",
    )
    assert (location.file, location.line) == (__file__, marked(Block, "outgrows float16"))
    assert (location.module, location.at.module_type) == ("wo", "Linear")
    assert [operand.stats.is_finite for operand in location.operands] == [True, True]
    assert location.operands[1].what == "wo.weight"
    made = location.at.results[0].stats
    assert made.inf_count > 0
    assert made.nan_count == 0
    assert location.consequence.name == "aten.native_layer_norm.default"
    assert (location.consequence.module, location.consequence.line) == (
        "norm",
        marked(Block, "norm"),
    )
    assert location.causes[0].title == "mm overflows float16"
