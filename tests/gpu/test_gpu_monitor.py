"""What a user sees of a model on a GPU: the findings of the CPU, and the same bits."""

import pytest
import torch
from torch import nn

import nanscan
from helpers.gpu import DEVICE, cuda, faults, normal, training_step
from helpers.models import (
    COMMON_KINDS,
    INF,
    NAN,
    SCOPES,
    Do,
    Gap,
    Net,
    enable,
    set_nan,
    sgd,
    verdicts,
)
from nanscan import NonFiniteError, _demo
from nanscan._data.finding import FAULTS

pytestmark = pytest.mark.cuda


# -- what a user sees ------------------------------------------------------------------------------


def infer_with_a_bad_batch(device, monitor_of):
    model = Net().to(device)
    monitor = monitor_of(model)
    with torch.no_grad():
        for step in range(5):
            x = torch.randn(6, 4)
            model((set_nan(x) if step == 3 else x).to(device))
    return monitor


def _train(device, monitor_of, model, spoil=lambda model, x, step: None, dtype=torch.float32):
    model = model.to(device, dtype)
    optimizer = sgd(model)
    monitor = monitor_of(model)
    for step in range(5):
        x = torch.randn(6, 4).to(dtype)
        spoil(model, x, step)
        optimizer.zero_grad()
        model(x.to(device)).square().mean().backward()
        optimizer.step()
    return monitor


def train_with_a_bad_batch(device, monitor_of):
    def spoil(model, x, step):
        if step == 2:
            x[1, 1] = NAN

    return _train(device, monitor_of, Net(), spoil)


def train_with_an_inf_in_a_weight(device, monitor_of):
    def spoil(model, x, step):
        if step == 2:
            model.fc2.weight.data[1, 2] = INF

    return _train(device, monitor_of, Net(), spoil)


def train_with_a_division_by_zero(device, monitor_of):
    return _train(device, monitor_of, Gap(lambda x: x / 0))


def train_with_an_overflow_of_half(device, monitor_of):
    def spoil(model, x, step):
        if step == 2:
            model.fc1.weight.data.fill_(3000)
            x.fill_(8)

    return _train(device, monitor_of, Net(), spoil, torch.float16)


@SCOPES
@pytest.mark.parametrize(
    ("scenario", "first"),
    [
        (infer_with_a_bad_batch, (3, "Net input[0]")),
        (train_with_a_bad_batch, (2, "Net input[0]")),
        (train_with_an_inf_in_a_weight, (2, "fc2 output")),
        (train_with_a_division_by_zero, (0, "fc2 input[0]")),
        (train_with_an_overflow_of_half, (2, "fc1 output")),
    ],
    ids=lambda value: value.__name__ if callable(value) else None,
)
def test_findings_are_those_of_the_cpu(scenario, first, scope):
    found = []
    for device in ("cpu", DEVICE):
        torch.manual_seed(0)
        monitor = scenario(device, lambda model: enable(scope, model, action="log"))
        monitor.flush()
        nanscan.disable()
        found.append(verdicts(monitor))
    on_cpu, on_device = found
    assert on_device[0][:2] == first
    assert sorted(on_device) == sorted(on_cpu)


def test_the_first_bad_gradient_is_the_one_that_backward_made_first():
    """Although all gradients are scanned by one launch, and small ones are done sooner."""
    layers = nn.Linear(4, 8), nn.Linear(8, 512), Do(lambda x: (x * 0).sqrt()), nn.Linear(512, 4)
    model = nn.Sequential(*layers).to(DEVICE)
    optimizer = sgd(model)
    monitor = nanscan.enable(model, action="log")
    training_step(model, optimizer, normal(6, 4))
    monitor.flush()
    gradients = [str(f.site) for f in monitor.findings if f.site.kind == "grad"]
    assert gradients[0] == "1.weight grad"


class Block(nn.Module):
    """Attention by plain operators, whose results are the same in every run."""

    def __init__(self, width=64, heads=4):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        batch, steps, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, steps, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / 4
        mixed = self.drop(scores.softmax(-1)) @ v
        x = x + self.drop(self.proj(mixed.transpose(1, 2).reshape(batch, steps, width)))
        return x + self.drop(self.mlp(self.norm2(x)))


def _transformer_training(*, watched, scope="model"):
    torch.manual_seed(7)
    model = nn.Sequential(Block(), Block(), nn.LayerNorm(64)).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    data = [(normal(4, 32, 64), normal(4, 32, 64)) for _ in range(4)]
    monitor = enable(scope, model, kinds=COMMON_KINDS) if watched else None
    losses = []
    for x, target in data:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    if monitor:
        assert monitor.flush() == []
        monitor.close()
    gradients = [p.grad for p in model.parameters()]
    return [*losses, *gradients, *model.parameters(), cuda.get_rng_state()]


@SCOPES
def test_hooks_change_no_bit(scope):
    without, again = (_transformer_training(watched=False) for _ in range(2))
    same = [torch.equal(a, b) for a, b in zip(without, again, strict=True)]
    assert all(same), "torch itself gives other results in each run"
    watched = _transformer_training(watched=True, scope=scope)
    assert all(torch.equal(a, b) for a, b in zip(without, watched, strict=True))


@SCOPES
def test_a_gradient_scaler_that_searches_its_scale_is_clean(scope):
    model = Net(16).to(DEVICE)
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**40, backoff_factor=2.0**-10)
    monitor = enable(scope, model)
    for _ in range(8):
        with torch.autocast(DEVICE, torch.float16):
            loss = model(normal(8, 16)).float().square().mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    monitor.flush()
    assert scaler.get_scale() < 2.0**40, "no step was skipped: the test is void"
    assert monitor.steps > 0
    assert faults(monitor.findings) == []


def test_the_demo(monkeypatch):
    pytest.importorskip("sklearn")
    net = _demo.Net
    monkeypatch.setattr(_demo, "Net", lambda: net().to(DEVICE))
    pixels = _demo.photographs().to(DEVICE)
    _, broken = _demo.train(pixels, torch.float16)
    first = next(f for f in broken.findings if f.verdict in FAULTS)
    assert (first.step, str(first.site), first.verdict) == (0, "fc1.weight param", "origin")
    assert "fc1.weight grad" in {str(site) for site, _ in first.given}
    _, repaired = _demo.train(pixels, torch.float32, scale=1 / 255)
    assert faults(repaired.findings) == []


def test_the_demo_is_diagnosed(monkeypatch):
    """What the optimizer held is looked at in time, although rows arrive later."""
    pytest.importorskip("sklearn")
    net = _demo.Net
    monkeypatch.setattr(_demo, "Net", lambda: net().to(DEVICE))
    _, broken = _demo.train(_demo.photographs().to(DEVICE), torch.float16)
    first = next(f for f in broken.findings if f.verdict in FAULTS)
    assert any("eps=1e-08 is 0 in float16" in cause.title for cause in first.causes)


def test_unusual_tensors_on_the_device():
    x = set_nan(normal(40, 50))
    assert nanscan.check(x.to_sparse()).nan_count == 1
    assert nanscan.check(torch._neg_view(x)).nan_count == 1
    assert nanscan.check(x.to(torch.complex64).conj()).nan_count == 1
    assert nanscan.check(nn.Parameter(x)).nan_count == 1
    assert nanscan.check(x[:0]).is_finite
    with pytest.raises(NonFiniteError, match="x is not finite: 1 NaN of 2,000"):
        nanscan.assert_finite(x, "x")
    with pytest.raises(TypeError, match=r"expected a floating-point tensor, got torch\.int64"):
        nanscan.check(torch.zeros(3, dtype=torch.int64, device=DEVICE))
