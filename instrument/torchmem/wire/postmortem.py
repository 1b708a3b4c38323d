"""The post-mortem folder: the last records of attempts that died without a clean end, within bounds.

    <directory>/<folder of the job>/post-mortem/rank-<N>.<attempt>.record

Whoever notices first moves the record there: the next attempt of the rank, before it would overwrite it, or the
sidecar. A record is moved by renaming, so it is whole in one place or the other.

Invariants: torch-free; relative to descriptors, links are never followed; the folder holds at most ``Bounds`` of
regular files named like a record, oldest out first, and nothing else in it is touched; a record that took the place of
the dead one's meanwhile is put back.

Known limits: the age of a record is that of its last write; a record put back is missing for an instant.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import re
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from torchmem.errors import RecordError
from torchmem.wire.record import decode
from torchmem.wire.store import BURIED_NAME, open_record_bytes, record_name

FOLDER = "post-mortem"

MAX_LISTED = 4096
"""Entries of a folder that are looked at."""

_PLAIN_ATTEMPT = re.compile(r"[A-Za-z0-9-]{1,64}")
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """How much a post-mortem folder keeps."""

    num_files: int = 64
    num_bytes: int = 256 << 20
    age_seconds: float = 14 * 86400.0


BOUNDS = Bounds()


class Buried(NamedTuple):
    """One file of a post-mortem folder."""

    name: str
    rank: int
    status: os.stat_result


def buried_name(rank: int, attempt: str) -> str:
    """File name of a dead attempt's record."""
    if not _PLAIN_ATTEMPT.fullmatch(attempt):
        attempt = hashlib.sha256(attempt.encode("utf-8", "surrogatepass")).hexdigest()
    return f"rank-{rank}.{attempt}.record"


@contextlib.contextmanager
def opened(dir_fd: int, *, makes: bool = False) -> Iterator[int]:
    """A descriptor of the post-mortem folder in the folder of a job.

    Args:
        dir_fd: descriptor of the folder of the job.
        makes: whether to make it where there is none, for whoever may use the job's folder.

    Raises:
        OSError: there is none, it cannot be made, or it is a link or another user's.
    """
    parent = os.fstat(dir_fd)
    is_new = False
    if makes:
        with contextlib.suppress(FileExistsError):
            os.mkdir(FOLDER, 0o700, dir_fd=dir_fd)
            is_new = True
    fd = os.open(FOLDER, _FOLDER_FLAGS, dir_fd=dir_fd)
    try:
        if is_new:
            if os.geteuid() == 0:  # or the job itself could not use it
                os.fchown(fd, parent.st_uid, parent.st_gid)
            os.fchmod(fd, stat.S_IMODE(parent.st_mode))
        if os.fstat(fd).st_uid not in (os.geteuid(), 0, parent.st_uid):
            raise PermissionError(1, f"{FOLDER} belongs to another user")
        yield fd
    finally:
        os.close(fd)


def listed(folder_fd: int) -> list[Buried]:
    """What is named like a record in a post-mortem folder, by name.

    Raises:
        OSError: the folder cannot be listed.
    """
    found = []
    with os.scandir(folder_fd) as entries:
        for entry in itertools.islice(entries, MAX_LISTED):
            if match := BURIED_NAME.fullmatch(entry.name):
                with contextlib.suppress(OSError):  # it may be gone again
                    status = os.stat(entry.name, dir_fd=folder_fd, follow_symlinks=False)
                    found.append(Buried(entry.name, int(match[1]), status))
    return sorted(found)


def bury(dir_fd: int, rank: int, attempt: str, seen: os.stat_result, bounds: Bounds = BOUNDS) -> str:
    """Moves the record of a dead attempt into the post-mortem folder, which is kept within its bounds.

    Args:
        dir_fd: descriptor of the folder of the job.
        rank: whose record.
        attempt: the attempt that wrote it.
        seen: the file's status when it was read.
        bounds: of the folder.

    Returns:
        Its name there; empty when somebody else has moved it, or when another record has taken its place, which is left
        where it was.

    Raises:
        OSError: it cannot be moved.
    """
    name, target, moving = record_name(rank), buried_name(rank, attempt), f".rank-{rank}.moving"
    with opened(dir_fd, makes=True) as folder_fd:
        try:
            # Not to its name there at once: it may be another record by now, and the right one lie there already.
            os.rename(name, moving, src_dir_fd=dir_fd, dst_dir_fd=folder_fd)
        except FileNotFoundError:
            return ""
        if not is_same_content(os.stat(moving, dir_fd=folder_fd, follow_symlinks=False), seen):
            with contextlib.suppress(FileExistsError):  # the writer has written again since: nothing is lost
                os.link(moving, name, src_dir_fd=folder_fd, dst_dir_fd=dir_fd, follow_symlinks=False)
            os.unlink(moving, dir_fd=folder_fd)
            return ""
        os.rename(moving, target, src_dir_fd=folder_fd, dst_dir_fd=folder_fd)
        prune(folder_fd, bounds)
    return target


def bury_predecessor(dir_fd: int, rank: int) -> None:
    """Keeps the record of a rank's attempt that died; for the next attempt, which holds the rank's lock.

    Raises:
        OSError: it cannot be moved.
    """
    try:
        data, seen = open_record_bytes(dir_fd, record_name(rank), frozenset({os.geteuid(), 0, os.fstat(dir_fd).st_uid}))
        record = decode(data)
    except RecordError:
        return  # there is none, or none that anybody could read
    if not record.clock.final:
        bury(dir_fd, rank, record.identity.attempt, seen)


def exceeds(files: list[Buried], now: float, bounds: Bounds = BOUNDS) -> bool:
    """Whether a folder holds more than it may."""
    return len(_surplus(files, now, bounds)) > 0


def prune(folder_fd: int, bounds: Bounds = BOUNDS) -> None:
    """Removes the oldest records until the folder is within its bounds; what cannot be removed stays."""
    with contextlib.suppress(OSError):
        for file in _surplus(listed(folder_fd), time.time(), bounds):
            with contextlib.suppress(OSError):
                os.unlink(file.name, dir_fd=folder_fd)


def _surplus(files: list[Buried], now: float, bounds: Bounds) -> list[Buried]:
    regular = [file for file in files if stat.S_ISREG(file.status.st_mode)]
    newest_first = sorted(regular, key=lambda file: file.status.st_mtime, reverse=True)
    num_bytes = 0
    for index, file in enumerate(newest_first):
        num_bytes += file.status.st_size
        is_old = now - file.status.st_mtime > bounds.age_seconds
        if index >= bounds.num_files or num_bytes > bounds.num_bytes or is_old:
            return newest_first[index:]
    return []


def is_same_content(a: os.stat_result, b: os.stat_result) -> bool:
    """Whether two looks saw one file, not written between them; it may have been renamed."""
    return _content(a) == _content(b)


def _content(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size
