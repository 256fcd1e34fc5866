"""Models that never run themselves: a method of theirs, or a function, calls their parts."""

import pytest
import torch
from torch import nn

import nanscan
from helpers.models import INF, NAN, SCOPES, batch, calls, enable, set_nan, sgd, verdicts

BATCH = "the batch was bad before the model saw it"
OUTSIDE = "the caller gave it non-finite values"


class Lit(nn.Module):
    """As a LightningModule."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))

    def training_step(self, x):
        return self.net(self.norm(x)).square().mean()

    def encode(self, x):
        return self.net[0](x)


class Agent(nn.Module):
    """Actor and critic."""

    def __init__(self):
        super().__init__()
        self.actor, self.critic = nn.Linear(4, 2), nn.Linear(4, 1)

    def act(self, x):
        with torch.no_grad():
            return self.actor(x).argmax(-1)

    def training_step(self, x):
        return self.actor(x).square().mean() + self.critic(x).square().mean()


class Gan(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator, self.critic = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def training_step(self, noise, real):
        fake = self.generator(noise)
        return self.critic(fake).mean() - self.critic(real).mean()


def step(model, optimizer, *inputs):
    optimizer.zero_grad()
    model.training_step(*inputs).backward()
    optimizer.step()


@pytest.mark.parametrize("kind", [Lit, Agent])
@SCOPES
def test_a_bad_batch_comes_from_the_caller(scope, kind):
    model = kind()
    monitor = enable(scope, model, action="log")
    optimizer = sgd(model)
    step(model, optimizer, batch())
    assert monitor.steps == 1
    step(model, optimizer, set_nan(batch()))
    first = monitor.findings[0]
    name = {Lit: "norm", Agent: "actor"}[kind]
    assert (str(first.site), first.verdict, first.how) == (
        f"{name} input[0]",
        "propagated",
        OUTSIDE,
    )
    assert [cause.title for cause in first.causes] == [BATCH]
    assert {finding.verdict for finding in monitor.findings[1:]} == {"propagated"}


@SCOPES
def test_names_are_full(scope):
    model = Lit()
    monitor = enable(scope, model, action="log")
    optimizer = sgd(model)
    step(model, optimizer, batch())
    assert {site.split()[0] for site in calls(monitor)} == {
        *("norm", "net", "net.0", "net.1", "net.2", "loss"),
        *(name for name, _ in model.named_parameters()),
    } - {"net"}
    assert monitor.coverage().not_called == ("Lit",)


def test_a_second_model_of_one_module_has_names_without_gaps():
    models = nn.LayerNorm(4), nn.LayerNorm(4)
    with nanscan.watch() as monitor:
        both = torch.optim.SGD([p for model in models for p in model.parameters()], 0.1)
        models[1](models[0](batch())).sum().backward()
        both.step()
    assert {"LayerNorm#2.weight grad", "LayerNorm#2.bias param"} <= set(calls(monitor))


@SCOPES
def test_what_code_between_two_parts_makes_is_no_bad_batch(scope):
    class Split(Lit):
        def training_step(self, x):
            return self.net(self.norm(x) * INF).square().mean()

    model = Split()
    monitor = enable(scope, model, action="log")
    step(model, sgd(model), batch())
    first = monitor.findings[0]
    assert (str(first.site), first.verdict) == ("net input[0]", "origin")
    assert [str(site) for site in first.between] == ["norm output", "net input[0]"]
    assert BATCH not in [cause.title for cause in first.causes]


@SCOPES
def test_parts_of_a_decode_step_belong_to_one_step(scope):
    class Served(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone, self.head = nn.Linear(4, 4), nn.Linear(4, 4)

        @torch.no_grad()
        def decode(self, x, scale):
            return self.head(self.backbone(x) * scale)

    model = Served()
    monitor = enable(scope, model, action="log")
    for number in range(4):
        model.decode(batch(), NAN if number == 2 else 1.0)
    assert monitor.steps == 3
    first = monitor.findings[0]
    assert (first.step, str(first.site), first.verdict) == (2, "head input[0]", "origin")
    assert BATCH not in [cause.title for cause in first.causes]
    assert {f.step for f in monitor.findings if f.is_fault} == {2}


@SCOPES
def test_a_gan_in_one_container(scope):
    model = Gan()
    monitor = enable(scope, model, action="log")
    optimizer = sgd(model)
    step(model, optimizer, batch(), batch(1))
    step(model, optimizer, batch(), set_nan(batch(1)))
    assert verdicts(monitor)[0] == (1, "critic input[0]", "propagated")
    assert monitor.findings[0].how == OUTSIDE


@SCOPES
def test_a_method_beside_a_forward(scope):
    class Both(Lit):
        def forward(self, x):
            return self.net(self.norm(x))

    model = Both()
    monitor = enable(scope, model, action="log")
    optimizer = sgd(model)
    for x in (batch(), batch(1)):
        model(x).sum().backward()
        optimizer.step()
    model.encode(set_nan(batch())).sum().backward()
    optimizer.step()
    first = monitor.findings[0]
    assert (first.step, str(first.site), first.how) == (2, "net.0 input[0]", OUTSIDE)


def test_looking_for_the_root_changes_no_local_variable():
    class Counting(Lit):
        def training_step(self, x):
            held, extra = locals(), x + 1
            loss = self.net(x).mean()
            return loss, extra, sorted(held)

    model = Counting()
    with nanscan.watch():
        loss, extra, held = model.training_step(batch())
    assert torch.equal(extra, batch() + 1)
    assert loss.isfinite()
    assert {"self", "x"} <= set(held)


@SCOPES
def test_a_decode_step_in_which_all_tokens_are_banned(scope):
    """Bans before it are silent; the sampler is code outside of any module."""
    model = nn.Sequential(nn.Linear(4, 6))
    monitor = enable(scope, model, action="log")
    with torch.no_grad():
        for number in range(5):
            logits = model(batch(number, rows=4))
            logits[:, :3] = -INF
            if number == 3:
                logits[2] = -INF
            nanscan.probe("processed", logits)
            nanscan.probe("probabilities", logits.softmax(-1))
    monitor.flush()
    first = monitor.findings[0]
    assert (first.step, str(first.site), first.verdict) == (3, "probabilities probe", "origin")
    assert first.stats.first_nonfinite == (2, 0)
    assert first.stats.nan_count == 6
    assert [str(site) for site in first.between] == ["processed probe", "probabilities probe"]
    assert {f.step for f in monitor.findings if f.is_fault} == {3}
    assert monitor.healthy
