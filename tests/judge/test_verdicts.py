"""The verdicts of findings: absorbed, recovered, scale-search, persistent-overflow, near-limit."""

import pytest
import torch
from torch import nn

import nanscan
from helpers.models import (
    INF,
    NAN,
    SCOPES,
    Beside,
    Do,
    Gap,
    Net,
    alone,
    batch,
    enable,
    infer,
    set_nan,
    sgd,
    train,
    verdicts,
)
from helpers.optimizers import Steep, steps_of_scaler, train_scaled
from nanscan import Site
from nanscan._data.site import KINDS

pytestmark = pytest.mark.usefixtures("one_thread")


# -- verdicts --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "function",
    [
        torch.nan_to_num,
        lambda x: torch.where(x.isfinite(), x, 0),
        lambda x: x.masked_fill(~x.isfinite(), 0.0),
        lambda x: x[1:] if not x[0].isfinite().all() else x,
    ],
)
@SCOPES
def test_what_is_absorbed(scope, function):
    model = nn.Sequential(Do(set_nan), Do(lambda x: x * 1), Do(function), nn.Linear(4, 4))
    monitor = enable(scope, model, action="log")
    infer(model, batch(), batch())
    assert verdicts(monitor) == [
        (0, "0 output", "origin"),
        (0, "1 output", "propagated"),
        (0, "2 output", "absorbed"),
    ]
    absorbed = monitor.findings[2]
    assert absorbed.stats.is_finite
    assert [str(site) for site, _ in absorbed.given] == ["1 output"]
    assert absorbed.given[0][1].nan_count == 1
    assert "2 output is finite in step 0 (absorbed:" in str(absorbed)
    assert monitor.findings[0].affected == (Site("1", "output"),)


@SCOPES
def test_the_first_that_absorbs_is_named(scope):
    model = nn.ModuleList([Do(set_nan), Do(torch.nan_to_num), Do(torch.nan_to_num)])
    model.forward = lambda x: [absorb(bad) for bad in [model[0](x)] for absorb in model[1:]]
    monitor = enable(scope, model, action="log")
    infer(model, batch())
    assert verdicts(monitor) == [(0, "0 output", "origin"), (0, "1 output", "absorbed")]


@SCOPES
def test_what_absorbs_only_a_part_does_not_absorb(scope):
    model = nn.Sequential(Do(set_nan), Do(lambda x: (torch.nan_to_num(x), x * 1)))
    monitor = enable(scope, model, action="log")
    infer(model, batch())
    assert verdicts(monitor) == [(0, "0 output", "origin"), (0, "1 output[1]", "propagated")]


@SCOPES
def test_a_bad_input_that_the_model_absorbs(scope):
    model = nn.Sequential(Do(torch.nan_to_num), nn.Linear(4, 4))
    monitor = enable(scope, model, action="log")
    for seed in range(3):
        infer(model, set_nan(batch(seed)))
    assert verdicts(monitor) == [(0, "0 output", "absorbed")]  # a note, given once
    (note,) = monitor.findings
    assert [str(site) for site, _ in note.given] == ["Sequential input[0]"]
    assert not note.is_fault


@SCOPES
def test_nothing_is_absorbed_where_nothing_was_handed_on(scope):
    """A mask of -Inf is nothing bad; nor did what never saw the bad values absorb them."""
    model = Beside(nn.Linear(4, 4), nn.Linear(4, 4))
    model.forward = lambda x, bad: (model.main(x), model.aside(x), bad * 1)
    monitor = enable(scope, model, action="log")
    with torch.no_grad():
        model(batch(), torch.full((2,), NAN))
    assert {f.verdict for f in monitor.findings} == {"propagated"}
    masked = Do(lambda x, mask: torch.softmax(x + mask, -1))
    monitor = enable(scope, masked, action="log")
    with torch.no_grad():
        masked(batch(), torch.tensor([0.0, -INF, 0.0, 0.0]))
    assert monitor.findings == []


@SCOPES
def test_recovery_is_told_once_an_episode(scope):
    model = Net()
    told = []
    monitor = enable(scope, model, action=told.append)
    good, bad = batch(), set_nan(batch(1))
    infer(model, good, bad, bad, good, good, good, bad, good)
    assert [(f.step, f.verdict) for f in told] == [
        (1, "propagated"),
        (3, "recovered"),
        (6, "propagated"),
        (7, "recovered"),
    ]
    recovered = told[1]
    assert str(recovered.site) == "Net input[0]"
    assert recovered.stats.is_finite
    assert recovered.history["nan"].tolist() == [0, 1, 1, 0]
    assert "Net input[0] is finite in step 3 (recovered:" in str(recovered)
    assert monitor.healthy


@SCOPES
def test_there_is_no_recovery_while_a_parameter_is_bad_that_is_not_read(scope):
    model = nn.Embedding(5, 4)
    model.weight.data[4, 1] = NAN
    monitor = enable(scope, model, action="log")
    infer(model, torch.tensor([4]), torch.tensor([1]), torch.tensor([2, 3]))
    assert verdicts(monitor) == [
        (0, f"{alone(scope, model)} param", "origin"),
        (0, "Embedding output", "propagated"),
    ]
    assert not monitor.healthy


@SCOPES
def test_there_is_no_recovery_while_a_parameter_is_bad(scope):
    model = Net()
    monitor = enable(scope, model, kinds=KINDS, action="log")
    optimizer = sgd(model)
    train(model, optimizer, [set_nan(batch())])
    model.fc1.bias.register_hook(torch.nan_to_num)
    train(model, optimizer, [batch(), batch(1)])
    assert "recovered" not in {f.verdict for f in monitor.findings}
    assert not monitor.healthy
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.nan_to_num_(0.1)
    train(model, optimizer, [batch(2)])
    assert [(f.step, f.verdict) for f in monitor.findings[-1:]] == [(3, "recovered")]
    assert monitor.healthy


OPTIMIZERS = {
    "plain": lambda model: sgd(model, 1e-33),
    "fused": lambda model: sgd(model, 1e-33, fused=True),  # is always called, and skips itself
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("unscale", [False, True])
@SCOPES
def test_the_search_of_a_scale(scope, unscale, optimizer):
    model = Steep(1e30)
    monitor = enable(scope, model, kinds=KINDS, action="raise")
    optimizer = OPTIMIZERS[optimizer](model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30, growth_interval=1000)
    weight = model.fc.weight.detach().clone()
    steps_of_scaler(scaler, model, optimizer, 1, unscale=unscale)
    assert torch.equal(model.fc.weight, weight)  # skipped
    first = monitor.findings[0]
    assert (first.step, first.verdict) == (0, "scale-search")
    assert first.how == ("the GradScaler skipped the step and lowered its scale of 1.07374e+09")
    assert monitor.healthy
    steps_of_scaler(scaler, model, optimizer, 8, unscale=unscale)
    assert not torch.equal(model.fc.weight, weight)
    assert [f.verdict for f in monitor.findings if f.verdict != "near-limit"] == ["scale-search"]
    assert monitor.steps == 9


@pytest.mark.parametrize("max_skips", [2, 3, 8])
@SCOPES
def test_too_many_skipped_steps(scope, max_skips):
    model = Steep(INF)
    told = []
    monitor = enable(
        scope, model, kinds=("grad", "param"), action=told.append, max_skipped_steps=max_skips
    )
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    steps_of_scaler(scaler, model, optimizer, max_skips + 3)
    assert [(f.step, str(f.site), f.verdict) for f in told] == [
        (0, "fc.weight grad", "scale-search"),
        (max_skips - 1, "fc.weight grad", "persistent-overflow"),
    ]
    scale = 2.0 ** (16 - max_skips + 1)
    assert told[1].how == (
        f"the GradScaler skipped {max_skips} steps in a row, this one at a scale of {scale:g}"
    )
    assert monitor.steps == max_skips + 3


@SCOPES
def test_too_many_skipped_steps_of_one_optimizer_of_two(scope):
    model = Net()
    monitor = enable(scope, model, kinds="grad", action="log", max_skipped_steps=3)
    first, second = sgd(model.fc1), sgd(model.fc2)
    scaler = torch.amp.GradScaler("cpu")
    model.fc1.weight.register_hook(lambda grad: grad * INF)
    for _ in range(5):
        model.zero_grad()
        scaler.scale(model(batch()).sum()).backward()
        scaler.step(first)
        scaler.step(second)
        scaler.update()
    assert [(str(f.site), f.verdict) for f in monitor.findings] == [
        ("fc1.weight grad", "scale-search"),
        ("fc1.weight grad", "persistent-overflow"),
    ]


@SCOPES
def test_a_step_that_goes_through_ends_the_count_of_skips(scope):
    model = Steep()
    monitor = enable(scope, model, kinds="grad", action="log", max_skipped_steps=3)
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    for slopes in ([INF, INF, 1.0] * 3, [INF] * 3):
        for slope in slopes:
            model.slope = slope
            steps_of_scaler(scaler, model, optimizer, 1)
    assert [(f.step, f.verdict) for f in monitor.findings] == [
        (0, "scale-search"),
        (3, "scale-search"),
        (6, "scale-search"),
        (9, "scale-search"),
        (11, "persistent-overflow"),
    ]


@SCOPES
def test_persistent_overflow_raises(scope):
    model = Steep(INF)
    enable(scope, model, kinds="grad", action="raise", max_skipped_steps=2)
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(nanscan.NonFiniteError, match="persistent-overflow") as caught:
        steps_of_scaler(scaler, model, optimizer, 3)
    assert caught.value.finding.step == 1


@SCOPES
def test_what_forward_makes_is_no_scale_search(scope):
    model = nn.Sequential(nn.Linear(4, 4), Do(lambda x: x / 0), nn.Linear(4, 1))
    monitor = enable(scope, model, kinds=KINDS, action="log")
    train_scaled(model, sgd(model), [batch(), batch(1)])
    assert verdicts(monitor)[0] == (0, "1 output", "origin")
    assert "scale-search" not in {f.verdict for f in monitor.findings}


@SCOPES
def test_near_the_limit_with_its_history(scope):
    model = nn.Sequential(Do(lambda x: x * 1.0))
    monitor = enable(scope, model, action="log", history=4)
    infer(model, *[torch.tensor([top, 1.0]).half() for top in (2e3, 4e3, 8e3, 1.6e4, 3.3e4, 6e4)])
    near = [f for f in monitor.findings if str(f.site) == "0 output"]
    assert [(f.step, f.verdict) for f in near] == [(4, "near-limit")]
    assert near[0].history["step"].tolist() == [1, 2, 3, 4]
    assert near[0].history["absmax"].tolist() == [4e3, 8e3, 1.6e4, 32992]
    assert "0 output is near the limit in step 4 (50 % of the largest float16, 65504)" in str(
        near[0]
    )
    assert "step 3: 16,000, step 4: 32,992" in str(near[0])
    assert monitor.healthy


@SCOPES
def test_made_between_two_modules_in_the_forward_of_a_third(scope):
    model = nn.Sequential(nn.Linear(4, 4), Gap(lambda x: x / 0))
    monitor = enable(scope, model, action="log")
    infer(model, batch())
    first = monitor.findings[0]
    assert (str(first.site), first.verdict) == ("1.fc2 input[0]", "origin")
    assert first.between == (Site("1.fc1", "output"), Site("1.fc2", "input", "[0]"))
    assert first.how == "made by code outside of any module, in the forward of 1"
    assert "between   1.fc1 output  and  1.fc2 input[0]" in str(first)


@SCOPES
def test_made_between_modules_with_others_in_between(scope):
    """What ran last before is told, which need not be where the values came from."""

    class Skips(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right, self.last = (nn.Linear(4, 4) for _ in range(3))

        def forward(self, x):
            left, right = self.left(x), self.right(x)
            return self.last(left / 0 + right)

    model = Skips()
    monitor = enable(scope, model, action="log")
    infer(model, batch())
    first = monitor.findings[0]
    assert first.between == (Site("right", "output"), Site("last", "input", "[0]"))
    assert first.how == "made by code outside of any module, in the forward of Skips"
