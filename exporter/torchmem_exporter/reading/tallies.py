"""Counters of allocators that outlive an attempt: what every attempt of a rank has counted, summed.

A restarted process counts from zero. What it reports is added to what the attempts before it reported last, so that
the sum of a rank and device never falls, over attempts and over the sidecar's own restarts.

Invariants: each attempt counts once, whatever the order and number of files it is found in; a count that falls within
an attempt (torch can reset its statistics) starts a new sum; what holds no failure takes no memory.

Known limits: an attempt whose record no scan has seen is missing; of the ranks that ever failed the latest
``MAX_RANKS`` are remembered, for ``KEEP_SECONDS`` after they were last seen.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Annotated, NamedTuple

import msgspec

from torchmem.wire.record import Identity, Record
from torchmem_exporter.reading.state import StateFile

SECTION = "counters"
MAX_RANKS = 4096
MAX_ATTEMPTS = 32
KEEP_SECONDS = 14 * 86400.0
_SEEN_PRECISION_SECONDS = 86400.0

Count = Annotated[int, msgspec.Meta(ge=0)]


class Totals(NamedTuple):
    """Of all attempts of a rank, by device's name; a device that never counted any is missing."""

    ooms: Mapping[str, int]
    retries: Mapping[str, int]


NOTHING = Totals({}, {})


class _Attempt(msgspec.Struct, kw_only=True):
    """The last counts of one attempt."""

    attempt: str
    start_time: float
    written_at: float
    ooms: dict[str, Count] = {}
    retries: dict[str, Count] = {}


class _Tally(msgspec.Struct, kw_only=True):
    """One rank of one job."""

    train_job: str
    rank: int
    seen_at: float
    attempts: list[_Attempt] = []
    earlier_ooms: dict[str, Count] = {}
    """Of attempts no longer told apart, and from before a reset within one."""
    earlier_retries: dict[str, Count] = {}
    forgotten_until: float = -math.inf
    """Attempts that began at or before this are among the earlier ones."""


class Tallies:
    """The sums of all ranks; not for several threads at once.

    Args:
        state: where they are kept.
    """

    def __init__(self, state: StateFile) -> None:
        self._state = state
        self._tallies: dict[tuple[str, int], _Tally] = {}
        self._totals: dict[tuple[str, int], Totals] = {}
        self._is_dirty = False
        try:
            saved = msgspec.msgpack.decode(state.section(SECTION) or b"\x90", type=list[_Tally])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            state.refuse(SECTION, error)
            saved = []
        for tally in saved[:MAX_RANKS]:
            self._tallies[tally.train_job, tally.rank] = tally
            self._sum(tally)

    def of(self, identity: Identity) -> Totals:
        """The sums of a rank; the same object until one of them changes."""
        return self._totals.get((identity.train_job, identity.rank), NOTHING)

    def note(self, record: Record, now: float) -> None:
        """Counts what a record reports, unless an older or the same one has been counted."""
        identity = record.identity
        key = (identity.train_job, identity.rank)
        ooms = {device.name: device.allocator.num_ooms for device in record.devices if device.allocator.num_ooms}
        retries = {
            device.name: device.allocator.num_retries for device in record.devices if device.allocator.num_retries
        }
        tally = self._tallies.get(key)
        if tally is None:
            if not (ooms or retries):
                return
            tally = self._tallies[key] = _Tally(train_job=identity.train_job, rank=identity.rank, seen_at=now)
            self._forget_oldest(now)
        if now - tally.seen_at > _SEEN_PRECISION_SECONDS:
            tally.seen_at, self._is_dirty = now, True
        if _note(tally, record, ooms, retries):
            self._is_dirty = True
            self._sum(tally)

    def save(self, *, guard: AbstractContextManager[object] | None = None) -> None:
        """Keeps what has changed since the last time.

        Args:
            guard: entered to see what there is to keep, not to write it, for which nobody need wait.
        """
        with guard or contextlib.nullcontext():
            if not self._is_dirty:
                return
            section = msgspec.msgpack.encode(list(self._tallies.values()))
            self._is_dirty = False
        self._state.save(SECTION, section)

    def _sum(self, tally: _Tally) -> None:
        ooms, retries = Counter(tally.earlier_ooms), Counter(tally.earlier_retries)
        for attempt in tally.attempts:
            ooms.update(attempt.ooms)
            retries.update(attempt.retries)
        self._totals[tally.train_job, tally.rank] = Totals(dict(ooms), dict(retries))

    def _forget_oldest(self, now: float) -> None:
        by_age = sorted(self._tallies, key=lambda key: self._tallies[key].seen_at, reverse=True)
        for index, key in enumerate(by_age):
            if index >= MAX_RANKS or now - self._tallies[key].seen_at > KEEP_SECONDS:
                del self._tallies[key]
                self._totals.pop(key, None)


def _note(tally: _Tally, record: Record, ooms: dict[str, int], retries: dict[str, int]) -> bool:
    """Takes an attempt's counts over; returns whether any sum may have changed."""
    identity, written_at = record.identity, record.clock.written_at
    attempt = next((known for known in tally.attempts if known.attempt == identity.attempt), None)
    if attempt is None:
        if not (ooms or retries) or identity.start_time <= tally.forgotten_until:
            return False
        attempt = _Attempt(attempt=identity.attempt, start_time=identity.start_time, written_at=written_at)
        tally.attempts.append(attempt)
    elif written_at <= attempt.written_at:
        return False
    attempt.written_at = written_at
    reported = {device.name for device in record.devices}
    ooms = {device: count for device, count in attempt.ooms.items() if device not in reported} | ooms
    retries = {device: count for device, count in attempt.retries.items() if device not in reported} | retries
    if (attempt.ooms, attempt.retries) == (ooms, retries):
        return False
    _add_fallen(tally.earlier_ooms, attempt.ooms, ooms)
    _add_fallen(tally.earlier_retries, attempt.retries, retries)
    attempt.ooms, attempt.retries = ooms, retries
    if len(tally.attempts) > MAX_ATTEMPTS:
        _fold_oldest(tally)
    return True


def _add_fallen(earlier: dict[str, int], before: dict[str, int], now: dict[str, int]) -> None:
    for device, count in before.items():
        if now.get(device, 0) < count:
            earlier[device] = earlier.get(device, 0) + count


def _fold_oldest(tally: _Tally) -> None:
    oldest = min(tally.attempts, key=lambda attempt: attempt.start_time)
    tally.attempts.remove(oldest)
    tally.forgotten_until = max(tally.forgotten_until, oldest.start_time)
    tally.earlier_ooms = dict(Counter(tally.earlier_ooms) + Counter(oldest.ooms))
    tally.earlier_retries = dict(Counter(tally.earlier_retries) + Counter(oldest.retries))
