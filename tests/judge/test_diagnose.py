"""What all causes have in common: few, best first, only where something began, and only when asked.

Each cause has its tests in test_diagnose_forward.py, _gradients.py or _optimizer.py.
"""

import pytest
import torch
from torch import nn

from helpers.models import NAN, Do, Net, batch, diagnosed, first_fault, infer, sgd, titles, train
from nanscan import Cause
from nanscan._data.rules import Rule
from nanscan._judge import causes, judge


def test_nothing_is_asked_while_all_is_clean(monkeypatch):
    def refuse(*_):
        raise AssertionError

    monkeypatch.setattr(judge, "causes", refuse)
    monkeypatch.setattr(judge, "unlikely", refuse)
    model = Net()
    inputs = [batch(seed) for seed in range(3)]
    assert diagnosed(model, lambda: train(model, sgd(model), inputs)).findings == []


def test_what_was_handed_on_has_neither_causes_nor_refuted_suspicions():
    model = nn.Sequential(nn.Linear(4, 4), Do(lambda x: x * factors.pop()), Do(lambda x: x * 1))
    factors = [NAN, *[1.0] * 5]
    inputs = [batch(0)] * 6
    monitor = diagnosed(model, lambda: train(model, sgd(model, 1e-9), inputs))
    findings = [f for f in monitor.findings if f.site.kind == "output"]
    assert [f.verdict for f in findings] == ["origin", "propagated"]
    assert findings[0].unlikely
    assert (findings[1].causes, findings[1].unlikely) == ((), ())


def test_three_causes_at_most(monkeypatch):
    monkeypatch.setattr(
        causes,
        "RULES",
        tuple(
            Rule(
                lambda _, title=title: None if title == "c" else Cause(title, "", ""),
                lambda _: True,
            )
            for title in "abcdef"
        ),
    )
    model = Do(lambda x: x / 0)
    assert titles(first_fault(diagnosed(model, lambda: infer(model, batch())))) == ["a", "b", "d"]


def test_a_bad_input_refutes_nothing():
    """A mask of -Inf alone is not finite, though it is no fault."""
    model = Do(lambda x, mask: (x + mask) * NAN)
    finding = first_fault(
        diagnosed(model, lambda: model(batch(), torch.tensor([0, 0, 0, float("-inf")])))
    )
    assert finding.verdict == "origin"
    assert "batch" not in str(finding.unlikely)


@pytest.mark.parametrize("top", [1.0, 40.0, 50.0])
def test_overflow_and_the_batch_are_never_refuted(top):
    """Code between modules may have overflowed, and finite data may be at fault."""
    x = torch.tensor([-1.0, top])
    for model in (Do(torch.sqrt), Do(lambda x: x * ((x * 0 + 100).exp() * 0))):
        assert first_fault(diagnosed(model, lambda m=model: infer(m, x))).unlikely == ()


def test_exploding_gradients_are_not_refuted_by_few_or_rising_ones():
    def run(scales):
        model = Net()
        scales = iter(scales)
        inputs = [batch(0)] * 6
        return first_fault(
            diagnosed(
                model,
                lambda: train(
                    model, sgd(model, 1e-9), inputs, lambda out: out.sum() * next(scales)
                ),
            )
        )

    assert "exploding" in str(run([1.0, 1.0, 1.0, 1.0, 1.0, NAN]).unlikely)
    assert "exploding" not in str(run([1.0, 1.0, 1.0, 1.0, 9.0, NAN]).unlikely)
    assert "exploding" not in str(run([1.0, 1.0, 1.0, 9.0, 1.0, NAN]).unlikely)
    assert "exploding" not in str(run([1.0, 1.0, 1.0, NAN, 1.0, 1.0]).unlikely)
    assert "exploding" not in str(run([0.0, 0.0, 0.0, 0.0, 0.0, NAN]).unlikely)


def test_an_infinite_gradient_is_not_refuted_by_calm_ones_before():
    model = Net()
    optimizer = sgd(model, 1e-9)

    def run():
        train(model, optimizer, [batch()] * 6)
        model.fc2.bias.register_hook(lambda gradient: gradient / 0)
        train(model, optimizer, [batch()])

    finding = first_fault(diagnosed(model, run))
    assert finding.site.kind == "grad"
    assert "exploding" not in str(finding.unlikely)


def test_without_float_inputs_nothing_is_said_of_the_batch():
    model = nn.Sequential(nn.Embedding(3, 4), Do(lambda x: (x - 100).sqrt()))
    finding = first_fault(diagnosed(model, lambda: model(torch.arange(3))))
    assert finding.verdict == "origin"
    assert "batch" not in str(finding.unlikely)


def test_without_a_look_at_the_forward_overflow_is_not_refuted():
    model = Net()
    model.fc1.bias.register_hook(lambda gradient: gradient * NAN)
    monitor = diagnosed(model, lambda: train(model, sgd(model), [batch()]), kinds="grad")
    assert first_fault(monitor).unlikely == ()


def test_a_second_origin_does_not_follow_finite_values_only():
    """Two branches of one input; the second finding does not speak of the first one's values."""

    class Fork(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = Do(torch.sqrt), Do(torch.log)

        def forward(self, x):
            return self.a(x), self.b(x)

    model = Fork()
    first, second = diagnosed(model, lambda: infer(model, -batch().abs())).findings[:2]
    assert [str(first.site), str(second.site)] == ["a output", "b output"]
    assert second.verdict == "origin"
    assert first.unlikely == second.unlikely == ()


def test_a_cast_that_overflows_is_not_denied():
    """Positions past 65,504 are Inf in float16; nothing that is scanned comes near."""

    class Rotary(nn.Module):
        def forward(self, x, position):
            return x * position.type_as(x)[:, None].cos()

    model = Rotary()
    x, position = torch.randn(3, 4).half(), torch.tensor([10, 70000, 512])
    finding = first_fault(diagnosed(model, lambda: model(x, position)))
    assert finding.stats.first_nonfinite == (1, 0)
    assert (finding.causes, finding.unlikely) == ((), ())
