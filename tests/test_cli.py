"""python -m nanscan: info, demo and run, as a user calls them."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import nanscan
from nanscan import _C

BROKEN = """
    import sys
    import torch

    print("argv:", sys.argv[1:], "main:", __name__)
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        batch = torch.ones(4, 2)
        if step == 2:
            batch[1, 1] = float("nan")
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()
"""

CRASHING = """
    import torch

    model = torch.nn.Linear(2, 3)
    with torch.no_grad():
        model.weight[0, 0] = float("inf")
    torch.distributions.Categorical(logits=model(torch.ones(1, 2)))
"""


def run(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "nanscan", *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(nanscan.__file__).parent.parent)},
    )


@pytest.fixture
def script(tmp_path):
    def write(source: str, name: str = "train.py") -> Path:
        path = tmp_path / name
        path.write_text(textwrap.dedent(source))
        return path

    return write


def test_info_says_what_a_bug_report_needs():
    done = run("info")
    assert done.returncode == 0
    for expected in (nanscan.__version__, torch.__version__, _C.variant(), "CUDA kernels  "):
        assert expected in done.stdout


def test_run_watches_an_unchanged_script(script):
    done = run("run", str(script(BROKEN)), "--epochs", "3", "-m", "x")
    assert done.returncode == 0
    assert "argv: ['--epochs', '3', '-m', 'x'] main: __main__" in done.stdout
    assert "Sequential input[0] is non-finite in step 2" in done.stderr
    assert done.stderr.count("NonFiniteWarning") == 1
    assert "train.py:14: NonFiniteWarning" in done.stderr  # the line of the user's that ended it


def test_run_raises_when_asked(script):
    done = run("run", "--action", "raise", str(script(BROKEN)))
    assert done.returncode == 1
    assert "NonFiniteError: nanscan: Sequential input[0]" in done.stderr


def test_run_takes_a_module(script):
    path = script(BROKEN, "training_module.py")
    done = run("run", "-m", "training_module", "--lr", "1", cwd=path.parent)
    assert "argv: ['--lr', '1'] main: __main__" in done.stdout
    assert "Sequential input[0] is non-finite in step 2" in done.stderr


def test_a_crash_still_tells_what_was_seen(script):
    done = run("run", str(script(CRASHING)))
    assert done.returncode == 1
    assert "ValueError" in done.stderr
    assert "weight param is non-finite" in done.stderr


def test_exit_status_is_the_scripts_own(script):
    assert run("run", str(script("raise SystemExit(7)"))).returncode == 7


def test_a_missing_script_is_an_error_of_the_command(tmp_path):
    done = run("run", str(tmp_path / "nowhere.py"))
    assert done.returncode == 2
    assert "no such script" in done.stderr


def test_demo_finds_the_optimizer_step_and_nothing_in_the_repaired_runs():
    done = run("demo")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "fc1.weight param is non-finite in step 0 (origin" in done.stdout
    assert "Adam's eps=1e-08 is 0 in float16" in done.stdout
    assert done.stdout.count("clean") == 2
    assert max(map(len, done.stdout.splitlines())) <= 120


DIVIDING = """
    import torch

    model = torch.nn.Linear(2, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        loss = model(torch.ones(4, 2)).square().sum() / (3 - step if step < 3 else 0.0)
        loss.backward()
        try:
            optimizer.step()
        except Exception:
            print("not for the script to catch")
    print("done")
"""


def test_locate_stops_a_script_at_the_op(script):
    path = script(DIVIDING)
    done = run("locate", str(path), "--epochs", "3", cwd=path.parent)
    assert done.returncode == 1
    assert "nanscan: aten.div.Tensor made non-finite values, step 3" in done.stderr
    assert "  line      train.py:8 in <module>: loss = model(" in done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr


def test_locate_reads_a_bad_batch(script):
    path = script(BROKEN, "training_module.py")
    done = run("locate", "-m", "training_module", "--lr", "1", cwd=path.parent)
    assert done.returncode == 1
    assert "argv: ['--lr', '1'] main: __main__" in done.stdout
    assert "in step 2" not in done.stderr  # it is told op by op: from which line the NaN came
    assert ", step 2 (" in done.stderr


def test_locate_of_a_clean_script(script):
    done = run("locate", str(script("import torch; print(torch.ones(2).log().sum())")))
    assert (done.returncode, done.stdout) == (0, "tensor(0.)\n")
    assert "no op made a non-finite value" in done.stderr


def test_locate_of_a_script_that_ends_in_sys_exit(script):
    """As in `sys.exit(main())`."""
    made = "import sys, torch; x = torch.zeros(2).log(); x - x; "
    done = run("locate", str(script(made + "sys.exit(0)")))
    assert done.returncode == 1
    assert "nanscan: aten.log.default made" in done.stderr
    done = run("locate", str(script("import sys, torch; torch.ones(2).log(); sys.exit(0)")))
    assert done.returncode == 0
    assert "no op made a non-finite value" in done.stderr


def test_locate_leaves_the_scripts_own_exit_status_and_errors(script):
    assert run("locate", str(script("raise SystemExit(7)"))).returncode == 7
    done = run("locate", str(script(CRASHING)))
    assert done.returncode == 1
    assert "nanscan: aten." in done.stderr  # what was found
    assert "ValueError: Expected parameter logits" in done.stderr  # and the crash


SCALED = """
    import torch, torch.nn as nn

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    scaler = torch.amp.GradScaler("cpu")
    for i in range(20):
        x = torch.randn(8, 16) * 3
        with torch.autocast("cpu", torch.float16):
            out = net(x)
        loss = (out.float() - x[:, :4] * 4).pow(2).sum(1).mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    print("done")
"""


@pytest.mark.parametrize("command", ["run", "locate"])
def test_a_search_for_a_loss_scale_is_no_fault(script, command):
    done = run(command, str(script(SCALED)))
    assert (done.returncode, done.stdout) == (0, "done\n")
    assert "to find its scale, as it should" in done.stderr
    assert "went bad" not in done.stderr
    assert "made non-finite values" not in done.stderr


WIPING = """
    import torch

    x = torch.full((4,), 900.0, dtype=torch.float16)
    print(x * torch.rsqrt(x.pow(2).mean() + 1e-3))
"""


def test_locate_tells_what_is_lost_without_a_nan(script):
    done = run("locate", str(script(WIPING)))
    assert done.returncode == 1
    assert "nanscan: aten.pow.Tensor_Scalar overflowed, step 0 (Inf here, and 0" in done.stderr


def test_the_last_words_are_of_faults_only(script):
    absorbing = BROKEN.replace("model(batch)", "model(batch.nan_to_num())")
    done = run("run", str(script(absorbing)))
    assert "went bad" not in done.stderr
