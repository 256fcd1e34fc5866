"""Scenario 14: a model from the meta device, given memory by to_empty and never initialised."""

import pytest
import torch
from torch import nn

import nanscan
from helpers.models import SCOPES, batch, infer, no_trace, train


@pytest.fixture
def empty_is_nan():
    """What torch.empty holds is a matter of luck; torch itself fills it with NaN when told to."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


def _materialise():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    return model.to_empty(device="cpu")


@pytest.mark.usefixtures("empty_is_nan")
@pytest.mark.parametrize("mode", ["infer", "train"])
@SCOPES
def test_the_parameters_are_named_before_the_first_forward(scope, mode):
    model = _materialise()
    with no_trace(), nanscan.watch(model if scope == "model" else None, action="log") as monitor:
        if mode == "infer":
            infer(model, batch())
        else:
            train(model, torch.optim.SGD(model.parameters(), 0.1), [batch()])
    parameters = [f for f in monitor.findings if f.site.kind == "param"]
    assert monitor.findings[:4] == parameters
    assert [str(f.site) for f in parameters] == [
        "0.weight param",
        "0.bias param",
        "2.weight param",
        "2.bias param",
    ]
    assert {(f.step, f.verdict) for f in parameters} == {(0, "origin")}
    assert parameters[0].stats.nan_count == 32
    assert [f.causes[0].title for f in parameters] == [
        "the parameter was never initialised, or loaded from a bad checkpoint"
    ] * 4
    assert "32 of 32 elements" in parameters[0].causes[0].evidence
    assert "reset_parameters()" in parameters[0].causes[0].remedy
    assert {f.verdict for f in monitor.findings[4:]} == {"propagated"}


@pytest.mark.usefixtures("empty_is_nan")
@SCOPES
def test_the_remedy_is_clean(scope):
    model = _materialise()
    for module in model:
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    with no_trace(), nanscan.watch(model if scope == "model" else None) as monitor:
        train(model, torch.optim.SGD(model.parameters(), 0.1), [batch(), batch(1)])
    assert monitor.findings == []


@SCOPES
def test_absurd_parameters_are_near_the_limit(scope):
    model = _materialise()
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    model[2].weight.data[3, 1] = 3e38
    with no_trace(), nanscan.watch(model if scope == "model" else None, action="log") as monitor:
        infer(model, batch())
    assert [(f.step, str(f.site), f.verdict) for f in monitor.findings] == [
        (0, "2.weight param", "near-limit")
    ]
    (cause,) = monitor.findings[0].causes
    assert cause.title == "the parameter was never initialised, or loaded from a bad checkpoint"
    assert "reaches 3e+38" in cause.evidence
