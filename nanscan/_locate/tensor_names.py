"""What a tensor is called: a parameter, a buffer, a gradient, a state of the optimizer, ..."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import Optimizer

from nanscan._collect.names import Registry
from nanscan._locate.values import Value

_MAX_DEPTH = 3  # of containers in attributes of modules
_MAX_ITEMS = 256  # of one container


class Named(NamedTuple):
    """What a tensor is.

    Attributes:
        name: such as "fc.weight" or "exp_avg of fc.weight"; "" where none is known.
        kind: "parameter", "buffer", "attribute" (of a module, not in its state_dict), or "".
        aliases: other names of the parameter, where weights are tied.
    """

    name: str = ""
    kind: str = ""
    aliases: tuple[str, ...] = ()


class TensorNames:
    """Names of tensors in reports.

    Args:
        registry: names of modules and parameters.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._optimizer: weakref.ref[Optimizer] | None = None

    def use_optimizer(self, optimizer: Optimizer) -> None:
        """From now on names gradients and states by this optimizer, the last one that stepped."""
        self._optimizer = weakref.ref(optimizer)

    def name_of(self, tensor: torch.Tensor | None) -> str:
        """A name such as "fc.weight" or "exp_avg of fc.weight"; "" where none is known."""
        return self.named(tensor).name

    def named(self, tensor: torch.Tensor | None) -> Named:
        """What a tensor is. It looks through all modules: not for each op."""
        if tensor is None:
            return Named()
        place = self._registry.parameter(tensor, "")
        if place is not None:
            return Named(place.name, "parameter", tuple(place.aliases))
        if name := self._name_in_optimizer(tensor):
            return Named(name)
        for buffer, buffer_place in self._registry.buffers():
            if buffer is tensor:
                return Named(buffer_place.name, "buffer")
        return self._attribute(tensor)

    def named_of(self, value: Value) -> Named:
        """What the tensor of a value is, or that of which it is a view."""
        named = self.named(value.ref())
        if not named.name and value.base is not None:
            return self.named(value.base.ref())
        return named

    def _attribute(self, tensor: torch.Tensor) -> Named:
        """A tensor that a module holds by itself or in a container, such as a KV cache."""
        for module, place in self._registry.modules():
            for key, held in vars(module).items():
                if key.startswith("_"):  # parameters, buffers, children and hooks
                    continue
                for path, x in _tensors(held, key):
                    if x is tensor:
                        return Named(f"{place.name}.{path}", "attribute")
        return Named()

    def _name_in_optimizer(self, tensor: torch.Tensor) -> str:
        optimizer = self._optimizer() if self._optimizer is not None else None
        if optimizer is None:
            return ""
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            place = self._registry.parameter(parameter, "")
            name = place.name if place is not None else "a parameter"
            if tensor is parameter.grad:
                return f"gradient of {name}"
            for key, moment in optimizer.state.get(parameter, {}).items():
                if tensor is moment:
                    return f"{key} of {name}"
        return ""


def _tensors(x: Any, path: str, depth: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of an attribute, and where in it each lies."""
    if isinstance(x, torch.Tensor):
        yield path, x
    elif depth < _MAX_DEPTH and isinstance(x, (tuple, list, Mapping)) and len(x) <= _MAX_ITEMS:
        items = x.items() if isinstance(x, Mapping) else enumerate(x)
        for key, item in items:
            yield from _tensors(item, f"{path}[{key!r}]", depth + 1)
