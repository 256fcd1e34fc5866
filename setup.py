"""Drives CMake and Ninja to build nanscan._C; everything else is in pyproject.toml.

NANSCAN_CUDA=auto|0|1 (default auto): use nvcc where found, never, or fail without it.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import ninja
import pybind11
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()


class CMakeBuild(build_ext):
    """Builds csrc/ in build/, which stays, so that editable installs are incremental."""

    def run(self) -> None:
        self.in_place = self.inplace  # which is off while the parts are built
        super().run()

    def build_extension(self, ext: Extension) -> None:
        cuda = os.environ.get("NANSCAN_CUDA", "auto")
        if cuda not in ("auto", "0", "1"):
            raise SystemExit(f"nanscan: NANSCAN_CUDA must be auto, 0 or 1, got {cuda!r}")
        require_compiler()
        build = ROOT / "build" / sys.implementation.cache_tag
        build.mkdir(parents=True, exist_ok=True)
        cmake(
            *("-S", str(ROOT / "csrc"), "-B", str(build), "-G", "Ninja"),
            f"-DCMAKE_MAKE_PROGRAM={Path(ninja.BIN_DIR) / 'ninja'}",
            "-DCMAKE_BUILD_TYPE=Release",
            f"-DNANSCAN_CUDA={cuda}",
            f"-DNANSCAN_PYBIND11_INCLUDE={stable_pybind11_include(build)}",
            f"-DPython_EXECUTABLE={sys.executable}",
        )
        cmake("--build", str(build))
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(build / target.name, target)
        ship_kernels(build, (ROOT / "nanscan" if self.in_place else target.parent) / "kernels")


def ship_kernels(build: Path, kernels: Path) -> None:
    """The kernels as package data: their source and, where nvcc made one, their image."""
    shutil.rmtree(kernels, ignore_errors=True)
    (kernels / "cuda").mkdir(parents=True)
    for name in ("float_format.h", "row.h", "cuda/scan_args.h", "cuda/scan_kernels.cuh"):
        shutil.copy2(ROOT / "csrc" / name, kernels / name)
    image = build / "scan_kernels.fatbin"
    if image.exists():
        shutil.copy2(image, kernels)


def require_compiler() -> None:
    candidates = [os.environ.get("CXX", "").split(" ")[0], "c++", "g++", "clang++"]
    if not any(name and shutil.which(name) for name in candidates):
        raise SystemExit(
            "nanscan: no C++ compiler found. Install one (Debian, Ubuntu: apt install g++; "
            "Fedora: dnf install gcc-c++; conda: conda install cxx-compiler; macOS: "
            "xcode-select --install) or point CXX at it."
        )


def stable_pybind11_include(build: Path) -> Path:
    """pip's build environment has a new path each time; a copy keeps Ninja from rebuilding."""
    copy = build / f"pybind11-{pybind11.__version__}"
    if not copy.exists():
        shutil.copytree(pybind11.get_include(), copy)
    return copy


def cmake(*arguments: str) -> None:
    """Runs the CMake of the build requirements, whatever older one is on PATH."""
    if subprocess.run([sys.executable, "-m", "cmake", *arguments], check=False).returncode:
        raise SystemExit("nanscan: the C++ build failed, see CMake's messages above")


setup(ext_modules=[Extension("nanscan._C", sources=[])], cmdclass={"build_ext": CMakeBuild})
