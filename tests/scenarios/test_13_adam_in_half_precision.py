"""Scenario 13: Adam in float16. Its eps of 1e-8 is 0 there, and a zero gradient gives 0 / 0."""

import pytest
import torch
from torch import nn

import nanscan
from helpers.located import marked
from helpers.models import no_trace, train
from nanscan._data.site import DEFAULT_KINDS

SCOPES = pytest.mark.parametrize("scope", ["model", "global"])


def _train(scope, kind=torch.optim.Adam, dtype=torch.float16, **options):
    """Tokens 5 to 7 do not occur in the first batch: their rows get a zero gradient."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4)).to(dtype)
    optimizer = kind(model.parameters(), 1e-3, **options)
    target, kinds = model if scope == "model" else None, (*DEFAULT_KINDS, "state")
    with no_trace(), nanscan.watch(target, kinds=kinds, action="log") as monitor:
        batches = [torch.arange(5), torch.arange(8), torch.arange(8)]
        train(model, optimizer, batches, lambda out: 10 * out.float().square().sum())
    return monitor


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
@SCOPES
def test_the_parameter_is_named_in_the_first_step(scope, kind):
    monitor = _train(scope, kind)
    first = monitor.findings[0]
    assert (first.step, str(first.site), first.verdict) == (0, "0.weight param", "origin")
    assert [f.site.kind for f in monitor.findings if f.step == 0] == ["param"]
    assert first.stats.nan_count == 3 * 4
    assert first.stats.first_nonfinite == (5, 0)

    given = {str(site): stats for site, stats in first.given}
    assert set(given) == {"0.weight grad", "0.weight exp_avg", "0.weight exp_avg_sq"}
    assert all(stats.is_finite for stats in given.values())
    assert given["0.weight exp_avg_sq"].zero_count == 12

    cause = first.causes[0]
    assert cause.title == (
        f"{kind.__name__}'s eps=1e-08 is 0 in float16: the update divides by sqrt(0) + 0"
    )
    assert "exp_avg_sq holds 12 exact zeros of 32" in cause.evidence
    assert "the smallest float16 is 6.0e-08" in cause.evidence
    assert "eps=1e-4" in cause.remedy
    assert {f.verdict for f in monitor.findings if f.step == 1} == {"propagated"}


@pytest.mark.parametrize(
    "remedy", [{"eps": 1e-4}, {"dtype": torch.float32}, {"dtype": torch.bfloat16}]
)
@SCOPES
def test_the_remedies_are_clean(scope, remedy):
    assert _train(scope, **remedy).findings == []


@pytest.mark.parametrize(
    ("options", "op"),
    [
        ({"foreach": False}, "aten.addcdiv_.default"),
        ({"foreach": True}, "aten._foreach_addcdiv_.ScalarList"),
    ],
    ids=str,
)
def test_op_by_op(options, op):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4)).half()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3, **options)

    def step():
        (10 * model(torch.arange(5)).float().square().sum()).backward()
        optimizer.step()  # the update

    with no_trace():
        location = nanscan.locate(step)
    assert (location.op, location.verdict, location.direction) == (op, "origin", "optimizer")
    assert (location.file, location.line) == (__file__, marked(step, "the update"))
    assert all(operand.stats.is_finite for operand in location.operands)
    whats = [operand.what for operand in location.operands]
    assert "0.weight" in whats
    assert "exp_avg of 0.weight" in whats
    made = location.at.results[0].stats
    assert (made.nan_count, made.first_nonfinite) == (3 * 4, (5, 0))
    assert location.causes[0].title == (
        "the optimizer's eps is 0 in float16: the update divides by sqrt(0) + 0"
    )
