"""Each remedy of each rule on ops is tried out: the fault is gone, and what was fine stays so.

A case is code that fails, the same code as the remedy writes it, an argument that fails and one
that does not. Both run forward and backward, in each dtype that the case names.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import nanscan
from helpers.located import garbage
from helpers.models import INF
from nanscan._locate.causes import _RULES

HALF, BF16, FLOAT = torch.float16, torch.bfloat16, torch.float32
ALL = (HALF, BF16, FLOAT)
NARROW = (HALF, BF16)


@dataclass
class Case:
    """One remedy.

    Attributes:
        rule: name of the rule that gives it.
        bad: an argument that fails.
        fine: one that does not.
        broken: the code that fails; takes a leaf.
        mended: the code as the remedy writes it.
        says: what the remedy says, from the dtype.
        dtypes: in which it is tried.
        has_gradient: whether backward is tried, too.
        tolerance: how far what was fine may move; 0.0: by rounding alone.
    """

    rule: str
    bad: list
    fine: list
    broken: Callable[[torch.Tensor], torch.Tensor]
    mended: Callable[[torch.Tensor], torch.Tensor]
    says: Callable[[torch.dtype], str] | str
    dtypes: tuple[torch.dtype, ...] = ALL
    has_gradient: bool = True
    tolerance: float = 0.0


def eps(dtype):
    return 1e-3 if dtype == HALF else 1e-12


def tiny(x):
    return torch.finfo(x.dtype).tiny


def top(dtype):
    """The largest whole number of which exp is finite."""
    return math.floor(math.log(torch.finfo(dtype).max))


def inside(x):
    e = torch.finfo(x.dtype).eps
    return x.clamp(-1 + e, 1 - e)


def where(x, ok, function, value=1.0):
    safe = torch.where(ok, x, value)
    return torch.where(ok, function(safe), 0)


def shares(x):
    e = x.exp()
    return e / e.sum(-1, keepdim=True)


def log_of_shares(x):
    return x.exp().sum(-1).log()


def smallest(x):
    return torch.finfo(x.dtype).min


MASK = torch.tensor([[True, True, False], [False, False, False]])  # what may be seen
SCORES = [[1.0, 2.0, 3.0], [1.0, -2.0, 0.5]]


def masked(x, value):
    return x.masked_fill(~MASK[: x.shape[-2]], value)


def by_hand(x):
    e = (x - x.amax(-1, keepdim=True)).exp()
    return e / e.sum(-1, keepdim=True)


def ones(x):
    return x.new_ones(x.shape)


EXP = [
    Case(
        "exponential",
        [1.0, 100.0, -3.0],
        [1.0, 5.0, -3.0],
        torch.exp,
        lambda x: x.clamp(max=top(x.dtype)).exp(),
        lambda dtype: f"x.clamp(max={top(dtype)}).exp()",
    ),
    Case(
        "exponential",
        [1.0, 12.0],
        [1.0, -3.0],
        torch.exp,
        lambda x: x.float().exp(),
        "where no gradient is needed, x.float().exp()",
        (HALF,),
        has_gradient=False,
    ),
    Case(
        "exponential",
        [1.0, 100.0],
        [1.0, 3.0],
        lambda x: x.exp().clamp(max=100.0),
        lambda x: x.clamp(max=math.log(100)).exp(),
        "x.clamp(max=math.log(100)).exp()",
    ),
    Case(
        "exponential",
        [1.0, 100.0],
        [1.0, 3.0],
        lambda x: torch.where(x < 9, x.exp(), 0.0),
        lambda x: torch.where(x < 9, torch.where(x < 9, x, 0).exp(), 0.0),
        "torch.where(ok, torch.where(ok, x, 0).exp(), y)",
    ),
    Case("exponential", [99.0, 1], [1.0, 2], shares, lambda x: F.softmax(x, -1), "F.softmax(x"),
    Case(
        "exponential",
        [1.0, 100.0],
        [1.0, 3.0],
        log_of_shares,
        lambda x: torch.logsumexp(x, -1),
        "torch.logsumexp(x, dim)",
    ),
    Case(
        "exponential",
        [1.0, 100.0],
        [1.0, 3.0],
        lambda x: (1 + x.exp()).log(),
        F.softplus,
        "F.softplus(x)",
    ),
    Case(
        "exponential",
        [1.0, 100.0],
        [1.0, 3.0],
        lambda x: 1 / (1 + x.exp()),
        lambda x: torch.sigmoid(-x),
        "torch.sigmoid(-x)",
    ),
    Case(
        "exponential",
        [1.0, -100.0],
        [1.0, 3.0],
        torch.cosh,
        lambda x: x.clamp(-89, 89).cosh(),
        "x.clamp(-89, 89).cosh()",
        (BF16, FLOAT),
    ),
]

DOMAINS = [
    Case(
        "outside_of_domain",
        [0.0, 1.0],
        [0.5, 1.0],
        torch.log,
        lambda x: x.clamp(min=tiny(x)).log(),
        "x.clamp(min=torch.finfo(x.dtype).tiny).log()",
    ),
    Case(
        "outside_of_domain",
        [0.0, 200.0],
        [0.5, 1.0],
        lambda x: x.softmax(-1).log(),
        lambda x: F.log_softmax(x, -1),
        "F.log_softmax(x, dim)",
    ),
    Case(
        "outside_of_domain",
        [0.0, 0.5],
        [0.25, 0.5],
        lambda p: p * p.log(),
        lambda p: torch.xlogy(p, p.clamp(min=tiny(p))),
        "torch.xlogy(p, p.clamp(min=torch.finfo(p.dtype).tiny))",
    ),
    Case(
        "outside_of_domain",
        [-1.0, 0.5],
        [-0.5, 0.5],
        torch.log1p,
        lambda x: x.clamp(min=-1 + torch.finfo(x.dtype).eps).log1p(),
        "x.clamp(min=-1 + torch.finfo(x.dtype).eps).log1p()",
    ),
    Case(
        "outside_of_domain",
        [0.0, 1.0, 0.5],
        [0.25, 0.5],
        torch.logit,
        lambda x: torch.logit(x, eps=torch.finfo(x.dtype).eps),
        "torch.logit(x, eps=torch.finfo(x.dtype).eps)",
    ),
    Case(
        "outside_of_domain",
        [0.0, 1.0],
        [0.25, 0.5],
        torch.rsqrt,
        lambda x: torch.rsqrt(x.clamp(min=eps(x.dtype))),
        lambda dtype: f"torch.rsqrt(x.clamp(min={eps(dtype):g}))",
    ),
    Case(
        "outside_of_domain",
        [0.0, 1.0],
        [0.25, 0.5],
        lambda x: ones(x) / x,
        lambda x: ones(x) / torch.where(x == 0, 1, x),
        "y = torch.where(y == 0, 1, y) before the division",
    ),
    Case(
        "outside_of_domain",
        [0.0, 1.0],
        [0.25, 0.5],
        lambda x: ones(x) / x,
        lambda x: ones(x) / x.clamp(min=eps(x.dtype)),
        "x / y.clamp(min=eps) with eps=1e-12",
        (BF16, FLOAT),
    ),
    Case(
        "outside_of_domain",
        [0.0, 1.0],
        [0.25, 0.5],
        torch.reciprocal,
        lambda x: torch.where(x == 0, 1, x).reciprocal(),
        "y = torch.where(y == 0, 1, y)",
    ),
    Case(
        "outside_of_domain",
        [0.0, 0.0],
        [3.0, 4.0],
        lambda x: x / x.norm(dim=-1, keepdim=True),
        lambda x: F.normalize(x, dim=-1, eps=eps(x.dtype)),
        lambda dtype: f"F.normalize(x, dim=-1), with eps={eps(dtype):g}",
    ),
    Case(
        "outside_of_domain",
        [2.0, 2.0],
        [3.0, 4.0],
        lambda x: (x - x.mean()) / x.std(),
        lambda x: (x - x.mean()) / (x.std() + eps(x.dtype)),
        lambda dtype: f"(x - mean) / (std + eps) with eps={eps(dtype):g}",
    ),
    Case(
        "outside_of_domain",
        [0.0, 0.0],
        [3.0, 4.0],
        lambda x: x / x.sum(),
        lambda x: x / x.sum().clamp(min=eps(x.dtype)),
        lambda dtype: f"x / x.sum().clamp(min={eps(dtype):g})",
    ),
    Case(
        "outside_of_domain",
        [-2.0, -1.0],
        [-2.0, 1.0],
        lambda x: x.sum() / (x > 0).sum().to(x.dtype),
        lambda x: x.sum() / (x > 0).sum().to(x.dtype).clamp(min=1),
        "total / count.clamp(min=1)",
    ),
    Case(
        "outside_of_domain",
        [-900.0, -900.0],
        [1.0, 2.0],
        shares,
        lambda x: F.softmax(x, -1),
        "F.softmax(scores, dim=-1)",
    ),
    *(
        Case(
            "outside_of_domain" if edge else "undefined_derivative",
            [1.0, 0.5],
            [-0.25, 0.5],
            function,
            lambda x, function=function: function(inside(x)),
            f"torch.{name}(x.clamp(-1 + eps, 1 - eps)) with eps = torch.finfo(x.dtype).eps",
        )
        for name, function, edge in (
            ("acos", torch.acos, False),
            ("asin", torch.asin, False),
            ("atanh", torch.atanh, True),
            ("erfinv", torch.erfinv, True),
        )
    ),
    Case(
        "undefined_derivative",
        [1.0, 2.0],
        [1.5, 2.0],
        torch.acosh,
        lambda x: torch.acosh(x.clamp(min=1 + torch.finfo(x.dtype).eps)),
        "torch.acosh(x.clamp(min=1 + eps)) with eps = torch.finfo(x.dtype).eps",
    ),
    Case(
        "outside_of_domain",
        [-1e-8, 4.0],
        [1.0, 4.0],
        torch.sqrt,
        lambda x: where(x, x > 0, torch.sqrt),
        "safe = torch.where(ok, x, 1); torch.where(ok, safe.sqrt(), 0)",
        (BF16, FLOAT),
    ),
    Case(
        "undefined_derivative",
        [0.0, 4.0],
        [1.0, 4.0],
        torch.sqrt,
        lambda x: where(x, x > 0, torch.sqrt),
        "safe = torch.where(ok, x, 1); torch.where(ok, safe.sqrt(), 0)",
    ),
    Case(
        "undefined_derivative",
        [0.0, 4.0],
        [1.0, 4.0],
        lambda x: torch.where(x > 0, x**0.5, 0.0),
        lambda x: where(x, x > 0, lambda safe: safe**0.5),
        "safe = torch.where(ok, x, 1); torch.where(ok, safe ** p, 0)",
    ),
    Case(
        "outside_of_domain",
        [0.0, 2.0],
        [1.0, 4.0],
        lambda x: x**-2,
        lambda x: where(x, x != 0, lambda safe: safe**-2),
        "ok = x != 0; safe = torch.where(ok, x, 1); torch.where(ok, safe ** p, 0)",
    ),
    Case(
        "negative_base",
        [-8.0, 4.0],
        [1.0, 4.0],
        lambda x: x ** torch.full_like(x, 0.5),
        lambda x: x.sign() * x.abs() ** torch.full_like(x, 0.5),
        "x.sign() * x.abs() ** p",
    ),
    Case(
        "negative_base",
        [0.0, 4.0],
        [1.0, 4.0],
        lambda x: x ** torch.full_like(x, -1.0),
        lambda x: torch.where(x == 0, 1, x) ** torch.full_like(x, -1.0),
        "torch.where(x == 0, 1, x) ** p",
    ),
    Case(
        "integer_zero",
        [-2.0, -1.0],
        [-2.0, 1.0],
        lambda x: x.sum() / (x > 0).sum(),
        lambda x: x.sum() / (x > 0).sum().clamp(min=1),
        "total / count.clamp(min=1)",
    ),
    Case(
        "eps_rounds_to_zero",
        [0.0, 0.0],
        [3.0, 4.0],
        lambda x: F.normalize(x, dim=-1),
        lambda x: F.normalize(x, dim=-1, eps=1e-3),
        "eps=0.001, which float16 holds",
        (HALF,),
    ),
    Case(
        "eps_rounds_to_zero",
        [0.0, 0.0],
        [3.0, 4.0],
        lambda x: F.normalize(x, dim=-1),
        lambda x: F.normalize(x.float(), dim=-1).to(x.dtype),
        "where no gradient is needed, the same in float32: x.float()",
        (HALF,),
        has_gradient=False,
    ),
    Case(
        "eps_rounds_to_zero",
        [0.0, 0.0],
        [30.0, 40.0],
        lambda x: x * torch.rsqrt(x.pow(2).mean() + 1e-8),
        lambda x: x * torch.rsqrt(x.pow(2).mean() + 1e-3),
        "eps=0.001, which float16 holds",
        (HALF,),
    ),
    Case(
        "eps_rounds_to_zero",
        [0.0, 1.0],
        [1.0, 4.0],
        lambda x: (x + 1e-8).sqrt(),
        lambda x: (x + 1e-3).sqrt(),
        "eps=0.001, which float16 holds",
        (HALF,),
    ),
    *(
        Case(
            "eps_rounds_to_zero",
            [0.0, 0.0],
            [30.0, 40.0],
            broken,
            mended,
            "eps=0.001, which float16 holds",
            (HALF,),
        )
        for broken, mended in [
            (
                lambda x: x / (x.pow(2).mean() + 1e-8).sqrt(),
                lambda x: x / (x.pow(2).mean() + 1e-3).sqrt(),
            ),
            (lambda x: ((x - -1e-9) * 2).log(), lambda x: ((x - -1e-3) * 2).log()),
            (
                lambda x: F.cosine_similarity(x, x + 0, dim=0),
                lambda x: F.cosine_similarity(x, x + 0, dim=0, eps=1e-3),
            ),
        ]
    ),
    Case(
        "eps_rounds_to_one",
        [40.0, 1.0],
        [0.5, 1.0],
        lambda x: (1 - x.sigmoid().clamp(1e-12, 1 - 1e-12)).log(),
        lambda x: (
            1 - x.sigmoid().clamp(torch.finfo(x.dtype).eps, 1 - torch.finfo(x.dtype).eps)
        ).log(),
        "x.clamp(eps, 1 - eps) with eps = torch.finfo(x.dtype).eps",
    ),
    Case(
        "eps_rounds_to_one",
        [1.0, -1.0, 0.5],
        [0.5, -0.5],
        lambda x: x.clamp(-1 + 1e-9, 1 - 1e-9).acos(),
        lambda x: x.clamp(-1 + torch.finfo(x.dtype).eps, 1 - torch.finfo(x.dtype).eps).acos(),
        "x.clamp(-1 + eps, 1 - eps) with eps = torch.finfo(x.dtype).eps",
    ),
    Case(
        "scale_of_zeros",
        [0.0, 0.0],
        [1.0, -4.0],
        lambda x: x / (x.abs().amax() / 448),
        lambda x: x / (x.abs().amax() / 448).clamp(min=eps(x.dtype)),
        lambda dtype: f"scale.clamp(min={eps(dtype):g}) before the division",
    ),
]

SIZES = [
    Case(
        "cast",
        [1e5, 1.0],
        [1.0, 2.0],
        lambda x: x.half() * 0.5,
        lambda x: x * 0.5,
        "leave it in float32 here",
        (FLOAT,),
    ),
    Case(
        "cast",
        [7e4, 1.0],
        [1.0, 2.0],
        lambda x: x.long().half().cos() * x,
        lambda x: x.long().float().cos() * x,
        "x.float(), and compute what follows in float32",
        (FLOAT,),
    ),
    Case(
        "cast",
        [-3.4028234663852886e38, 1.0],
        [1.0, 2.0],
        lambda x: x.half(),
        lambda x: x.clamp(min=torch.finfo(HALF).min).half(),
        "torch.finfo(torch.float16).min",
        (FLOAT,),
    ),
    Case(
        "smallest_numbers_add_up",
        SCORES,
        [[0.01, 0.02, 0.03]],
        lambda x: x * 100 + torch.zeros_like(x).masked_fill(~MASK[: len(x)], smallest(x)),
        lambda x: masked(x * 100, smallest(x)),
        "scores.masked_fill(~mask, torch.finfo(scores.dtype).min)",
        (HALF,),
        has_gradient=False,
    ),
    Case(
        "unequal_branches",
        [[65000.0, 1.0]],
        [[1.0, 2.0]],
        lambda x: x + x * 0 + x.new_tensor([[5000.0, 0.0]]),
        lambda x: x.float() + x.float() * 0 + x.new_tensor([[5000.0, 0.0]]).float(),
        "keep this place in float32: x.float()",
        (HALF,),
    ),
    Case(
        "small_divisor",
        [[60000.0, 0.01]],
        [[1.0, 2.0]],
        lambda x: x[:, 0] / x[:, 1],
        lambda x: x[:, 0] / x[:, 1].clamp(min=2),
        "x / y.clamp(min=2)",
        (HALF,),
        has_gradient=False,
    ),
    Case(
        "overflow",
        [300.0, 1.0],
        [3.0, 1.0],
        lambda x: x * x,
        lambda x: x.float() * x.float(),
        "keep this place in float32: x.float()",
        (HALF,),
    ),
    Case(
        "overflow",
        [1e30, 1.0],
        [3.0, 1.0],
        lambda x: x * x,
        lambda x: x.double() * x.double(),
        "x.double()",
        (FLOAT,),
    ),
    Case(
        "overflow",
        [1e20, 1e20],
        [3.0, 4.0],
        lambda x: x.norm(),
        lambda x: x.detach().abs().amax() * (x / x.detach().abs().amax()).norm(),
        "scale = x.abs().amax(); scale * (x / scale).norm()",
        (FLOAT,),
    ),
    Case(
        "overflow",
        [60000.0, 60000.0],
        [3.0, 4.0],
        lambda x: x.norm(),
        lambda x: x.float().norm(),
        "x.float().norm()",
        (HALF,),
    ),
]

MASKS = [
    Case(
        "fully_masked_rows",
        [SCORES],
        [[SCORES[0]]],
        lambda x: masked(x, -INF).softmax(-1),
        lambda x: masked(x, smallest(x)).softmax(-1),
        "scores.masked_fill(~mask, torch.finfo(scores.dtype).min) in the place of -inf",
    ),
    Case(
        "fully_masked_rows",
        SCORES,
        SCORES[:1],
        lambda x: masked(x, -INF).softmax(-1),
        lambda x: masked(x, smallest(x)).softmax(-1),
        "of logits: no choice is left in such a row",
    ),
    Case(
        "fully_masked_rows",
        [SCORES],
        [[SCORES[0]]],
        lambda x: torch.logsumexp(x + masked(torch.zeros_like(x), -INF), -1).clamp(min=-9),
        lambda x: torch.logsumexp(masked(x, smallest(x)), -1).clamp(min=-9),
        "scores.masked_fill(~mask, torch.finfo(scores.dtype).min) in the place of -inf",
    ),
    Case(
        "masked_row_by_hand",
        [SCORES],
        [[SCORES[0]]],
        lambda x: by_hand(masked(x, -INF)),
        lambda x: by_hand(masked(x, smallest(x))),
        "scores.masked_fill(~mask, torch.finfo(scores.dtype).min) in the place of -inf",
    ),
    Case(
        "zero_times_inf",
        [SCORES],
        [],
        lambda x: (x + (1 - MASK[:1].to(x)) * torch.tensor(-INF, dtype=x.dtype)).exp(),
        lambda x: x.masked_fill(MASK[:1] == 0, float("-inf")).exp(),
        "scores.masked_fill(mask == 0, float('-inf'))",
    ),
]


MASKS += [
    Case(
        "nan_behind_a_mask",
        [1.0, 2.0],
        [],
        lambda x: BESIDE[x.dtype][:3] * torch.tensor([1.0, 1.0, 0.0], dtype=x.dtype) + x.sum(),
        lambda x: BESIDE[x.dtype][:3].masked_fill(torch.tensor([False, False, True]), 0) + x.sum(),
        "x.masked_fill(hidden, 0) before the product",
        has_gradient=False,
    ),
]
BESIDE = {dtype: torch.tensor([1.0, 2.0, float("nan")], dtype=dtype) for dtype in ALL}

COUNTS = [
    Case(
        "variance_of_too_few",
        [[1.0, 2.0]],
        [[1.0, 2.0], [3.0, 4.0]],
        lambda x: x.var(0),
        lambda x: x.var(0) if x.shape[0] > 1 else x.sum(0) * 0,
        "x.var(dim) if x.shape[dim] > 1 else x.sum(dim) * 0",
    ),
    Case(
        "mean_of_nothing",
        [],
        [1.0, 2.0],
        lambda x: x.mean(),
        lambda x: x.mean() if x.numel() else x.sum(),
        "x.mean() if x.numel() else x.sum()",
    ),
    Case(
        "all_labels_ignored",
        [[1.0, 2.0]],
        [[1.0, 2.0], [2.0, 1.0]],
        lambda x: F.cross_entropy(x, LABELS[: len(x)]),
        lambda x: (
            F.cross_entropy(x, LABELS[: len(x)], reduction="sum")
            / (LABELS[: len(x)] != -100).sum().clamp(min=1)
        ),
        "F.cross_entropy(x, y, ignore_index=i, reduction='sum') / (y != i).sum().clamp(min=1)",
        (BF16, FLOAT),
    ),
    Case(
        "all_labels_ignored",
        [[1.0, 2.0]],
        [[1.0, 2.0], [2.0, 1.0]],
        lambda x: F.cross_entropy(x, WEIGHED[: len(x)], weight=WEIGHT.to(x)),
        lambda x: (
            F.cross_entropy(x, WEIGHED[: len(x)], weight=WEIGHT.to(x))
            if WEIGHT[WEIGHED[: len(x)]].sum() > 0
            else x.sum() * 0
        ),
        "if weight[y[y != ignore_index]].sum() > 0",
        (BF16, FLOAT),
    ),
    Case(
        "ctc_target_too_long",
        [[0.0, 1.0, 2.0]] * 2,
        [[0.0, 1.0, 2.0]] * 5,
        lambda x: ctc(x, zero_infinity=False),
        lambda x: ctc(x, zero_infinity=True),
        "F.ctc_loss(..., zero_infinity=True)",
        (FLOAT,),
    ),
    Case(
        "single_value_a_channel",
        [[1.0, 2.0]],
        [[1.0, 2.0], [3.0, 4.0]],
        lambda x: normed(x) * 1,
        lambda x: normed(x) if len(x) > 1 else x * 0,
        "DataLoader(..., drop_last=True)",
        (FLOAT,),
    ),
    Case(
        "zero_variance",
        [[2.0, 2.0]],
        [[1.0, 2.0]],
        lambda x: F.layer_norm(x, (2,), eps=0.0),
        lambda x: F.layer_norm(x, (2,), eps=1e-5),
        "layer_norm(..., eps=1e-5)",
        tolerance=1e-4,
    ),
    Case(
        "equal_singular_values",
        [[1.0, 0.0], [0.0, 1.0]],
        [[1.0, 0.0], [0.0, 2.0]],
        lambda x: torch.linalg.svd(x)[0].sum() * 0 + torch.linalg.svd(x)[1].sum(),
        lambda x: torch.linalg.svdvals(x).sum(),
        "torch.linalg.svdvals(A)",
        (FLOAT,),
    ),
    Case(
        "uninitialised_memory",
        [1.0, 2.0],
        [],
        lambda x: garbage(torch.empty(2, dtype=x.dtype)) + x,
        lambda x: torch.zeros(2, dtype=x.dtype) + x,
        "torch.zeros in the place of torch.empty",
    ),
]
LABELS = torch.tensor([-100, 1])
WEIGHED, WEIGHT = torch.tensor([0, 1]), torch.tensor([0.0, 1.0])


def ctc(x, **options):
    scores = x[:, None].log_softmax(-1)
    return F.ctc_loss(scores, torch.tensor([[1, 1]]), (len(x),), (2,), **options)


def normed(x):
    statistics = torch.zeros(2), torch.ones(2)
    return torch.native_batch_norm(x, None, None, *statistics, True, 0.1, 1e-5)[0] + 0 * sum(
        s.sum() for s in statistics
    )


CASES = [*EXP, *DOMAINS, *SIZES, *MASKS, *COUNTS]
PARAMETERS = [
    pytest.param(case, dtype, id=f"{i}-{case.rule}-{str(dtype).removeprefix('torch.')}")
    for i, case in enumerate(CASES)
    for dtype in case.dtypes
]


def run(case, function, values, dtype):
    """What a function returns, and the gradient; where it went bad."""
    x = torch.tensor(values, dtype=dtype, requires_grad=case.has_gradient)
    made = []

    def step():
        made.append(function(x))
        if case.has_gradient and made[0].requires_grad:
            made[0].double().sum().backward()
        return made[0]

    location = nanscan.locate(step)
    return made[0].detach(), x.grad, location


@pytest.mark.parametrize(("case", "dtype"), PARAMETERS)
def test_the_remedy(case, dtype):
    _, _, location = run(case, case.broken, case.bad, dtype)
    assert location is not None
    says = case.says if isinstance(case.says, str) else case.says(dtype)
    remedies = [cause.remedy for cause in location.causes]
    assert any(says in remedy for remedy in remedies), remedies
    names = [rule.name for group in _RULES for rule in group if rule(evidence(location))]
    assert case.rule in names
    made, gradient, still = run(case, case.mended, case.bad, dtype)
    assert still is None
    assert made.isfinite().all() or case.rule == "zero_times_inf"
    assert gradient is None or gradient.isfinite().all()
    if case.fine:
        before, after = (run(case, f, case.fine, dtype) for f in (case.broken, case.mended))
        assert after[2] is None
        narrow = HALF if case.rule == "cast" else dtype
        tolerance = max(case.tolerance, 4 * torch.finfo(narrow).eps)
        close = {"rtol": tolerance, "atol": tolerance, "equal_nan": True, "check_dtype": False}
        torch.testing.assert_close(after[0], before[0], **close)
        if before[1] is not None and case.rule != "equal_singular_values":
            torch.testing.assert_close(after[1], before[1], **close)


def evidence(location):
    from nanscan._locate.causes.evidence import OpEvidence

    return OpEvidence(location)


# Remedies that are no code in the place of code ---------------------------------------------------

OTHERS = {
    "bad_before_the_search": "says where to look: nothing that ran made it",
    "nonfinite_setting": "test_lookalikes.py",
    "nonfinite_number": "it has none",
    "written_inf_that_counts": "it has none",
    "inf_minus_inf": "it has none",
    "triangle_without_full_rank": "it has none",
    "masked_query": "no kernel of the CPU makes NaN of a masked row",
    "denominator_zero": "below",
    "fused_denominator_zero": "below",
    "second_moment_overflow": "below",
    "update_overflow": "below",
}


def test_every_rule_is_tried():
    names = {rule.name for group in _RULES for rule in group}
    assert names == {case.rule for case in CASES} | OTHERS.keys()


def updated(kind, gradient, dtype=HALF, **options):
    parameter = nn.Parameter(torch.ones(2, dtype=dtype))
    parameter.grad = torch.tensor(gradient, dtype=dtype)
    prepare = options.pop("prepare", lambda parameters: None)
    prepare([parameter])
    location = nanscan.locate(kind([parameter], **options).step)
    return location, parameter.detach()


def clipped_by_value(parameters):
    torch.nn.utils.clip_grad_value_(parameters, 1.0)


@pytest.mark.parametrize(
    ("kind", "gradient", "options", "mended", "says"),
    [
        (torch.optim.Adam, [0.0, 30.0], {}, {"eps": 1e-4}, "eps=1e-4"),
        (torch.optim.RMSprop, [0.0, 30.0], {}, {"eps": 1e-4}, "eps=1e-4"),
        (
            torch.optim.Adam,
            [0.0, 30.0],
            {"eps": 0.0, "fused": True},
            {"eps": 1e-8, "fused": True},
            "eps=1e-8",
        ),
        (torch.optim.Adam, [1.0, 6e4], {"eps": 1e-4}, {"dtype": FLOAT}, "parameters in float32"),
        (
            torch.optim.Adam,
            [1.0, 6e4],
            {"eps": 1e-4},
            {"eps": 1e-4, "prepare": clipped_by_value},
            "clip_grad_value_(model.parameters(), 1.0)",
        ),
        (torch.optim.SGD, [1.0, 30.0], {"lr": 6e4}, {"lr": 100.0}, "far below 1000"),
    ],
)
def test_the_remedy_of_an_update(kind, gradient, options, mended, says):
    location, _ = updated(kind, gradient, **options)
    assert any(says in cause.remedy for cause in location.causes), location.causes
    location, parameter = updated(kind, gradient, **mended)
    assert location is None
    assert parameter.isfinite().all()


def test_attention_returns_zero_for_a_masked_row():
    for dtype in ALL:
        q = torch.ones(1, 1, 2, 4, dtype=dtype, requires_grad=True)
        mask = torch.tensor([[False, False], [True, False]])

        def step(q=q, mask=mask):
            F.scaled_dot_product_attention(q, q, q, attn_mask=mask).float().sum().backward()

        assert nanscan.locate(step) is None


def test_clipping_by_value_keeps_the_norm_finite():
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.full((2,), 1e30)

    def clip():
        torch.nn.utils.clip_grad_norm_([parameter], 1.0)

    location = nanscan.locate(clip)
    assert "clip_grad_value_(model.parameters(), 1.0) before the norm" in location.causes[0].remedy
    parameter.grad = torch.full((2,), 1e30)
    clipped_by_value([parameter])
    assert nanscan.locate(clip) is None
    assert parameter.grad.abs().min() > 0.1
