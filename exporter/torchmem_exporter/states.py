"""What became of each rank, judged from its last record, its lock and the clock.

    running   lock held, record young          everything is shown
    stale     lock held, record old or bad     the last values; memory series for ten minutes
    crashed   lock free, record not final      no memory series; the rest for a quarter of an hour
    exited    record final                     two scrapes, then nothing

Invariants: only a record that parsed makes a rank fresh; of two attempts of one rank the one that started later counts;
looking without ``advance`` changes nothing that a later scrape shows.

Known limits: ages are differences of wall clocks, so a step of the clock shifts them; between a new attempt taking the
lock and writing its first record, the rank still shows its former attempt's record.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from torchmem.wire.record import Record

STALE_MEMORY_SECONDS = 600.0
"""Age of a stale rank's record past which its memory series are dropped."""

CRASHED_SECONDS = 900.0
"""How long a crashed rank is shown."""

NUM_EXITED_SCRAPES = 2
"""Scrapes that still show a rank that ended cleanly."""


class State(enum.Enum):
    """What a rank is; the value is the label of ``torchmem_rank_state``."""

    RUNNING = "running"
    STALE = "stale"
    CRASHED = "crashed"
    EXITED = "exited"


@dataclass(frozen=True, order=True)
class RankKey:
    """Which rank of which job."""

    train_job: str
    rank: int


@dataclass(frozen=True)
class Sighting:
    """What a scan found of a rank.

    Attributes:
        record: the last record that parsed.
        is_current: whether that is what the file holds now; False where the file has since become unreadable.
        is_held: whether a live process held the rank's lock just before the file was read.
    """

    record: Record
    is_current: bool
    is_held: bool


@dataclass(frozen=True)
class RankView:
    """A rank as it is to be shown."""

    record: Record
    state: State
    has_memory: bool
    """Whether what the record says of memory still holds."""

    @property
    def is_up(self) -> bool:
        """Whether a live process is this rank."""
        return self.state in {State.RUNNING, State.STALE}


@dataclass
class _Life:
    """What is remembered of an attempt between scrapes."""

    attempt: str
    was_up: bool = False
    crashed_at: float | None = None
    num_shown_exited: int = 0


@dataclass
class Judge:
    """Turns sightings into views, remembering what no record says: since when a rank is dead, how often it was shown.

    Attributes:
        stale_after_seconds: age past which the record of a living rank is stale.
    """

    stale_after_seconds: float
    _lives: dict[RankKey, _Life] = field(default_factory=dict)

    def judge(self, sightings: Mapping[RankKey, Sighting], now: float, *, advance: bool) -> dict[RankKey, RankView]:
        """The ranks to show, in the order of their keys.

        Args:
            sightings: the newest attempt of each rank.
            now: Unix seconds.
            advance: whether this is a scrape, which counts, or only a look.
        """
        self._lives = {key: life for key, life in self._lives.items() if key in sightings}
        views: dict[RankKey, RankView] = {}
        for key in sorted(sightings):
            view = self._view(key, sightings[key], now, advance=advance)
            if view is not None:
                views[key] = view
        return views

    def _view(self, key: RankKey, sighting: Sighting, now: float, *, advance: bool) -> RankView | None:
        record = sighting.record
        life = self._lives.get(key)
        if life is None or life.attempt != record.identity.attempt:
            life = self._lives[key] = _Life(record.identity.attempt)
        if record.clock.final:
            return _exited(record, life, now, advance=advance)
        if not sighting.is_held:
            return _crashed(record, life, now)
        life.was_up, life.crashed_at = True, None
        age = now - record.clock.written_at
        if sighting.is_current and age <= self.stale_after_seconds:
            return RankView(record, State.RUNNING, has_memory=True)
        return RankView(record, State.STALE, has_memory=age <= STALE_MEMORY_SECONDS)


def _exited(record: Record, life: _Life, now: float, *, advance: bool) -> RankView | None:
    """A clean end is shown twice, unless it lies so long back that it belongs to the past of a restarted sidecar."""
    is_past = not life.was_up and life.num_shown_exited == 0 and now - record.clock.written_at > CRASHED_SECONDS
    if is_past or life.num_shown_exited >= NUM_EXITED_SCRAPES:
        return None
    if advance:
        life.num_shown_exited += 1
    return RankView(record, State.EXITED, has_memory=True)


def _crashed(record: Record, life: _Life, now: float) -> RankView | None:
    """The time of death is when it was noticed; of a rank never seen alive only its last record's time is known."""
    if life.crashed_at is None:
        life.crashed_at = now if life.was_up else min(now, record.clock.written_at)
    if now - life.crashed_at > CRASHED_SECONDS:
        return None
    return RankView(record, State.CRASHED, has_memory=False)
