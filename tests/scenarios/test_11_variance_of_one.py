"""Scenario 11: the variance over a batch of one sample divides by zero."""

import warnings

import pytest
import torch
from torch import nn

import nanscan
from helpers.located import marked
from helpers.models import no_trace


class Whiten(nn.Module):
    def __init__(self, correction=1):
        super().__init__()
        self.correction = correction

    def forward(self, x):
        variance = x.var(0, correction=self.correction)  # the variance
        return (x - x.mean(0)) / (variance + 1e-5).sqrt()


def _locate(model, rows):
    torch.manual_seed(0)
    with no_trace(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch's own, on degrees of freedom
        return nanscan.locate(model, torch.randn(rows, 4))


def test_op_by_op():
    location = _locate(nn.Sequential(nn.Linear(4, 4), Whiten()), rows=1)
    assert (location.op, location.verdict, location.direction) == (
        "aten.var.correction",
        "origin",
        "forward",
    )
    assert (location.file, location.line) == (__file__, marked(Whiten, "the variance"))
    assert (location.module, location.at.module_type) == ("1", "Whiten")
    assert location.operands[0].shape == (1, 4)
    assert location.at.settings["correction"] == 1
    assert location.at.results[0].stats.nan_count == 4
    assert location.causes[0].title == "variance of a single value"


@pytest.mark.parametrize(("correction", "rows"), [(1, 2), (0, 1)])
def test_the_remedies_are_clean(correction, rows):
    assert _locate(Whiten(correction), rows) is None
