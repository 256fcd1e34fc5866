"""The end of an optimizer's step, for those who want to know; they come and go at any time.

torch walks over its dict of global post hooks while one runs, and raises where that dict changes
meanwhile, as it does when a search begins or an action closes a monitor. So one hook stands for all
of ours. It leaves with the last of them, and while hooks run only as the last in that dict.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, cast

import torch
from torch.optim.optimizer import (
    Optimizer,
    _global_optimizer_post_hooks,
    register_optimizer_step_post_hook,
)
from torch.utils.hooks import RemovableHandle

Ended = Callable[[Optimizer, Any, Any], None]

_listeners: tuple[Ended, ...] = ()
_handles: list[RemovableHandle] = []  # one or none
_running: list[Optimizer] = []  # whose step has ended


def listen(ended: Ended, *, is_first: bool = False) -> None:
    """Adds a listener, before the others or after them."""
    global _listeners  # noqa: PLW0603
    _listeners = (ended, *_listeners) if is_first else (*_listeners, ended)
    if not _handles:
        _handles.append(register_optimizer_step_post_hook(_step_ended))


def forget(ended: Ended) -> None:
    """Removes a listener; does nothing if it is none."""
    global _listeners  # noqa: PLW0603
    _listeners = tuple(listener for listener in _listeners if listener != ended)
    if not _running:
        _leave()


def move_to_end() -> None:
    """Puts our hook behind those that a user registered later. To be called before a step."""
    hooks = cast("OrderedDict[int, Any]", _global_optimizer_post_hooks)
    if _handles and not _running and next(reversed(hooks), None) != _handles[0].id:
        hooks.move_to_end(_handles[0].id)


def _step_ended(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_dynamo_compiling():
        return
    _running.append(optimizer)
    try:
        for ended in _listeners:
            ended(optimizer, args, kwargs)
    finally:
        _running.pop()
        is_last = bool(_handles) and next(reversed(_global_optimizer_post_hooks)) == _handles[0].id
        if is_last and not _running:
            _leave()


def _leave() -> None:
    while _handles and not _listeners:
        _handles.pop().remove()
