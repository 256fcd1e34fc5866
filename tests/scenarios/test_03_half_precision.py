"""Scenario 3: unscaled photographs, model and data in float16, Adam with its default eps.

The first batch is fine and so are its gradients; the first optimizer step makes the parameters NaN.
"""

import torch
from torch import nn

import nanscan
from helpers.models import SCOPES, no_trace, train, verdicts


def _train(x, dtype, eps=1e-8, scope="model"):
    torch.manual_seed(0)
    model = nn.Sequential()
    for number, (a, b) in enumerate([(14700, 64), (64, 32), (32, 1)], 1):
        model.add_module(f"fc{number}", nn.Linear(a, b))
        if b > 1:
            model.add_module(f"relu{number}", nn.ReLU())
    model.to(dtype)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3, eps=eps, weight_decay=1e-4)
    with nanscan.watch(model if scope == "model" else None, action="log") as monitor:
        batches = [x[i : i + 16].to(dtype) for i in (0, 16, 32)]
        train(model, optimizer, batches, lambda out: nn.functional.mse_loss(out, out * 0 + 0.5))
    return monitor


@SCOPES
def test_the_first_optimizer_step_makes_it(photographs, scope):
    with no_trace():
        monitor = _train(photographs, torch.float16, scope=scope)
    first = monitor.findings[0]
    assert (first.step, str(first.site), first.verdict) == (0, "fc1.weight param", "origin")
    assert {f.site.kind for f in monitor.findings if f.step == 0} == {"param"}
    assert next(v for step, _, v in verdicts(monitor) if step == 1) == "propagated"
    assert "fc1 output" in {str(f.site) for f in monitor.findings if f.step == 1}

    given = {str(site): stats for site, stats in first.given}
    assert given["fc1.weight grad"].is_finite
    zeros = given["fc1.weight exp_avg_sq"].zero_count
    assert zeros > 1000

    titles = [cause.title for cause in first.causes]
    assert titles == [
        "Adam's eps=1e-08 is 0 in float16: the update divides by sqrt(0) + 0",
        "parameters are trained in float16 itself, without autocast and GradScaler",
    ]
    assert f"exp_avg_sq holds {zeros:,} exact zeros of 940,800" in first.causes[0].evidence
    assert "eps=1e-4" in first.causes[0].remedy
    assert "6 of 6 trained parameters are float16" in first.causes[1].evidence
    gradient = given["fc1.weight grad"].absmax
    assert (
        first.unlikely[0] == f"exploding gradients: the gradient is finite, absmax {gradient:.3g}"
    )


def test_a_larger_eps_repairs_it(photographs):
    with no_trace():
        monitor = _train(photographs / 255, torch.float16, eps=1e-4)
    assert monitor.findings == []


def test_float32_with_scaled_images_is_clean(photographs):
    with no_trace():
        monitor = _train(photographs / 255, torch.float32)
    assert monitor.findings == []
