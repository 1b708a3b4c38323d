"""The attempts that died, as their last records tell, wherever those lie.

A dead attempt's record lies in its job's post-mortem folder, or still where the attempt left it, when nobody has come
by since.

Invariants: torch-free; one bad record never hides the others, and is named; nothing blocks on what lies there; an
attempt is listed once, and one whose record is back in its place (it was thought dead and lives) is not.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from torchmem.errors import RecordError
from torchmem.wire import postmortem
from torchmem.wire.ranks import printable, read_ranks
from torchmem.wire.record import OutOfMemory, Record, decode
from torchmem.wire.store import MAX_RECORD_BYTES, RECORD_NAME, is_held, lock_name, open_record_bytes

_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True)
class Death:
    """A dead attempt."""

    record: Record
    path: str
    how: str
    """``out of memory`` or ``crashed``; of a single file also ``exited cleanly`` or ``still running``."""


@dataclass(frozen=True)
class Deaths:
    """What was found."""

    deaths: list[Death] = field(default_factory=list)
    """Latest first."""
    unreadable: list[str] = field(default_factory=list)
    """One line for each record that could not be read."""


def fatal_oom(record: Record) -> OutOfMemory | None:
    """The failed allocation after which the attempt finished no step any more."""
    if record.oom_events and record.oom_events[-1].step >= record.clock.step:
        return record.oom_events[-1]
    return None


def read_deaths(path: Path, train_job: str | None = None, rank: int | None = None) -> Deaths:
    """The dead attempts of a directory of records, of a job's folder, of a post-mortem folder, or of one file.

    Args:
        path: of any of these.
        train_job: only this job, by its name or by its folder's.
        rank: only this rank.
    """
    found = Deaths()
    try:
        status = path.stat()
        if not stat.S_ISDIR(status.st_mode):
            _read_file(path, found, (train_job, rank))
            return found
        in_place = read_ranks(path, train_job, rank)
        found.unreadable.extend(in_place.unreadable)
        there = {view.record.identity.attempt for view in in_place.ranks}
        for view in in_place.ranks:
            if view.state == "crashed":
                found.deaths.append(Death(view.record, str(path / view.path), _how(view.record)))
        for death in _buried(path, status.st_uid, found.unreadable, (train_job, rank)):
            if death.record.identity.attempt not in there:
                found.deaths.append(death)
    except FileNotFoundError:
        return found
    except OSError as error:
        found.unreadable.append(printable(f"{path}: {error.strerror}"))
    found.deaths.sort(key=lambda death: death.record.clock.written_at, reverse=True)
    return found


def _buried(path: Path, owner: int, unreadable: list[str], wanted: tuple[str | None, int | None]) -> Iterable[Death]:
    """The records in the post-mortem folders: of the path itself, in it, and in the folders in it."""
    uids = frozenset({os.geteuid(), 0, owner})
    with ExitStack() as stack:
        root_fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        stack.callback(os.close, root_fd)
        yield from _read_folder(root_fd, str(path), path.absolute().parent.name, uids, unreadable, wanted)
        yield from _read_job(root_fd, path, uids, unreadable, wanted)
        for folder in sorted(os.listdir(root_fd)):  # noqa: PTH208  # no path leads to a descriptor
            try:
                folder_fd = os.open(folder, _FOLDER_FLAGS, dir_fd=root_fd)
            except OSError:
                continue  # a file, or one that was named when the records in place were read
            try:
                if folder != postmortem.FOLDER:
                    yield from _read_job(folder_fd, path / folder, uids, unreadable, wanted)
            finally:
                os.close(folder_fd)


def _read_job(
    dir_fd: int, path: Path, uids: frozenset[int], unreadable: list[str], wanted: tuple[str | None, int | None]
) -> Iterable[Death]:
    try:
        with postmortem.opened(dir_fd) as folder_fd:
            where = str(path / postmortem.FOLDER)
            yield from _read_folder(folder_fd, where, path.absolute().name, uids, unreadable, wanted)
    except FileNotFoundError:
        return
    except OSError as error:
        unreadable.append(printable(f"{path / postmortem.FOLDER}: {error.strerror}"))


def _read_folder(
    folder_fd: int,
    where: str,
    job_folder: str,
    uids: frozenset[int],
    unreadable: list[str],
    wanted: tuple[str | None, int | None],
) -> Iterable[Death]:
    train_job, rank = wanted
    for file in postmortem.listed(folder_fd):
        if rank not in (None, file.rank):
            continue
        try:
            record = decode(open_record_bytes(folder_fd, file.name, uids)[0])
        except RecordError as error:
            unreadable.append(printable(f"{where}/{file.name}: {error.reason}: {error}"))
            continue
        if train_job in (None, record.identity.train_job, job_folder):
            yield Death(record, f"{where}/{file.name}", _how(record))


def _read_file(path: Path, found: Deaths, wanted: tuple[str | None, int | None]) -> None:
    """One record that the user named; links are followed, as anywhere on a command line."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:  # noqa: PTH123  # a descriptor
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise RecordError("not_regular", "not a regular file")
            record = decode(file.read(MAX_RECORD_BYTES + 1))
    except RecordError as error:
        found.unreadable.append(printable(f"{path}: {error.reason}: {error}"))
        return
    folder, identity = path.absolute().parent, record.identity
    job_folder = folder.parent if folder.name == postmortem.FOLDER else folder
    if wanted[0] not in (None, identity.train_job, job_folder.name) or wanted[1] not in (None, identity.rank):
        return
    how = _how(record)
    if record.clock.final:
        how = "exited cleanly"
    elif (match := RECORD_NAME.fullmatch(path.name)) and is_held(folder, lock_name(int(match[1]))):
        how = "still running"
    found.deaths.append(Death(record, str(path), how))


def _how(record: Record) -> str:
    return "crashed" if fatal_oom(record) is None else "out of memory"
