"""Judge: judges records in order, and remembers what is bad from one to the next."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from nanscan._collect.snapshot import Snapshot, StepRecord
from nanscan._data.finding import Finding
from nanscan._data.places import ModulePlace
from nanscan._data.row import Rows
from nanscan._data.site import Kind, Site
from nanscan._data.text import indices
from nanscan._judge.all_zero import Zeros
from nanscan._judge.causes import causes, unlikely
from nanscan._judge.episode import BadParts, Episode, Episodes
from nanscan._judge.evidence import Evidence
from nanscan._judge.lasting import Lasting
from nanscan._judge.near_limit import NearLimit
from nanscan._judge.provenance import Provenance
from nanscan._judge.step import StepVerdicts

_MAX_TOLD = 3  # new episodes of one step; more are in `findings`

Mask = tuple[int, ...]
Group = list[int]  # rows with one root, in the order in which they went bad


class Judge:
    """From records to findings.

    What is bad falls into episodes, one for each origin. A fault that does not follow from what is
    known begins an episode of its own, and is told. In an episode each row is reported once. What
    goes on is told again at growing intervals; what comes and goes is told twice, then at
    intervals.

    Bad values that a caller handed in and that the model took out again are a note, given once.

    Args:
        near_limit: share of a dtype's largest value from which a finite value is reported.
        rank: of this process.
        max_skips: skipped optimizer steps in a row that are a scale search, and no fault yet.
        ignores: whether a site with this dtype is of no interest.

    Attributes:
        is_unsure: a step that did not scan everything had something new, which may be a fault of
            its own.
    """

    def __init__(
        self,
        near_limit: float,
        rank: int,
        *,
        max_skips: int,
        ignores: Callable[[Site, torch.dtype], bool],
    ) -> None:
        self.is_unsure = False
        self._near_limit = near_limit
        self._rank = rank
        self._max_skips = max_skips
        self._ignores = ignores
        self._episodes = Episodes()
        self._lasting = Lasting()
        self._tolerated: set[int] = set()  # rows that were bad in a step and led to nothing
        self._masks: dict[int, Mask] = {}  # of these, those that hold -Inf alone, as they were
        self._noted: set[int] = set()  # roots of which a note was given
        self._zeros = Zeros()
        self._near = NearLimit(near_limit)
        # Which rows were bad in the last whole record, and whether it was scanned in full.
        self._before: tuple[frozenset[int], bool] | None = None
        self._latest: set[int] = set()  # rows that were bad in the last whole record
        self._emitted: set[int] = set()  # of these, what outermost modules returned

    @property
    def is_healthy(self) -> bool:
        """Whether all that a checkpoint holds was finite when it was last scanned."""
        return self._lasting.is_healthy

    @property
    def is_waiting(self) -> bool:
        """Whether a record matters in which nothing is bad: what was may be over, or harmless."""
        return bool(
            self._episodes or self._near.rows or self._lasting.unset.keys() - self._tolerated
        )

    def knows(self, rows: Snapshot) -> bool:
        """Whether all that is notable in a step are masks that were harmless before."""
        masks = self._masks
        return all(row in masks and masks[row] == _mask(rows.rows, row) for row in rows.notable)

    def judge(self, record: StepRecord) -> list[Finding]:
        """What is new in a step, in the order in which it happened; complete findings."""
        self.is_unsure = False
        if not (record.notable or self.is_waiting):
            return []  # and so `_latest` is empty
        bad = self._bad(record)
        near = [row for row in self._near.new_in(record, bad) if not self._ignored(row, record)]
        if self._goes_on(record, bad) and not near:
            for episode in self._episodes:
                episode.note(record.step, record.ended_by)
            self._lasting.update(record, bad)
            return []
        self._lasting.note_unset(record, bad)
        provenance = self._trace(record, bad)
        step = StepVerdicts(record, self._rank, provenance, self._lasting.rows)
        news = [step.describe(row, "near-limit") for row in near]
        for row, how in self._zeros.new_in(record) if record.is_whole else ():
            if not self._ignored(row, record):
                news.append(step.describe(row, "all-zero", how))
        faults, notes = self._sort(record, provenance)
        in_faults = {row for group in faults for row in group}
        rows = [row for row in bad if row in in_faults]
        if record.is_whole:
            emitted = {row for row in rows if provenance.is_returned(row)}
            self._latest = {*rows, *(self._latest if record.continues else ())}
            self._emitted = {*emitted, *(self._emitted if record.continues else ())}
        if record.skips and rows and all(record.nodes[row].kind.is_scaled for row in rows):
            news += _skipped(step, record, rows, self._max_skips)
        else:
            news += self._faults(step, record, provenance, faults)
            news += self._notes(step, notes)
        self._lasting.update(record, bad)
        if record.is_whole:
            self._tolerated |= {row for row in self._lasting.unset if provenance.ends(row)}
        news += self._recovered(step, record, set(rows))
        return [_complete(evidence) for evidence in news]

    def _goes_on(self, record: StepRecord, bad: list[int]) -> bool:
        """Whether a training step is bad just where the last one was, and none of it is told again.

        All parameters of a large model may be: then there is nothing to find out.
        """
        before, self._before = self._before, None
        if not record.is_whole or record.continues or record.skips:
            return False
        self._before = frozenset(bad), record.turn.is_full
        return (
            before == self._before
            and any(record.nodes[row].kind.is_scaled for row in bad)
            and all(each.latest == record.step - 1 for each in self._episodes)
            and not any(each.is_due(record.step) for each in self._episodes)
        )

    def _trace(self, record: StepRecord, bad: list[int]) -> Provenance:
        return Provenance(
            record,
            bad,
            lasting=self._lasting.rows,
            late=self._lasting.joined_in(record.step),
            spoiled=self._lasting.spoiled_in(record.step),
            before=self._latest if record.continues else (),
            emitted=self._emitted,
            tolerated=self._tolerated,
            unset=self._lasting.unset,
            near_limit=self._near_limit,
        )

    def _sort(self, record: StepRecord, provenance: Provenance) -> tuple[list[Group], list[Group]]:
        """Groups that are faults, and those that are notes. -Inf that led to nothing is neither."""
        faults, notes = [], []
        for group in provenance.groups():
            is_note = False
            root = provenance.roots[group[0]]
            is_silent = provenance.quiet.issuperset([root, *group])
            if not is_silent:
                is_note = root in provenance.handed_in and (
                    not provenance.leads_on(group)
                    # It led to nothing before, and what else is bad has another origin.
                    or (group == [root] and root in self._tolerated)
                )
                if not is_note:
                    faults.append(group)
                elif not record.nodes[root].is_written:  # else a cache with room in it
                    notes.append(group)
            if (is_silent or is_note) and record.is_whole:
                self._tolerated.update(group)
            if is_silent and record.is_whole:
                is_kept = {row for row in group if record.nodes[row].kind.is_saved}
                self._masks |= {row: _mask(record.rows, row) for row in {*group} - is_kept}
        return faults, notes

    # -- faults ------------------------------------------------------------------------------------

    def _faults(
        self, step: StepVerdicts, record: StepRecord, provenance: Provenance, groups: list[Group]
    ) -> list[Evidence]:
        reports = [each for group in groups for each in self._reports(record, provenance, group)]
        position = {row: position for position, row in enumerate(provenance.bad)}
        reports.sort(key=lambda report: position.get(report.row, -1))
        told = [report for report in reports if report.news]
        for report in told[_MAX_TOLD:]:
            report.news = ""
        for report in told[:_MAX_TOLD]:
            report.episode.tell(record.step)
        found = [self._evidence(step, report) for report in reports]
        is_one = len(told) <= 1
        for evidence in found[:1] if is_one else [each for each in found if each.finding.news]:
            evidence.affected = tuple(
                other.finding.site
                for other in found
                if other is not evidence
                and (is_one or other.finding.episode == evidence.finding.episode)
            )
        bad = [row for group in groups for row in group if row not in provenance.quiet]
        absorbed = step.absorbed(bad) if told else None
        return found if absorbed is None else [*found, absorbed]

    def _evidence(self, step: StepVerdicts, report: _Report) -> Evidence:
        if report.how:
            evidence = step.describe(report.row, "origin", report.how)
        else:
            evidence = step.judge(report.row, report.addition)
        evidence.finding = dataclasses.replace(
            evidence.finding, episode=report.episode.number, news=report.news
        )
        return evidence

    def _reports(self, record: StepRecord, provenance: Provenance, group: Group) -> list[_Report]:
        """What is to be reported of rows with one root; notes that they are bad."""
        root = provenance.roots[group[0]]
        episode, is_new = self._episode_of(record, provenance, root)
        episode.note(record.step, record.ended_by)
        episode.after = episode.after or self._episodes.of(provenance.behind.get(root, -1))
        is_due = episode.is_due(record.step)
        is_buffer = is_new and root in self._lasting.unset
        rows = [root, *group] if is_buffer else group
        worse = {row for row in rows if record.spoiled and self._lasting.is_worse(record, row)}
        reports = [
            _Report(episode, row)
            for row in rows
            if row in worse or (row not in episode.rows and (is_due or not episode.flaps))
        ]
        spread = _spread(record, provenance, episode, group)
        # What other code has spoiled is told with what reads it in the same step.
        is_forward = bool(record.spoiled) or any(record.nodes[r].kind.is_forward for r in group)
        is_kept = record.nodes[root].kind is Kind.BUFFER
        shows = is_forward and is_kept and not episode.is_in_forward
        episode.is_in_forward |= is_forward
        for row in rows:
            self._episodes.add(episode, row)
        if (is_new or worse) and reports:
            reports[0].news = "new"
            reports[0].addition = episode.count if episode.comebacks else ""
        elif shows and reports:
            reports[0].news = "new"  # what a buffer has kept since then
        elif is_due:
            first = root if root in group else group[0]
            again = _Report(episode, first, "again", episode.count)
            reports = [again, *(each for each in reports if each.row != first)]
        return reports + [each for each in spread if each.row not in {r.row for r in reports}]

    def _episode_of(
        self, record: StepRecord, provenance: Provenance, root: int
    ) -> tuple[Episode, bool]:
        """The episode of a root, and whether it is news."""
        episode = self._episodes.of(root)
        if episode is not None and not self._is_of_its_own(record, episode, root):
            return episode, False
        if episode is None and self._episodes and self._may_follow(record, provenance, root):
            self.is_unsure = True
            return next(iter(self._episodes)), False
        return self._episodes.begin(root, record.step)

    def _is_of_its_own(self, record: StepRecord, episode: Episode, root: int) -> bool:
        """Whether a row that followed from an episode is bad though the episode's root is fine."""
        first = episode.root
        if root == first or root in self._lasting.rows or not record.turn.is_full:
            return False
        is_fine = record.was_scanned(first) and not record.rows[first]["ticket"]
        return is_fine and not self._lasting.rows.keys() & episode.rows

    def _may_follow(self, record: StepRecord, provenance: Provenance, root: int) -> bool:
        """Whether what a row was made from was not scanned in this step."""
        if record.turn.is_full or root in provenance.handed_in:
            return False
        node = record.nodes[root]
        if node.kind is not Kind.OUTPUT or not isinstance(node.place, ModulePlace):
            return True
        return not any(map(record.was_scanned, node.place.input_sources()))

    # -- what is no fault --------------------------------------------------------------------------

    def _notes(self, step: StepVerdicts, groups: list[Group]) -> list[Evidence]:
        """Bad values that a caller handed in and that ended inside of the model."""
        found = []
        for group in groups:
            if group[0] not in self._noted:
                self._noted.add(group[0])
                found.append(step.absorbed(group) or step.describe(group[0], "absorbed"))
        return found

    def _recovered(self, step: StepVerdicts, record: StepRecord, bad: set[int]) -> list[Evidence]:
        """The ends of episodes."""
        if not record.is_whole:
            return []
        over = [
            episode
            for episode in self._episodes
            if not (episode.rows & bad or episode.rows & self._lasting.rows.keys())
            and not (record.continues and episode.latest == record.step)
            and episode.may_end(record.step, record.ended_by)
            and any(map(record.was_scanned, episode.rows))
        ]
        on = [episode for episode in self._episodes if episode not in over]
        over = [each for each in over if not any(episode.after is each for episode in on)]
        for episode in over:
            self._episodes.end(episode)
        how = "all that was scanned in this step is finite"
        if bad:
            how = "so is all that followed from it"
        found = []
        for episode in over:
            # Its root, or, where its tensor is another one's in this step, the next that is seen.
            seen = (row for row in (episode.root, *sorted(episode.rows)) if record.was_scanned(row))
            if not episode.flaps and episode.after not in over:
                found.append(step.describe(next(seen), "recovered", how))
        return found

    # -- which rows count --------------------------------------------------------------------------

    def _bad(self, record: StepRecord) -> list[int]:
        """Rows that are bad and not ignored, in the order in which they went bad."""
        tickets = {row: int(record.rows[row]["ticket"]) for row in record.notable}
        bad = (row for row, ticket in tickets.items() if ticket and not self._ignored(row, record))
        return sorted(bad, key=tickets.__getitem__)

    def _ignored(self, row: int, record: StepRecord) -> bool:
        described = record.describe(row)
        dtype = getattr(torch, described[0]) if described else torch.float32
        return any(self._ignores(site, dtype) for site in record.nodes[row].sites)


@dataclass
class _Report:
    """A finding to be made of a bad row.

    Attributes:
        episode: that it belongs to.
        row: the row.
        news: as in `Finding`.
        addition: what is to be said beside the verdict.
        how: why it is an origin, if nothing in the step itself shows it.
    """

    episode: Episode
    row: int
    news: Literal["", "new", "again"] = ""
    addition: str = ""
    how: str = ""


def _mask(rows: Rows, row: int) -> Mask:
    """What makes of a row a mask: as long as it stays, so does what is known of it."""
    values = rows[row]
    return tuple(int(values[name]) for name in ("nan", "posinf", "min_key", "max_key"))


def _skipped(
    step: StepVerdicts, record: StepRecord, bad: list[int], max_skips: int
) -> list[Evidence]:
    """A step that a GradScaler skipped."""
    if record.skips == max_skips:
        evidence = step.describe(
            bad[0],
            "persistent-overflow",
            f"the GradScaler skipped {record.skips} steps in a row, this one at a scale of "
            f"{record.scale:g}",
        )
        evidence.finding = dataclasses.replace(evidence.finding, news="new")
    elif record.skips == 1:
        evidence = step.describe(
            bad[0],
            "scale-search",
            f"the GradScaler skipped the step and lowered its scale of {record.scale:g}",
        )
    else:
        return []
    evidence.affected = tuple(record.nodes[row].site for row in bad[1:])
    return [evidence]


def _spread(
    record: StepRecord, provenance: Provenance, episode: Episode, group: Group
) -> list[_Report]:
    """The first row that is bad in samples in which it was not, if a model made it.

    A second fault shows like that where a first one goes on: in another request of a batch that
    is served. Steps of a training run have other samples each time.
    """
    before = {row: episode.parts.get(row, BadParts()) for row in group}
    episode.parts |= {row: before[row].then(record.step, *record.bad_parts(row)) for row in group}
    if provenance.is_training:
        return []  # a training step, whose samples are others each time
    for row in group:
        new = before[row].new_in(episode.parts[row])
        if not new:
            continue
        node = record.nodes[row]
        place = record.around(node.place) if node.kind is Kind.INPUT else node.place
        if node.kind not in (Kind.INPUT, Kind.OUTPUT) or place is None or provenance.keeps(place):
            break  # what is worse comes from the caller, or was kept
        samples = _samples(new, before[row].size)
        how = f"made here in {samples}, beside what was bad in the step before"
        return [_Report(episode, row, "new", how=how)]
    return []


def _samples(parts: int, size: int) -> str:
    """Indices of dimension 0 in words."""
    shown = indices(parts, size)
    is_one = parts.bit_count() == 1
    return (
        f"sample{'s' * (not is_one)} {shown} of {size}" if shown else f"other samples of {size:,}"
    )


def _complete(evidence: Evidence) -> Finding:
    return dataclasses.replace(
        evidence.finding,
        affected=evidence.affected,
        causes=tuple(causes(evidence)),
        unlikely=tuple(unlikely(evidence)),
    )
