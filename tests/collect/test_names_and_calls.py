"""Under which name a site is reported, and how often it is scanned in a step."""

import pytest
import torch
from torch import nn

from helpers.models import (
    INF,
    NAN,
    SCOPES,
    Beside,
    Do,
    Gap,
    Net,
    batch,
    calls,
    enable,
    history,
    infer,
    set_nan,
    sgd,
    sites,
    train,
    verdicts,
)
from nanscan import Site
from nanscan._data.site import KINDS

pytestmark = pytest.mark.usefixtures("one_thread")


# -- names and calls -------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.twin = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.twin.weight = self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.embed(x) + self.twin(x))


@SCOPES
def test_every_name_of_a_tied_weight_is_told(scope):
    model = Tied()
    monitor = enable(scope, model, kinds=KINDS, action="log")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    model.head.weight.register_hook(lambda grad: grad * NAN)
    train(model, optimizer, [torch.tensor([1, 2])])
    found = {str(f.site): f for f in monitor.findings}
    assert set(found) == {
        f"embed.weight {what}" for what in ("grad", "param", "exp_avg", "exp_avg_sq")
    }
    for finding in found.values():
        assert sorted(finding.aliases) == ["head.weight", "twin.weight"]
        assert "tied to   head.weight, twin.weight" in str(finding) or (
            "tied to   twin.weight, head.weight" in str(finding)
        )


@SCOPES
def test_what_is_not_tied_has_no_aliases(scope):
    model = Gap(lambda x: x / 0)
    monitor = enable(scope, model, kinds=KINDS, action="log")
    train(model, sgd(model), [batch()])
    assert {len(f.aliases) for f in monitor.findings} == {0}
    assert "tied to" not in str(monitor.findings[0])


@SCOPES
def test_weights_tied_across_two_models(scope):
    first, second = nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4))
    second[0].weight = first[0].weight
    both = nn.ModuleDict({"a": first, "b": second})
    monitor = enable(scope, both, action="log")
    optimizer = sgd(both)
    first[0].weight.register_hook(lambda grad: grad * NAN)
    train(lambda x: second(first(x)), optimizer, [batch()])
    first_found = monitor.findings[0]
    names = {first_found.site.name, *first_found.aliases}
    assert names == {"a.0.weight", "b.0.weight"}


@SCOPES
def test_a_cell_that_goes_bad_in_one_of_its_calls(scope):
    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = nn.GRUCell(4, 4)
            self.bad = -1

        def forward(self, xs):
            h = torch.zeros(3, 4)
            for i, x in enumerate(xs):
                h = self.cell(x, h)
                if i == self.bad:
                    h = h * NAN
            return h

    model = Loop()
    monitor = enable(scope, model, kinds=KINDS, action="log")
    optimizer = sgd(model)
    train(model, optimizer, [torch.randn(5, 3, 4)] * 2)
    assert history(monitor, "cell", "output")["calls"].tolist() == [5, 5]
    assert history(monitor, "cell", "grad_output")["calls"].tolist() == [5, 5]
    model.bad = 2
    train(model, optimizer, [torch.randn(5, 3, 4)])
    first, second, *_ = monitor.findings
    assert (first.step, str(first.site), first.verdict) == (2, "cell input[1]", "origin")
    assert first.between in (None, (Site("cell", "output"), Site("cell", "input", "[1]")))
    assert first.how == "made by code outside of any module, in the forward of Loop"
    assert (str(second.site), second.verdict) == ("cell output", "propagated")
    assert (second.stats.calls, second.stats.nan_count) == (5, 2 * 12)


@SCOPES
def test_accumulation_over_micro_batches(scope):
    model = Net()
    monitor = enable(scope, model, kinds=KINDS, action="log")
    optimizer = sgd(model)

    def step(inputs):
        optimizer.zero_grad()
        for x in inputs:
            (model(x).square().mean() / len(inputs)).backward()
        optimizer.step()

    step([batch(i) for i in range(4)])
    step([batch(i) for i in range(4)])
    assert monitor.steps == 2
    rows = calls(monitor)
    for site in ("Net input[0]", "fc1 output", "fc2 grad_output", "loss"):
        assert rows[site] == 4, site
    assert rows["fc1.weight grad"] == rows["fc1.weight param"] == 1

    step([batch(0), batch(1), set_nan(batch(2)), batch(3)])
    found = verdicts(monitor)
    assert found[0] == (2, "Net input[0]", "propagated")
    assert {verdict for _, _, verdict in found} == {"propagated"}
    assert {step for step, _, _ in found} == {2}
    assert len({site for _, site, _ in found}) == len(found)
    assert monitor.findings[0].stats.calls == 4 or monitor.findings[0].stats.calls == 3
    assert monitor.findings[0].stats.first_nonfinite == (0, 1)


@SCOPES
def test_a_bad_micro_batch_that_backward_makes(scope):
    model = Gap()
    monitor = enable(scope, model, kinds=KINDS, action="log")
    optimizer = sgd(model)
    for number in range(4):
        model.function = (lambda x: (x * 0).sqrt()) if number == 2 else torch.tanh
        model(batch(number)).sum().backward()
    optimizer.step()
    assert verdicts(monitor)[0] == (0, "fc1 grad_output", "origin")
    assert [v for _, _, v in verdicts(monitor)[1:]] == ["propagated"] * (len(verdicts(monitor)) - 1)
    assert monitor.steps == 1


@SCOPES
def test_a_step_that_the_user_leaves_out(scope):
    """As `if not loss.isfinite(): continue`: the step goes on with the next batch."""
    model = Net()
    monitor = enable(scope, model, kinds=KINDS, action="log")
    optimizer = sgd(model)
    for x in (batch(), set_nan(batch(1)), batch(2), batch(3)):
        optimizer.zero_grad()
        loss = model(x).sum()
        if loss.isfinite():
            loss.backward()
            optimizer.step()
    assert monitor.steps == 3
    found = verdicts(monitor)
    assert found[0] == (1, "Net input[0]", "propagated")
    assert {v for _, _, v in found[:-1]} == {"propagated"}
    assert found[-1] == (2, "Net input[0]", "recovered")
    assert monitor.healthy


@SCOPES
def test_two_optimizers_of_one_model(scope):
    model = Net()
    monitor = enable(scope, model, kinds=KINDS, action="log")
    first, second = sgd(model.fc1), torch.optim.Adam(model.fc2.parameters(), 1e-3)
    for _ in range(2):
        model(batch()).sum().backward()
        first.step()
        second.step()
        model.zero_grad()
    assert monitor.findings == []
    model.fc2.bias.register_hook(lambda grad: grad * NAN)
    model(batch()).sum().backward()
    first.step()
    assert monitor.findings == []  # the gradients of the second were not looked at yet
    second.step()
    assert verdicts(monitor)[0][1:] == ("fc2.bias grad", "origin")
    assert {v for _, _, v in verdicts(monitor)[1:]} == {"propagated"}


@SCOPES
def test_two_models_that_train_against_each_other(scope):
    generator, critic = Net(), Net()
    pair = Beside(generator, critic)
    monitor = enable(scope, pair, kinds=KINDS, action="log")
    ours, theirs = sgd(generator), sgd(critic)
    for _ in range(2):
        theirs.zero_grad()
        (critic(generator(batch()).detach()).mean() - critic(batch(1)).mean()).backward()
        theirs.step()
        ours.zero_grad()
        (-critic(generator(batch(2))).mean()).backward()
        ours.step()
    assert monitor.findings == []
    critic.act = Gap(lambda x: (x * 0).sqrt())
    ours.zero_grad()
    (-critic(generator(batch(2))).mean()).backward()
    ours.step()
    first = monitor.findings[0]
    assert (str(first.site), first.verdict) == ("aside.act.fc1 grad_output", "origin")
    assert {f.verdict for f in monitor.findings[1:]} == {"propagated"}


@SCOPES
def test_a_module_that_two_models_share(scope):
    shared = nn.Linear(4, 4)
    first, second = nn.Sequential(shared, nn.Tanh()), nn.Sequential(shared, Do(lambda x: x / 0))
    both = nn.ModuleList([first, second])
    monitor = enable(scope, both, kinds=KINDS, action="log")
    infer(first, batch())
    with torch.no_grad():
        second(batch())
    assert [verdict for _, _, verdict in verdicts(monitor)] == ["origin"]
    name = "1.1" if scope == "model" else "Sequential#2.1"
    assert str(monitor.findings[0].site) == f"{name} output"
    shared_sites = {s for s in sites(monitor, "output") if s.endswith("0 output")}
    assert shared_sites == {"0.0 output" if scope == "model" else "0 output"}


@SCOPES
def test_modules_of_torch_that_are_not_called_are_listed(scope):
    class Attends(nn.Module):
        def __init__(self):
            super().__init__()
            self.attend = nn.MultiheadAttention(4, 2)
            self.unused = nn.Linear(4, 4)

        def forward(self, x):
            return self.attend(x, x, x)[0]

    model = Attends()
    monitor = enable(scope, model, kinds=KINDS, action="log")
    optimizer = sgd(model.attend)
    train(model, optimizer, [batch()])
    assert monitor.coverage().not_called == ("attend.out_proj", "unused")
    model.attend.out_proj.bias.register_hook(lambda grad: grad * NAN)
    train(model, optimizer, [batch()])
    assert verdicts(monitor) == [
        (1, "attend.out_proj.bias grad", "origin"),
        (1, "attend.out_proj.bias param", "propagated"),
    ]


@SCOPES
def test_a_bad_tied_weight_is_handed_to_every_module_that_has_it(scope):
    model = Tied()
    monitor = enable(scope, model, kinds=KINDS, action="log")
    optimizer = sgd(model)
    model.embed.weight.register_hook(lambda grad: grad * torch.tensor([1, 1, 1, 1, NAN])[:, None])
    tokens = torch.tensor([1, 2])  # row 4 goes bad, and only the head reads it
    train(model, optimizer, [tokens, tokens])
    assert verdicts(monitor)[0] == (0, "embed.weight grad", "origin")
    later = [(site, verdict) for step, site, verdict in verdicts(monitor) if step == 1]
    assert later[0] == ("head output", "propagated")


@SCOPES
def test_gradients_that_go_bad_independently(scope):
    """The one of a parameter needs no bad gradient from above: sums overflow, too."""
    model = nn.Sequential(nn.Linear(4, 4), Do(lambda x: (x * 0).sqrt()), nn.Linear(4, 4))
    model[2].bias.register_hook(lambda grad: grad * INF)
    monitor = enable(scope, model, kinds=KINDS, action="log")
    train(model, sgd(model), [batch()])
    found = {site: verdict for _, site, verdict in verdicts(monitor)}
    assert found == {
        "0 grad_output": "origin",
        "0.weight grad": "propagated",
        "0.bias grad": "propagated",
        "2.bias grad": "origin",
        "0.weight param": "propagated",
        "0.bias param": "propagated",
        "2.bias param": "propagated",
    }


@SCOPES
def test_parametrised_weights(scope):
    model = nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
        nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)),
    )
    monitor = enable(scope, model, kinds=KINDS, action="log")
    optimizer = sgd(model)
    train(model, optimizer, [batch(i) for i in range(3)])
    assert monitor.findings == []
    assert "1.parametrizations.weight.0._u buffer" in calls(monitor)  # changes in each step
    scale = model[0].parametrizations.weight.original0
    scale.register_hook(lambda grad: grad * NAN)
    train(model, optimizer, [batch()])
    assert verdicts(monitor) == [
        (3, "0.parametrizations.weight.original0 grad", "origin"),
        (3, "0.parametrizations.weight.original0 param", "propagated"),
    ]
