"""From the state of the ranks to samples: the frozen model between reading and rendering.

Invariants: within a family no two samples have the same labels (the reader has seen to it for all but modules); module
parts add up to their reftype's total, and those to the device's, exactly, also where cleaning makes two names one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from torchmem.wire.record import CELL, Device, Identity, Record
from torchmem_exporter import __version__, catalog
from torchmem_exporter.catalog import Metric
from torchmem_exporter.labels import clean_label
from torchmem_exporter.lifecycle import State
from torchmem_exporter.reader import Rank, Reader, Snapshot


class Sample(NamedTuple):
    """One value."""

    labels: tuple[str, ...]
    """Values of the metric's labels, in their order."""
    value: float


@dataclass(frozen=True)
class Family:
    """All samples of one metric."""

    metric: Metric
    samples: tuple[Sample, ...]


def scrape(reader: Reader, timer: Callable[[], float], *, is_scrape: bool = True) -> Iterator[Family]:
    """Everything one scrape exposes; the last family, made when the others have been used, is how long that took.

    Args:
        reader: of the directory to expose.
        timer: seconds.
        is_scrape: whether the samples go to a monitoring system, see ``Reader.scan``.
    """
    began = timer()
    yield from families(reader.scan(is_scrape=is_scrape))
    yield Family(catalog.SCRAPE_DURATION, (Sample((), timer() - began),))


def families(snapshot: Snapshot) -> Iterator[Family]:
    """The snapshot's families, in the catalog's order; those without a sample are left out, those used are let go."""
    book = _Book()
    for rank in snapshot.ranks:
        _add_rank(book, rank)
    _add_jobs(book, snapshot.ranks)
    for reason, num_errors in sorted(snapshot.num_errors.items()):
        book.add(catalog.SNAPSHOT_ERRORS, (reason,), num_errors)
    yield from book.families()


class _Book:
    """Samples by metric."""

    def __init__(self) -> None:
        self._samples: dict[Metric, list[Sample]] = {metric: [] for metric in catalog.METRICS}

    def add(self, metric: Metric, labels: tuple[str, ...], value: float | None) -> None:
        """Notes a value; None, what the record does not know, leaves no sample."""
        if value is not None:
            self._samples[metric].append(Sample(labels, value))

    def families(self) -> Iterator[Family]:
        """What was noted, in the catalog's order; the book is empty afterwards."""
        for metric in catalog.METRICS:
            samples = self._samples.pop(metric)
            if samples:
                yield Family(metric, tuple(samples))


def _add_rank(book: _Book, rank: Rank) -> None:
    record, key = rank.record, _rank_labels(rank.record.identity)
    book.add(catalog.STEP_NUMBER, key, record.clock.step)
    book.add(catalog.STEPS, key, record.clock.step)
    book.add(catalog.STEP_TIME, key, record.clock.step_seconds)
    book.add(catalog.TRACKER_TIME, key, record.clock.tracker_seconds)
    book.add(catalog.SNAPSHOT_TIMESTAMP, key, record.clock.written_at)
    book.add(catalog.START_TIMESTAMP, key, record.identity.start_time)
    book.add(catalog.RANK_UP, key, rank.state.is_alive)
    for state in State:
        book.add(catalog.RANK_STATE, (*key, state.value), state is rank.state)
    book.add(catalog.RANK_INFO, (*key, *_info_labels(record)), 1)
    for labeler in record.labelers:
        book.add(catalog.LABELER_UP, (*key, clean_label(labeler.name)), labeler.up)
    modules = [clean_label(name) for name in record.modules]
    reftypes = [clean_label(name) for name in record.reftypes]
    for device in record.devices:
        labels = (*key, clean_label(device.name))
        book.add(catalog.OOMS, labels, device.allocator.num_ooms)
        book.add(catalog.RETRIES, labels, device.allocator.num_retries)
        if rank.has_memory:
            _add_totals(book, labels, device)
            _add_modules(book, labels, device, modules, reftypes)


def _add_totals(book: _Book, labels: tuple[str, ...], device: Device) -> None:
    allocator = device.allocator
    book.add(catalog.PEAK, labels, device.peak_bytes)
    book.add(catalog.UNATTRIBUTED, labels, device.unattributed_bytes)
    book.add(catalog.ALLOCATED, labels, allocator.allocated_bytes)
    book.add(catalog.ACTIVE, labels, allocator.active_bytes)
    book.add(catalog.RESERVED, labels, allocator.reserved_bytes)
    book.add(catalog.INACTIVE_SPLIT, labels, allocator.inactive_split_bytes)
    if allocator.reserved_bytes and allocator.inactive_split_bytes is not None:
        book.add(catalog.FRAGMENTATION, labels, allocator.inactive_split_bytes / allocator.reserved_bytes)
    book.add(catalog.LIMIT, labels, device.limit_bytes)
    book.add(catalog.OTHER, labels, device.other_bytes)
    peaks: dict[str, int] = {}
    for name, num_bytes in device.checkpoint_peaks.items():
        operation = clean_label(name)
        peaks[operation] = max(num_bytes, peaks.get(operation, 0))
    for operation, num_bytes in peaks.items():
        book.add(catalog.CHECKPOINT_PEAK, (*labels, operation), num_bytes)


def _add_modules(book: _Book, labels: tuple[str, ...], device: Device, modules: list[str], reftypes: list[str]) -> None:
    for cells, parts_metric, total_metric in (
        (device.usage, catalog.MODULE_USAGE, catalog.USAGE),
        (device.step_peak, catalog.MODULE_STEP_PEAK, catalog.STEP_PEAK),
        (device.active_peak, catalog.MODULE_ACTIVE_PEAK, None),
    ):
        parts: dict[tuple[str, str], int] = {}
        totals: dict[str, int] = {}
        for module, reftype_index, num_bytes in CELL.iter_unpack(cells):
            reftype = reftypes[reftype_index]
            part = (modules[module], reftype)
            parts[part] = parts.get(part, 0) + num_bytes
            totals[reftype] = totals.get(reftype, 0) + num_bytes
        for part, num_bytes in parts.items():
            book.add(parts_metric, labels + part, num_bytes)
        if total_metric is not None:
            for reftype, num_bytes in totals.items():
                book.add(total_metric, (*labels, reftype), num_bytes)


def _add_jobs(book: _Book, ranks: Iterable[Rank]) -> None:
    """What is said once for several ranks: where they disagree about their job's size, the latest started is right."""
    identities = sorted((rank.record.identity for rank in ranks), key=lambda identity: identity.start_time)
    world_sizes = {clean_label(identity.train_job): identity.world_size for identity in identities}
    for train_job, world_size in sorted(world_sizes.items()):
        book.add(catalog.WORLD_SIZE, (train_job,), world_size)
    versions = {(clean_label(i.torchmem_version), clean_label(i.torch_version)) for i in identities}
    for labels in sorted(versions | {(__version__, "")}):
        book.add(catalog.BUILD_INFO, labels, 1)


def _rank_labels(identity: Identity) -> tuple[str, ...]:
    return clean_label(identity.train_job), str(identity.rank)


def _info_labels(record: Record) -> tuple[str, ...]:
    identity = record.identity
    gpu_uuids = ",".join(device.uuid for device in record.devices if device.uuid)
    mesh = [str(identity.mesh.get(dimension, "")) for dimension in ("dp", "tp", "pp")]
    texts = (identity.attempt, str(identity.pid), identity.host, identity.engine, gpu_uuids)
    return (*map(clean_label, texts), *mesh)
