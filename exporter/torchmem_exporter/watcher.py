"""The thread that looks at the ranks also when nobody scrapes: a rank's record holds its last 512 steps only.

Invariants: no error leaves the thread, and one that lasts is logged once; the last look keeps what was learned.
"""

from __future__ import annotations

import logging
import threading

from torchmem_exporter.exposition import Exposition

INTERVAL_SECONDS = 10.0

logger = logging.getLogger("torchmem_exporter")


class Watcher:
    """Looks at once, and every ``INTERVAL_SECONDS`` until it is closed.

    Args:
        exposition: of the ranks.
    """

    def __init__(self, exposition: Exposition, interval: float = INTERVAL_SECONDS) -> None:
        self._exposition = exposition
        self._interval = interval
        self._closing = threading.Event()
        self._is_failing = False
        self._thread = threading.Thread(target=self._run, name="torchmem-exporter-watcher", daemon=True)

    def start(self) -> None:
        """Begins to look."""
        self._thread.start()

    def close(self, timeout: float) -> None:
        """Looks once more and ends the thread, within so many seconds."""
        self._closing.set()
        self._thread.join(timeout)

    def _run(self) -> None:
        self._look(is_last=False)  # judging all that the records hold takes a while, which nobody should have to wait
        while not self._closing.wait(self._interval):
            self._look(is_last=False)
        self._look(is_last=True)

    def _look(self, *, is_last: bool) -> None:
        try:
            self._exposition.look(is_last=is_last)
            self._is_failing = False
        except Exception:  # whatever it is, the next look may go well
            if not self._is_failing:
                logger.exception("the ranks could not be judged")
            self._is_failing = True
