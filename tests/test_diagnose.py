"""Each rule of the diagnosis: a true case, and a look-alike that must not be named."""

import pytest
import torch
from torch import nn

import nanscan

SILENT = {"action": lambda _: None}


def titles(finding):
    return [cause.title for cause in finding.causes]


def first_fault(monitor):
    return next(f for f in monitor.findings if f.verdict != "near-limit")


def step(model, optimizer, batch, loss=torch.sum):
    optimizer.zero_grad()
    loss(model(batch)).backward()
    optimizer.step()


def half_adam(eps, batch):
    torch.manual_seed(0)
    model = nn.Linear(4, 3, dtype=torch.float16)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=eps)
    with nanscan.watch(model, **SILENT) as monitor:
        step(model, optimizer, batch.half())
    return monitor


def test_adam_eps_that_rounds_to_zero():
    batch = torch.ones(2, 4)
    batch[:, 1] = 0  # a zero gradient
    finding = first_fault(half_adam(1e-8, batch))
    assert str(finding.site) == "weight param"
    assert titles(finding) == [
        "Adam's eps=1e-08 is 0 in float16: the update divides by sqrt(0) + 0"
    ]
    assert "exp_avg_sq holds 3 exact zeros of 12; the parameter has 3 non-finite" in (
        finding.causes[0].evidence
    )


def test_adam_eps_that_float16_can_hold():
    batch = torch.ones(2, 4)
    batch[:, 1] = 0
    assert half_adam(1e-4, batch).findings == []


def test_a_parameter_made_bad_by_another_optimizer_is_not_adams_eps():
    model = nn.Linear(4, 3, dtype=torch.float16)
    optimizer = torch.optim.SGD(model.parameters(), lr=60000.0)
    with nanscan.watch(model, **SILENT) as monitor:
        step(model, optimizer, torch.ones(2, 4).half())
    finding = first_fault(monitor)
    assert (finding.site.kind, finding.verdict) == ("param", "origin")
    assert titles(finding) == []
    assert "no likely cause found" in str(finding)


def test_uninitialised_parameter():
    model = nn.Linear(4, 3)
    with torch.no_grad():
        model.weight[1, 2] = float("nan")
    with nanscan.watch(model, **SILENT) as monitor, torch.no_grad():
        model(torch.ones(1, 4))
    finding = first_fault(monitor)
    assert str(finding.site) == "weight param"
    assert titles(finding) == [
        "the parameter was never initialised, or loaded from a bad checkpoint"
    ]
    assert finding.causes[0].evidence.startswith("1 of 12 elements")


def test_bad_input_batch_and_a_value_that_only_the_model_can_have_made():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    batch = torch.ones(2, 4)
    batch[1, 3] = float("inf")
    with nanscan.watch(model, **SILENT) as monitor, torch.no_grad():
        model(batch)
    finding = first_fault(monitor)
    assert titles(finding) == ["the batch was bad before the model saw it"]

    class Divides(nn.Sequential):
        def forward(self, x):
            return self[1](self[0](x) / 0)

    made = Divides(nn.Linear(4, 4), nn.Linear(4, 1))
    with nanscan.watch(made, **SILENT) as monitor, torch.no_grad():
        made(torch.ones(2, 4))
    finding = first_fault(monitor)
    assert str(finding.site) == "1 input[0]"
    assert "the batch was bad before the model saw it" not in titles(finding)


class Scale(nn.Module):
    def forward(self, x, by):
        return x * by


@pytest.mark.parametrize(("by", "overflows"), [(60000.0, True), (float("inf"), False)])
def test_overflow_and_an_inf_that_no_large_value_stands_beside(by, overflows):
    values = torch.tensor([0.5, 0.9, 2.0]).half() if overflows else torch.tensor([1e-3, 1.0, 0.0])
    with nanscan.watch(model := Scale(), **SILENT) as monitor, torch.no_grad():
        model(values.half(), by)
    finding = first_fault(monitor)
    assert (str(finding.site), finding.verdict) == ("Scale output", "origin")
    assert ("overflow of float16: values grew beyond 65504" in titles(finding)) is overflows


def test_undefined_derivative_and_a_gradient_of_a_bad_forward():
    class Root(nn.Sequential):
        def forward(self, x):
            hidden = self[0](x)
            return self[1](torch.where(hidden > 0, hidden.sqrt(), 0.0))

    model = Root(nn.Linear(2, 2), nn.Linear(2, 1))
    nn.init.zeros_(model[0].weight)
    nn.init.zeros_(model[0].bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with nanscan.watch(model, **SILENT) as monitor:
        step(model, optimizer, torch.ones(1, 2))
    finding = first_fault(monitor)
    assert str(finding.site) == "0.weight grad"
    assert titles(finding) == ["backward made it: a derivative is undefined or overflowed there"]

    bad = Root(nn.Linear(2, 2), nn.Linear(2, 1))
    nn.init.constant_(bad[0].weight, 1.0)
    optimizer = torch.optim.SGD(bad.parameters(), lr=0.1)
    batch = torch.full((1, 2), float("nan"))
    with nanscan.watch(bad, **SILENT) as monitor:
        step(bad, optimizer, batch)
    gradients = [f for f in monitor.findings if f.site.kind == "grad"]
    assert gradients
    assert all(f.verdict == "propagated" and f.causes == [] for f in gradients)


@pytest.mark.parametrize(("scale", "far"), [(255.0, True), (1.0, False)])
def test_inputs_far_from_unit_scale(scale, far):
    batch = torch.ones(2, 4) * scale
    batch[:, 1] = 0
    finding = first_fault(half_adam(1e-8, batch))
    named = "inputs are far from unit scale for 16-bit training" in titles(finding)
    assert named is far
    assert not far or finding.causes[-1].evidence == "Linear input[0] reaches 255"
