"""How a CUDA device gets its kernels: the shipped image, NVRTC where that does not fit, the cache.

The compiler is the real one where it is installed; the driver is a stand-in.
"""

import errno
import logging
import multiprocessing
import os
import re
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from test_cuda_build import KERNELS

import nanscan
from helpers.paths import ROOT
from nanscan import _C
from nanscan._scan import cuda

SHIPPED = b"the shipped image"


class Core:
    """What the core does with CUDA devices, recorded."""

    def __init__(self):
        self.capability = (9, 0)
        self.refuses = ()  # images that the driver does not take
        self.tried, self.prepared, self.refused = [], {}, []

    def cuda_capability(self, ordinal):
        return self.capability

    def cuda_is_prepared(self, ordinal):
        return ordinal in self.prepared

    def cuda_prepare(self, ordinal, image):
        self.tried.append(image)
        time.sleep(0.02)  # room for another thread
        if image in self.refuses:
            raise RuntimeError("nanscan: CUDA_ERROR_NO_BINARY_FOR_GPU")
        self.prepared[ordinal] = image

    def cuda_refuse(self, ordinal):
        self.refused.append(ordinal)


class Compiler(cuda.Nvrtc):
    """NVRTC without the library, but for what is asked of the real one in tests that need it."""

    version = (13, 0)
    known = (75, 80, 86, 89, 90, 100, 103, 120, 121)
    compiled: list[str]

    def __init__(self):
        pass

    def architectures(self):
        return list(self.known)

    def compile(self, architecture):
        self.compiled.append(architecture)
        return f"compiled for {architecture}".encode() * 1000


@pytest.fixture
def core(monkeypatch, tmp_path):
    core = Core()
    for name in ("cuda_capability", "cuda_is_prepared", "cuda_prepare", "cuda_refuse"):
        monkeypatch.setattr(_C, name, getattr(core, name))
    monkeypatch.setattr(cuda, "_failures", {})
    monkeypatch.setattr(cuda, "FATBIN", tmp_path / "scan_kernels.fatbin")
    monkeypatch.setenv("NANSCAN_CACHE", str(tmp_path / "cache"))
    return core


@pytest.fixture
def compiler(monkeypatch):
    monkeypatch.setattr(Compiler, "compiled", [], raising=False)
    monkeypatch.setattr(cuda, "Nvrtc", Compiler)
    return Compiler


@pytest.fixture
def cache(core, tmp_path):
    return tmp_path / "cache"


def forget(core):
    """The next call is a new process's first."""
    core.tried.clear()
    core.prepared.clear()


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# -- which image ---------------------------------------------------------------------------------


def test_the_shipped_image_is_used_where_it_fits(core, compiler, cache):
    cuda.FATBIN.write_bytes(SHIPPED)
    assert cuda.prepare(0)
    assert core.tried == [SHIPPED]
    assert compiler.compiled == []
    assert not cache.exists()


def test_an_image_that_does_not_fit_is_compiled(core, compiler, caplog):
    caplog.set_level(logging.INFO, "nanscan")
    cuda.FATBIN.write_bytes(SHIPPED)
    core.refuses = (SHIPPED,)
    assert cuda.prepare(0)
    assert compiler.compiled == ["sm_90"]
    assert core.prepared[0].startswith(b"compiled for sm_90")
    assert warnings(caplog) == []
    assert "the shipped ones do not fit: nanscan: CUDA_ERROR_NO_BINARY_FOR_GPU" in caplog.text


def test_without_a_shipped_image_the_source_is_compiled(core, compiler, caplog):
    caplog.set_level(logging.INFO, "nanscan")
    assert cuda.prepare(0)
    assert compiler.compiled == ["sm_90"]
    assert caplog.records == []


def test_a_shipped_image_that_cannot_be_read_is_compiled(core, compiler):
    cuda.FATBIN.mkdir()  # whose reading is an OSError other than "not found"
    assert cuda.prepare(0)
    assert compiler.compiled == ["sm_90"]


def test_a_prepared_device_is_left_alone(core, compiler):
    assert cuda.prepare(0)
    assert cuda.prepare(0)
    assert len(core.tried) == 1


@pytest.mark.parametrize(
    ("capability", "expected"),
    [
        ((7, 5), "sm_75"),
        ((9, 0), "sm_90"),
        ((10, 3), "sm_103"),
        ((12, 1), "sm_121"),
        ((8, 7), "compute_86"),  # unknown, amid known ones
        ((11, 0), "compute_103"),
        ((13, 0), "compute_121"),  # of the future
        ((20, 5), "compute_121"),
    ],
)
def test_architecture_of_a_device(compiler, capability, expected):
    assert compiler().architecture(capability) == expected


@pytest.mark.parametrize("capability", [(3, 5), (7, 0), (7, 4)])
def test_a_device_that_nvrtc_no_longer_knows_is_named(compiler, capability):
    got = f"{capability[0]}.{capability[1]}"
    message = f"compute capability 7.5 or later, .* NVRTC 13.0 know, got {got}"
    with pytest.raises(RuntimeError, match=message):
        compiler().architecture(capability)


def test_what_the_kernels_cannot_run_on_is_no_choice_of_an_older_nvrtc(compiler, monkeypatch):
    monkeypatch.setattr(compiler, "known", (50, 60, 61, 70, 75, 80))
    assert compiler().architecture((7, 0)) == "sm_70"
    with pytest.raises(RuntimeError, match=r"capability 7.0 or later, .* got 6.1"):
        compiler().architecture((6, 1))


# -- no image ------------------------------------------------------------------------------------


@pytest.fixture
def no_nvrtc(monkeypatch, tmp_path):
    monkeypatch.setattr(cuda, "_candidates", lambda: [tmp_path / "libnvrtc.so.13"])


def test_without_nvrtc_one_warning_says_what_to_do(core, no_nvrtc, caplog):
    assert not cuda.prepare(0)
    assert not cuda.prepare(0)
    (warning,) = warnings(caplog)
    assert "nanscan: no kernels for cuda:0, its tensors are copied to the host" in warning
    assert "NVRTC, which compiles the kernels, was not found" in warning
    assert "pip install nvidia-cuda-nvrtc" in warning
    assert "libnvrtc.so.13: cannot open shared object file" in warning
    assert core.refused == [0]
    assert cuda.why_not(0) in warning
    assert cuda.why_not(1) == ""


def test_without_nvrtc_tensors_are_scanned_all_the_same(core, no_nvrtc, monkeypatch):
    monkeypatch.setattr(_C, "cuda_ordinal", lambda tensor: 0)
    for scan in ("check", "scan_once"):
        monkeypatch.setattr(_C, scan, lambda *_: _C.OTHER_DEVICE if core.refused else _C.UNPREPARED)
    result = nanscan.check(torch.tensor([1.0, float("nan"), -3.0]))
    assert core.refused == [0]
    assert (result.nan_count, result.min, result.max) == (1, -3.0, 1.0)


@pytest.mark.parametrize("failing", ["cuda_capability", "cuda_prepare"])
def test_a_failing_driver_is_one_warning(core, compiler, monkeypatch, caplog, failing):
    def fail(*_):
        raise RuntimeError(f"nanscan: {failing} failed: out of memory")

    monkeypatch.setattr(_C, failing, fail)
    assert not cuda.prepare(3)
    assert not cuda.prepare(3)
    (warning,) = warnings(caplog)
    assert "cuda:3" in warning
    assert f"{failing} failed: out of memory" in warning
    assert core.refused == [3]


def test_an_image_that_nobody_takes_is_not_kept(core, compiler, cache):
    core.refuses = (Compiler.compile(compiler(), "sm_90"),)
    assert not cuda.prepare(0)
    assert not cache.exists()


def test_a_library_without_a_function_is_one_warning(core, monkeypatch, caplog):
    class Ancient(cuda.Nvrtc):
        def __init__(self):
            self._library, self.version = object(), (8, 0)

    monkeypatch.setattr(cuda, "Nvrtc", Ancient)
    assert not cuda.prepare(0)
    (warning,) = warnings(caplog)
    assert "nvrtcGetNumSupportedArchs" in warning


def test_missing_source_is_one_warning(core, monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(cuda, "Nvrtc", Compiler)
    monkeypatch.setattr(cuda, "KERNELS", tmp_path / "nowhere")
    assert not cuda.prepare(0)
    (warning,) = warnings(caplog)
    assert "nowhere" in warning


def test_nvrtc_of_the_cuda_that_torch_was_built_for_comes_first(monkeypatch, tmp_path):
    for path in ("nvidia/cu13/lib/libnvrtc.so.13", "nvidia/cuda_nvrtc/lib/libnvrtc.so.12"):
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).touch()
    monkeypatch.setattr(cuda.sys, "path", [str(tmp_path)])
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)

    def found(version):
        monkeypatch.setattr(torch.version, "cuda", version)
        return [path.name[len("libnvrtc.so.") :] for path in cuda._candidates()]

    assert found("12.8") == ["12", "12", "13", "13"]
    assert found("13.0") == found(None) == ["13", "13", "12", "12"]


def test_a_toolkit_is_searched_too(monkeypatch, tmp_path):
    library = tmp_path / "lib64" / "libnvrtc.so.13.0.88"
    library.parent.mkdir()
    library.touch()
    monkeypatch.setattr(cuda.sys, "path", [])
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert library in cuda._candidates()


# -- the cache -----------------------------------------------------------------------------------


def files(folder):
    return sorted(path.name for path in folder.iterdir())


def test_what_is_compiled_is_kept(core, compiler, cache):
    assert cuda.prepare(0)
    image = core.prepared[0]
    assert files(cache) == [f"{cuda.cache_key((13, 0), 'sm_90')}.bin"]
    forget(core)
    assert cuda.prepare(0)
    assert core.tried == [image]
    assert compiler.compiled == ["sm_90"]


def test_a_second_device_takes_what_the_first_one_left(core, compiler):
    assert cuda.prepare(0)
    assert cuda.prepare(1)
    assert core.prepared[0] == core.prepared[1]
    assert compiler.compiled == ["sm_90"]


DAMAGES = {
    "a flipped bit": lambda content: content[:-5] + bytes([content[-5] ^ 4]) + content[-4:],
    "a flipped bit of the digest": lambda content: bytes([content[0] ^ 1]) + content[1:],
    "truncated": lambda content: content[: len(content) // 2],
    "truncated in the digest": lambda content: content[:20],
    "longer": lambda content: content + b"\0",
    "empty": lambda content: b"",
    "zeros": lambda content: bytes(len(content)),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_file_never_reaches_the_driver_and_is_mended(core, compiler, cache, damage):
    assert cuda.prepare(0)
    image = core.prepared[0]
    (file,) = cache.iterdir()
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    forget(core)
    assert cuda.prepare(0)
    assert core.tried == [image]
    assert compiler.compiled == ["sm_90", "sm_90"]
    assert files(cache) == [file.name]
    assert file.read_bytes() == whole


def test_a_kept_image_that_the_driver_refuses_is_compiled_anew(core, compiler, cache):
    cuda.write_cache(cuda.cache_key((13, 0), "sm_90"), b"of another life")
    core.refuses = (b"of another life",)
    assert cuda.prepare(0)
    assert compiler.compiled == ["sm_90"]
    assert cuda.read_cache(cuda.cache_key((13, 0), "sm_90")) == core.prepared[0]


def test_no_file_is_mistaken_for_another(core, compiler, monkeypatch, tmp_path):
    keys = {cuda.cache_key((13, 0), "sm_90")}
    assert keys == {cuda.cache_key((13, 0), "sm_90")}
    keys.add(cuda.cache_key((13, 1), "sm_90"))
    keys.add(cuda.cache_key((12, 9), "sm_90"))
    keys.add(cuda.cache_key((13, 0), "sm_80"))
    keys.add(cuda.cache_key((13, 0), "compute_90"))
    shipped = cuda.source
    for changed in (cuda._MAIN, *cuda._HEADERS):
        monkeypatch.setattr(
            cuda, "source", lambda name, changed=changed: shipped(name) + " " * (name == changed)
        )
        keys.add(cuda.cache_key((13, 0), "sm_90"))
    monkeypatch.setattr(cuda, "source", shipped)
    monkeypatch.setattr(cuda, "_OPTIONS", (*cuda._OPTIONS, "-G"))
    keys.add(cuda.cache_key((13, 0), "sm_90"))
    monkeypatch.setattr(cuda, "_STANDARD", {})
    keys.add(cuda.cache_key((13, 0), "sm_90"))
    assert len(keys) == 5 + 4 + 2


def assert_works_without_cache(core, compiler, caplog):
    caplog.set_level(logging.INFO, "nanscan")
    assert cuda.prepare(0)
    assert cuda.prepare(1)
    assert compiler.compiled == ["sm_90", "sm_90"]
    assert warnings(caplog) == []
    assert "compiled kernels are not kept" in caplog.text


def test_a_folder_that_is_a_file_is_no_obstacle(core, compiler, cache, caplog):
    cache.write_bytes(b"")
    assert_works_without_cache(core, compiler, caplog)
    assert cache.read_bytes() == b""


def test_a_folder_that_takes_no_files_is_no_obstacle(core, compiler, monkeypatch, caplog):
    if not Path("/proc/self").is_dir():
        pytest.skip("/proc, which takes no files even from root, is not there")
    monkeypatch.setenv("NANSCAN_CACHE", "/proc/nanscan")
    assert_works_without_cache(core, compiler, caplog)
    monkeypatch.setenv("NANSCAN_CACHE", "/proc/self")
    forget(core)
    compiler.compiled.clear()
    assert_works_without_cache(core, compiler, caplog)


def test_a_read_only_folder_is_read(core, compiler, cache):
    assert cuda.prepare(0)
    cache.chmod(0o500)
    forget(core)
    assert cuda.prepare(0)
    cache.chmod(0o700)
    assert compiler.compiled == ["sm_90"]


def test_a_disk_full_at_once_leaves_nothing_behind(core, compiler, cache, monkeypatch, caplog):
    make = tempfile.NamedTemporaryFile

    def make_on_full_disk(*arguments, **options):
        file = make(*arguments, **options)
        file.write = write
        return file

    def write(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "NamedTemporaryFile", make_on_full_disk)
    assert_works_without_cache(core, compiler, caplog)
    assert "No space left on device" in caplog.text
    assert files(cache) == []


def test_a_disk_full_midway_leaves_nothing_behind(core, compiler, cache, monkeypatch, caplog):
    resource = pytest.importorskip("resource")
    compile_less = Compiler.compile
    monkeypatch.setattr(Compiler, "compile", lambda *of: compile_less(*of).ljust(3 << 20))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        assert_works_without_cache(core, compiler, caplog)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "File too large" in caplog.text
    assert files(cache) == []


def test_where_the_cache_is(core, monkeypatch, tmp_path):
    assert cuda.cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("NANSCAN_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cuda.cache_folder() == tmp_path / "xdg" / "nanscan"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cuda.cache_folder() == tmp_path / "home" / ".cache" / "nanscan"


def test_a_user_without_home_has_no_cache(core, compiler, monkeypatch, caplog):
    pwd = pytest.importorskip("pwd")

    def nobody(_):
        raise KeyError

    monkeypatch.setattr(pwd, "getpwuid", nobody)  # as in a container run as any user id
    for variable in ("NANSCAN_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(variable, raising=False)
    assert_works_without_cache(core, compiler, caplog)
    assert "home" in caplog.text.lower()


# -- several at once -----------------------------------------------------------------------------


def test_two_threads_load_a_device_once(core, compiler):
    start = threading.Barrier(2)

    def prepare(_):
        start.wait()
        return cuda.prepare(0)

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(prepare, range(2))) == [True, True]
    assert len(core.tried) == 1
    assert compiler.compiled == ["sm_90"]


def test_two_threads_warn_of_a_device_once(core, no_nvrtc, caplog):
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(cuda.prepare, (0, 0))) == [False, False]
    assert len(warnings(caplog)) == 1


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # of fork beside threads
def test_processes_that_start_at_once_leave_one_whole_file(core, compiler, cache, monkeypatch):
    processes = 8
    if "fork" not in multiprocessing.get_all_start_methods():
        pytest.skip("there is no fork, which lets a process start with the stand-ins in place")
    image = bytes(range(256)) * (1 << 14)
    monkeypatch.setattr(Compiler, "compile", lambda *_: image)
    key = cuda.cache_key((13, 0), "sm_90")
    file = cache / f"{key}.bin"
    context = multiprocessing.get_context("fork")
    start = context.Barrier(processes)

    def first_use():
        start.wait(60)
        os._exit(0 if cuda.prepare(0) and core.prepared[0] == image else 1)

    for _ in range(3):
        running = [context.Process(target=first_use) for _ in range(processes)]
        for process in running:
            process.start()
        while any(process.is_alive() for process in running):
            if file.exists():  # even while others write
                assert cuda.read_cache(key) == image
        assert [process.exitcode for process in running] == [0] * processes
        assert files(cache) == [file.name]
        assert cuda.read_cache(key) == image
        file.unlink()


# -- the real compiler ---------------------------------------------------------------------------


@pytest.fixture(scope="session")
def nvrtc():
    try:
        return cuda.Nvrtc()
    except RuntimeError as error:
        pytest.skip(str(error))


def test_nvrtc_tells_what_it_is(nvrtc):
    assert nvrtc.version >= (12, 0)
    assert {80, 90} <= set(nvrtc.architectures())
    assert nvrtc.architectures() == sorted(nvrtc.architectures())


@pytest.fixture(scope="session")
def images(nvrtc):
    """The kernels for all that NVRTC knows of these; what was compiled before is kept in build/."""
    known = nvrtc.architectures()
    wanted = [f"sm_{number}" for number in (120, 100, 90, 80, 75) if number in known]
    keys = {name: cuda.cache_key(nvrtc.version, name) for name in (*wanted, "compute_80")}

    def compiled(architecture):
        image = cuda.read_cache(keys[architecture])
        if image is None:
            image = cuda.Nvrtc().compile(architecture)
            cuda.write_cache(keys[architecture], image)
        return image

    folder = ROOT / "build" / "nvrtc"
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(os.cpu_count()) as threads:
        patch.setenv("NANSCAN_CACHE", str(folder))
        made = dict(zip(keys, threads.map(compiled, keys), strict=True))
    for old in folder.iterdir():
        if old.stem not in keys.values():
            old.unlink(missing_ok=True)
    return made


@pytest.mark.parametrize("architecture", ["sm_75", "sm_80", "sm_90", "sm_100", "sm_120"])
def test_nvrtc_compiles_every_kernel(images, architecture):
    if architecture not in images:
        pytest.skip(f"this NVRTC does not know {architecture}")
    image = images[architecture]
    assert image.startswith(b"\x7fELF")
    found = re.findall(rb"\0\.text\.(\w+)(?=\0)", image)
    assert {name.decode() for name in found} >= KERNELS


def test_nvrtc_compiles_every_kernel_for_chips_to_come(images):
    image = images["compute_80"]
    assert image.endswith(b"\0")  # the driver takes PTX as a C string
    text = image.rstrip(b"\0").decode()
    assert re.search(r"^\.target sm_80$", text, re.MULTILINE)
    assert set(re.findall(r"\.entry (\w+)\(", text)) == KERNELS


def test_nvrtc_puts_nothing_else_into_the_source_than_the_headers_hold(nvrtc):
    includes = {
        name
        for file in (cuda._MAIN, *cuda._HEADERS)
        for name in re.findall(r"#include [<\"]([^>\"]+)", cuda.source(file))
    }
    assert includes <= {*cuda._STANDARD, "scan_args.h", "../float_format.h", "../row.h"}


def test_a_compile_error_carries_the_log(nvrtc, monkeypatch):
    monkeypatch.setattr(cuda, "source", lambda name: "#error this is what is wrong\n")
    with pytest.raises(RuntimeError) as caught:
        nvrtc.compile("sm_90")
    message = str(caught.value)
    assert "nvrtcCompileProgram failed: NVRTC_ERROR_COMPILATION for sm_90" in message
    assert "this is what is wrong" in message
    assert "scan_kernels.cu(1)" in message
    assert "\0" not in message


def test_an_architecture_that_is_none_is_an_error(nvrtc):
    with pytest.raises(RuntimeError, match="sm_1"):
        nvrtc.compile("sm_1")


def test_a_device_is_prepared_by_the_real_compiler(core, nvrtc, images, cache, monkeypatch):
    monkeypatch.setattr(cuda.Nvrtc, "compile", lambda self, architecture: images[architecture])
    assert cuda.prepare(0)
    assert core.prepared[0] == images["sm_90"]
    assert cuda.read_cache(cuda.cache_key(nvrtc.version, "sm_90")) == images["sm_90"]
