"""Scenario 4: what scenario 3 should have done. The scaler's first overflows are no faults."""

import math

import pytest
import torch
from torch import nn

import nanscan
from helpers.models import SCOPES, no_trace, train


def _model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(14700, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1)
    )


@pytest.mark.parametrize("unscale", [False, True])
@SCOPES
def test_autocast_with_a_scaler(photographs, scope, unscale, num_threads):
    num_threads(1)
    model = _model()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3, weight_decay=1e-4)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    losses, skipped = [], []
    target = model if scope == "model" else None
    with no_trace(), nanscan.watch(target, action="raise") as monitor:
        for step in range(24):
            x = photographs[step % 4 * 16 :][:16].float()
            with torch.autocast("cpu", torch.float16):
                loss = nn.functional.mse_loss(model(x).float(), torch.full((16, 1), 0.5))
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            if unscale:
                scaler.unscale_(optimizer)
            before = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.item())
            if scaler.get_scale() < before:
                skipped.append(step)
    assert len(skipped) >= 3
    assert all(map(math.isfinite, losses))
    # Each run of skipped steps is told once, as what it is; the longest takes about ten steps.
    runs = [step for step in skipped if step - 1 not in skipped]
    assert [(f.step, f.verdict) for f in monitor.findings] == [
        (step, "scale-search") for step in runs
    ]
    first = monitor.findings[0]
    assert (first.step, first.site.kind) == (0, "grad")
    assert first.how == "the GradScaler skipped the step and lowered its scale of 65536"
    assert monitor.healthy
    assert monitor.steps == 24


@SCOPES
def test_scaled_images_in_float32(photographs, scope, num_threads):
    num_threads(1)
    model = _model()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3, weight_decay=1e-4)
    with no_trace(), nanscan.watch(model if scope == "model" else None) as monitor:
        batches = list((photographs / 255).split(16)) * 2
        losses = train(model, optimizer, batches, lambda out: (out - 0.5).square().mean())
    assert losses[-1] < losses[0]
    assert monitor.findings == []
