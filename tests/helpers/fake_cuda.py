"""A CUDA machine without a GPU: builds and drives the recording driver, tests/simt/fake_driver.cpp.

nanscan finds it through NANSCAN_CUDA_DRIVER, once a process and for its life. So what needs it runs
in a process of its own, with NANSCAN_TEST_FAKE_CUDA=1: see conftest.py and test_cuda_fake_suite.py.
"""

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from helpers.models import NAN
from helpers.paths import ROOT, TESTS
from nanscan import _C
from nanscan._data.row import ROW

SOURCES = ("tests/simt/fake_driver.cpp", "tests/simt/simt.cpp")
HEADERS = (
    "tests/simt/simt.h",
    *(f"csrc/{name}.h" for name in ("dlpack_abi", "float_format", "row")),
    *(f"csrc/cuda/{name}" for name in ("driver.h", "scan_args.h", "scan_kernels.cuh")),
)
FLAGS = (
    *("-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"),
    *("-fPIC", "-shared", "-fvisibility=hidden", "-Wl,-Bsymbolic,-z,defs", "-lpthread", "-ldl"),
)

SUCCESS, OUT_OF_MEMORY, NOT_READY, ILLEGAL_ADDRESS = 0, 2, 600, 700
GLOBAL, THREAD_LOCAL, RELAXED = range(3)  # modes of captures
MULTIPROCESSORS = 3  # few, so that grids are small


def wanted() -> bool:
    """Whether this process is to run on the recording driver."""
    return os.environ.get("NANSCAN_TEST_FAKE_CUDA") == "1"


def why_not() -> str | None:
    """Why there can be no recording driver here."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return "the SIMT harness switches stacks in x86-64 assembly and needs Linux"
    if shutil.which("g++") is None:
        return "the recording driver is built with g++, which is not there"
    return None


@functools.cache
def library() -> Path:
    """The recording driver, built where it is not yet."""
    digest = hashlib.sha256(" ".join(FLAGS).encode())
    for name in (*SOURCES, *HEADERS):
        digest.update((ROOT / name).read_bytes())
    path = ROOT / "build" / "simt" / f"libfakecuda-{digest.hexdigest()[:16]}.so"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        own = path.with_suffix(f".{os.getpid()}")  # whole or not at all, whoever else builds it
        subprocess.run(["g++", *SOURCES, *FLAGS, "-o", own], cwd=ROOT, check=True)
        own.replace(path)
    return path


def environment(driver: str | os.PathLike[str] | None = None) -> dict[str, str]:
    """The environment of a process that runs on the recording driver, or on another one."""
    path = os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH"))))
    return {
        **os.environ,
        "NANSCAN_TEST_FAKE_CUDA": "1",
        "NANSCAN_CUDA_DRIVER": str(driver or library()),
        "PYTHONPATH": path,
    }


# -- what the kernels are given: csrc/cuda/scan_args.h ---------------------------------------------


@functools.cache
def constant(name: str) -> int:
    """An integer constant of scan_args.h."""
    text = (ROOT / "csrc/cuda/scan_args.h").read_text(encoding="utf-8")
    return int(re.search(rf"constexpr int {name} = (\d+);", text)[1])


_u32, _u64, _i64, _pointer = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_int64, ctypes.c_uint64


class Structure(ctypes.Structure):
    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={getattr(self, name)}" for name, _ in self._fields_)
        return f"{type(self).__name__}({fields})"


class WalkDim(Structure):
    _fields_ = (("size", _u64), ("stride", _i64))


class IndexDim(Structure):
    _fields_ = (("size", _u64), ("weight", _u64))


class FlatScan(Structure):
    _fields_ = (
        ("data", _pointer),
        ("count", _u64),
        ("row", _pointer),
        ("tickets", _pointer),
        ("mirrored", _u32),
    )


class StridedScan(Structure):
    _fields_ = (
        ("data", _pointer),
        ("run", _u64),
        ("run_stride", _i64),
        ("pieces", _u64),
        ("units", _u64),
        ("repeat", _u64),
        ("elements", _u64),
        ("row", _pointer),
        ("tickets", _pointer),
        ("mirrored", _u32),
        ("lanes", _u32),
        ("vectors", _u32),
        ("outer_count", _u32),
        ("index_count", _u32),
        ("outer_dims", WalkDim * constant("kMaxOuter")),
        ("index_dims", IndexDim * (constant("kMaxOuter") + 1)),
    )

    @property
    def outer(self) -> list[tuple[int, int]]:
        return [(d.size, d.stride) for d in self.outer_dims[: self.outer_count]]

    @property
    def index(self) -> list[tuple[int, int]]:
        return [(d.size, d.weight) for d in self.index_dims[: self.index_count]]


class ManyEntry(Structure):
    _fields_ = (
        ("data", _pointer),
        ("count", _u64),
        ("row", _pointer),
        ("first_block", _u32),
        ("dtype", ctypes.c_uint8),
        ("index_count", ctypes.c_uint8),
        ("index_begin", ctypes.c_uint16),
    )


class ManyScan(Structure):
    _fields_ = (
        ("tensors", _u32),
        ("blocks", _u32),
        ("mirrored", _u32),
        ("tickets", _pointer),
        ("all_entries", ManyEntry * constant("kManyTensors")),
        ("index", IndexDim * constant("kManyDims")),
    )

    @property
    def entries(self) -> list[ManyEntry]:
        return list(self.all_entries[: self.tensors])


# -- what the driver tells -------------------------------------------------------------------------


class Call(NamedTuple):
    """One call of a driver function."""

    function: str  # without "cu" and "_v2"
    kernel: str  # "" where none is meant
    result: int
    device: int  # of the current context; -1: there was none
    grid: int
    block: int
    stream: int
    address: int  # of device memory
    bytes: int
    scan: FlatScan | StridedScan | ManyScan | None  # what a kernel was given


class _Call(ctypes.Structure):
    _fields_ = (
        ("function", ctypes.c_char_p),
        ("kernel", ctypes.c_char_p),
        ("result", ctypes.c_int32),
        ("device", ctypes.c_int32),
        ("grid", _u32),
        ("block", _u32),
        ("stream", _u64),
        ("address", _u64),
        ("bytes", _u64),
        ("arguments", ctypes.c_void_p),
        ("argument_bytes", _u64),
    )

    def read(self) -> Call:
        kernel = (self.kernel or b"").decode()
        scan = None
        if self.arguments:
            kind = (
                FlatScan if "flat" in kernel else StridedScan if "strided" in kernel else ManyScan
            )
            assert ctypes.sizeof(kind) == self.argument_bytes, "scan_args.h is said anew above"
            scan = kind.from_buffer_copy(ctypes.string_at(self.arguments, self.argument_bytes))
        function = self.function.decode().removeprefix("cu").removesuffix("_v2")
        fields = (self.result, self.device, self.grid, self.block, self.stream, self.address)
        return Call(function, kernel, *fields, self.bytes, scan)


class Held(NamedTuple):
    """What is allocated and not freed, and how this thread is left."""

    device_memory: int
    pinned_memory: int
    events: int
    streams: int
    modules: int
    queued: int
    context_depth: int
    capture_mode: int


class _Held(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_int32 if i >= 6 else _u64) for i, name in enumerate(Held._fields)
    )


class Graph:
    """A CUDA graph. `handle` is None while it is recorded, and when its capture was broken."""

    def __init__(self, driver: ctypes.CDLL) -> None:
        self._driver = driver
        self.handle: int | None = None

    def replay(self, stream: int) -> None:
        self._driver.fake_replay(self.handle, stream)

    def __len__(self) -> int:
        return self._driver.fake_graph_size(self.handle)


class FakeCuda:
    """The recording driver of this process; see fake_driver.cpp for what each function does."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        driver = self._driver = ctypes.CDLL(os.fspath(path))
        pointer, void = ctypes.c_void_p, None
        signatures = {
            "fake_exchange": (pointer, [pointer]),
            "fake_place": (void, [pointer, ctypes.c_size_t, ctypes.c_int]),
            "fake_unplace": (void, [pointer]),
            "fake_use_stream": (pointer, [ctypes.c_int, pointer]),
            "fake_reset": (void, []),
            "fake_set": (ctypes.c_int, [ctypes.c_char_p, ctypes.c_int64]),
            "fake_use_device": (void, [ctypes.c_int]),
            "fake_stream_create": (pointer, [ctypes.c_int]),
            "fake_stream_destroy": (void, [pointer]),
            "fake_begin_capture": (void, [pointer, ctypes.c_int]),
            "fake_end_capture": (pointer, [pointer]),
            "fake_replay": (void, [pointer, pointer]),
            "fake_graph_size": (_u64, [pointer]),
            "fake_progress": (_u64, [_u64]),
            "fake_fail": (void, [ctypes.c_char_p, ctypes.c_int64, ctypes.c_int, ctypes.c_int]),
            "fake_heal": (void, []),
            "fake_calls": (_u64, [pointer, _u64]),
            "fake_clear_calls": (void, []),
            "fake_violations": (ctypes.c_char_p, []),
            "fake_held": (void, [pointer]),
        }
        for name, (result, arguments) in signatures.items():
            function = getattr(driver, name)
            function.restype, function.argtypes = result, arguments
        self._name = b"dlpack_exchange_api"  # a capsule borrows its name
        get = ctypes.pythonapi.PyCapsule_GetPointer
        get.restype, get.argtypes = pointer, [ctypes.py_object, ctypes.c_char_p]
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [pointer, ctypes.c_char_p, pointer]
        real = get(torch.Tensor.__dlpack_c_exchange_api__, self._name)
        self._exchange = new(driver.fake_exchange(real), self._name, None)

    def reset(self) -> None:
        """All settings as they were, no failures to come, nothing recorded."""
        self._driver.fake_reset()

    def set(self, **settings: int) -> None:
        """Settings of fake_driver.cpp: lagging, seed, record, ..."""
        for name, value in settings.items():
            assert self._driver.fake_set(name.encode(), value), name

    @contextlib.contextmanager
    def tensors_on_device(self) -> Iterator[None]:
        """Every CPU tensor is on a CUDA device, as far as nanscan can see."""
        types = torch.Tensor, torch.nn.Parameter
        _C.initialize(*types, self._exchange)
        try:
            yield
        finally:
            _C.initialize(*types, torch.Tensor.__dlpack_c_exchange_api__)

    @contextlib.contextmanager
    def placed(self, tensor: torch.Tensor, ordinal: int) -> Iterator[torch.Tensor]:
        """A tensor's storage is on another device; -1: on the host."""
        storage = tensor.untyped_storage()
        self._driver.fake_place(storage.data_ptr(), storage.nbytes(), ordinal)
        try:
            yield tensor
        finally:
            self._driver.fake_unplace(storage.data_ptr())

    @contextlib.contextmanager
    def current_device(self, ordinal: int) -> Iterator[None]:
        """Makes a device this thread's current one, and then cuda:0 again; -1: no context is."""
        self.use_device(ordinal)
        depth = self.held().context_depth
        try:
            yield
            assert self.held().context_depth == depth
        finally:
            self.use_device(0)

    def use_device(self, ordinal: int) -> None:
        """Makes a device this thread's current one; -1: no context is."""
        self._driver.fake_use_device(ordinal)

    def new_stream(self, device: int = 0) -> int:
        return self._driver.fake_stream_create(device)

    def destroy_stream(self, stream: int) -> None:
        self._driver.fake_stream_destroy(stream)

    @contextlib.contextmanager
    def stream(self, stream: int, device: int = 0) -> Iterator[int]:
        """torch's work of this thread goes to a stream."""
        before = self._driver.fake_use_stream(device, stream)
        try:
            yield stream
        finally:
            self._driver.fake_use_stream(device, before)

    @contextlib.contextmanager
    def capture(self, stream: int, mode: int = GLOBAL, device: int = 0) -> Iterator[Graph]:
        """What goes to a stream, which becomes torch's current one, is recorded and not run."""
        graph = Graph(self._driver)
        with self.stream(stream, device):
            self._driver.fake_begin_capture(stream, mode)
            try:
                yield graph
            finally:
                graph.handle = self._driver.fake_end_capture(stream)

    def progress(self, most: int = 1 << 60) -> int:
        """Runs so many pieces of work, of random streams. Returns how many there were."""
        return self._driver.fake_progress(most)

    def fail(
        self, function: str = "", nth: int = 1, error: int = OUT_OF_MEMORY, *, sticky: bool = False
    ) -> None:
        """The nth call from now on, of one function (its exported name) or of any, fails."""
        self._driver.fake_fail(function.encode(), nth, error, sticky)

    def heal(self) -> None:
        self._driver.fake_heal()

    def calls(self) -> list[Call]:
        """The calls since the last time that this was asked."""
        calls = (_Call * self._driver.fake_calls(None, 0))()
        self._driver.fake_calls(calls, len(calls))
        read = [call.read() for call in calls]
        self._driver.fake_clear_calls()
        return read

    def violations(self) -> list[str]:
        """What was done wrong since the last time that this was asked."""
        return self._driver.fake_violations().decode().splitlines()

    def held(self) -> Held:
        held = _Held()
        self._driver.fake_held(ctypes.byref(held))
        return Held(*(getattr(held, name) for name in Held._fields))


@functools.cache
def load() -> FakeCuda:
    """The driver that this process runs on, with kernels loaded on two devices."""
    path = os.environ["NANSCAN_CUDA_DRIVER"]
    cuda = FakeCuda(path)
    cuda.set(multiprocessors=MULTIPROCESSORS)
    for ordinal in range(2):
        _C.cuda_prepare(ordinal, b"an image")
    return cuda


# -- rows and calls, as tests look at them ---------------------------------------------------------

ASK, PUSH, POP = "CtxGetCurrent", "CtxPushCurrent", "CtxPopCurrent"
LAUNCH, CAPTURING, MODE = "LaunchKernel", "StreamIsCapturing", "ThreadExchangeStreamCaptureMode"
ROWS_A_CHUNK = 16384  # of a table on a device


class Rows(NamedTuple):
    """A step's rows, all there."""

    rows: np.ndarray
    order: np.ndarray
    notable: list[int]
    describe: object

    def __getitem__(self, row):
        return self.rows[row]


class Step:
    """A snapshot, perhaps under way."""

    def __init__(self, memory, order, notable, arrival):
        self.memory, self.order, self.notable, self.arrival = memory, order, notable, arrival

    def ready(self):
        return self.arrival.ready()

    def read(self) -> Rows:
        self.arrival.wait()
        notable = self.arrival.merge_into(self.memory, self.order)
        return Rows(self.memory.view(ROW)[:, 0], self.order, notable, self.arrival.describe)


def take(table: _C.Table, *, reset: bool = True) -> Step | None:
    """A snapshot; None where a graph is recorded."""
    memory = np.empty((len(table), ROW.itemsize), np.uint8)
    order = np.empty(len(table), np.uint64)
    taken = table.snapshot(memory, order, reset)
    return None if taken is None else Step(memory, order, *taken)


def record(pending: bytes | _C.PendingScan) -> np.void:
    """What scan_once found; waits for it."""
    return np.frombuffer(pending if isinstance(pending, bytes) else pending.wait(), ROW)[0]


def names(calls: list[Call]) -> list[str]:
    return [call.function for call in calls]


def with_nan(*shape: int, at: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Ones, and one NaN."""
    x = torch.ones(shape, dtype=dtype)
    x.view(-1)[at] = NAN
    return x


def launches(cuda) -> list:
    return [call for call in cuda.calls() if call.function == LAUNCH]


def run_in_thread(function):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()
