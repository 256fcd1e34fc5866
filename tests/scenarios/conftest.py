"""Golden reports: in tests/golden the text of every finding and location that scenarios produce.

NANSCAN_GOLDEN=exact compares byte for byte, as a change of structure must leave it. By default
numbers are left out, since they differ a little from machine to machine. NANSCAN_GOLDEN=write
writes the files.
"""

import os
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch

import nanscan
from helpers.consistency import contradictions
from helpers.text import without_numbers

FOLDER = Path(__file__).parent.parent / "golden"
MODE = os.environ.get("NANSCAN_GOLDEN", "")
HEAD = "=== "

_written: dict[str, dict[str, str]] = defaultdict(dict)


def read(path: Path) -> dict[str, str]:
    """Reports by test."""
    parts = path.read_text(encoding="utf-8").split(f"\n{HEAD}") if path.exists() else []
    return dict(part.removeprefix(HEAD).split("\n", 1) for part in parts if part.strip())


def text_of(finding: nanscan.Finding) -> str:
    return str(finding)


@pytest.fixture(autouse=True)
def golden_reports(request, monkeypatch):
    """Compares what a test made nanscan say with what it said when the file was written."""
    torch.manual_seed(0)  # a model that is built before a test's own seed
    made: list[nanscan.Monitor | nanscan.Locating] = []
    for kind in (nanscan.Monitor, nanscan.Locating):
        original = kind.__init__

        def init(self, *args, _original=original, **kwargs):
            _original(self, *args, **kwargs)
            made.append(self)

        monkeypatch.setattr(kind, "__init__", init)
    yield
    reports = [text_of(f) for m in made if isinstance(m, nanscan.Monitor) for f in m.findings]
    for search in made:
        if isinstance(search, nanscan.Locating):
            reports += [str(found) for found in (search.location, search.absorbed) if found]
    if not reports:
        return
    assert [found for report in reports for found in contradictions(report)] == []
    text = "\n\n".join(reports) + "\n"
    file, name = request.path.stem.removeprefix("test_"), request.node.name
    if MODE == "write":
        _written[file][name] = text
        return
    expected = read(FOLDER / f"{file}.txt").get(name, "")
    if MODE == "exact":
        assert text.rstrip() == expected.rstrip()
    else:
        assert without_numbers(text).strip() == without_numbers(expected).strip()


@pytest.fixture(scope="session", autouse=True)
def golden_files():
    """Writes the files at the end, where that is asked for."""
    yield
    for file, reports in _written.items():
        sections = [f"{HEAD}{name}\n{text}" for name, text in sorted(reports.items())]
        (FOLDER / f"{file}.txt").write_text("\n".join(sections), encoding="utf-8")


@pytest.fixture(scope="session")
def photographs():
    """[64, 14700] pixels, 0 to 255."""
    from sklearn.datasets import load_sample_images
    from sklearn.feature_extraction.image import extract_patches_2d

    patches = [
        extract_patches_2d(image, (70, 70), max_patches=32, random_state=0)
        for image in load_sample_images().images
    ]
    return torch.tensor(np.concatenate(patches).reshape(64, -1))
