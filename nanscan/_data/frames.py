"""Which line of user code is running: frames of torch and nanscan are left out."""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType

import torch
from torch import nn
from torch.autograd import graph
from torch.utils import checkpoint

_TORCH = Path(torch.__file__).parent
_OURS = (f"{Path(__file__).parent.parent}{os.sep}",)
_LIBRARIES = (*_OURS, f"{_TORCH}{os.sep}")
_OURS_ALONE = 3  # references: the frame's, that of the variable, and that of the question
_ENGINE = graph._engine_run_backward.__code__  # noqa: SLF001 - what a backward starts with


@functools.cache
def is_library(file: str) -> bool:
    """Whether a file belongs to torch, nanscan, or Python's import machinery."""
    return file.startswith((*_LIBRARIES, "<frozen "))


_INSTALLED = tuple(
    f"{Path(path)}{os.sep}"
    for path in {sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}
)


@functools.cache
def is_installed(file: str) -> bool:
    """Whether a file belongs to Python or to a package that was installed, such as a trainer."""
    parts = Path(file).parts  # another folder of packages: a user's own, or one of PYTHONPATH
    return (
        is_library(file)
        or file.startswith(_INSTALLED)
        or "site-packages" in parts
        or "dist-packages" in parts
    )


# What runs a graph: its own code ("<eval_with_key>"), torch.fx and the call of a module.
_GRAPH_RUNNERS = ("<eval_with_key>", *(str(_TORCH / part) for part in ("fx", "nn/modules")))
_COMPILERS = tuple(
    f"{_TORCH / part}{os.sep}"
    for part in ("_dynamo", "_functorch", "_inductor", "_higher_order_ops")
)


def modules_calling() -> Iterator[nn.Module]:
    """Modules whose methods have led to this call, innermost first."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - where inspect is too slow
    while frame is not None:
        code = frame.f_code
        if code.co_argcount and not is_library(code.co_filename):
            first = _local(frame, code.co_varnames[0])
            if isinstance(first, nn.Module):
                yield first
        frame = frame.f_back


def _local(frame: FrameType, name: str) -> object:
    """A local variable of a function that runs. Keeps no other one alive."""
    found = frame.f_locals
    value = found.get(name)
    # Until Python 3.12 the frame keeps this dict, made for us unless somebody else has it, too.
    if sys.version_info < (3, 13) and sys.getrefcount(found) <= _OURS_ALONE:
        found.clear()
    return value


def is_compiler_calling() -> bool:
    """Whether a compiler of torch, not user code, has called the module that is about to run."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - where inspect is too slow
    while frame is not None and frame.f_code.co_filename.startswith((*_OURS, *_GRAPH_RUNNERS)):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(_COMPILERS)


def user_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame of user code from this one on; None if there is none."""
    while frame is not None and is_library(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def user_frame_in_backward(frame: FrameType | None) -> tuple[FrameType | None, bool]:
    """The innermost frame of user code that a backward called: a hook, a Function, a checkpoint's.

    Returns:
        The frame, None if there is none; and whether a checkpoint runs a forward again in it.
    """
    found = None
    while frame is not None and frame.f_code is not _ENGINE:
        if found is None and not is_library(frame.f_code.co_filename):
            found = frame
        if found is not None and frame.f_code.co_filename == checkpoint.__file__:
            return found, True
        frame = frame.f_back
    return found, False


def is_called_by(caller: CodeType, before: CodeType | None, frame: FrameType | None) -> bool:
    """Whether a function runs in a frame or around it, inside of another one."""
    while frame is not None and frame.f_code is not before:
        if frame.f_code is caller:
            return True
        frame = frame.f_back
    return False
