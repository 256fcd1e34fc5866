"""Causes with their look-alikes: code that reads the same, of which the cause must not be named."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import nanscan
from helpers.located import garbage, marked
from helpers.models import INF, NAN

HALF = torch.float16


def titles(location):
    return [] if location is None else [cause.title for cause in location.causes]


def located(function, *values, dtype=torch.float32):
    """Where a function of these values, or its gradient, goes bad."""
    x = torch.tensor(values, dtype=dtype, requires_grad=True)
    return nanscan.locate(lambda: function(x).float().sum().backward())


# Settings of optimizers ---------------------------------------------------------------------------


def stepped(kind, **options):
    parameter = nn.Parameter(torch.ones(2))

    def closure():
        parameter.grad = torch.tensor([1.0, -0.5])
        return parameter.detach().sum()

    optimizer = kind([parameter], **({"lr": 1e-3} | options))
    location = nanscan.locate(optimizer.step, closure)
    return location, parameter.detach()


@pytest.mark.parametrize(
    ("kind", "options", "title"),
    [
        (torch.optim.SGD, {"lr": INF}, "the learning rate is not finite: SGD has lr=inf"),
        (torch.optim.SGD, {"lr": INF, "foreach": True}, "the learning rate is not finite: SGD"),
        (torch.optim.SGD, {"lr": INF, "fused": True}, "the learning rate is not finite: SGD"),
        (torch.optim.SGD, {"weight_decay": NAN}, "the weight decay is not finite: SGD has weight_"),
        (torch.optim.AdamW, {"weight_decay": INF}, "the weight decay is not finite: AdamW has"),
        (
            torch.optim.AdamW,
            {"lr": torch.tensor(INF), "foreach": False},
            "the learning rate is not finite: AdamW has lr=inf",
        ),
        (
            torch.optim.Adagrad,
            {"lr_decay": INF},
            "lr_decay is not finite: Adagrad has lr_decay=inf",
        ),
        (torch.optim.RMSprop, {"lr": INF}, "the learning rate is not finite: RMSprop has lr=inf"),
        (torch.optim.LBFGS, {"lr": INF}, "the learning rate is not finite: LBFGS has lr=inf"),
    ],
)
def test_a_setting_that_is_not_finite(kind, options, title):
    location, _ = stepped(kind, **options)
    assert location.direction == "optimizer"
    assert [each.startswith(title) for each in titles(location)] == [True]
    name = "weight_decay" if "weight_decay" in options else "lr"
    assert name in location.causes[0].remedy
    assert "overflow" not in " ".join(location.unlikely)
    value = {"foreach", "fused", "lr", "weight_decay", "lr_decay"} & options.keys()
    mended = {key: options[key] for key in value if key in ("foreach", "fused")}
    location, parameter = stepped(kind, **mended)
    assert location is None
    assert parameter.isfinite().all()


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.Adam, {"eps": INF}),
        (torch.optim.Rprop, {"step_sizes": (1e-6, INF)}),
        (torch.optim.SGD, {"lr": 1e30}),
    ],
)
def test_a_setting_that_may_be_so_large(kind, options):
    assert stepped(kind, **options)[0] is None


def test_a_rate_that_is_finite_and_too_high():
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.full((2,), 100.0)
    location = nanscan.locate(torch.optim.SGD([parameter], 3e38).step)
    assert titles(location) == ["the optimizer's update overflows float32"]


def test_the_group_of_the_setting():
    groups = [
        {"params": [nn.Parameter(torch.ones(2))]},
        {"params": [nn.Parameter(torch.ones(2))], "lr": INF},
    ]
    for group in groups:
        group["params"][0].grad = torch.ones(2)
    location = nanscan.locate(torch.optim.SGD(groups, lr=0.1).step)
    assert "optimizer.param_groups[1]['lr'] = " in location.causes[0].remedy


# An eps that is lost ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "lost", "kept"),
    [
        (lambda x: F.normalize(x, dim=-1), HALF, torch.float32),
        (lambda x: F.cosine_similarity(x, x + 0, dim=0), HALF, torch.bfloat16),
        (lambda x: x / (x.norm().clamp(min=1e-8)), HALF, torch.float32),
        (lambda x: x / (x.pow(2).mean() + 1e-8).sqrt(), HALF, torch.float32),
        (lambda x: x * (x.pow(2).mean() + 1e-8).rsqrt(), HALF, torch.bfloat16),
        (lambda x: (x - -1e-9).log(), HALF, torch.float32),
        (lambda x: (2 * x).sum() / (x.sum() + 1e-8), HALF, torch.float32),
        (lambda x: (x + 1e-50).log(), torch.float32, torch.float64),
    ],
)
def test_an_eps_that_is_zero(function, lost, kept):
    location = located(function, 0.0, 0.0, dtype=lost)
    assert titles(location)[0].endswith(f"is 0 in {str(lost)[6:]}")
    assert located(function, 0.0, 0.0, dtype=kept) is None


@pytest.mark.parametrize("number", [1e-3, 0.0])
def test_an_eps_that_is_held_or_none_is_not_named(number):
    location = located(lambda x: (x + number).log(), 0.0, 1.0, dtype=HALF)
    assert "its eps" not in " ".join(titles(location))
    location = located(lambda x: ((x + 1e-3) * (x > 0)).log(), 0.0, 1.0, dtype=HALF)
    assert titles(location) == ["log of zero"]  # the eps is held, a factor of 0 is not kept out


def test_a_clamp_to_one():
    location = located(lambda x: (1 - x.sigmoid().clamp(1e-12, 1 - 1e-12)).log(), 40.0)
    assert titles(location)[0].startswith("log of zero: 0.999999999999, at which values are ")
    assert located(lambda x: (1 - x.sigmoid().clamp(1e-7, 1 - 1e-7)).log(), 40.0) is None
    location = located(lambda x: (1 - x.clamp(0, 1)).log(), 40.0)
    assert titles(location) == ["log of zero"]  # it was never to keep 1 out


# What hides an Inf from the forward ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "by"),
    [
        (lambda x: torch.where(x > 0, 1 / x, 0.0), "torch.where"),
        (lambda x: torch.where(x > 0, x.log(), 0.0), "torch.where"),
        (lambda x: (1 / x)[x > 0], "indexing"),
        (lambda x: F.relu6((x * 200).exp()), "F.hardtanh"),
        (lambda x: torch.minimum((x * 200).exp(), torch.tensor(5.0)), "torch.minimum"),
        (lambda x: 1 - (-(x * 200).exp()).exp(), "torch.exp"),
    ],
)
def test_what_hides_an_inf_is_said_with_its_line(function, by):
    location = located(function, 0.0, 1.0)
    cause = location.causes[0]
    assert f"{by} (test_lookalikes.py:" in f"{cause.title} {cause.evidence}"
    assert "0 * Inf = NaN" in cause.title


@pytest.mark.parametrize(
    "healthy",
    [
        lambda x: torch.where(x > 0, torch.where(x > 0, x, 1).log(), 0.0),
        lambda x: (x * 1e30).square().clamp(max=1.0),  # its backward has no Inf
        lambda x: (x * 200).clamp(max=5.0).exp(),
        lambda x: torch.where(x > 0, x.reshape(2, 1).norm(dim=1), 0.0),
    ],
)
def test_what_is_hidden_without_harm(healthy):
    assert located(healthy, 0.0, 1.0) is None


def test_values_that_take_no_part_hide_nothing():
    log_probabilities = torch.zeros(3, 1, 5).log_softmax(-1)
    x = log_probabilities.requires_grad_()
    targets = torch.tensor([[1, 2, 3, 4]])
    location = nanscan.locate(lambda: F.ctc_loss(x, targets, (3,), (4,)).backward())
    assert location.hidden_by is None  # backward makes ones like the loss, and reads no value of it


def test_nan_of_the_data_that_only_the_forward_is_spared():
    labels = torch.tensor([1.0, NAN])
    location = located(lambda x: torch.where(labels.isnan(), 0.0, (x - labels).square()), 1.0, 2.0)
    assert location.causes[0].remedy.startswith("x = torch.nan_to_num(x) before this op")
    known = ~labels.isnan()
    assert located(lambda x: (x[known] - labels[known]).square(), 1.0, 2.0) is None
    spared = torch.nan_to_num(labels)
    assert located(lambda x: torch.where(known, (x - spared).square(), 0.0), 1.0, 2.0) is None


# CTC ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("targets", "frames", "title"),
    [
        ([1, 2, 3, 4], 3, "CTC: a target is longer than its input"),
        ([1, 1, 1], 4, "CTC: a target is too long for its input, since equal labels"),
        ([1, 2, 3], 3, ""),
        ([1, 1, 1], 5, ""),
    ],
)
def test_lengths_of_ctc(targets, frames, title):
    scores = torch.randn(frames, 1, 5, requires_grad=True)

    def step():
        log_probabilities = scores.log_softmax(-1)
        F.ctc_loss(
            log_probabilities, torch.tensor([targets]), (frames,), (len(targets),)
        ).backward()

    location = nanscan.locate(step)
    assert (location is None) is not title
    assert [each.startswith(title) for each in titles(location)] == [True] * bool(title)


def test_a_ctc_loss_of_a_probability_of_zero_has_other_causes():
    scores = torch.zeros(4, 1, 5, requires_grad=True)

    def step():
        masked = scores.masked_fill(torch.arange(5) == 2, -INF)  # masks
        F.ctc_loss(masked.log_softmax(-1), torch.tensor([[1, 2]]), (4,), (2,)).backward()

    location = nanscan.locate(step)
    assert location.line == marked(step, "masks")
    assert "CTC" not in " ".join(titles(location))


# Decompositions -----------------------------------------------------------------------------------

EQUAL, DISTINCT = torch.eye(3), torch.diag(torch.tensor([1.0, 2.0, 3.0]))
RANK_1 = torch.ones(3, 3)


@pytest.mark.parametrize(
    ("function", "degenerate", "title"),
    [
        (lambda a: torch.linalg.svd(a)[0].abs(), EQUAL, "two equal eigenvalues or singular"),
        (lambda a: torch.linalg.eigh(a)[1].abs(), EQUAL, "two equal eigenvalues or singular"),
        (lambda a: torch.linalg.eig(a)[1].abs(), EQUAL, "two equal eigenvalues or singular"),
        (lambda a: torch.linalg.qr(a)[0], RANK_1, "the derivative of QR is not defined for a"),
    ],
)
def test_degenerate_matrices(function, degenerate, title):
    location = located(function, *degenerate.tolist())
    assert [each.startswith(title) for each in titles(location)] == [True]
    assert located(function, *DISTINCT.tolist()) is None


@pytest.mark.parametrize("a", [EQUAL, RANK_1, torch.zeros(3, 3)])
@pytest.mark.parametrize("function", [torch.linalg.svdvals, torch.linalg.eigvalsh])
def test_values_alone_are_always_differentiable(function, a):
    assert located(function, *a.tolist()) is None


# Memory that is read partly -----------------------------------------------------------------------


def cache(read, masked=False):
    keys, values = torch.ones(1, 8, 4), garbage(torch.empty(1, 8, 4))
    values[:, :4] = 1.0  # writes
    scores = torch.zeros(1, 1, read)
    if masked:
        scores[..., 4:] = -INF
    weights = (torch.ones(1, 1, 4) @ keys[:, :read].transpose(1, 2) + scores).softmax(-1)
    return weights @ values[:, :read]  # reads


@pytest.mark.parametrize(("read", "masked"), [(5, False), (8, True)])
def test_the_reader_of_a_cache_is_named(read, masked):
    location = nanscan.locate(lambda: cache(read, masked))
    assert titles(location) == ["memory was read that nothing had been written to"]
    assert location.consequence.line == marked(cache, "reads")
    assert "torch.zeros" in location.causes[0].remedy


def test_what_was_written_of_a_cache_is_fine():
    assert nanscan.locate(lambda: cache(4)) is None


def test_shapes_of_memory_may_be_read():
    assert nanscan.locate(lambda: torch.ones_like(garbage(torch.empty(3)))) is None


# Scales of 0 --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "quantise",
    [
        lambda x: x / (x.abs().amax() / 448),
        lambda x: x / (x.abs().amax(-1, keepdim=True) / 448),
        lambda x: x * (448 / x.abs().max()),
    ],
)
def test_a_scale_of_zeros(quantise):
    location = nanscan.locate(lambda: quantise(torch.zeros(2, 4)).to(torch.float8_e4m3fn))
    assert titles(location)[0].startswith("a scale is 0: it is the largest magnitude")
    assert nanscan.locate(lambda: quantise(torch.eye(2)).to(torch.float8_e4m3fn)) is None


def test_another_divisor_of_zero_is_no_scale():
    location = nanscan.locate(lambda: torch.zeros(4) / torch.zeros(4).abs().sum())
    assert titles(location) == ["division by zero"]


# -Inf and what becomes of it ----------------------------------------------------------------------

LOGITS = torch.arange(15.0).reshape(3, 5)
BANNED = torch.zeros(3, 5, dtype=torch.bool)
BANNED[0, 2] = True


def loss_of(labels, *, trains=True, **options):
    logits = LOGITS.clone().requires_grad_(trains)
    masked = logits.masked_fill(BANNED, -INF)  # bans
    loss = F.cross_entropy(masked, torch.tensor(labels), **options)
    if trains:
        loss.backward()
    return loss


@pytest.mark.parametrize("trains", [True, False])
def test_a_label_that_is_masked(trains):
    location = nanscan.locate(lambda: loss_of([2, 1, 0], trains=trains))
    assert location.line == marked(loss_of, "bans")
    assert titles(location)[0].endswith(": a label is a class that it masks")
    assert "\n  Inf at    aten.nll_loss_forward.default, " in str(location)
    assert nanscan.locate(lambda: loss_of([1, 1, 0], trains=trains)) is None


def test_smoothed_labels_of_a_masked_class():
    location = nanscan.locate(lambda: loss_of([1, 1, 0], label_smoothing=0.1))
    assert location.line == marked(loss_of, "bans")
    assert titles(location) == ["a -inf that the code writes reaches the loss"]


def test_a_mask_that_was_there_before_and_reached_the_loss():
    bias = torch.zeros(5)
    bias[2] = -INF

    def step():
        F.cross_entropy(LOGITS.clone().requires_grad_() + bias, torch.tensor([2, 1, 0])).backward()

    location = nanscan.locate(step)
    assert location.verdict == "propagated"
    assert titles(location) == ["-Inf was there before anything ran"]


@pytest.mark.parametrize("value", [INF, -INF, NAN])
@pytest.mark.parametrize(
    "first", [nn.Linear(5, 5), nn.LayerNorm(5), nn.Unflatten(1, (1, 5)), nn.ReLU6()]
)
def test_inf_of_a_batch_is_alike_in_both_signs(first, value):
    batch = LOGITS.clone()
    batch[1, 2] = value
    last = nn.Conv1d(1, 2, 3) if isinstance(first, nn.Unflatten) else nn.Linear(5, 5)
    model = nn.Sequential(first, last, nn.LayerNorm(3 if last.weight.dim() > 2 else 5))
    location = nanscan.locate(lambda: model(batch).sum().backward())
    if isinstance(first, nn.ReLU6) and value is not NAN:
        assert location is None  # it bounds them
        return
    assert location.verdict == "propagated"
    assert titles(location) == ["the data was bad before anything ran"]


@pytest.mark.parametrize("value", [INF, -INF])
def test_inf_that_code_writes_and_hands_to_a_layer(value):
    layers = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))

    def step():
        x = LOGITS.masked_fill(BANNED, value)  # writes
        layers(x).sum().backward()

    location = nanscan.locate(step)
    assert location.line == marked(step, "writes")
    assert "Inf that the code wrote" in str(location)


def test_a_bias_may_ban_a_class():
    layer = nn.Linear(5, 5)
    with torch.no_grad():
        layer.bias[2] = -INF

    def step():
        F.cross_entropy(layer(LOGITS), torch.tensor([0, 1, 1])).backward()

    assert nanscan.locate(step) is None


def test_inf_minus_inf():
    masked = LOGITS.masked_fill(BANNED, -INF)
    assert titles(nanscan.locate(lambda: masked - masked.clone())) == ["Inf - Inf is NaN"]
    assert nanscan.locate(lambda: masked - LOGITS) is None


def top_k(logits):
    kept, _ = logits.topk(2)
    return logits.masked_fill(logits < kept[:, -1:], -INF).softmax(-1)


def top_p(logits):
    ordered, order = logits.sort(descending=True)
    drop = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1) > 0.5
    ordered = ordered.masked_fill(drop, -INF)
    return torch.empty_like(logits).fill_(-INF).scatter(1, order, ordered)


def beam_search(logits):
    scores = torch.full((3, 1), -INF)
    scores[0] = 0.0
    return (scores + logits.log_softmax(-1)).flatten().topk(3)


def running_softmax(logits):
    most, total = torch.full((3,), -INF), torch.zeros(3)
    for column in logits.unbind(1):
        new = torch.maximum(most, column)
        total = total * (most - new).exp() + (column - new).exp()
        most = new
    return most + total.log()


def causal(logits):
    mask = torch.full((3, 3), -INF).triu(1)
    return F.scaled_dot_product_attention(logits[None], logits[None], logits[None], attn_mask=mask)


def masked_query(logits):
    mask = torch.ones(3, 3, dtype=torch.bool).tril()
    mask[0] = False
    return F.scaled_dot_product_attention(logits[None], logits[None], logits[None], attn_mask=mask)


def distribution(logits):
    return torch.distributions.Categorical(logits=logits.masked_fill(BANNED, -INF)).entropy()


@pytest.mark.parametrize(
    "healthy",
    [
        top_k,
        top_p,
        beam_search,
        running_softmax,
        causal,
        masked_query,
        distribution,
        lambda x: torch.logsumexp(x.masked_fill(BANNED, -INF), -1),
        lambda x: F.max_pool1d(F.pad(x, (1, 1), value=-INF), 3),
        lambda x: torch.minimum(torch.full((5,), INF), x.amin(0)),
        lambda x: x.clamp(-INF, INF),
    ],
)
@pytest.mark.parametrize("trains", [True, False])
def test_inf_that_is_meant(healthy, trains):
    logits = LOGITS.clone().requires_grad_(trains)

    def step():
        made = healthy(logits)
        if trains and isinstance(made, torch.Tensor):
            made[made.isfinite()].sum().backward()
        return made

    assert nanscan.locate(step) is None


# Casts --------------------------------------------------------------------------------------------

POSITIONS = torch.arange(0, 80_000, 10_000)


@pytest.mark.parametrize(
    ("rotary", "title"),
    [
        (lambda: POSITIONS.to(HALF).cos(), "conversion to float16 overflows"),
        (
            lambda: torch.outer(POSITIONS.float(), torch.ones(2)).half().sin(),
            "conversion to float16 over",
        ),
        (lambda: torch.zeros(8, dtype=HALF).copy_(POSITIONS).sin(), "conversion to float16 over"),
        (lambda: torch.arange(0, 80_000, 10_000, dtype=HALF).cos(), "arange overflows float16"),
        (lambda: ((POSITIONS // 2).to(HALF) * 2.0).cos() + 1, "mul overflows float16"),
    ],
)
def test_positions_beyond_half_precision(rotary, title):
    location = nanscan.locate(rotary)
    assert titles(location)[0].startswith(title)
    assert location.unlikely == ()


@pytest.mark.parametrize(
    "healthy",
    [
        lambda: POSITIONS.float().cos().half(),
        lambda: POSITIONS.bfloat16().cos(),
        lambda: torch.arange(0, 60_000, 10_000, dtype=HALF).cos(),
    ],
)
def test_positions_that_fit(healthy):
    assert nanscan.locate(healthy) is None


# "unlikely" ---------------------------------------------------------------------------------------


def test_overflow_is_not_denied_after_another_overflow():
    x = torch.tensor([300.0, 1.0, 0.0], dtype=HALF)

    def step():
        inverse = 1 / (x.square() + 1e-3)  # 1 / Inf is 0
        return inverse.log()

    location = nanscan.locate(step)
    assert titles(location) == ["log of zero"]
    assert location.unlikely == ()
    location = nanscan.locate(lambda: torch.tensor([0.0, 1.0], dtype=HALF).log())
    assert location.unlikely[0].startswith("overflow: unlikely because operands reach 1, ")
