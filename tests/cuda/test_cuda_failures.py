"""Failures of the driver: each call of it in turn fails, and then there is no driver at all.

The driver is loaded once a process, so each test starts fresh ones. Runs where test_cuda_launch.py
does.
"""

import gc
import multiprocessing
import os
import subprocess
import sys
from typing import NamedTuple

import pytest
import torch

import nanscan
from helpers import fake_cuda
from helpers.fake_cuda import (
    ASK,
    CAPTURING,
    MODE,
    POP,
    PUSH,
    ROWS_A_CHUNK,
    FakeCuda,
    names,
    record,
    take,
    with_nan,
)
from helpers.models import NAN
from helpers.paths import TESTS
from nanscan import _C

if not fake_cuda.wanted():
    pytest.skip("test_cuda_fake_suite.py runs it, on the recording driver", allow_module_level=True)


# This module, in another process.
IMPORT = f"""
import sys
sys.path.append({str(TESTS / "cuda")!r})
import test_cuda_failures as here
"""


def fresh(code, driver=None, **environment):
    """Runs code in a process in which nanscan has not looked for a driver yet."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORT + code],
        check=False,
        env=fake_cuda.environment(driver) | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, done.stderr


# -- a failure of any call -------------------------------------------------------------------------


class Session:
    """What a program does, piece by piece. A piece that failed can be tried again."""

    def __init__(self, cuda):
        self.cuda = cuda
        self.x, self.y = with_nan(100), with_nan(4, 6)
        self.many = [with_nan(5) for _ in range(100)]
        self.on_second = with_nan(7)
        self.stream = cuda.new_stream()
        self.table, self.steps = None, []
        self.sent = self.found = 0  # scans into rows, each of one NaN
        cuda._driver.fake_place(self.on_second.data_ptr(), self.on_second.nbytes, 1)

    def close(self):
        self.table, self.steps = None, []
        gc.collect()
        self.cuda.heal()
        self.cuda._driver.fake_unplace(self.on_second.data_ptr())
        self.cuda.progress()
        return self.cuda.held()

    def prepare(self):
        _C.cuda_capability(0)
        _C.cuda_prepare(0, b"an image")

    def prepare_second(self):
        _C.cuda_prepare(1, b"an image")

    def make_table(self):
        self.table = _C.Table()
        self.rows = [self.table.add_row() for _ in range(5)]

    def scan(self):
        self.table.scan(self.x, self.rows[0])
        self.sent += 1

    def visit(self):
        self.table.visit(self.y.t(), self.rows[1])
        self.sent += 1

    def scan_many(self):
        self.table.scan_many(self.many[:3], self.rows[2:5])
        self.sent += 3

    def scan_on_another_stream(self):
        with self.cuda.stream(self.stream):
            self.scan()

    def scan_on_the_second_device(self):
        self.table.scan(self.on_second, self.rows[0])
        self.sent += 1

    def grow(self):
        while len(self.table) < ROWS_A_CHUNK + 3:
            self.rows.append(self.table.add_row())
        self.table.scan(self.x, self.rows[-1])
        self.sent += 1

    def snapshot(self):
        self.steps.append(take(self.table))

    def read(self):
        while self.steps:
            self.steps[0].ready()
            rows = self.steps[0].read().rows
            assert rows["calls"].sum() == rows["nan"].sum()
            self.found += int(rows["calls"].sum())
            self.steps.pop(0)

    def drop_table(self):
        self.table = None
        gc.collect()

    def check(self):
        assert record(_C.scan_once(self.x, False))["nan"] == 1

    def check_many(self):
        scans = _C.scan_once_many([*self.many, self.y[::2]], True)
        assert [record(scan)["nan"] for scan in scans] == [1] * 101


# What is there before, and in what each call of the driver fails.
SESSIONS = (
    ("", "prepare prepare_second"),
    ("prepare make_table", "scan visit scan_many snapshot read scan snapshot drop_table read"),
    (
        "prepare make_table scan snapshot read",
        "scan scan_on_another_stream snapshot scan snapshot read scan snapshot read drop_table",
    ),
    ("prepare make_table scan", "grow snapshot read drop_table"),
    (
        "prepare prepare_second make_table",
        "scan scan_on_the_second_device snapshot read scan snapshot drop_table read",
    ),
    ("prepare", "check check check_many"),
)
# Where nothing is told: the work was done, or it is no matter of the caller's.
SILENT = {
    *(MODE, POP, CAPTURING, "EventDestroy", "MemFree", "MemFreeHost"),
    *("EventRecord", "StreamWaitEvent"),  # of a stream beside, which may be gone
}
# When sending a snapshot fails halfway, the rows of its step may be lost.
LOSING = {"MemcpyDtoHAsync", "MemsetD8Async", "EventRecord", "StreamWaitEvent", ASK, PUSH}
DEEDS = (
    *("loading the kernels on", "launching a scan on", "allocating rows on"),
    *("allocating memory for", "taking a snapshot of", "waiting for", "asking for"),
    *("making a CUDA context current", "finding cuda:", "starting the CUDA driver"),
    "ordering streams of",
)


class Outcome(NamedTuple):
    functions: list[str]
    errors: list[tuple[str, str]]
    held: fake_cuda.Held
    sent: int
    found: int
    violations: list[str]


def run_session(pieces, *, fail_at=0, sticky=False) -> Outcome:
    """In a process of its own. `fail_at`: counted from 1, within the second part."""
    cuda = FakeCuda(os.environ["NANSCAN_CUDA_DRIVER"])
    cuda.set(lagging=1, guard=1, record=1)
    cuda.use_device(0)
    session, errors = Session(cuda), []
    with cuda.tensors_on_device():
        for piece in pieces[0].split():
            getattr(session, piece)()
        cuda.calls()
        if fail_at:
            error = fake_cuda.ILLEGAL_ADDRESS if sticky else fake_cuda.OUT_OF_MEMORY
            cuda.fail(nth=fail_at, error=error, sticky=sticky)
        for piece in pieces[1].split():
            for _ in range(2):
                depth = cuda.held().context_depth
                try:
                    getattr(session, piece)()
                except RuntimeError as failed:
                    errors.append((piece, str(failed)))
                except AttributeError:
                    assert sticky  # there is no table, or its device's rows are not there
                else:
                    break
                finally:
                    assert cuda.held().context_depth == depth
        functions = names(cuda.calls())
        held = session.close()
    return Outcome(functions, errors, held, session.sent, session.found, cuda.violations())


def faults(nth, normal: Outcome, outcome: Outcome):
    """What is wrong after the single failure of the nth call."""
    function = normal.functions[nth - 1]
    yield from outcome.violations
    destroying = function in (ASK, PUSH) and not outcome.errors  # which frees what it can
    if not outcome.errors and not destroying and function not in SILENT:
        yield "no error was raised"
    if len(outcome.errors) > 1:
        yield f"the next try failed, too: {outcome.errors}"
    for piece, text in outcome.errors:
        told = " failed: CUDA_ERROR_OUT_OF_MEMORY" in text
        if not told or not text.startswith(tuple(f"nanscan: {deed}" for deed in DEEDS)):
            yield f"unclear error of {piece}: {text}"
    if outcome.found > outcome.sent or (outcome.found < outcome.sent and function not in LOSING):
        yield f"{outcome.found} scans arrived, of {outcome.sent}"
    for field in ("device_memory", "pinned_memory", "events", "queued", "capture_mode"):
        held, expected = getattr(outcome.held, field), getattr(normal.held, field)
        freed = not destroying and function not in ("MemFree", "MemFreeHost", "EventDestroy")
        restoring = function == MODE and normal.functions[:nth].count(MODE) % 2 == 0
        if held != expected and freed and not restoring:
            yield f"{field}: {held} held, not {expected}"


def sticky_faults(outcome: Outcome):
    """What is wrong after a failure from which the device does not recover."""
    yield from outcome.violations
    for piece, text in outcome.errors:
        if "CUDA_ERROR_ILLEGAL_ADDRESS" not in text:
            yield f"unclear error of {piece}: {text}"


def fail_every_call(number):
    """Each in a process of its own, forked from one in which no driver is loaded. For `fresh`."""
    gc.freeze()  # else each child would copy, to look for garbage, what torch's import left
    fork = multiprocessing.get_context("fork")
    pieces, found, children = SESSIONS[number], [], []

    def start(**how):
        ours, theirs = fork.Pipe(duplex=False)
        child = fork.Process(target=lambda: theirs.send(run_session(pieces, **how)))
        child.start()
        theirs.close()
        children.append((how, ours, child))

    def finish():
        how, ours, child = children.pop(0)
        try:
            return how, ours.recv(), 0
        except EOFError:
            child.join()
            return how, None, child.exitcode

    start()
    _, normal, exit_code = finish()
    assert normal, f"the session ended with {exit_code}"
    assert (normal.errors, normal.violations, normal.sent) == ([], [], normal.found)
    loads = [n for n, function in enumerate(normal.functions, 1) if function == "ModuleGetFunction"]
    unlike = sorted(set(range(1, len(normal.functions) + 1)) - set(loads[1:-1]))
    waiting = [{"fail_at": n, "sticky": False} for n in unlike]
    waiting += [{"fail_at": n, "sticky": True} for n in unlike[::3]]
    while waiting or children:
        while waiting and len(children) < (os.cpu_count() or 1):
            start(**waiting.pop(0))
        how, outcome, exit_code = finish()
        function = normal.functions[how["fail_at"] - 1]
        if outcome is None:
            wrong = [f"the process ended with {exit_code}"]
        else:
            wrong = (
                sticky_faults(outcome) if how["sticky"] else faults(how["fail_at"], normal, outcome)
            )
        found += [f"{function} {how}: {line}" for line in wrong]
    print(len(unlike), "calls")
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize("number", range(len(SESSIONS)), ids=[second for _, second in SESSIONS])
def test_a_failure_of_any_call(number):
    """Told by a RuntimeError with CUDA's reason and the deed; nothing leaks; the next try works."""
    fresh(f"here.fail_every_call({number})")


# -- no driver, or none that will do ---------------------------------------------------------------


def scan_without_kernels(**settings):
    """Every way to scan still works, and says once what it is about. For `fresh`."""
    cuda = FakeCuda(fake_cuda.library())
    cuda.set(**settings)
    x = with_nan(4, 5, at=7)
    with cuda.tensors_on_device():
        for _ in range(3):
            assert nanscan.check(x).first_nonfinite == (1, 2)
            assert nanscan.check_many([x, torch.ones(2)])[0].nan_count == 1
            assert nanscan.check(x.t(), moments=True).mean == 1.0
        model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU())
        with nanscan.watch(model, action="log") as monitor:
            model(torch.ones(2, 3))
            model(torch.full((2, 3), NAN))
        assert monitor.findings
    assert cuda.violations() == []


def without_symbol(tmp_path, name):
    """The recording driver, but for one function."""
    path = tmp_path / "libcuda.so"
    image = fake_cuda.library().read_bytes()
    path.write_bytes(image.replace(b"\0" + name + b"\0", b"\0" + name[:-1] + b"_\0"))
    return path


@pytest.mark.parametrize(
    ("driver", "settings", "reason"),
    [
        ("/nonexistent", "", "no CUDA driver: /nonexistent"),
        (
            None,
            "version=11080",
            "the CUDA driver is too old: it is made for CUDA 11.8, nanscan needs",
        ),
        (b"cuEventQuery", "", "the CUDA driver is too old: it has no cuEventQuery"),
        (None, "devices=0", "CUDA_ERROR_NO_DEVICE"),
    ],
    ids=["none", "too old", "without a function", "without a device"],
)
def test_without_a_driver_that_will_do(driver, settings, reason, tmp_path):
    if isinstance(driver, bytes):
        driver = without_symbol(tmp_path, driver)
    _, logged = fresh(f"here.scan_without_kernels({settings})", driver)
    assert logged.count("no kernels for cuda:0") == 1
    assert reason in logged


def first_checks():
    """The kernels of a device are loaded by the first scan on it, in a capture too. For `fresh`."""
    cuda = FakeCuda(os.environ["NANSCAN_CUDA_DRIVER"])
    cuda.set(record=1, lagging=1)
    x, y = with_nan(8), with_nan(9)
    with cuda.tensors_on_device(), cuda.placed(y, 1):
        with cuda.capture(cuda.new_stream()) as graph:
            result = nanscan.check(x)
        graph.replay(cuda.new_stream())
        assert result.nan_count == 1
        assert names(cuda.calls()).count("ModuleLoadData") == 1
        assert nanscan.check(x).nan_count == 1
        assert nanscan.check(y).nan_count == 1
        loads = [call for call in cuda.calls() if call.function == "ModuleLoadData"]
        assert [call.device for call in loads] == [1]
        assert [result.nan_count for result in nanscan.check_many([x, y, x])] == [1, 1, 1]
    assert cuda.violations() == []


COMPILED = """
import nanscan._scan.cuda as loader
class Compiler:  # of nothing: the recording driver takes any image
    version = 13, 0
    architecture = staticmethod(lambda capability: "sm_{}{}".format(*capability))
    compile = staticmethod(lambda architecture: print("compiled for", architecture) or b"an image")
loader.Nvrtc, loader.FATBIN = Compiler, here.TESTS / "none"
"""


def test_kernels_are_loaded_by_the_first_scan_and_compiled_once(tmp_path):
    """Where no image was shipped. What was compiled is kept for the next process."""
    for compiled in ("compiled for sm_90\n", ""):
        told, _ = fresh(COMPILED + "here.first_checks()", NANSCAN_CACHE=str(tmp_path))
        assert told == compiled
