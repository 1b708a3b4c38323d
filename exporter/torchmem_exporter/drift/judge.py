"""Which devices drift, and what grew: every rank's new steps go to its devices' ``Drift``, kept over restarts.

Invariants: a record is judged once, however often it is seen; nothing a record holds makes judging raise; what was
learned of a rank is kept under its job, number and device, and forgotten a week after its last step.

What comes and goes within a step (temporaries, communication buffers) is a grower only where what is kept explains less
than half of the growth: whatever moves the instant of the peak changes which of them are alive just then.

A grower is named as exactly as it can be: by its own module where one of those that differ only in an index grew by
more than half of what all of them did, else by the name of all.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import msgspec

from torchmem.model import RefType, folded
from torchmem.wire.record import Device, Record
from torchmem_exporter.drift.baseline import Baseline
from torchmem_exporter.drift.composition import MAX_PARTS, OTHER, Composition, Growth, compare, composition
from torchmem_exporter.drift.drift import Drift, Judgement, fingerprint_of
from torchmem_exporter.drift.held import HeldRun, baseline_of
from torchmem_exporter.drift.ring_steps import steps_after
from torchmem_exporter.labels import clean_label
from torchmem_exporter.reading.reader import Rank
from torchmem_exporter.reading.state import StateFile

SECTION = "drift"
MAX_GROWERS = 10
LEAST_SHARE = 0.01
"""Of the baseline; who grew by less is not named."""
OWN_SHARE = 0.5
KEPT_SHARE = 0.5
PASSING = frozenset(
    reftype.label
    for reftype in (
        RefType.TEMPORARY,
        RefType.RECOMPUTATION,
        RefType.ALL_GATHER,
        RefType.REDUCE_SCATTER,
        RefType.ALL_REDUCE,
    )
)
KEEP_SECONDS = 7 * 24 * 3600.0
SAVE_SECONDS = 60.0
MAX_SECTION_BYTES = 8 << 20
"""Of what is kept, beyond which those ranks are forgotten that have not stepped for longest."""

Drifts = dict[str, dict[str, dict[str, Drift]]]
"""By job, rank and device."""

_decoder = msgspec.msgpack.Decoder(Drifts)


class Grower(NamedTuple):
    """A module and reftype that hold more than in the baseline."""

    module: str
    reftype: str
    num_bytes: int
    """More."""


class Verdict(NamedTuple):
    """What is known of one device."""

    judgement: Judgement
    growers: tuple[Grower, ...] | None
    """The most grown first; None while that is not known, as what is usual has not been seen."""


class _Judged(NamedTuple):
    record: Record
    verdicts: Mapping[str, Verdict]


class Judge:
    """Judges the ranks of one directory; for use from one thread at a time.

    Args:
        state: where what was learned is kept.
        held: baselines that are taken instead of learning them; None where another sidecar says which, so that those
            it took stay.
        clock: Unix seconds.
    """

    def __init__(
        self, state: StateFile, held: Sequence[HeldRun] | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        self._state = state
        self._held = held
        self._clock = clock
        self._drifts: Drifts = {}
        self._judged: dict[tuple[str, str], _Judged] = {}
        self._saved_at = clock()
        self._is_saved = True
        if section := state.section(SECTION):
            try:
                self._drifts = _decoder.decode(section)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                state.refuse(SECTION, error)

    def judge(self, rank: Rank) -> Mapping[str, Verdict]:
        """What is known of a rank's devices, by their names."""
        key = _key(rank)
        known = self._judged.get(key)
        if known is None or known.record is not rank.record:
            drifts = self._drifts.setdefault(key[0], {}).setdefault(key[1], {})
            before = known.verdicts if known else {}
            known = self._judged[key] = _Judged(rank.record, _verdicts(rank.record, drifts, before, self._held))
            self._is_saved = False
        return known.verdicts

    def save(self, *, is_due: bool = False, guard: AbstractContextManager[object] | None = None) -> None:
        """Keeps what was learned, if anything was.

        Args:
            is_due: also soon after the last time.
            guard: entered to see what there is to keep, not to write it, for which nobody need wait.
        """
        with guard or contextlib.nullcontext():
            now = self._clock()
            if self._is_saved or not (is_due or now - self._saved_at >= SAVE_SECONDS):
                return
            self._forget(now - KEEP_SECONDS)
            section = self._section()
            self._saved_at, self._is_saved = now, True
        self._state.save(SECTION, section)

    def release(self, present: Iterable[Rank]) -> None:
        """Lets go of the records of all other ranks; what was learned of them stays."""
        gone = self._judged.keys() - {_key(rank) for rank in present}
        for key in gone:
            del self._judged[key]

    def _section(self) -> bytes:
        """What is kept; makes it fit."""
        while len(section := msgspec.msgpack.encode(self._drifts)) > MAX_SECTION_BYTES:
            stepped = [
                (max((drift.last_time for drift in drifts.values()), default=0.0), job, rank)
                for job, ranks in self._drifts.items()
                for rank, drifts in ranks.items()
            ]
            for _, job, rank in sorted(stepped)[: (len(stepped) + 1) // 2]:
                self._remove(job, rank)
        return section

    def _remove(self, job: str, rank: str) -> None:
        ranks = self._drifts[job]
        del ranks[rank]
        if not ranks:
            del self._drifts[job]
        self._judged.pop((job, rank), None)

    def _forget(self, before: float) -> None:
        """Lets go of what has not stepped since."""
        for job, ranks in list(self._drifts.items()):
            for rank, drifts in list(ranks.items()):
                if all(drift.last_time < before for drift in drifts.values()):
                    self._remove(job, rank)


def _key(rank: Rank) -> tuple[str, str]:
    identity = rank.record.identity
    return clean_label(identity.train_job), str(identity.rank)


def learn(record: Record, drifts: dict[str, Drift], held: Sequence[HeldRun] | None) -> dict[str, Drift]:
    """Takes a record's new steps into what is remembered of its rank; returns what is known of the record's devices.

    Args:
        record: of the rank.
        drifts: what is remembered, by device's name; devices that are new are added.
        held: baselines that are taken instead of learning them; None leaves those that were taken.
    """
    attempt, fingerprint = record.identity.attempt, fingerprint_of(record.identity)
    for device in record.devices:
        drift = drifts.setdefault(device.name, Drift())
        drift.begin(attempt, fingerprint)
        if held is not None:
            _hold(drift, baseline_of(held, record.identity, device))
    present = {device.name: drifts[device.name] for device in record.devices}
    last_step = min((drift.last_step for drift in present.values()), default=-1)
    sizes = memoryview(record.ring.input_sizes).cast("q").tolist() if record.ring.input_sizes else ()
    for name, steps in steps_after(record.ring, last_step, len(record.reftypes), sizes).items():
        if name in present:
            present[name].feed(steps)
    for device in record.devices:
        drift = present[device.name]
        if drift.wants_composition and drift.is_ordinary(device.step_peak_bytes):
            drift.observe(_composition(record, device))
    return present


def _hold(drift: Drift, kept: Baseline | None) -> None:
    """Holds a device against a baseline that was kept, or against none any more."""
    if kept is None:
        drift.release()
    elif kept.level != drift.level:
        drift.adopt(kept.level, kept.usual)


def _verdicts(
    record: Record, drifts: dict[str, Drift], before: Mapping[str, Verdict], held: Sequence[HeldRun] | None
) -> Mapping[str, Verdict]:
    present = learn(record, drifts, held)
    return {
        device.name: Verdict(
            present[device.name].judge(_limit_bytes(device)),
            _growers(record, device, present[device.name], before.get(device.name)),
        )
        for device in record.devices
    }


def _limit_bytes(device: Device) -> int | None:
    """What torch's allocator may come to hold."""
    return None if device.limit_bytes is None else max(0, device.limit_bytes - (device.other_bytes or 0))


def _growers(record: Record, device: Device, drift: Drift, before: Verdict | None) -> tuple[Grower, ...] | None:
    """Who grew; as before, while the device's peak is that of a checkpoint or an evaluation."""
    if drift.level is None or drift.usual is None:
        return None
    if not drift.is_ordinary(device.step_peak_bytes):
        return before.growers if before else None
    is_folded = any("*" in part.module for part in drift.usual.parts)  # too many parts to keep each
    now = _composition(record, device, is_folded=is_folded)
    return grown(drift.usual, now, LEAST_SHARE * drift.level.num_bytes)


def _composition(record: Record, device: Device, *, is_folded: bool = False) -> Composition:
    """What the device held at its latest step peak; modules that differ only in their indices as one if need be."""
    if not is_folded:
        found = composition(device.step_peak, record.modules, record.reftypes)
        if len(found.parts) <= MAX_PARTS:
            return found
    return composition(device.step_peak, [folded(name) for name in record.modules], record.reftypes)


def grown(before: Composition, after: Composition, least_bytes: float) -> tuple[Grower, ...]:
    """Who holds more than before, the most grown first.

    Args:
        before: what is usual.
        after: what is held.
        least_bytes: who grew by less is left out.
    """
    alike: dict[tuple[str, str], list[Growth]] = {}
    for row in compare(before, after):
        if row.module != OTHER:
            alike.setdefault((folded(row.module), row.reftype), []).append(row)
    growers = [_grower(name, rows) for name, rows in alike.items()]
    growers = [grower for grower in growers if grower.num_bytes > least_bytes]
    kept = [grower for grower in growers if grower.reftype not in PASSING]
    if kept and sum(grower.num_bytes for grower in kept) >= KEPT_SHARE * (after.total_bytes - before.total_bytes):
        growers = kept
    return tuple(sorted(growers, key=lambda grower: -grower.num_bytes)[:MAX_GROWERS])


def _grower(name: tuple[str, str], rows: list[Growth]) -> Grower:
    """Those that share a name but for an index, as one of them or as all."""
    together = sum(row.grown_bytes for row in rows)
    most = max(rows, key=lambda row: row.grown_bytes)
    if most.grown_bytes > OWN_SHARE * together:
        return Grower(most.module, most.reftype, most.grown_bytes)
    return Grower(*name, together)


def learned(state: StateFile) -> Drifts:
    """What a sidecar has learned, from the state it keeps; empty where that cannot be read."""
    with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return _decoder.decode(state.section(SECTION) or b"\x80")
    return {}
