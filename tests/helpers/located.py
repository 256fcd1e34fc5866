"""What tests of the op-by-op search share: faults that say themselves where they are."""

import ctypes
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

import nanscan


def garbage(x: torch.Tensor) -> torch.Tensor:
    """Makes NaN of uninitialised memory, as memory may be, without torch's knowing."""
    ctypes.memset(x.data_ptr(), 0xFF, x.untyped_storage().nbytes())
    return x


def marked(function: Callable[..., Any], marker: str = "here") -> int:
    """Number of the one line of a function, or class, that ends in `# marker`."""
    lines, first = inspect.getsourcelines(function)
    numbers = [first + i for i, text in enumerate(lines) if text.rstrip().endswith(f"# {marker}")]
    assert len(numbers) == 1, f"{len(numbers)} lines of {function} are marked '{marker}'"
    return numbers[0]


def where(location: nanscan.Location | None) -> tuple[Any, ...]:
    """(op, line, verdict, direction, node, output index); () where nothing was found."""
    if location is None:
        return ()
    told = location.op, location.line, location.verdict, location.direction
    return *told, location.node, location.output_index


class Faults:
    """Functions with a fault each, and what must be said of it.

    faults = Faults()

    @faults("aten.div.Tensor")
    def division():
        x = torch.zeros(3)
        return x / x  # here

    @faults.test
    def test_...(function, expected): ...
    """

    def __init__(self) -> None:
        self._cases: list[Any] = []

    def __call__(self, op: str, node: str = "", index: int | None = None, **said: Any) -> Any:
        def add(function: Callable[[], Any]) -> Callable[[], Any]:
            direction = said.get("direction", "backward" if node else "forward")
            line = marked(said.get("marked_in", function))
            expected = (op, line, said.get("verdict", "origin"), direction, node, index)
            name = function.__name__.strip("_")
            self._cases.append(pytest.param(function, expected, id=name))
            return function

        return add

    def test(self, function: Callable[..., None]) -> Callable[..., None]:
        """Runs a test on each."""
        return pytest.mark.parametrize(("function", "expected"), self._cases)(function)
