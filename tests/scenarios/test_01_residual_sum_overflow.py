"""Scenario 1: in a residual encoder one branch outgrows the other, until their sum overflows.

The addition is no module: it is named by the two convolutions that it lies between.
"""

import numpy as np
import pytest
import torch
from sklearn.datasets import load_sample_images
from sklearn.feature_extraction.image import extract_patches_2d
from torch import nn
from torch.nn import functional as F

import nanscan
from helpers.located import marked
from helpers.models import SCOPES, no_trace
from nanscan import Site


class Block(nn.Module):
    """x_1 and x_3 are outputs of modules, and so is what their sum goes into."""

    def __init__(self, channels_in, channels):
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3)
        self.conv2 = nn.Conv2d(channels, channels, 3)
        self.conv3 = nn.Conv2d(channels, channels, 3)
        self.down = nn.Conv2d(channels, channels, 3, stride=2, padding=1)

    def forward(self, x):
        x_1 = self.conv1(F.pad(x, (1, 1, 1, 1)))
        x_2 = self.conv2(F.pad(F.relu(x_1), (1, 1, 1, 1)))
        x_3 = self.conv3(F.pad(F.relu(x_2), (1, 1, 1, 1)))
        x_out = x_1 + x_3  # the sum
        return F.relu(self.down(x_out))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*[Block(3 if i == 0 else 6, 6) for i in range(4)])
        self.head = nn.Linear(6, 1)

    def forward(self, x):
        return self.head(self.blocks(x).mean((2, 3)))


@pytest.fixture(scope="module")
def patches():
    """[64, 3, 16, 16] pixels from 0 to 1, of one photograph and then the other."""
    images = [
        extract_patches_2d(image, (16, 16), max_patches=32, random_state=0)
        for image in load_sample_images().images
    ]
    return torch.tensor(np.concatenate(images)).permute(0, 3, 1, 2) / 255


def _model():
    """What follows the sums is frozen."""
    torch.manual_seed(0)
    model = Encoder()
    for module in (model.head, *(block.down for block in model.blocks)):
        module.requires_grad_(requires_grad=False)
    return model, torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 3e-4)


def _train(patches, scope, dtype=torch.float16, steps=500):
    """Adam towards targets that were never scaled."""
    model, optimizer = _model()
    target = model if scope == "model" else None
    with no_trace(), nanscan.watch(target, action="log", history=steps) as monitor:
        for step in range(steps):
            x = patches[step % 8 * 8 :][:8]  # in order
            with torch.autocast("cpu", dtype):
                out = model(x)
            loss = F.l1_loss(out.float(), torch.full((8, 1), 1e6))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if not loss.isfinite():
                break
    return monitor


@SCOPES
def test_the_sum_between_the_two_convolutions_is_named(patches, scope, num_threads):
    num_threads(1)
    monitor = _train(patches, scope)
    near = [f for f in monitor.findings if f.verdict == "near-limit"]
    first, *others = [f for f in monitor.findings if f.verdict != "near-limit"]
    assert (str(first.site), first.verdict) == ("blocks.3.down input[0]", "origin")
    assert first.step > 100
    assert first.how == "made by code outside of any module, in the forward of blocks.3"
    assert first.between == (
        Site("blocks.3.conv3", "output"),
        Site("blocks.3.down", "input", "[0]"),
    )
    assert {f.verdict for f in others} == {"propagated"}
    assert {f.step for f in others} == {first.step}

    # Both operands are finite, and among what was seen just before; their sum is not.
    before = {str(site): stats for site, stats in first.before}
    x_1, x_3 = before["blocks.3.conv1 output"], before["blocks.3.conv3 output"]
    assert x_1.is_finite
    assert x_3.is_finite
    assert x_1.absmax + x_3.absmax > torch.finfo(torch.float16).max
    assert first.dtype == torch.float16
    assert first.stats.inf_count > 0
    assert first.stats.nan_count == 0

    # One branch outgrew the other.
    x_1, x_3 = (monitor.history(Site(f"blocks.3.conv{i}", "output"))["absmax"] for i in (1, 3))
    assert len(x_1) == first.step + 1
    assert x_3[0] < x_1[0]
    assert x_3[-1] > 1.5 * x_1[-1]

    # It was near the limit before, and that was said.
    warned = [f for f in near if f.site == first.site]
    assert warned[0].step < first.step
    assert warned[0].history["absmax"][-1] > 20 * warned[0].history["absmax"][0]
    cause = first.causes[0]
    assert cause.title == "two branches meet here, and their sum does not fit into float16"
    together = x_1[-1] + x_3[-1]
    for part in (
        f"absmax of blocks.3.conv1 output went from {x_1[0]:.3g} to {x_1[-1]:,.0f} in {len(x_1)} ",
        f"that of blocks.3.conv3 output went from {x_3[0]:.3g} to {x_3[-1]:,.0f} in {len(x_3)} ",
    ):
        assert part in cause.evidence
    assert together > 65504
    assert "overflow of float16: values grew beyond 65504" in [c.title for c in first.causes]
    assert first.unlikely == ()
    assert [c.title for c in warned[0].causes] == ["values grow towards the largest float16"]


@SCOPES
def test_bfloat16_goes_on(patches, scope, num_threads):
    num_threads(1)
    monitor = _train(patches, scope, torch.bfloat16, steps=20)
    assert monitor.findings == []


@pytest.mark.host_only(reason="moments are taken only of tensors that torch has on a device")
def test_op_by_op(patches, num_threads):
    num_threads(1)
    model, optimizer = _model()

    def step(x):
        with torch.autocast("cpu", torch.float16):
            out = model(x)
        loss = F.l1_loss(out.float(), torch.full((8, 1), 1e6))
        optimizer.zero_grad()
        loss.backward()
        return loss

    for number in range(500):
        x = patches[number % 8 * 8 :][:8]
        if not step(x).isfinite():
            break
        optimizer.step()
    assert number > 100

    location = nanscan.locate(step, x)
    assert (location.op, location.verdict, location.direction) == (
        "aten.add.Tensor",
        "origin",
        "forward",
    )
    assert (location.file, location.line) == (__file__, marked(Block, "the sum"))
    assert (location.module, location.at.module_type) == ("blocks.3", "Block")
    x_1, x_3 = location.operands
    for branch in (x_1, x_3):
        assert branch.made_by.startswith("aten.convolution.default, test_01")
        assert (branch.stats.is_finite, branch.has_moments) == (True, True)
        assert branch.dtype == torch.float16
    assert x_1.stats.absmax + x_3.stats.absmax > torch.finfo(torch.float16).max
    assert x_3.stats.std > 1.5 * x_1.stats.std  # one branch outgrew the other
    assert location.at.results[0].stats.inf_count > 0
    assert location.at.results[0].stats.nan_count == 0
    assert location.causes[0].title == "add overflows float16"
