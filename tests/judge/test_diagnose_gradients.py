"""Causes of what goes bad in backward or over steps: each with a true case, and a look-alike."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from helpers.models import NAN, Do, Net, batch, diagnosed, first_fault, infer, sgd, titles, train
from nanscan._judge.causes import gradients

BACKWARD = "a derivative is not finite: it is undefined there, or too large"
EXPLODING = "exploding gradients"
OVERFLOW = "gradients overflow float16 on the way back"


def rates(finding):
    return [title for title in titles(finding) if "learning rate" in title]


# -- over the steps before -------------------------------------------------------------------------


def diverges(rate, steps=80):
    """Gradient descent on a sum of squares, whose curvature is 2 * 3."""
    model = nn.Linear(1, 1, bias=False)
    optimizer = sgd(model, rate)
    inputs = [torch.ones(3, 1)] * steps
    return diagnosed(model, lambda: train(model, optimizer, inputs, lambda out: out.square().sum()))


def test_a_learning_rate_that_is_too_high():
    finding = first_fault(diverges(4.0))
    assert finding.verdict == "origin"
    assert titles(finding)[:2] == [
        "the learning rate is too high: training diverges at lr=4",
        EXPLODING,
    ]
    evidence = finding.causes[0].evidence
    assert "the loss went from" in evidence
    assert "absmax of parameters from" in evidence
    assert finding.causes[0].remedy == "SGD(..., lr=0.1)"  # 0.4 diverges
    assert "clip_grad_value_(model.parameters()," in finding.causes[1].remedy


def test_a_learning_rate_that_converges():
    assert diverges(0.1).findings == []


def test_data_that_grow_are_no_learning_rate():
    """Loss and gradients explode likewise, and the parameters stay where they are."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    inputs = [torch.full((3, 1), 10.0**power) for power in range(0, 24, 2)]
    monitor = diagnosed(
        model,
        lambda: train(model, sgd(model, 1e-40), inputs, lambda out: out.square().sum()),
        near_limit=1.0,
    )
    finding = first_fault(monitor)
    assert str(finding.site) == "loss"
    assert rates(finding) == []
    assert EXPLODING not in titles(finding)  # clipping would change nothing


def test_steady_gradients_do_not_explode():
    """They are told to be steady instead."""
    model = Net()
    inputs = [batch(seed) for seed in range(8)]
    last = [-1]

    def loss(out):
        last[0] += 1
        return (out * (NAN if last[0] == 7 else 1)).square().mean()

    finding = first_fault(diagnosed(model, lambda: train(model, sgd(model), inputs, loss)))
    assert (finding.step, str(finding.site)) == (7, "loss")
    assert EXPLODING not in titles(finding)
    assert rates(finding) == []
    (unlikely,) = finding.unlikely
    assert unlikely.startswith("exploding gradients: their absmax went from ")
    assert unlikely.endswith(" in 7 steps")


def test_two_optimizers_by_turns_do_not_explode():
    """Gradients of one are a thousand times those of the other, in every other step."""
    calm, wild = nn.Linear(2, 1), nn.Linear(2, 1)
    model = nn.ModuleDict({"calm": calm, "wild": wild})
    optimizers = sgd(calm, 1e-6), sgd(wild, 1e-6)

    def run():
        for step in range(9):
            which, scale = (calm, 1.0) if step % 2 else (wild, 1e3)
            bad = NAN if step == 8 else 1.0
            loss = (which(torch.ones(1, 2)) * scale).sum() * bad
            optimizers[step % 2].zero_grad()
            optimizers[step % 2].zero_grad()
            loss.backward()
            optimizers[(step + 1) % 2].zero_grad()
            (optimizers[0] if which is calm else optimizers[1]).step()

    finding = first_fault(diagnosed(model, run))
    assert EXPLODING not in titles(finding)


# -- in one backward -------------------------------------------------------------------------------


class Root(nn.Sequential):
    def forward(self, x):
        hidden = self[0](x)
        return self[1](torch.where(hidden > 0, hidden.sqrt(), 0.0))


def test_undefined_derivative_and_a_gradient_of_a_bad_forward():
    model = Root(nn.Linear(2, 2), nn.Linear(2, 1))
    nn.init.zeros_(model[0].weight)
    nn.init.zeros_(model[0].bias)
    ones = torch.ones(1, 2)
    finding = first_fault(diagnosed(model, lambda: train(model, sgd(model), [ones], torch.sum)))
    assert str(finding.site) == "0.weight grad"
    assert titles(finding) == [BACKWARD]
    assert finding.causes[0].evidence.startswith(
        "all 5 tensors scanned in the forward of this step are finite, absmax 1; it went bad "
    )
    assert finding.causes[0].remedy == ""  # nothing shows a sqrt, or a torch.where
    assert finding.unlikely == ()

    bad = Root(nn.Linear(2, 2), nn.Linear(2, 1))
    nn.init.constant_(bad[0].weight, 1.0)
    monitor = diagnosed(bad, lambda: train(bad, sgd(bad), [ones * NAN], torch.sum))
    gradients = [f for f in monitor.findings if f.site.kind == "grad"]
    assert gradients
    assert all(f.verdict == "propagated" and f.causes == () for f in gradients)
    assert all(f.unlikely == () for f in gradients)


def test_gradients_that_grow_on_the_way_back():
    """Twofold in each layer, from 5,000: they are 80,000 behind the fifth of eight."""
    layers = [nn.Linear(2, 2).half() for _ in range(8)]
    for layer in layers:
        nn.init.ones_(layer.weight)
        nn.init.zeros_(layer.bias)
    model = nn.Sequential(*layers, Do(lambda x: x.float() * 5000))
    x = torch.full((1, 2), 1e-3).half()
    finding = first_fault(diagnosed(model, lambda: train(model, sgd(model, 1e-9), [x], torch.sum)))
    assert (str(finding.site), finding.verdict) == ("3.weight grad", "origin")
    assert titles(finding) == [
        OVERFLOW,
        "parameters are trained in float16 itself, without autocast and GradScaler",
    ]
    assert finding.causes[0].evidence == (
        "4 +Inf; the largest gradient before it is 40,000, of 4, 2-fold from module to module; "
        "values are float16, which ends at 65504"
    )
    assert BACKWARD not in titles(finding)
    assert finding.unlikely == ()


def test_an_inf_that_no_gradient_came_near():
    class Splits(nn.Sequential):
        def forward(self, x):
            return self[1](self[0](x).abs().sqrt())

    model = Splits(nn.Linear(2, 2, bias=False), nn.Linear(2, 1)).half()
    nn.init.zeros_(model[0].weight)
    nn.init.constant_(model[1].weight, 0.5)

    def half_sum(out):
        return out.float().sum()

    finding = first_fault(
        diagnosed(model, lambda: train(model, sgd(model), [torch.ones(1, 2).half()], half_sum))
    )
    assert str(finding.site) == "0.weight grad"
    assert OVERFLOW not in titles(finding)
    assert titles(finding)[0] == BACKWARD


# -- a GradScaler ----------------------------------------------------------------------------------


def scaled(init_scale, max_skips, loss=lambda out: out.sum(), bad_from=0, steps=8):
    """Steps under a GradScaler whose gradients are Inf, from some step on, or always."""
    model = nn.Linear(2, 1)
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale)

    def run():
        for step in range(steps):
            optimizer.zero_grad()
            scaler.scale(loss(model(torch.ones(1, 2)))).backward()
            if step >= bad_from:
                model.weight.grad.fill_(float("inf"))
            scaler.step(optimizer)
            scaler.update()

    monitor = diagnosed(model, run, max_skipped_steps=max_skips)
    return [f for f in monitor.findings if f.verdict == "persistent-overflow"]


def test_a_loss_scale_that_has_grown_too_large():
    (finding,) = scaled(2.0**40, 4)
    assert titles(finding) == ["the loss scale has grown far too large"]
    assert finding.causes[0].evidence == (
        "it was 1.1e+12 in the first of 4 skipped steps and is 1.37e+11 now; a GradScaler starts "
        "with 65,536"
    )
    assert finding.unlikely == ()


def test_a_loss_scale_that_falls_to_one():
    (finding,) = scaled(8.0, 4)
    assert titles(finding) == [
        "gradients are bad at a loss scale of 1 as well: backward itself makes them so"
    ]
    assert finding.causes[0].evidence == (
        "the scale fell from 8 to 1 in 4 skipped steps, and there are still 2 +Inf; all 3 tensors "
        "scanned in the forward of this step are finite, absmax 1"
    )


@pytest.mark.parametrize("init_scale", [2.0**16, 1024.0])
def test_a_usual_loss_scale_is_not_blamed(init_scale):
    (finding,) = scaled(init_scale, 4)
    assert titles(finding) == []


def test_a_scale_search_has_no_causes():
    model = nn.Linear(2, 1)
    assert scaled(2.0**40, 4, steps=2) == []
    infer(model, torch.ones(1, 2))


# -- gradients that were not made bad where they are seen ------------------------------------------


def clipped(spoil, clip):
    """A step whose gradients are spoilt after backward, and clipped."""
    model = Net()
    optimizer = sgd(model)

    def run():
        model(batch()).sum().backward()
        spoil(model)
        clip(model)
        optimizer.step()

    return [f for f in diagnosed(model, run).findings if f.site.kind == "grad"]


def by_norm(model):
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def set_one(model, value=NAN):
    model.fc1.bias.grad[1] = value


def test_what_clipping_spread_names_the_first_bad_gradient():
    first, *others = clipped(set_one, by_norm)
    assert str(first.site) == "fc1.bias grad"
    assert "spread" not in str(titles(first))
    assert len(others) == 3
    for finding in others:
        assert finding.verdict == "propagated"
        assert titles(finding) == [
            "clipping spread the NaN of fc1.bias grad: the norm of all gradients is NaN"
        ]


def test_what_backward_spread_was_not_spread_by_clipping():
    findings = clipped(lambda model: [p.grad.fill_(NAN) for p in model.parameters()], by_norm)
    assert len(findings) == 4
    assert "spread the" not in str([f.causes for f in findings])


def test_gradients_that_are_all_nan_may_have_been_multiplied_after_backward():
    def by_hand(model):
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        for parameter in model.parameters():
            parameter.grad /= norm

    first, *_ = clipped(set_one, by_hand)
    (title,) = titles(first)
    assert title.startswith("all gradients are NaN as a whole: the derivative of the loss is not ")
    first, *_ = clipped(set_one, lambda _: None)
    assert titles(first) == [BACKWARD]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_gradient_of_several_ranks_may_be_the_fault_of_another(monkeypatch, ranks):
    job = SimpleNamespace(
        is_available=lambda: True, is_initialized=lambda: True, get_world_size=lambda: ranks
    )
    monkeypatch.setattr(gradients, "distributed", job)
    (finding,) = clipped(set_one, lambda _: None)
    assert titles(finding) == ([BACKWARD] if ranks == 1 else [])


def test_forwards_with_a_mask_are_not_said_to_be_finite():
    class Masked(Net):
        def forward(self, x, mask):
            return super().forward(x + (mask * 0).nan_to_num())

    model = Masked()
    model.fc1.bias.register_hook(lambda gradient: gradient * NAN)
    mask = torch.tensor([0.0, 0.0, 0.0, -float("inf")])
    optimizer = sgd(model)

    def run():
        model(batch(), mask).sum().backward()
        optimizer.step()

    finding = first_fault(diagnosed(model, run))
    assert titles(finding) == [BACKWARD]
    assert "are finite, the -Inf of masks in 1 aside, absmax" in finding.causes[0].evidence
