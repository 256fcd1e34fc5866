"""NewlyBad: what went bad of late, and which modules made it out of good values."""

from __future__ import annotations

from collections.abc import Iterator

from nanscan._collect.table import Table
from nanscan._data.places import ModulePlace, Node
from nanscan._data.site import Kind


class NewlyBad:
    """Rows on the host that went bad in this step, and those of them that are new.

    -Inf alone does not count where masks hold it.

    Args:
        table: the rows.
        since: the ticket from which on they are new.
    """

    def __init__(self, table: Table, since: int) -> None:
        self._table = table
        self._tickets = {
            table.nodes[row]: ticket
            for row, ticket, only_neginf in table.core.bad_rows
            if not (only_neginf and table.nodes[row].kind.may_be_mask)
        }
        self._rows = {node.row for node in self._tickets}
        self._new = [node for node, ticket in self._tickets.items() if ticket > since]

    def __bool__(self) -> bool:
        """Whether there are new ones."""
        return bool(self._new)

    @property
    def is_of_backward(self) -> bool:
        """Whether something new may have come up after a forward in which all was fine."""
        in_forward = any(node.kind in (Kind.INPUT, Kind.OUTPUT) for node in self._tickets)
        return not in_forward and any(node.kind.comes_late for node in self._new)

    def runs(self, place: ModulePlace) -> bool:
        """Whether a module ran by its own call of late: not since its model was compiled in place.

        Where nothing of it is ever scanned, whether it ever did.
        """
        # Not its inputs: the module around may have the same.
        rows = {row for node in place.outputs.walk() for row in node.sources}
        return place.called and (not rows or any(map(self._table.order, rows)))

    def owners(self) -> set[ModulePlace]:
        """Modules whose own forward may have made a bad value out of good inputs."""
        return {owner for node in self._new for owner in self._owners(node)}

    def makers(self) -> set[ModulePlace]:
        """Those of `owners` in which nothing else was bad before that explains the new value."""
        return {
            owner
            for node in self._new
            for owner in self._owners(node)
            if not self._is_explained(node, owner)
        }

    def _owners(self, node: Node) -> Iterator[ModulePlace]:
        place, around = node.place, _running_around(node.place.parent)
        if node.kind is Kind.INPUT and around is not None:
            yield around
        if node.kind is Kind.OUTPUT and isinstance(place, ModulePlace):
            sources = place.input_sources()
            if sources & self._rows:
                return
            yield place
            # What was not scanned on its way in may be the doing of the module around.
            if around is not None and not any(map(self._table.order, sources)):
                yield around

    def _is_explained(self, node: Node, owner: ModulePlace) -> bool:
        """Whether what went into a module, or was inside of it, was bad before, in all samples."""
        sources, ticket = owner.input_sources(), self._tickets[node]
        earlier = [
            row.row
            for row, other in self._tickets.items()
            if other < ticket and (row.row in sources or row.place.is_inside(owner))
        ]
        if not earlier:
            return False
        parts, size = self._table.core.bad_parts(node.row)
        for bits, other_size in map(self._table.core.bad_parts, earlier):
            if not size or other_size != size:
                return True  # as far as is known
            parts &= ~bits
        return not parts


def _running_around(place: ModulePlace | None) -> ModulePlace | None:
    """The module around that runs: not a ModuleList, unless nothing around it runs."""
    while place is not None and not place.called and place.parent is not None:
        place = place.parent
    return place
