"""The thread that looks at the ranks also when nobody scrapes: a rank's record holds its last 512 steps only.

It says of each record that cannot be used why, and removes what jobs have left that ended long ago.

Invariants: no error leaves the thread, and one that lasts is logged once, as are rejections; the last look keeps what
was learned.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable

from torchmem_exporter.exposition import Exposition
from torchmem_exporter.reading.reader import Rejection

INTERVAL_SECONDS = 10.0
MAX_TOLD = 100
"""Rejections that are logged."""

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
        self._told: set[tuple[str, str]] = set()
        self._thread = threading.Thread(target=self._run, name="torchmem-exporter-watcher", daemon=True)

    def start(self) -> None:
        """Begins to look."""
        self._thread.start()

    def close(self, timeout: float) -> None:
        """Looks once more and ends the thread, within so many seconds."""
        self._closing.set()
        if self._thread.ident:  # else it was never started
            self._thread.join(timeout)

    def _run(self) -> None:
        self._look(is_last=False)  # judging all that the records hold takes a while, which nobody should have to wait
        while not self._closing.wait(self._interval):
            self._look(is_last=False)
        self._look(is_last=True)

    def _look(self, *, is_last: bool) -> None:
        try:
            self._tell(self._exposition.look(is_last=is_last).rejections)
            self._exposition.reader.sweep()
            self._is_failing = False
        except Exception:  # whatever it is, the next look may go well
            if not self._is_failing:
                logger.exception("the ranks could not be judged")
            self._is_failing = True

    def _tell(self, rejections: Iterable[Rejection]) -> None:
        """Logs what is new of them; what vanished while it was read is nothing to act on."""
        for path, reason, detail in rejections:
            if reason == "vanished" or (path, reason) in self._told or len(self._told) > MAX_TOLD:
                continue
            self._told.add((path, reason))
            if len(self._told) > MAX_TOLD:
                logger.warning("further records that cannot be used are only counted")
            else:
                logger.warning("%a cannot be used (%s): %a", path, reason, detail)
