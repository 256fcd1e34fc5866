"""Modules that run as compiled code, and the wrappers that torch.compile puts around them.

A wrapper stands for its module and has no name of its own.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator

from torch import nn

from nanscan._data.places import ModulePlace

_logger = logging.getLogger("nanscan")

_INNER = "_orig_mod"  # the attribute in which a wrapper holds the module
_SEEN = (
    "nanscan: %s runs as compiled code: its inputs, outputs, parameters and gradients are scanned, "
    "what modules inside of it return is not (Monitor.coverage() lists them). To see inside after "
    "a fault, run that step under torch.compiler.set_stance('force_eager')"
)


class CompiledModules:
    """Which modules run as compiled code, and since when. Says once what is not seen for it."""

    def __init__(self) -> None:
        self._has_told = False

    def note(self, place: ModulePlace, step: int) -> None:
        """A module runs as compiled code: none inside of it runs by its own call any more."""
        if place.compiled_since is not None:
            return
        place.compiled_since = step
        if not self._has_told:
            self._has_told = True
            _logger.warning(_SEEN, place.name)


def is_wrapper(module: object) -> bool:
    """Whether torch.compile(module) returned it."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")  # not loaded: nothing was compiled
    return dynamo is not None and isinstance(module, dynamo.OptimizedModule)


def unwrapped(module: nn.Module) -> nn.Module:
    """The module that was compiled; any other module as it is."""
    while is_wrapper(module):
        module = getattr(module, _INNER)
    return module


def named_modules(top: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """As `top.named_modules()` gives them, without wrappers and under the names of eager code."""
    for name, module in top.named_modules():
        if not is_wrapper(module):
            yield _eager(name), module


def _eager(name: str) -> str:
    if _INNER not in name:
        return name
    return ".".join(part for part in name.split(".") if part != _INNER)
