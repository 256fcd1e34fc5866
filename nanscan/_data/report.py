"""Findings as text that a person reads in a terminal."""

from __future__ import annotations

import contextlib
import textwrap
from pathlib import Path

import numpy as np
import torch

from nanscan._data.cause import Cause
from nanscan._data.finding import Finding, Seen
from nanscan._data.location import Location, Op, Operand
from nanscan._data.result import ScanResult, bad_counts, describe, describe_parts
from nanscan._data.site import Site

_WIDTH = 100
_LABEL = 10
_HISTORY = 6
_OPERANDS = 8


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
    none_found = "no likely cause found" if finding.verdict == "origin" else ""
    lines += _causes(finding.causes, none_found)
    lines += _block("unlikely", finding.unlikely)
    lines += _block("also bad", _affected(finding.affected))
    lines += _block("replay", [finding.replay] if finding.replay else [])
    if finding.location is not None:
        lines += _block("located", [f"op by op, in step {finding.location.step}:"])
        lines += [f"    {line}" for line in str(finding.location).splitlines()]
    return "\n".join(lines)


def located(location: Location) -> str:
    """The op, its line, and what it took and made, side by side."""
    lines = [_headline(location)]
    source = location.source
    label = "line" if source is location.at else "made at"
    lines += _block(label, [_line(source)] if source.file else ["no line of user code"])
    if location.forward is not None and source is not location.forward:
        lines += _block("made at", [_line(location.forward)])
    lines += _block("with", _settings(location.at))
    forward = [] if location.forward is None else location.forward.operands
    lines += _tables(
        {"took": location.at.operands, "made": location.at.results, "forward": forward}
    )
    if location.consequence is not None:
        what = "read by" if location.at.results[0].stats is None else "NaN at"
        line = f", {_line(location.consequence)}" if location.consequence.file else ""
        lines += _block(what, [location.consequence.name + line])
    lines += _causes(location.causes, "no likely cause found")
    lines += _block("unlikely", location.unlikely)
    return "\n".join(lines)


def _causes(causes: list[Cause], none_found: str) -> list[str]:
    lines: list[str] = []
    for cause in causes:
        lines += _block("cause", [cause.title])
        lines += _block("", [f"evidence: {cause.evidence}", f"remedy: {cause.remedy}"])
    return lines or _block("cause", [none_found] if none_found else [])


def _headline(location: Location) -> str:
    where = f" in {location.at.module}" if location.at.module else ""
    if location.direction == "optimizer":
        where = " in an optimizer step"
    if location.node:
        module = f" in {location.module}" if location.module else ""
        output = "" if location.output_index is None else f", output {location.output_index}"
        where = f" in {location.node}{output}: backward of {_op_of(location)}{module}"
    if location.recomputed:
        where += " (recomputed for a checkpoint)"
    how, what = location.how, "made non-finite values"
    if location.verdict == "propagated":
        names = [
            o.what or o.name
            for o in location.at.operands
            if o.stats is not None and not o.stats.is_finite
        ]
        what = f"read non-finite values of {', '.join(names)}"
    elif location.reached:
        how += f"; it reached {location.reached}"
    return f"{location.op} {what}{where}, step {location.step} ({how})"


def _op_of(location: Location) -> str:
    return "an unknown op" if location.forward is None else location.forward.name


def _line(op: Op) -> str:
    """Where an op was called, relative to the current directory if it lies below that."""
    path = Path(op.file)
    with contextlib.suppress(ValueError, OSError):
        path = path.relative_to(Path.cwd())
    code = op.code
    return f"{path}:{op.line} in {op.function}" + (f": {code}" if code else "")


def _settings(op: Op) -> list[str]:
    """Arguments that are no tensors; those that are not set aside."""
    plain = {"alpha": 1, "beta": 1}
    shown = {
        name: x
        for name, x in op.settings.items()
        if x is not None and x is not False and x != [] and plain.get(name) != x
    }
    return [", ".join(f"{name}={x!r}" for name, x in shown.items())] if shown else []


def _tables(tables: dict[str, list[Operand]]) -> list[str]:
    """Operands under labels, one line each, in columns that all tables share, not wrapped."""
    cells = {label: [_cells(o) for o in shown[:_OPERANDS]] for label, shown in tables.items()}
    every = [row for rows in cells.values() for row in rows]
    widths = [max(map(len, column)) for column in zip(*every, strict=True)]
    lines = []
    for label, rows in cells.items():
        for number, row in enumerate(rows):
            padded = (f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True) if width)
            lines.append(f"  {'' if number else label:<{_LABEL}}{'  '.join(padded)}".rstrip())
        if len(tables[label]) > len(rows):
            lines += _block("", [f"and {len(tables[label]) - len(rows)} more"])
    return lines


def _cells(operand: Operand) -> list[str]:
    """Name, dtype and shape, what is bad, five numbers, and what is known of it."""
    dtype, stats = str(operand.dtype).removeprefix("torch."), operand.stats
    known = operand.what or operand.made_by
    row = [operand.name, f"{dtype} {list(operand.shape)}"]
    if stats is None:
        return [*row, "", "", "", "", "", "", known]
    bad = bad_counts(stats)
    if stats.absmax is None:
        return [*row, bad, "no finite value" if stats.numel else "empty", *[""] * 4, known]
    values = [f"min {stats.min:.4g}", f"max {stats.max:.4g}", f"absmax {stats.absmax:.4g}", "", ""]
    if operand.has_moments:
        values[3:] = [f"mean {stats.mean:.4g}", f"std {stats.std:.4g}"]
    return [*row, bad, *values, known]


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
