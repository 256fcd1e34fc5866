"""What is built and shipped: no hard dependencies, clear errors, the right files."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from nanscan import _C

ROOT = Path(__file__).parent.parent
needs_source = pytest.mark.skipif(
    not (ROOT / "setup.py").exists(), reason="needs nanscan's source tree beside the tests"
)


def run(*arguments, cwd=None, **environment):
    """Python with these variables changed; None removes one."""
    merged = {**os.environ, **environment}
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env={name: str(value) for name, value in merged.items() if value is not None},
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def source(tmp_path):
    """A copy of what a source build needs."""
    for requirement in ("setuptools", "cmake", "ninja", "pybind11"):
        pytest.importorskip(requirement)
    for name in ("csrc", "nanscan"):
        shutil.copytree(
            ROOT / name,
            tmp_path / name,
            ignore=shutil.ignore_patterns("*.so", "*.pyd", "__pycache__"),
        )
    for name in ("setup.py", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


HIDE_NVCC = {"CUDACXX": "/nonexistent/nvcc"}  # CMake looks nowhere else once this is set


def test_the_core_needs_no_torch_and_no_cuda_library():
    if not shutil.which("readelf"):
        pytest.skip("readelf (binutils) is not installed")
    output = subprocess.run(
        ["readelf", "-d", _C.__file__], capture_output=True, text=True, check=True
    ).stdout
    needed = [line.split("[")[1].rstrip("]") for line in output.splitlines() if "(NEEDED)" in line]
    assert any(name.startswith("libc.so") for name in needed)
    assert not [
        name for name in needed if any(word in name for word in ("torch", "c10", "cuda", "omp"))
    ]
    assert "RUNPATH" not in output
    assert "RPATH" not in output


def test_import_and_check_without_cuda_in_torch():
    program = (
        "import torch; torch.version.cuda = None; torch.cuda.is_available = lambda: False;"
        "import nanscan; print(nanscan.check(torch.tensor([1.0, float('nan')])).nan_count)"
    )
    result = run("-c", program)
    assert result.stdout.strip() == "1", result.stderr


def test_import_initialises_no_cuda_and_warns_of_nothing():
    program = (
        "import torch, warnings; warnings.simplefilter('error');"
        "import nanscan; print(torch.cuda.is_initialized())"
    )
    result = run("-c", program)
    assert result.stdout.strip() == "False", result.stderr


@needs_source
def test_setup_is_short():
    assert len((ROOT / "setup.py").read_text().splitlines()) < 100


@needs_source
def test_a_build_without_compiler_names_what_to_install(source):
    empty = source / "empty"
    empty.mkdir()
    result = run("setup.py", "build_ext", cwd=source, PATH=empty, CXX=None)
    assert result.returncode != 0
    assert "nanscan: no C++ compiler found. Install one" in result.stderr
    for hint in ("apt install g++", "dnf install gcc-c++", "xcode-select --install", "CXX"):
        assert hint in result.stderr


@needs_source
def test_an_unknown_choice_of_cuda_is_an_error(source):
    result = run("setup.py", "build_ext", cwd=source, NANSCAN_CUDA="bogus")
    assert result.returncode != 0
    assert "NANSCAN_CUDA must be auto, 0 or 1, got 'bogus'" in result.stderr


@needs_source
def test_cuda_demanded_without_nvcc_is_an_error(source):
    result = run("setup.py", "build_ext", cwd=source, NANSCAN_CUDA="1", **HIDE_NVCC)
    assert result.returncode != 0
    message = " ".join(result.stderr.split())
    assert "NANSCAN_CUDA=1, but no nvcc was found. Put nvcc on PATH, set CUDACXX to it" in message
    assert "NANSCAN_CUDA=0 for a CPU-only nanscan" in message


@needs_source
def test_a_wheel_built_without_nvcc_holds_the_package_and_works(source):
    pytest.importorskip("pip")
    wheels = source / "wheels"
    result = run(
        *("-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", wheels, source),
        **HIDE_NVCC,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    (wheel,) = wheels.iterdir()
    assert "none-any" not in wheel.name

    installed = source / "installed"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(installed)
    assert {"nanscan/py.typed", "nanscan/_C.pyi", "nanscan/__init__.py"} <= set(names)
    modules = {f"nanscan/{path.name}" for path in (source / "nanscan").glob("*.py")}
    assert modules <= set(names)
    assert (
        len([name for name in names if name.startswith("nanscan/_C.") and name.endswith(".so")])
        == 1
    )
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"nanscan"}

    program = (
        "import torch, nanscan; from nanscan import _C; print(nanscan.__file__, _C.__file__);"
        "print(repr(_C.CUDA_TOOLKIT), nanscan.check(torch.tensor([float('inf')])).posinf_count)"
    )
    result = run("-c", program, cwd=source / "wheels", PYTHONPATH=installed)
    paths, values = result.stdout.splitlines()
    assert all(Path(path).is_relative_to(installed) for path in paths.split())
    assert values == "'' 1"
