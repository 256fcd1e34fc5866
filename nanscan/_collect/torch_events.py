"""What torch has no hook for: start and end of a backward, steps of a GradScaler, clipping.

Three functions of torch are wrapped while a monitor is open, and are what they were when the last
one is closed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.utils import clip_grad
from torch.optim import Optimizer


class Listener:
    """Who wants to know; what it does not care for, it leaves as it is here."""

    def backward_begins(self, tensors: Any) -> None:
        """The tensors that a backward starts from."""

    def backward_ended(self) -> None:
        """It is done, and raised nothing."""

    def clipping_begins(self, parameters: list[torch.Tensor]) -> None:
        """Gradients are about to be scaled by their norm: one NaN then makes all of them NaN."""

    def scaled_step_begins(self, optimizer: Optimizer, scaler: torch.amp.GradScaler) -> None:
        """A GradScaler is about to step an optimizer, or to skip that."""

    def scaled_step_ended(self, optimizer: Optimizer, scaler: torch.amp.GradScaler) -> None:
        """It has done so."""


_listeners: list[Listener] = []
_installed: list[_Wrapper] = []


class _Wrapper:
    """One function of torch that is wrapped.

    Someone else may wrap ours, and keep it when we go: it is idle then, and stays so.
    """

    def __init__(self, owner: Any, name: str, wrap: _Wrap) -> None:
        self.live = True
        self._owner, self._name = owner, name
        self._original = getattr(owner, name)
        self._wrapped = wrap(self._original, self)
        setattr(owner, name, self._wrapped)

    def remove(self) -> None:
        self.live = False
        if getattr(self._owner, self._name) is self._wrapped:
            setattr(self._owner, self._name, self._original)

    def listeners(self) -> tuple[Listener, ...]:
        return tuple(_listeners) if self.live else ()


_Wrap = Callable[[Callable[..., Any], _Wrapper], Callable[..., Any]]


def listen(listener: Listener) -> None:
    """Adds a listener; wraps torch's functions for the first one."""
    if listener in _listeners:
        return
    if not _listeners:
        _installed.append(_Wrapper(torch.autograd, "backward", _wrap_backward))
        _installed.append(_Wrapper(torch.amp.GradScaler, "step", _wrap_step))
        if hasattr(clip_grad, "_clip_grads_with_norm_"):  # which clip_grad_norm_ calls
            _installed.append(_Wrapper(clip_grad, "_clip_grads_with_norm_", _wrap_clip))
    _listeners.append(listener)


def forget(listener: Listener) -> None:
    """Removes a listener; the last one takes the wrappers along."""
    if listener in _listeners:
        _listeners.remove(listener)
        while _installed and not _listeners:
            _installed.pop().remove()


def _wrap_backward(original: Callable[..., Any], wrapper: _Wrapper) -> Callable[..., Any]:
    @functools.wraps(original)
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        listeners = () if torch.compiler.is_dynamo_compiling() else wrapper.listeners()
        for listener in listeners:
            listener.backward_begins(tensors)
        result = original(tensors, *args, **kwargs)
        for listener in [listener for listener in listeners if listener in _listeners]:
            listener.backward_ended()
        return result

    return backward


def _wrap_clip(original: Callable[..., Any], wrapper: _Wrapper) -> Callable[..., Any]:
    @functools.wraps(original)
    def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(parameters, torch.Tensor):
            parameters = [parameters]
        parameters = list(parameters)
        if not torch.compiler.is_dynamo_compiling():
            for listener in wrapper.listeners():
                listener.clipping_begins(parameters)
        return original(parameters, *args, **kwargs)

    return clip


def _wrap_step(original: Callable[..., Any], wrapper: _Wrapper) -> Callable[..., Any]:
    @functools.wraps(original)
    def step(scaler: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        listeners = wrapper.listeners() if scaler.is_enabled() else ()
        for listener in listeners:
            listener.scaled_step_begins(optimizer, scaler)
        result = original(scaler, optimizer, *args, **kwargs)
        for listener in listeners:
            listener.scaled_step_ended(optimizer, scaler)
        return result

    return step
