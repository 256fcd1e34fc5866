"""Findings as text that a person reads in a terminal."""

from __future__ import annotations

import textwrap

import numpy as np
import torch

from nanscan._judge import Finding, Seen
from nanscan._scan import ScanResult, describe, describe_parts
from nanscan._sites import Site

_WIDTH = 100
_LABEL = 10
_HISTORY = 6


def report(finding: Finding) -> str:
    """The whole finding: where and when, the numbers, what came before, and likely causes."""
    rank = f", rank {finding.rank}" if finding.rank else ""
    reason = f"({finding.verdict}: {finding.how})"
    if finding.verdict == "near-limit":
        limit = torch.finfo(finding.dtype).max
        share = (finding.stats.absmax or 0.0) / limit
        state, reason = "near the limit", f"({share:.0%} of {limit:g})"
    elif finding.verdict in ("absorbed", "recovered"):
        state = "finite"
    else:
        state = "non-finite"
    lines = [f"{finding.site} is {state} in step {finding.step}{rank} {reason}"]
    if finding.aliases:
        lines += _block("tied to", [", ".join(finding.aliases)])
    counts, *rest = describe_parts(finding.stats)
    lines += _block("values", [counts, ", ".join(rest)] if rest else [counts])
    if finding.between:
        lines += _block("between", [f"{finding.between[0]}  and  {finding.between[1]}"])
    if finding.unscanned:
        lines += _block("unscanned", [", ".join(str(site) for site in finding.unscanned)])
    lines += _rows("given", finding.given)
    lines += _rows("before", finding.before)
    lines += _block("history", _history(finding))
    for cause in finding.causes:
        lines += _block("cause", [cause.title])
        lines += _block("", [f"evidence: {cause.evidence}", f"remedy: {cause.remedy}"])
    if not finding.causes and finding.verdict == "origin":
        lines += _block("cause", ["no likely cause found"])
    lines += _block("unlikely", finding.unlikely)
    lines += _block("also bad", _affected(finding.affected))
    return "\n".join(lines)


def _block(label: str, texts: list[str]) -> list[str]:
    lines: list[str] = []
    for text in texts:
        wrapped = textwrap.wrap(text, _WIDTH - _LABEL - 2, break_on_hyphens=False) or [""]
        for line in wrapped:
            lines.append(
                f"  {label if not lines else '':<{_LABEL}}{line}".rstrip().replace("\xa0", " ")
            )
    return lines


def summary(stats: ScanResult) -> str:
    """A few words on one scan."""
    if stats.is_finite:
        if stats.absmax is None:
            return "empty"
        return f"min {stats.min:<11.5g} max {stats.max:<11.5g} absmax {stats.absmax:.5g}"
    return describe(stats)


def _rows(label: str, seen: list[Seen]) -> list[str]:
    """A table, one line a site, not wrapped."""
    width = max((len(str(site)) for site, _ in seen), default=0)
    return [
        f"  {'' if number else label:<{_LABEL}}{site!s:<{width}}  {summary(stats)}"
        for number, (site, stats) in enumerate(seen)
    ]


def _history(finding: Finding) -> list[str]:
    history = finding.history
    if not history or len(history["step"]) <= 1:
        return []
    bad = np.sum([history[name] for name in ("nan", "posinf", "neginf")], axis=0)
    entries = [
        f"step\xa0{step}:\xa0{'-' if np.isnan(top) else f'{top:.5g}'}"
        + (f"\xa0({n}\xa0bad)" if n else "")
        for step, top, n in zip(history["step"], history["absmax"], bad, strict=True)
    ]
    return ["absmax by step: " + ", ".join(entries[-_HISTORY:])]


def _affected(sites: list[Site]) -> list[str]:
    if not sites:
        return []
    shown = ", ".join(str(site) for site in sites[:4])
    more = f" and {len(sites) - 4} more" if len(sites) > 4 else ""  # noqa: PLR2004
    return [shown + more + " in the same step"]
