"""Coverage: what a monitor watches, and what it does not and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from nanscan._collect.names import Registry
from nanscan._collect.schedule import Schedule
from nanscan._collect.table import Table
from nanscan._data.places import ModulePlace

_SHOWN = 8  # names a line


@dataclass(frozen=True)
class Coverage:
    """What is watched, and what is not and why. `str()` is a summary.

    Attributes:
        sites: names of all sites that were scanned.
        skipped: reason by site, for tensors that were seen and could not be scanned.
        not_called: modules that never ran through their own call, or ran inside compiled code.
        compiled: modules that run as compiled code, with the step since which that was seen. What
            is inside of them is not seen but for its parameters and gradients.
        left_out: modules, parameters and buffers that a filter leaves out.
        thinned: what is scanned in some steps only, and in which.
        overhead: share of a step's time that hooks took of late; NaN without `max_overhead`.
        nbytes: host memory of the table and its history.
    """

    sites: tuple[str, ...]
    skipped: Mapping[str, str]
    not_called: tuple[str, ...]
    compiled: Mapping[str, int]
    left_out: tuple[str, ...]
    thinned: Mapping[str, str]
    overhead: float = field(default=float("nan"))
    nbytes: int = 0

    def __str__(self) -> str:
        lines = [f"{len(self.sites)} sites scanned, {self.nbytes / 1e6:.1f} MB"]
        lines += [f"skipped: {site}, because {why}" for site, why in self.skipped.items()]
        lines += _listed("not called", self.not_called)
        lines += [f"compiled: {name}, since step {step}" for name, step in self.compiled.items()]
        lines += _listed("left out", self.left_out)
        lines += [f"thinned: {what}, {when}" for what, when in self.thinned.items()]
        if self.overhead == self.overhead:  # not NaN
            lines.append(f"overhead: {self.overhead:.1%} of a step")
        return "\n".join(lines)


def _listed(label: str, names: tuple[str, ...]) -> list[str]:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return [f"{label}: {', '.join(names[:_SHOWN])}{more}"] if names else []


def coverage_of(registry: Registry, table: Table, schedule: Schedule) -> Coverage:
    """What is covered so far."""
    registry.rescan()
    alive = {place for _, place in registry.modules()}
    skipped: dict[str, str] = {}
    not_called: list[str] = []
    compiled: dict[str, int] = {}
    left_out: list[str] = []
    for place in registry.all_places():
        if not place.watched:
            left_out.append(place.name)
            continue
        if isinstance(place, ModulePlace) and place in alive:
            if not place.called:
                not_called.append(place.name)
            if place.compiled_since is not None:
                compiled[place.name] = place.compiled_since
        skipped |= {str(node.site): node.skipped for node in place.nodes() if node.skipped}
    return Coverage(
        tuple(str(node.site) for node in table.nodes),
        skipped,
        tuple(not_called),
        compiled,
        tuple(left_out),
        schedule.describe(),
        schedule.overhead(),
        table.nbytes,
    )
