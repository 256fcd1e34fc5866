"""ModuleCalls: scans what goes into modules and comes out of them.

What is done while nothing is new is in csrc/calls.cpp; this is what it calls for the rest.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from nanscan import _C
from nanscan._collect import door
from nanscan._collect.listener import Listener
from nanscan._collect.names import Registry
from nanscan._collect.output_gradients import OutputGradients
from nanscan._collect.scanner import Scanner, tensors
from nanscan._collect.schedule import Turn
from nanscan._data.kept import version
from nanscan._data.places import ModulePlace, Node
from nanscan._data.site import Kind

# While torch.compile traces our code this is the constant True, and the code leaves nothing behind.
is_tracing = torch.compiler.is_dynamo_compiling


def running_node() -> Any:
    """The node of a backward that runs in this thread; None: no backward does."""
    return torch._C._current_autograd_node()  # noqa: SLF001 - no public spelling


def is_recomputing() -> bool:
    """Whether a backward runs in this thread: a call now repeats one, for a checkpoint."""
    return running_node() is not None


class ModuleCalls:
    """Scans what goes into and comes out of modules, and tells a listener of outermost calls.

    Args:
        registry: the modules to watch.
        scanner: scans what is new.
        kinds: what to scan.
        listener: gets `on_before_forward`, `on_after_forward`, `on_first_call` and, if
            `with_arguments`, `on_outermost_call`.
        with_arguments: whether the listener wants the arguments of outermost calls.

    Attributes:
        is_attached: module calls are watched, and the watch is not paused.
    """

    def __init__(
        self,
        registry: Registry,
        scanner: Scanner,
        kinds: frozenset[Kind],
        listener: Listener,
        *,
        with_arguments: bool,
    ) -> None:
        self._registry = registry
        self._scanner = scanner
        self._listener = listener
        self.is_attached = False
        # By thread: arguments of its outermost call, and their versions before it.
        self._bad_inputs: dict[int, list[tuple[torch.Tensor, int, Node]]] = {}
        self.core = _C.Calls(
            scanner.table.core,
            python_hooks=self,
            inputs=Kind.INPUT in kinds,
            outputs=Kind.OUTPUT in kinds,
            gradients=Kind.GRAD_OUTPUT in kinds,
            everything=not registry.only,
            arguments=with_arguments,
        )
        self._gradients = OutputGradients(self.core, scanner)
        registry.listen(self.core.add, self.core.ignore, self.core.remove)

    def set_turn(self, turn: Turn) -> None:
        """What to scan from now on."""
        self.core.set_turn(turn.period, turn.number)

    def open(self) -> None:
        """Is told of module calls from now on, and takes notice once it is attached."""
        door.observe(self.core, self)

    def set_attached(self, *, attached: bool) -> None:
        """Whether to take notice of calls. One flag, so pausing is cheap and removes nothing."""
        self.is_attached = attached
        self.core.set_attached(attached)

    def close(self) -> None:
        """Is told no more."""
        door.forget(self.core)

    # -- what is new at a call: csrc/calls.cpp calls these by name, and does the rest itself ------

    def discover(self, module: nn.Module) -> None:
        """A module that the registry has not met."""
        self._registry.discover(module, self.core.running)

    def on_outermost_call(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """A call that no other encloses. None of it has run, also nothing of what follows here."""
        if not is_recomputing():
            self._listener.on_outermost_call(module, args, kwargs)

    def on_first_call(self, place: ModulePlace) -> None:
        """A module runs for the first time."""
        place.called = True
        self._listener.on_first_call(place)

    def note_compiled(self, place: ModulePlace) -> None:
        """A module runs as compiled code of its own from now on."""
        self._registry.compiled.note(place, self._registry.step())

    def scan_new_input(self, place: ModulePlace, index: int, x: Any, row: int) -> int:
        """An argument from a new source, or not a plain tensor. Returns its own row or -1."""
        node = place.inputs.item(index)
        if row < 0:
            self._scanner.visit_new(x, node, row)
        elif row != node.row:  # as it is of a module in what torch.compile returned: one place
            node.add_source(row)
        return node.row

    def scan_keywords(self, place: ModulePlace, kwargs: Mapping[str, Any]) -> None:
        """Keyword arguments, at each call that has some."""
        for key, x in kwargs.items():
            self._scanner.visit(x, place.keywords.child(key))

    def scan_new_output(self, place: ModulePlace, output: Any, status: int) -> int:
        """An output without a row yet, or not a plain tensor. Returns its own row or -1."""
        node = place.recomputed if self.core.recomputing else place.outputs
        if status >= 0 and status == node.row:  # of the module in what torch.compile returned
            return status
        if status >= 0:  # what a module inside returned, and this one hands on
            node.add_source(status)
        self._scanner.visit_new(output, node, status)
        return node.row

    def watch_gradient(self, place: ModulePlace, output: Any) -> torch.Tensor | None:
        """A module's only output, at calls at which the core cannot watch its gradient by itself.

        Returns:
            The tensor whose hooks do for every later output, if there is one.
        """
        self._gradients.watch_all(output, place.outputs)
        return place.outputs.hooked

    def scan_new_gradient(self, number: int, gradient: Any, row: int) -> int:
        """A gradient without a row yet, in a new one, or no plain tensor. Returns its own row."""
        return self._gradients.scan_new(number, gradient, row)

    def note_bad_inputs(self, place: ModulePlace, args: Any, kwargs: Mapping[str, Any]) -> None:
        """Something in the arguments of an outermost call is bad: is it data, or memory to fill?"""
        pairs = [(x, place.inputs.item(i)) for i, x in enumerate(args)]
        pairs += [(x, place.keywords.child(key)) for key, x in kwargs.items()]
        found = [each for x, node in pairs for each in tensors(x, node)]
        self._bad_inputs[threading.get_ident()] = [(x, version(x), node) for x, node in found]

    def on_before_forward(self, place: ModulePlace, args: Any, kwargs: Any) -> bool:
        """A call that no other encloses. Returns whether it repeats one, for a checkpoint."""
        recomputing = is_recomputing()
        if not recomputing:
            self._listener.on_before_forward(place, args, kwargs)
        return recomputing

    def on_after_forward(self, place: ModulePlace) -> None:
        """An outermost module returned."""
        for x, before, node in self._bad_inputs.pop(threading.get_ident(), ()):
            node.is_written |= version(x) != before
        self._listener.on_after_forward(place)
