"""Looks into a directory of records without following a link, blocking, or trusting a name.

Invariants: relative to descriptors; nothing is opened but folders.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from torchmem.errors import RecordError
from torchmem.wire.store import RECORD_NAME

BASE_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
"""How the directory itself is opened: it may be a link, as the operator's choice."""
FOLDER_FLAGS = BASE_FLAGS | os.O_NOFOLLOW | os.O_NONBLOCK
"""How what lies in it is opened."""


class Folders(NamedTuple):
    """What lies in the directory, by name."""

    jobs: list[str]
    links: list[str]


@contextmanager
def descriptor(fd: int) -> Iterator[int]:
    """Closes a descriptor afterwards."""
    try:
        yield fd
    finally:
        os.close(fd)


def allowed_uids(directory: os.stat_result) -> frozenset[int]:
    """Whose records are read: this user's, root's, and those of the directory's owner."""
    return frozenset({os.geteuid(), 0, directory.st_uid})


def folders(base_fd: int) -> Folders:
    """The jobs' folders; links are none.

    Raises:
        OSError: the directory cannot be listed.
    """
    found = Folders([], [])
    with os.scandir(base_fd) as entries:
        for entry in entries:
            if entry.is_symlink():
                found.links.append(entry.name)
            elif not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False):
                found.jobs.append(entry.name)
    found.jobs.sort()
    return found


def records(dir_fd: int) -> list[tuple[int, str]]:
    """Rank and file name of what is named like a record in a job's folder, by name.

    Raises:
        OSError: the folder cannot be listed.
    """
    names = sorted(os.listdir(dir_fd))  # no path leads to a descriptor
    return [(int(match[1]), name) for name in names if (match := RECORD_NAME.fullmatch(name))]


def status_of(dir_fd: int, name: str) -> os.stat_result:
    """The status of an entry, links not followed.

    Raises:
        RecordError: with reason ``vanished`` or ``open``.
    """
    try:
        return os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
    except FileNotFoundError:
        raise RecordError("vanished", "was removed while the folder was read") from None
    except OSError as error:
        raise RecordError("open", str(error.strerror)) from None
