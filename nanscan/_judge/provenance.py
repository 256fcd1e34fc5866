"""Provenance: which bad rows of one record follow from which, and where they end."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable

import numpy as np
import torch
from torch import nn

from nanscan._collect.snapshot import StepRecord
from nanscan._data.places import ModulePlace, Node, ParameterPlace, Place, SinglePlace
from nanscan._data.row import absmax
from nanscan._data.site import Kind
from nanscan._judge.near_limit import is_near

# They take -Inf among their inputs, and make NaN only of a row that holds nothing else.
_TAKES_MINUS_INF = (
    nn.Softmax,
    nn.LogSoftmax,
    nn.Softmax2d,
    nn.MultiheadAttention,
    nn.CrossEntropyLoss,
)
_LEADS_ON = tuple(kind for kind in Kind if kind.is_saved or kind.is_gradient or kind is Kind.LOSS)


class Provenance:
    """What each bad row of a record was made from, as far as the scans show it.

    Of an output the sources are known: the inputs of its module, its parameters and buffers, and
    what went bad inside. Of other rows they are not: then everything that is bad and did not end
    before counts. What goes into a module whose outputs are all finite ends there.

    Args:
        record: the record.
        bad: its bad rows, in the order in which they went bad.
        lasting: rows that were bad before the record and stay so: parameters, buffers, moments.
        late: those of `lasting` of models that first ran amid the same step.
        spoiled: those that other code has spoiled in the same step.
        before: other rows that were bad in the first part of the same step.
        emitted: outputs of outermost modules that were bad in the step before.
        tolerated: rows that were bad in earlier steps, which led to nothing.
        unset: buffers that were bad before their model first ran, see `Lasting`.
        near_limit: share of a dtype's largest value from which a finite value hints at an overflow.

    Attributes:
        bad: as given.
        lasting: as given.
        quiet: rows that mean nothing by themselves: -Inf alone, as masks hold it, and `unset`.
        sources: of each bad row those that it follows from, empty where it was made.
        roots: of each bad row the one with which it began: itself where it was made.
        behind: of buffers that are roots: what spoiled them began with.
        handed_in: bad rows that the caller of an outermost module handed in.
        unclear: inputs that the caller handed in, or code of a container that does not run made.
    """

    def __init__(  # noqa: PLR0913 - what is known of rows before this record
        self,
        record: StepRecord,
        bad: list[int],
        *,
        lasting: Collection[int],
        late: Collection[int],
        spoiled: Collection[int],
        before: Iterable[int],
        emitted: Collection[int],
        tolerated: Collection[int],
        unset: Collection[int],
        near_limit: float,
    ) -> None:
        self._record = record
        self.lasting = set(lasting)
        self._spoiled = spoiled
        self._tolerated = tolerated
        self._emitted = emitted
        self._finite: dict[ModulePlace, bool] = {}
        self.bad = bad
        self.quiet = {row for row in bad if is_minus_inf_alone(record, row, near_limit)}
        self.quiet |= set(unset)
        self.sources: dict[int, set[int]] = {}
        self.roots: dict[int, int] = {}
        self.behind: dict[int, int] = {}
        self.handed_in: set[int] = set()
        self.unclear: set[int] = set()
        self._first: dict[Kind, int] = {}  # of rows that were made for one reason
        self._known: set[int] = set()
        self._inside: dict[Place, set[int]] = {}  # of `_known`, by each place around
        self._live: list[int] = []  # what may be found in what comes next, quiet rows aside
        self._live_quiet: set[int] = set()
        self._has_made = False  # something of this record is live that no caller handed in
        for row in (*sorted(lasting), *before):
            self._add(row, is_late=row in late)
        for row in bad:
            self.sources[row] = self._sources(row)
            self.roots[row] = self._root(row)
            self._add(row)
            node = record.nodes[row]
            is_made = node.kind is not Kind.INPUT or record.around(node.place) is not None
            self._has_made |= is_made and bool(self._live) and self._live[-1] == row

    @functools.cached_property
    def is_training(self) -> bool:
        """Whether the record has a loss or gradients."""
        return any(self._record.nodes[row].kind.is_scaled for row in self._record.scanned())

    # -- groups of rows with one root --------------------------------------------------------------

    def groups(self) -> list[list[int]]:
        """Rows with one root each, in the order of their first rows."""
        found: dict[int, list[int]] = {}
        for row in self.bad:
            found.setdefault(self.roots[row], []).append(row)
        return list(found.values())

    def leads_on(self, rows: list[int]) -> bool:
        """Whether rows reach what counts: loss, gradients, parameters, or what the model returns.

        Bad values that a caller handed in and that end inside of the model do not.
        """
        nodes = self._record.nodes
        return any(
            nodes[row].kind in _LEADS_ON or not (nodes[row].kind is Kind.PROBE or self.ends(row))
            for row in rows
        )

    def ends(self, row: int) -> bool:
        """Whether a module around a row, or the one that it is handed to, returned finite values.

        All outputs of the module were scanned then, and are finite in all its calls.
        """
        node = self._record.nodes[row]
        place: Place | None = node.place
        if node.kind not in (Kind.INPUT, Kind.PARAM, Kind.BUFFER):
            place = node.place.parent if node.kind is Kind.OUTPUT else None
        while place is not None:
            if isinstance(place, ModulePlace) and self._is_finite(place):
                return True
            place = place.parent
        return False

    def keeps(self, place: Place) -> bool:
        """Whether a module, or a part of it, holds something that was bad before."""
        return not self._inside.get(place, set()).isdisjoint(self.lasting)

    def is_returned(self, row: int) -> bool:
        """Whether an outermost module returned what is in a row."""
        place = self._record.nodes[row].place
        while (around := self._record.around(place)) is not None:
            place = around
        if not isinstance(place, ModulePlace):
            return False
        return any(row == node.row or row in node.sources for node in place.outputs.walk())

    def _is_finite(self, place: ModulePlace) -> bool:
        known = self._finite.get(place)
        if known is None:
            rows, scanned = self._record.rows, self._record.was_scanned
            found = {row for node in place.outputs.walk() for row in (node.row, *node.sources)}
            outputs = [row for row in found if scanned(row)]  # a child's, where it is handed on
            returned = max((int(rows[row]["calls"]) for row in outputs), default=0)
            inputs = [node.row for node in place.input_nodes() if scanned(node.row)]
            called = max((int(rows[row]["calls"]) for row in inputs), default=1)
            known = returned >= called and not any(rows[row]["ticket"] for row in outputs)
            self._finite[place] = known
        return known

    # -- what a row follows from -------------------------------------------------------------------

    def _root(self, row: int) -> int:
        if not self.sources[row]:
            return self._first_alike(row)
        # What was harmless so far explains a fault only if nothing else does.
        sources = self.sources[row] - set(self._tolerated) or self.sources[row]
        first = min(sources, key=lambda r: (r in self.roots, self._ticket(r)))
        root = self.roots.get(first, first)
        if self._record.nodes[row].kind is not Kind.BUFFER:
            return root
        # A buffer stays bad when all else is fine again: it is a matter of its own.
        own = self._first_alike(row)
        if root != own:
            self.behind.setdefault(own, root)
        return own

    def _first_alike(self, row: int) -> int:
        """A row that began something: itself, or the first one that went bad with it.

        An optimizer's step makes all its parameters bad for one reason, a layer's statistics go bad
        together, and so do the arguments of a batch.
        """
        kind = self._record.nodes[row].kind
        if row in self.quiet or not (kind.is_saved or row in self.handed_in):
            return row
        return self._first.setdefault(kind, row)

    def _ticket(self, row: int) -> int:
        return int(self._record.rows[row]["ticket"]) if row < len(self._record.rows) else 0

    def _sources(self, row: int) -> set[int]:
        node = self._record.nodes[row]
        if self._record.is_untrained or self._record.spoiled:
            return set()
        found = self._of_kind(row, node) - {row}
        if row in self.quiet and node.kind is not Kind.OUTPUT:
            return found & self.quiet  # nothing links a mask to what else is bad
        return {r for r in found if not self._is_harmless(r, node)}

    def _of_kind(self, row: int, node: Node) -> set[int]:
        place = node.place
        if node.kind is Kind.INPUT:
            return self._of_input(row, node)
        if node.kind is Kind.OUTPUT and isinstance(place, ModulePlace):
            return self._of_output(place)
        if node.kind is Kind.PARAM and isinstance(place, ParameterPlace):
            return place.grad.sources & self._known
        if node.kind is Kind.BUFFER and isinstance(place.parent, ModulePlace):
            inputs = place.parent.input_sources()
            return (inputs & self._known) if inputs else self._all_live()
        is_first = self._record.rows[row]["first_bad_call"] == 1  # else: clipped, or not known
        if node.kind is Kind.GRAD and is_first and place.parent is not None:
            gradients = self._gradients_of(place.parent)
            if gradients:  # what its backward was given is known
                return (gradients | place.parent.input_sources()) & self._known
        return self._all_live()

    def _of_input(self, row: int, node: Node) -> set[int]:
        around = self._record.around(node.place)
        if around is None and node.place.parent is not None and self._may_be_made(row):
            # A part of a container that does not run: code of the container may have made it.
            if not (self._live or self._has_made):
                self.unclear.add(row)
            return self._all_live()
        is_given = around is None and not (node.computed and self._is_preceded(row))
        if is_given and not self._has_made:
            # A cache, a state or a token that the same model made in the step before?
            nodes = self._record.nodes
            earlier = {row for row in self._emitted if nodes[row].place.is_inside(node.place)}
            if not earlier:
                self.handed_in.add(row)
            return earlier
        return self._all_live()

    def _may_be_made(self, row: int) -> bool:
        """Whether code may have made an input of what a module returned before, unseen by autograd.

        What code makes of an output that has a history has one, too.
        """
        order, nodes = self._record.order, self._record.nodes
        earlier = (nodes[r] for r in self._record.scanned() if order[r] < order[row])
        return any(node.kind is Kind.OUTPUT and not node.computed for node in earlier)

    def _is_preceded(self, row: int) -> bool:
        order = self._record.order
        return bool(((order > 0) & (order < order[row])).any())

    def _of_output(self, place: ModulePlace) -> set[int]:
        sources, inside = place.input_sources(), self._inside.get(place, set())
        found = (sources | place.parameter_sources() | inside) & self._known
        return found if found or sources else self._all_live()  # else inputs are not watched

    def _gradients_of(self, place: ModulePlace) -> set[int]:
        """Rows of this step with the gradients that reached a module's outputs.

        None for a module that a checkpoint ran again: what went into it then is not known.
        """
        if any(self._record.was_scanned(node.row) for node in place.recomputed.walk()):
            return set()
        nodes = [node.gradient for node in place.outputs.walk() if node.gradient is not None]
        rows = {row for node in nodes for row in (node.row, *node.sources)}
        return {row for row in rows if self._record.was_scanned(row)}

    def _add(self, row: int, *, is_late: bool = False) -> None:
        self._known.add(row)
        place: Place | None = self._record.nodes[row].place
        while place is not None:
            self._inside.setdefault(place, set()).add(row)
            place = place.parent
        if is_late:
            return  # other things may have gone bad before it
        if row in self.quiet:
            if not self.ends(row):
                self._live_quiet.add(row)
        elif not self._is_over(row):
            self._live.append(row)

    def _is_over(self, row: int) -> bool:
        if row in self._spoiled or not self.ends(row):
            return False  # a spoiled parameter shows in backward, even if forward was before
        return row in self._tolerated or row in self.lasting

    def _all_live(self) -> set[int]:
        """What may be found in any value that comes now: the first is enough."""
        return set(self._live[:1]) or set(self._live_quiet)

    def _is_harmless(self, row: int, consumer: Node) -> bool:
        """Whether -Inf in a row is no reason for what a consumer made: a mask, or it was before."""
        if row not in self.quiet:
            return False
        if row in self._tolerated or self._is_additive_mask(row):
            return True
        if row in self.lasting:
            return False  # a buffer
        if consumer.kind is not Kind.OUTPUT or not isinstance(consumer.place, ModulePlace):
            return False
        module = self._record.model.modules.get(consumer.place)
        return isinstance(module, _TAKES_MINUS_INF)

    def _is_additive_mask(self, row: int) -> bool:
        top = absmax(self._record.rows[row : row + 1])
        return self._record.was_scanned(row) and bool(top[0] == 0 or np.isnan(top[0]))


def is_minus_inf_alone(record: StepRecord, row: int, near_limit: float) -> bool:
    """Whether a row holds -Inf and nothing else that is bad, where masks and banned logits are.

    Beside finite values near their dtype's limit -Inf hints at an overflow.
    """
    values, node = record.rows[row], record.nodes[row]
    if not node.kind.may_be_mask or values["nan"] or values["posinf"]:
        return False
    if isinstance(node.place, SinglePlace) and node.place.is_statistic:
        return False
    if node.kind is Kind.OUTPUT and _is_layer(record, node.place):
        return False
    return not is_near(record, row, near_limit)


def _is_layer(record: StepRecord, place: Place) -> bool:
    """Whether a module is a layer of torch with weights: it makes no masks, so it overflowed."""
    module = record.model.modules.get(place) if isinstance(place, ModulePlace) else None
    is_of_torch = module is not None and type(module).__module__.startswith("torch.nn.modules.")
    return is_of_torch and isinstance(getattr(module, "weight", None), torch.Tensor)
