"""What other ops make finite again is no fault, unless something is left of it."""

import pytest
import torch

import nanscan
from helpers.located import marked

X = torch.tensor([-1.0, 0.0, 4.0])


def replaced_by_where():
    return torch.where(X > 0, X.log(), 0)


def replaced_by_nan_to_num():
    return (1 / X).nan_to_num()


def overwritten_in_place():
    y = X.sqrt()
    y[0] = 0.0
    return y


def left_out_by_indexing():
    return X.log()[2:] + 1


def dropped_rows_of_an_attention():
    mask = torch.tensor([[False, False], [True, True]])
    p = torch.zeros(2, 2).masked_fill(mask, -torch.inf).softmax(1)
    return (p @ torch.ones(2, 3))[:1].sum()


def safe_argument_in_backward():
    x = X.clone().requires_grad_()
    ok = x > 0
    torch.where(ok, torch.where(ok, x, 1).sqrt(), 0).sum().backward()


@pytest.mark.parametrize(
    "quiet",
    [
        replaced_by_where,
        replaced_by_nan_to_num,
        overwritten_in_place,
        left_out_by_indexing,
        dropped_rows_of_an_attention,
        safe_argument_in_backward,
    ],
)
def test_nothing_is_left(quiet):
    assert nanscan.locate(quiet) is None


def test_what_was_absorbed_can_be_asked_for():
    with nanscan.locating() as search:
        y = X.log()  # the log
        torch.where(X > 0, y, 0)
    assert search.location is None
    assert search.absorbed.verdict == "absorbed"
    assert (search.absorbed.op, search.absorbed.line) == (
        "aten.log.default",
        marked(test_what_was_absorbed_can_be_asked_for, "the log"),
    )


def test_a_fault_comes_before_what_was_absorbed_earlier():
    def step():
        torch.where(X > 0, X.log(), 0)
        return torch.tensor([-4.0]).sqrt()

    assert nanscan.locate(step).op == "aten.sqrt.default"


def looked_at_by_isfinite():
    y = X.log()
    torch.isfinite(y).all()


def taken_to_python():
    return X.log().sum().item()


def nobody_reads_it():
    X.log() + 1


def read_and_left_over():
    y = X.log()
    torch.where(X > 0, y, 0)
    y.exp().sqrt().neg().log()


@pytest.mark.parametrize(
    ("loud", "op"),
    [
        (looked_at_by_isfinite, "aten.log.default"),
        (taken_to_python, "aten.log.default"),
        (nobody_reads_it, "aten.log.default"),
        (read_and_left_over, "aten.log.default"),
        (lambda: (1 - torch.ones(3)) * -torch.inf, "aten.mul.Tensor"),
        (lambda: torch.zeros(2) * torch.tensor(-torch.inf), "aten.mul.Tensor"),
    ],
)
def test_something_is_left(loud, op):
    location = nanscan.locate(loud)
    assert (location.op, location.verdict) == (op, "origin")


def test_a_backward_that_brings_it_back():
    def step():
        x = X.clone().requires_grad_()
        y = x.sqrt()  # NaN at -1
        torch.where(x > 0, y, 0).sum().backward()

    location = nanscan.locate(step)
    assert (location.op, location.direction) == ("aten.sqrt.default", "forward")
    assert location.line == marked(test_a_backward_that_brings_it_back, "NaN at -1")


def test_moments_that_overflow_are_left_in_the_optimizer():
    def step():
        p = torch.nn.Parameter(torch.zeros(2, dtype=torch.float16))
        optimizer = torch.optim.Adam([p], eps=1e-4)
        (p * 6e4).sum().backward()
        optimizer.step()
        assert p.isfinite().all()  # m / sqrt(Inf) is 0: it never moves again

    location = nanscan.locate(step)
    assert location.direction == "optimizer"
    assert location.at.results[0].what.startswith("exp_avg_sq")
