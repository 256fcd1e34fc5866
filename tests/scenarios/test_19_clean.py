"""Scenario 19: what holds -Inf, garbage or nothing, and is no fault. No finding, no warning."""

import pytest
import torch
from torch import nn

import nanscan
from helpers.models import SCOPES, no_trace, train


class Decoder(nn.Module):
    """A small language model that does what real ones do."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8, padding_idx=0)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 11)
        self.register_buffer("scratch", torch.full((4, 8), float("nan")))  # as torch.empty may be

    def forward(self, tokens, mask, *, bias, extra, lengths):
        x = self.layer(self.embed(tokens), src_mask=mask)
        x = x + self.attend(x, x, x, attn_mask=bias, need_weights=False)[0]
        self.scratch.copy_(x[:, 0].detach())
        assert extra.numel() == 0
        return self.head(x) * (lengths > 0)[:, None, None]


@pytest.fixture(autouse=True)
def _one_thread(num_threads):
    num_threads(1)


@pytest.mark.parametrize("fill", [float("-inf"), torch.finfo(torch.float32).min])
@SCOPES
def test_nothing_is_found(scope, fill):
    torch.manual_seed(0)
    model = Decoder()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    causal = torch.zeros(5, 5).masked_fill(torch.ones(5, 5).triu(1).bool(), fill)
    bias = causal.clone().requires_grad_()

    with no_trace(), nanscan.watch(model if scope == "model" else None) as monitor:
        for _ in range(5):
            tokens = torch.randint(0, 11, (4, 5))
            inputs = {
                "bias": bias,
                "extra": torch.empty(0, 8),
                "lengths": torch.tensor([5, 3, 1, 0]),
            }
            train(
                lambda t, inputs=inputs: model(t, causal, **inputs),
                optimizer,
                [tokens],
                lambda out: out.logsumexp(-1).mean(),
            )
    assert monitor.findings == []
    assert monitor.healthy
    sites = set(monitor.coverage().sites)
    assert {"Decoder input[1]", "Decoder input.extra"} <= sites
    assert {"Decoder input.bias", "attend input.attn_mask"} & sites
    assert "Decoder input[0]" not in sites  # integers


@SCOPES
def test_masked_inference_is_clean(scope):
    torch.manual_seed(0)
    model = Decoder().eval()
    mask = torch.full((5, 5), float("-inf")).triu(1)
    with no_trace(), nanscan.watch(model if scope == "model" else None) as monitor, torch.no_grad():
        out = model(
            torch.randint(0, 11, (4, 5)),
            mask,
            bias=mask,
            extra=torch.empty(0, 8),
            lengths=torch.ones(4),
        )
    assert out.isfinite().all()
    assert monitor.findings == []
    assert monitor.steps == 1
