"""Puts the trace on the stack of dispatch modes of a thread, and takes it off again.

torch calls the modes on that stack for every op. It changes the stack itself at some times: it puts
back what a backward or a compiled call found there, and it forgets modes when inference mode ends.
A trace that is pushed or popped at such a time breaks the stack. So it waits until that is safe.
"""

from __future__ import annotations

import sys
import threading
import weakref
from types import FrameType

import torch
from torch.utils._python_dispatch import (
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)

from nanscan._data.frames import is_library
from nanscan._locate.trace import OpTrace

# Traces whose search is over, and which could not leave the stack then.
_left_behind: weakref.WeakSet[OpTrace] = weakref.WeakSet()


class StackedTrace:
    """A trace, and whether it is on the stack of the thread that is searched.

    Args:
        trace: the trace.
    """

    def __init__(self, trace: OpTrace) -> None:
        self._trace = trace
        self._thread = 0  # identity of the thread that is searched
        self._is_suspended = False
        self._in_inference = False  # when it was pushed

    @property
    def is_here(self) -> bool:
        """Whether this thread is searched, or runs a backward of a thread that is."""
        if self._is_suspended:
            return threading.get_ident() == self._thread
        return any(mode is self._trace for mode in _get_current_dispatch_mode_stack())

    def enter(self) -> None:
        """Searches this thread: pushes the trace on its stack."""
        self._thread = threading.get_ident()
        self._push()

    def leave(self) -> None:
        """Takes the trace off the stack. Where that is not safe, the trace goes idle and stays."""
        if self._is_suspended:
            return
        if self.is_here and self._can_leave():
            self._pop()
        else:
            self._trace.is_idle = True
            _left_behind.add(self._trace)

    def suspend(self) -> None:
        """Takes the trace off the stack until `resume`, where that is safe.

        For the end of inference mode: torch forgets a mode that was pushed inside of it, and calls
        one that was pushed before it and popped inside of it.
        """
        if not self._is_suspended and self.is_here and self._can_leave():
            self._pop()
            self._is_suspended = True

    def resume(self) -> None:
        """Pushes the trace again, if it was suspended."""
        if self._is_suspended:
            self._is_suspended = False
            self._push()

    def _can_leave(self) -> bool:
        in_inference = torch.is_inference_mode_enabled()
        return not _is_guarded() and (self._in_inference or not in_inference)

    def _push(self) -> None:
        clear_away()
        self._in_inference = torch.is_inference_mode_enabled()
        self._trace.__enter__()  # type: ignore[no-untyped-call]

    def _pop(self) -> None:
        above = []  # modes that the user pushed later
        stack = _get_current_dispatch_mode_stack()
        while stack.pop() is not self._trace:
            above.append(_pop_mode())
        self._trace.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        for mode in reversed(above):
            _push_mode(mode)


def clear_away() -> None:
    """Takes traces off this thread's stack that could not leave when their search ended."""
    if not _left_behind or torch.is_inference_mode_enabled() or _is_guarded():
        return
    stack = _get_current_dispatch_mode_stack()
    while stack and isinstance(trace := stack.pop(), OpTrace) and trace in _left_behind:
        trace.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        _left_behind.discard(trace)


def can_search() -> bool:
    """Whether a search may begin in this thread: the stack is empty, and torch leaves it alone."""
    clear_away()
    return not _is_guarded() and torch._C._len_torch_dispatch_stack() == 0  # noqa: SLF001


def _is_guarded() -> bool:
    """Whether torch is to put back the stack as it was: in a backward or a compiled call."""
    if OpTrace.is_in_backward():
        return True
    frame: FrameType | None = sys._getframe()  # noqa: SLF001
    while frame is not None:
        if frame.f_code.co_name == "compile_wrapper" and is_library(frame.f_code.co_filename):
            return True
        frame = frame.f_back
    return False
