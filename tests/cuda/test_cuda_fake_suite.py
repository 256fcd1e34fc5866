"""The launch path, and the tests of everything else once more with every tensor on a CUDA device.

They run on the recording driver, in processes of their own, since nanscan looks for a driver once a
process. By hand: NANSCAN_TEST_FAKE_CUDA=1 python -m pytest tests/collect/test_table.py
"""

import subprocess
import sys

import pytest

from helpers import fake_cuda
from helpers.paths import ROOT, TESTS

SUITES = {
    "launches": (
        "cuda/test_cuda_launch.py",
        "cuda/test_cuda_snapshots.py",
        "cuda/test_cuda_graphs.py",
        "cuda/test_cuda_failures.py",
    ),
    "tensors on CUDA devices": (
        "scan/test_scan_oracle.py",
        "scan/test_check_api.py",
        "collect/test_table.py",
        "collect/test_hooks.py",
        "collect/test_arguments.py",
        "collect/test_optimizers.py",
        "collect/test_steps.py",
        "judge/test_bad_calls.py",
        "judge/test_judge.py",
        "judge/test_all_zero.py",
        "test_monitor.py",
    ),
    "op by op": tuple(sorted(TESTS.glob("locate/test_locate*.py"))),
}


@pytest.fixture(scope="module")
def running():
    """All suites at once, each in its process."""
    if fake_cuda.wanted():
        pytest.skip("this process is on the recording driver already")
    if reason := fake_cuda.why_not():
        pytest.skip(reason)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short"]
    processes = {
        name: subprocess.Popen(
            [*command, *(TESTS / file for file in files)],
            cwd=ROOT,
            env=fake_cuda.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for name, files in SUITES.items()
    }
    yield processes
    for process in processes.values():
        process.kill()  # only if it still runs


@pytest.mark.parametrize("suite", SUITES)
def test_on_the_recording_driver(suite, running):
    output, _ = running[suite].communicate(timeout=900)
    assert running[suite].returncode == 0, output[-20_000:]
