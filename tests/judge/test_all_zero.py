"""Outputs and gradients that turn into zeros, and look-alikes that may well be zero."""

import dataclasses

import pytest
import torch
from torch import nn

import nanscan
from helpers.models import SCOPES, Do, Net, batch, enable, infer, sgd, train
from nanscan import _monitor
from nanscan._judge.all_zero import norm_overflows, turned_to_zero
from nanscan._judge.causes import causes
from nanscan._judge.evidence import Evidence, StepEvidence


def records(monkeypatch, model, run):
    """What a function says of each record of a run."""
    seen = []

    class Judge(_monitor.Judge):
        is_waiting = True  # so that a record of each step is made

        def judge(self, record):
            names = [str(record.nodes[row].site) for row in turned_to_zero(record)]
            row = norm_overflows(record)
            seen.append((names, None if row is None else str(record.nodes[row].site)))
            return super().judge(record)

    monkeypatch.setattr(_monitor, "Judge", Judge)
    with nanscan.watch(model, action=lambda _: None):
        run()
    return seen


class Norm(nn.Module):
    """Its squares overflow float16, and 1 / Inf is 0."""

    def __init__(self, wide):
        super().__init__()
        self.wide = wide

    def forward(self, x):
        y = x.float() if self.wide else x
        return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-3)).to(x.dtype)


@pytest.mark.parametrize("wide", [False, True])
def test_an_output_that_an_overflow_wiped_out(monkeypatch, wide):
    model = nn.Sequential(Do(lambda x: x * 1), Norm(wide))
    inputs = [batch(seed).half() for seed in range(4)]
    large = torch.full((3, 4), 900.0).half()
    seen = records(monkeypatch, model, lambda: infer(model, *inputs, large, inputs[0]))
    zeros = [names for names, _ in seen]
    assert zeros == [[], [], [], [], [] if wide else ["1 output"], []]


def test_outputs_that_are_zero_by_design(monkeypatch):
    """A gate that is closed, of values whose squares fit; and what was zero before."""
    model = nn.Sequential(Do(lambda x: x * 1), Do(lambda x: x * (x.mean() > 0)), nn.ReLU())
    inputs = [batch(seed).abs() for seed in range(4)]
    seen = records(monkeypatch, model, lambda: infer(model, *inputs, -inputs[0]))
    assert {str(names) for names, _ in seen} == {"[]"}
    model = nn.Sequential(Do(lambda x: x * 1), Do(lambda x: x * 0))
    seen = records(monkeypatch, model, lambda: infer(model, *[x * 1e30 for x in inputs]))
    assert {str(names) for names, _ in seen} == {"[]"}


def test_the_report_of_zeros(monkeypatch):
    """As the judge is to call it."""
    model = nn.Sequential(Do(lambda x: x * 1), Norm(wide=False))
    reports = []

    class Judge(_monitor.Judge):
        is_waiting = True

        def judge(self, record):
            for row in turned_to_zero(record):
                finding = described(record, row)
                reports.append(finding)
            return super().judge(record)

    monkeypatch.setattr(_monitor, "Judge", Judge)
    large = torch.full((3, 4), 900.0).half()
    with nanscan.watch(model, action=lambda _: None):
        infer(model, *[batch(seed).half() for seed in range(3)], large)
    (finding,) = reports
    assert not finding.is_fault
    text = str(finding)
    assert text.startswith("1 output is all zero in step 3 (all-zero: it was not in the steps ")
    (cause,) = finding.causes
    assert cause.title == "squares overflow float16, and division by Inf gives 0"
    assert cause.evidence == (
        "it was given values up to 900; 900^2 = 810,000, and float16 ends at 65504; it was not 0 "
        "in the steps before"
    )


def described(record, row):
    place = record.nodes[row].place
    given = [(record.nodes[r].site, record.result(r)) for r in place.input_sources()]
    finding = nanscan.Finding(
        record.step,
        0,
        record.nodes[row].site,
        "all-zero",
        "it was not in the steps before",
        record.result(row),
        given=tuple(given),
    )
    names = {field.name for field in dataclasses.fields(Evidence)}
    more = {"from_start": False} if "from_start" in names else {}
    evidence = Evidence(
        finding=finding,
        node=record.nodes[row],
        step=StepEvidence(record),
        from_outside=False,
        inputs_from_outside=(),
        **more,
    )
    return dataclasses.replace(finding, causes=tuple(causes(evidence)))


@pytest.mark.parametrize("zero_all", [True, False])
def test_gradients_that_all_turn_zero(monkeypatch, zero_all):
    model = Net()
    optimizer = sgd(model)

    def run():
        train(model, optimizer, [batch()] * 4)
        optimizer.zero_grad()
        model(batch()).sum().backward()
        for parameter in [*model.parameters()][: None if zero_all else 2]:
            parameter.grad.zero_()
        optimizer.step()

    *before, (names, _) = records(monkeypatch, model, run)
    assert {str(each) for each, _ in before} == {"[]"}
    assert len(names) == (4 if zero_all else 0)


@pytest.mark.parametrize(
    ("dtype", "top", "is_inf"),
    [
        (torch.float32, 1e20, True),
        (torch.float32, 1e18, False),
        (torch.float16, 50000.0, True),
        (torch.float16, 10000.0, False),
    ],
)
def test_a_norm_of_gradients_that_overflows(monkeypatch, dtype, top, is_inf):
    model = Net().to(dtype)
    optimizer = sgd(model, 1e-9)
    norms = []

    def run():
        model(batch().to(dtype)).sum().backward()
        for parameter in (model.fc1.weight, model.fc2.weight):
            parameter.grad.fill_(0)[0, 0] = top
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        assert all(p.grad.abs().max() == 0 for p in model.parameters()) is is_inf
        optimizer.step()

    found = {name for _, name in records(monkeypatch, model, run)} - {None}
    assert norms[0].isinf() == is_inf
    assert bool(found) is is_inf
    assert found <= {"fc1.weight grad", "fc2.weight grad"}


@SCOPES
def test_a_layer_that_is_wiped_out_is_reported_once(scope):
    class Rms(nn.Module):
        def forward(self, x):
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)

    model = nn.Sequential(Rms())
    monitor = enable(scope, model, action="log")
    for top in (1.0, 2.0, 3.0, 4.0, 900.0, 900.0):
        infer(model, torch.full((2, 8), top).half())
    assert [(f.step, str(f.site), f.verdict) for f in monitor.findings] == [
        (4, "0 output", "all-zero")
    ]
    (finding,) = monitor.findings
    assert finding.causes[0].title == "squares overflow float16, and division by Inf gives 0"
    assert not finding.is_fault
    assert str(finding).startswith("0 output is all zero in step 4 (all-zero: it was not in")
