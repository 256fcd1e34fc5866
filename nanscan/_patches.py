"""What torch has no hook for: the loss that a backward starts from, and steps of a GradScaler.

Two functions of torch are wrapped while a monitor is open, and are what they were when the last one
is closed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.optim import Optimizer


class Listener(Protocol):
    """Who wants to know."""

    def backward_begins(self, tensors: Any) -> None:
        """The tensors that a backward starts from."""

    def scaled_step_begins(self, optimizer: Optimizer, scaler: torch.amp.GradScaler) -> None:
        """A GradScaler is about to step an optimizer, or to skip that."""

    def scaled_step_ended(self, optimizer: Optimizer, scaler: torch.amp.GradScaler) -> None:
        """It has done so."""


_listeners: list[Listener] = []


def listen(listener: Listener) -> None:
    """Adds a listener; wraps torch's functions for the first one."""
    if listener in _listeners:
        return
    if not _listeners:
        for owner, name, wrap in _WRAPPED:
            setattr(owner, name, wrap(getattr(owner, name)))
    _listeners.append(listener)


def forget(listener: Listener) -> None:
    """Removes a listener; the last one takes the wrappers along."""
    if listener not in _listeners:
        return
    _listeners.remove(listener)
    if _listeners:
        return
    for owner, name, _ in _WRAPPED:
        current = getattr(owner, name)
        if hasattr(current, "_nanscan_original"):  # else someone wrapped ours: it stays, idle
            setattr(owner, name, current._nanscan_original)  # noqa: SLF001


def _wrap_backward(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_dynamo_compiling():
            for listener in tuple(_listeners):
                listener.backward_begins(tensors)
        return original(tensors, *args, **kwargs)

    backward._nanscan_original = original  # type: ignore[attr-defined]  # noqa: SLF001
    return backward


def _wrap_step(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def step(scaler: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        listeners = tuple(_listeners) if scaler.is_enabled() else ()
        for listener in listeners:
            listener.scaled_step_begins(optimizer, scaler)
        result = original(scaler, optimizer, *args, **kwargs)
        for listener in listeners:
            listener.scaled_step_ended(optimizer, scaler)
        return result

    step._nanscan_original = original  # type: ignore[attr-defined]  # noqa: SLF001
    return step


_WRAPPED: tuple[tuple[Any, str, Callable[[Callable[..., Any]], Callable[..., Any]]], ...] = (
    (torch.autograd, "backward", _wrap_backward),
    (torch.amp.GradScaler, "step", _wrap_step),
)
