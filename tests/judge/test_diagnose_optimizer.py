"""Causes of bad parameters and moments: each with a true case, and with a look-alike."""

import pytest
import torch
from torch import nn

from helpers.models import Do, diagnosed, first_fault, sgd, titles, train
from nanscan._data.site import DEFAULT_KINDS


def half_adam(eps, batch):
    model = nn.Linear(4, 3, dtype=torch.float16)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=eps)
    return diagnosed(model, lambda: train(model, optimizer, [batch.half()], torch.sum))


def with_a_zero_column(scale=1.0):
    """Its second feature is 0, and so is the gradient of the weights that it meets."""
    batch = torch.ones(2, 4) * scale
    batch[:, 1] = 0
    return batch


def test_adam_eps_that_rounds_to_zero():
    finding = first_fault(half_adam(1e-8, with_a_zero_column()))
    assert str(finding.site) == "weight param"
    assert titles(finding) == [
        "Adam's eps=1e-08 is 0 in float16: the update divides by sqrt(0) + 0",
        "parameters are trained in float16 itself, without autocast and GradScaler",
    ]
    assert "exp_avg_sq holds 3 exact zeros of 12; the parameter has 3 non-finite" in (
        finding.causes[0].evidence
    )


def test_adam_eps_that_float16_can_hold():
    assert half_adam(1e-4, with_a_zero_column()).findings == []


def test_an_update_that_does_not_fit_is_not_adams_eps():
    model = nn.Linear(4, 3, dtype=torch.float16)
    finding = first_fault(
        diagnosed(
            model, lambda: train(model, sgd(model, 60000.0), [torch.ones(2, 4).half()], torch.sum)
        )
    )
    assert (finding.site.kind, finding.verdict) == ("param", "origin")
    assert titles(finding)[0] == (
        "the learning rate is too high: one update of lr=60,000 does not fit into float16"
    )
    assert finding.causes[0].evidence == (
        "lr times the gradient's absmax of 2 is 120,000; the largest float16 is 65504"
    )
    assert finding.causes[0].remedy.startswith("SGD(..., lr=0.005)")
    assert "Adam" not in str(finding.causes)


@pytest.mark.parametrize("scale", [1.0, 1e25])
def test_an_update_that_fits_is_not_blamed(scale):
    """The same rate; what makes the parameter bad is another thing."""

    class SGD(torch.optim.Optimizer):
        def step(self):
            with torch.no_grad():
                self.param_groups[0]["params"][0].fill_(float("nan"))

    model = nn.Linear(4, 3)
    optimizer = SGD(model.parameters(), {"lr": 60000.0})
    finding = first_fault(
        diagnosed(model, lambda: train(model, optimizer, [torch.ones(2, 4) * scale], torch.sum))
    )
    assert (finding.site.kind, finding.verdict) == ("param", "origin")
    assert titles(finding) == []
    if scale > 1:  # its square would not fit
        assert "exploding" not in str(finding.unlikely)
        return
    assert "nanscan.locate(train_step, batch)" in str(finding)
    assert finding.unlikely == ("exploding gradients: the gradient is finite, absmax 2",)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.RMSprop, torch.optim.Adagrad])
def test_second_moment_overflow(kind):
    model = nn.Linear(4, 3, dtype=torch.float16)
    optimizer = kind(model.parameters(), 1e-3, eps=1e-4)
    finding = first_fault(
        diagnosed(
            model,
            lambda: train(model, optimizer, [torch.full((2, 4), 10000.0).half()], torch.sum),
            kinds=(*DEFAULT_KINDS, "state"),
        )
    )
    assert (finding.site.kind, finding.verdict) == ("state", "origin")
    moment = {"Adam": "exp_avg_sq", "RMSprop": "square_avg", "Adagrad": "sum"}[kind.__name__]
    assert titles(finding)[0] == (
        f"{kind.__name__}'s {moment} overflows float16: the gradient's square does not fit"
    )
    assert "12 Inf; the gradient is finite with absmax 20,000" in finding.causes[0].evidence


def test_a_second_moment_of_a_bad_gradient_did_not_overflow():
    model = nn.Linear(4, 3, dtype=torch.float16)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3, eps=1e-4)
    monitor = diagnosed(
        model,
        lambda: train(
            model, optimizer, [torch.ones(2, 4).half()], lambda out: out.sum() * float("inf")
        ),
        kinds=("grad", "param", "state"),
    )
    assert {f.site.kind for f in monitor.findings} >= {"grad", "state"}
    assert "overflows" not in str([f.causes for f in monitor.findings])


@pytest.mark.parametrize(("value", "is_absurd"), [(float("nan"), True), (3e38, True), (1e4, False)])
def test_uninitialised_parameter(value, is_absurd):
    model = nn.Linear(4, 3)
    with torch.no_grad():
        model.weight.zero_()
        model.weight[1, 2] = value
    monitor = diagnosed(model, lambda: model(torch.zeros(1, 4)))
    found = [f for f in monitor.findings if str(f.site) == "weight param"]
    assert bool(found) is is_absurd
    for finding in found:
        assert titles(finding) == [
            "the parameter was never initialised, or loaded from a bad checkpoint"
        ]
        evidence = finding.causes[0].evidence
        assert evidence in (
            "1 of 12 elements were non-finite before the first forward",
            "it reaches 3e+38, 88 % of the largest float32, before the first forward",
        )


def test_a_parameter_that_training_made_bad_was_initialised():
    model = nn.Linear(4, 3, dtype=torch.float16)
    monitor = diagnosed(
        model, lambda: train(model, sgd(model, 6e4), [torch.ones(2, 4).half()], torch.sum)
    )
    assert "initialised" not in str([f.causes for f in monitor.findings])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_trained_in_half_precision(dtype):
    """The same fault in parameters of float16 and under autocast: the dtype of parameters is no
    cause of it. It is of moments that do not fit.
    """
    model = nn.Sequential(nn.Linear(4, 3), Do(lambda x: x * 60000.0)).to(dtype)
    optimizer = sgd(model)

    def run():
        with torch.autocast("cpu", torch.float16, enabled=dtype == torch.float32):
            train(model, optimizer, [torch.full((2, 4), 9.0, dtype=dtype)], torch.sum)

    finding = first_fault(diagnosed(model, run))
    assert (str(finding.site), finding.dtype) == ("1 output", torch.float16)
    named = "parameters are trained in float16 itself, without autocast and GradScaler"
    assert named not in titles(finding)
    model = nn.Linear(4, 3, dtype=dtype)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    x = with_a_zero_column().to(dtype)
    monitor = diagnosed(model, lambda: train(model, optimizer, [x], torch.sum))
    if dtype == torch.float16:
        update = first_fault(monitor)
        assert titles(update)[1] == named
        assert update.causes[1].evidence.startswith("2 of 2 trained parameters are float16")
    else:
        assert monitor.findings == []


def test_inference_in_half_precision_is_not_training():
    model = nn.Sequential(nn.Linear(4, 3), Do(lambda x: x * 60000.0)).half()
    finding = first_fault(diagnosed(model, lambda: model(torch.full((2, 4), 9.0).half())))
    assert titles(finding) == []


# -- settings --------------------------------------------------------------------------------------

INF = float("inf")
RATE = "the learning rate is not finite: {} has lr={}"


@pytest.mark.parametrize("lr", ["inf", "nan"])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.RMSprop])
def test_a_learning_rate_that_is_not_finite(kind, lr):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    optimizer = kind([{"params": layer.parameters()} for layer in model], 1e-3)
    optimizer.param_groups[1]["lr"] = float(lr)
    finding = first_fault(
        diagnosed(model, lambda: train(model, optimizer, [torch.ones(1, 2)], torch.sum))
    )
    assert (str(finding.site), finding.verdict) == ("1.weight param", "origin")
    assert titles(finding) == [RATE.format(kind.__name__, lr)]
    assert finding.causes[0].evidence == (
        f"param_groups[1]['lr'] is {lr} in the step that made 1.weight param bad"
    )
    assert finding.unlikely == ()


@pytest.mark.parametrize(
    ("kind", "options", "title"),
    [
        (torch.optim.AdamW, {"weight_decay": INF}, "the weight decay is not finite: AdamW has"),
        (torch.optim.Adagrad, {"lr_decay": INF}, "lr_decay is not finite: Adagrad has lr_decay"),
        (torch.optim.LBFGS, {"lr": INF}, "the learning rate is not finite: LBFGS has lr=inf"),
        (torch.optim.LBFGS, {"lr": 1e25}, ""),
        (torch.optim.Adam, {"lr": 1e-3, "eps": INF}, None),  # its updates are 0
    ],
)
def test_other_settings_and_optimizers(kind, options, title):
    model = nn.Linear(2, 1)
    optimizer = kind(model.parameters(), **options)

    def closure():
        optimizer.zero_grad()
        loss = (model(torch.ones(1, 2)) - 3).square().mean()
        loss.backward()
        return loss

    def run():
        for _ in range(2):
            optimizer.step(closure)

    found = diagnosed(model, run)
    if title is None:
        assert found.findings == []
    else:
        assert [each.startswith(title) for each in titles(first_fault(found))] == [True] * bool(
            title
        )


@pytest.mark.parametrize("is_tensor", [False, True])
def test_a_scheduler_that_made_it_so(is_tensor):
    model = nn.Linear(2, 1)
    optimizer = sgd(model, torch.tensor(0.125) if is_tensor else 0.125)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: float("nan") if step else 1.0
    )

    def run():
        train(model, optimizer, [torch.ones(1, 2)], torch.sum)
        schedule.step()
        train(model, optimizer, [torch.ones(1, 2)], torch.sum)

    finding = first_fault(diagnosed(model, run))
    assert titles(finding) == [RATE.format("SGD", "nan")]
    assert finding.causes[0].evidence.endswith("; a scheduler began with 0.125")
    assert "['lr'] = 0.125, where it is set" in finding.causes[0].remedy


def test_a_finite_rate_and_an_unknown_option_that_is_infinite_are_not_blamed():
    class SGD(torch.optim.Optimizer):
        def step(self):
            with torch.no_grad():
                self.param_groups[0]["params"][0].fill_(float("nan"))

    model = nn.Linear(2, 1)
    optimizer = SGD(model.parameters(), {"lr": 1e3, "max_norm": float("inf")})
    finding = first_fault(
        diagnosed(model, lambda: train(model, optimizer, [torch.ones(1, 2)], torch.sum))
    )
    assert finding.site.kind == "param"
    assert "not finite" not in str(titles(finding))


def test_a_fused_optimizer_computes_in_float32():
    model = nn.Linear(4, 3, dtype=torch.float16)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3, fused=True)
    inputs = [with_a_zero_column().half()]
    assert diagnosed(model, lambda: train(model, optimizer, inputs, torch.sum)).findings == []


def test_a_parameter_that_is_filled_with_the_lowest_value_was_not_forgotten():
    model = nn.Linear(4, 3)
    nn.init.constant_(model.weight, torch.finfo(torch.float32).min)
    monitor = diagnosed(model, lambda: model(torch.zeros(1, 4)))
    assert "initialised" not in str([f.causes for f in monitor.findings])
