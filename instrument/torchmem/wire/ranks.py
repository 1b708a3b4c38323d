"""The ranks whose records lie in a directory, as one look finds them.

Invariants: torch-free; one bad record never hides the others, and is named; nothing blocks on what lies there.

Limits: a snapshot of the records as they lie; whether a rank is stale is judged by this host's clock.
"""

from __future__ import annotations

import errno
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from torchmem.errors import RecordError
from torchmem.wire.record import Record, decode
from torchmem.wire.store import RECORD_NAME, is_held, lock_name, open_record_bytes

STALE_SECONDS = 60.0
"""A held rank whose record is older than this is stale."""

_NO_FOLDER = (errno.ENOTDIR, errno.ENOENT, errno.ELOOP)
"""What opening an entry as a folder says when it is a file, has gone, or is a link that is not followed."""


@dataclass(frozen=True)
class RankView:
    """One rank as its record and its lock show it."""

    record: Record
    state: str
    """``running``, ``stale``, ``crashed`` or ``exited``, as the sidecar has them."""
    path: str = ""
    """Of the record's file, relative to the directory."""


@dataclass(frozen=True)
class Found:
    """What a directory holds."""

    ranks: list[RankView] = field(default_factory=list)
    """By job and rank."""
    unreadable: list[str] = field(default_factory=list)
    """One line for each record that could not be read."""


def read_ranks(directory: Path, train_job: str | None = None, rank: int | None = None) -> Found:
    """The ranks whose records lie in the folders of a directory, or in the directory itself.

    Args:
        directory: where jobs' folders lie, or the folder of one job.
        train_job: only this job, by its name or by its folder's.
        rank: only this rank.
    """
    found = Found()
    try:
        root_fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return found
    except OSError as error:
        found.unreadable.append(printable(f"{directory}: {error.strerror}"))
        return found
    try:
        # Whoever owns the directory could write anything into it, so root may read a user's records there.
        allowed_uids = frozenset({os.geteuid(), 0, os.fstat(root_fd).st_uid})
        for folder, name, folder_fd in _record_files(root_fd, found):
            _read_one(found, (folder, name, folder_fd), allowed_uids, (train_job, rank))
    finally:
        os.close(root_fd)
    found.ranks.sort(key=lambda view: (view.record.identity.train_job, view.record.identity.rank))
    return found


def _record_files(root_fd: int, found: Found) -> Iterator[tuple[str, str, int]]:
    """(folder, file name, the folder's descriptor) of every record; a folder that cannot be listed is named."""
    yield from ((".", name, root_fd) for name in _record_names(root_fd))
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    for folder in sorted(os.listdir(root_fd)):
        try:
            folder_fd = os.open(folder, flags, dir_fd=root_fd)
        except OSError as error:
            if error.errno not in _NO_FOLDER:
                found.unreadable.append(printable(f"{folder}: {error.strerror}"))
            continue
        try:
            yield from ((folder, name, folder_fd) for name in _record_names(folder_fd))
        finally:
            os.close(folder_fd)


def _record_names(folder_fd: int) -> list[str]:
    return sorted(name for name in os.listdir(folder_fd) if RECORD_NAME.fullmatch(name))


def _read_one(
    found: Found, file: tuple[str, str, int], allowed_uids: frozenset[int], wanted: tuple[str | None, int | None]
) -> None:
    folder, name, folder_fd = file
    train_job, rank = wanted
    # Before the record: a clean end between the two must not be taken for a crash.
    held = is_held(folder_fd, lock_name(int(name.removeprefix("rank-").removesuffix(".record"))))
    try:
        data, _ = open_record_bytes(folder_fd, name, allowed_uids)
        record = decode(data)
    except RecordError as error:
        found.unreadable.append(printable(f"{folder}/{name}: {error.reason}: {error}"))
        return
    identity = record.identity
    if train_job not in (None, identity.train_job, folder) or rank not in (None, identity.rank):
        return
    found.ranks.append(RankView(record, _state(record, held=held), f"{folder}/{name}"))


def _state(record: Record, *, held: bool) -> str:
    if record.clock.final:
        return "exited"
    if not held:
        return "crashed"
    return "running" if time.time() - record.clock.written_at <= STALE_SECONDS else "stale"


def span(seconds: float) -> str:
    """A length of time as people say it; one that is negative, as of clocks that differ, is none."""
    if not math.isfinite(seconds):
        return "an unknown time"
    seconds = max(0.0, seconds)
    minutes, hours, days = (int(seconds // unit) for unit in (60, 3600, 86400))
    if days:
        return f"{days} d {hours % 24} h"
    if hours:
        return f"{hours} h {minutes % 60} min"
    return f"{minutes} min {int(seconds) % 60} s" if minutes else f"{int(seconds)} s"


def printable(text: str) -> str:
    """The text with everything that could drive a terminal, or break a line, replaced."""
    return "".join(character if character.isprintable() else "\ufffd" for character in text)
