"""ParameterScans: when parameters, their gradients, buffers and moments are scanned, and how."""

from __future__ import annotations

import torch
from torch.optim.optimizer import Optimizer

from nanscan import _C
from nanscan._collect.names import Registry
from nanscan._collect.optimizers import Optimizers, Plan, moments
from nanscan._collect.roots import parameters_of
from nanscan._collect.scanner import Scanner
from nanscan._collect.snapshot import Sweep
from nanscan._data.places import ModulePlace, Node, ParameterPlace, SinglePlace
from nanscan._data.site import Kind


class ParameterScans:
    """Scans whole sets of tensors at once, into their own rows.

    Args:
        registry: the modules, with their parameters and buffers.
        scanner: does the scanning.
        optimizers: says in which order backward reaches parameters.
        kinds: what to scan.
    """

    def __init__(
        self,
        registry: Registry,
        scanner: Scanner,
        optimizers: Optimizers,
        kinds: frozenset[Kind],
    ) -> None:
        self._registry = registry
        self._scanner = scanner
        self._optimizers = optimizers
        self._kinds = kinds
        self._buffers: dict[SinglePlace, tuple[int, int]] = {}  # id and version as last scanned

    def sweep(self, place: ModulePlace) -> Sweep | None:
        """What the parameters and buffers of a model hold before it first runs.

        Not in their rows, which are given out here: these are for what the optimizer's step leaves.

        Args:
            place: a module that is about to run for the first time.

        Returns:
            The scans; None where its model was swept before, or a CUDA graph is being recorded.
        """
        outermost = place
        while outermost.parent is not None:
            outermost = outermost.parent
        if outermost.swept or not self._kinds & {Kind.PARAM, Kind.BUFFER}:
            return None
        outermost.swept = True
        swept: list[tuple[torch.Tensor, Node]] = []
        if Kind.PARAM in self._kinds:
            for module, owner in self._registry.modules():
                if owner.is_inside(outermost):
                    for parameter in module.parameters(recurse=False):
                        known = self._registry.parameter(parameter, "")
                        if known is not None and known.watched:
                            swept.append((parameter, known.param))
        if Kind.BUFFER in self._kinds:
            swept += [
                (buffer, place.node)
                for buffer, place in self._registry.buffers()
                if place.is_inside(outermost) and _is_float(buffer)
            ]
        swept = [(x, node) for x, node in swept if node.row < 0]
        for _, node in swept:
            self._scanner.table.add(node)
        scans = self._scanner.scan_apart(swept)
        # Nobody knows when, and if, a CUDA graph that is being recorded will run.
        captured = any(isinstance(scan, _C.PendingScan) and scan.captured for _, scan, _ in scans)
        return Sweep(scans, is_selective=True) if scans and not captured else None

    def scan_gradients_of(self, optimizer: Optimizer, plan: Plan) -> None:
        """Scans an optimizer's gradients, in the order in which backward made them."""
        parameters = parameters_of(optimizer)
        self._scanner.scan_all(
            [
                (grad, place.grad)
                for i, place in plan.backward
                if (grad := parameters[i].grad) is not None
            ]
        )

    def scan_gradients(self, parameters: list[torch.Tensor]) -> None:
        """Scans gradients of some parameters, in the order in which backward made them."""
        known = [(p, self._registry.parameter(p, "")) for p in parameters]
        self._scan_gradients([(p, place) for p, place in known if place and place.watched])

    def scan_all_gradients(self) -> None:
        """Scans the gradients of all parameters, in the order in which backward made them."""
        self._scan_gradients(list(self._registry.live_parameters()))

    def _scan_gradients(self, parameters: list[tuple[torch.Tensor, ParameterPlace]]) -> None:
        pairs = [pair for pair in parameters if pair[0].grad is not None]
        order = [pairs[i] for i in self._optimizers.in_backward_order(pairs)]
        self._scanner.scan_all([(g, place.grad) for p, place in order if (g := p.grad) is not None])

    def scan_all_parameters(self) -> None:
        """Scans all parameters, and the buffers that changed."""
        if Kind.PARAM in self._kinds:
            live = self._registry.live_parameters()
            self._scanner.scan_all([(parameter, place.param) for parameter, place in live])
        self.scan_buffers()

    def scan_after_step(self, optimizer: Optimizer, plan: Plan) -> None:
        """Scans what an optimizer's step changed: parameters, moments; and changed buffers."""
        parameters = parameters_of(optimizer)
        if Kind.PARAM in self._kinds:
            self._scanner.scan_all([(parameters[i], place.param) for i, place in plan.watched])
        self.scan_buffers()
        if Kind.STATE in self._kinds:
            self._scanner.scan_all(
                [
                    (moment, place.moment(name))
                    for i, place in plan.watched
                    for name, moment in moments(optimizer, parameters[i])
                ]
            )

    def scan_buffers(self) -> None:
        """Scans the buffers that changed, such as running statistics, not masks and tables."""
        if Kind.BUFFER not in self._kinds:
            return
        changed = []
        for buffer, place in self._registry.buffers():
            if not _is_float(buffer):
                continue
            state = id(buffer), buffer._version  # noqa: SLF001 - no public spelling
            # torch's batch_norm changes running statistics, and leaves their version as it was.
            if self._buffers.get(place) != state or place.is_statistic:
                self._buffers[place] = state
                changed.append((buffer, place.node))
        self._scanner.scan_all(changed)


def _is_float(x: torch.Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()
