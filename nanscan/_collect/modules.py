"""Module calls as events. No other file knows how torch tells of them."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules.module import (
    _global_forward_hooks_with_kwargs,
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from nanscan._collect.listener import Listener


class ModuleEvents:
    """Tells a listener of every module call of the process, in Python: slow, for searches.

    Args:
        listener: gets `on_before_module` and `on_after_module`.
    """

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._handles: list[RemovableHandle] = []

    @property
    def is_attached(self) -> bool:
        """Whether the listener is told."""
        return bool(self._handles)

    def attach(self) -> None:
        """Begins to tell the listener."""
        self._handles = [
            register_module_forward_pre_hook(self._before),
            register_module_forward_hook(self._after, with_kwargs=True, always_call=True),
        ]

    def detach(self) -> None:
        """Tells it no more."""
        remove(self._handles)

    def _before(self, module: nn.Module, _args: Any) -> None:
        self._listener.on_before_module(module)

    def _after(self, module: nn.Module, _args: Any, _kwargs: Any, output: Any = None) -> None:
        self._listener.on_after_module(module, output)


def remove(handles: list[RemovableHandle]) -> None:
    """Removes hooks; torch's dicts are as they were before."""
    for handle in handles:
        handle.remove()
        _global_forward_hooks_with_kwargs.pop(handle.id, None)  # torch forgets this one
    handles.clear()
