"""BackwardOrder: in which order backward completes the gradients of parameters.

It is read off the autograd graph, before a backward starts. A graph is not read again if as many
nodes were made since the last backward, and as many sites visited, as for one that was read.
"""

from __future__ import annotations

import functools
import heapq
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from nanscan._data.places import ParameterPlace

_MAX_NODES = 50_000  # of one graph: 0.1 s to read
_MAX_GRAPHS = 64
_FREE = 8  # graphs that are read at any price; later ones for at most this share of the time
_MAX_SHARE = 0.01

Node = Any  # torch.autograd.graph.Node; torch does not type what we ask of it
Key = ParameterPlace | int  # a parameter's place, or its id where no known module has it
PlaceOf = Callable[[torch.Tensor], ParameterPlace | None]


@dataclass
class Graph:
    """What was read off one autograd graph.

    Attributes:
        groups: parameters by the position of the node that makes their gradients.
        functions: position of each node that is a user's Function, by its sequence number. It may
            run a backward of its own, as a checkpoint does.
        inner: such backwards: the position of the node that ran them, and their graphs.
    """

    groups: dict[int, list[Key]]
    functions: dict[int, int]
    inner: list[tuple[int, Graph]] = field(default_factory=list)

    @functools.cached_property
    def has_known(self) -> bool:
        """Whether it makes the gradient of a parameter of a known module."""
        return any(isinstance(key, ParameterPlace) for keys in self.groups.values() for key in keys)

    def order(self) -> list[Key]:
        """All parameters, the first to have its gradient first."""
        parts = [(position, 0, graph.order()) for position, graph in self.inner]
        parts += [(position, 1, keys) for position, keys in self.groups.items()]
        return [key for *_, keys in sorted(parts, key=lambda part: part[:2]) for key in keys]


class BackwardOrder:
    """One order of all parameters, which follows the latest graphs.

    Args:
        place_of: a parameter's place; None where no known module has it.

    Attributes:
        ranks: position of each parameter.
        version: changes with them.
        is_of_known: the latest backward makes the gradient of a parameter of a known module, as far
            as its graph was read.
    """

    def __init__(self, place_of: PlaceOf) -> None:
        self.ranks: dict[Key, int] = {}
        self.version = 0
        self.is_of_known = False
        self._place_of = place_of
        self._graphs: dict[tuple[int, ...], Graph] = {}
        self._current: tuple[int, ...] = ()  # key of the graph whose order comes first
        self._is_running = False  # a backward whose graph was just read
        self._disagree = False  # two graphs order some parameters differently
        self._latest = 0  # sequence number of the last root
        self._began, self._seconds = time.perf_counter(), 0.0
        self._paused_at = self._began

    def pause(self) -> None:
        """No backward is told until `resume`: that time does not count."""
        self._paused_at = time.perf_counter()

    def resume(self) -> None:
        """Backwards are told again."""
        self._began += time.perf_counter() - self._paused_at

    def rank(self, place: ParameterPlace, parameter: torch.Tensor) -> int | None:
        """Position of a parameter; None: no graph that was read has it."""
        return self.ranks.get(place, self.ranks.get(id(parameter)))

    def on_before_backward(self, tensors: Any, visits: int, running: Node | None) -> None:
        """A backward is about to start.

        Args:
            tensors: from where.
            visits: sites visited in this step: what the graph may differ in.
            running: the node that starts it, where that is a part of another backward.
        """
        tensors = (tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors)
        roots = [root for x in tensors if (root := getattr(x, "grad_fn", None)) is not None]
        if running is not None:
            self._read_inner(roots, running)
            return
        self._is_running = False
        latest = max((root._sequence_nr() for root in roots), default=self._latest)  # noqa: SLF001
        key = (latest - self._latest, len(roots), visits)
        self._latest = latest
        graph = self._graphs.get(key)
        self.is_of_known = graph is not None and graph.has_known
        if graph is None:
            if not self._may_read():
                return
            graph = self._read(roots)
            self.is_of_known = graph.has_known
            if len(self._graphs) >= _MAX_GRAPHS:
                self._graphs.pop(next(iter(self._graphs)))
            self._graphs[key] = graph
            self._is_running = bool(graph.functions)
        elif key == self._current or not self._disagree:
            return
        self._current = key
        self._follow(graph)

    def on_after_backward(self) -> None:
        """It ended, with the backwards inside it."""
        if self._is_running:
            self._is_running = False
            self._follow(self._graphs[self._current])

    def _may_read(self) -> bool:
        elapsed = time.perf_counter() - self._began
        return len(self._graphs) < _FREE or self._seconds < _MAX_SHARE * elapsed

    def _read(self, roots: list[Node]) -> Graph:
        began = time.perf_counter()
        graph = read(roots, self._place_of)
        self._seconds += time.perf_counter() - began
        return graph

    def _read_inner(self, roots: list[Node], running: Node) -> None:
        if not self._is_running:
            return
        outer = self._graphs[self._current]
        position = outer.functions.get(running._sequence_nr())  # noqa: SLF001
        if position is not None:
            outer.inner.append((position, self._read(roots)))

    def _follow(self, graph: Graph) -> None:
        """Orders its parameters as it does, and all others by their next one among these."""
        order, old = graph.order(), list(self.ranks)
        own, waiting, before = set(order), list[Key](), dict[Key, list[Key]]()
        for key in old:
            if key in own:
                before[key], waiting = waiting, []
            else:
                waiting.append(key)
        merged = [k for key in order for k in (*before.get(key, ()), key)] + waiting
        if merged == old:
            return
        self.ranks = {key: position for position, key in enumerate(merged)}
        self.version += 1
        ranks = [self.ranks[key] for key in old]
        self._disagree |= ranks != sorted(ranks)


def read(roots: list[Node], place_of: PlaceOf) -> Graph:
    """Plays a backward: a node runs once all that it waits for did, the youngest first.

    A parameter comes where the gradient that becomes its own leaves what has other inputs as well:
    casts and views of a parameter alone count for nothing.
    """
    nodes, waits_for = _explore(roots)
    ready = [(-node._sequence_nr(), i, node) for i, node in enumerate(set(roots) & set(nodes))]  # noqa: SLF001
    ready = [entry for entry in ready if not waits_for.get(entry[2])]
    heapq.heapify(ready)
    came_by: dict[Node, int] = {}
    leaves: dict[int, list[tuple[int, torch.Tensor]]] = {}  # by the branching they hang on
    functions: dict[int, int] = {}
    position, count = 0, 0
    while ready:
        number, _, node = heapq.heappop(ready)
        position += 1
        edges = nodes[node]
        branching = position if len(edges) > 1 else came_by.get(node, position)
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            functions[-number] = position
        for child in edges:
            if child is None:
                continue
            waits_for[child] -= 1
            if waits_for[child]:
                continue
            if nodes[child]:
                came_by[child], count = branching, count + 1
                heapq.heappush(ready, (-child._sequence_nr(), -count, child))  # noqa: SLF001
            elif isinstance(leaf := getattr(child, "variable", None), torch.Tensor):
                leaves.setdefault(branching, []).append((position, leaf))
    groups = {branching: _in_order(group, place_of) for branching, group in leaves.items()}
    return Graph(groups, functions)


def _explore(roots: list[Node]) -> tuple[dict[Node, list[Node | None]], dict[Node, int]]:
    """Edges of each node, and how many lead to it; nothing of a graph that is too large."""
    nodes: dict[Node, list[Node | None]] = {}
    waits_for: dict[Node, int] = {}
    stack = list(roots)
    while stack:
        node = stack.pop()
        if node in nodes:
            continue
        if len(nodes) == _MAX_NODES:
            return {}, {}
        nodes[node] = edges = [function for function, _ in node.next_functions]
        for child in edges:
            if child is not None:
                waits_for[child] = waits_for.get(child, 0) + 1
                stack.append(child)
    return nodes, waits_for


def _in_order(leaves: list[tuple[int, torch.Tensor]], place_of: PlaceOf) -> list[Key]:
    """Parameters that hang on one node, each with the position of the last node before it.

    Modules come by their first one, and a node that holds several, as compiled code is, ends with
    what it began with. A module's own parameters come as it has them, the weight first.
    """
    owners: dict[object, list[tuple[int, Key]]] = {}
    arrived: dict[object, tuple[int, int]] = {}
    for number, (position, parameter) in enumerate(leaves):
        place = place_of(parameter)
        owner = None if place is None else place.parent
        if place is None and not isinstance(parameter, torch.nn.Parameter):
            continue  # an input of the model
        own = list(owner.parameters.values()) if owner is not None else []
        entry = (own.index(place), place) if place in own else (number, place or id(parameter))
        owners.setdefault(owner, []).append(entry)
        arrived.setdefault(owner, (position, -number))
    return [
        key
        for owner in sorted(owners, key=arrived.__getitem__)
        for _, key in sorted(owners[owner], key=lambda entry: entry[0])
    ]
