"""What is built and shipped: no hard dependencies, clear errors, the right files."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest

from helpers.paths import ROOT
from nanscan import _C

needs_source = pytest.mark.skipif(
    not (ROOT / "setup.py").exists(), reason="needs nanscan's source tree beside the tests"
)


def run(*arguments, cwd=None, **environment):
    """Python with these variables changed; None removes one."""
    merged = {**os.environ, "NANSCAN_CUDA": None, **environment}
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env={name: str(value) for name, value in merged.items() if value is not None},
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )


def copy_source(to):
    """Copies what a source build needs, and nothing that one made."""
    for requirement in ("setuptools", "cmake", "ninja", "pybind11"):
        pytest.importorskip(requirement)
    for name in ("csrc", "nanscan"):
        shutil.copytree(
            ROOT / name,
            to / name,
            ignore=shutil.ignore_patterns("*.so", "*.pyd", "__pycache__", "kernels"),
        )
    for name in ("setup.py", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, to)
    return to


@pytest.fixture
def source(tmp_path):
    return copy_source(tmp_path)


HIDE_NVCC = {"CUDACXX": "/nonexistent/nvcc"}  # CMake looks nowhere else once this is set
KERNEL_SOURCES = {
    *("kernels/float_format.h", "kernels/row.h"),
    *("kernels/cuda/scan_args.h", "kernels/cuda/scan_kernels.cuh"),
}
IMAGE = "kernels/scan_kernels.fatbin"


class Built(NamedTuple):
    tree: Path  # with what the build left
    wheel: Path
    output: str

    def build(self, *command, **environment):
        """Builds in the same tree again, in place."""
        command = command or ("setup.py", "build_ext", "--inplace")
        result = run(*command, cwd=self.tree, **environment)
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    def in_place(self):
        """The kernels in the package's own folder."""
        package = self.tree / "nanscan"
        return {
            path.relative_to(package).as_posix()
            for path in package.glob("kernels/**/*")
            if path.is_file()
        }


def build_wheel(tree, to, **environment):
    pytest.importorskip("pip")
    result = run(
        *("-m", "pip", "wheel", "-v", "--no-deps", "--no-build-isolation", "-w", to, tree),
        **environment,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    (wheel,) = to.iterdir()
    return Built(tree, wheel, result.stdout + result.stderr)


@pytest.fixture(scope="module")
def without_nvcc(tmp_path_factory):
    tree = copy_source(tmp_path_factory.mktemp("source"))
    return build_wheel(tree, tmp_path_factory.mktemp("without_nvcc"), **HIDE_NVCC)


@pytest.fixture(scope="module")
def by_nvcc(without_nvcc, tmp_path_factory):
    """The same tree again, as after an nvcc was installed."""
    if not shutil.which("nvcc"):
        pytest.skip("nvcc is not there")
    return build_wheel(without_nvcc.tree, tmp_path_factory.mktemp("by_nvcc"), CUDACXX=None)


def kernels_in(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = [name.removeprefix("nanscan/") for name in archive.namelist()]
    return {name for name in names if name.startswith("kernels/")}


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
    assert "or build without NANSCAN_CUDA=1: NVRTC compiles the kernels then" in message


@needs_source
def test_a_wheel_built_without_nvcc_holds_the_package_and_works(without_nvcc, tmp_path):
    tree, wheel, _ = without_nvcc
    assert "none-any" not in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path)
    assert {"nanscan/py.typed", "nanscan/_C.pyi", "nanscan/__init__.py"} <= set(names)
    modules = {f"nanscan/{path.name}" for path in (tree / "nanscan").glob("*.py")}
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
    result = run("-c", program, cwd=wheel.parent, PYTHONPATH=tmp_path)
    paths, values = result.stdout.splitlines()
    assert all(Path(path).is_relative_to(tmp_path) for path in paths.split())
    assert values == "'' 1"


@needs_source
def test_without_nvcc_the_source_of_the_kernels_is_shipped_and_the_build_says_so(without_nvcc):
    assert kernels_in(without_nvcc.wheel) == KERNEL_SOURCES
    assert "nanscan: nvcc not used: CUDA kernels are compiled on first use" in without_nvcc.output


@needs_source
def test_nvcc_turned_off_makes_no_image_and_ships_none_of_before(without_nvcc):
    if not shutil.which("nvcc"):
        pytest.skip("nvcc is not there")
    before = without_nvcc.tree / "build" / sys.implementation.cache_tag / "scan_kernels.fatbin"
    before.write_bytes(b"of a build with nvcc")
    output = without_nvcc.build(NANSCAN_CUDA="0", CUDACXX=None)
    assert "nanscan: nvcc not used" in output
    assert "Looking for a CUDA compiler" not in output
    assert without_nvcc.in_place() == KERNEL_SOURCES


@needs_source
def test_a_wheel_built_by_nvcc_ships_the_image_and_the_source(by_nvcc):
    assert kernels_in(by_nvcc.wheel) == {*KERNEL_SOURCES, IMAGE}
    assert "nanscan: CUDA kernels by nvcc" in by_nvcc.output
    with zipfile.ZipFile(by_nvcc.wheel) as archive:
        assert archive.read(f"nanscan/{IMAGE}")[:4] == b"\x50\xed\x55\xba"  # a fatbin's
        for name in KERNEL_SOURCES:
            source = by_nvcc.tree / "csrc" / name.removeprefix("kernels/")
            assert archive.read(f"nanscan/{name}") == source.read_bytes()


@needs_source
@pytest.mark.parametrize(
    "command",
    [
        ("setup.py", "build_ext", "--inplace"),
        # What pip install --editable asks of setuptools.
        ("-c", "from setuptools import build_meta; build_meta.build_editable('editable')"),
    ],
    ids=["in place", "editable"],
)
def test_a_build_in_place_has_the_kernels_too(by_nvcc, command):
    by_nvcc.build(CUDACXX=None)
    shutil.rmtree(by_nvcc.tree / "nanscan" / "kernels")
    (by_nvcc.tree / "editable").mkdir(exist_ok=True)
    assert "ninja: no work to do" in by_nvcc.build(*command, CUDACXX=None)
    assert by_nvcc.in_place() == {*KERNEL_SOURCES, IMAGE}
    program = (
        "from nanscan import _C; from nanscan._scan import cuda;"
        "print(cuda.FATBIN.exists(), _C.CUDA_TOOLKIT != '')"
    )
    result = run("-c", program, cwd=by_nvcc.tree, PYTHONPATH=by_nvcc.tree)
    assert result.stdout.split() == ["True", "True"], result.stderr


@needs_source
@pytest.mark.parametrize("name", [*sorted(KERNEL_SOURCES), None])
def test_the_image_is_made_anew_when_what_it_is_made_of_changes(by_nvcc, name):
    by_nvcc.build(CUDACXX=None)
    changed = by_nvcc.tree / "csrc" / (name or "cuda/driver.h").removeprefix("kernels/")
    was = changed.stat().st_mtime_ns
    os.utime(changed)
    folder = by_nvcc.tree / "build" / sys.implementation.cache_tag
    planned = run("-m", "ninja", "-C", folder, "-n").stdout
    os.utime(changed, ns=(was, was))
    assert "Building CXX object" in planned or name == "kernels/cuda/scan_kernels.cuh"
    assert ("Building CUDA object" in planned) == (name is not None)
