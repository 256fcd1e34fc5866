"""Sinks: where findings go, one or several, and those that users write."""

import logging
import subprocess
import sys

import pytest
import torch

import nanscan
from helpers.models import Net, batch, infer, set_nan


class Keep(nanscan.Sink):
    """Writes down everything that a sink is called with."""

    def __init__(self):
        self.heard = []

    def on_finding(self, finding):
        self.heard.append((str(finding.site), finding.verdict))

    def on_step(self, step):
        self.heard.append(step)

    def flush(self):
        self.heard.append("flush")

    def close(self):
        self.heard.append("close")


def test_a_sink_hears_of_findings_steps_and_the_end():
    keep, model = Keep(), Net()
    with nanscan.watch(model, action=keep):
        infer(model, batch(), set_nan(batch()), batch())
    assert keep.heard == [
        0,
        ("Net input[0]", "propagated"),
        1,
        ("Net input[0]", "recovered"),
        2,
        *("flush", "close"),
    ]


def test_several_actions_of_which_the_one_that_raises_comes_last(caplog):
    keep, called, model = Keep(), [], Net()
    with (
        pytest.raises(nanscan.NonFiniteError),
        caplog.at_level(logging.ERROR, "nanscan"),
        nanscan.watch(model, action=("raise", "log", called.append, keep)),
    ):
        infer(model, set_nan(batch()))
    assert ("Net input[0]", "propagated") in keep.heard
    assert [str(finding.site) for finding in called] == ["Net input[0]"]
    assert "Net input[0] is non-finite in step 0" in caplog.text


def test_what_is_no_action_is_refused_before_anything_is_watched():
    for action in ("print", 3, ["warn", "print"]):
        with pytest.raises(ValueError, match="action must be"):
            nanscan.enable(Net(), action=action)


def test_a_sink_that_overrides_nothing_does_nothing():
    model = Net()
    with nanscan.watch(model, action=nanscan.Sink()) as monitor:
        infer(model, set_nan(batch()))
    assert monitor.findings


def test_a_located_op_says_what_it_is_of():
    finding = nanscan.Finding(
        step=3,
        rank=0,
        site=nanscan.Site("fc", "output"),
        verdict="origin",
        how="made here",
        stats=nanscan.check(torch.tensor([1.0])),
    )
    location = nanscan.locate(lambda: torch.zeros(2).log())
    located = nanscan.Located(finding, location, replay="nanscan.replay(...)")
    assert str(located).startswith("why fc output went bad in step 3: aten.log.default made")
    assert str(located).endswith("\n  replay    nanscan.replay(...)")


TRAINER = """
def fit(model, batches):
    for batch in batches:
        model(batch)
"""
SCRIPT = """
import sys
import torch
import nanscan

model = torch.nn.Sequential(torch.nn.Linear(4, 4))
monitor = nanscan.enable(model)
good, bad = torch.ones(2, 4), torch.full((2, 4), float("nan"))
"""


def run_script(folder, ending):
    script = folder / "train.py"
    script.write_text(SCRIPT + ending)
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=False
    )
    return f"{script}:", (SCRIPT + ending).splitlines(), done.stderr


def test_a_warning_points_past_a_trainer_of_another_folder_of_packages(tmp_path):
    packages = tmp_path / "site-packages"
    packages.mkdir()
    (packages / "trainer.py").write_text(TRAINER)
    ending = (
        f"sys.path.append({str(packages)!r})\nimport trainer\n"
        "trainer.fit(model, [good, bad, good])\n"
    )
    script, lines, errors = run_script(tmp_path, ending)
    line = lines.index("trainer.fit(model, [good, bad, good])") + 1
    assert f"{script}{line}: NonFiniteWarning: nanscan: Sequential input[0]" in errors


def test_a_crash_with_a_fault_in_its_step_points_at_the_line_that_crashed(tmp_path):
    ending = (
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "for _ in range(2):\n    model(good).sum().backward()\n    optimizer.step()\n"
        "with torch.no_grad():\n    model[0].weight.fill_(bad[0, 0])\nmodel(good)\n1 / 0\n"
    )
    script, lines, errors = run_script(tmp_path, ending)
    assert f"{script}{lines.index('1 / 0') + 1}: NonFiniteWarning: nanscan: " in errors
    assert "sinks.py" not in errors
