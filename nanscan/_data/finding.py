"""Finding: what was concluded for one site in one step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy.typing as npt
import torch

from nanscan._data.cause import Cause
from nanscan._data.location import Location
from nanscan._data.result import ScanResult
from nanscan._data.site import Site

Verdict = Literal[
    "origin",
    "propagated",
    "absorbed",
    "near-limit",
    "recovered",
    "scale-search",
    "persistent-overflow",
]
FAULTS: tuple[Verdict, ...] = ("origin", "propagated", "persistent-overflow")
Seen = tuple[Site, ScanResult]


@dataclass
class Finding:
    """What was concluded for one site in one step. `str()` is the report.

    Attributes:
        step: number of the step, from 0.
        rank: of this process in the job.
        site: where.
        verdict: "origin": made here out of finite values; "propagated": was handed bad ones;
            "absorbed": was handed bad ones and returned finite ones; "near-limit": still finite,
            close to the largest value of its dtype; "recovered": finite again; "scale-search": a
            GradScaler skipped the step and lowers its scale, as it should; "persistent-overflow":
            it did so too many times in a row.
        how: the verdict in words.
        stats: counts, extremes and the first bad index, over this step.
        given: what the site was made from: a module's inputs, a parameter's gradient and moments.
        before: the sites scanned just before, in execution order.
        between: the two sites between which code of no module made the values, if so.
        history: arrays over the last steps: step, calls, nan, posinf, neginf, min, max, absmax.
        affected: other sites that went bad in the same step, later; only in the first finding.
        causes: likely causes, best first; empty when no evidence points to one.
        aliases: other names of the parameter, where weights are tied.
        unscanned: modules that this step did not scan, between the last site known to be finite and
            this one: it may have been made there.
        location: the very op, where `locate="next"` found it in a later step.
        replay: how to find it, where that step came too late.
        unlikely: what is commonly suspected and, by the numbers, is not it; two at most.
    """

    step: int
    rank: int
    site: Site
    verdict: Verdict
    how: str
    stats: ScanResult
    given: list[Seen] = field(default_factory=list)
    before: list[Seen] = field(default_factory=list)
    between: tuple[Site, Site] | None = None
    history: dict[str, npt.NDArray[Any]] = field(default_factory=dict, repr=False)
    affected: list[Site] = field(default_factory=list, repr=False)
    causes: list[Cause] = field(default_factory=list)
    aliases: list[str] = field(default_factory=list)
    unscanned: list[Site] = field(default_factory=list)
    location: Location | None = None
    replay: str = ""
    unlikely: list[str] = field(default_factory=list)

    @property
    def dtype(self) -> torch.dtype:
        """Of the tensor that was scanned there."""
        return self.stats.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the tensor that was scanned there."""
        return self.stats.shape

    def __str__(self) -> str:
        from nanscan._data.report import report

        return report(self)
