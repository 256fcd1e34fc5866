"""The CUDA kernels on the CPU, in random schedules and under sanitizers: tests/simt/README.md."""

import os
import platform
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from helpers.paths import ROOT, TESTS

SIMT = TESTS / "simt"
KINDS = ["plain", "asan", "tsan"]
SANITIZERS = {"plain": [], "asan": ["-fsanitize=address,undefined"], "tsan": ["-fsanitize=thread"]}


def _compiler(kind: str) -> str | None:
    """As the Makefile chooses it."""
    return (kind == "tsan" and shutil.which("clang++")) or shutil.which("g++")


def _run(*command: object) -> str:
    """What the command says; it must succeed."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=SIMT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout[-8000:]}"
    return done.stdout


def _why_not(kind: str, folder: Path) -> str | None:
    if platform.machine() not in {"x86_64", "AMD64"} or sys.platform != "linux":
        return "the SIMT harness switches stacks in x86-64 assembly and needs Linux"
    if shutil.which("make") is None or shutil.which("g++") is None:
        return "the SIMT harness is built with make and g++"
    if kind == "tsan" and shutil.which("clang++") is None:
        version = subprocess.run(["g++", "-dumpversion"], capture_output=True, check=True).stdout
        if int(version.split(b".")[0]) < 13:
            return "ThreadSanitizer of GCC before 13 takes 0.1 s a block, and there is no clang++"
    program = folder / kind
    (folder / "empty.cpp").write_text("int main() {}\n")
    command = [_compiler(kind), *SANITIZERS[kind], folder / "empty.cpp", "-o", program]
    if subprocess.run(command, capture_output=True, check=False).returncode != 0:
        return f"{_compiler(kind)} has no {' '.join(SANITIZERS[kind])}"
    if subprocess.run([program], capture_output=True, check=False).returncode != 0:
        return f"programs built with {' '.join(SANITIZERS[kind])} do not run here"
    return None


@pytest.fixture(scope="session")
def build(tmp_path_factory):
    """A function from the name of a test program to its path. All are built at the first call."""
    reasons = {kind: _why_not(kind, tmp_path_factory.mktemp(kind)) for kind in KINDS}
    folder = ROOT / "build" / "simt"
    make = ["make", "-C", SIMT, f"BUILD={folder}"]
    if reasons["plain"] is None:  # what fails here is told by the test that needs it
        jobs = f"-j{os.cpu_count()}"
        subprocess.run([*make, jobs, "--keep-going"], capture_output=True, check=False)

    def program(name: str, kind: str) -> Path:
        if reasons[kind]:
            pytest.skip(reasons[kind])
        path = folder / name
        _run(*make, path)
        return path

    return program


@pytest.fixture(scope="session")
def said(build, request):
    """A function from a program to its output. Those of the chosen tests run, one on each core."""

    def run(kind, packed=None):
        if packed is None:
            return _run(build(f"test_simt-{kind}", kind))
        small = ["--small", "--stories", 60] if kind == "tsan" else []
        return _run(build(f"test_kernels-{kind}-{packed}", kind), *small)

    here = [item for item in request.session.items if item.path == Path(__file__)]
    programs = [tuple(item.callspec.params.values()) for item in here]
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        outputs = {program: threads.submit(run, *program) for program in programs}
        yield lambda *program: outputs[program].result()
        threads.shutdown(cancel_futures=True)  # of tests that an early stop left out


@pytest.mark.parametrize("kind", KINDS)
def test_harness(said, kind):
    assert "all passed" in said(kind)


@pytest.mark.parametrize("packed", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_kernels(said, kind, packed):
    assert f"packed min and max {packed}" in said(kind, packed)
