"""Removes the folders of jobs that ended long ago: every run under a name of its own would leave one for good.

Invariants: nothing here raises or follows a link; a folder goes only where all that lies in it is what torchmem leaves,
nothing of that was written for the time to keep, and no process holds a lock in it; a sidecar that may not remove
changes nothing and says so once.

Known limit: a rank that starts while the folder of its job goes is hidden until it writes next, which makes it anew.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import re
import stat
from pathlib import Path

from torchmem.wire import postmortem
from torchmem.wire.store import BURIED_NAME, RECORD_NAME, is_held
from torchmem_exporter.reading import listing

INTERVAL_SECONDS = 3600.0
MAX_FOLDERS = 64
"""Looked into at once; the next look goes on."""

_LOCK_NAME = re.compile(r"rank-[0-9]{1,9}\.lock")
_TEMPORARY_NAME = re.compile(r"\.rank-[0-9]{1,9}\.(record\.tmp|moving)")

logger = logging.getLogger("torchmem_exporter")


class Sweeper:
    """Looks into every folder once an hour; not for several threads at once.

    Args:
        keep_seconds: how long after its last write a job's folder stays; infinite for always.
    """

    def __init__(self, keep_seconds: float) -> None:
        self._keep_seconds = keep_seconds
        self._began_at = -math.inf
        self._left: list[str] = []
        self._has_told = False

    def sweep(self, directory: Path, now: float) -> None:
        """Removes the old among the folders that are due.

        Args:
            directory: where the jobs' folders lie.
            now: Unix seconds.
        """
        if math.isinf(self._keep_seconds) or (not self._left and now - self._began_at < INTERVAL_SECONDS):
            return
        with (
            contextlib.suppress(OSError),  # a scan says what is wrong with the directory
            listing.descriptor(os.open(directory, listing.BASE_FLAGS)) as base_fd,
        ):
            if not self._left:
                self._began_at, self._left = now, listing.folders(base_fd).jobs
            uids = listing.allowed_uids(os.fstat(base_fd))
            due, self._left = self._left[:MAX_FOLDERS], self._left[MAX_FOLDERS:]
            for folder in due:
                self._sweep_folder(base_fd, folder, uids, now - self._keep_seconds)

    def _sweep_folder(self, base_fd: int, folder: str, uids: frozenset[int], before: float) -> None:
        try:
            with listing.descriptor(os.open(folder, listing.FOLDER_FLAGS, dir_fd=base_fd)) as dir_fd:
                if os.fstat(dir_fd).st_uid not in uids or not _empty(dir_fd, before):
                    return
            os.rmdir(folder, dir_fd=base_fd)
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno != errno.ENOTEMPTY and not self._has_told:  # else somebody has begun to use it
                self._has_told = True
                logger.warning("%a: what a job that ended long ago has left stays (%s)", folder, error.strerror)
            return
        logger.info("%a: removed what a job that ended long ago had left", folder)


def _empty(dir_fd: int, before: float) -> bool:
    """Removes what lies in a job's folder; does nothing and returns False where the job may not be over."""
    with contextlib.ExitStack() as stack:
        graves: list[str] | None = []
        graves_fd = None
        with contextlib.suppress(FileNotFoundError):
            graves_fd = stack.enter_context(postmortem.opened(dir_fd))
            graves = _old_files(graves_fd, (BURIED_NAME, _TEMPORARY_NAME), before)
        files = _old_files(dir_fd, (RECORD_NAME, _LOCK_NAME, _TEMPORARY_NAME), before)
        if files is None or graves is None:
            return False
        if not files and os.fstat(dir_fd).st_mtime >= before:  # that of a job which is just starting
            return False
        if any(is_held(dir_fd, name) for name in files if _LOCK_NAME.fullmatch(name)):
            return False
        if graves_fd is not None:
            _unlink(graves_fd, graves)
            os.rmdir(postmortem.FOLDER, dir_fd=dir_fd)
        _unlink(dir_fd, files)
    return True


def _old_files(folder_fd: int, known: tuple[re.Pattern[str], ...], before: float) -> list[str] | None:
    """The files of a folder, its post-mortem folder aside; None where one is not torchmem's, or not old."""
    names = [name for name in os.listdir(folder_fd) if name != postmortem.FOLDER]
    for name in names:
        status = os.stat(name, dir_fd=folder_fd, follow_symlinks=False)
        is_known = stat.S_ISREG(status.st_mode) and any(pattern.fullmatch(name) for pattern in known)
        if not is_known or status.st_mtime >= before:
            return None
    return names


def _unlink(folder_fd: int, names: list[str]) -> None:
    for name in names:
        os.unlink(name, dir_fd=folder_fd)
