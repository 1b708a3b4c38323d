"""A directory of records: the state of each rank, or why not.

    <directory>/<folder of a job>/rank-<N>.record, rank-<N>.lock, post-mortem/rank-<N>.<attempt>.record

Invariants: nothing that lies in the directory (a FIFO, a link, a bomb, garbage, a vanishing file) blocks a scan, raises
or costs another rank; each is a ``Rejection`` with a reason. A rank that is exposed has a record that parsed and whose
books add up; one whose record can no longer be read keeps the last that could, as stale. An unchanged file is not
decoded again. No two ranks exposed share job and rank.

Known limits: a missing directory is no error, since no job may have run yet, but it is a ``problem``; a record whose
owner may not be read by this user is rejected on every scan.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from torchmem.errors import RecordError
from torchmem.wire import postmortem
from torchmem.wire.postmortem import Buried
from torchmem.wire.record import Record
from torchmem.wire.store import is_held, lock_name, record_name
from torchmem_exporter.labels import clean_label
from torchmem_exporter.reading import listing
from torchmem_exporter.reading.burial import BURY_AFTER_SECONDS, Undertaker
from torchmem_exporter.reading.checked import read_checked
from torchmem_exporter.reading.lifecycle import KEEP_CONSUMER_SECONDS, KEEP_CRASHED_SECONDS, Life, State, Verdict
from torchmem_exporter.reading.listing import status_of
from torchmem_exporter.reading.state import FILE_NAME, StateFile
from torchmem_exporter.reading.sweeper import Sweeper
from torchmem_exporter.reading.tallies import Tallies

REASONS = (
    "books",
    "checksum",
    "directory",
    "duplicate",
    "hard_link",
    "identity",
    "magic",
    "not_regular",
    "open",
    "oversize",
    "schema",
    "sums",
    "symlink",
    "truncated",
    "uid",
    "values",
    "vanished",
    "version",
)
"""Why a record may be rejected; counted from zero, so that the first rejection shows as an increase."""


class Rejection(NamedTuple):
    """A file or folder that a scan could not use."""

    path: str
    """Relative to the directory."""
    reason: str
    detail: str


@dataclass(frozen=True)
class Rank:
    """A rank worth exposing; the same object from scan to scan while nothing of it changes."""

    path: str
    record: Record
    state: State
    has_memory: bool
    ooms: Mapping[str, int] = field(default_factory=dict)
    """By device's name, of all attempts of the rank together; a device that is missing has what its record says."""
    retries: Mapping[str, int] = field(default_factory=dict)
    """Likewise."""


@dataclass(frozen=True)
class Snapshot:
    """What one scan found."""

    taken_at: float
    ranks: tuple[Rank, ...]
    """Sorted by job and rank."""
    rejections: tuple[Rejection, ...]
    num_errors: dict[str, int]
    """Rejections of all scrapes so far, by reason."""
    problem: str
    """Why the directory cannot be read; empty when it can."""
    num_unburied: int = 0
    """Records of crashed ranks that could not be moved to a post-mortem folder."""
    num_state_failures: int = 0
    """How often the sidecar's own state could not be read or written."""


@dataclass
class _Entry:
    """What is remembered of one record file: its last readable content, and what is wrong with the present one."""

    status: os.stat_result
    life: Life | None = None
    record: Record | None = None
    error: RecordError | None = None
    start_time: float = -math.inf
    """Of the attempt."""
    shown: Rank | None = None
    stays: bool = False
    """Whether it could not be moved after a crash."""

    def holds(self, status: os.stat_result) -> bool:
        """Whether a file of this status is known already; an error may pass with the file unchanged."""
        may_pass = self.error is not None and self.error.reason == "open"
        return not may_pass and _fingerprint(self.status) == _fingerprint(status)


class Reader:
    """Scans one directory; safe to use from several threads.

    Args:
        directory: where the jobs' folders lie.
        stale_after: seconds after which a live rank's record counts as old.
        clock: Unix seconds.
        state_path: file of what outlives the sidecar; ``None`` for one in the directory.
        keep_seconds: how long what an ended job has left stays; infinite for always.
    """

    def __init__(
        self,
        directory: Path,
        *,
        stale_after: float,
        clock: Callable[[], float] = time.time,
        state_path: Path | None = None,
        keep_seconds: float = math.inf,
    ) -> None:
        self.directory = directory
        self._stale_after = stale_after
        self._clock = clock
        self._guard = threading.Lock()
        self._entries: dict[tuple[str, str], _Entry] = {}
        self._num_errors = Counter(dict.fromkeys(REASONS, 0))
        self._asked_at: dict[str, float] = {}
        """By consumer."""
        self._state = StateFile(state_path or directory / FILE_NAME)
        self._tallies = Tallies(self._state)
        self._undertaker = Undertaker()
        self._sweeper = Sweeper(keep_seconds)

    @property
    def state(self) -> StateFile:
        """What outlives the sidecar."""
        return self._state

    def save(self) -> None:
        """Keeps what attempts have counted, where that has changed; no scan waits for the disk."""
        self._tallies.save(guard=self._guard)

    def sweep(self) -> None:
        """Removes what jobs have left that ended long ago."""
        with self._guard:  # a scan would count what goes meanwhile as vanished
            self._sweeper.sweep(self.directory, self._clock())

    def scan(self, consumer: str | None) -> Snapshot:
        """Reads what has changed and judges every rank.

        Args:
            consumer: the monitoring system that what is found is handed to, as ``prometheus``: counts errors, uses up
                one of the showings that an exited rank has left with it, moves records of the dead; ``None`` to look
                only.
        """
        with self._guard:
            now = self._clock()
            if consumer is not None:
                self._asked_at[consumer] = now
            # One who asked once, by hand, must not keep the ranks that ended since in memory.
            asking = frozenset(name for name, at in self._asked_at.items() if now - at <= KEEP_CONSUMER_SECONDS)
            watch = _Watch(now, self._stale_after, consumer, asking)
            scan = _Scan(watch, self._entries, self._tallies, self._undertaker)
            problem = scan.run(self.directory)
            self._entries = scan.entries
            ranks = scan.unique_ranks()
            if consumer is not None:
                self._num_errors.update(rejection.reason for rejection in scan.rejections)
                for rank in ranks:
                    scan.life_of(rank).was_shown(rank.state, consumer)
            return Snapshot(
                watch.now,
                ranks,
                tuple(scan.rejections),
                dict(self._num_errors),
                problem,
                self._undertaker.num_failures,
                self._state.num_failures,
            )


@dataclass(frozen=True)
class _Watch:
    """When, how and for whom a scan looks."""

    now: float
    stale_after: float
    consumer: str | None
    consumers: frozenset[str]
    """All that have asked lately."""


class _Scan:
    """One pass over the directory."""

    def __init__(
        self, watch: _Watch, remembered: dict[tuple[str, str], _Entry], tallies: Tallies, undertaker: Undertaker
    ) -> None:
        self.entries: dict[tuple[str, str], _Entry] = {}
        self.rejections: list[Rejection] = []
        self._watch = watch
        self._remembered = remembered
        self._tallies = tallies
        self._undertaker = undertaker
        self._shown: list[tuple[str, _Entry, Verdict]] = []
        self._lives: dict[str, Life] = {}
        self._graves: set[str] = set()

    def run(self, directory: Path) -> str:
        """Scans every job's folder; returns why the directory cannot be read, or nothing."""
        try:
            with listing.descriptor(os.open(directory, listing.BASE_FLAGS)) as base_fd:
                uids = listing.allowed_uids(os.fstat(base_fd))
                found = listing.folders(base_fd)
                self.rejections += (Rejection(name, "symlink", "links are not followed") for name in found.links)
                for folder in found.jobs:
                    self._scan_folder(base_fd, folder, uids)
        except FileNotFoundError:
            return f"{directory} does not exist (yet): a job makes it, or set --dir to where the jobs write"
        except OSError as error:
            self.rejections.append(Rejection(".", "directory", str(error.strerror)))
            return f"{directory} cannot be read: {error.strerror}"
        return ""

    def unique_ranks(self) -> tuple[Rank, ...]:
        """One rank for each job and number: the live one, else the latest."""
        chosen: dict[tuple[str, int], Rank] = {}
        ranks = (self._rank(path, entry, entry.record, verdict) for path, entry, verdict in self._shown if entry.record)
        for rank in sorted(ranks, key=_precedence):
            key = (clean_label(rank.record.identity.train_job), rank.record.identity.rank)
            other = chosen.get(key)
            if other is not None and other.path not in self._graves:
                detail = f"the same job and rank as {rank.path}, which lives or is newer"
                self.rejections.append(Rejection(other.path, "duplicate", detail))
            chosen[key] = rank
        return tuple(chosen[key] for key in sorted(chosen))

    def _rank(self, path: str, entry: _Entry, record: Record, verdict: Verdict) -> Rank:
        """Made when all is read: what an earlier attempt counted may have been found after the rank itself."""
        ooms, retries = self._tallies.of(record.identity)
        new = Rank(path, record, verdict.state, verdict.has_memory, ooms, retries)
        if entry.shown is None or not _is_same(entry.shown, new):
            entry.shown = new
        return entry.shown

    def life_of(self, rank: Rank) -> Life:
        """What is remembered of a rank's attempt."""
        return self._lives[rank.path]

    def _scan_folder(self, base_fd: int, folder: str, uids: frozenset[int]) -> None:
        try:
            with listing.descriptor(os.open(folder, listing.FOLDER_FLAGS, dir_fd=base_fd)) as dir_fd:
                if os.fstat(dir_fd).st_uid not in uids:
                    raise RecordError("uid", f"the folder belongs to another user{_owner(base_fd, folder)}")
                for rank, name in listing.records(dir_fd):
                    self._scan_record(dir_fd, folder, rank, name, uids)
                # Also what was moved there since the folder was listed.
                self._scan_graves(dir_fd, folder, uids)
        except RecordError as error:
            self.rejections.append(Rejection(folder, error.reason, str(error)))
        except PermissionError as error:
            self.rejections.append(Rejection(folder, "directory", f"{error.strerror}{_owner(base_fd, folder)}"))
        except OSError as error:
            reason = "vanished" if isinstance(error, FileNotFoundError) else "directory"
            self.rejections.append(Rejection(folder, reason, str(error.strerror)))

    def _scan_record(self, dir_fd: int, folder: str, rank: int, name: str, uids: frozenset[int]) -> None:
        path, key = f"{folder}/{name}", (folder, name)
        # Asked before the record is read: who ends cleanly writes the last record first and then lets go.
        was_held = is_held(dir_fd, lock_name(rank))
        try:
            status = status_of(dir_fd, name)
        except RecordError as error:
            self.rejections.append(Rejection(path, error.reason, str(error)))
            return
        entry = self.entries[key] = self._entry(self._remembered.get(key), dir_fd, name, rank, status, uids)
        if entry.error is not None:
            self.rejections.append(Rejection(path, entry.error.reason, str(entry.error)))
        if entry.record is None or entry.life is None:
            return
        # Asked again: who has just started may have locked and written since.
        held = was_held or (not entry.record.clock.final and is_held(dir_fd, lock_name(rank)))
        verdict = self._judged(entry, entry.life, entry.record, is_held=held)
        if entry.life.has_been_dead_for(BURY_AFTER_SECONDS, self._watch.now) and not held:
            path = self._bury(dir_fd, folder, name, entry) or path
        self._show(path, entry, verdict)

    def _judged(self, entry: _Entry, life: Life, record: Record, *, is_held: bool) -> Verdict | None:
        return life.judge(
            record.clock,
            is_held=is_held,
            is_readable=entry.error is None,
            now=self._watch.now,
            stale_after=self._watch.stale_after,
        )

    def _bury(self, dir_fd: int, folder: str, name: str, entry: _Entry) -> str:
        """Moves the record of a crashed rank; returns where it lies then, or nothing."""
        if self._watch.consumer is None or entry.record is None or entry.error is not None or entry.stays:
            return ""
        # Asked last: a new attempt that has begun meanwhile does this itself.
        if is_held(dir_fd, lock_name(entry.record.identity.rank)):
            return ""
        moved = self._undertaker.bury(dir_fd, folder, entry.record.identity, entry.status)
        if not moved:
            entry.stays = True
            return ""
        name_there = f"{postmortem.FOLDER}/{moved}"
        with suppress(RecordError):
            entry.status = status_of(dir_fd, name_there)
        del self.entries[folder, name]
        self.entries[folder, name_there] = entry
        self._graves.add(f"{folder}/{name_there}")
        return f"{folder}/{name_there}"

    def _scan_graves(self, dir_fd: int, folder: str, uids: frozenset[int]) -> None:
        """Reads the job's post-mortem folder: who died lately is shown, unless another has taken its place."""
        try:
            with postmortem.opened(dir_fd) as folder_fd:
                files = postmortem.listed(folder_fd)
                for file in files:
                    if (folder, f"{postmortem.FOLDER}/{file.name}") not in self.entries:
                        self._scan_grave(folder_fd, folder, file, uids)
                if self._watch.consumer is not None:
                    self._undertaker.prune(folder_fd, folder, files, self._watch.now)
        except FileNotFoundError:
            return
        except OSError as error:
            self.rejections.append(Rejection(f"{folder}/{postmortem.FOLDER}", "directory", str(error.strerror)))

    def _scan_grave(self, folder_fd: int, folder: str, file: Buried, uids: frozenset[int]) -> None:
        name = f"{postmortem.FOLDER}/{file.name}"
        path = f"{folder}/{name}"
        known = self._remembered.get((folder, name)) or self._moved(folder, file)
        if known is None and self._watch.now - file.status.st_mtime > KEEP_CRASHED_SECONDS:
            return  # nothing of it would be shown
        entry = self.entries[folder, name] = self._entry(known, folder_fd, file.name, file.rank, file.status, uids)
        if entry.error is not None:
            self.rejections.append(Rejection(path, entry.error.reason, str(entry.error)))
        if entry.record is None or entry.life is None:
            return
        successor = self.entries.get((folder, record_name(file.rank)))
        if entry.record.clock.final or (successor is not None and successor.start_time >= entry.start_time):
            entry.record = entry.shown = None
            return
        verdict = self._judged(entry, entry.life, entry.record, is_held=False)
        self._graves.add(path)
        self._show(path, entry, verdict)

    def _moved(self, folder: str, file: Buried) -> _Entry | None:
        """What was remembered of a file at the place where it lay before its rank's next attempt moved it."""
        before = self._remembered.get((folder, record_name(file.rank)))
        if before is None or not postmortem.is_same_content(before.status, file.status):
            return None
        return _Entry(file.status, before.life, before.record, before.error, before.start_time)

    def _show(self, path: str, entry: _Entry, verdict: Verdict | None) -> None:
        """Adds a rank to what the scan found, as long as there is something to expose for whom it is made."""
        life, record, consumer = entry.life, entry.record, self._watch.consumer
        if life is None or record is None:
            return
        if verdict is None or life.is_used_up(verdict.state, self._watch.consumers):
            # Who only looks takes nothing away: what nobody is to be shown any more, and the dead that are to be moved.
            if consumer is not None or (verdict is None and record.clock.final):
                entry.record = entry.shown = None  # jobs of weeks must not pile up in memory
            return
        if consumer is not None and not life.may_show(verdict.state, consumer):
            return
        self._shown.append((path, entry, verdict))
        self._lives[path] = life

    def _entry(
        self,
        known: _Entry | None,
        dir_fd: int,
        name: str,
        rank: int,
        status: os.stat_result,
        uids: frozenset[int],
    ) -> _Entry:
        """What is known of a file, read anew if it has changed."""
        if known is not None and known.holds(status):
            return known
        try:
            record = read_checked(dir_fd, name, rank, status, uids)
        except RecordError as error:
            if known is None:
                return _Entry(status, error=error)
            return _Entry(status, known.life, known.record, error, known.start_time)
        life = known.life if known else None
        if life is None or life.attempt != record.identity.attempt:
            life = Life(record.identity.attempt)
        life.wrote()
        self._tallies.note(record, self._watch.now)
        return _Entry(status, life, record, start_time=record.identity.start_time)


def _owner(base_fd: int, folder: str) -> str:
    """Whose it is, where that explains why it cannot be read."""
    with suppress(RecordError):
        owner = status_of(base_fd, folder).st_uid
        if owner != os.geteuid():
            return f": it belongs to uid {owner}, and this is uid {os.geteuid()}: run the sidecar as who trains"
    return ""


def _fingerprint(status: os.stat_result) -> tuple[int, ...]:
    return status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size


def _is_same(a: Rank, b: Rank) -> bool:
    """By identity: comparing records would cost more than it saves."""
    same = a.record is b.record and a.ooms is b.ooms and a.retries is b.retries
    return same and (a.path, a.state, a.has_memory) == (b.path, b.state, b.has_memory)


def _precedence(rank: Rank) -> tuple[bool, float, float]:
    return rank.state.is_alive, rank.record.identity.start_time, rank.record.clock.written_at
