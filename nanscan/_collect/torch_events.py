"""Events of torch outside of modules: backward, clipping, steps of optimizers and GradScalers.

For what torch has no hook for, three of its functions are wrapped while somebody listens; they are
what they were when the last listener leaves. Optimizer steps have global hooks. Module calls are in
modules.py.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, cast

import torch
from torch.nn.utils import clip_grad
from torch.optim.optimizer import (
    Optimizer,
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from nanscan._collect.listener import Listener, StepArguments

_listeners: tuple[Listener, ...] = ()
_wrapped: list[_Wrapped] = []


def listen(listener: Listener, *, is_first: bool = False) -> None:
    """Adds a listener, before the others or after them; does nothing if it is one already."""
    global _listeners  # noqa: PLW0603
    if listener in _listeners:
        return
    if not _listeners:
        _wrap_functions()
    _listeners = (listener, *_listeners) if is_first else (*_listeners, listener)
    for hook in _STEP_HOOKS:
        hook.enter()


def forget(listener: Listener) -> None:
    """Removes a listener; does nothing if it is none. The last one takes all hooks along."""
    global _listeners  # noqa: PLW0603
    _listeners = tuple(other for other in _listeners if other is not listener)
    if not _listeners:
        while _wrapped:
            _wrapped.pop().remove()
        for hook in _STEP_HOOKS:
            hook.leave()


# -- optimizer steps -----------------------------------------------------------------------------


class _StepHook:
    """One global hook of optimizer steps for all listeners.

    torch walks over its dict of hooks while one runs, and raises where that dict changes meanwhile,
    as it does when a search begins or an action closes a monitor. So one hook stands for all
    listeners. It leaves with the last of them; while hooks run, only as the last in that dict.

    Args:
        register: torch's function that adds the hook.
        hooks: torch's dict of such hooks.
        tell: the hook.
    """

    def __init__(
        self,
        register: Callable[[Any], RemovableHandle],
        hooks: dict[int, Any],
        tell: Callable[[Optimizer, Any, Any], Any],
    ) -> None:
        self._register = register
        self._hooks = cast("OrderedDict[int, Any]", hooks)
        self._tell = tell
        self._handle: RemovableHandle | None = None
        self._running = 0

    def enter(self) -> None:
        """Registers the hook, if it is not there."""
        if self._handle is None:
            self._handle = self._register(self._run)

    def leave(self) -> None:
        """Removes the hook, unless it is running: then it leaves when it ends."""
        if not self._running and self._handle is not None:
            self._handle.remove()
            self._handle = None

    def move_to_end(self) -> None:
        """Puts the hook behind those that a user registered later; not while hooks run."""
        if self._handle is not None and not self._running and not self._is_last:
            self._hooks.move_to_end(self._handle.id)

    @property
    def _is_last(self) -> bool:
        return self._handle is not None and next(reversed(self._hooks), None) == self._handle.id

    def _run(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return self._tell(optimizer, args, kwargs)
        self._running += 1
        try:
            return self._tell(optimizer, args, kwargs)
        finally:
            self._running -= 1
            if not _listeners and self._is_last:
                self.leave()


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> StepArguments | None:
    replaced: StepArguments | None = None
    if not torch.compiler.is_dynamo_compiling():
        _AFTER_STEP.move_to_end()
    for listener in _listeners:
        answer = listener.on_before_optimizer_step(optimizer, args, kwargs)
        if answer is not None:
            args, kwargs = replaced = answer
    return replaced


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if not torch.compiler.is_dynamo_compiling():
        for listener in _listeners:
            listener.on_after_optimizer_step(optimizer, args, kwargs)


_AFTER_STEP = _StepHook(
    register_optimizer_step_post_hook, _global_optimizer_post_hooks, _after_step
)
_STEP_HOOKS = (
    _StepHook(register_optimizer_step_pre_hook, _global_optimizer_pre_hooks, _before_step),
    _AFTER_STEP,
)


# -- functions that are wrapped ------------------------------------------------------------------


class _Wrapped:
    """One function of torch that is wrapped.

    Someone else may wrap ours, and keep it when we go: it is idle then, and stays so.
    """

    def __init__(self, owner: Any, name: str, wrap: _Wrap) -> None:
        self.is_live = True
        self._owner, self._name = owner, name
        self._original = getattr(owner, name)
        self._ours = wrap(self._original, self)
        setattr(owner, name, self._ours)

    def remove(self) -> None:
        """Puts the original back, unless somebody wrapped ours."""
        self.is_live = False
        if getattr(self._owner, self._name) is self._ours:
            setattr(self._owner, self._name, self._original)

    def listeners(self) -> tuple[Listener, ...]:
        """Who is to be called from here."""
        return _listeners if self.is_live else ()


_Wrap = Callable[[Callable[..., Any], _Wrapped], Callable[..., Any]]


def _wrap_functions() -> None:
    _wrapped.append(_Wrapped(torch.autograd, "backward", _wrap_backward))
    _wrapped.append(_Wrapped(torch.amp.GradScaler, "step", _wrap_scaled_step))
    if hasattr(clip_grad, "_clip_grads_with_norm_"):  # which clip_grad_norm_ calls
        _wrapped.append(_Wrapped(clip_grad, "_clip_grads_with_norm_", _wrap_clipping))


def _wrap_backward(original: Callable[..., Any], wrapped: _Wrapped) -> Callable[..., Any]:
    @functools.wraps(original)
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        listeners = () if torch.compiler.is_dynamo_compiling() else wrapped.listeners()
        for listener in listeners:
            listener.on_before_backward(tensors)
        result = original(tensors, *args, **kwargs)
        for listener in [listener for listener in listeners if listener in _listeners]:
            listener.on_after_backward()
        return result

    return backward


def _wrap_clipping(original: Callable[..., Any], wrapped: _Wrapped) -> Callable[..., Any]:
    @functools.wraps(original)
    def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(parameters, torch.Tensor):
            parameters = [parameters]
        parameters = list(parameters)
        if not torch.compiler.is_dynamo_compiling():
            for listener in wrapped.listeners():
                listener.on_before_clipping(parameters)
        return original(parameters, *args, **kwargs)

    return clip


def _wrap_scaled_step(original: Callable[..., Any], wrapped: _Wrapped) -> Callable[..., Any]:
    @functools.wraps(original)
    def step(scaler: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        listeners = wrapped.listeners() if scaler.is_enabled() else ()
        for listener in listeners:
            listener.on_before_scaled_step(optimizer, scaler)
        result = original(scaler, optimizer, *args, **kwargs)
        for listener in listeners:
            listener.on_after_scaled_step(optimizer, scaler)
        return result

    return step
