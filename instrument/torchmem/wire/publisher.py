"""The background writer: one record at most every interval, and one at the end.

The record is built and written on a daemon thread; the training thread only starts and ends it.

Invariants: torch-free; a failure to build or write is counted, remembered, logged once per distinct reason, and never
raised; ``close`` is bounded in time even where the file system hangs, and may be interrupted, repeated, or called from
a signal handler; a forked child neither writes nor holds anything, and its exit leaves the parent's record alone.

Limits: a process that is killed, or that calls ``os._exit``, leaves its last written record; it is not marked final,
which is how a reader tells. ``sys.exit`` with a failure's status looks like a clean end, except in a child of
``multiprocessing``: the interpreter does not say.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import queue
import sys
import threading
from collections.abc import Callable
from multiprocessing.util import Finalize

from torchmem.wire.store import RankStore

logger = logging.getLogger("torchmem")

CLOSE_TIMEOUT_SECONDS = 5.0
MAX_REASONS = 20
"""Distinct reasons that are logged; a reason may hold an address or a time, and would be new each time."""
MAX_REASON_CHARACTERS = 300


class Publisher:
    """Writes what ``build`` returns.

    Args:
        store: where to; released with the publisher.
        build: given whether the record is to say that the rank ended cleanly, returns its bytes; called on the
            publisher's thread.
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
        # Holds whether the end is a clean one. Unlike an event's, its put may be interrupted by a handler that puts.
        self._ends: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="torchmem-publisher", daemon=True)
        self._at_child_exit: Finalize | None = None

    def start(self) -> None:
        """Writes the first record soon and then one every interval; called once."""
        try:
            self._thread.start()
        except RuntimeError as error:  # the process may have no more threads; its training goes on without records
            self._failed(f"{type(error).__name__}: {error}")
            return
        atexit.register(self._close_at_exit)
        # The children of multiprocessing leave by os._exit and run these instead of what atexit holds.
        self._at_child_exit = Finalize(None, self._close_at_exit, exitpriority=0)

    def close(self, timeout: float = CLOSE_TIMEOUT_SECONDS, *, is_clean: bool = True) -> None:
        """Writes the last record and releases the store; safe to call again, and in a forked child a no-op.

        Args:
            timeout: seconds to wait for the writer; past them it is left to itself, and to the end of the process.
            is_clean: whether the last record says that the rank ended cleanly; without it a reader sees a crash.
        """
        if os.getpid() != self._pid:
            return
        if not self._thread.ident:  # never started
            self._store.close()
            return
        self._ends.put(is_clean)
        if threading.current_thread() is self._thread:  # closed by what building a record collected
            return
        self._thread.join(timeout)
        if self._thread.is_alive():
            self._failed(f"the last record was not written within {timeout:g} s")
        self._forget_exit()

    def _forget_exit(self) -> None:
        atexit.unregister(self._close_at_exit)
        if self._at_child_exit is not None:
            self._at_child_exit.cancel()

    def _close_at_exit(self) -> None:
        """Writes the last record of a process that ends without closing its monitor."""
        self.close(is_clean=not _ends_by_error())

    def _run(self) -> None:
        while True:
            self._write(is_final=False)
            with contextlib.suppress(queue.Empty):
                is_clean = self._ends.get(timeout=self._interval)
                break
        self._write(is_final=is_clean)
        with contextlib.suppress(OSError):  # what a network file system says of a descriptor it lets go
            self._store.close()

    def _write(self, *, is_final: bool) -> None:
        try:
            self._store.write(self._build(is_final))
            self.num_written += 1
        except Exception as error:  # noqa: BLE001  # whatever it is, the thread goes on and the job never sees it
            self._failed(f"{type(error).__name__}: {error}")

    def _failed(self, reason: str) -> None:
        reason = " ".join(reason.split())[:MAX_REASON_CHARACTERS]
        self.num_failed += 1
        self.last_error = reason
        if reason not in self._logged and len(self._logged) < MAX_REASONS:
            self._logged.add(reason)
            with contextlib.suppress(Exception):  # a handler of the job's own may raise
                logger.warning("no record was written: %s", reason)


def _ends_by_error() -> bool:
    """Whether the process is ending by an exception, other than Ctrl-C; called while it exits.

    It is still in flight in a child of ``multiprocessing``, and has been reported elsewhere; an interactive session
    remembers every error it reported, and ends by none of them.
    """
    error = sys.exc_info()[1]
    if error is None and not hasattr(sys, "ps1"):
        error = getattr(sys, "last_value", None)
    if isinstance(error, SystemExit):
        return error.code not in {None, 0}
    return error is not None and not isinstance(error, KeyboardInterrupt)
