"""Verdicts: what went bad, where first, and whether it was made there or handed on."""

import functools

import numpy as np
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
    batch,
    enable,
    infer,
    run_quiet,
    set_nan,
    sgd,
    train,
    verdicts,
)
from nanscan import Site
from nanscan._judge import judge
from nanscan._judge.step import StepVerdicts

enable = functools.partial(enable, action="log")


def sites(pairs):
    return [str(site) for site, _ in pairs]


# -- in the forward --------------------------------------------------------------------------------


@SCOPES
def test_a_module_that_makes_it(scope):
    model = nn.Sequential(nn.Linear(4, 4), Do(lambda x: x / 0), nn.Linear(4, 4), nn.Tanh())
    monitor = enable(scope, model)
    infer(model, batch())
    assert verdicts(monitor) == [
        (0, "1 output", "origin"),
        (0, "2 output", "propagated"),
        (0, "3 output", "propagated"),
    ]
    first = monitor.findings[0]
    assert (first.dtype, first.shape) == (torch.float32, (3, 4))
    assert first.stats.inf_count == 12
    assert first.stats.first_nonfinite == (0, 0)
    assert sites(first.given) == ["0 output"]
    assert sites(first.before) == ["Sequential input[0]", "0 output"]
    assert sites(monitor.findings[2].given) == ["2 output"]
    assert first.affected == (
        Site("2", "output"),
        Site("3", "output"),
    )
    assert monitor.findings[1].affected == ()
    assert first.between is None


@SCOPES
def test_numbers_of_a_finding(scope):
    model = Do(lambda x: torch.tensor([[1.0, -2.0, NAN], [-INF, INF, INF]]))
    monitor = enable(scope, model)
    infer(model, batch())
    stats = monitor.findings[0].stats
    assert (stats.nan_count, stats.posinf_count, stats.neginf_count) == (1, 2, 1)
    assert (stats.min, stats.max, stats.first_nonfinite) == (-2.0, 1.0, (0, 2))
    assert (stats.numel, stats.calls, stats.shape) == (6, 1, (2, 3))


@SCOPES
def test_a_function_between_two_modules(scope):
    model = Gap(lambda x: (x - x) / (x - x))
    monitor = enable(scope, model)
    infer(model, batch())
    first = monitor.findings[0]
    assert (str(first.site), first.verdict) == ("fc2 input[0]", "origin")
    assert first.between == (Site("fc1", "output"), Site("fc2", "input", "[0]"))
    assert verdicts(monitor)[1:] == [(0, "fc2 output", "propagated")]


@SCOPES
def test_no_sites_are_named_around_a_call_that_is_not_known(scope, monkeypatch):
    """As scans of several streams leave a row that went bad while they overlapped."""

    class Judged(StepVerdicts):
        def __init__(self, record, *arguments):
            record.rows["first_bad_call"] = 0
            super().__init__(record, *arguments)

    monkeypatch.setattr(judge, "StepVerdicts", Judged)
    model = Gap(lambda x: (x - x) / (x - x))
    monitor = enable(scope, model)
    infer(model, batch())
    first = monitor.findings[0]
    assert (str(first.site), first.verdict) == ("fc2 input[0]", "origin")
    assert first.between is None
    assert verdicts(monitor)[1:] == [(0, "fc2 output", "propagated")]


@SCOPES
def test_a_container_that_only_passes_on_what_a_child_made(scope):
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Do(lambda x: x / 0)

        def forward(self, x):
            return x + self.inner(x)

    model = nn.Sequential(Residual())
    monitor = enable(scope, model)
    infer(model, batch())
    assert verdicts(monitor) == [(0, "0.inner output", "origin"), (0, "0 output", "propagated")]


@SCOPES
def test_a_container_that_makes_it_itself(scope):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            return self.fc(x) * NAN

    model = nn.Sequential(Scaled())
    monitor = enable(scope, model)
    infer(model, batch())
    assert verdicts(monitor) == [(0, "0 output", "origin")]


@SCOPES
def test_a_bad_batch_is_handed_on(scope):
    model = Net()
    monitor = enable(scope, model)
    infer(model, batch(), set_nan(batch(1)))
    assert verdicts(monitor) == [
        (1, "Net input[0]", "propagated"),
        (1, "fc1 output", "propagated"),
        (1, "act output", "propagated"),
        (1, "fc2 output", "propagated"),
    ]
    first = monitor.findings[0]
    assert first.stats.first_nonfinite == (0, 1)
    assert first.before == ()
    assert [cause.title for cause in first.causes] == ["the batch was bad before the model saw it"]


@SCOPES
def test_a_bad_keyword_argument_comes_before_what_is_made_of_it(scope):
    class Doubles(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, *, hidden):
            return self.fc(hidden * 2)

    model = Doubles()
    monitor = enable(scope, model)
    with torch.no_grad():
        model(hidden=batch())
        model(hidden=set_nan(batch()))
    assert verdicts(monitor) == [
        (1, "Doubles input.hidden", "propagated"),
        (1, "fc input[0]", "propagated"),
        (1, "fc output", "propagated"),
    ]
    assert monitor.findings[0].causes[0].title == "the batch was bad before the model saw it"


@SCOPES
def test_a_bad_target_of_the_criterion(scope):
    class WithLoss(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = Net()
            self.criterion = nn.MSELoss()

        def forward(self, x, y):
            return self.criterion(self.net(x), y)

    model = WithLoss()
    monitor = enable(scope, model)
    with torch.no_grad():
        model(batch(), set_nan(batch()))
    assert verdicts(monitor) == [
        (0, "WithLoss input[1]", "propagated"),
        (0, "criterion output", "propagated"),
    ] or verdicts(monitor) == [
        (0, "WithLoss input[1]", "propagated"),
        (0, "criterion output", "propagated"),
        (0, "WithLoss output", "propagated"),
    ]


def test_a_function_between_the_model_and_the_criterion():
    """The criterion is an outermost module too, yet its input did not come from a loader."""
    model, criterion = Net(), nn.MSELoss()
    monitor = enable("global", model)
    optimizer = sgd(model)
    train(model, optimizer, [batch()], lambda out: criterion(out * NAN, torch.zeros(3, 4)))
    first = monitor.findings[0]
    assert (str(first.site), first.verdict) == ("MSELoss input[0]", "origin")
    assert first.between == (Site("fc2", "output"), Site("MSELoss", "input", "[0]"))
    assert "batch" not in str(first.causes)


def test_what_the_model_made_is_no_bad_batch_of_the_criterion():
    model, criterion = Gap(lambda x: x / 0), nn.MSELoss()
    monitor = enable("global", model)
    train(model, sgd(model), [batch()], lambda out: criterion(out[:, :2], torch.zeros(3, 2)))
    found = {str(f.site): f for f in monitor.findings}
    assert verdicts(monitor)[0] == (0, "fc2 input[0]", "origin")
    assert found["MSELoss input[0]"].verdict == "propagated"
    assert found["MSELoss input[0]"].causes == ()


def test_what_the_model_made_is_no_bad_batch_of_a_metric():
    model, metric = Gap(lambda x: x / 0), Do(lambda x: x.mean())
    monitor = enable("global", model)

    def loss(out):
        metric(out.detach() + 1)
        return out.sum()

    train(model, sgd(model), [batch()], loss)
    found = {str(f.site): f for f in monitor.findings}
    assert found["Do input[0]"].verdict == "propagated"
    assert found["Do input[0]"].causes == ()


def test_a_bad_target_of_a_criterion_of_its_own():
    model, criterion = Net(), nn.MSELoss()
    monitor = enable("global", model)
    train(model, sgd(model), [batch()], lambda out: criterion(out, set_nan(batch(1))))
    assert verdicts(monitor)[:2] == [
        (0, "MSELoss input[1]", "propagated"),
        (0, "MSELoss output", "propagated"),
    ]
    assert monitor.findings[0].causes[0].title == "the batch was bad before the model saw it"


@SCOPES
def test_the_first_step_is_judged_whole_though_models_join_late(scope):
    """A second outermost module that first runs amid the step does not split it."""
    generator, critic = Gap(lambda x: x / 0), Net()
    pair = Beside(generator, critic)
    monitor = enable(scope, pair)
    optimizer = sgd(generator)
    critic(pair(batch())).sum().backward()
    optimizer.step()
    assert verdicts(monitor)[0] == (0, "main.fc2 input[0]", "origin")
    assert [f for f in monitor.findings[1:] if f.verdict == "origin"] == []
    assert all("initialised" not in str(f.causes) for f in monitor.findings)
    assert monitor.history(Site("main.fc1", "output"))["step"].tolist() == [0]


def test_a_model_that_joins_late_with_bad_parameters_takes_no_blame_for_others():
    generator, critic = Gap(lambda x: x / 0), Net()
    critic.fc1.bias.data[0] = NAN
    monitor = enable("global", None)
    optimizer = sgd(generator)
    critic(generator(batch())).sum().backward()
    optimizer.step()
    found = {str(f.site): f for f in monitor.findings}
    assert found["fc2 input[0]"].verdict == found["Net.fc1.bias param"].verdict == "origin"
    assert found["fc2 output"].verdict == "propagated"
    blamed = [site for site, f in found.items() if "initialised" in str(f.causes)]
    assert blamed == ["Net.fc1.bias param"]


@SCOPES
def test_a_shared_module_goes_bad_in_its_second_call(scope):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.shared = nn.Linear(4, 4)
            self.breaks = Do(lambda x: x / 0)

        def forward(self, x):
            return self.shared(self.breaks(self.shared(x)))

    model = Twice()
    monitor = enable(scope, model)
    infer(model, batch())
    assert verdicts(monitor)[:2] == [
        (0, "breaks output", "origin"),
        (0, "shared output", "propagated"),
    ]
    assert monitor.findings[1].stats.calls == 2


@SCOPES
def test_a_loop_goes_bad_at_some_step(scope):
    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = Do(lambda h: h * 1e20)

        def forward(self, x):
            for _ in range(4):
                x = self.cell(x)
            return x

    model = Loop()
    monitor = enable(scope, model)
    infer(model, torch.ones(2))
    assert verdicts(monitor) == [(0, "cell output", "origin")]
    stats = monitor.findings[0].stats
    assert (stats.calls, stats.posinf_count, stats.max) == (4, 6, pytest.approx(1e20))


@SCOPES
def test_a_bad_part_of_a_nested_output(scope):
    model = nn.Sequential(Do(lambda x: {"a": x, "b": (x, x / 0)}), Do(lambda d: d["b"][1] * 1))
    monitor = enable(scope, model)
    infer(model, batch())
    assert verdicts(monitor) == [(0, "0 output.b[1]", "origin"), (0, "1 output", "propagated")]


@SCOPES
def test_what_a_module_makes_of_nothing(scope):
    """No argument, no parameter: it can only have made it."""
    model = nn.Sequential(nn.Embedding(3, 4), Do(lambda x: x + 1))
    model[0].weight.data[1] = NAN
    monitor = enable(scope, model)
    infer(model, torch.tensor([0, 1]))
    assert verdicts(monitor) == [
        (0, "0.weight param", "origin"),
        (0, "0 output", "propagated"),
        (0, "1 output", "propagated"),
    ]


def test_without_inputs_what_follows_counts_as_handed_on():
    model = Gap(lambda x: x / 0)
    monitor = nanscan.enable(model, kinds="output", action="log")
    infer(model, batch())
    assert verdicts(monitor) == [(0, "fc2 output", "origin")]
    monitor.close()
    deep = nn.Sequential(Do(lambda x: x / 0), nn.Linear(4, 4), nn.Linear(4, 4))
    monitor = nanscan.enable(deep, kinds="output", action="log")
    infer(deep, batch())
    assert [f.verdict for f in monitor.findings] == ["origin", "propagated", "propagated"]


@SCOPES
def test_before_is_in_the_order_of_execution(scope):
    class Backwards(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(8)])

        def forward(self, x):
            for layer in reversed(self.layers):
                x = layer(x)
            return x / 0

    model = Backwards()
    monitor = enable(scope, model)
    infer(model, batch())
    finding = monitor.findings[0]
    assert str(finding.site) == "Backwards output"
    assert sites(finding.before) == [f"layers.{i} output" for i in (4, 3, 2, 1, 0)]
    assert all(stats.is_finite and stats.numel == 12 for _, stats in finding.before)


# -- masks and overflow ----------------------------------------------------------------------------


class Attends(nn.Module):
    def forward(self, scores, mask):
        return torch.softmax(scores + mask, -1)


@pytest.mark.parametrize("fill", [-INF, torch.finfo(torch.float32).min])
@SCOPES
def test_an_additive_mask_is_no_finding(scope, fill):
    model = nn.Sequential(Attends())
    mask = torch.zeros(4, 4).masked_fill(torch.ones(4, 4).triu(1).bool(), fill)
    model.forward = lambda x: model[0](x, mask)
    monitor = enable(scope, model)
    infer(model, torch.randn(4, 4))
    assert {"0 input[1]", "0 output"} <= set(monitor.coverage().sites)
    assert monitor.findings == []


@SCOPES
def test_a_fully_masked_row(scope):
    mask = torch.zeros(4, 4)
    mask[2] = -INF
    model = Attends()
    monitor = enable(scope, model)
    with torch.no_grad():
        model(torch.randn(4, 4), mask)
    assert [str(f.site) for f in monitor.findings] == ["Attends output"]
    finding = monitor.findings[0]
    assert finding.stats.nan_count == 4
    assert finding.stats.first_nonfinite == (2, 0)
    assert sites(finding.given) == ["Attends input[0]", "Attends input[1]"]


@SCOPES
def test_minus_inf_of_an_overflow_is_no_mask(scope):
    model = nn.Sequential(nn.Identity(), Do(lambda x: x.clamp(min=-1)))
    model.forward = lambda x: model[1](model[0](x) * 2)
    monitor = enable(scope, model)
    infer(model, torch.tensor([-40000.0, -20000.0, 1.0], dtype=torch.float16))
    assert [(str(f.site), f.verdict) for f in monitor.findings if f.verdict != "near-limit"] == [
        ("1 input[0]", "origin"),
        ("1 output", "absorbed"),  # by a clamp
    ]
    cause = next(f for f in monitor.findings if f.verdict == "origin").causes[0]
    assert cause.title == "overflow of float16: values grew beyond 65504"
    assert "40,000 (61 % of the largest float16)" in cause.evidence


@SCOPES
def test_near_the_limit_is_reported_once(scope):
    model = nn.Sequential(Do(lambda x: x * 2), Do(lambda x: x / 2))
    monitor = enable(scope, model)
    small, large = torch.tensor([2.0]).half(), torch.tensor([16400.0]).half()
    infer(model, small, large, large, large)
    assert verdicts(monitor) == [(1, "0 output", "near-limit")]
    finding = monitor.findings[0]
    assert finding.stats.is_finite
    assert finding.history["absmax"].tolist() == [4.0, 32800.0]
    assert monitor.healthy
    infer(model, small, large)
    assert verdicts(monitor)[1:] == [(5, "0 output", "near-limit")]


def test_near_the_limit_is_reported_once_though_validation_comes_between():
    model = Do(lambda x: x.mean() * 1)
    weight = nn.Parameter(torch.tensor([16400.0]).half())
    model.register_parameter("weight", weight)
    model.branch = Do(lambda x: x * 2)
    model.forward = lambda x: model.branch(x * weight) if x is not None else weight * 1
    monitor = nanscan.enable(model, action="log")
    optimizer = sgd(model, 0.0)
    for _ in range(3):
        train(model, optimizer, [torch.ones(1).half()], lambda out: out.sum())
        infer(model, None)
    assert [str(f.site) for f in monitor.findings] == ["branch output", "loss"]


@pytest.mark.parametrize(
    ("dtype", "value", "near"),
    [
        (torch.float16, 32700.0, False),
        (torch.float16, 32800.0, True),
        (torch.bfloat16, 40000.0, False),
        (torch.bfloat16, 2e38, True),
        (torch.float32, 1e38, False),
        (torch.float32, -2e38, True),
        (torch.float64, 1e300, False),
        (torch.float64, 1e308, True),
        (torch.float8_e4m3fn, 192.0, False),
        (torch.float8_e4m3fn, 240.0, True),
    ],
)
def test_how_near_depends_on_the_dtype(dtype, value, near):
    model = Do(lambda x: x.clone())
    monitor = nanscan.enable(model, kinds="output", action="log")
    infer(model, torch.tensor([value, 1.0], dtype=torch.float64).to(dtype))
    assert [f.verdict for f in monitor.findings] == ["near-limit"] * near


def test_the_share_of_the_limit_is_an_option():
    model = Do(lambda x: x.clone())
    for share, near in [(0.1, True), (0.9, False)]:
        monitor = nanscan.enable(model, kinds="output", action="log", near_limit=share)
        infer(model, torch.tensor([20000.0]).half())
        assert len(monitor.findings) == near


def test_the_limit_follows_the_dtype_of_the_step():
    model = Do(lambda x: x.clone())
    monitor = nanscan.enable(model, kinds="output", action="log")
    value = torch.tensor([40000.0])
    infer(model, torch.ones(1).half(), value, value.bfloat16())
    assert monitor.findings == []
    infer(model, value.half())
    assert verdicts(monitor) == [(3, "Do output", "near-limit")]


# -- in backward and in the optimizer --------------------------------------------------------------


class Layers(nn.Module):
    """Four linear layers; a function comes between the second and the third."""

    def __init__(self, function):
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(4, 4) for _ in range(4))
        self.function = function

    def forward(self, x):
        return self.d(self.c(self.function(self.b(self.a(x)))))


@SCOPES
def test_backward_makes_it(scope):
    model = Layers(lambda x: (x * 0).sqrt())
    monitor = enable(scope, model)
    train(model, sgd(model), [batch()])
    found = verdicts(monitor)
    assert found[0] == (0, "b.weight grad", "origin")
    assert {v for _, _, v in found[1:]} == {"propagated"}
    assert {s for _, s, _ in found} == {
        f"{layer}.{name} {kind}"
        for layer in "ab"
        for name in ("weight", "bias")
        for kind in ("grad", "param")
    }
    first = monitor.findings[0]
    assert first.between == (Site("c.bias", "grad"), Site("b.weight", "grad"))
    assert sites(first.before)[-4:] == [
        "d.weight grad",
        "d.bias grad",
        "c.weight grad",
        "c.bias grad",
    ]
    assert first.causes[0].title.startswith("a derivative is not finite")


@SCOPES
def test_backward_order_is_that_of_the_forward_not_of_the_optimizer(scope):
    model = Layers(lambda x: (x * 0).sqrt())
    monitor = enable(scope, model)
    optimizer = torch.optim.SGD([*model.a.parameters(), *model.d.parameters()], 0.1)
    optimizer.add_param_group({"params": [*model.b.parameters()]})
    train(model, optimizer, [batch()])
    assert verdicts(monitor)[0] == (0, "b.weight grad", "origin")


@SCOPES
def test_attention_whose_out_projection_is_not_called(scope):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.attend = nn.MultiheadAttention(4, 2)

        def forward(self, x):
            x = self.first(x)
            return self.attend(x, x, x)[0] * 1

    model = Model()
    monitor = enable(scope, model)
    model.attend.out_proj.weight.register_hook(lambda grad: grad * NAN)
    model.first.weight.register_hook(lambda grad: grad * NAN)
    train(model, sgd(model), [batch()])
    assert verdicts(monitor)[0] == (0, "attend.out_proj.weight grad", "origin")


@SCOPES
def test_a_bad_forward_makes_the_gradients_handed_on(scope):
    model = Gap(lambda x: x / 0)
    monitor = enable(scope, model)
    train(model, sgd(model), [batch()])
    assert [f for f in monitor.findings if f.verdict == "origin"] == [monitor.findings[0]]
    assert str(monitor.findings[0].site) == "fc2 input[0]"


@SCOPES
def test_the_optimizer_makes_it_and_the_next_forward_hands_it_on(scope):
    model = Net().half()
    monitor = enable(scope, model)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    with torch.no_grad():
        model.fc1.weight[:, 0] = 0
    x = batch().half()
    x[:, 0] = 0  # the gradient of that column is 0, and so is its second moment
    train(model, optimizer, [x, x], lambda out: 100 * out.float().square().mean())
    found = verdicts(monitor)
    assert found[0] == (0, "fc1.weight param", "origin")
    assert (1, "fc1 output", "propagated") in found
    assert [v for step, _, v in found if step == 1] == ["propagated"] * sum(
        s == 1 for s, _, _ in found
    )
    first = monitor.findings[0]
    assert first.causes[0].title.startswith("Adam's eps=1e-08 is 0 in float16")
    assert sites(first.given) == ["fc1.weight grad", "fc1.weight exp_avg", "fc1.weight exp_avg_sq"]
    handed = next(f for f in monitor.findings if f.step == 1)
    given = {str(site): stats for site, stats in handed.given}
    assert set(given) == {"Net input[0]", "fc1.weight param"}
    assert given["fc1.weight param"].nan_count == given["fc1.weight param"].nonfinite_count > 0


@SCOPES
def test_a_bad_gradient_is_handed_to_its_parameter(scope):
    model = Net()
    monitor = enable(scope, model)
    model.fc2.bias.register_hook(lambda grad: grad * NAN)
    train(model, sgd(model), [batch()])
    assert verdicts(monitor) == [
        (0, "fc2.bias grad", "origin"),
        (0, "fc2.bias param", "propagated"),
    ]


@SCOPES
def test_moments_that_go_bad(scope):
    model = Net()
    monitor = enable(scope, model, kinds=("param", "state"))
    optimizer = sgd(model, momentum=0.9)
    train(model, optimizer, [batch()])
    optimizer.state[model.fc1.bias]["momentum_buffer"][0] = INF
    train(model, optimizer, [batch()])
    found = verdicts(monitor)
    assert {s for step, s, _ in found} == {"fc1.bias param", "fc1.bias momentum_buffer"}
    assert found[0] == (1, "fc1.bias param", "origin")


# -- parameters before the first forward -----------------------------------------------------------


@SCOPES
def test_parameters_bad_from_the_start(scope):
    model = Net()
    with torch.no_grad():
        model.fc2.weight[1, 2] = INF
    monitor = enable(scope, model)
    infer(model, batch())
    assert verdicts(monitor) == [
        (0, "fc2.weight param", "origin"),
        (0, "fc2 output", "propagated"),
    ]
    first = monitor.findings[0]
    assert first.stats.first_nonfinite == (1, 2)
    assert (
        first.causes[0].title
        == "the parameter was never initialised, or loaded from a bad checkpoint"
    )
    assert "1 of 16 elements" in first.causes[0].evidence
    assert monitor.findings[1].causes == ()


# -- episodes --------------------------------------------------------------------------------------


@SCOPES
def test_a_site_is_reported_once_an_episode(scope):
    model = Net()
    monitor = enable(scope, model)
    bad = set_nan(batch())
    infer(model, bad, bad, batch(), bad)
    inputs = [(f.step, f.verdict) for f in monitor.findings if f.site.kind == "input"]
    assert inputs == [(0, "propagated"), (2, "recovered"), (3, "propagated")]
    assert len(monitor.findings) == 9


@SCOPES
def test_a_site_that_joins_an_episode_is_reported_too(scope):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right = Do(lambda x: x * 1), Do(lambda x: x * 1)

        def forward(self, x):
            return self.left(x[0]), self.right(x[1])

    model = Two()
    monitor = enable(scope, model)
    good, bad = torch.ones(2), torch.full((2,), NAN)
    infer(model, (bad, good), (bad, bad.clone()))
    assert verdicts(monitor) == [
        (0, "Two input[0][0]", "propagated"),
        (0, "left output", "propagated"),
        (1, "Two input[0][1]", "propagated"),
        (1, "right output", "propagated"),
    ]


@SCOPES
def test_a_clean_look_amid_a_bad_step_does_not_end_the_episode(scope):
    model = Beside(Gap(lambda x: (x * 0).sqrt()), Net())
    monitor = enable(scope, model, kinds=("output", "grad"))
    optimizer = sgd(model.main, 0.0)

    def loss(out):
        infer(model.aside, batch())
        return out.sum()

    for _ in range(3):
        train(model, optimizer, [batch()], loss)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.nan_to_num_(0.1)
    assert verdicts(monitor) == [
        (0, "main.fc1.weight grad", "origin"),
        (0, "main.fc1.bias grad", "propagated"),
    ]


# -- history ---------------------------------------------------------------------------------------


@SCOPES
def test_the_history_of_a_finding_goes_up_to_its_step(scope):
    model = nn.Sequential(Do(lambda x: x * 1e4))
    monitor = enable(scope, model)
    infer(model, *[torch.tensor([10.0**power, -1.0]) for power in (0, 10, 20, 33, 36)])
    finding = next(f for f in monitor.findings if f.verdict == "origin")
    assert str(finding.site) == "0 output"
    history = finding.history
    assert history["step"].tolist() == [0, 1, 2, 3, 4]
    np.testing.assert_allclose(history["absmax"], [1e4, 1e14, 1e24, 1e37, 1e4], rtol=1e-5)
    assert history["posinf"].tolist() == [0, 0, 0, 0, 1]
    assert history["min"].tolist() == [-1e4] * 5


def test_a_finding_in_a_row_that_no_kept_step_has():
    monitor = enable("global", None)
    infer(Net(), batch())
    large = nn.Sequential(*[Net() for _ in range(20)])
    large[19].fc2.bias.data[0] = NAN
    infer(large, batch())
    first = monitor.findings[0]
    assert str(first.site) == "Sequential.19.fc2.bias param"
    assert len(monitor.coverage().sites) > 64
    assert first.history["step"].tolist() == []


def test_findings_of_the_first_step_have_a_history_too():
    model = Net()
    monitor = enable("model", model)
    optimizer = sgd(model)
    model(set_nan(batch()))
    monitor.flush()
    assert monitor.findings[0].history["step"].tolist() == []
    assert run_quiet(optimizer.step) is None
