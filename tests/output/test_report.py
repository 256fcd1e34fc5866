"""The text of a finding: all that a person needs, and nothing that only a program reads."""

import re

import pytest
import torch
from torch import nn

import nanscan
from helpers.models import NAN, Do, Gap, Net, batch, infer, set_nan, train


def watched(model, *inputs):
    monitor = nanscan.enable(model, action="log")
    infer(model, *inputs)
    return monitor.findings


def lines_with(text: str, word: str) -> list[str]:
    return [line for line in text.splitlines() if word in line]


def test_the_first_line_says_where_what_and_when():
    model = Gap(lambda x: x / 0)
    first, second = map(str, watched(model, batch()))
    assert first.startswith("fc2 input[0] is non-finite in step 0 (origin")
    assert second.startswith("fc2 output is non-finite in step 0 (propagated")


def test_the_rank_is_named_where_there_are_several(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    finding = watched(Net(), set_nan(batch()))[0]
    assert finding.rank == 3
    assert "in step 0, rank 3" in str(finding).splitlines()[0]
    monkeypatch.setenv("RANK", "0")
    finding = watched(Net(), set_nan(batch()))[0]
    assert "rank" not in str(finding)


def test_the_numbers():
    x = batch()
    x[1, 2] = NAN
    x[2] = float("-inf")
    text = str(watched(Net(), x)[0])
    assert "1 NaN, 4 -Inf of 12 (float32 [3, 4])" in text
    assert "first at (1, 2)" in text
    finite = x[x.isfinite()]
    assert f"finite values from {finite.min():.3g} to {finite.max():.3g}" in text


def test_code_between_modules_is_named():
    text = str(watched(Gap(lambda x: x / 0), batch())[0])
    (line,) = lines_with(text, "between")
    assert re.search(r"between +fc1 output +and +fc2 input\[0\]", line)


def test_what_came_before_with_its_range():
    model = nn.Sequential(Do(lambda x: x * 2), Do(lambda x: x - 1000), Do(lambda x: x * NAN))
    text = str(watched(model, torch.tensor([1.0, -3.0]))[0])
    (line,) = lines_with(text, "0 output")
    for name, value in [("min", "-6"), ("max", "2"), ("absmax", "6")]:
        assert re.search(rf"\b{name} {value}\b", line)
    assert len(lines_with(text, "1 output")) == 2  # given, and before
    assert all(re.search(r"absmax 1,006\b", line) for line in lines_with(text, "1 output"))


def test_the_last_steps_of_the_site():
    model = Do(lambda x: x * 1)
    findings = watched(model, *[torch.tensor([float(i), NAN if i == 8 else 0.5]) for i in range(9)])
    text = str(findings[0])
    history = " ".join(text[text.index("history") :].split())
    assert "step 7: 7" in history
    assert "step 8: 8 (1 bad)" in history
    assert "step 3: 3" in history
    assert "step 2:" not in text


def test_a_first_step_has_no_history():
    assert "history" not in str(watched(Do(lambda x: x / 0), batch())[0])


def test_causes_come_with_evidence_and_remedy():
    model = Net().half()
    monitor = nanscan.enable(model, action="log")
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    with torch.no_grad():
        model.fc1.weight[:, 0] = 0
    x = 100 * batch().half()
    x[:, 0] = 0
    train(model, optimizer, [x], lambda out: out.float().square().mean())
    finding = monitor.findings[0]
    assert len(finding.causes) == 2
    flat = " ".join(str(finding).split()).replace("- ", "-")  # a line may break at a hyphen
    position = 0
    for cause in finding.causes:
        for part in (cause.title, f"evidence: {cause.evidence}", f"remedy: {cause.remedy}"):
            # A line may break at a hyphen.
            found = flat.replace("- ", "-").find(
                " ".join(part.split()).replace("- ", "-"), position
            )
            assert found >= position, part
            position = found


def test_what_it_is_not_is_said():
    model = Gap()
    monitor, bad = nanscan.enable(model, action="log"), [1, 1, 1, 1, NAN]
    optimizer = torch.optim.SGD(model.parameters(), 1e-9)
    for scale in bad:
        train(model, optimizer, [batch()], lambda out, scale=scale: out.sum() * scale)
    text = str(monitor.findings[0])
    line = text[text.index("  unlikely  ") :].splitlines()[0]
    assert line.startswith("  unlikely  exploding gradients: their absmax went from ")
    nanscan.disable()
    assert "unlikely" not in str(watched(Net(), set_nan(batch()))[0])


def test_what_else_went_bad_is_counted():
    model = nn.Sequential(*[Do(lambda x: x * 1) for _ in range(8)])
    text = str(watched(model, set_nan(batch()))[0])
    assert "0 output, 1 output, 2 output, 3 output and 4 more in the same step" in text


def test_near_the_limit():
    (finding,) = [
        f
        for f in watched(nn.Sequential(Do(lambda x: x * 2)), torch.full((2,), 20000.0).half())
        if f.site.kind == "output"
    ]
    first = str(finding).splitlines()[0]
    assert first.startswith("0 output is near the limit in step 0")
    assert "non-finite" not in str(finding)
    assert re.search(r"40,?000|4e\+04", str(finding))


def test_it_is_plain_text_of_a_terminals_width():
    findings = watched(Gap(lambda x: x / 0), batch(), batch())
    assert len(findings) == 2
    for text in map(str, findings):
        assert not re.search(r"tensor\(|array\(|<[a-z_.]+ object|None|Site\(|torch\.float", text)
        for line in text.splitlines():
            assert line == line.rstrip()
            assert len(line) <= 120


def test_the_message_of_an_error_is_the_report():
    model = Gap(lambda x: x / 0)
    nanscan.enable(model, action="raise")
    with pytest.raises(nanscan.NonFiniteError) as raised:
        infer(model, batch())
    assert str(raised.value) == f"nanscan: {raised.value.finding}"
