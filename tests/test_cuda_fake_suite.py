"""The tests of everything else once more, with every CPU tensor on a CUDA device.

They run on the recording driver, in one process of their own, since nanscan looks for a driver once
a process. By hand: NANSCAN_TEST_FAKE_CUDA=1 python -m pytest tests/test_table.py
"""

import subprocess
import sys
from pathlib import Path

import fake_cuda
import pytest

FILES = (
    "test_cuda_launch.py",
    "test_cuda_failures.py",
    "test_scan_oracle.py",
    "test_check_api.py",
    "test_table.py",
    "test_hooks.py",
    "test_judge.py",
    "test_monitor.py",
)


def test_on_the_recording_driver():
    if fake_cuda.wanted():
        pytest.skip("this process is on the recording driver already")
    if reason := fake_cuda.why_not():
        pytest.skip(reason)
    here = Path(__file__).parent
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short"]
    done = subprocess.run(
        [*command, *(here / name for name in FILES)],
        cwd=fake_cuda.ROOT,
        env=fake_cuda.environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert done.returncode == 0, f"{done.stdout[-20_000:]}\n{done.stderr[-2000:]}"
