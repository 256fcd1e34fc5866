"""Roots: which modules belong together, as the parameters that optimizers hold tell."""

from __future__ import annotations

import gc
import weakref
from itertools import chain
from typing import TypeVar

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from nanscan._collect.compiled_modules import is_wrapper
from nanscan._collect.names import Registry
from nanscan._data.places import ParameterPlace

_Kind = TypeVar("_Kind")


class Roots:
    """Finds models that never run by themselves: code calls their parts.

    Where every module of the process is watched, each part is first taken for a model of its own.
    The module that holds the parameters of an optimizer is the model that they belong to.

    Args:
        registry: the modules.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        # By id(optimizer): itself, and how many parameters it had when it was looked at.
        self._looked: dict[int, tuple[weakref.ref[Optimizer], int]] = {}
        self._searches = 0

    def look_around(self) -> bool:
        """Whether an optimizer of the process holds a watched parameter. Looks at all objects."""
        things = alive((Optimizer, nn.Module))
        held = []
        for optimizer in things:
            if isinstance(optimizer, Optimizer) and hasattr(optimizer, "param_groups"):
                parameters = parameters_of(optimizer)
                if any(self._registry.parameter(p, "") is not None for p in parameters):
                    held += parameters
        if held:
            self._arrange(held, [thing for thing in things if isinstance(thing, nn.Module)])
        return bool(held)

    def look_at(self, optimizer: Optimizer) -> None:
        """An optimizer steps, perhaps for the first time."""
        parameters = parameters_of(optimizer)
        known, count = self._looked.get(id(optimizer), (None, 0))
        if known is not None and known() is optimizer and count == len(parameters):
            return
        if self._registry.only or not self._registry.may_rename():
            return
        self._looked[id(optimizer)] = weakref.ref(optimizer), len(parameters)
        self._registry.rescan()
        self._arrange(parameters, None)

    def _arrange(self, parameters: list[torch.Tensor], modules: list[nn.Module] | None) -> None:
        registry = self._registry
        if registry.only or not registry.may_rename():
            return

        def places() -> list[ParameterPlace | None]:
            return [registry.parameter(parameter, "") for parameter in parameters]

        def is_scattered() -> bool:  # some are not those of the first model
            return any(place is None or registry.has_prefix(place) for place in places())

        if is_scattered():
            registry.merge()
        if is_scattered():
            if modules is None:
                self._searches += 1
                if self._searches & (self._searches - 1):  # some code makes optimizers all the time
                    return
                modules = alive((nn.Module,))
            while (model := _model_of(parameters, modules, registry)) is not None:
                registry.add_root(model)
        if any(place is not None and registry.has_prefix(place) for place in places()):
            registry.add_prefixes()


def parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """All parameters of an optimizer, in the order of its groups."""
    return [*chain.from_iterable(group["params"] for group in optimizer.param_groups)]


def alive(kinds: tuple[type[_Kind], ...]) -> list[_Kind]:
    """All objects of the process of some kinds, the youngest last."""
    return [thing for thing in gc.get_objects() if issubclass(type(thing), kinds)]


def _model_of(
    parameters: list[torch.Tensor], modules: list[nn.Module], registry: Registry
) -> nn.Module | None:
    """The module, not known yet, that holds most of what belongs together; None: there is none.

    Args:
        parameters: of one or more optimizers.
        modules: all there are.
        registry: those that are known.
    """
    around: dict[int, list[nn.Module]] = {}
    for module in modules:
        for part in _own(module, "_modules"):
            around.setdefault(id(part), []).append(module)
    missing = {id(p) for p in parameters if registry.parameter(p, "") is None}
    roots = [root for root in registry.roots if any(True for _ in root.parameters())]
    owners = [m for m in modules if any(id(p) in missing for p in _own(m, "_parameters"))]
    held: dict[int, int] = {}  # by id(module): how many of these lie in it
    candidates: dict[int, nn.Module] = {}
    for part in (*roots, *owners):
        for module in _containers(part, around):
            held[id(module)] = held.get(id(module), 0) + 1
            if part in roots or not roots:  # none: a compiled function runs the model
                candidates[id(module)] = module
    candidates = {
        key: module
        for key, module in candidates.items()
        if held[key] > 1 and key not in registry.places and not _is_made(module)
    }
    most = max((held[key] for key in candidates), default=0)
    best = [module for key, module in candidates.items() if held[key] == most]
    return min(reversed(best), key=lambda module: sum(1 for _ in module.modules()), default=None)


def _own(module: nn.Module, name: str) -> list[object]:
    """What a module has itself; nothing where it is unusual, or in the making."""
    own = vars(module).get(name)
    return [*own.values()] if isinstance(own, dict) else []


def _containers(part: nn.Module, around: dict[int, list[nn.Module]]) -> list[nn.Module]:
    """A module and all that contain it."""
    found, stack = {id(part): part}, [part]
    while stack:
        for module in around.get(id(stack.pop()), ()):
            if id(module) not in found:
                found[id(module)] = module
                stack.append(module)
    return [*found.values()]


def _is_made(module: nn.Module) -> bool:
    """Whether a compiler or a tracer made it; it shares the parts."""
    return is_wrapper(module) or isinstance(module, torch.fx.GraphModule)
