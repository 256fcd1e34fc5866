"""Names of places: which module, parameter or argument a row of the table stands for."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from nanscan._data.frames import is_compiler_calling, modules_calling
from nanscan._data.places import ModulePlace, ParameterPlace, SinglePlace
from nanscan._data.site import Kind

# By qualified name and, for a module, the module itself.
Wants = Callable[[str, nn.Module | None], bool]
# id, place, outermost, watched, sentinel; as nanscan._C.Calls.add takes them.
OnAdd = Callable[[int, "ModulePlace", bool, bool, bool], None]


class Registry:
    """Modules and parameters by identity, without keeping any of them alive.

    Args:
        model: watch this model only; None: every module that is ever called.
        wants: whether to watch a module, and its parameters and buffers, by qualified name.
    """

    def __init__(self, model: nn.Module | None, wants: Wants) -> None:
        self.only = model is not None
        self._wants = wants
        self._lock = threading.RLock()
        self.places: dict[int, ModulePlace] = {}  # by id(module)
        # By id(parameter): the module that has it, under which name, and its place. No weak
        # reference to the parameter: torch.utils.swap_tensors, and so Module.to, would refuse it.
        self._parameters: dict[int, tuple[weakref.ref[nn.Module], str, ParameterPlace]] = {}
        self._by_name: dict[str, ModulePlace] = {}
        self._loose: dict[str, ParameterPlace] = {}  # parameters of no known module, by name
        self._single: dict[tuple[str, Kind], SinglePlace] = {}  # the loss, and probes
        # Buffers: the module that has it, under which name, and its place.
        self._buffers: list[tuple[weakref.ref[nn.Module], str, SinglePlace]] = []
        self._roots: dict[str, weakref.ref[nn.Module]] = {}
        self._lifetimes: dict[int, weakref.ref[nn.Module]] = {}
        self._ignored: set[int] = set()  # ids of modules that are not the user's, or the model's
        # Callers with classes of modules that were looked for in the model, and are not in it.
        self._foreign: set[tuple[ModulePlace | None, type[nn.Module]]] = set()
        self.changes = 0  # how often a module or parameter was added
        self._on_add: OnAdd | None = None
        self._on_ignore: Callable[[int], None] | None = None
        self._on_forget: Callable[[int], None] | None = None
        if model is not None:
            self._add_root(model)

    def listen(
        self, on_add: OnAdd, on_ignore: Callable[[int], None], on_forget: Callable[[int], None]
    ) -> None:
        """Tells of each module, now and later, of those to be ignored, and of its end."""
        self._on_add, self._on_ignore, self._on_forget = on_add, on_ignore, on_forget
        for key, place in self.places.items():
            on_add(key, place, *self._role(place))

    def _role(self, place: ModulePlace) -> tuple[bool, bool, bool]:
        """Whether a module is outermost, watched, and a sentinel: it, or one right inside it."""
        around = place.parent
        return around is None, place.watched, around is None or around.parent is None

    def modules(self) -> Iterator[tuple[nn.Module, ModulePlace]]:
        """Every module that is known and alive."""
        for key, reference in list(self._lifetimes.items()):
            module = reference()
            if module is not None and key in self.places:
                yield module, self.places[key]

    def all_places(self) -> Iterator[ModulePlace | ParameterPlace | SinglePlace]:
        """Everything that ever had a name."""
        for place in self._by_name.values():
            yield place
            yield from place.parameters.values()
            yield from place.buffers.values()
            yield from place.attributes.values()
        yield from self._loose.values()
        yield from self._single.values()

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

    def attribute(self, owner: ModulePlace, path: str) -> SinglePlace:
        """A tensor that a module holds as a plain attribute, such as `cache[1]`."""
        place = owner.attributes.get(path)
        if place is None:
            is_first = owner.name == next(iter(self._roots), "")
            place = SinglePlace(path if is_first else f"{owner.name}.{path}", owner, Kind.BUFFER)
            place.watched = owner.watched and self._wants(place.name, None)
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

    def discover(self, module: nn.Module, caller: ModulePlace | None) -> ModulePlace | None:
        """Names a module that was called and is not known; None where it is not to be watched.

        Args:
            module: the module.
            caller: the innermost module that is running, if any.
        """
        if id(module) in self._ignored:
            return None
        with self._lock:  # threads may meet one module at once
            if id(module) in self.places:
                return self.places[id(module)]
            if self.only:
                return self._find_new(module, caller)
            if isinstance(module, torch.fx.GraphModule) and is_compiler_calling():
                self._ignore(module)
                return None
            return self._add_called(module) if caller is None else self._add_inside(module, caller)

    def _add_inside(self, module: nn.Module, caller: ModulePlace) -> ModulePlace:
        # Modules made anew in each forward: all of one class in one parent share a place.
        made_inside = f"{caller.name}.<{type(module).__name__}>"
        if made_inside not in self._by_name:
            self.rescan()
            if id(module) in self.places:
                return self.places[id(module)]
        return self._add(module, made_inside, caller)

    def _find_new(self, module: nn.Module, caller: ModulePlace | None) -> ModulePlace | None:
        """The place of a module that was put into the model since; None for any other module."""
        kind = caller, type(module)
        if kind not in self._foreign:
            self.rescan()
            if id(module) in self.places:
                return self.places[id(module)]
            # Code that makes such modules anew in each forward is not to cost a look each time.
            self._foreign.add(kind)
        self._ignore(module)
        return None

    def _add_called(self, module: nn.Module) -> ModulePlace | None:
        """Names a module that no running one contains, after one whose method calls it."""
        outermost = module
        for caller in modules_calling():
            if id(caller) not in self._ignored and any(m is module for m in caller.modules()):
                outermost = caller
        if id(outermost) in self.places:  # it has got a new module inside
            self.rescan()
        else:
            self._add_root(outermost)
        return self.places.get(id(module)) or self._add_root(module)

    def rescan(self) -> None:
        """Looks for what was added to known outermost modules, or taken away, since."""
        with self._lock:
            for parameter in [p for p in self._parameters if self._known(p) is None]:
                del self._parameters[parameter]
            for label, reference in list(self._roots.items()):
                module = reference()
                if module is not None:
                    self._add_tree(module, label)

    def _add_root(self, module: nn.Module) -> ModulePlace:
        """Names a module that no known one contains, and all it contains."""
        type_name = type(module).__name__
        label, number = type_name, 1
        while (root := self._roots.get(label)) is not None and root() not in (None, module):
            number += 1
            label = f"{type_name}#{number}"
        self._roots[label] = weakref.ref(module)
        return self._add_tree(module, label)

    def _add_tree(self, root: nn.Module, label: str) -> ModulePlace:
        # The first model's names are those of named_modules(); later ones carry their label.
        prefix = "" if next(iter(self._roots)) == label else f"{label}."
        for name, module in root.named_modules():
            if id(module) not in self.places:
                parent = None
                if name:
                    parent = self.places[id(root.get_submodule(name.rpartition(".")[0]))]
                self._add(module, prefix + name if name else label, parent)
            self._add_parameters(module, prefix + name if name else prefix.removesuffix("."))
        return self.places[id(root)]

    def _add(self, module: nn.Module, name: str, parent: ModulePlace | None) -> ModulePlace:
        place = self._by_name.get(name)
        if place is None:
            place = ModulePlace(name, parent)
            place.watched = self._wants(name, module)
            self._by_name[name] = place
        key = id(module)
        self.changes += 1
        self._ignored.discard(key)
        self.places[key] = place
        if self._on_add is not None:
            self._on_add(key, place, *self._role(place))
        self._lifetimes[key] = weakref.ref(module, lambda _: self._forget(key))
        return place

    def _add_parameters(self, module: nn.Module, name: str) -> None:
        owner, reference = self.places[id(module)], self._lifetimes[id(module)]
        for key, parameter in module.named_parameters(recurse=False):
            full = f"{name}.{key}".removeprefix(".")
            place = owner.parameters.get(key)
            if place is None:
                place = owner.parameters[key] = ParameterPlace(full, owner)
                place.watched = owner.watched and self._wants(full, None)
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
                buffer.watched = owner.watched and self._wants(full, None)
                buffer.is_statistic = key.startswith("running_") and isinstance(module, _NormBase)
                buffer.is_saved = key not in getattr(module, "_non_persistent_buffers_set", ())
                self._buffers.append((reference, key, buffer))

    def _ignore(self, module: nn.Module) -> None:
        """A graph that a compiler made and runs, or what is no part of the watched model."""
        key = id(module)
        self._ignored.add(key)
        if self._on_ignore is not None:
            self._on_ignore(key)
        self._lifetimes[key] = weakref.ref(module, lambda _: self._forget(key))

    def _forget(self, key: int) -> None:
        self.places.pop(key, None)
        self._ignored.discard(key)
        if self._on_forget is not None:
            self._on_forget(key)
        self._lifetimes.pop(key, None)
