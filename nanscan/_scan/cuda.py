"""Kernels for a CUDA device: the shipped image where it fits, else compiled by NVRTC, once.

NVRTC is the compiler that every CUDA build of torch brings along. What it makes is kept in a cache
folder: NANSCAN_CACHE, or nanscan under XDG_CACHE_HOME or ~/.cache.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import os
import sys
import tempfile
import threading
from pathlib import Path

import torch

from nanscan import _C

KERNELS = Path(__file__).parent.parent / "kernels"
FATBIN = KERNELS / "scan_kernels.fatbin"
_MAIN = "cuda/scan_kernels.cuh"
_HEADERS = ("cuda/scan_args.h", "float_format.h", "row.h")
# NVRTC has no standard headers; the kernels want only these names of them.
_STANDARD = {
    "cstdint": "typedef signed char int8_t; typedef short int16_t; typedef int int32_t;"
    "typedef long long int64_t; typedef unsigned char uint8_t; typedef unsigned short uint16_t;"
    "typedef unsigned int uint32_t; typedef unsigned long long uint64_t;",
    "cstddef": "",
}
_OPTIONS = ("--std=c++17", "--device-as-default-execution-space")
_OLDEST = 70  # first with __grid_constant__ and L1::no_allocate

_logger = logging.getLogger("nanscan")
_lock = threading.Lock()
_failures: dict[int, str] = {}  # by ordinal


def prepare(ordinal: int) -> bool:
    """Loads the kernels on a CUDA device, once. Safe in a CUDA graph's capture.

    Returns:
        Whether the device has them. If not, the reason is logged, once, and from then on its
        tensors are scanned on the host.

    Synchronization: waits for a stream of its own, at the first call for a device.
    """
    with _lock:
        if _C.cuda_is_prepared(ordinal):
            return True
        if ordinal in _failures:
            return False
        try:
            _load(ordinal)
        except (RuntimeError, OSError, AttributeError) as error:  # the last: a very old NVRTC
            _failures[ordinal] = str(error)
            _C.cuda_refuse(ordinal)
            _logger.warning(
                "nanscan: no kernels for cuda:%d, its tensors are copied to the host and scanned "
                "there, which is slow and waits for the device: %s",
                ordinal,
                error,
            )
            return False
        return True


def why_not(ordinal: int) -> str:
    """Why a device has no kernels, after `prepare` said so."""
    return _failures.get(ordinal, "")


def _load(ordinal: int) -> None:
    capability = _C.cuda_capability(ordinal)
    try:
        _C.cuda_prepare(ordinal, FATBIN.read_bytes())
    except FileNotFoundError:  # built without nvcc
        pass
    except (RuntimeError, OSError) as error:  # of a newer toolkit than the driver, for other chips
        _logger.info("nanscan: compiling the kernels, the shipped ones do not fit: %s", error)
    else:
        return
    compiler = Nvrtc()
    architecture = compiler.architecture(capability)
    key = cache_key(compiler.version, architecture)
    image = read_cache(key)
    if image is not None:
        with contextlib.suppress(RuntimeError):  # damaged: make it anew
            _C.cuda_prepare(ordinal, image)
            return
    image = compiler.compile(architecture)
    _C.cuda_prepare(ordinal, image)
    write_cache(key, image)


def source(name: str) -> str:
    """A source file of the kernels, as shipped."""
    return (KERNELS / name).read_text(encoding="utf-8")


# -- the cache -----------------------------------------------------------------------------------


def cache_folder() -> Path:
    """Where compiled kernels are kept."""
    if chosen := os.environ.get("NANSCAN_CACHE"):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "nanscan"


def cache_key(version: tuple[int, int], architecture: str) -> str:
    """Names an image by all that it depends on."""
    sources = [*map(source, (_MAIN, *_HEADERS)), *_STANDARD.values()]
    parts = [*sources, *_OPTIONS, str(version), architecture]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def read_cache(key: str) -> bytes | None:
    """An image, if it is there and whole."""
    try:
        content = (cache_folder() / f"{key}.bin").read_bytes()
    except (OSError, RuntimeError):  # the latter: no home folder
        return None
    digest, image = content[:32], content[32:]
    return image if hashlib.sha256(image).digest() == digest else None


def write_cache(key: str, image: bytes) -> None:
    """Writes an image to the cache, atomically. A failure only costs the next process time."""
    try:
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
            temporary = Path(file.name)
            try:
                file.write(hashlib.sha256(image).digest() + image)
                file.close()
                temporary.replace(folder / f"{key}.bin")
            finally:
                temporary.unlink(missing_ok=True)
    except (OSError, RuntimeError) as error:
        _logger.info("nanscan: compiled kernels are not kept: %s", error)


# -- NVRTC ---------------------------------------------------------------------------------------


class Nvrtc:
    """The run-time compiler, by ctypes.

    Raises:
        RuntimeError: it is not installed, or refuses the source; the message has its log.
    """

    def __init__(self) -> None:
        self._library = _load_library()
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        self.version = major.value, minor.value

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            describe = self._library.nvrtcGetErrorString
            describe.restype = ctypes.c_char_p
            raise RuntimeError(f"nanscan: {name} failed: {describe(status).decode()}")

    def architectures(self) -> list[int]:
        """What it can compile for, as in 90 for sm_90, ascending."""
        count = ctypes.c_int()
        self._call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        found = (ctypes.c_int * count.value)()
        self._call("nvrtcGetSupportedArchs", found)
        return sorted(found)

    def architecture(self, capability: tuple[int, int]) -> str:
        """For a device: its own architecture, or a virtual one that the driver compiles further."""
        wanted = 10 * capability[0] + capability[1]
        usable = [known for known in self.architectures() if known >= _OLDEST]
        older = [known for known in usable if known <= wanted]
        if not older:
            major, minor = divmod(usable[0], 10)
            raise RuntimeError(
                f"nanscan: expected compute capability {major}.{minor} or later, the oldest that "
                f"the kernels and NVRTC {self.version[0]}.{self.version[1]} know, got "
                f"{capability[0]}.{capability[1]}"
            )
        return f"sm_{wanted}" if older[-1] == wanted else f"compute_{older[-1]}"

    def compile(self, architecture: str) -> bytes:
        """The kernels as a cubin, or as PTX for a virtual architecture."""
        headers = _STANDARD | {f"../{name}": source(name) for name in _HEADERS[1:]}
        headers["scan_args.h"] = source(_HEADERS[0])
        program = ctypes.c_void_p()
        strings = ctypes.c_char_p * len(headers)
        self._call(
            "nvrtcCreateProgram",
            ctypes.byref(program),
            source(_MAIN).encode(),
            b"scan_kernels.cu",
            len(headers),
            strings(*(text.encode() for text in headers.values())),
            strings(*(name.encode() for name in headers)),
        )
        try:
            options = [option.encode() for option in (*_OPTIONS, f"-arch={architecture}")]
            try:
                self._call(
                    "nvrtcCompileProgram",
                    program,
                    len(options),
                    (ctypes.c_char_p * len(options))(*options),
                )
            except RuntimeError as error:
                log = self._output(program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
                raise RuntimeError(f"{error} for {architecture}:\n{log}") from None
            return self._output(program, "CUBIN" if architecture.startswith("sm_") else "PTX")
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _output(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        text = ctypes.create_string_buffer(size.value)
        self._call(f"nvrtcGet{what}", program, text)
        return text.raw


def _load_library() -> ctypes.CDLL:
    reasons = []
    for path in _candidates():
        try:
            if path.is_absolute():
                # NVRTC opens this one by its bare name, which works only once it is loaded.
                for builtins in sorted(path.parent.glob("libnvrtc-builtins.so*")):
                    ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
            return ctypes.CDLL(str(path))
        except OSError as error:  # noqa: PERF203 - a few paths, once
            reasons.append(str(error))
    raise RuntimeError(
        "nanscan: NVRTC, which compiles the kernels, was not found. CUDA builds of torch bring it; "
        f"or pip install nvidia-cuda-nvrtc. {'; '.join(reasons)}".rstrip()
    )


def _candidates() -> list[Path]:
    """Where NVRTC may be: beside torch in its wheels, in a toolkit, or where the loader looks."""
    # Of wheels: nvidia/cu13 from CUDA 13 on, nvidia/cuda_nvrtc before.
    places = [(Path(folder).absolute(), "nvidia/cu*/lib") for folder in sys.path]
    places += [
        (Path(home), "lib64")
        for variable in ("CUDA_HOME", "CUDA_PATH")
        if (home := os.environ.get(variable))
    ]
    found = [
        path
        for folder, pattern in places
        for path in sorted(folder.glob(f"{pattern}/libnvrtc.so.*"), reverse=True)
    ]
    found += [Path(f"libnvrtc.so.{major}") for major in (13, 12)]
    # The driver is known to take what comes from the CUDA that torch was built for.
    own = f".so.{(torch.version.cuda or '13').split('.')[0]}"
    return sorted(found, key=lambda path: own not in path.name)
