"""A directory of records -> the state of each rank, or why not.

Every folder and file is opened relative to the descriptor of the one above it, never through a symbolic link. A file
that has not changed since the last scan is not decoded again. A rank's lock is probed before its record is read, so
that a clean end between the two is never taken for a crash.

Invariants: one bad record costs a count of its reason and nothing of any other rank; it leaves its own rank's last good
state behind, as stale; a scan never raises and never blocks on what it finds.

Known limits: a rejected file counts once per scrape for as long as it lies there.
"""

from __future__ import annotations

import logging
import math
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from torchmem.errors import RecordError
from torchmem.wire.record import Record, Ring, decode
from torchmem.wire.store import RECORD_NAME, is_held, lock_name, open_record_bytes
from torchmem_exporter.states import Judge, RankKey, RankView, Sighting

logger = logging.getLogger("torchmem_exporter")

KNOWN_REASONS = (
    "books",
    "checksum",
    "clock",
    "directory",
    "folder",
    "hard_link",
    "identity",
    "magic",
    "name",
    "not_regular",
    "open",
    "oversize",
    "schema",
    "truncated",
    "uid",
    "version",
)
"""Reasons present at zero from the start."""

_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_RECORD_SUFFIX = ".record"
_RANK = re.compile(r"[0-9]+")

Signature = tuple[int, int, int, int, int]


@dataclass(frozen=True)
class Rejection:
    """One file or folder that could not be used."""

    path: str
    reason: str
    message: str


@dataclass(frozen=True)
class Snapshot:
    """Everything one scan found.

    Attributes:
        ranks: sorted by job and rank.
        errors: rejections so far, by reason.
        rejections: those of this scan.
        is_readable: whether the directory of records itself could be read.
    """

    ranks: tuple[RankView, ...]
    errors: Mapping[str, int]
    rejections: tuple[Rejection, ...]
    is_readable: bool


@dataclass
class _File:
    """What is known of one record file: its last good record, and what is wrong with it now, if anything."""

    signature: Signature | None = None
    record: Record | None = None
    rejection: Rejection | None = None


class Reader:
    """Reads a directory of records again and again; safe to call from several threads.

    Args:
        directory: where the folders of the jobs lie.
        stale_after_seconds: age past which the record of a living rank is stale.
        clock: Unix seconds.
    """

    def __init__(
        self, directory: Path, stale_after_seconds: float, clock: Callable[[], float] = time.time
    ) -> None:
        self.directory = directory
        self._clock = clock
        self._judge = Judge(stale_after_seconds)
        self._errors: Counter[str] = Counter(dict.fromkeys(KNOWN_REASONS, 0))
        self._files: dict[tuple[str, str], _File] = {}
        self._logged: set[tuple[str, str]] = set()
        self._guard = threading.Lock()

    def read(self, *, advance: bool = True) -> Snapshot:
        """Scans the directory.

        Args:
            advance: whether this is a scrape; a mere look neither counts rejections nor the showings of ended ranks.
        """
        with self._guard:
            scan = _Scan(self.directory, self._files)
            scan.run()
            self._files = scan.files
            views = self._judge.judge(scan.newest(), self._clock(), advance=advance)
            self._forget_books(views)
            self._note(scan.rejections, count=advance)
            return Snapshot(
                ranks=tuple(views.values()),
                errors=dict(sorted(self._errors.items())),
                rejections=tuple(scan.rejections),
                is_readable=scan.is_readable,
            )

    def _note(self, rejections: list[Rejection], *, count: bool) -> None:
        if count:
            self._errors.update(rejection.reason for rejection in rejections)
        for rejection in rejections:
            if (rejection.path, rejection.reason) not in self._logged:
                logger.warning("%s rejected (%s): %s", rejection.path, rejection.reason, rejection.message)
        self._logged = {(rejection.path, rejection.reason) for rejection in rejections}

    def _forget_books(self, views: Mapping[RankKey, RankView]) -> None:
        """Ranks that are no longer shown keep their identity and clock only: the files of old jobs may be many."""
        shown = {id(view.record) for view in views.values()}
        for file in self._files.values():
            if file.record is not None and file.record.devices and id(file.record) not in shown:
                file.record = msgspec.structs.replace(file.record, devices=[], modules=[], reftypes=[])


class _Scan:
    """One pass over the directory."""

    def __init__(self, directory: Path, known: Mapping[tuple[str, str], _File]) -> None:
        self.files: dict[tuple[str, str], _File] = {}
        self.rejections: list[Rejection] = []
        self.is_readable = False
        self._directory = directory
        self._known = known
        self._uids: frozenset[int] = frozenset()
        self._found: list[tuple[RankKey, Sighting]] = []

    def run(self) -> None:
        try:
            with _opened(self._directory) as dir_fd:
                self._uids = frozenset({os.geteuid(), 0, os.fstat(dir_fd).st_uid})
                names = sorted(entry.name for entry in os.scandir(dir_fd) if _may_be_folder(entry))
                self.is_readable = True
                for name in names:
                    self._scan_folder(dir_fd, name)
        except OSError as error:
            self._reject("", "directory", error.strerror or str(error))

    def newest(self) -> dict[RankKey, Sighting]:
        """The attempt of each rank that started last; of copies of one attempt, the living and then the latest."""
        newest: dict[RankKey, Sighting] = {}
        for key, sighting in self._found:
            if key not in newest or _order(sighting) > _order(newest[key]):
                newest[key] = sighting
        return newest

    def _scan_folder(self, dir_fd: int, folder: str) -> None:
        try:
            with _opened(folder, dir_fd) as folder_fd:
                if os.fstat(folder_fd).st_uid not in self._uids:
                    self._reject(folder, "uid", f"belongs to uid {os.fstat(folder_fd).st_uid}")
                    return
                names = sorted(n for n in os.listdir(folder_fd) if n.endswith(_RECORD_SUFFIX) and n[0] != ".")
                for name in names:
                    self._scan_file(folder_fd, folder, name)
        except FileNotFoundError:
            return  # a job's folder that is removed meanwhile is no error
        except OSError as error:
            self._reject(folder, "folder", error.strerror or str(error))

    def _scan_file(self, folder_fd: int, folder: str, name: str) -> None:
        path = f"{folder}/{name}"
        match = RECORD_NAME.fullmatch(name)
        if match is None:
            self._reject(path, "name", "no name of a record")
            return
        rank = int(match.group(1))
        held = is_held(folder_fd, lock_name(rank))
        file = self._known.get((folder, name)) or _File()
        try:
            signature = _signature(os.stat(name, dir_fd=folder_fd, follow_symlinks=False))
        except OSError:
            return  # removed meanwhile
        if signature != file.signature:
            self._reread(file, folder_fd, name, path)
        self.files[folder, name] = file
        if file.rejection is not None:
            self.rejections.append(file.rejection)
        if file.record is not None:
            key = RankKey(file.record.identity.train_job, rank)
            self._found.append((key, Sighting(file.record, file.rejection is None, held)))

    def _reread(self, file: _File, folder_fd: int, name: str, path: str) -> None:
        """Reads a file that is new or has changed; what cannot be used leaves the last good record as it is."""
        try:
            data, status = open_record_bytes(folder_fd, name, self._uids)
            file.signature = _signature(status)
            record = decode(data)
            _check_meaning(record, name)
            file.record, file.rejection = msgspec.structs.replace(record, ring=Ring()), None
        except RecordError as error:
            file.rejection = Rejection(path, error.reason, str(error))

    def _reject(self, path: str, reason: str, message: str) -> None:
        self.rejections.append(Rejection(path or str(self._directory), reason, message))
