"""Forwards that a checkpoint runs a second time."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import nanscan
from helpers.models import (
    NAN,
    SCOPES,
    Do,
    Gap,
    batch,
    calls,
    enable,
    history,
    sgd,
    sites,
    train,
    verdicts,
)
from nanscan._data.site import KINDS

pytestmark = pytest.mark.usefixtures("one_thread")


# -- checkpointing ---------------------------------------------------------------------------------

REENTRANT = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "saved"])


class Checkpointed(nn.Module):
    def __init__(self, reentrant, function=torch.tanh):
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.block = Gap(function)
        self.head = nn.Linear(4, 4)
        self.reentrant = reentrant

    def forward(self, x):
        return self.head(checkpoint(self.block, self.stem(x), use_reentrant=self.reentrant))


@REENTRANT
@SCOPES
def test_a_recomputed_forward_is_told_from_the_first(scope, reentrant):
    model = Checkpointed(reentrant)
    monitor = enable(scope, model, kinds=KINDS)
    optimizer = sgd(model, momentum=0.9)
    train(model, optimizer, [batch()])
    seen = sites(monitor)
    first = calls(monitor)
    assert {"block.fc1 output", "block.fc1 output (recomputed)"} <= seen
    assert first["block.fc1 output"] == first["block.fc1 output (recomputed)"] == 1
    assert first["loss"] == 1
    train(model, optimizer, [batch(1), batch(2)])
    assert monitor.steps == 3
    assert sites(monitor) == seen  # the second time round is as the first
    assert calls(monitor) == first
    assert {"block.fc1 grad_output", "stem grad_output"} <= seen
    assert not any("grad_output (recomputed)" in site for site in seen)


@REENTRANT
@SCOPES
def test_a_checkpointed_training_is_bit_identical(scope, reentrant):
    def run(*, watched):
        torch.manual_seed(0)
        model = Checkpointed(reentrant, lambda x: F.dropout(x, 0.5).relu_())
        if watched:
            enable(scope, model, kinds=KINDS)
        losses = train(model, sgd(model), [batch(i) for i in range(3)])
        nanscan.disable()
        return losses, [p.grad for p in model.parameters()]

    losses, gradients = run(watched=False)
    losses2, gradients2 = run(watched=True)
    assert losses2 == losses
    assert all(map(torch.equal, gradients2, gradients))


@REENTRANT
@SCOPES
def test_what_a_checkpointed_forward_makes_is_found_once(scope, reentrant):
    model = Checkpointed(reentrant)
    monitor = enable(scope, model, kinds=KINDS, action="log")
    optimizer = sgd(model)
    train(model, optimizer, [batch()])
    model.block.function = lambda x: x / 0
    train(model, optimizer, [batch()])
    found = verdicts(monitor)
    assert found[0] == (1, "block.fc2 input[0]", "origin")
    assert [v for _, _, v in found[1:]] == ["propagated"] * (len(found) - 1)
    assert len({site for _, site, _ in found}) == len(found)
    again = [site for _, site, _ in found if "recomputed" in site]
    # The other kind of checkpoint stops as soon as it has what backward needs.
    assert again == (["block.fc2 output (recomputed)"] if reentrant else [])
    assert {step for step, _, _ in found} == {1}


@REENTRANT
@SCOPES
def test_what_only_the_recomputation_makes(scope, reentrant):
    """Such as with a random or a changed state: the first time was fine."""
    model = Checkpointed(reentrant)
    times = []

    def function(x):
        times.append(x)
        return torch.tanh(x) * (NAN if len(times) == 2 else 1.0)

    model.block.function = function
    monitor = enable(scope, model, kinds=KINDS, action="log")
    train(model, sgd(model), [batch()])
    first = monitor.findings[0]
    assert first.verdict == "origin"
    # The other kind of checkpoint stops before it, for it has all that backward needs.
    assert str(first.site) == (
        "block.fc2 output (recomputed)" if reentrant else "block.fc2.weight grad"
    )
    assert {f.verdict for f in monitor.findings[1:]} == {"propagated"}


@REENTRANT
@SCOPES
def test_the_loss_is_what_backward_starts_from_not_what_a_checkpoint_does(scope, reentrant):
    block, head = nn.Linear(4, 4), nn.Linear(4, 1)

    def run(x):
        return head(checkpoint(lambda x: block(x) * 2, x, use_reentrant=reentrant))

    model = Do(run)
    model.block, model.head = block, head
    monitor = enable(scope, model, kinds=("loss", "output"), action="log")
    losses = train(model, sgd(model), [batch().requires_grad_()], lambda out: out.sum())
    assert sites(monitor, "loss") == {"loss"}
    found = history(monitor, "loss", "loss")
    assert found["calls"].tolist() == [1]
    assert found["max"].tolist() == losses


@REENTRANT
@SCOPES
def test_what_the_backward_of_a_checkpoint_makes(scope, reentrant):
    model = Checkpointed(reentrant, lambda x: (x * 0).sqrt())
    monitor = enable(scope, model, kinds=KINDS, action="log")
    train(model, sgd(model), [batch(), batch()])
    found = verdicts(monitor)
    assert found[0] == (0, "block.fc1 grad_output", "origin")
    assert {v for _, _, v in found[1:]} == {"propagated"}
