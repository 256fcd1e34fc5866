"""Scenario 15: a GradScaler's scale grew without bound, and then everything overflows for long."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import nanscan
from helpers.models import SCOPES, no_trace
from nanscan import Site

QUIET = 60  # steps in which nothing is learnt, and the scale doubles


def _train(scope, action="log", **options):
    """Labels are all ignored at first, so that gradients are 0; then they are not."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0, growth_interval=1)
    scales, target = [], model if scope == "model" else None
    with no_trace(), nanscan.watch(target, action=action, **options) as monitor:
        for step in range(QUIET + 64):
            labels = torch.randint(0, 3, (5,)) if step >= QUIET else torch.full((5,), -1)
            with torch.autocast("cpu", torch.float16):
                out = model(torch.randn(5, 4)).float()
            loss = F.cross_entropy(out, labels, ignore_index=-1, reduction="sum")
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scales.append(scaler.get_scale())
            scaler.update()
            if step == QUIET:
                scaler.set_growth_interval(2000)
    return monitor, scales


@SCOPES
def test_skipped_steps_in_a_row_are_a_fault(scope, num_threads):
    num_threads(1)
    monitor, scales = _train(scope, max_skipped_steps=8)
    search, fault, *later = monitor.findings
    assert (search.step, search.verdict) == (QUIET, "scale-search")
    assert (fault.step, fault.verdict) == (QUIET + 7, "persistent-overflow")
    assert fault.site == search.site == Site("2.weight", "grad")  # the first that backward reaches
    assert fault.how == (
        f"the GradScaler skipped 8 steps in a row, this one at a scale of {scales[QUIET + 7]:g}"
    )
    assert {site.name for site in fault.affected} == {"2.bias", "0.weight", "0.bias"}
    assert fault.stats.nonfinite_count > 0
    assert search.causes == ()
    assert [cause.title for cause in fault.causes] == ["the loss scale has grown far too large"]
    assert fault.causes[0].evidence.startswith(
        f"it was {scales[QUIET]:.3g} in the first of 8 skipped steps and is "
        f"{scales[QUIET + 7]:.3g} now"
    )
    assert "all gradients were 0 in " in fault.causes[0].evidence
    assert fault.history["absmax"][:-8].tolist() == [0] * 8
    # Once a scale is found again, so that steps go through, nothing more is a fault.
    assert {f.verdict for f in later} <= {"scale-search"}
    assert monitor.healthy


@SCOPES
def test_it_is_said_by_default_too(scope, num_threads):
    num_threads(1)
    monitor, _ = _train(scope)
    assert [f.verdict for f in monitor.findings].count("persistent-overflow") == 1


@SCOPES
def test_it_can_be_raised(scope):
    with pytest.raises(nanscan.NonFiniteError, match="skipped 8 steps in a row") as caught:
        _train(scope, action="raise", max_skipped_steps=8)
    assert caught.value.finding.verdict == "persistent-overflow"
