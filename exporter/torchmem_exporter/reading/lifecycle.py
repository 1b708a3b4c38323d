"""What state a rank is in, judged from its record, its lock and what earlier scans have seen of it.

A rank whose lock is held lives: it is running, or stale when its record is old. A free lock means the process is
gone: exited when its record says so, else crashed. What is gone fades: first what it held, then who it was.

Invariants: pure but for the clock, which is an argument; an attempt once judged gone stays gone until it writes again,
even if a successor already holds the lock and has not written yet.

Known limit: of a crash before the sidecar's own start only the record's age is known, so its time of death is taken to
be that of its last record. Ages are by the host's clock: one that is set back hides how old a record is until it has
caught up.
"""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from torchmem.wire.record import Clock

KEEP_STALE_MEMORY_SECONDS = 600.0
"""How old a record may be while its memory series are still exposed."""

KEEP_CRASHED_SECONDS = 900.0
"""How long a crashed rank's counters and identity stay exposed."""

KEEP_CONSUMER_SECONDS = 3600.0
"""How long after its last scrape a consumer is waited for, and so the longest that a clean end is exposed."""

KEEP_EXITED_SCRAPES = 2
"""How many scrapes of each consumer see the last record of a clean end."""


class State(enum.Enum):
    """States of a rank, as the ``state`` label spells them."""

    RUNNING = "running"
    STALE = "stale"
    CRASHED = "crashed"
    EXITED = "exited"

    @property
    def is_alive(self) -> bool:
        """Whether the rank's process lives."""
        return self in (State.RUNNING, State.STALE)


class Verdict(NamedTuple):
    """A rank's state, and whether what it held is still worth exposing."""

    state: State
    has_memory: bool


@dataclass
class Life:
    """What the scans have seen of one attempt so far."""

    attempt: str
    was_seen_alive: bool = False
    ended_at: float | None = None
    showings: Counter[str] = field(default_factory=Counter)
    """Of its end, by consumer."""

    def wrote(self) -> None:
        """Notes a new record: who writes is not gone."""
        self.ended_at = None

    def was_shown(self, state: State, consumer: str) -> None:
        """Notes that a consumer was given the attempt."""
        if state is State.EXITED:
            self.showings[consumer] += 1

    def may_show(self, state: State, consumer: str) -> bool:
        """Whether a consumer is still to be given the attempt."""
        return state is not State.EXITED or self.showings[consumer] < KEEP_EXITED_SCRAPES

    def is_used_up(self, state: State, consumers: frozenset[str]) -> bool:
        """Whether all consumers have been given an ended attempt as often as they are to be."""
        return bool(consumers) and not any(self.may_show(state, consumer) for consumer in consumers)

    def has_been_dead_for(self, seconds: float, now: float) -> bool:
        """Whether the attempt was judged to have crashed, at least so long ago."""
        return self.ended_at is not None and now - self.ended_at >= seconds

    def judge(
        self, clock: Clock, *, is_held: bool, is_readable: bool, now: float, stale_after: float
    ) -> Verdict | None:
        """The attempt's state; None once there is nothing left to expose.

        Args:
            clock: of its last record that could be read.
            is_held: whether a process holds the rank's lock.
            is_readable: whether that is what the file holds now; freshness is earned by reading only.
            now: Unix seconds.
            stale_after: seconds after which a live rank's record counts as old.
        """
        age = now - clock.written_at
        if clock.final:
            return self._judge_exited(age)
        if is_held and self.ended_at is None:
            self.was_seen_alive = True
            if is_readable and age <= stale_after:
                return Verdict(State.RUNNING, has_memory=True)
            return Verdict(State.STALE, has_memory=age <= KEEP_STALE_MEMORY_SECONDS)
        if self.ended_at is None:
            self.ended_at = now if self.was_seen_alive else min(now, clock.written_at)
        if now - self.ended_at > KEEP_CRASHED_SECONDS:
            return None
        return Verdict(State.CRASHED, has_memory=False)

    def _judge_exited(self, age: float) -> Verdict | None:
        is_news = age <= (KEEP_CONSUMER_SECONDS if self.was_seen_alive else KEEP_CRASHED_SECONDS)
        return Verdict(State.EXITED, has_memory=True) if is_news else None
