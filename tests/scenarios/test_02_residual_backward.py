"""Scenario 2: a residual encoder whose forward is fine, and whose gradients overflow in backward.

What torch's anomaly mode calls "AddBackward0 returned nan values" has a place: the module output
that backward reached first with a bad gradient.
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
from nanscan._data.site import DEFAULT_KINDS, KINDS

OVERFLOW = "gradients overflow float16 on the way back"
GAIN = 80.0  # of the last convolution of each block


class Block(nn.Module):
    def __init__(self, channels_in, channels):
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, bias=False)
        self.conv3 = nn.Conv2d(channels, channels, 3, bias=False)
        self.down = nn.Conv2d(channels, channels, 3, stride=2, padding=1, bias=False)

    def forward(self, x):
        x_1 = self.conv1(F.pad(x, (1, 1, 1, 1)))
        x_3 = self.conv3(F.pad(F.relu(x_1), (1, 1, 1, 1)))
        x_out = x_1 + x_3  # the sum
        return F.relu(self.down(x_out))  # the next convolution


class Encoder(nn.Module):
    """Its gradients grow from block to block on the way back, as its values do on the way there."""

    def __init__(self, gain):
        super().__init__()
        self.blocks = nn.Sequential(*[Block(3 if i == 0 else 6, 6) for i in range(4)])
        self.head = nn.Linear(6, 1)
        with torch.no_grad():
            for block in self.blocks:
                block.down.weight *= gain

    def forward(self, x):
        return self.head(self.blocks(x).mean((2, 3)))


@pytest.fixture(scope="module")
def patches():
    """[8, 3, 16, 16] pixels, faint ones."""
    image = load_sample_images().images[0]
    pixels = extract_patches_2d(image, (16, 16), max_patches=8, random_state=0)
    return torch.tensor(np.array(pixels)).permute(0, 3, 1, 2) / 255 * 1e-3


def _train(patches, scope, kinds, gain):
    """Returns the module outputs with bad gradients as autograd reached them, by our own hooks."""
    torch.manual_seed(0)
    model = Encoder(gain)
    optimizer = torch.optim.SGD(model.parameters(), 1e-9)
    bad = []

    def watch(name):
        def look(gradient):
            if not gradient.isfinite().all():
                bad.append(name)

        return lambda _m, _a, out: out.register_hook(look) and None

    for name, module in model.named_modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            module.register_forward_hook(watch(name))
    target = model if scope == "model" else None
    with no_trace(), nanscan.watch(target, kinds=kinds, action="log") as monitor:
        with torch.autocast("cpu", torch.float16):
            out = model(patches)
        loss = 10 * (out.float() - 10).square().sum()
        loss.backward()
        optimizer.step()
    assert loss.isfinite()
    return monitor, bad


@SCOPES
def test_the_first_bad_gradient_is_named(patches, scope, num_threads):
    num_threads(1)
    monitor, bad = _train(patches, scope, KINDS, GAIN)
    first, *others = [f for f in monitor.findings if f.verdict != "near-limit"]
    block, _, branch = bad[0].rpartition(".")
    assert branch == "conv3"  # the second operand of the sum
    assert (first.step, str(first.site), first.verdict) == (0, f"{bad[0]} grad_output", "origin")
    assert first.between == (Site(f"{block}.down", "grad_output"), Site(bad[0], "grad_output"))
    assert first.stats.inf_count > 0
    assert first.dtype == torch.float16
    assert {f.verdict for f in others} == {"propagated"}
    assert {f.site.kind for f in others} == {"grad_output", "grad", "param"}
    assert [f.site.name for f in others if f.site.name in bad and f.site.kind == "grad_output"] == (
        bad[1:]
    )
    assert first.causes[0].title == OVERFLOW
    assert f"finite values up to {first.stats.absmax:,.0f} beside it" in first.causes[0].evidence


@SCOPES
def test_by_default_the_first_bad_parameter_gradient_is_named(patches, scope, num_threads):
    num_threads(1)
    monitor, bad = _train(patches, scope, DEFAULT_KINDS, GAIN)
    first, *others = [f for f in monitor.findings if f.verdict != "near-limit"]
    assert (first.step, first.site.kind, first.verdict) == (0, "grad", "origin")
    assert first.site.name.rpartition(".")[0] == bad[0]
    assert {f.verdict for f in others} == {"propagated"}
    assert {f.site.kind for f in others} == {"grad", "param"}
    assert [cause.title for cause in first.causes] == [OVERFLOW]
    assert "GradScaler" in first.causes[0].remedy
    assert first.unlikely == ()


@SCOPES
def test_smaller_weights_are_clean(patches, scope, num_threads):
    num_threads(1)
    monitor, bad = _train(patches, scope, KINDS, 8.0)
    assert bad == []
    assert monitor.findings == []


def test_op_by_op(patches, num_threads):
    num_threads(1)
    torch.manual_seed(0)
    model = Encoder(GAIN)
    losses = []

    def step():
        with torch.autocast("cpu", torch.float16):
            out = model(patches)
        losses.append(10 * (out.float() - 10).square().sum())
        losses[0].backward()

    location = nanscan.locate(step)
    assert losses[0].isfinite()
    assert (location.op, location.verdict, location.direction) == (
        "aten.convolution_backward.default",
        "origin",
        "backward",
    )
    assert (location.node, location.output_index) == ("ConvolutionBackward0", 0)
    assert (location.file, location.line) == (__file__, marked(Block, "the next convolution"))
    assert location.module.startswith("blocks.")
    assert location.module.endswith(".down")
    assert location.forward.name == "aten.convolution.default"
    assert all(operand.stats.is_finite for operand in location.operands)
    gradient, _ = location.at.results
    assert (gradient.dtype, gradient.stats.is_finite) == (torch.float16, False)
    assert location.causes[0].title == (
        "convolution_backward overflows float16 in the backward of ConvolutionBackward0"
    )


def test_op_by_op_smaller_weights_are_clean(patches):
    torch.manual_seed(0)
    model = Encoder(8.0)

    def step():
        with torch.autocast("cpu", torch.float16):
            out = model(patches)
        (10 * (out.float() - 10).square().sum()).backward()

    assert nanscan.locate(step) is None
