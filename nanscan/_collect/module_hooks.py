"""ModuleHooks: module calls as torch's global hooks see them, for a torch without the door."""

from __future__ import annotations

import sys
import threading
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    _global_forward_hooks_with_kwargs,
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from nanscan import _C

_CALL = nn.Module._call_impl.__code__  # noqa: SLF001 - the frame of every module call
_RAISED = object()

# While torch.compile traces a hook this is the constant True, and the hook leaves nothing behind.
_is_tracing = torch.compiler.is_dynamo_compiling


class ModuleHooks:
    """Two global hooks that tell all observers of module calls."""

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []
        self._calls = _Calls()

    def attach(self) -> None:
        """Registers the hooks."""
        self._handles = [
            register_module_forward_pre_hook(self._before),
            register_module_forward_hook(self._after, with_kwargs=True, always_call=True),
        ]

    def detach(self) -> None:
        """Removes the hooks; torch's dicts are as they were before."""
        for handle in self._handles:
            handle.remove()
            _global_forward_hooks_with_kwargs.pop(handle.id, None)  # torch forgets this one
        self._handles.clear()

    def _before(self, module: nn.Module, args: Any) -> None:
        if _is_tracing():
            return
        frame = _frame_of_call(sys._getframe(1))  # noqa: SLF001
        around = None if frame is None else _frame_of_call(frame.f_back)
        self._drop_interrupted(None if around is None else around.f_locals["self"])
        # A global hook gets no keyword arguments.
        kwargs = {} if frame is None else frame.f_locals.get("kwargs", {})
        self._calls.stack.append((module, _C.HookedCall(module, args, kwargs)))

    def _after(self, module: nn.Module, _args: Any, _kwargs: Any, output: Any = _RAISED) -> None:
        if _is_tracing():
            return
        self._drop_interrupted(module)
        if self._calls.stack:
            _, call = self._calls.stack.pop()
            if output is _RAISED:
                call.raised()
            else:
                call.returned(output)

    def _drop_interrupted(self, running: nn.Module | None) -> None:
        """Ends calls that a KeyboardInterrupt ended: torch calls no hook then.

        Args:
            running: the innermost module that is running; None: none is.
        """
        stack = self._calls.stack
        while stack and stack[-1][0] is not running:
            if not any(module is running for module, _ in stack) and running is not None:
                return  # that call began before the hooks were there
            stack.pop()[1].raised()


class _Calls(threading.local):
    """The calls that run in a thread, innermost last."""

    def __init__(self) -> None:
        self.stack: list[tuple[nn.Module, _C.HookedCall]] = []


def _frame_of_call(frame: FrameType | None) -> FrameType | None:
    """The innermost frame, from this one outwards, that is a module's call."""
    while frame is not None and frame.f_code is not _CALL:
        frame = frame.f_back
    return frame
