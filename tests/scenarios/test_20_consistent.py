"""No report says two things that exclude each other: goldens here, all scenarios in conftest."""

import pytest

from helpers.consistency import contradictions, sections
from scenarios.conftest import FOLDER, read

REPORT = """net.0 output is non-finite in step 3 (origin: made here)
  values    1 NaN of 4 (float32 [4])
            first at (1,), no finite value
  given     net input[0]  min 1  max 1  absmax 1
  before    loss          1 +Inf of 1 (float32 [])
  history   absmax by step: step 1: 2 (1 bad), step 2: 2, step 3: 2 (1 bad)
  cause     two branches meet here, and their
            sum does not fit into float16
            evidence: it is so
  unlikely  exploding gradients: they went from 1 to 1"""


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.txt")), ids=lambda path: path.stem)
def test_goldens_do_not_contradict_themselves(path):
    reports = [each for text in read(path).values() for each in text.split("\n\n") if each.strip()]
    assert reports
    assert [found for report in reports for found in contradictions(report)] == []


def test_a_report_is_read_as_it_is_written():
    labels = [label for label, _ in sections(REPORT)]
    assert labels == ["", "values", "given", "before", "history", "cause", "unlikely"]
    assert contradictions(REPORT) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("exploding gradients: they", "overflow: they"),
        ("it is so", "all 4 tensors scanned in the forward of this step are finite"),
        ("it is so", "in the 2 steps before there were at least 8, all finite"),
        ("two branches", "the learning rate is too high, two branches"),
        ("min 1  max 1  absmax 1", "2 NaN of 4 (float32 [4])\n            a output  2 NaN of 4"),
    ],
)
def test_a_contradiction_is_found(old, new):
    assert old in REPORT
    assert contradictions(REPORT.replace(old, new))
