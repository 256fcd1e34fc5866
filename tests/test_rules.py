"""A rule that fails says so once, and costs no more than what it would have said."""

import warnings

import torch
from torch import nn

import nanscan
from nanscan._data import rules
from nanscan._judge import causes
from nanscan._locate import causes as causes_of_ops


def failing_rule(*_):
    raise RuntimeError("of a user's property")


def test_a_failing_rule_stops_neither_the_run_nor_the_others(monkeypatch, caplog):
    monkeypatch.setattr(rules, "_failed", set())
    failing = rules.Rule(failing_rule, lambda _: True)
    monkeypatch.setattr(causes, "RULES", (failing, *causes.RULES))
    monkeypatch.setattr(causes, "SUSPICIONS", (failing,))
    model = nn.Linear(2, 2)
    with nanscan.watch(model, action=lambda _: None) as monitor, torch.no_grad():
        for _ in range(3):
            model(torch.full((1, 2), torch.nan))
            model(torch.ones(1, 2))
    assert [cause.title for cause in monitor.findings[0].causes] == [
        "the batch was bad before the model saw it"
    ]
    assert caplog.text.count("the rule failing_rule failed; please report it") == 1
    assert "of a user's property" in caplog.text


def test_of_a_location(monkeypatch, caplog):
    monkeypatch.setattr(rules, "_failed", set())
    failing = rules.Rule(failing_rule, lambda _: True)
    monkeypatch.setattr(causes_of_ops, "_RULES", ((failing,), *causes_of_ops._RULES))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        location = nanscan.locate(lambda: torch.zeros(2).log())
    assert location.causes
    assert caplog.text.count("failing_rule failed") == 1
