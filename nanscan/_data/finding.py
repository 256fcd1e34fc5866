"""Finding: what was concluded for one site in one step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from nanscan._data import report
from nanscan._data.cause import Cause
from nanscan._data.location import Location
from nanscan._data.result import BadCall, ScanResult, describe_parts
from nanscan._data.site import Kind, Site
from nanscan._data.text import dtype_name, number, share

Verdict = Literal[
    "origin",
    "propagated",
    "absorbed",
    "near-limit",
    "recovered",
    "scale-search",
    "persistent-overflow",
    "all-zero",
]
FAULTS: tuple[Verdict, ...] = ("origin", "propagated", "persistent-overflow")
Seen = tuple[Site, ScanResult]

_HISTORY = 6  # steps shown
_AFFECTED = 4  # sites shown
_NEXT = (
    "find the op and its line: nanscan.locate(train_step, batch) runs one step op by op, and "
    "nanscan.enable(locate=True) does so after the next fault"
)


@dataclass(frozen=True)
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
            it did so too many times in a row; "all-zero": it is finite, and all of it turned 0.
        how: the verdict in words.
        stats: counts, extremes and the first bad index, over this step. With several optimizers,
            over the part of the step that ends when one of them has stepped.
        given: what the site was made from: a module's inputs, a parameter's gradient and moments.
        before: the sites scanned just before, in execution order.
        between: the two sites between which code outside of any module made the values, if so.
        history: arrays over the last steps: step, calls, nan, posinf, neginf, min, max, absmax.
        affected: other sites that went bad in the same step, later; only in the first finding.
        causes: likely causes, best first; empty when no evidence points to one.
        aliases: other names of the parameter, where weights are tied.
        unscanned: modules that this step did not scan, between the last site known to be finite and
            this one: it may have been made there.
        unlikely: what is commonly suspected and is proven not to be it.
        episode: number of the fault's episode, from 1: all that follows from one fault is one
            episode; 0 for what is no fault.
        news: "new": its episode begins with it; "again": its episode goes on, and is told again;
            "": it belongs to an episode that was told. Sinks get no fault with "".
        bad_call: the first bad one of several calls in the step; None where there was one, or where
            it is not known which it was. Parameters and their gradients have none.
    """

    step: int
    rank: int
    site: Site
    verdict: Verdict
    how: str
    stats: ScanResult
    given: tuple[Seen, ...] = ()
    before: tuple[Seen, ...] = ()
    between: tuple[Site, Site] | None = None
    history: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict, repr=False)
    affected: tuple[Site, ...] = field(default=(), repr=False)
    causes: tuple[Cause, ...] = ()
    aliases: tuple[str, ...] = ()
    unscanned: tuple[Site, ...] = ()
    unlikely: tuple[str, ...] = ()
    episode: int = 0
    news: Literal["", "new", "again"] = ""
    bad_call: BadCall | None = None

    @property
    def is_fault(self) -> bool:
        """Whether something is wrong: the verdict is "origin", "propagated" or
        "persistent-overflow".
        """  # noqa: D205
        return self.verdict in FAULTS

    @property
    def dtype(self) -> torch.dtype:
        """Of the tensor that was scanned there."""
        return self.stats.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the tensor that was scanned there."""
        return self.stats.shape

    def __str__(self) -> str:
        return "\n".join(_report(self))


@dataclass(frozen=True)
class Located:
    """The op behind a finding, which `enable(locate=True)` found in a later step.

    Attributes:
        finding: the finding.
        location: the op.
        replay: how to search the finding's own step, where the later one came too late; "" else.
    """

    finding: Finding
    location: Location
    replay: str = ""

    def __str__(self) -> str:
        found = self.finding
        text = f"why {found.site} went bad in step {found.step}: {self.location}"
        return text + (f"\n  replay    {self.replay}" if self.replay else "")


def _report(finding: Finding) -> list[str]:
    """Where and when, the numbers, what came before, and likely causes."""
    lines = [_headline(finding)]
    if finding.aliases:
        lines += report.block("tied to", [", ".join(finding.aliases)])
    counts, *rest = describe_parts(finding.stats)
    lines += report.block("values", [counts, ", ".join(rest)] if rest else [counts])
    if finding.bad_call:
        is_backward = finding.site.kind in (Kind.LOSS, Kind.GRAD_OUTPUT)
        lines += report.block("backward" if is_backward else "call", [str(finding.bad_call)])
    if finding.between:
        lines += report.block("between", [f"{finding.between[0]}  and  {finding.between[1]}"])
    if finding.unscanned:
        lines += report.block("unscanned", [", ".join(map(str, finding.unscanned))])
    lines += report.sites("given", finding.given)
    lines += report.sites("before", finding.before)
    lines += report.block("history", _history(finding.history))
    lines += report.causes(finding.causes)
    lines += report.block("unlikely", finding.unlikely)
    lines += report.block("also bad", _affected(finding.affected))
    return lines + report.block("next", [_NEXT] if _is_unexplained(finding) else [])


def _is_unexplained(finding: Finding) -> bool:
    began_here = finding.verdict in ("origin", "persistent-overflow")
    return began_here and not any(cause.remedy for cause in finding.causes)


def _headline(finding: Finding) -> str:
    state, reason = "non-finite", f"({finding.verdict}: {finding.how})"
    if finding.verdict == "near-limit":
        limit = float(torch.finfo(finding.dtype).max)
        near = share(finding.stats.absmax or 0.0, limit)
        state = "near the limit"
        reason = f"({near} of the largest {dtype_name(finding.dtype)}, {limit:g})"
    elif finding.verdict in ("absorbed", "recovered"):
        state = "finite"
    elif finding.verdict == "all-zero":
        state = "all zero"
    rank = f", rank {finding.rank}" if finding.rank else ""
    return f"{finding.site} is {state} in step {finding.step}{rank} {reason}"


def _history(history: Mapping[str, npt.NDArray[Any]]) -> list[str]:
    if not history or len(history["step"]) <= 1:
        return []
    bad = np.sum([history[name] for name in ("nan", "posinf", "neginf")], axis=0)
    entries = [
        f"step\xa0{step}:\xa0{'-' if np.isnan(top) else number(top)}"
        + (f"\xa0({n}\xa0bad)" if n else "")
        for step, top, n in zip(history["step"], history["absmax"], bad, strict=True)
    ]
    return ["absmax by step: " + ", ".join(entries[-_HISTORY:])]


def _affected(sites: tuple[Site, ...]) -> list[str]:
    if not sites:
        return []
    shown = ", ".join(str(site) for site in sites[:_AFFECTED])
    more = f" and {len(sites) - _AFFECTED} more" if len(sites) > _AFFECTED else ""
    return [shown + more + " in the same step"]
