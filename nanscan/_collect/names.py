"""Names of places: which module, parameter or argument a row of the table stands for."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from nanscan._collect.compiled_modules import (
    CompiledModules,
    is_wrapper,
    named_modules,
    unwrapped,
)
from nanscan._collect.renaming import lies_in, nested_in, rename
from nanscan._collect.tensors import KnownTensors, Wants
from nanscan._data.frames import is_compiler_calling, modules_calling
from nanscan._data.places import ModulePlace, ParameterPlace, SinglePlace

# id, place, outermost, watched, sentinel; as nanscan._C.Calls.add takes them.
OnAdd = Callable[[int, "ModulePlace", bool, bool, bool], None]
OnIgnore = Callable[[int, bool], None]  # id; whether it was called outside of the model


@dataclass
class _Root:
    """An outermost module.

    Attributes:
        module: the latest one of that label.
        prefix: what the names of all inside begin with: "" where they are the model's own.
    """

    module: weakref.ref[nn.Module]
    prefix: str


class Registry(KnownTensors):
    """Modules and parameters by identity, without keeping any of them alive.

    Args:
        model: watch this model only; None: every module that is ever called.
        wants: whether to watch a module, and its parameters and buffers, by qualified name.
    """

    def __init__(self, model: nn.Module | None, wants: Wants) -> None:
        super().__init__(wants, only=model is not None)
        self._lock = threading.RLock()
        self.places: dict[int, ModulePlace] = {}  # by id(module)
        self._by_name: dict[str, ModulePlace] = {}
        self._roots: dict[str, _Root] = {}  # by label: its class, with a number for later ones
        self._lifetimes: dict[int, weakref.ref[nn.Module]] = {}
        self._latest: dict[ModulePlace, weakref.ref[nn.Module]] = {}  # the module of a place
        self._ignored: set[int] = set()  # ids of modules that are not the user's, or the model's
        # Callers with classes of modules that were looked for in the model, and are not in it.
        self._foreign: set[tuple[ModulePlace | None, type[nn.Module]]] = set()
        self.step: Callable[[], int] = lambda: 0  # the current one
        # Whether places may get other names now: not while a report of this step has the old ones.
        self.may_rename: Callable[[], bool] = lambda: True
        self._on_add: OnAdd | None = None
        self._on_ignore: OnIgnore | None = None
        self._on_forget: Callable[[int], None] | None = None
        self.compiled = CompiledModules()
        if model is not None:
            self._add_root(unwrapped(model))

    def listen(self, on_add: OnAdd, on_ignore: OnIgnore, on_forget: Callable[[int], None]) -> None:
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

    def prefix(self, place: ModulePlace) -> str:
        """What names of what a module has begin with."""
        root = self._roots.get(place.name)
        return f"{place.name}." if root is None else root.prefix

    def discover(self, module: nn.Module, caller: ModulePlace | None) -> ModulePlace | None:
        """Names a module that was called and is not known; None where it is not to be watched.

        Args:
            module: the module.
            caller: the innermost module that is running, if any.
        """
        if not self.only and id(module) in self._ignored:
            return None
        with self._lock:  # threads may meet one module at once
            if id(module) in self.places:
                return self.places[id(module)]
            if is_wrapper(module):
                return self._add_wrapper(module, caller)
            if self.only:
                return self._find_new(module, caller)
            if isinstance(module, torch.fx.GraphModule) and is_compiler_calling():
                self._ignore(module, outside=False)
                return None
            return self._add_called(module) if caller is None else self._add_inside(module, caller)

    def _add_wrapper(self, wrapper: nn.Module, caller: ModulePlace | None) -> ModulePlace | None:
        """What torch.compile returned stands for its module, which may run without its own call."""
        module = unwrapped(wrapper)
        place = self.places.get(id(module)) or self.discover(module, caller)
        if place is None:
            self._ignore(wrapper, outside=caller is None)
            return None
        self.compiled.note(place, self.step())
        key = id(wrapper)
        self._lifetimes[key] = weakref.ref(wrapper, lambda _: self._forget(key))
        if self._on_add is not None:
            self._on_add(key, place, *self._role(place))
        return place

    def _is_part(self, module: nn.Module, caller: ModulePlace | None) -> bool:
        """Whether a module lies in the one that calls it; in any outermost one if none does."""
        around = [self._latest.get(caller)] if caller else [r.module for r in self._roots.values()]
        return lies_in(module, [m for ref in around if ref and (m := ref()) is not None])

    def _add_inside(self, module: nn.Module, caller: ModulePlace) -> ModulePlace:
        # Modules made anew in each forward: all of one class in one parent share a place.
        made_inside = f"{caller.name}.<{type(module).__name__}>"
        if made_inside not in self._by_name or self._is_part(module, caller):
            self.rescan()
            if id(module) in self.places:
                return self.places[id(module)]
        return self._add(module, made_inside, caller)

    def _find_new(self, module: nn.Module, caller: ModulePlace | None) -> ModulePlace | None:
        """The place of a module that was put into the model since; None for any other module."""
        kind = caller, type(module)
        if kind not in self._foreign or self._is_part(module, caller):
            self.rescan()
            if id(module) in self.places:
                return self.places[id(module)]
            # Code that makes such modules anew in each forward is not to cost a look each time.
            self._foreign.add(kind)
        for part in module.modules() if caller is None else (module,):
            if id(part) not in self.places:
                self._ignore(part, outside=caller is None)
        return None

    def _add_called(self, module: nn.Module) -> ModulePlace | None:
        """Names a module that no running one contains, after one whose method calls it."""
        outermost = module
        for caller in modules_calling():
            is_known_other = id(caller) in self._ignored or is_wrapper(caller)
            if not is_known_other and any(m is module for m in caller.modules()):
                outermost = caller
        if id(outermost) in self.places or self._is_part(module, None):  # it has got new modules
            self.rescan()
        else:
            self._add_root(outermost)
        return self.places.get(id(module)) or self._add_root(module)

    def rescan(self) -> None:
        """Looks for what was added to known outermost modules, or taken away, since."""
        with self._lock:
            self.forget_moved()
            self._add_new_parts(is_early=self.step() == 0)

    def _add_new_parts(self, *, is_early: bool) -> None:
        for label, root in list(self._roots.items()):
            module = root.module()
            if module is not None and label in self._roots:
                self._take_in(label, module, is_early=is_early)
                self._add_tree(module, label, root.prefix)

    # -- outermost modules, and names ------------------------------------------------------------

    @property
    def roots(self) -> list[nn.Module]:
        """Outermost modules that are alive."""
        return [m for root in self._roots.values() if (m := root.module()) is not None]

    def has_prefix(self, place: ParameterPlace) -> bool:
        """Whether the names of its model begin with the class."""
        *_, outermost = place.parents()
        return outermost.name not in self._roots or bool(self._roots[outermost.name].prefix)

    def add_root(self, module: nn.Module) -> None:
        """Adds an outermost module that was not called. Known ones inside become its parts."""
        with self._lock:
            self._add_root(module)
            self.merge()

    def merge(self) -> None:
        """Every outermost module that lies in another one becomes a part of it."""
        with self._lock:
            self._add_new_parts(is_early=True)

    def add_prefixes(self) -> None:
        """From now on the names of every model begin with its class."""
        with self._lock:
            for label, root in self._roots.items():
                if not root.prefix:
                    root.prefix = f"{label}."
                    self._rename(self._by_name[label], "", label, root.prefix)

    def _add_root(self, module: nn.Module) -> ModulePlace:
        """Names a module that no known one contains, and all it contains."""
        type_name = type(module).__name__
        label, number = type_name, 1
        while (old := self._roots.get(label)) is not None and old.module() not in (None, module):
            number += 1
            label = f"{type_name}#{number}"
        if old is not None:
            old.module = weakref.ref(module)
            return self._add_tree(module, label, old.prefix)
        # Names of one model are those of named_modules(); all others begin with their class. A
        # module without parts would leave no more than "weight": that is a name in a known model.
        is_bare = self.only or (
            any(True for _ in module.children()) and all(r.prefix for r in self._roots.values())
        )
        self._roots[label] = _Root(weakref.ref(module), "" if is_bare else f"{label}.")
        self._take_in(label, module, is_early=self.step() == 0)
        return self._add_tree(module, label, self._roots[label].prefix)

    def _take_in(self, label: str, module: nn.Module, *, is_early: bool) -> None:
        """Outermost modules that lie in another one become its parts.

        Args:
            label: of the other one.
            module: the other one.
            is_early: take in a single one, too. Later it keeps its name, as what is wrapped does.
        """
        if len(self._roots) == 1 or not self.may_rename():
            return
        nested = nested_in(module, {other: r.module() for other, r in self._roots.items()})
        own = [*module.parameters(recurse=False), *module.children()]
        if len(nested) < (1 if is_early and len(own) > 1 else 2):
            return
        root = self._roots[label]
        if root.prefix and not all(self._roots[other].prefix for other in nested):
            if label in self._by_name:
                self._rename(self._by_name[label], root.prefix, label, "")
            root.prefix = ""
        for other, path in nested.items():
            before, name = self._roots.pop(other).prefix, root.prefix + path
            self._rename(self._by_name[other], before, name, f"{name}.")

    def _rename(self, top: ModulePlace, before: str, name: str, after: str) -> None:
        for place in rename(self._by_name, top, before, name, after):
            self._set_watched(place)

    def _move_into(self, module: nn.Module, place: ModulePlace) -> ModulePlace | None:
        """Renames the module that had a name if the one that has it now contains it.

        As `model.fc = Adapter(model.fc)` does.

        Returns:
            Its place; None if it keeps its name.
        """
        reference = self._latest.get(place)
        old = reference and reference()
        if old is None or old is module or not self.may_rename():
            return None
        path = next((path for path, part in named_modules(module) if part is old), "")
        if not path or place.parent is None:
            return None
        name = f"{place.name}.{path}"
        self._rename(place, f"{place.name}.", name, f"{name}.")
        return place

    def _set_watched(self, place: ModulePlace) -> None:
        """Asks the filters again: under each of its names a module may be left out."""
        reference = self._latest.get(place)
        module = None if reference is None else reference()
        if module is None:
            return
        place.watched = self._wants(place.names, module)
        for own in place.own():
            own.watched = place.watched and self._wants(own.names, None)
        if self._on_add is not None:
            self._on_add(id(module), place, *self._role(place))

    def _add_tree(self, top: nn.Module, label: str, prefix: str) -> ModulePlace:
        """Names an outermost module and all it contains, as far as they have no name yet."""
        found: dict[str, ModulePlace] = {}
        for name, module in named_modules(top):
            parent = found[name.rpartition(".")[0]] if name else None
            place = self.places.get(id(module))
            if place is None:
                place = self._add(module, prefix + name if name else label, parent)
            elif place.parent is None and parent is not None and place.name not in self._roots:
                place.parent = parent
                for part in module.modules():  # which are no longer next to an outermost one
                    if id(part) in self.places:
                        self._set_watched(self.places[id(part)])
            found[name] = place
            stem = prefix + name if name else prefix.removesuffix(".")
            self.add_tensors(module, self._lifetimes[id(module)], place, stem)
        return self.places[id(top)]

    def _add(self, module: nn.Module, name: str, parent: ModulePlace | None) -> ModulePlace:
        place = self._by_name.get(name)
        wrapped = None if place is None else self._move_into(module, place)
        if place is None or wrapped is not None:
            place = ModulePlace(name, parent)
            place.watched = self._wants(place.names, module)
            self._by_name[name] = place
        if wrapped is not None:
            wrapped.parent = place
        key = id(module)
        self.changes += 1
        self._ignored.discard(key)
        self.places[key] = place
        if self._on_add is not None:
            self._on_add(key, place, *self._role(place))
        self._lifetimes[key] = weakref.ref(module, lambda _: self._forget(key))
        self._latest[place] = self._lifetimes[key]
        return place

    def _ignore(self, module: nn.Module, *, outside: bool) -> None:
        """A graph that a compiler made and runs, or what is no part of the watched model.

        Args:
            module: the module.
            outside: no watched module called it. Where one does, it is looked at once more.
        """
        key = id(module)
        self._ignored.add(key)
        if self._on_ignore is not None:
            self._on_ignore(key, outside)
        self._lifetimes[key] = weakref.ref(module, lambda _: self._forget(key))

    def _forget(self, key: int) -> None:
        self.places.pop(key, None)
        self._ignored.discard(key)
        if self._on_forget is not None:
            self._on_forget(key)
        self._lifetimes.pop(key, None)
