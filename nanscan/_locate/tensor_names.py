"""What a tensor is called: a parameter, its gradient, or a state of the optimizer."""

from __future__ import annotations

import weakref

import torch
from torch.optim.optimizer import Optimizer

from nanscan._collect.names import Registry


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
        if tensor is None:
            return ""
        place = self._registry.parameter(tensor, "")
        return place.name if place is not None else self._name_in_optimizer(tensor)

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
