"""Faults planted in a backward; torch's own hooks tell where the first bad gradient is."""

from unittest import mock

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import nanscan
from nanscan._judge import episode

NAN = float("nan")


class Arrivals:
    """Names of parameters in the order in which autograd gave them non-finite gradients."""

    def __init__(self, model: nn.Module) -> None:
        self.bad: list[str] = []
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(
                    lambda p, name=name: self._note(p, name)
                )

    def _note(self, parameter, name):
        if not parameter.grad.isfinite().all():
            self.bad.append(name)


class Plant:
    """The gradients of what one module returns are NaN."""

    def __init__(self, model: nn.Module) -> None:
        self.module: nn.Module | None = None
        for module in model.modules():
            module.register_forward_hook(self._hook)

    def _hook(self, module, _args, output):
        for x in tree_leaves(output) if module is self.module else ():
            if isinstance(x, torch.Tensor) and x.requires_grad and x.grad_fn is not None:
                x.register_hook(lambda gradient: gradient * NAN)


def sweep(model, run, *, scope="model"):
    """Plants a fault behind each module of a model, one after the other.

    Args:
        model: the model.
        run: makes a loss.
        scope: "model" or "global".

    Yields:
        The module, the parameter whose gradient nanscan calls the first bad one, and the right one.
        Modules that no backward passes are left out.
    """
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    plant, arrivals, found = Plant(model), Arrivals(model), []
    target = model if scope == "model" else None
    with (
        mock.patch.object(episode, "_WINDOW", 0),  # each is a fault of its own
        nanscan.watch(target, action=found.append, skip_step=True),
    ):
        for name, module in model.named_modules():
            for plant.module in (None, module):
                arrivals.bad.clear()
                found.clear()
                optimizer.zero_grad()
                run().backward()
                optimizer.step()
            if arrivals.bad:
                yield name, next(f.site.name for f in found if f.is_fault), arrivals.bad[0]
            else:
                assert found == []


def is_same_place(said: str, right: str) -> bool:
    """Whether two parameters are of one module: its weight and bias get gradients from one node."""
    return said == right or said.rpartition(".")[0] == right.rpartition(".")[0] != ""
