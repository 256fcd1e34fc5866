"""The launch path, and the tests of everything else once more with every tensor on a CUDA device.

They run on the recording driver, in processes of their own, since nanscan looks for a driver once a
process. By hand: NANSCAN_TEST_FAKE_CUDA=1 python -m pytest tests/test_table.py
"""

import subprocess
import sys
from pathlib import Path

import fake_cuda
import pytest

SUITES = {
    "launches": ("test_cuda_launch.py", "test_cuda_failures.py"),
    "tensors on CUDA devices": (
        "test_scan_oracle.py",
        "test_check_api.py",
        "test_table.py",
        "test_hooks.py",
        "test_judge.py",
        "test_monitor.py",
    ),
    "op by op": tuple(path.name for path in sorted(Path(__file__).parent.glob("test_locate*.py"))),
}


@pytest.fixture(scope="module")
def running():
    """All suites at once, each in its process."""
    if fake_cuda.wanted():
        pytest.skip("this process is on the recording driver already")
    if reason := fake_cuda.why_not():
        pytest.skip(reason)
    here = Path(__file__).parent
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short"]
    processes = {
        name: subprocess.Popen(
            [*command, *(here / file for file in files)],
            cwd=fake_cuda.ROOT,
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
