"""The demo: a half-precision regression on real photographs that breaks in its first step.

The first batch is fine, the second is NaN. The cause lies between the two: Adam's eps of 1e-8 is 0
in float16, so its update divides 0 by 0. nanscan says so; the repaired runs stay clean.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

import numpy as np
import torch
from torch import nn

from nanscan._api import watch
from nanscan._data.finding import Finding
from nanscan._monitor import Monitor

_STEPS = 8
_BATCH = 16
_PATCH = 70
_PIXELS = _PATCH * _PATCH * 3
_LR = 1e-5  # the repaired runs converge with it; the broken one breaks with any


class Net(nn.Module):
    """Predicts the mean brightness of an image patch."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(_PIXELS, 64)
        self.fc2 = nn.Linear(64, 32)
        self.fc3 = nn.Linear(32, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps [N, 14700] pixels to [N, 1] predictions."""
        return self.fc3(torch.relu(self.fc2(torch.relu(self.fc1(x)))))  # type: ignore[no-any-return]


def photographs(count: int = 128) -> torch.Tensor:
    """Patches of scikit-learn's two sample photographs, [count, 14700], unscaled: 0 to 255."""
    from sklearn.datasets import load_sample_images  # noqa: PLC0415 - the demo extra
    from sklearn.feature_extraction import image as patches_of  # noqa: PLC0415

    images = load_sample_images().images
    patches = [
        patches_of.extract_patches_2d(
            image, (_PATCH, _PATCH), max_patches=count // 2, random_state=0
        )
        for image in images
    ]
    return torch.from_numpy(np.concatenate(patches).reshape(-1, _PIXELS))


def train(
    pixels: torch.Tensor, dtype: torch.dtype, *, eps: float = 1e-8, scale: float = 1.0
) -> tuple[list[float], Monitor]:
    """Trains on raw pixels and returns the losses and the monitor.

    Args:
        pixels: [N, 14700] in 0..255.
        dtype: of model and data.
        eps: Adam's.
        scale: what the pixels are multiplied by.
    """
    torch.manual_seed(0)
    inputs = (pixels * scale).to(dtype)
    targets = (pixels.float().mean(1, keepdim=True) / 255).to(dtype)
    model = Net().to(dtype)
    optimizer = torch.optim.Adam(model.parameters(), lr=_LR, weight_decay=1e-4, eps=eps)
    losses = []
    with watch(model, action=lambda _: None) as monitor:
        for step in range(_STEPS):
            batch = slice(step * _BATCH, (step + 1) * _BATCH)
            loss = nn.functional.mse_loss(model(inputs[batch]), targets[batch])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(loss.item())
    return losses, monitor


_RUNS: list[tuple[str, dict[str, Any]]] = [
    ("float16, pixels 0-255, eps 1e-8", {"dtype": torch.float16}),
    ("float16, pixels / 255, eps 1e-4", {"dtype": torch.float16, "eps": 1e-4, "scale": 1 / 255}),
    ("float32, pixels / 255, eps 1e-8", {"dtype": torch.float32, "scale": 1 / 255}),
]


def main() -> int:
    """Runs the broken and the repaired trainings.

    Returns:
        0 if nanscan names a fault in the broken one alone, and the repaired ones learn.
    """
    try:
        from rich.console import Console  # noqa: PLC0415 - the demo extra
        from rich.table import Table  # noqa: PLC0415

        pixels = photographs()
    except ImportError as error:
        sys.stderr.write(f"nanscan: the demo needs the demo extra ({error}):\n")
        sys.stderr.write("  pip install 'nanscan[demo]'\n")
        return 2
    logging.getLogger("nanscan").addHandler(logging.NullHandler())
    table = Table(
        "run", "losses", "nanscan says", title="Brightness of photographs: 8 steps of Adam"
    )
    faults_of_runs, learned = [], []
    for name, options in _RUNS:
        losses, monitor = train(pixels, **options)
        faults = [finding for finding in monitor.findings if finding.verdict != "near-limit"]
        faults_of_runs.append(faults)
        learned.append(losses[-1] < losses[0] / 2)
        shown = ", ".join(f"{loss:.3g}" for loss in losses[:3]) + f", ..., {losses[-1]:.3g}"
        table.add_row(name, shown, _in_short(faults[0]) if faults else "clean")
    console = Console(width=100, highlight=False, markup=False)
    console.print(table)
    broken, *repaired = faults_of_runs
    if not broken or any(repaired) or learned != [False, True, True]:
        return 1
    console.print(f"\nThe report of the first finding:\n\n{broken[0]}\n")
    later = [_in_short(finding) for finding in broken if finding.step > broken[0].step]
    console.print("After it:", *later[:3], f"and {len(later) - 3} more", sep="\n  ")
    return 0


def _in_short(finding: Finding) -> str:
    return f"step {finding.step}: {finding.site} ({finding.verdict})"
