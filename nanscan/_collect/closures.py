"""Closures that users give to `optimizer.step`, wrapped to see the gradients they make."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

StepCall = tuple[tuple[Any, ...], dict[str, Any]]  # the arguments of a step


class Closure:
    """A closure that looks at the gradients it made. Otherwise it is like the one it wraps.

    Args:
        inner: the closure.
        on_gradients: called after each call of it that raised nothing.
        begin: called before each call.

    Attributes:
        calls: how often it returned.
    """

    def __init__(
        self,
        inner: Callable[..., Any],
        on_gradients: Callable[[], object],
        *,
        begin: Callable[[], None] = lambda: None,
    ) -> None:
        self.inner = inner
        self.calls = 0
        self._begin = begin
        self._on_gradients = on_gradients

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._begin()
        result = self.inner(*args, **kwargs)
        self.calls += 1
        self._on_gradients()
        return result

    def __getattr__(self, name: str) -> Any:
        """What it does not have itself is the wrapped closure's, such as a name."""
        if name == "inner":  # in the making of a copy
            raise AttributeError(name)
        return getattr(self.inner, name)


def closure_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any] | None:
    """The closure among the arguments of a step, of which the first is the optimizer."""
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    return closure if callable(closure) else None


def with_closure(args: tuple[Any, ...], kwargs: dict[str, Any], closure: Closure) -> StepCall:
    """The same arguments with another closure."""
    if "closure" in kwargs:
        return args, {**kwargs, "closure": closure}
    return (args[0], closure, *args[2:]), kwargs
