"""What sampled steps take longer than the others, from the durations of both.

Invariants: what is known only grows; a sample is charged once, as soon as enough ordinary steps are known to compare
it with.

Limits: whatever else made a sampled step long (an evaluation in it) is charged too.
"""

from __future__ import annotations

import time
from collections import deque
from statistics import median

_ENOUGH = 3
_KEPT = 31


class StepTimes:
    """Durations of steps, by whether they were sampled.

    Attributes:
        extra_seconds: what all sampled steps together took longer than as many ordinary ones.
    """

    def __init__(self) -> None:
        self.extra_seconds = 0.0
        self._ordinary: deque[float] = deque(maxlen=_KEPT)
        self._waiting: list[float] = []
        self._began: float | None = None

    def begin(self) -> None:
        """A step begins."""
        self._began = time.perf_counter()

    def end(self, *, was_sampled: bool) -> None:
        """It has ended."""
        if self._began is None:  # the first began before there was anybody to look
            return
        seconds = time.perf_counter() - self._began
        (self._waiting if was_sampled else self._ordinary).append(seconds)
        if self._waiting and len(self._ordinary) >= _ENOUGH:
            usual = median(self._ordinary)
            self.extra_seconds += sum(max(0.0, one - usual) for one in self._waiting)
            self._waiting.clear()
