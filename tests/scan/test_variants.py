"""Each instruction set that this machine can run gives the same rows, however it was chosen."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import cases
from helpers.cases import Patterns, real_dtype
from helpers.paths import ROOT
from nanscan import _C

HERE = Path(__file__).parent
VARIABLE = "NANSCAN_CPU_VARIANT"
SELECTION = "not (cuda or large or parallel or definition or names_say or sums)"
each_variant = pytest.mark.parametrize("variant", _C.variants())


def start_python(*arguments, variant, stderr=subprocess.PIPE):
    return subprocess.Popen(
        [sys.executable, *arguments],
        env={**os.environ, VARIABLE: variant},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
    )


def run_python(*arguments, variant):
    process = start_python(*arguments, variant=variant)
    output, errors = process.communicate()
    return subprocess.CompletedProcess(arguments, process.returncode, output, errors)


@pytest.fixture(scope="module")
def suites():
    """The tests of the scan, with each variant but this process's: all at once."""
    command = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", SELECTION)
    files = (str(HERE / "test_scan_oracle.py"), str(HERE / "test_patterns.py"))
    processes = {
        variant: start_python(*command, *files, variant=variant, stderr=subprocess.STDOUT)
        for variant in _C.variants()
        if variant != _C.variant()
    }
    yield processes
    for process in processes.values():
        process.kill()  # only if it still runs


PRINT_VARIANT = "import nanscan; from nanscan import _C; print(_C.variant())"


@each_variant
def test_the_environment_chooses_the_variant(variant):
    assert run_python("-c", PRINT_VARIANT, variant=variant).stdout.strip() == variant


def test_the_best_variant_is_the_default():
    assert run_python("-c", PRINT_VARIANT, variant="").stdout.strip() == _C.variants()[-1]


def test_an_unknown_variant_in_the_environment_is_an_error():
    result = run_python("-c", PRINT_VARIANT, variant="mmx")
    assert result.returncode != 0
    assert "no CPU variant 'mmx' on this machine; it has: " in result.stderr
    assert ", ".join(_C.variants()) in result.stderr


@each_variant
def test_the_suite_passes_with_the_variant(variant, suites):
    if variant == _C.variant():
        pytest.skip("this very run of the suite uses it")
    output, _ = suites[variant].communicate()
    assert suites[variant].returncode == 0, output[-8000:]
    assert " passed" in output


def test_use_variant_refuses_an_unknown_name(use_variant):
    before = _C.variant()
    with pytest.raises(
        ValueError, match=r"no CPU variant 'avx9000' .* it has: " + _C.variants()[0]
    ):
        use_variant("avx9000")
    assert _C.variant() == before


@cases.each_dtype
def test_rows_are_the_same_bytes_in_every_variant(dtype, use_variant):
    """Counts and extremes of all contents, and the counts of moments; on several threads too."""
    contents = {name: of(Patterns(real_dtype(dtype))) for name, of in cases.CONTENTS.items()}
    tensors = [cases.fill(cases.buffer(dtype, c, 5000), c) for c in contents.values()]
    tensors.append(cases.buffer(dtype, contents["bad everywhere"], (2 << 20) // dtype.itemsize + 3))
    tensors.append(tensors[0].expand(3, -1).t())
    rows = {}
    for variant in _C.variants():
        use_variant(variant)
        assert _C.variant() == variant
        rows[variant] = [_C.scan_once(x, False) for x in tensors]
        counts = [_C.scan_once(x, True)[-40:-24] for x in tensors]  # zeros, subnormals
        rows[variant].append(counts)
    assert all(found == rows[_C.variants()[0]] for found in rows.values())
