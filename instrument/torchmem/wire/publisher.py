"""The background writer: one record at most every interval, and one at the end.

The record is built and written on a daemon thread; the training thread only starts and ends it.

Invariants: torch-free; a failure to build or write is counted, remembered, logged once per distinct reason, and never
raised; ``close`` is bounded in time even where the file system hangs; a forked child neither writes nor holds
anything, and its exit leaves the parent's record alone.

Limits: a process that is killed leaves its last written record; it is not marked final, which is how a reader tells.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from collections.abc import Callable

from torchmem.wire.store import RankStore

logger = logging.getLogger("torchmem")

CLOSE_TIMEOUT_SECONDS = 5.0


class Publisher:
    """Writes what ``build`` returns.

    Args:
        store: where to; closed with the publisher.
        build: given whether this is the last record, returns its bytes; called on the publisher's thread.
        interval: seconds between two records.

    Attributes:
        num_written: records written.
        num_failed: attempts that failed.
        last_error: the last failure, one line; empty when there was none.
    """

    def __init__(self, store: RankStore, build: Callable[[bool], bytes], interval: float) -> None:
        self.num_written = 0
        self.num_failed = 0
        self.last_error = ""
        self._store = store
        self._build = build
        self._interval = interval
        self._pid = os.getpid()
        self._logged: set[str] = set()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="torchmem-publisher", daemon=True)

    def start(self) -> None:
        """Writes the first record soon and then one every interval."""
        self._thread.start()
        atexit.register(_close_if_alive, weakref.ref(self))

    def close(self, timeout: float = CLOSE_TIMEOUT_SECONDS) -> None:
        """Writes the last record and releases the store; safe to call twice, and in a forked child a no-op.

        Args:
            timeout: seconds to wait for the writer; past them it is left to itself.
        """
        if self._ended.is_set() or os.getpid() != self._pid:
            return
        self._ended.set()
        self._thread.join(timeout)
        if self._thread.is_alive():
            self._failed(f"the last record was not written within {timeout:g} s")

    def _run(self) -> None:
        while not self._ended.is_set():
            self._write(final=False)
            self._ended.wait(self._interval)
        self._write(final=True)
        self._store.close()

    def _write(self, *, final: bool) -> None:
        try:
            self._store.write(self._build(final))
            self.num_written += 1
        except Exception as error:  # noqa: BLE001  # whatever it is, the thread goes on and the job never sees it
            self._failed(f"{type(error).__name__}: {error}")

    def _failed(self, reason: str) -> None:
        self.num_failed += 1
        self.last_error = reason
        if reason not in self._logged and len(self._logged) < 100:  # noqa: PLR2004  # reasons may hold addresses
            self._logged.add(reason)
            logger.warning("no record was written: %s", reason)


def _close_if_alive(publisher: weakref.ref[Publisher]) -> None:
    """Writes the last record of a process that ends without closing its monitor."""
    if (alive := publisher()) is not None:
        alive.close()
