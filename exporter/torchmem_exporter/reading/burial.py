"""Moves the records of crashed ranks into their jobs' post-mortem folders, and keeps those within their bounds.

Invariants: nothing here raises; a sidecar that may not write there changes nothing, counts that and says so once; a
record is only tried once.

Known limit: a rank whose lock was dropped by foreign code looks crashed until it writes again, hence the wait before
its record is moved; one that writes more rarely than that is put aside and comes back with its next record.
"""

from __future__ import annotations

import logging
import os

from torchmem.wire import postmortem
from torchmem.wire.postmortem import Buried
from torchmem.wire.record import Identity

BURY_AFTER_SECONDS = 5.0
"""How long after its death a record is moved."""

PRUNE_INTERVAL_SECONDS = 3600.0
_MAX_FOLDERS = 1000

logger = logging.getLogger("torchmem_exporter")


class Undertaker:
    """Moves records; not for several threads at once.

    Attributes:
        num_failures: records that could not be moved.
    """

    def __init__(self) -> None:
        self.num_failures = 0
        self._has_told = False
        self._pruned_at: dict[str, float] = {}

    def bury(self, dir_fd: int, folder: str, identity: Identity, seen: os.stat_result) -> str:
        """Moves a crashed rank's record; returns its name in the post-mortem folder, or nothing where it stays.

        Args:
            dir_fd: descriptor of the job's folder.
            folder: its name.
            identity: of the record.
            seen: the file's status when it was read.
        """
        try:
            return postmortem.bury(dir_fd, identity.rank, identity.attempt, seen)
        except OSError as error:
            self.num_failures += 1
            if not self._has_told:
                self._has_told = True
                logger.warning(
                    "%a: the record of a crashed rank cannot be moved to %s/ (%s): it stays until the next attempt",
                    folder,
                    postmortem.FOLDER,
                    error.strerror,
                )
        return ""

    def prune(self, folder_fd: int, folder: str, files: list[Buried], now: float) -> None:
        """Keeps a post-mortem folder within its bounds; looks at most once an hour.

        Args:
            folder_fd: descriptor of the post-mortem folder.
            folder: the job's folder.
            files: what lies in it.
            now: Unix seconds.
        """
        if now - self._pruned_at.get(folder, -PRUNE_INTERVAL_SECONDS) < PRUNE_INTERVAL_SECONDS:
            return
        if len(self._pruned_at) >= _MAX_FOLDERS:
            self._pruned_at.clear()
        self._pruned_at[folder] = now
        if postmortem.exceeds(files, now):
            postmortem.prune(folder_fd)
