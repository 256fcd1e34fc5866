"""KeptCall: how a call of an outermost module began, kept until its step is judged."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from nanscan._data.places import ModulePlace

# What torch.load takes with weights_only=True, tensors and containers aside.
PLAIN = frozenset(
    {type(None), bool, int, float, complex, str, bytes}
    | {torch.dtype, torch.device, torch.layout, torch.Size}
)
TENSORS = (torch.Tensor, nn.Parameter)


def version(x: torch.Tensor) -> int:
    """How often a tensor was changed in place; -1 where torch does not count."""
    try:
        return int(x._version)  # noqa: SLF001 - no public spelling
    except RuntimeError:  # an inference tensor
        return -1


@dataclass(frozen=True)
class KeptTensor:
    """A tensor that went into a call.

    Attributes:
        tensor: the tensor itself, not a copy.
        version: its version then; -1: torch counts none for it.
        path: where it lies in the arguments, such as "args[0]"; of a buffer "state_dict['name']".
        copy: what it held then, where calls may change it; None: it was not copied.
    """

    tensor: torch.Tensor
    version: int
    path: str
    copy: torch.Tensor | None = None

    @property
    def is_changed(self) -> bool:
        """Whether it was written since; False where torch cannot tell."""
        return self.version != version(self.tensor)

    @property
    def before(self) -> torch.Tensor | None:
        """What it held when the call began; None where it was changed since and not copied.

        Without a copy, a tensor of which torch counts no versions is taken as it is now.
        """
        if self.is_changed or self.version < 0:
            return self.tensor if self.copy is None and self.version < 0 else self.copy
        return self.tensor


@dataclass(frozen=True)
class KeptCall:
    """How a call of an outermost module began.

    Attributes:
        module: the module.
        place: its place; None: it has none.
        args: positional arguments; containers are copies, with each tensor in a `KeptTensor`.
        kwargs: keyword arguments, likewise.
        buffers: the module's buffers, by their names in it.
        attributes: what modules inside of it hold as plain attributes, tensors as in `args`, by
            the names of the module and of the attribute.
        rng: states of random number generators.
        autocast: dtype by type of device, where autocast was on.
        notes: what is special about arguments, by path.
        was_stepped: whether an optimizer has stepped since.
    """

    module: weakref.ref[nn.Module]
    place: ModulePlace | None
    args: Any
    kwargs: Any
    buffers: Mapping[str, KeptTensor]
    attributes: Mapping[str, Mapping[str, Any]]
    rng: dict[str, Any]
    autocast: dict[str, torch.dtype]
    notes: Mapping[str, str]
    was_stepped: Callable[[], bool]
