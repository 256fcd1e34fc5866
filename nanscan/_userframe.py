"""Which line of user code is running: frames of torch and nanscan are left out."""

from __future__ import annotations

import os
from pathlib import Path
from types import FrameType

import torch

_LIBRARIES = tuple(f"{Path(file).parent}{os.sep}" for file in (__file__, torch.__file__))
_is_library: dict[str, bool] = {}  # by file


def is_library(file: str) -> bool:
    """Whether a file belongs to torch, nanscan, or Python's import machinery."""
    known = _is_library.get(file)
    if known is None:
        known = _is_library[file] = file.startswith((*_LIBRARIES, "<frozen "))
    return known


def user_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame of user code from this one on; None if there is none."""
    while frame is not None and is_library(frame.f_code.co_filename):
        frame = frame.f_back
    return frame
