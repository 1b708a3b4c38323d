"""The thread that pushes by OTLP: at each interval everything there is, encoded anew.

Invariants: nothing is queued: values are sent whole at each push, so what one push could not deliver the next one
brings up to date, and memory stays bounded whatever the receiver does; nothing here is ever waited for by a scrape;
no error leaves the thread. At the end one last push is tried within its time limit.
"""

from __future__ import annotations

import logging
import math
import random
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from torchmem_exporter.logs import log
from torchmem_exporter.otlp.config import PushConfig
from torchmem_exporter.otlp.encoding import Encoder, Request
from torchmem_exporter.otlp.transport import Outcome, Transport, connect
from torchmem_exporter.points import Block

MAX_RETRY_AFTER_SECONDS = 600.0
MAX_REASONS = 64
_FIRST_BACKOFF_SECONDS = 1.0

logger = logging.getLogger("torchmem_exporter")


class Pusher:
    """Pushes blocks to a receiver until it is closed.

    Args:
        config: where, how and how often.
        collect: gives the blocks to push; called from the pusher's thread only, once a push.

    Attributes:
        num_pushes: pushes tried, failed ones included.
        num_failed_pushes: those of which not every request was accepted.
        num_dropped_points: points that were to be pushed and that the receiver has not taken.
        last_error: why something was not taken the last time that happened, or the empty text.
        last_push_seconds: what the last push took, waiting for the receiver included.
    """

    def __init__(self, config: PushConfig, collect: Callable[[], Sequence[Block]]) -> None:
        self.num_pushes = 0
        self.num_failed_pushes = 0
        self.num_dropped_points = 0
        self.last_error = ""
        self.last_push_seconds = 0.0
        self._config = config
        self._collect = collect
        self._encoder = Encoder(config.resources.attributes, time.time_ns())
        self._transport: Transport | None = None
        self._reasons: set[str] = set()
        self._not_before = 0.0
        self._closing = threading.Event()
        self._end = 0.0
        self._is_last = False
        self._is_failing = False
        self._thread = threading.Thread(target=self._run, name="torchmem-exporter-otlp", daemon=True)

    def start(self) -> None:
        """Begins to push; the first push comes at a random moment of the first interval, so that hosts take turns."""
        self._thread.start()

    def close(self, timeout: float) -> bool:
        """Pushes once more and ends the thread, within so many seconds; whether all of that happened.

        A receiver that does not answer costs the time limit; what is left of the thread then ends with the process.
        """
        if self._thread.ident is None:
            return True
        self._end = time.monotonic() + timeout
        self._closing.set()
        self._thread.join(timeout)
        return not self._thread.is_alive() and not self._is_failing

    def _run(self) -> None:
        interval = self._config.interval
        due = time.monotonic() + random.uniform(0, interval)  # noqa: S311  # takes turns, keeps no secret
        while not self._closing.wait(max(due, self._not_before) - time.monotonic()):
            self._push(time.monotonic() + self._config.push_timeout)
            num_intervals = math.ceil((time.monotonic() - due) / interval)
            due += interval * max(num_intervals, 1)
        self._is_last = True
        self._push(self._end)
        self._disconnect()

    def _push(self, deadline: float) -> None:
        """One push; ``deadline`` by the monotonic clock."""
        began = time.monotonic()
        try:
            self._is_failing = not self._deliver(deadline)
        except Exception as error:  # noqa: BLE001  # none leaves the thread; it is logged
            self._is_failing = True
            self._complain(f"the sidecar itself failed, which is worth a report: {_described(error)}")
        self.num_pushes += 1
        if self._is_failing:
            self.num_failed_pushes += 1
            # The next push begins with a new connection: addresses and certificates may have changed.
            self._disconnect()
        self.last_push_seconds = time.monotonic() - began

    def _deliver(self, deadline: float) -> bool:
        """Collects, encodes and sends; whether every request was accepted."""
        self._encoder.update(self._collect())
        num_left = self._encoder.num_points
        is_whole = True
        for request in self._encoder.requests(time.time_ns()):
            if self._is_superseded:
                return False
            outcome = self._send(request, deadline)
            num_left -= request.num_points
            if outcome.message:
                self._complain(outcome.message)
            if outcome.is_accepted:
                self._encoder.accepted(request)
                self.num_dropped_points += outcome.num_rejected
                continue
            is_whole = False
            self.num_dropped_points += request.num_points
            if outcome.is_retryable:  # then time is up, for the requests after it too
                self.num_dropped_points += num_left
                break
        return is_whole

    def _send(self, request: Request, deadline: float) -> Outcome:
        """Sends a request, again where that may help, as long as there is time."""
        self._transport = self._transport or connect(self._config)
        outcome = Outcome(is_accepted=False, message="no time was left", is_retryable=True)
        backoff = _FIRST_BACKOFF_SECONDS
        while (left := deadline - time.monotonic()) > 0:
            outcome = self._transport.send(request.body, min(left, self._config.timeout))
            if outcome.is_accepted or not outcome.is_retryable:
                break
            wait = backoff * random.uniform(0.5, 1)  # noqa: S311  # takes turns, keeps no secret
            if outcome.retry_after is not None:
                wait = max(wait, outcome.retry_after)
                self._not_before = time.monotonic() + min(outcome.retry_after, MAX_RETRY_AFTER_SECONDS)
            backoff *= 2
            if time.monotonic() + wait >= deadline or not self._pause(wait):
                break
        return outcome

    @property
    def _is_superseded(self) -> bool:
        """Whether the last push, which brings all of this too, is waiting for this one."""
        return self._closing.is_set() and not self._is_last

    def _pause(self, seconds: float) -> bool:
        """Waits; whether to go on after it."""
        if self._is_last:
            time.sleep(seconds)
        else:
            self._closing.wait(seconds)
        return not self._is_superseded

    def _complain(self, reason: str) -> None:
        """Keeps the reason, and logs it unless it was logged before."""
        self.last_error = reason
        if reason not in self._reasons and len(self._reasons) < MAX_REASONS:
            self._reasons.add(reason)
            endpoint = self._config.endpoint.partition("?")[0]  # some take their keys in the query
            message = "pushing by OTLP does not succeed in whole; this reason is told once and counted from now on"
            log(logger, logging.WARNING, message, reason=reason, endpoint=endpoint)

    def _disconnect(self) -> None:
        if self._transport is not None:
            self._transport.close()
            self._transport = None


def _described(error: Exception) -> str:
    """What it is and where it arose."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"
