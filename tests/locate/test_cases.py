"""Kinds of faults that users met: what `locate` says of each, and what it must not say."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import nanscan
from helpers.located import garbage, marked
from helpers.models import INF, NAN

HALF = torch.float16


def said(location):
    """All that a location denies, and all that it suggests."""
    return " ".join(location.unlikely), " ".join(cause.remedy for cause in location.causes)


# Functional code that overflows ------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda x: torch.full((), 100.0).exp() * 0,
        lambda x: (torch.full((2,), 3e38) * 10).sum() * 0,
        lambda x: torch.tensor([10, 70000, 512]).to(HALF).cos().sum().float(),
        lambda x: torch.tensor(7e4).half().cos().float(),
    ],
)
def test_overflow_is_not_denied(make):
    x = torch.ones(2, requires_grad=True)

    def step():
        (x.sum() * make(x)).backward()

    location = nanscan.locate(step)
    denied, _ = said(location)
    assert "overflow" not in denied
    assert "data" not in denied
    assert "overflows" in location.causes[0].title


def test_a_position_beyond_half_precision():
    position, frequency = torch.tensor([10, 70000, 512]), torch.ones(4, dtype=HALF)

    def rope():
        phase = position.type_as(frequency)[:, None] * frequency  # the cast
        return phase.cos()

    location = nanscan.locate(rope)
    assert (location.op, location.line) == ("aten._to_copy.default", marked(rope, "the cast"))
    assert "is int64 and reaches 70,000" in location.causes[0].evidence


# What hides an Inf from the forward --------------------------------------------------------------


@pytest.mark.parametrize(
    ("hide", "hider"),
    [
        (lambda y: y.clamp(max=1e8), "aten.clamp.default"),
        (lambda y: torch.minimum(y, torch.tensor(50.0)), "aten.minimum.default"),
        (lambda y: torch.where(y < 9, y, 0.0), "aten.where.self"),
        (lambda y: y.masked_fill(y > 9, 0.0), "aten.masked_fill.Scalar"),
    ],
)
def test_what_hides_an_inf_is_named(hide, hider):
    x = torch.tensor([1.0, 700.0], requires_grad=True)

    def step():
        y = x.exp()  # the exp
        hide(y).sum().backward()

    location = nanscan.locate(step)
    assert (location.op, location.line) == ("aten.exp.default", marked(step, "the exp"))
    assert location.hidden_by.name == hider
    assert location.consequence_node == "ExpBackward0"
    assert location.consequence_forward.line == location.line
    assert "hides that, but not 0 * Inf = NaN in its backward" in location.causes[0].title
    _, remedies = said(location)
    assert "softmax" not in remedies
    report = " ".join(str(location).split())
    assert f"hidden by {hider}, " in report
    assert "NaN at aten.mul.Tensor in ExpBackward0: backward of aten.exp.default, " in report


def test_a_clamp_before_the_exponential_hides_nothing():
    x = torch.tensor([1.0, 700.0], requires_grad=True)
    assert nanscan.locate(lambda: x.clamp(max=18.0).exp().sum().backward()) is None


# A formula that is wrong -------------------------------------------------------------------------


@pytest.mark.parametrize("function", [torch.log, torch.sqrt, torch.log2, torch.acos, torch.atanh])
def test_a_clamp_does_not_hide_a_wrong_formula(function):
    action = 2 * torch.tanh(torch.tensor([0.1, 2.0]))
    location = nanscan.locate(lambda: function(1 - action.pow(2) + 1e-6))
    _, remedies = said(location)
    assert remedies.startswith("mend the formula that made self (aten.add.Tensor, test_cases.py:")
    assert ".clamp(" not in remedies


def test_rounding_is_no_wrong_formula():
    location = nanscan.locate(lambda: torch.tensor([1.0000001, 0.5]).acos())
    assert location.causes[0].remedy.startswith("torch.acos(x.clamp(")


# What is lost without a NaN ----------------------------------------------------------------------


def rms_norm(x):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3)


def layer_norm(x):
    x = x - x.mean(-1, keepdim=True)
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-3).sqrt()


def unit(x):
    return x / (x * x).sum(-1, keepdim=True).sqrt()


def normalized(x):
    return F.normalize(x, dim=-1, eps=1e-3)


NORMS = [rms_norm, layer_norm, unit, normalized]
LARGE = torch.tensor([[900.0, -900.0, 800.0, 0.5], [1.0, 2.0, -1.0, 0.0]], dtype=HALF)


@pytest.mark.parametrize(
    ("norm", "dtype", "factor"),
    [
        *((norm, HALF, 70.0 if norm is normalized else 1.0) for norm in NORMS),
        *((norm, torch.float32, 1e30) for norm in NORMS),
    ],
)
def test_an_overflow_that_wipes_values_out(norm, dtype, factor):
    x = LARGE.to(dtype) * factor
    location = nanscan.locate(lambda: norm(x))
    assert location.verdict == "wiped-out"
    assert location.hidden_by.name in ("aten.mul.Tensor", "aten.div.Tensor")
    report = str(location)
    assert " overflowed, step 0 (Inf here, and 0 in the place of what is divided by it" in report
    assert "\n  zero at   aten." in report
    assert location.causes[0].title.endswith(("overflows float16", "overflows float32"))


@pytest.mark.parametrize("norm", NORMS)
def test_norms_of_small_values_lose_nothing(norm):
    assert nanscan.locate(lambda: norm(LARGE / 100)) is None


@pytest.mark.parametrize(
    "healthy",
    [
        lambda x: 1 / (1 + (-x).exp()),
        lambda x: x / (1 + (-x).exp()),
        lambda x: torch.tanh(x * x),
        lambda x: (-(x * x)).exp(),
        lambda x: 1 / (x * x).clamp(min=1),
        lambda x: torch.sigmoid(x.pow(3)) * x,
    ],
)
@pytest.mark.parametrize("dtype", [HALF, torch.float32])
def test_functions_that_saturate_lose_nothing(healthy, dtype):
    x = torch.tensor([-900.0, 900.0, 1.0], dtype=dtype)
    assert nanscan.locate(lambda: healthy(x if dtype == HALF else x * 1e30)) is None


# GradScaler --------------------------------------------------------------------------------------


def scaled(steps, bad=None, **options):
    """Steps under a GradScaler whose scale is too large at first."""
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
    with nanscan.locating() as search:
        for step in range(steps):
            with torch.autocast("cpu", HALF):
                y = model(torch.randn(16, 8))
            loss = (y.float() - 3).square().mean()
            if step == bad:
                loss = loss + (y.float() * 0).sqrt().sum()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    return search


@pytest.mark.parametrize("options", [{}, {"fused": True}])
def test_a_scale_search_is_no_fault(options):
    search = scaled(12, **options)
    assert search.location is None
    assert search.scale_searches > 2


def test_what_no_scale_helps_is_a_fault():
    location = scaled(12, bad=10).location
    assert (location.direction, location.step) == ("backward", 10)
    assert location.forward.name == "aten.sqrt.default"
    assert scaled(2, bad=0).location.step == 0  # while it searches, too


# What was bad before -----------------------------------------------------------------------------


class Holds(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.tensor([1.0, NAN]))
        self.weight = nn.Parameter(torch.tensor([1.0, NAN]))
        self.cache = [(torch.tensor([1.0, NAN]), torch.ones(2))]
        self.which = ""

    def forward(self, x):
        return x * (self.cache[0][0] if self.which == "cache" else getattr(self, self.which))


@pytest.mark.parametrize(
    ("which", "name", "kind"),
    [
        ("scale", "inner.scale", "buffer"),
        ("weight", "inner.weight", "parameter"),
        ("cache", "inner.cache[0][0]", "attribute"),
    ],
)
def test_what_a_module_holds_is_named(which, name, kind):
    model = nn.Sequential()
    model.add_module("inner", Holds())
    model.inner.which = which
    model.inner.other = nn.Linear(2, 2)
    model.inner.other.weight = model.inner.weight
    location = nanscan.locate(lambda: model(torch.ones(2)))
    bad = location.operands[1]
    assert (bad.what, bad.kind) == (name, kind)
    assert location.causes[0].title == f"{name} was bad before anything ran"
    assert "sample" not in location.causes[0].remedy
    if kind == "parameter":
        assert "\n  tied to   inner.weight is also inner.other.weight" in str(location)


def test_the_call_of_a_module_is_told():
    class Log(nn.Module):
        def forward(self, x):
            return x.log()

    log = Log()
    model = nn.Sequential(log, nn.ReLU(), log)
    location = nanscan.locate(lambda: model(torch.tensor([3.0, 0.5])))
    assert location.at.call == 2
    assert "in 0 (call 2 of this step), step 0" in str(location)
    assert "1 -Inf, first at (1,)" in str(location)


def memory(rows):
    buffer = garbage(torch.empty(8, 4))
    buffer[:4] = 1.0
    part = buffer[rows]
    return part.sum()  # reads


def test_who_reads_uninitialised_memory():
    location = nanscan.locate(lambda: memory(slice(2, 6)))
    assert (location.consequence.name, location.consequence.line) == (
        "aten.sum.default",
        marked(memory, "reads"),
    )
    assert "read it with 8 NaN of 16" in location.causes[0].evidence
    assert nanscan.locate(lambda: memory(slice(0, 4))) is None


# 0 * NaN -----------------------------------------------------------------------------------------

VALUES = torch.tensor([[1.0, 2.0], [3.0, 4.0], [NAN, 1.0]])


@pytest.mark.parametrize(
    ("scores", "is_hidden"), [([1.0, 2.0, -INF], True), ([1.0, 2.0, 3.0], False)]
)
def test_a_nan_behind_a_mask(scores, is_hidden):
    weights = torch.tensor([scores, scores])
    location = nanscan.locate(lambda: weights.softmax(-1) @ VALUES)
    title = location.causes[0].title
    assert (title == "a weight of 0 does not hide a NaN: 0 * NaN is NaN") is is_hidden


# Decompositions and scales -----------------------------------------------------------------------


@pytest.mark.parametrize(("last", "is_degenerate"), [(0.0, True), (3.0, False)])
def test_a_singular_value_of_zero(last, is_degenerate):
    a = torch.diag(torch.tensor([1.0, 2.0, last]))
    a = torch.cat([a, torch.zeros(1, 3)]).requires_grad_()

    def step():
        torch.linalg.svd(a, full_matrices=False)[0].sum().backward()

    location = nanscan.locate(step)
    assert (location is not None) is is_degenerate
    if location is not None:
        assert location.causes[0].title.startswith("a singular value of 0")


@pytest.mark.parametrize(("x", "is_zero"), [(torch.zeros(4), True), (torch.ones(4), False)])
def test_a_float8_scale_of_zero(x, is_zero):
    def quantise():
        scale = x.abs().amax() / 448
        return (x / scale).to(torch.float8_e4m3fn)

    location = nanscan.locate(quantise)
    assert (location is not None) is is_zero
    if location is not None:
        assert location.causes[0].title.startswith("a scale is 0")


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize("rate", [INF, NAN])
def test_a_learning_rate_that_is_not_finite(kind, rate):
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    optimizer = kind([parameter], 1e-3)
    optimizer.param_groups[0]["lr"] = rate
    location = nanscan.locate(optimizer.step)
    assert location.direction == "optimizer"
    title = f"the learning rate is not finite: {kind.__name__} has lr={rate:g}"
    assert [cause.title for cause in location.causes] == [title]
    assert "lower" not in said(location)[1]
