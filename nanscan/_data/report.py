"""The layout of reports: labels, wrapped lines and tables. What they say is in the findings."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

from nanscan._data.cause import Cause
from nanscan._data.result import ScanResult, describe
from nanscan._data.site import Site

_WIDTH = 100
_LABEL = 10  # columns
_MAX_ROWS = 8  # of a table


def block(label: str, texts: Iterable[str]) -> list[str]:
    """Texts under a label, wrapped. A no-break space keeps together what it joins."""
    lines: list[str] = []
    for text in texts:
        for line in textwrap.wrap(text, _WIDTH - _LABEL - 2, break_on_hyphens=False) or [""]:
            lines.append(_labelled(label if not lines else "", line))
    return lines


def table(tables: dict[str, Sequence[Sequence[str]]]) -> list[str]:
    """Rows of cells under labels, one line each, in columns that all tables share; not wrapped.

    Of each table the first rows, and how many more there are.
    """
    every = [row for rows in tables.values() for row in rows[:_MAX_ROWS]]
    widths = [max(map(len, column)) for column in zip(*every, strict=True)]
    lines = []
    for label, rows in tables.items():
        for number, row in enumerate(rows[:_MAX_ROWS]):
            padded = (f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True) if width)
            lines.append(_labelled("" if number else label, "  ".join(padded)))
        if len(rows) > _MAX_ROWS:
            lines += block("", [f"and {len(rows) - _MAX_ROWS} more"])
    return lines


def sites(label: str, seen: Sequence[tuple[Site, ScanResult]]) -> list[str]:
    """Sites with what was found there, one line each, not wrapped."""
    width = max((len(str(site)) for site, _ in seen), default=0)
    return [
        _labelled("" if number else label, f"{site!s:<{width}}  {summary(stats)}")
        for number, (site, stats) in enumerate(seen)
    ]


def summary(stats: ScanResult) -> str:
    """A few words on one scan."""
    if stats.is_finite:
        if stats.absmax is None:
            return "empty"
        return f"min {stats.min:<11.5g} max {stats.max:<11.5g} absmax {stats.absmax:.5g}"
    return describe(stats)


def causes(found: Sequence[Cause]) -> list[str]:
    """Each cause with its evidence and remedy, best first."""
    lines: list[str] = []
    for cause in found:
        lines += block("cause", [cause.title])
        lines += block("", [f"evidence: {cause.evidence}"])
        lines += block("", [f"remedy: {cause.remedy}"] if cause.remedy else [])
    return lines


def _labelled(label: str, line: str) -> str:
    return f"  {label:<{_LABEL}}{line}".rstrip().replace("\xa0", " ")
