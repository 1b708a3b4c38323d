"""What the page says: a frozen view of one look at the ranks, all texts cut, none escaped.

Invariants: pure; who needs attention is never left out for one who does not; a rank that holds memory no more is told
as of its last record.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from torchmem.wire.record import Device, filled_share
from torchmem_exporter.drift.judge import Verdict
from torchmem_exporter.findings import WORDS, Finding, findings
from torchmem_exporter.labels import clean_label
from torchmem_exporter.page.choice import Choice
from torchmem_exporter.page.detail import MAX_PARTS, Detail, detail, ordered
from torchmem_exporter.reading.lifecycle import State
from torchmem_exporter.reading.reader import Rank, Snapshot
from torchmem_exporter.words import rate, shown, signed_percent, span

MAX_ROWS = 64
MAX_ROWS_BYTES = 44_000
MAX_FINDINGS = 12
MAX_NAMED = 4
"""Ranks that a warning names."""
MAX_REJECTIONS = 12
MAX_DETAIL = 160
_ROW_BYTES = 430
"""Of a row's HTML, besides its texts."""
_URGENCY = (State.CRASHED, State.STALE, State.RUNNING, State.EXITED)

Verdicts = Mapping[str, Verdict]
"""By device's name."""


class NotHereError(Exception):
    """No rank or device is as asked for; in the words of one who asked."""


@dataclass(frozen=True)
class Looked:
    """One look at the ranks."""

    snapshot: Snapshot
    verdicts: Sequence[Verdicts]
    """One for each rank."""
    directory: str


@dataclass(frozen=True)
class Row:
    """A rank in the table of all."""

    key: str
    """Tells ranks apart from look to look."""
    href: str
    rank: int
    state: str
    step: int
    share: float | None
    """Of the device's limit, at the step peak."""
    peak_bytes: int | None
    limit_bytes: int | None
    drift: str
    growth: str
    words: tuple[str, ...]
    age: str
    is_chosen: bool


@dataclass(frozen=True)
class Job:
    """The ranks of a job on this node."""

    key: str
    """Tells jobs apart, also those whose names are shown alike."""
    name: str
    world_size: int
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Warned:
    """A warning, and whom it concerns."""

    word: str
    text: str
    ranks: tuple[tuple[str, str], ...]
    """Address and name."""
    num_more: int


@dataclass(frozen=True)
class Rejected:
    """A file that could not be used."""

    path: str
    reason: str
    detail: str


@dataclass(frozen=True)
class View:
    """The whole page."""

    directory: str
    taken_at: float
    choice: Choice
    problem: str = ""
    """Why the directory cannot be read."""
    message: str = ""
    """Why what was asked for is not shown."""
    summary: str = ""
    num_ranks: int = 0
    num_rows_left_out: int = 0
    jobs: tuple[Job, ...] = ()
    warnings: tuple[Warned, ...] = ()
    num_warnings_left_out: int = 0
    rejections: tuple[Rejected, ...] = ()
    num_rejections: int = 0
    detail: Detail | None = None

    @property
    def toggle(self) -> str:
        """Address of the same page, following the ranks or not."""
        return f"/{replace(self.choice, is_live=not self.choice.is_live).query}"


@dataclass(frozen=True)
class _Seen:
    """A rank with what is known of it."""

    rank: Rank
    verdicts: Verdicts
    findings: tuple[Finding, ...]

    @property
    def job(self) -> str:
        return clean_label(self.rank.record.identity.train_job)

    @property
    def number(self) -> int:
        return self.rank.record.identity.rank


def view(looked: Looked, choice: Choice, room: float = 1.0) -> View:
    """The page for a choice.

    Args:
        looked: what there is.
        choice: what of it is asked for.
        room: share of the rows and rectangles to show that there are at most.

    Raises:
        NotHereError: no rank or device is as chosen.
    """
    seen, now = _seen(looked), looked.snapshot.taken_at
    if not seen and choice == Choice(is_live=choice.is_live):
        return _overview(looked, choice, seen, room)
    chosen = _chosen(seen, choice)
    device, of_rank = _device(chosen, choice), choice.of(chosen.job, chosen.number)
    told = detail(chosen.rank, chosen.verdicts, device, of_rank, now, int(MAX_PARTS * room))
    return replace(_overview(looked, choice, seen, room, chosen), detail=told)


def refused(looked: Looked, choice: Choice, message: str, room: float = 1.0) -> View:
    """The page where what was asked for is not there: why, and what is; it goes on by itself once that is there."""
    return replace(_overview(looked, choice, _seen(looked), room), message=message)


def _seen(looked: Looked) -> list[_Seen]:
    now = looked.snapshot.taken_at
    return [
        _Seen(rank, verdicts, tuple(findings(rank, verdicts, now)))
        for rank, verdicts in zip(looked.snapshot.ranks, looked.verdicts, strict=True)
    ]


def _overview(looked: Looked, choice: Choice, seen: Sequence[_Seen], room: float, chosen: _Seen | None = None) -> View:
    snapshot = looked.snapshot
    jobs = _jobs(seen, choice, chosen, snapshot.taken_at, int(MAX_ROWS_BYTES * room))
    num_rows = sum(len(job.rows) for job in jobs)
    warnings = _warnings(seen, choice)
    return View(
        directory=shown(looked.directory, MAX_DETAIL),
        taken_at=snapshot.taken_at,
        choice=choice,
        problem=shown(snapshot.problem, 2 * MAX_DETAIL),
        summary=_summary(seen),
        num_ranks=len(seen),
        num_rows_left_out=len(seen) - num_rows,
        jobs=jobs,
        warnings=warnings[:MAX_FINDINGS],
        num_warnings_left_out=max(0, len(warnings) - MAX_FINDINGS),
        rejections=tuple(
            Rejected(shown(r.path, 2 * MAX_DETAIL // 3), shown(r.reason), shown(r.detail, MAX_DETAIL))
            for r in snapshot.rejections[:MAX_REJECTIONS]
        ),
        num_rejections=len(snapshot.rejections),
    )


def _summary(seen: Sequence[_Seen]) -> str:
    states = [one.rank.state for one in seen]
    counted = [f"{states.count(state)} {state.value}" for state in _URGENCY if state in states]
    return ", ".join(counted) or "no ranks"


# -- the table of all ranks


def _jobs(seen: Sequence[_Seen], choice: Choice, chosen: _Seen | None, now: float, max_bytes: int) -> tuple[Job, ...]:
    """The ranks by job; where they are too many, the chosen one and those that need attention."""
    num_bytes, kept = 0, []
    urgent = sorted(seen, key=lambda one: (one is not chosen, _URGENCY.index(one.rank.state), not one.findings))
    for one in urgent[:MAX_ROWS]:
        row = _row(one, choice, now, is_chosen=one is chosen)
        num_bytes += _ROW_BYTES + len(row.href) + len(row.key)
        if num_bytes > max_bytes:
            break
        kept.append((one, row))
    kept.sort(key=lambda pair: (pair[0].job, pair[0].number))
    return tuple(
        Job(
            _job_key(name),
            shown(name),
            max(one.rank.record.identity.world_size for one, _ in pairs),
            tuple(row for _, row in pairs),
        )
        for name, pairs in ((name, list(group)) for name, group in groupby(kept, key=lambda pair: pair[0].job))
    )


def _row(one: _Seen, choice: Choice, now: float, *, is_chosen: bool) -> Row:
    rank = one.rank
    device = next(iter(ordered(rank.record.devices)), None)
    judgement = one.verdicts[device.name].judgement if device and device.name in one.verdicts else None
    growth = judgement.growth_bytes_per_second if judgement else None
    return Row(
        key=f"{one.number} {_job_key(one.job)}",
        href=f"/{choice.of(one.job, one.number).query}#rank",
        rank=one.number,
        state=rank.state.value,
        step=rank.record.clock.step,
        share=filled_share(device) if device else None,
        peak_bytes=device.step_peak_bytes if device else None,
        limit_bytes=device.limit_bytes if device else None,
        drift="" if judgement is None or judgement.drift_ratio is None else signed_percent(judgement.drift_ratio),
        growth="" if judgement is None or growth is None else rate(growth) if judgement.is_floor_growing else "steady",
        words=tuple(dict.fromkeys(finding.word for finding in one.findings if finding.word != rank.state.value)),
        age=span(now - rank.record.clock.written_at),
        is_chosen=is_chosen,
    )


def _job_key(job: str) -> str:
    return hashlib.blake2s(job.encode(), digest_size=8).hexdigest()


# -- warnings


def _warnings(seen: Sequence[_Seen], choice: Choice) -> tuple[Warned, ...]:
    """The warnings of all ranks, the worst first; what several have in common is said once."""
    concerned: dict[Finding, list[_Seen]] = {}
    for one in seen:
        for finding in one.findings:
            concerned.setdefault(finding, []).append(one)
    several_jobs = len({one.job for one in seen}) > 1
    warned = []
    for finding, those in sorted(concerned.items(), key=lambda item: WORDS.index(item[0].word)):
        named = tuple(
            (
                f"/{choice.of(one.job, one.number).query}#rank",
                f"{shown(one.job, 30)} rank {one.number}" if several_jobs else f"rank {one.number}",
            )
            for one in those[:MAX_NAMED]
        )
        warned.append(Warned(finding.word, finding.text, named, max(0, len(those) - MAX_NAMED)))
    return tuple(warned)


# -- what was chosen


def _chosen(seen: Sequence[_Seen], choice: Choice) -> _Seen:
    of_job = [one for one in seen if choice.job in (None, one.job)]
    if not of_job:
        name = f"no job {shown(choice.job)}" if choice.job is not None else "no rank"
        raise NotHereError(f"There is {name} here: it may have ended, or run on another node.")
    of_rank = [one for one in of_job if choice.rank in (None, one.number)]
    if not of_rank:
        raise NotHereError(
            f"Job {shown(of_job[0].job)} has no rank {choice.rank} here: it may have ended, or run on another node."
        )
    return of_rank[0]


def _device(one: _Seen, choice: Choice) -> Device | None:
    devices = ordered(one.rank.record.devices)
    if choice.device is None:
        return devices[0] if devices else None
    for device in devices:
        if clean_label(device.name) == choice.device:
            return device
    raise NotHereError(f"Rank {one.number} of job {shown(one.job)} has no device {shown(choice.device)}.")
