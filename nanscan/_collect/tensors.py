"""KnownTensors: parameters and buffers of known modules, and their places."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from nanscan._data.places import ModulePlace, ParameterPlace, SinglePlace
from nanscan._data.site import Kind

# By its qualified names, former ones included, and, for a module, the module itself.
Wants = Callable[[tuple[str, ...], nn.Module | None], bool]


class KnownTensors:
    """Parameters and buffers by identity, without keeping any of them alive.

    Args:
        wants: whether to watch a module, and its parameters and buffers, by qualified name.
        only: watch one model only.

    Attributes:
        changes: how often a module or parameter was added.
    """

    def __init__(self, wants: Wants, *, only: bool) -> None:
        self.only = only
        self.changes = 0
        self._wants = wants
        # By id(parameter): the module that has it, under which name, and its place. No weak
        # reference to the parameter: torch.utils.swap_tensors, and so Module.to, would refuse it.
        self._parameters: dict[int, tuple[weakref.ref[nn.Module], str, ParameterPlace]] = {}
        self._loose: dict[str, ParameterPlace] = {}  # parameters of no known module, by name
        self._single: dict[tuple[str, Kind], SinglePlace] = {}  # the loss, and probes
        # Buffers: the module that has it, under which name, and its place.
        self._buffers: list[tuple[weakref.ref[nn.Module], str, SinglePlace]] = []

    def single(self, name: str, kind: Kind) -> SinglePlace:
        """The loss, or a probe of that name."""
        return self._single.setdefault((name, kind), SinglePlace(name, None, kind))

    def buffers(self) -> Iterator[tuple[torch.Tensor, SinglePlace]]:
        """Every buffer that a known module has now."""
        for reference, key, place in self._buffers:
            buffer = getattr(reference(), key, None)
            if place.watched and isinstance(buffer, torch.Tensor):
                yield buffer, place

    def buffer_owners(self) -> list[tuple[weakref.ref[nn.Module], str, SinglePlace]]:
        """Of each watched buffer the module that has it, under which name, and its place."""
        return [entry for entry in self._buffers if entry[2].watched]

    def prefix(self, place: ModulePlace) -> str:
        """What names of what a module has begin with."""
        raise NotImplementedError

    def attribute(self, owner: ModulePlace, path: str) -> SinglePlace:
        """A tensor that a module holds as a plain attribute, such as `cache[1]`."""
        place = owner.attributes.get(path)
        if place is None:
            place = SinglePlace(self.prefix(owner) + path, owner, Kind.BUFFER)
            place.watched = owner.watched and self._wants(place.names, None)
            place.is_saved = False
            owner.attributes[path] = place
        return place

    def parameter(self, parameter: torch.Tensor, loose_name: str) -> ParameterPlace | None:
        """A parameter's place; None where its model is not watched.

        Args:
            parameter: the parameter.
            loose_name: what to call it when no known module has it; "": it has no place then.
        """
        known = self._known(id(parameter))
        if known is not None:
            return known
        if self.only or not loose_name:
            return None
        return self._loose.setdefault(loose_name, ParameterPlace(loose_name, None))

    def _known(self, parameter: int) -> ParameterPlace | None:
        """The place by id; None once its module no longer has the parameter of that id."""
        if parameter not in self._parameters:
            return None
        reference, key, place = self._parameters[parameter]
        module = reference()
        if module is None or id(getattr(module, key, None)) != parameter:
            return None
        return place

    def live_parameters(self) -> Iterator[tuple[torch.Tensor, ParameterPlace]]:
        """Every watched parameter that a known module has now, once each."""
        for reference, key, place in list(self._parameters.values()):
            parameter = getattr(reference(), key, None)
            if place.watched and isinstance(parameter, torch.Tensor):
                yield parameter, place

    @property
    def is_trainable(self) -> bool:
        """Whether backward has gradients to make."""
        return any(parameter.requires_grad for parameter, _ in self.live_parameters())

    def add_tensors(
        self, module: nn.Module, reference: weakref.ref[nn.Module], owner: ModulePlace, name: str
    ) -> None:
        """Adds the parameters and buffers that a module has itself.

        Args:
            module: the module.
            reference: to it.
            owner: its place.
            name: what their names begin with, without a dot; "": with nothing.
        """
        for key, parameter in module.named_parameters(recurse=False):
            full = f"{name}.{key}".removeprefix(".")
            place = owner.parameters.get(key)
            if place is None:
                place = owner.parameters[key] = ParameterPlace(full, owner)
                place.watched = owner.watched and self._wants(place.names, None)
            known = self._known(id(parameter))
            if known is None:  # a tied weight goes by its first name
                self._parameters[id(parameter)] = reference, key, place
                self.changes += 1
            elif known is not place:
                owner.parameters[key] = known  # so that this module, too, knows its rows
                if full not in known.aliases:
                    known.aliases.append(full)
        scripted = isinstance(module, torch.jit.ScriptModule)  # which has no such dict
        for key in dict(module.named_buffers(recurse=False)) if scripted else module._buffers:  # noqa: SLF001
            if key not in owner.buffers:
                full = f"{name}.{key}".removeprefix(".")
                buffer = owner.buffers[key] = SinglePlace(full, owner, Kind.BUFFER)
                buffer.watched = owner.watched and self._wants(buffer.names, None)
                buffer.is_statistic = key.startswith("running_") and isinstance(module, _NormBase)
                buffer.is_saved = key not in getattr(module, "_non_persistent_buffers_set", ())
                self._buffers.append((reference, key, buffer))

    def forget_moved(self) -> None:
        """Forgets parameters that their modules have no longer."""
        for parameter in [p for p in self._parameters if self._known(p) is None]:
            del self._parameters[parameter]
