"""Causes of what goes bad in a forward: each with a true case, and with a look-alike."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import nanscan
from helpers.models import (
    INF,
    NAN,
    Do,
    HandMadeNorm,
    batch,
    diagnosed,
    first_fault,
    infer,
    sgd,
    titles,
    train,
)

OVERFLOW = "overflow of float16: values grew beyond 65504"
BRANCHES = "two branches meet here, and their sum does not fit into float16"
FAR = "inputs are far from unit scale for 16-bit training"
NOTHING = (
    "the loss is NaN and what came before is finite: a mean over nothing (no label counts), a log "
    "or root of negative values, or an Inf that was made on the way"
)


def inferred(model, *inputs):
    """The first fault of some forwards."""
    return first_fault(diagnosed(model, lambda: infer(model, *inputs)))


def test_bad_input_batch_and_a_value_that_only_the_model_can_have_made():
    x = torch.ones(2, 4)
    x[1, 3] = INF
    finding = inferred(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), x)
    assert titles(finding) == ["the batch was bad before the model saw it"]
    assert finding.unlikely == ()
    x = torch.tensor([INF, 60000.0]).half()  # whatever made it, the model did not
    finding = inferred(Do(lambda x: x * 1), x)
    assert titles(finding) == ["the batch was bad before the model saw it"]

    class Divides(nn.Sequential):
        def forward(self, x):
            return self[1](self[0](x) / 0)

    finding = inferred(Divides(nn.Linear(4, 4), nn.Linear(4, 1)), torch.ones(2, 4))
    assert str(finding.site) == "1 input[0]"
    assert titles(finding) == []
    assert finding.unlikely == ()


# -- overflow --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("by", "overflows"), [(60000.0, True), (INF, False)])
def test_overflow_and_an_inf_that_no_large_value_stands_beside(by, overflows):
    values = torch.tensor([0.5, 0.9, 2.0]) if overflows else torch.tensor([1e-3, 1.0, 0.0])
    finding = inferred(Do(lambda x: x * by), values.half())
    assert (str(finding.site), finding.verdict) == ("Do output", "origin")
    assert (OVERFLOW in titles(finding)) is overflows


def test_an_overflow_of_everything_rests_on_the_steps_before():
    rising = [torch.full((3,), top).half() for top in (0.1, 0.4, 1.0, 1.5, 4.0)]
    finding = inferred(Do(lambda x: x * 20000), *rising)
    assert titles(finding) == [OVERFLOW]
    assert finding.causes[0].evidence == (
        "3 Inf beside no finite value, and before that up to 30,000 (46 % of the largest float16); "
        "absmax before went from 2,000 to 30,000 in 4 steps"
    )


def test_nan_beside_large_values_is_no_overflow():
    finding = inferred(Do(lambda x: x.sqrt() * 240), torch.tensor([-1.0, 6.5e4]).half())
    assert finding.stats.absmax > 60000
    assert OVERFLOW not in titles(finding)


@pytest.mark.parametrize("tops", [[1e3, 5e3, 25e3], [25e3, 25e3, 25e3], [25e3]])
def test_near_the_limit_with_and_without_a_trend(tops):
    model = Do(lambda x: x * 1.5)
    monitor = diagnosed(model, lambda: infer(model, *[torch.tensor([top]).half() for top in tops]))
    (finding,) = monitor.findings
    assert finding.verdict == "near-limit"
    if tops[0] == 1e3:
        assert titles(finding) == ["values grow towards the largest float16"]
        assert finding.causes[0].evidence == (
            "absmax went from 1,500 to 37,504 in 3 steps, of late 5-fold a step; at this pace it "
            "passes 65504 in the next step"
        )
    else:
        assert titles(finding) == []


class Residual(nn.Module):
    def __init__(self, scale, combine=torch.add):
        super().__init__()
        self.stem = Do(lambda x: x * 10)
        self.branch = Do(lambda x: x * scale)
        self.after = nn.Identity()
        self.combine = combine

    def forward(self, x):
        x = self.stem(x)
        return self.after(self.combine(x, self.branch(x)))


def test_branches_whose_sum_does_not_fit():
    inputs = [torch.tensor([1.0, top]).half() for top in (10.0, 500.0, 2300.0)]
    finding = inferred(Residual(2.0), *inputs)
    assert (finding.step, str(finding.site)) == (2, "after input[0]")
    assert titles(finding)[0] == BRANCHES
    assert finding.causes[0].evidence == (
        "absmax of stem output went from 100 to 23,008 in 3 steps, that of branch output "
        "went from 200 to 46,016 in 3 steps; their sum can reach 69,024, the largest is 65504"
    )


def test_branches_that_fit_are_not_added_here():
    """The sum of both would fit: something else made Inf of them."""
    product = Residual(2.0, lambda a, b: a * b)
    finding = inferred(product, torch.tensor([1.0, 900.0]).half())
    assert str(finding.site) == "after input[0]"
    assert BRANCHES not in titles(finding)


def test_branches_that_do_not_fit_but_became_nan_were_not_added():
    finding = inferred(Residual(2.0, lambda a, b: a * 0 * NAN), torch.tensor([1.0, 2300.0]).half())
    assert (str(finding.site), finding.stats.inf_count) == ("after input[0]", 0)
    assert BRANCHES not in titles(finding)


def test_a_layer_of_torch_adds_no_branches():
    model = nn.Bilinear(1, 1, 1).half()
    x = torch.tensor([[40000.0]]).half()
    finding = first_fault(diagnosed(model, lambda: model(x, x.clone())))
    assert (str(finding.site), finding.stats.inf_count) == ("Bilinear output", 1)
    assert BRANCHES not in titles(finding)


@pytest.mark.parametrize(("scale", "far"), [(255.0, True), (1.0, False)])
def test_inputs_far_from_unit_scale(scale, far):
    x = torch.linspace(0.75, 1.0, 4).half() * scale
    finding = inferred(Do(lambda x: x * (66000.0 / scale)), x)
    assert titles(finding) == ([OVERFLOW, FAR] if far else [OVERFLOW])
    assert not far or finding.causes[1].evidence == "Do input[0] reaches 255"
    assert titles(inferred(Do(lambda x: x / 0), x)) == []  # the scale has no part in that


def test_calm_training_in_float32_takes_any_scale():
    assert titles(inferred(Do(lambda x: x / 0), torch.full((2, 4), 255.0))) == []


def test_an_additive_mask_is_not_far_from_unit_scale():
    mask = torch.zeros(2, 4).half()
    mask[:, 1] = -30000.0
    assert titles(inferred(Do(lambda x: x / 0), mask)) == []


# -- layers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("norm", "dtype", "eps"),
    [
        (nn.BatchNorm1d(3, eps=1e-300), torch.float32, ": its eps=1e-300 is 0 in float32"),
        (nn.GroupNorm(3, 3, eps=0.0), torch.float32, " with eps 0"),
        (HandMadeNorm(1e-8), torch.float16, ": its eps=1e-08 is 0 in float16"),
    ],
)
def test_zero_variance(norm, dtype, eps):
    x = torch.randn(4, 3, 5, dtype=dtype)
    x[:, 1] = 0.5
    finding = inferred(norm, x)
    kind = type(norm).__name__
    assert titles(finding) == [f"{kind} divides by a variance of 0{eps}"]
    whole = "; that is 1 of 3 channels" if kind != "HandMadeNorm" else ""
    assert finding.causes[0].evidence == (
        f"20 of 60 values are bad{whole}; what it was given is finite"
    )
    assert finding.unlikely == ()


def test_a_norm_with_an_eps_that_overflows_has_no_zero_variance():
    norm = nn.LayerNorm(4).half()
    nn.init.constant_(norm.weight, 60000.0)
    finding = inferred(norm, torch.tensor([[0.0, 0.0, 0.0, 9.0]]).half())
    assert "variance" not in str(finding.causes)


def test_an_eps_of_0_in_what_is_no_norm():
    class Divides(HandMadeNorm):
        pass

    assert titles(inferred(Divides(0.0), torch.full((2, 4), 0.5))) == []


def standardise(x):
    return (x - x.mean(0)) / x.std(0)


def test_a_single_sample():
    finding = inferred(Do(standardise), batch(), batch(1), batch(2, rows=1))
    assert titles(finding) == [
        "all is NaN in a batch of one sample: a variance of a single value is 0 / 0"
    ]
    assert finding.causes[0].evidence == (
        "all 4 values of shape [1, 4] are NaN; in the 2 steps before there were at least 12, all "
        "finite"
    )


@pytest.mark.parametrize("rows", [1, 3])
def test_nan_of_a_batch_of_the_usual_size_is_no_single_sample(rows):
    finding = inferred(Do(torch.sqrt), batch(rows=rows).abs(), -batch(rows=rows).abs())
    assert finding.stats.nan_count == finding.stats.numel
    assert titles(finding) == []


@pytest.mark.parametrize("rows", [1, 2])
def test_a_smaller_batch_and_a_part_of_one_are_no_single_sample(rows):
    """Two samples that are all NaN, and one that is so in part."""
    last = -batch(1, rows=rows).abs()
    if rows == 1:
        last[0, 0] = 1.0
    finding = inferred(Do(torch.sqrt), batch().abs(), last)
    assert titles(finding) == []


def test_fully_masked_rows_of_softmax():
    scores = torch.randn(3, 5)
    scores[0, :2] = scores[1] = -INF
    finding = inferred(nn.Softmax(-1), scores)
    assert titles(finding) == ["1 row of the softmax is fully masked"]
    assert finding.causes[0].evidence == (
        "5 NaN and no +Inf: 1 whole row of 5; Softmax input[0] holds 7 -Inf; all else that went "
        "in is finite"
    )
    scores[1, 4] = 0
    assert diagnosed(nn.Softmax(-1), lambda: nn.Softmax(-1)(scores)).findings == []


@pytest.mark.parametrize("boolean", [False, True])
def test_fully_masked_rows_of_attention(boolean):
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    x, mask = torch.randn(2, 5, 8), torch.zeros(5, 5)
    mask[3] = -INF
    given = mask.isinf() if boolean else mask

    def run():
        attention(x, x, x, attn_mask=given)

    finding = first_fault(diagnosed(attention, run))
    assert titles(finding) == ["2 rows of an attention are fully masked"]
    assert finding.causes[0].evidence == (
        "16 NaN and no +Inf: 2 whole rows of 8; "
        + (
            "no float mask was given"
            if boolean
            else "MultiheadAttention input.attn_mask holds 5 -Inf"
        )
        + "; all else that went in is finite"
    )


def test_fully_masked_rows_in_code_of_no_module():
    class Attends(nn.Module):
        def __init__(self):
            super().__init__()
            self.after = nn.Identity()

        def forward(self, x, mask):
            return self.after((x @ x.mT + mask).softmax(-1))

    model, mask = Attends(), torch.full((5, 5), -INF)
    finding = first_fault(diagnosed(model, lambda: model(torch.randn(5, 5), mask)))
    assert str(finding.site) == "after input[0]"
    assert titles(finding) == ["NaN out of -Inf: a fully masked row of a softmax, or 0 * -Inf"]
    assert "Attends input[1] holds 25 -Inf" in finding.causes[0].evidence


def test_nan_and_inf_beside_a_mask_are_no_masked_rows():
    model = Do(lambda x, mask: torch.stack([x / 0, (x + mask) * 0]))
    mask = torch.tensor([0.0, 0.0, 0.0, -INF])
    finding = first_fault(diagnosed(model, lambda: model(batch().abs(), mask)))
    assert finding.stats.posinf_count
    assert finding.stats.nan_count
    assert titles(finding) == []


def test_nan_beside_a_mask_that_is_not_of_whole_rows():
    """Something else than softmax made it: part of a row only."""

    class Spoilt(nn.Softmax):
        def forward(self, x):
            out = super().forward(x)
            out[1, 1] = NAN
            return out

    scores = torch.randn(3, 5)
    scores[0, :2] = -INF
    assert titles(inferred(Spoilt(-1), scores)) == []


# -- losses ----------------------------------------------------------------------------------------


def trained(loss):
    model = nn.Linear(4, 3)
    return first_fault(diagnosed(None, lambda: train(model, sgd(model), [batch()], loss)))


IGNORED = torch.full((3,), -100)


@pytest.mark.parametrize(
    ("criterion", "labels"),
    [
        (nn.CrossEntropyLoss(), IGNORED),
        (nn.CrossEntropyLoss(weight=torch.tensor([0.0, 1.0, 1.0])), torch.zeros(3, dtype=int)),
    ],
)
def test_a_loss_module_with_nothing_to_average(criterion, labels):
    finding = trained(lambda out: criterion(out, labels))
    assert (str(finding.site), finding.verdict) == ("CrossEntropyLoss output", "origin")
    assert titles(finding) == ["a mean over nothing, 0 / 0: every label is ignored or has weight 0"]
    evidence = finding.causes[0].evidence
    assert "it is NaN, not Inf, of finite logits with absmax" in evidence
    assert "ignore_index=-100" in evidence


def test_a_loss_module_of_an_empty_tensor():
    criterion = nn.MSELoss()
    finding = trained(lambda out: criterion(out[:0], out[:0].detach()))
    assert titles(finding) == ["a mean over nothing, 0 / 0"]
    assert finding.causes[0].evidence.endswith("it was given [0, 3]")
    gone = trained(lambda out: nn.MSELoss()(out[:0], out[:0].detach()))
    assert str(gone.site) == "MSELoss output"
    assert titles(gone) == [NOTHING]


def test_a_loss_module_that_is_bad_for_another_reason():
    """Infinite weights; and -Inf among the logits, of which 0 * -Inf is NaN."""
    heavy = nn.CrossEntropyLoss(weight=torch.tensor([INF, 1.0, 1.0]), reduction="sum")
    assert "nothing" not in str(
        trained(lambda out: heavy(out * 0, torch.zeros(3, dtype=int))).causes
    )
    finding = trained(lambda out: nn.CrossEntropyLoss()(out - INF, torch.ones(3, dtype=int)))
    assert "nothing" not in str(finding.causes)


def test_a_loss_of_no_module():
    def ignoring(out):
        return F.cross_entropy(out, IGNORED)

    model = nn.Linear(4, 3)
    finding = first_fault(diagnosed(model, lambda: train(model, sgd(model), [batch()], ignoring)))
    assert (str(finding.site), finding.verdict) == ("loss", "origin")
    assert titles(finding) == [NOTHING]
    assert (
        "it is NaN, not Inf, and all 2 tensors scanned in the forward of this step are finite"
        in (finding.causes[0].evidence)
    )
    assert finding.causes[0].remedy == ""
    assert "nanscan.locate" in str(finding)
    assert finding.unlikely == ()


@pytest.mark.parametrize("loss", [lambda out: out.sum() / 0, lambda out: (out * 1e30).exp().sum()])
def test_an_infinite_loss_is_no_mean_over_nothing(loss):
    model = nn.Linear(4, 3)
    finding = first_fault(diagnosed(model, lambda: train(model, sgd(model), [batch()], loss)))
    assert str(finding.site) == "loss"
    assert NOTHING not in titles(finding)


def test_a_loss_of_values_that_may_overflow_inside_of_it():
    model = nn.Linear(4, 3)
    finding = first_fault(
        diagnosed(
            model,
            lambda: train(
                model, sgd(model), [batch() * 1e4], lambda out: (out.exp() / out.exp().sum()).sum()
            ),
        )
    )
    assert str(finding.site) == "loss"
    assert finding.stats.nan_count == 1
    assert NOTHING not in titles(finding)


# -- weights ---------------------------------------------------------------------------------------


def large_weight(value, x):
    model = nn.Linear(4, 3)
    nn.init.constant_(model.weight, 0.5)
    with torch.no_grad():
        model.weight[1, 2] = value
    return diagnosed(model, lambda: infer(model, x), near_limit=1.0), model


def test_a_large_weight_is_named_with_its_size():
    monitor, _ = large_weight(1e30, torch.full((2, 4), 1e10))
    finding = first_fault(monitor)
    assert titles(finding) == ["overflow of float32: values grew beyond 3.403e+38"]
    assert finding.causes[0].evidence == (
        "2 +Inf in sums of products of finite values: the input reaches 1e+10, weight 1e+30"
    )
    assert finding.causes[0].remedy == ""
    assert large_weight(1e30, torch.ones(2, 4))[0].findings == []


def test_a_hook_may_have_made_what_no_product_can_have():
    model = nn.Linear(4, 3)
    model.register_forward_hook(lambda _module, _args, out: out * NAN)
    assert titles(inferred(model, torch.full((2, 4), 1e38))) == []
    bad = nn.Linear(4, 3)
    bad.forward = lambda x: F.linear(x, bad.weight) * NAN
    assert titles(inferred(bad, torch.ones(2, 4))) == []  # of values that fit


# -- buffers ---------------------------------------------------------------------------------------


def spoilt_statistics(name, value):
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = sgd(model)

    def run():
        train(model, optimizer, [batch(0)])
        getattr(model[0], name)[1] = value
        train(model, optimizer, [batch(1)])
        infer(model.eval(), batch(2))

    return diagnosed(model, run).findings


@pytest.mark.parametrize(
    ("name", "value", "returns"),
    [
        ("running_mean", NAN, "return NaN"),
        ("running_mean", INF, "return non-finite values"),
        ("running_var", INF, "divide by Inf"),
        ("running_var", NAN, "return NaN"),
    ],
)
def test_spoilt_statistics_are_told_with_what_they_mean_for_eval(name, value, returns):
    findings = spoilt_statistics(name, value)
    first = findings[0]
    assert str(first.site) == f"0.{name} buffer"
    assert titles(first) == [
        f"{name} of 0 is non-finite: model.eval() will {returns} until it is reset"
    ]
    assert first.causes[0].evidence.startswith(
        f"1 {'NaN' if value != value else '+Inf'} of 4 channels; "  # noqa: PLR0124 - NaN
    )
    later = [f for f in findings if str(f.site) == "0 output"]
    if returns == "divide by Inf":
        assert later == []
        return
    assert titles(later[0])[0] == f"0.{name} was bad before 0 ran"
    assert "of 4 since step 1" in later[0].causes[0].evidence


def test_a_bad_buffer_of_another_layer_is_no_source():
    class Scratch(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("scratch", torch.full((4,), 0.0))

        def forward(self, x):
            return x * 1

    model = nn.Sequential(Scratch(), Do(lambda x: x.sqrt()), nn.Linear(4, 1))
    optimizer = sgd(model)

    def run():
        train(model, optimizer, [batch(0).abs()])
        model[0].scratch[1] = NAN
        train(model, optimizer, [batch(1).abs()])
        infer(model, -batch(2).abs())

    findings = diagnosed(model, run).findings
    outputs = [f for f in findings if str(f.site) == "1 output"]
    assert [titles(f) for f in outputs] == [[]]
    assert titles(next(f for f in findings if f.site.kind == "buffer")) == []  # no statistic


# -- masks -----------------------------------------------------------------------------------------


def test_rows_of_nan_beside_a_causal_mask_are_not_said_to_be_masked():
    """No row of a causal mask hides everything: the rows are those of a norm of 0."""

    class Attends(nn.Module):
        def __init__(self):
            super().__init__()
            self.after = nn.Identity()

        def forward(self, x, mask):
            x = x / x.norm(dim=-1, keepdim=True)
            return self.after((x @ x.mT + mask).softmax(-1) @ x)

    model, mask = Attends(), torch.full((5, 5), -INF).triu(1)
    x = torch.randn(5, 5)
    x[4] = 0
    finding = first_fault(diagnosed(model, lambda: model(x, mask)))
    assert str(finding.site) == "after input[0]"
    assert titles(finding) == []


@pytest.mark.parametrize("low", [torch.finfo(torch.float16).min, -60000.0])
def test_masks_that_overflow_when_they_are_added(low):
    mask = torch.zeros(4, 4).half()
    mask[:, 1] = low
    named = "additive masks overflow float16: its lowest value and a negative one add up to -Inf"
    both = Do(lambda m: torch.cat([m, m + m]))
    assert (named in titles(inferred(both, mask))) is (low < -65000)


def test_banned_tokens_are_not_to_be_sampled():
    """A probe is no attention: what fills its -Inf chooses among tokens that are all banned."""

    def sample(logits):
        x = nanscan.probe("logits", logits)
        return nanscan.probe("probabilities", x.softmax(-1)).nan_to_num()

    logits = torch.randn(3, 5)
    logits[2] = -INF
    findings = diagnosed(None, lambda: infer(Do(sample), logits)).findings
    (named,) = [f for f in findings if str(f.site) == "probabilities probe"]
    (cause,) = named.causes
    assert cause.title == "NaN out of -Inf: a fully masked row of a softmax, or 0 * -Inf"
    assert cause.remedy == ""
