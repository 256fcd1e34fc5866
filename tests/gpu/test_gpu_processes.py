"""What needs a process of its own on a GPU: NVRTC, first things in a capture, errors, forks."""

import os
import subprocess
import sys

import pytest

from helpers.gpu import DEVICE, DRY, needs_gpu

pytestmark = pytest.mark.cuda


# -- processes of their own ------------------------------------------------------------------------


def run_python(script, tmp_path, **environment):
    """Runs a script; its output, one line each, and its exit status."""
    path = tmp_path / "script.py"
    path.write_text(script)
    done = subprocess.run(
        [sys.executable, path],
        cwd=tmp_path,
        env={**os.environ, "DEVICE": DEVICE, **environment},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    print(done.stdout, done.stderr)
    return done.stdout.splitlines(), done.returncode


BY_NVRTC = """
from pathlib import Path
import torch, nanscan
from nanscan._scan import cuda
cuda.FATBIN = Path("there is none")
x = torch.ones(100_000, dtype=torch.float16, device="cuda")
x[77_777] = float("nan")
results = [nanscan.check(x), nanscan.check(x.view(100, 1000).t()), *nanscan.check_many([x, x])]
print(cuda.why_not(0) or "loaded")
print([result.nan_count for result in results], results[1].first_nonfinite)
"""


@needs_gpu
def test_kernels_that_nvrtc_makes(tmp_path):
    """And a second process finds them in the cache."""
    cache = tmp_path / "cache"
    for _ in range(2):
        lines, status = run_python(BY_NVRTC, tmp_path, NANSCAN_CACHE=str(cache))
        assert (lines, status) == (["loaded", "[1, 1, 1, 1] (777, 77)"], 0)
        assert len(list(cache.iterdir())) == 1


FIRST_IN_CAPTURE = """
import torch, nanscan
x = torch.ones(1000, device="cuda")
model = torch.nn.Linear(10, 10).cuda()
y = torch.ones(2, 10, device="cuda")
side = torch.cuda.Stream()
with torch.no_grad(), torch.cuda.stream(side):
    model(y)
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
monitor = nanscan.enable(model, action="log")
with torch.no_grad(), torch.cuda.graph(graph):
    result = nanscan.check(x)
    model(y)
x[5] = y[1, 3] = float("nan")
graph.replay()
monitor.step()
monitor.flush()
print(result.nan_count, monitor.findings[0].site)
"""


@needs_gpu
def test_a_capture_in_which_all_comes_first(tmp_path):
    """Kernels are loaded, memory is taken, parameters are swept, all amid the capture."""
    assert run_python(FIRST_IN_CAPTURE, tmp_path) == (["1 Linear input[0]"], 0)


STICKY = """
import sys
import torch, nanscan
from nanscan import _C
x = torch.ones(1000, device="cuda")
model = torch.nn.Linear(4, 4).cuda()
with torch.no_grad():
    monitor = nanscan.enable(model, action="log")
    monitor.step()
    model(torch.ones(2, 4, device="cuda"))
table = _C.Table()
row = table.add_row()
table.scan(x, row)
nanscan.check(x).is_finite
torch.cuda.synchronize()
torch._assert_async(torch.zeros((), dtype=torch.bool, device="cuda"))
calls = {
    "check": lambda: nanscan.check(x).is_finite,
    "check_many": lambda: nanscan.check_many([x, x])[0].is_finite,
    "assert_finite": lambda: nanscan.assert_finite(x),
    "scan": lambda: table.scan(x, row),
    "flush": monitor.flush,
}
for name, call in calls.items():
    try:
        call()
    except RuntimeError as error:
        print(name, error)
    else:
        print(name, "raised nothing")
print("the end", flush=True)
"""

STICKY_CONTROL = """
import torch
torch.ones(3, device="cuda")
torch._assert_async(torch.zeros((), dtype=torch.bool, device="cuda"))
try:
    torch.cuda.synchronize()
except RuntimeError:
    pass
"""


@needs_gpu
def test_an_error_that_ends_the_context(tmp_path):
    """Each call says so, and nothing hangs, at exit either."""
    lines, status = run_python(STICKY, tmp_path)
    assert [line.split()[0] for line in lines if "nanscan:" in line] == [
        *("check", "check_many", "assert_finite", "scan", "flush")
    ]
    assert all("CUDA_ERROR_" in line for line in lines if "nanscan:" in line)
    assert lines[-1] == "the end"
    if status != 0:  # is that torch alone?
        assert status == run_python(STICKY_CONTROL, tmp_path)[1]


FORK = """
import atexit, gc, os, sys, time
import torch, nanscan
from nanscan import _C
device = os.environ["DEVICE"]
x = torch.ones(1000, device=device)
model = torch.nn.Linear(4, 4).to(device)
monitor = nanscan.enable(action="log")
with torch.no_grad():
    model(torch.ones(2, 4, device=device))
table = _C.Table()
row = table.add_row()
table.scan(x, row)
pending = nanscan.check(x)
nanscan.check(x).is_finite

def in_child(work):
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        work()
        atexit._run_exitfuncs()  # what nanscan does at exit; CUDA's own end is not the matter
        sys.stdout.flush()
        os._exit(0)
    for _ in range(200):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            print("exit status", os.waitstatus_to_exitcode(status))
            return
        time.sleep(0.05)
    os.kill(child, 9)
    os.waitpid(child, 0)
    print("the child hung")

def on_the_host():
    print("child:", nanscan.check(torch.tensor([float("nan")])).nan_count)
    with torch.no_grad():
        torch.nn.Linear(4, 4)(torch.ones(2, 4))

def on_the_device():
    try:
        print("child:", nanscan.check(x).nan_count)
    except RuntimeError as error:
        print("child: RuntimeError")

def lets_go():
    global table, pending, monitor
    monitor.close()
    del table, pending, monitor
    gc.collect()
    print("child: let go")

def scans_into_the_table():
    try:
        table.scan(x, row)
        print("child: scanned")
    except RuntimeError as error:
        print("child: RuntimeError")

for work in (on_the_host, on_the_device, lets_go, scans_into_the_table):
    in_child(work)
x[5] = float("nan")
print("parent:", nanscan.check(x).nan_count, pending.is_finite, monitor.healthy)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_after_use(tmp_path):
    """A child scans host memory, is told when it tries the device, and ends; the parent goes on."""
    lines, status = run_python(FORK, tmp_path, OMP_NUM_THREADS="1")
    on_device = "child: RuntimeError" if not DRY else "child: 0"
    expected = ["child: 1", "exit status 0", on_device, "exit status 0"]
    expected += ["child: let go", "exit status 0"]
    expected += ["child: RuntimeError" if not DRY else "child: scanned", "exit status 0"]
    assert (lines, status) == ([*expected, "parent: 1 True True"], 0)
