"""A directory of records: the state of each rank, or why not.

    <directory>/<folder of a job>/rank-<N>.record, rank-<N>.lock

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
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from torchmem.errors import RecordError
from torchmem.wire.record import CELL, Device, Record, decode
from torchmem.wire.store import MAX_RECORD_BYTES, RECORD_NAME, is_held, lock_name, open_record_bytes
from torchmem_exporter.labels import clean_label
from torchmem_exporter.lifecycle import Life, State

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

_BASE_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FOLDER_FLAGS = _BASE_FLAGS | os.O_NOFOLLOW | os.O_NONBLOCK


class Rejection(NamedTuple):
    """A file or folder that a scan could not use."""

    path: str
    """Relative to the directory."""
    reason: str
    detail: str


@dataclass(frozen=True)
class Rank:
    """A rank worth exposing."""

    path: str
    record: Record
    state: State
    has_memory: bool


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


@dataclass
class _Entry:
    """What is remembered of one record file: its last readable content, and what is wrong with the present one."""

    fingerprint: tuple[int, ...]
    life: Life | None = None
    record: Record | None = None
    error: RecordError | None = None

    @property
    def may_pass(self) -> bool:
        """Whether the error may go away with the file unchanged, as a lack of descriptors does."""
        return self.error is not None and self.error.reason == "open"


class Reader:
    """Scans one directory; safe to use from several threads.

    Args:
        directory: where the jobs' folders lie.
        stale_after: seconds after which a live rank's record counts as old.
        clock: Unix seconds.
    """

    def __init__(self, directory: Path, *, stale_after: float, clock: Callable[[], float] = time.time) -> None:
        self.directory = directory
        self._stale_after = stale_after
        self._clock = clock
        self._guard = threading.Lock()
        self._entries: dict[tuple[str, str], _Entry] = {}
        self._num_errors = Counter(dict.fromkeys(REASONS, 0))

    def scan(self, *, is_scrape: bool) -> Snapshot:
        """Reads what has changed and judges every rank.

        Args:
            is_scrape: whether what is found is handed to a monitoring system: only that counts errors, and uses up
                the scrapes that an exited rank has left.
        """
        with self._guard:
            scan = _Scan(self._entries, self._clock(), self._stale_after)
            problem = scan.run(self.directory)
            self._entries = scan.entries
            ranks = scan.unique_ranks()
            if is_scrape:
                self._num_errors.update(rejection.reason for rejection in scan.rejections)
                for rank in ranks:
                    scan.life_of(rank).was_scraped(rank.state)
            return Snapshot(scan.now, ranks, tuple(scan.rejections), dict(self._num_errors), problem)


class _Scan:
    """One pass over the directory."""

    def __init__(self, remembered: dict[tuple[str, str], _Entry], now: float, stale_after: float) -> None:
        self.now = now
        self.entries: dict[tuple[str, str], _Entry] = {}
        self.rejections: list[Rejection] = []
        self._remembered = remembered
        self._stale_after = stale_after
        self._ranks: list[Rank] = []
        self._lives: dict[str, Life] = {}

    def run(self, directory: Path) -> str:
        """Scans every job's folder; returns why the directory cannot be read, or nothing."""
        try:
            with _descriptor(os.open(directory, _BASE_FLAGS)) as base_fd:
                uids = allowed_uids(os.fstat(base_fd))
                for folder in _folders(base_fd, self.rejections):
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
        for rank in sorted(self._ranks, key=_precedence):
            key = (clean_label(rank.record.identity.train_job), rank.record.identity.rank)
            if (other := chosen.get(key)) is not None:
                detail = f"the same job and rank as {rank.path}, which lives or is newer"
                self.rejections.append(Rejection(other.path, "duplicate", detail))
            chosen[key] = rank
        return tuple(chosen[key] for key in sorted(chosen))

    def life_of(self, rank: Rank) -> Life:
        """What is remembered of a rank's attempt."""
        return self._lives[rank.path]

    def _scan_folder(self, base_fd: int, folder: str, uids: frozenset[int]) -> None:
        try:
            with _descriptor(os.open(folder, _FOLDER_FLAGS, dir_fd=base_fd)) as dir_fd:
                if os.fstat(dir_fd).st_uid not in uids:
                    raise RecordError("uid", "the folder belongs to another user")
                for name in sorted(filter(RECORD_NAME.fullmatch, os.listdir(dir_fd))):  # noqa: PTH208  # no path leads to a descriptor
                    self._scan_record(dir_fd, folder, name, uids)
        except RecordError as error:
            self.rejections.append(Rejection(folder, error.reason, str(error)))
        except OSError as error:
            reason = "vanished" if isinstance(error, FileNotFoundError) else "directory"
            self.rejections.append(Rejection(folder, reason, str(error.strerror)))

    def _scan_record(self, dir_fd: int, folder: str, name: str, uids: frozenset[int]) -> None:
        path = f"{folder}/{name}"
        rank = _rank_of(name)
        # Asked before the record is read: who ends cleanly writes the last record first and then lets go.
        was_held = is_held(dir_fd, lock_name(rank))
        try:
            entry = self._entry(dir_fd, folder, name, uids)
        except RecordError as error:
            self.rejections.append(Rejection(path, error.reason, str(error)))
            return
        self.entries[folder, name] = entry
        if entry.error is not None:
            self.rejections.append(Rejection(path, entry.error.reason, str(entry.error)))
        if entry.record is None or entry.life is None:
            return
        # Asked again: who has just started may have locked and written since.
        held = was_held or (not entry.record.clock.final and is_held(dir_fd, lock_name(rank)))
        verdict = entry.life.judge(
            entry.record.clock,
            is_held=held,
            is_readable=entry.error is None,
            now=self.now,
            stale_after=self._stale_after,
        )
        if verdict is None:
            entry.record = None  # nothing of it will be shown again: jobs of weeks must not pile up in memory
            return
        self._ranks.append(Rank(path, entry.record, verdict.state, verdict.has_memory))
        self._lives[path] = entry.life

    def _entry(self, dir_fd: int, folder: str, name: str, uids: frozenset[int]) -> _Entry:
        """What is known of a file, read anew if it has changed."""
        try:
            status = os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
        except FileNotFoundError:
            raise RecordError("vanished", "was removed while the folder was read") from None
        except OSError as error:
            raise RecordError("open", str(error.strerror)) from None
        fingerprint = (status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size)
        known = self._remembered.get((folder, name))
        if known is not None and known.fingerprint == fingerprint and not known.may_pass:
            return known
        try:
            record = _read(dir_fd, name, status, uids)
        except RecordError as error:
            if known is None:
                return _Entry(fingerprint, error=error)
            return _Entry(fingerprint, life=known.life, record=known.record, error=error)
        life = known.life if known else None
        if life is None or life.attempt != record.identity.attempt:
            life = Life(record.identity.attempt)
        life.wrote()
        return _Entry(fingerprint, life=life, record=record)


def allowed_uids(directory: os.stat_result) -> frozenset[int]:
    """Whose records are read: this user's, root's, and those of the directory's owner."""
    return frozenset({os.geteuid(), 0, directory.st_uid})


@contextmanager
def _descriptor(fd: int) -> Iterator[int]:
    try:
        yield fd
    finally:
        os.close(fd)


def _folders(base_fd: int, rejections: list[Rejection]) -> list[str]:
    """Names of the jobs' folders; links are no folders."""
    folders = []
    with os.scandir(base_fd) as entries:
        for entry in entries:
            if entry.is_symlink():
                rejections.append(Rejection(entry.name, "symlink", "links are not followed"))
            elif not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False):
                folders.append(entry.name)
    return sorted(folders)


def _rank_of(name: str) -> int:
    match = RECORD_NAME.fullmatch(name)
    assert match is not None  # noqa: S101  # names were chosen by this pattern
    return int(match[1])


def _precedence(rank: Rank) -> tuple[bool, float, float]:
    return rank.state.is_alive, rank.record.identity.start_time, rank.record.clock.written_at


def _read(dir_fd: int, name: str, status: os.stat_result, uids: frozenset[int]) -> Record:
    """Reads and checks one record; looks before it opens, since opening some devices has effects."""
    if stat.S_ISLNK(status.st_mode):
        raise RecordError("symlink", "links are not followed")
    if not stat.S_ISREG(status.st_mode):
        raise RecordError("not_regular", "not a regular file")
    if status.st_size > MAX_RECORD_BYTES:
        raise RecordError("oversize", f"{status.st_size} bytes exceed {MAX_RECORD_BYTES}")
    data, _ = open_record_bytes(dir_fd, name, uids)
    record = decode(data)
    _check(record, _rank_of(name))
    return record


def _check(record: Record, rank: int) -> None:
    """Refuses what parsed and yet cannot be exposed: it would break the whole scrape, or say what is not so."""
    if record.identity.rank != rank:
        raise RecordError("identity", f"claims to be rank {record.identity.rank}")
    clock = record.clock
    amounts = [clock.step, clock.step_seconds, clock.tracker_seconds, clock.written_at, record.identity.start_time]
    amounts += [
        amount for device in record.devices for amount in (device.allocator.num_ooms, device.allocator.num_retries)
    ]
    if not all(math.isfinite(amount) and amount >= 0 for amount in amounts):
        raise RecordError("values", "a time or a count is negative or no number")
    if _repeats(d.name for d in record.devices) or _repeats(labeler.name for labeler in record.labelers):
        raise RecordError("values", "a device or a labeler appears twice")
    for device in record.devices:
        _check_sums(device)


def _check_sums(device: Device) -> None:
    for name, book, total in (
        ("usage", device.usage, device.usage_bytes),
        ("step_peak", device.step_peak, device.step_peak_bytes),
    ):
        held = sum(num_bytes for _, _, num_bytes in CELL.iter_unpack(book))
        if held != total:
            raise RecordError("sums", f"{device.name} {name}: the parts are {held} bytes, the total {total}")


def _repeats(names: Iterable[str]) -> bool:
    listed = [clean_label(name) for name in names]
    return len(set(listed)) < len(listed)
