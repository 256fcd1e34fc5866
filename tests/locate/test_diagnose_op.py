"""Each rule on ops: a true case and a look-alike that must not be named, both from real runs."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import nanscan
from helpers.models import INF
from nanscan._data.location import Location, Op, Operand
from nanscan._locate.causes import causes, refuted


def half(*values):
    return torch.tensor(values, dtype=torch.float16)


def full(*shape, value=1.0):
    return torch.full(shape, value, dtype=torch.float16)


def leaf(*values):
    return torch.tensor(values, requires_grad=True)


def locate(fn):
    location = nanscan.locate(fn)
    assert location is not None
    return location


def diagnose(fn):
    return causes(locate(fn))


def titles(fn):
    return [cause.title for cause in diagnose(fn)]


def only(fn):
    """The one cause that is named."""
    (cause,) = diagnose(fn)
    return cause


def backward(fn):
    return lambda: fn().sum().backward()


def operand(name, tensor):
    stats = nanscan.check(tensor, moments=True) if tensor.is_floating_point() else None
    return Operand(name, "", tensor.dtype, tuple(tensor.shape), stats, stats is not None)


def ran(op, **arguments):
    """Of an op run by itself, where `locate` reaches none: what the search would say of it."""
    tensors = {n: x for n, x in arguments.items() if isinstance(x, torch.Tensor)}
    operands = [operand(name, x) for name, x in tensors.items()]
    results = op(**arguments)
    results = [results] if isinstance(results, torch.Tensor) else results
    settings = {n: x for n, x in arguments.items() if n not in tensors}
    made = [operand(f"result[{i}]", x) for i, x in enumerate(results)]
    name = f"aten.{op._schema.name.partition('::')[2]}.{op._schema.overload_name or 'default'}"
    at = Op(name, operands=operands, results=made, settings=settings)
    return Location(at, "origin", "made here", "forward")


# What was bad before ------------------------------------------------------------------------------


def test_a_batch_that_was_bad():
    batch = torch.tensor([1.0, float("nan")])
    cause = only(lambda: batch * 2)
    assert cause.title == "the data was bad before anything ran"
    assert cause.evidence == "self held 1 NaN of 2 when aten.mul.Tensor first read it"
    assert titles(lambda: torch.tensor([1.0, 0.0]).log()) == ["log of zero"]


def test_a_parameter_that_was_bad():
    model = nn.Sequential(nn.Linear(2, 2))
    with torch.no_grad():
        model[0].weight[0, 1] = INF
    cause = only(lambda: model(torch.ones(1, 2)))
    assert cause.title.endswith("weight was bad before anything ran")
    assert "held 1 +Inf of 4" in cause.evidence


def test_a_gradient_that_was_bad():
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.tensor([1.0, INF])
    cause = only(torch.optim.Adam([parameter]).step)
    assert cause.title == "the gradient of a parameter was bad before it was watched"


@pytest.fixture
def empty_memory_is_nan():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("make", "instead_of"),
    [
        (lambda: torch.empty(3), "torch.empty"),
        (lambda: torch.empty_like(torch.ones(3)), "torch.empty_like"),
        (lambda: torch.ones(1).new_empty(3), "tensor.new_empty"),
    ],
)
def test_memory_that_nothing_was_written_to(empty_memory_is_nan, make, instead_of):
    cause = only(lambda: make() + 1)
    assert cause.title == "memory was read that nothing had been written to"
    assert "aten.add.Tensor read it with 3 NaN of 3" in cause.evidence
    assert cause.remedy.startswith(f"torch.zeros in the place of {instead_of},")


def test_memory_that_was_written_to(empty_memory_is_nan):
    written = lambda: torch.empty(3).fill_(0.0).log() * 0
    assert titles(written) == ["log of zero, then 0 * -Inf"]


# Masks --------------------------------------------------------------------------------------------

ROWS = torch.tensor([[-INF, -INF, -INF], [1.0, -INF, 2.0]])


@pytest.mark.parametrize("softmax", [F.softmax, F.log_softmax])
def test_fully_masked_rows_of_a_softmax(softmax):
    cause = only(lambda: softmax(ROWS, -1))
    assert cause.title == "1 row of the softmax is fully masked"
    assert "4 -Inf; the bad values are 1 whole row of 3 along dim -1" in cause.evidence
    assert "scores.masked_fill(~mask, torch.finfo(scores.dtype).min)" in cause.remedy


def test_fully_masked_rows_along_another_dim():
    cause = only(lambda: F.softmax(torch.cat([ROWS, ROWS[:1]]).T, 0))
    assert cause.title == "2 rows of the softmax are fully masked"
    assert "7 -Inf; the bad values are 2 whole rows of 3 along dim 0" in cause.evidence


def test_a_softmax_of_a_row_with_plus_inf_is_not_masked():
    scores = torch.tensor([[INF, 1.0], [1.0, 2.0]])
    assert "softmax" not in " ".join(titles(lambda: F.softmax(scores, -1)))


def test_the_backward_of_logsumexp_of_a_masked_row():
    scores = ROWS.clone().requires_grad_()
    assert titles(backward(lambda: torch.logsumexp(scores, -1).clamp(min=-9))) == [
        "1 row of the logsumexp is fully masked"
    ]


@pytest.mark.parametrize("largest", [torch.amax, lambda *a, **k: torch.max(*a, **k).values])
def test_fully_masked_row_of_a_hand_written_softmax(largest):
    def softmax():
        return (ROWS - largest(ROWS, -1, keepdim=True)).exp()

    cause = only(softmax)
    assert cause.title == "1 row of a hand-written softmax is fully masked"
    assert "holds 1 -Inf; the 3 NaN (-Inf - -Inf) are 1 whole row of 3" in cause.evidence


def test_a_difference_of_two_masks_is_no_softmax():
    assert titles(lambda: ROWS - ROWS.clone()) == ["Inf - Inf is NaN"]


def test_a_softmax_by_exp_and_sum_of_a_masked_row():
    def softmax():
        weights = ROWS.exp()
        return weights / weights.sum(-1, keepdim=True)

    cause = only(softmax)
    assert cause.title == "division by zero"
    assert cause.remedy.startswith("F.softmax(scores, dim=-1)")


def attention(mask, made):
    """No kernel of the CPU makes NaN of a masked row; some of GPUs do. So the result is given."""
    q = torch.ones(1, 1, 2, 4)
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    location = ran(op, query=q, key=q, value=q, attn_mask=mask)
    at = dataclasses.replace(location.at, results=(operand("result[0]", made),))
    location = dataclasses.replace(location, at=at)
    return [cause.title for cause in causes(location)]


def test_fully_masked_row_of_an_attention():
    made = torch.ones(1, 1, 2, 4)
    made[..., 0, :] = float("nan")
    masked = torch.tensor([[-INF, -INF], [0.0, -INF]])
    assert attention(masked, made) == ["1 row of an attention is fully masked"]
    assert attention(torch.tensor([[0.0, -INF], [0.0, 0.0]]), made) == []


def test_a_mask_times_inf():
    mask = torch.tensor([1.0, 0.0])
    cause = only(lambda: (1 - mask) * torch.tensor([-INF]))
    assert cause.title == "0 * Inf is NaN: a mask is not multiplied by Inf"
    assert "1 exact zero of 2; the product has 1 NaN" in cause.evidence
    (by_number,) = causes(ran(torch.ops.aten.mul.Scalar, self=1 - mask, other=-INF))
    assert by_number.title == "0 * -inf is NaN: a mask is not multiplied by -inf"


def test_a_product_that_overflows_is_no_mask_times_inf():
    assert titles(lambda: half(0.0, 6e4) * half(1.0, 6e4)) == ["mul overflows float16"]


# Too few values -----------------------------------------------------------------------------------


@pytest.mark.parametrize("of", [torch.var, torch.std])
def test_variance_of_a_single_value(of):
    cause = only(lambda: of(torch.ones(1, 3), 0))
    assert cause.title == "variance of a single value"
    assert "of [1, 3] takes 1 value an element, and divides by 1 - 1 = 0" in cause.evidence
    assert only(lambda: torch.ones(3).var(correction=3)).title == "variance of 3 values"


def test_a_variance_that_overflows_has_enough_values():
    assert titles(lambda: half(-300.0, 300.0).var()) == ["var overflows float16"]


def test_mean_over_nothing():
    assert only(lambda: torch.zeros(0, 3).mean(0)).title == "a mean over nothing, 0 / 0"
    loss = only(lambda: F.mse_loss(torch.zeros(0), torch.zeros(0)))
    assert "of shape [0], which has no element" in loss.evidence


def test_a_mean_that_overflows_is_not_over_nothing():
    assert titles(lambda: torch.full((4,), 3e38).mean()) == ["mean overflows float32"]


def test_all_labels_ignored():
    labels = torch.full((2, 4, 4), -100)
    cause = only(lambda: F.cross_entropy(torch.ones(2, 3, 4, 4), labels))
    assert cause.title == "a mean over nothing, 0 / 0: every label is ignored or has weight 0"
    assert "the 32 labels have a total weight of 0: each is -100" in cause.evidence
    weights = torch.tensor([1.0, 0.0, 1.0])
    cause = only(lambda: F.cross_entropy(torch.ones(2, 3), torch.tensor([1, 1]), weight=weights))
    assert "or of a class whose weight is 0 (weights are 0 to 1)" in cause.evidence


def test_a_loss_whose_logits_were_bad_has_labels():
    logits = torch.tensor([[-INF, -INF], [0.0, 1.0]])
    assert titles(lambda: F.cross_entropy(logits, torch.tensor([0, -100]))) == [
        "1 row of the softmax is fully masked"
    ]


@pytest.mark.parametrize("lengths", [((3,), (4,)), (torch.tensor([3]), torch.tensor([4]))])
def test_ctc_target_too_long(lengths):
    scores = torch.ones(3, 1, 4).log_softmax(-1)
    cause = only(lambda: F.ctc_loss(scores, torch.tensor([[1, 2, 1, 2]]), *lengths))
    assert cause.title == "CTC: a target is longer than its input, which no alignment can give"
    assert "one of 3 frames for 4 labels" in cause.evidence


@pytest.mark.parametrize("targets", [[[1, 1, 2, 2]], [1, 1, 2, 2]])
def test_ctc_of_equal_labels(targets):
    """Between equal labels lies a blank, which takes a frame."""
    scores = torch.ones(5, 1, 4).log_softmax(-1)
    lengths = torch.tensor([5]), torch.tensor([4])
    cause = only(lambda: F.ctc_loss(scores, torch.tensor(targets), *lengths))
    assert "too long for its input, since equal labels take a frame between them" in cause.title
    assert "5 frames for 4 labels and a frame more between each of 2 pairs" in cause.evidence


def test_ctc_of_a_probability_of_zero():
    scores = torch.full((3, 1, 2), -3e38)
    found = titles(lambda: F.ctc_loss(scores, torch.tensor([[1]]), (3,), (1,)))
    assert not any("CTC" in title for title in found)


def test_ctc_of_bad_probabilities():
    scores = torch.full((3, 1, 4), INF)
    assert titles(lambda: F.ctc_loss(scores, torch.tensor([[1]]), (3,), (1,))) == [
        "the data was bad before anything ran"
    ]


# Normalisation ------------------------------------------------------------------------------------


def batch_norm(x, *, training=True, variance=1.0, eps=1e-5):
    running = torch.zeros(x.shape[1]), torch.full(x.shape[1:2], variance)
    return torch.native_batch_norm(x, None, None, *running, training, 0.1, eps)[0], running


def test_batch_norm_of_a_single_value_a_channel():
    cause = only(lambda: batch_norm(torch.ones(1, 2, 1, 1)))
    assert cause.title == "batch norm in training of one value a channel"
    assert "input of [1, 2, 1, 1] has 1 value in each of 2 channels" in cause.evidence


def test_batch_norm_that_overflows_has_more_values():
    huge = torch.tensor([[3e38], [-3e38]])
    assert titles(lambda: batch_norm(huge)) == []


@pytest.mark.parametrize(
    ("normalise", "groups"),
    [
        (lambda: F.layer_norm(torch.ones(2, 3), (3,), eps=0.0), "2 of 2 groups of 3 values"),
        (lambda: F.group_norm(torch.ones(1, 4, 3, 3), 2, eps=0.0), "2 of 2 groups of 18 values"),
        (lambda: F.layer_norm(torch.ones(2, 1), (1,), eps=0.0), "2 of 2 groups of 1 values"),
    ],
)
def test_zero_variance_without_an_eps(normalise, groups):
    cause = only(normalise)
    assert cause.title.endswith("norm divides by a variance of 0 with eps 0")
    assert groups in cause.evidence


def test_zero_running_variance_without_an_eps():
    cause = only(lambda: batch_norm(torch.ones(4, 2), training=False, variance=0.0, eps=0.0))
    assert cause.evidence == "running_var goes down to 0, eps is 0"


def test_a_norm_whose_weight_overflows_has_variance():
    weight = torch.full((3,), 3e38)
    found = titles(lambda: F.layer_norm(torch.tensor([[0.0, 0.0, 9.0]]), (3,), weight * 1))
    assert found == []


def test_rms_norm_by_hand_with_an_eps_that_rounds_to_zero():
    x = full(2, 4, value=0.0)
    cause = only(lambda: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-8))
    assert cause.title == "reciprocal square root of zero: its eps=1e-08 is 0 in float16"
    assert "2 exact zeros of 2" in cause.evidence


# Optimizers ---------------------------------------------------------------------------------------


def update(kind, gradient, **options):
    """One step of an optimizer of two parameters, of which the second gets this gradient."""
    parameters = [nn.Parameter(full(2)), nn.Parameter(full(2))]
    parameters[0].grad, parameters[1].grad = half(1.0, 2.0), half(*gradient)
    return kind(parameters, **options).step


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop])
def test_eps_that_rounds_to_zero(kind, foreach):
    cause = only(update(kind, (0.0, 30.0), foreach=foreach))
    assert cause.title == "the optimizer's eps is 0 in float16: the update divides by sqrt(0) + 0"
    assert cause.evidence.startswith(
        "its denominator holds 1 exact zero of 2; the smallest float16"
    )
    assert "eps=1e-4" in cause.remedy
    assert nanscan.locate(update(kind, (0.0, 30.0), foreach=foreach, eps=1e-4)) is None


def test_eps_of_zero_in_a_fused_optimizer():
    cause = only(update(torch.optim.Adam, (0.0, 30.0), fused=True, eps=0.0))
    assert cause.title == "the optimizer's eps is 0: the update divides by sqrt(0) + 0"


@pytest.mark.parametrize("variant", [{"foreach": False}, {"foreach": True}, {"fused": True}])
def test_second_moment_overflow(variant):
    cause = only(update(torch.optim.Adam, (1.0, 60000.0), **variant))
    assert cause.title == (
        "the optimizer's second moment overflows float16: the gradient's square does not fit"
    )
    assert (
        "(gradient of a parameter) reaches 60,000; 60,000^2 * 0.001 = 3,600,000" in cause.evidence
    )


@pytest.mark.parametrize("variant", [{"foreach": False}, {"foreach": True}, {"fused": True}])
def test_update_overflow(variant):
    cause = only(update(torch.optim.SGD, (1.0, 30.0), lr=6e4, **variant))
    assert cause.title == "the optimizer's update overflows float16"
    assert cause.evidence.endswith("60000")


def test_a_small_denominator_is_no_zero():
    location = locate(update(torch.optim.RMSprop, (1.0, 1.0), lr=6e4, eps=1e-3, foreach=False))
    assert [c.title for c in causes(location)] == ["the optimizer's update overflows float16"]
    assert "division by zero: unlikely because the smallest magnitude of tensor2 is 0.101" in (
        refuted(location)
    )


BAD = torch.tensor([-1.0, INF])

# Outside of a function's domain -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fn", "title", "held"),
    [
        (lambda: torch.tensor([-1.0, 2.0]).sqrt(), "square root of negative values", "down to -1"),
        (lambda: torch.tensor([0.0, 2.0]).log() * 1 - INF, "log of zero", "1 exact zero of 2"),
        (lambda: torch.tensor([0.0, -3.0]).log2(), "log2 of zero and negative values", "to -3"),
        (lambda: torch.tensor([-1.0, 0.0]).log1p(), "log1p of -1", "smallest value of exactly -1"),
        (
            lambda: torch.tensor([0.0, 2.0]).rsqrt(),
            "reciprocal square root of zero",
            "1 exact zero",
        ),
        (lambda: torch.tensor([0.0, 2.0]).reciprocal(), "division by zero", "1 exact zero of 2"),
        (lambda: torch.ones(2) / torch.zeros(2), "division by zero", "2 exact zeros of 2"),
        (lambda: torch.ones(2) / 0, "division by zero", "other has the number 0"),
        (lambda: torch.ones(2).div_(0), "division by zero", "other has the number 0"),
        (lambda: torch.ones(2) % torch.zeros(2), "remainder of a division by zero", "2 exact"),
        (lambda: torch.tensor([1.5]).acos(), "acos of values above 1", "up to 1.5"),
        (lambda: torch.tensor([0.5, 1.0]).atanh(), "atanh of 1", "largest value of exactly 1"),
        (lambda: torch.tensor([-8.0]) ** 0.3, "power 0.3 of negative values", "down to -8"),
        (lambda: torch.tensor([0.0, 1.0]) ** -2, "power -2 of zero", "1 exact zero of 2"),
        (
            lambda: torch._foreach_sqrt([torch.ones(2), -torch.ones(3)]),
            "square root of negative values",
            "down to -1",
        ),
        (
            lambda: torch._foreach_div([torch.ones(2)] * 2, [1.0, 0.0]),
            "division by zero",
            "the number 0",
        ),
    ],
)
def test_outside_of_a_domain(fn, title, held):
    cause = only(fn)
    assert cause.title == title
    assert held in cause.evidence


@pytest.mark.parametrize(
    ("fn", "titled"),
    [
        (lambda: half(300.0, 0.0) ** 2, ["pow overflows float16"]),
        (lambda: half(300.0, -1.0) ** 3, ["pow overflows float16"]),
        (lambda: half(6e4, 0.0) / 0.5, ["division by values close to 0 overflows float16"]),
        (BAD.sqrt, ["the data was bad before anything ran"]),
    ],
)
def test_inside_of_a_domain(fn, titled):
    assert titles(fn) == titled


def test_entropy_of_a_zero_probability():
    p = leaf(0.0, 0.5)
    cause = only(backward(lambda: p * p.log()))
    assert cause.title == "log of zero, then 0 * -Inf"
    assert cause.remedy.startswith("torch.special.entr(p)")


@pytest.mark.parametrize(
    ("denominator", "remedy"),
    [
        (lambda x: x.norm(), "F.normalize(x, dim=-1)"),
        (lambda x: x.std(), "(x - mean) / (std + eps)"),
        (lambda x: x.sum(), "x / x.sum().clamp(min=1e-12)"),
        (lambda x: (x > 0).sum().float(), "total / count.clamp(min=1)"),
        (lambda x: x * 1, "x / y.clamp(min=eps)"),
    ],
)
def test_the_remedy_of_a_division_by_zero_knows_what_the_divisor_is(denominator, remedy):
    x = torch.zeros(3)
    cause = only(lambda: torch.ones(3) / denominator(x))
    assert cause.title == "division by zero"
    assert cause.remedy.startswith(remedy)


def test_division_by_a_count_of_zero():
    mask = torch.tensor([False, False])
    cause = only(lambda: torch.ones(2).sum() / mask.sum())
    assert cause.title == "division by a count of 0"
    assert "is int64; the numerator is finite, up to 2" in cause.evidence


def test_division_of_a_bad_value_by_a_count():
    total = torch.tensor([INF])
    assert "division by a count of 0" not in titles(lambda: total / torch.tensor([2]))


def test_power_of_two_tensors():
    base = torch.tensor([-2.0, 0.0])
    assert titles(lambda: base ** torch.tensor([0.5, 1.0])) == [
        "power of a negative base with a fractional exponent"
    ]
    assert titles(lambda: base ** torch.tensor([2.0, -1.0])) == [
        "power of a base of zero with a negative exponent"
    ]
    assert titles(lambda: half(300.0) ** half(2.0)) == ["pow overflows float16"]


# In backward --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fn", "function", "argument"),
    [
        (torch.sqrt, "square root", "safe.sqrt()"),
        (lambda x: x**0.5, "power 0.5", "safe ** p"),
    ],
)
def test_the_where_trap(fn, function, argument):
    x = leaf(0.0, 4.0)
    location = locate(backward(lambda: torch.where(x > 0, fn(x), 0.0)))
    (cause,) = causes(location)
    assert location.direction == "backward"
    assert cause.title == (f"torch.where does not stop 0 * Inf = NaN in the backward of {function}")
    assert cause.evidence.startswith("its argument has ")
    assert "drops its result the gradient is 0 (1 exact zero of 2)" in cause.evidence
    assert f"safe = torch.where(ok, x, 1); torch.where(ok, {argument}, 0)" in cause.remedy


@pytest.mark.parametrize(
    ("select", "by"),
    [
        (lambda y, ok: y.masked_fill(~ok, 0.0), "torch.masked_fill"),
        (lambda y, ok: y[ok], "indexing"),
        (lambda y, ok: y * ok, "multiplication by 0"),
    ],
)
def test_other_selections_are_such_traps_too(select, by):
    x = leaf(0.0, 4.0)
    cause = only(backward(lambda: select(x.sqrt(), x > 0)))
    assert cause.title.startswith(f"{by} does not stop 0 * Inf = NaN")


def test_the_where_trap_of_acos_has_a_safe_value_inside():
    x = leaf(1.0, 0.5)
    cause = only(backward(lambda: torch.where(x < 1, x.acos(), 0.0)))
    assert "ok = (x > -1) & (x < 1); safe = torch.where(ok, x, 0)" in cause.remedy


def test_a_remedied_where_is_clean():
    x = leaf(0.0, 4.0)

    def remedied():
        ok = x > 0
        safe = torch.where(ok, x, 1)
        return torch.where(ok, safe.sqrt(), 0)

    assert nanscan.locate(backward(remedied)) is None


def test_square_root_at_zero_in_backward_is_no_where_trap():
    x = leaf(0.0, 0.0)
    location = locate(backward(lambda: (x**2).sum().sqrt()))
    (cause,) = causes(location)
    assert cause.title == "the derivative of square root is not finite at zero"
    assert "SqrtBackward0 computes division by 1 exact zero of 1" in cause.evidence
    assert cause.remedy.endswith("safe = torch.where(ok, x, 1); torch.where(ok, safe.sqrt(), 0)")
    assert refuted(location)[-1] == (
        "the torch.where trap: unlikely because the gradient that SqrtBackward0 took has no 0"
    )


def test_a_trap_further_down_is_not_denied():
    x = leaf(0.0, 4.0)
    location = locate(backward(lambda: torch.where(x > 0, x.sqrt() * 2, 0.0)))
    assert not any("trap" in line for line in refuted(location))


def test_a_where_of_gradients_that_overflow_is_no_trap():
    x = torch.full((2,), 1e-4, dtype=torch.float16, requires_grad=True)

    def loss():
        y = x.sqrt()
        return torch.where(y > 0, y, 0.0) * 30000.0

    assert titles(backward(loss)) == ["division by values close to 0 overflows float16"]


@pytest.mark.parametrize(("fn", "at"), [(torch.acos, "1"), (torch.asin, "1"), (torch.atanh, "1")])
def test_the_edge_of_a_domain_in_backward(fn, at):
    x = leaf(1.0, 0.5)
    cause = diagnose(backward(lambda: fn(x)))[0]
    assert at in cause.title
    assert cause.remedy.startswith(f"torch.{fn.__name__}(x.clamp(-1 + eps, 1 - eps))")


def test_the_gradient_of_xlogy_at_zero():
    p = leaf(0.0, 0.5)
    assert titles(backward(lambda: torch.xlogy(p, p))) == [
        "the derivative of log is not finite at zero"
    ]


@pytest.mark.parametrize(
    "vectors", [lambda a: torch.linalg.svd(a)[0], lambda a: torch.linalg.eigh(a)[1]]
)
def test_equal_eigenvalues(vectors):
    a = torch.eye(3).requires_grad_()
    cause = only(backward(lambda: vectors(a)))
    assert cause.title.startswith("two equal eigenvalues or singular values")
    assert "6 exact zeros of 9" in cause.evidence
    different = torch.diag(torch.tensor([1.0, 2.0, 3.0])).requires_grad_()
    assert nanscan.locate(backward(lambda: vectors(different))) is None


# Overflow -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fn", "title", "ends"),
    [
        (lambda: torch.tensor([100.0]).exp(), "exp(100) overflows float32", "exp(88.72)"),
        (lambda: half(12.0).exp(), "exp(12) overflows float16", "exp(11.09)"),
        (lambda: torch.tensor([100.0]).expm1(), "expm1(100) overflows float32", "expm1(88.72)"),
        (lambda: torch.tensor([-90.0]).cosh(), "cosh(90) overflows float32", "cosh(89.42)"),
        (lambda: 2 ** torch.tensor([200.0]), "2 ** 200 overflows float32", "2 ** 128"),
    ],
)
def test_exponentials(fn, title, ends):
    cause = only(fn)
    assert cause.title == title
    assert ends in cause.evidence


def test_an_exponential_of_inf():
    assert "exp" not in " ".join(titles(lambda: torch.tensor([INF, 1.0]).exp()))


@pytest.mark.parametrize(
    "convert", [torch.Tensor.half, lambda x: torch.zeros(1, dtype=torch.float16).copy_(x)]
)
def test_conversion_to_a_smaller_dtype(convert):
    cause = only(lambda: convert(torch.tensor([1e5])))
    assert cause.title == "conversion to float16 overflows"
    assert "is float32 and reaches 100,000, 1.53 times the largest float16, 65504" in cause.evidence


def test_conversion_of_inf():
    assert titles(lambda: torch.tensor([INF]).half()) == ["the data was bad before anything ran"]


@pytest.mark.parametrize(
    ("fn", "function", "reach"),
    [
        (lambda: full(2, 64, value=100) @ full(64, 3, value=100), "mm", "640,000, 64 products"),
        (lambda: F.linear(full(2, 64, value=100), full(3, 64, value=100), full(3)), "addmm", "64 "),
        (lambda: full(2, 2, 64, value=100) @ full(2, 64, 3, value=100), "bmm", "64 products"),
        (
            lambda: F.conv2d(full(1, 4, 8, 8, value=99), full(3, 4, 3, 3, value=99)),
            "convolution",
            "36 products",
        ),
        (lambda: full(4, value=6e4).sum(), "sum", "240,000"),
        (lambda: full(4, value=6e4).cumsum(0), "cumsum", "240,000"),
        (lambda: full(4, value=600) * 200.0, "mul", "other is 200"),
        (lambda: full(4, value=6e4).norm(), "linalg_vector_norm", "reaches 60,000, 92 %"),
        (lambda: torch.full((4,), 1e20).norm(), "linalg_vector_norm", "1.6e+41"),
        (lambda: full(2, value=6e4).lerp(full(2, value=-6e4), 3.0), "lerp", "420,000"),
        (lambda: F.mse_loss(full(2, value=600), full(2)), "mse_loss", "reaches 600"),
        (
            lambda: torch.addcmul(full(2), full(2, value=300), full(2, value=300)),
            "addcmul",
            "90,001",
        ),
    ],
)
def test_overflow(fn, function, reach):
    cause = only(fn)
    assert cause.title.startswith(f"{function} overflows float")
    assert reach in cause.evidence


def test_overflow_in_backward():
    x = torch.ones(1, 4, dtype=torch.float16, requires_grad=True)
    weight = full(3, 4, value=300)

    cause = only(lambda: F.linear(x, weight).backward(full(1, 3, value=300)))
    assert cause.title == "mm overflows float16 in the backward of MmBackward0"
    assert "the result can get to 270,000, 3 products a value" in cause.evidence


def test_an_infinity_far_from_the_limit_is_no_overflow():
    location = locate(lambda: half(0.0, 12.5).rsqrt())
    assert [c.title for c in causes(location)] == ["reciprocal square root of zero"]
    assert refuted(location)[0] == (
        "overflow: unlikely because operands reach 12.5, less than 0.1 % of float16's largest 65504"
    )


def test_residual_branches_of_different_scale():
    torch.manual_seed(0)
    trunk, branch = torch.rand(4, 8).half() * 65000, torch.rand(4, 8).half() * 5000
    trunk[0, 0], branch[0, 0] = 65000, 5000
    residual, overflow = diagnose(lambda: trunk + branch)
    assert residual.title == "one branch of a residual sum has outgrown the other"
    assert "self has mean" in residual.evidence
    assert "std" in residual.evidence
    assert residual.evidence.endswith("the largest values differ by a factor of 13")
    assert overflow.title == "add overflows float16"


def test_a_residual_sum_in_place():
    trunk = full(2, 2, value=65000)
    residual, _ = diagnose(lambda: trunk.clone().add_(full(2, 2, value=5000)))
    assert residual.title == "one branch of a residual sum has outgrown the other"
    assert "is in [64,992, 64,992]; other" in residual.evidence


@pytest.mark.parametrize(
    ("trunk", "other"),
    [
        (full(2, 2, value=4e4), full(2, 2, value=4e4)),  # alike
        (full(2, 2, value=65000), full(2, value=5000)),  # a bias
    ],
)
def test_sums_that_are_no_residual(trunk, other):
    assert titles(lambda: trunk + other) == ["add overflows float16"]


def test_values_that_float16_holds_do_not_overflow():
    assert nanscan.locate(lambda: full(2, 2, value=4e4) + full(2, 2, value=2e4)) is None


# What speaks against a suspicion ------------------------------------------------------------------


def test_finite_operands_do_not_speak_against_the_data():
    """Zeros, labels, counts and sizes are data, too."""
    assert refuted(locate(lambda: torch.ones(2) / torch.zeros(2))) == []


def test_what_may_have_overflowed_is_not_denied():
    unknown = half(0.0, 3.0)  # no bound is known of such an op
    location = ran(torch.ops.aten.lgamma.default, self=unknown)
    assert not any("overflow" in line for line in refuted(location))
    cast = locate(lambda: torch.tensor([10, 70000]).half())
    assert (causes(cast)[0].title, refuted(cast)) == ("conversion to float16 overflows", [])


def test_nothing_speaks_against_data_that_was_bad():
    assert refuted(locate(lambda: torch.tensor([math.nan]) * 2)) == []


def test_no_inf_speaks_against_a_masked_row():
    scores = torch.tensor([[INF, 1.0]])
    location = ran(torch.ops.aten._softmax.default, self=scores, dim=-1, half_to_float=False)
    assert "a fully masked row: unlikely because the softmax was given no -Inf" in refuted(location)
    masked = locate(lambda: F.softmax(ROWS, -1))
    assert "masked" not in " ".join(refuted(masked))


def test_a_divisor_speaks_against_zero():
    lines = refuted(locate(lambda: half(6e4) / 0.5))
    assert "division by zero: unlikely because the smallest magnitude of other is 0.5" in lines
    assert "overflow" not in " ".join(lines)


def test_an_op_of_another_library_is_not_taken_for_torchs():
    location = locate(lambda: torch.zeros(2).log())
    other = dataclasses.replace(location.at, name="mylib.log.default")
    assert causes(dataclasses.replace(location, at=other)) == []


def test_an_op_without_numbers_has_no_cause():
    location = locate(lambda: torch.linalg.inv_ex(torch.zeros(2, 2))[0])
    assert causes(location) == []
    nothing = dataclasses.replace(location, at=Op("aten.sqrt.default"))
    assert (causes(nothing), refuted(nothing)) == ([], [])
