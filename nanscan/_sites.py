"""Names of places: which module, parameter or argument a row of the table stands for."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

Kind = Literal[
    "input", "output", "grad_output", "grad", "param", "buffer", "state", "loss", "probe"
]
KINDS: tuple[Kind, ...] = get_args(Kind)
DEFAULT_KINDS: tuple[Kind, ...] = ("input", "output", "grad", "param", "buffer", "loss", "probe")

# By qualified name and, for a module, the module itself.
Wants = Callable[[str, nn.Module | None], bool]
# id, place, outermost, watched, sentinel; as nanscan._C.Calls.add takes them.
OnAdd = Callable[[int, "ModulePlace", bool, bool, bool], None]

_MAX_CHILDREN = 256  # of one container; later ones share a node, so that memory stays bounded
_MAX_SOURCES = 64
_RECOMPUTED = " (recomputed)"


@dataclass(frozen=True)
class Site:
    """A named place in a model.

    Attributes:
        name: qualified name of the module or parameter; the root module goes by its class.
        kind: what of it: "input", "output", "grad_output" (the gradient that reaches an output),
            "param", "grad", "buffer", "state" (an optimizer's moment), "loss" or "probe".
        path: argument path, such as "[0]", ".mask" or "[1].hidden"; the name of the moment for
            "state"; "" for a module's only output; " (recomputed)" at its begin where a checkpoint
            ran the module again in backward.
    """

    name: str
    kind: Kind
    path: str = ""

    def __str__(self) -> str:
        if self.kind == "loss":
            return f"loss{self.path}"
        if self.kind == "state":
            return f"{self.name} {self.path}"
        return f"{self.name} {self.kind}{self.path}"


class Place:
    """What sites belong to, by name: a module or a parameter.

    Attributes:
        name: qualified name.
        parent: the module around it; None for an outermost one.
        watched: no filter leaves it out.
    """

    __slots__ = ("name", "parent", "watched")

    def __init__(self, name: str, parent: ModulePlace | None) -> None:
        self.name = name
        self.parent = parent
        self.watched = True

    def is_inside(self, other: Place) -> bool:
        """Whether this is `other` or lies within it."""
        place: Place | None = self
        while place is not None and place is not other:
            place = place.parent
        return place is not None


class ModulePlace(Place):
    """A module: its argument trees and its own parameters and buffers.

    Attributes:
        called: it ran at least once.
        swept: for an outermost module: its parameters were scanned before its first call.
    """

    __slots__ = (
        "buffers",
        "called",
        "inputs",
        "keywords",
        "outputs",
        "parameters",
        "recomputed",
        "swept",
    )

    def __init__(self, name: str, parent: ModulePlace | None, *, late_keywords: bool) -> None:
        super().__init__(name, parent)
        self.called = False
        self.swept = False
        self.inputs = Node(self, "input")
        self.keywords = Node(self, "input", late=late_keywords)
        self.outputs = Node(self, "output")
        self.recomputed = Node(self, "output", _RECOMPUTED)
        self.parameters: dict[str, ParameterPlace] = {}
        self.buffers: dict[str, SinglePlace] = {}

    def nodes(self) -> Iterator[Node]:
        """Every position of it that was seen so far, its parameters' and buffers' aside."""
        yield from self.input_nodes()
        for node in (*self.outputs.walk(), *self.recomputed.walk()):
            yield node
            if node.gradient is not None:
                yield node.gradient

    def input_sources(self) -> set[int]:
        """Rows in which its inputs were found."""
        return {row for node in self.input_nodes() for row in node.sources}

    def parameter_sources(self) -> set[int]:
        """Rows in which its own parameters were found."""
        return {row for place in self.parameters.values() for row in place.param.sources}

    def input_nodes(self) -> Iterator[Node]:
        """Every argument position seen so far."""
        yield from self.inputs.walk()
        yield from self.keywords.walk()


class SinglePlace(Place):
    """What has one site: a buffer, the loss, a probe.

    Attributes:
        is_statistic: a running statistic of a normalisation layer: never a mask, and changed by
            torch without a change of its version.
    """

    __slots__ = ("is_statistic", "node")

    def __init__(self, name: str, parent: ModulePlace | None, kind: Kind) -> None:
        super().__init__(name, parent)
        self.node = Node(self, kind)
        self.is_statistic = False

    def nodes(self) -> Iterator[Node]:
        """All that was seen there."""
        return self.node.walk()


class ParameterPlace(Place):
    """A parameter with its gradient and its optimizer moments.

    Attributes:
        aliases: its other names, where weights are tied.
    """

    __slots__ = ("aliases", "grad", "param", "state")

    def __init__(self, name: str, parent: ModulePlace | None) -> None:
        super().__init__(name, parent)
        self.aliases: list[str] = []
        self.param = Node(self, "param")
        self.grad = Node(self, "grad")
        self.state: dict[str, Node] = {}

    def nodes(self) -> Iterator[Node]:
        """The parameter, its gradient and its moments."""
        yield from (self.param, self.grad, *self.state.values())

    def moment(self, name: str) -> Node:
        """The node of an optimizer moment, such as "exp_avg"."""
        return self.state.setdefault(name, Node(self, "state", name))


class Node:
    """One position in an argument tree, or one parameter, gradient or moment.

    Attributes:
        row: its row in the table, -1 until something was scanned for it.
        sources: rows in which the tensors seen here were found, this node's own among them.
        computed: autograd had a history of the tensor first scanned here: it came out of some code.
        late: scanned after the module ran, though it went in before (keyword arguments of global
            hooks).
        skipped: why what was seen here was not scanned, if so.
        gradient: of an output: what is seen of its gradient.
        hook: of an output: scans a gradient into that.
        hooked: a tensor that has this hook, and nothing else to it.
    """

    __slots__ = (
        "children",
        "computed",
        "gradient",
        "hook",
        "hooked",
        "items",
        "kind",
        "late",
        "path",
        "place",
        "row",
        "skipped",
        "sources",
    )

    def __init__(self, place: Place, kind: Kind, path: str = "", *, late: bool = False) -> None:
        self.place = place
        self.kind = kind
        self.path = path
        self.late = late
        self.computed = False
        self.row = -1
        self.sources: set[int] = set()
        self.skipped = ""
        self.gradient: Node | None = None
        self.hook: Callable[[Any], None] | None = None
        self.hooked: torch.Tensor | None = None
        self.items: list[Node] = []  # children by position
        self.children: dict[object, Node] = {}  # children by key

    @property
    def site(self) -> Site:
        return Site(self.place.name, self.kind, self.path)

    def item(self, index: int) -> Node:
        """The child at a position of a tuple or list."""
        items = self.items
        if index < len(items):
            return items[index]
        while len(items) <= min(index, _MAX_CHILDREN - 1):
            label = f"[{len(items)}{'+' if len(items) == _MAX_CHILDREN - 1 else ''}]"
            items.append(self._below(label))
        return items[-1]

    def child(self, key: object) -> Node:
        """The child under a key of a mapping, a field or an attribute."""
        node = self.children.get(key)
        if node is None:
            if len(self.children) >= _MAX_CHILDREN:
                key = "..."
            label = f".{key}" if isinstance(key, str) else f"[{key!r}]"
            node = self.children.setdefault(key, self._below(label))
        return node

    def _below(self, label: str) -> Node:
        return Node(self.place, self.kind, self.path + label, late=self.late)

    def first_time(self) -> Node:
        """Of an output that a checkpoint recomputed: the same position in the first forward."""
        place = self.place
        if not isinstance(place, ModulePlace) or not self.path.startswith(_RECOMPUTED):
            return self
        path = self.path.removeprefix(_RECOMPUTED)
        return next((node for node in place.outputs.walk() if node.path == path), self)

    def add_source(self, row: int) -> None:
        if len(self.sources) < _MAX_SOURCES:
            self.sources.add(row)

    def walk(self) -> Iterator[Node]:
        """This node and all below it."""
        yield self
        for node in (*self.items, *self.children.values()):
            yield from node.walk()


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
        self._on_add: OnAdd | None = None
        self._on_forget: Callable[[int], None] | None = None
        if model is not None:
            self._add_root(model)

    def listen(self, on_add: OnAdd, on_forget: Callable[[int], None]) -> None:
        """Tells of each module, now and later, and of its end."""
        self._on_add, self._on_forget = on_add, on_forget
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
            if module is not None:
                yield module, self.places[key]

    def all_places(self) -> Iterator[ModulePlace | ParameterPlace | SinglePlace]:
        """Everything that ever had a name."""
        for place in self._by_name.values():
            yield place
            yield from place.parameters.values()
            yield from place.buffers.values()
        yield from self._loose.values()
        yield from self._single.values()

    def single(self, name: str, kind: Kind) -> SinglePlace:
        """The loss, or a probe of that name."""
        return self._single.setdefault((name, kind), SinglePlace(name, None, kind))

    def buffers(self) -> Iterator[tuple[torch.Tensor, SinglePlace]]:
        """Every buffer that a known module has now."""
        for reference, key, place in self._buffers:
            module = reference()
            buffer = getattr(module, key, None)
            if place.watched and isinstance(buffer, torch.Tensor):
                yield buffer, place

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

    @property
    def parameters_known(self) -> int:
        """How many parameters that modules still have were named."""
        return sum(self._known(parameter) is not None for parameter in self._parameters)

    def discover(self, module: nn.Module, caller: ModulePlace | None) -> ModulePlace | None:
        """Names a module that was called and is not known; None where it is not to be watched.

        Args:
            module: the module.
            caller: the innermost module that is running, if any.
        """
        if self.only:
            return None
        with self._lock:  # threads may meet one module at once
            if id(module) in self.places:
                return self.places[id(module)]
            if caller is None:
                return self._add_root(module)
            # Modules made anew in each forward: all of one class in one parent share a place.
            made_inside = f"{caller.name}.<{type(module).__name__}>"
            if made_inside not in self._by_name:
                self.rescan()
                if id(module) in self.places:
                    return self.places[id(module)]
            return self._add(module, made_inside, caller)

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
            self._add_parameters(module, prefix + name)
        return self.places[id(root)]

    def _add(self, module: nn.Module, name: str, parent: ModulePlace | None) -> ModulePlace:
        place = self._by_name.get(name)
        if place is None:
            place = ModulePlace(name, parent, late_keywords=not self.only)
            place.watched = self._wants(name, module)
            self._by_name[name] = place
        key = id(module)
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
            elif known is not place:
                owner.parameters[key] = known  # so that this module, too, knows its rows
                if full not in known.aliases:
                    known.aliases.append(full)
        scripted = isinstance(module, torch.jit.ScriptModule)  # which has no such dict
        for key in dict(module.named_buffers(recurse=False)) if scripted else module._buffers:  # noqa: SLF001
            if key not in owner.buffers:
                full = f"{name}.{key}".removeprefix(".")
                owner.buffers[key] = SinglePlace(full, owner, "buffer")
                owner.buffers[key].watched = owner.watched and self._wants(full, None)
                owner.buffers[key].is_statistic = key.startswith("running_") and isinstance(
                    module, _NormBase
                )
                self._buffers.append((reference, key, owner.buffers[key]))

    def _forget(self, key: int) -> None:
        self.places.pop(key, None)
        if self._on_forget is not None:
            self._on_forget(key)
        self._lifetimes.pop(key, None)
