"""From the state of the ranks to blocks of points: one for each rank, one for each job, in the order of their keys.

Invariants: within a block no two points of a metric have the same labels (the reader has seen to it for all but
modules); a rank whose record and state have not changed since the last exposition gives the same block object; what is
remembered of an attempt is forgotten with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torchmem.wire.record import Device, Identity, Record, forecast_drift_ratio
from torchmem_exporter import catalog
from torchmem_exporter.budget import Budget, Level
from torchmem_exporter.catalog import Metric
from torchmem_exporter.drift.judge import Judge, Verdict
from torchmem_exporter.labels import clean_label
from torchmem_exporter.parts import RankParts
from torchmem_exporter.points import Block, Series, in_order
from torchmem_exporter.reading.lifecycle import State
from torchmem_exporter.reading.reader import Rank, Snapshot


@dataclass
class _Attempt:
    """What is remembered of one attempt of a rank."""

    parts: RankParts
    rank: Rank
    labels: dict[Metric, tuple[tuple[str, ...], ...]]
    block: Block | None = None


class Sampler:
    """Makes the blocks of each exposition; safe to use from one thread at a time.

    Args:
        budget: what a rank may cost.
        judge: tells whose memory drifts; None where nobody is to be judged.
    """

    def __init__(self, budget: Budget, judge: Judge | None = None) -> None:
        self._budget = budget
        self._judge = judge
        self._attempts: dict[tuple[str, str], _Attempt] = {}
        self._jobs: dict[str, Block] = {}

    def blocks(self, snapshot: Snapshot) -> tuple[Block, ...]:
        """The blocks of the ranks and jobs that a scan found."""
        self._attempts = {_key(rank): self._attempt(rank) for rank in snapshot.ranks}
        ranks = [self._rank_block(key, attempt) for key, attempt in self._attempts.items()]
        return (*ranks, *self._job_blocks(snapshot.ranks))

    def _attempt(self, rank: Rank) -> _Attempt:
        key, identity = _key(rank), rank.record.identity
        known = self._attempts.get(key)
        if known is None or known.rank.record.identity.attempt != identity.attempt:
            return _Attempt(RankParts(self._budget, key), rank, {})
        if known.rank is not rank:
            known.block = None
        known.rank = rank
        return known

    def _rank_block(self, key: tuple[str, str], attempt: _Attempt) -> Block:
        if attempt.block is None:
            rank = attempt.rank
            points = _Points()
            _add_rank(points, key, rank, only_faults=self._budget.level is Level.CORE)
            verdicts = self._judge.judge(rank) if self._judge else {}
            for device, verdict in verdicts.items():
                _add_verdict(points, (*key, clean_label(device)), verdict, has_memory=rank.has_memory)
            parts: list[Series] = []
            if rank.has_memory:
                parts = attempt.parts.series(rank.record, points.num_points + 1)
                points.add(catalog.MODULES_FOLDED, key, attempt.parts.num_hidden)
            attempt.block = Block(key, rank.record.identity, in_order([*parts, *points.series(attempt.labels)]))
        return attempt.block

    def _job_blocks(self, ranks: Iterable[Rank]) -> Iterator[Block]:
        """What is said once for several ranks; where they disagree about the size, the latest started is right."""
        identities = sorted((rank.record.identity for rank in ranks), key=lambda identity: identity.start_time)
        world_sizes = {clean_label(identity.train_job): identity.world_size for identity in identities}
        self._jobs = {job: block for job, block in self._jobs.items() if job in world_sizes}
        for job, world_size in sorted(world_sizes.items()):
            known = self._jobs.get(job)
            if known is None or known.series[0].values != (world_size,):
                known = Block((job,), None, (Series(catalog.WORLD_SIZE, ((job,),), (world_size,)),))
                self._jobs[job] = known
            yield known


class _Points:
    """Points by metric, as they are found."""

    def __init__(self) -> None:
        self.num_points = 0
        self._labels: dict[Metric, list[tuple[str, ...]]] = {}
        self._values: dict[Metric, list[float]] = {}

    def add(self, metric: Metric, labels: tuple[str, ...], value: float | None) -> None:
        """Notes a value; None, what the record does not know, leaves no point."""
        if value is not None:
            self._labels.setdefault(metric, []).append(labels)
            self._values.setdefault(metric, []).append(value)
            self.num_points += 1

    def series(self, known: dict[Metric, tuple[tuple[str, ...], ...]]) -> Iterator[Series]:
        """What was noted; labels that are as they were are the same object."""
        for metric, values in self._values.items():
            labels = tuple(self._labels[metric])
            if known.get(metric) != labels:
                known[metric] = labels
            yield Series(metric, known[metric], tuple(values))


def _key(rank: Rank) -> tuple[str, str]:
    identity = rank.record.identity
    return clean_label(identity.train_job), str(identity.rank)


def _add_rank(points: _Points, key: tuple[str, str], rank: Rank, *, only_faults: bool) -> None:
    record = rank.record
    points.add(catalog.STEP_NUMBER, key, record.clock.step)
    points.add(catalog.STEPS, key, record.clock.step)
    points.add(catalog.STEP_TIME, key, record.clock.step_seconds)
    points.add(catalog.TRACKER_TIME, key, record.clock.tracker_seconds)
    points.add(catalog.SNAPSHOT_TIMESTAMP, key, record.clock.written_at)
    points.add(catalog.START_TIMESTAMP, key, record.identity.start_time)
    points.add(catalog.RANK_UP, key, int(rank.state.is_alive))
    for state in State:
        points.add(catalog.RANK_STATE, (*key, state.value), int(state is rank.state))
    points.add(catalog.RANK_INFO, (*key, *_info_labels(record)), 1)
    for labeler in record.labelers:
        if not (only_faults and labeler.up):
            points.add(catalog.LABELER_UP, (*key, clean_label(labeler.name)), int(labeler.up))
    for device in record.devices:
        labels = (*key, clean_label(device.name))
        points.add(catalog.OOMS, labels, rank.ooms.get(device.name, device.allocator.num_ooms))
        points.add(catalog.RETRIES, labels, rank.retries.get(device.name, device.allocator.num_retries))
        if rank.has_memory:
            _add_device(points, labels, device)
            points.add(catalog.FORECAST, labels, device.forecast_bytes)
            points.add(catalog.FORECAST_DRIFT_RATIO, labels, forecast_drift_ratio(record, device))


def _add_device(points: _Points, labels: tuple[str, ...], device: Device) -> None:
    allocator = device.allocator
    points.add(catalog.PEAK, labels, device.peak_bytes)
    points.add(catalog.UNATTRIBUTED, labels, device.unattributed_bytes)
    points.add(catalog.ALLOCATED, labels, allocator.allocated_bytes)
    points.add(catalog.ACTIVE, labels, allocator.active_bytes)
    points.add(catalog.RESERVED, labels, allocator.reserved_bytes)
    points.add(catalog.INACTIVE_SPLIT, labels, allocator.inactive_split_bytes)
    if allocator.reserved_bytes and allocator.inactive_split_bytes is not None:
        points.add(catalog.FRAGMENTATION, labels, allocator.inactive_split_bytes / allocator.reserved_bytes)
    points.add(catalog.LIMIT, labels, device.limit_bytes)
    points.add(catalog.OTHER, labels, device.other_bytes)
    peaks: dict[str, int] = {}
    for name, num_bytes in device.checkpoint_peaks.items():
        operation = clean_label(name)
        peaks[operation] = max(num_bytes, peaks.get(operation, 0))
    for operation, num_bytes in peaks.items():
        points.add(catalog.CHECKPOINT_PEAK, (*labels, operation), num_bytes)


def _add_verdict(points: _Points, labels: tuple[str, ...], verdict: Verdict, *, has_memory: bool) -> None:
    judgement = verdict.judgement
    for reason, num_resets in sorted(judgement.num_resets.items()):
        points.add(catalog.BASELINE_RESETS, (*labels, reason), num_resets)
    if not has_memory:
        return
    points.add(catalog.BASELINE, labels, judgement.baseline_bytes)
    points.add(catalog.DRIFT_RATIO, labels, judgement.drift_ratio)
    points.add(catalog.GROWTH, labels, judgement.growth_bytes_per_second)
    points.add(catalog.EXHAUSTION, labels, judgement.exhausted_at)
    if judgement.baseline_bytes is not None:
        points.add(catalog.DRIFTING, (*labels, "level"), int(judgement.is_level_drifting))
    if judgement.growth_bytes_per_second is not None:
        points.add(catalog.DRIFTING, (*labels, "floor"), int(judgement.is_floor_growing))
    for module, reftype, num_bytes in verdict.growers or ():
        points.add(catalog.MODULE_EXCESS, (*labels, clean_label(module), clean_label(reftype)), num_bytes)


def _info_labels(record: Record) -> tuple[str, ...]:
    identity = record.identity
    gpu_uuids = ",".join(device.uuid for device in record.devices if device.uuid)
    mesh = [str(identity.mesh.get(dimension, "")) for dimension in ("dp", "tp", "pp")]
    texts = (identity.attempt, str(identity.pid), identity.host, identity.engine, gpu_uuids)
    return (*map(clean_label, texts), *mesh)


def versions(ranks: Iterable[Identity]) -> list[tuple[str, str]]:
    """(torchmem's version, torch's) of all ranks, each once."""
    return sorted({(clean_label(i.torchmem_version), clean_label(i.torch_version)) for i in ranks})
