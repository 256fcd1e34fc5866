"""The places of a model: modules and parameters, and the nodes in them that rows stand for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from operator import attrgetter
from typing import Any

import torch

from nanscan._data.site import Kind, Site

_MAX_CHILDREN = 256  # of one container; later ones share a node, so that memory stays bounded
_MAX_SOURCES = 64
_RECOMPUTED = " (recomputed)"


class Place:
    """What sites belong to, by name: a module or a parameter.

    Attributes:
        name: qualified name.
        parent: the module around it; None for an outermost one.
        watched: no filter leaves it out.
        former: names that it had before, and that nothing else has now.
    """

    __slots__ = ("former", "name", "parent", "watched")

    def __init__(self, name: str, parent: ModulePlace | None) -> None:
        self.name = name
        self.parent = parent
        self.watched = True
        self.former: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """All names that it may have been printed under."""
        return self.name, *self.former

    def rename(self, name: str) -> None:
        """Gives it another name; the old one stays known."""
        if name != self.name:
            self.former = (*self.former, self.name)
            self.name = name

    def parents(self) -> Iterator[ModulePlace]:
        """The modules around it, innermost first."""
        around = self.parent
        while around is not None:
            yield around
            around = around.parent

    def is_inside(self, other: Place) -> bool:
        """Whether this is `other` or lies within it."""
        place: Place | None = self
        while place is not None and place is not other:
            place = place.parent
        return place is not None


class ModulePlace(Place):
    """A module: its argument trees and its own parameters and buffers.

    Attributes:
        attributes: tensors that it holds as plain attributes, by path, once one was bad.
        called: it ran at least once.
        compiled_since: the step in which it was first seen to run as compiled code; None: it was
            not.
        swept: for an outermost module: its parameters were scanned before its first call.
    """

    __slots__ = (
        "attributes",
        "buffers",
        "called",
        "compiled_since",
        "inputs",
        "keywords",
        "outputs",
        "parameters",
        "recomputed",
        "swept",
    )

    def __init__(self, name: str, parent: ModulePlace | None) -> None:
        super().__init__(name, parent)
        self.called = False
        self.compiled_since: int | None = None
        self.swept = False
        self.inputs = Node(self, Kind.INPUT)
        self.keywords = Node(self, Kind.INPUT)
        self.outputs = Node(self, Kind.OUTPUT)
        self.recomputed = Node(self, Kind.OUTPUT, _RECOMPUTED)
        self.parameters: dict[str, ParameterPlace] = {}
        self.buffers: dict[str, SinglePlace] = {}
        self.attributes: dict[str, SinglePlace] = {}

    def user_of(
        self,
        owners: Collection[ModulePlace],
        runs: Callable[[ModulePlace], bool] = attrgetter("called"),
    ) -> ModulePlace | None:
        """Which of some modules uses the tensors of this one: itself, or the one around.

        A module inside of another that does not run through its own call is read by that one.

        Args:
            owners: the modules.
            runs: whether a module runs through its own call; as a rule, whether it ever did.
        """
        user: ModulePlace | None = self
        while user is not None and user not in owners:
            user = None if runs(user) else user.parent
        return user

    @property
    def compiled_region(self) -> ModulePlace | None:
        """The outermost module that runs as compiled code, of itself and those around it."""
        found = None
        for place in (self, *self.parents()):
            if place.compiled_since is not None:
                found = place
        return found

    def own(self) -> Iterator[Place]:
        """Its own parameters, buffers and tensors in attributes."""
        yield from (place for place in self.parameters.values() if place.parent is self)
        yield from self.buffers.values()
        yield from self.attributes.values()

    def rename_tree(self, name: str, before: str, after: str) -> None:
        """Renames it, with what it has itself.

        Args:
            name: its own new name.
            before: what the names of what it has begin with.
            after: what they will begin with.
        """
        self.rename(name)
        for key, parameter in self.parameters.items():
            parameter.replace_name(before + key, after + key)
        for key, single in (*self.buffers.items(), *self.attributes.items()):
            single.rename(after + key)

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
        is_saved: a buffer that a checkpoint holds.
    """

    __slots__ = ("is_saved", "is_statistic", "node")

    def __init__(self, name: str, parent: ModulePlace | None, kind: Kind) -> None:
        super().__init__(name, parent)
        self.node = Node(self, kind)
        self.is_statistic = False
        self.is_saved = True

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
        self.param = Node(self, Kind.PARAM)
        self.grad = Node(self, Kind.GRAD)
        self.state: dict[str, Node] = {}

    def replace_name(self, old: str, new: str) -> None:
        """Renames it where it goes by a name; else an alias of that name."""
        if self.name == old:
            self.rename(new)
        self.aliases = [new if alias == old else alias for alias in self.aliases]

    def nodes(self) -> Iterator[Node]:
        """The parameter, its gradient and its moments."""
        yield from (self.param, self.grad, *self.state.values())

    def moment(self, name: str) -> Node:
        """The node of an optimizer moment, such as "exp_avg"."""
        return self.state.setdefault(name, Node(self, Kind.STATE, name))


class Node:
    """One position in an argument tree, or one parameter, gradient or moment.

    Attributes:
        row: its row in the table, -1 until something was scanned for it.
        sources: rows in which the tensors seen here were found, this node's own among them.
        computed: autograd had a history of the tensor first scanned here: it came out of some code.
        is_written: of an argument: the call wrote into it, so it is memory, such as a cache.
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
        "is_written",
        "items",
        "kind",
        "path",
        "place",
        "row",
        "skipped",
        "sources",
    )

    def __init__(self, place: Place, kind: Kind, path: str = "") -> None:
        self.place = place
        self.kind = kind
        self.path = path
        self.computed = False
        self.is_written = False
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

    @property
    def sites(self) -> tuple[Site, ...]:
        """The same under all names that it may have been printed under."""
        return tuple(Site(name, self.kind, self.path) for name in self.place.names)

    @property
    def other_sites(self) -> tuple[Site, ...]:
        """The same under former names, and other names of a tied weight."""
        tied = self.place.aliases if isinstance(self.place, ParameterPlace) else ()
        return tuple(Site(name, self.kind, self.path) for name in (*tied, *self.place.former))

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
        return Node(self.place, self.kind, self.path + label)

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
