"""The runs that ``torchmem diff`` compares, wherever they lie: records, post-mortems and files of baselines.

Invariants: torch-free; what cannot be used ends in ``UnusableError``, whose message names the path and the fix; a
record that cannot be read is named, and never hides the others.

Of a directory the records in place are taken, and where there are none the latest of each dead rank. Of an attempt that
died for want of memory, the peak is what the device held then, if that is the most.
"""

from __future__ import annotations

import stat
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from torchmem.diff import Held
from torchmem.errors import TorchmemError
from torchmem.show import Book
from torchmem.wire.deaths import fatal_oom, read_deaths
from torchmem.wire.ranks import printable, read_ranks
from torchmem.wire.record import MAGIC, Device, Record

if TYPE_CHECKING:
    from torchmem_exporter.drift.baseline import Baselines

MAX_BASELINES_BYTES = 256 << 20


class UnusableError(TorchmemError):
    """What was named cannot be compared."""


@dataclass(frozen=True)
class Run:
    """One run, or what is left of it."""

    path: str
    kind: str
    """``records``, ``post-mortem`` or ``baselines``."""
    train_job: str
    devices: list[Held]
    """By rank; each rank and device once."""
    remarks: list[str] = field(default_factory=list)
    """What was left out, and why."""

    @property
    def num_ranks(self) -> int:
        """How many ranks there are."""
        return len({held.rank for held in self.devices})


@dataclass(frozen=True)
class Records:
    """The records of one job, one a rank."""

    kind: str
    train_job: str
    records: list[Record]
    unreadable: list[str]


def read_run(path: Path, book: Book, train_job: str | None, rank: int | None, device: str | None) -> Run:
    """Reads one run.

    Args:
        path: a directory of records, a job's folder in it, a post-mortem folder, a record or a file of baselines.
        book: which of a device's books.
        train_job: of a directory, only this job, by its name or by its folder's.
        rank: only this rank.
        device: only the device of this name.

    Raises:
        UnusableError: there is nothing to compare, or not one run.
    """
    if not _holds_records(path):
        kind, remarks = "baselines", []
        name, devices = _of_baselines(path, book)
    else:
        found = read_records(path, train_job, rank)
        kind, name, remarks = found.kind, found.train_job, list(found.unreadable)
        devices = []
        for record in found.records:
            devices += _of_record(record, book, remarks)
    wanted = [held for held in devices if rank in (None, held.rank) and device in (None, held.device)]
    if not wanted:
        raise UnusableError("; ".join([f"{path} holds nothing to compare{_filters(rank, device)}", *remarks]))
    return Run(str(path), kind, name, sorted(wanted, key=lambda held: held.key), remarks)


def read_records(path: Path, train_job: str | None = None, rank: int | None = None) -> Records:
    """The records of one job, arguments as of ``read_run``.

    Raises:
        UnusableError: there is none, or they are of several jobs.
    """
    try:
        kind, records, unreadable = _records(path, train_job, rank)
    except OSError as error:
        raise UnusableError(f"{path}: {error.strerror}") from None
    jobs = sorted({record.identity.train_job for record in records})
    if len(jobs) > 1:
        raise UnusableError(f"{path} holds several jobs, choose one with --job: {', '.join(map(printable, jobs))}")
    if not jobs:
        job = f" of job {train_job!r}" if train_job is not None else ""
        nothing = f"no records{job}{_filters(rank, None)} under {path}" if path.exists() else f"{path} does not exist"
        raise UnusableError("; ".join([nothing, *unreadable]))
    ranks = [record.identity.rank for record in records]
    if len(set(ranks)) < len(ranks):  # two runs of one name, each in a folder of its own
        twice = next(number for number in ranks if ranks.count(number) > 1)
        raise UnusableError(
            f"{path} holds rank {twice} of {printable(jobs[0])} more than once: name one of its folders"
        )
    return Records(kind, jobs[0], records, unreadable)


def _records(path: Path, train_job: str | None, rank: int | None) -> tuple[str, list[Record], list[str]]:
    if path.is_dir():
        found = read_ranks(path, train_job, rank)
        if found.ranks:
            return "records", [view.record for view in found.ranks], found.unreadable
    deaths = read_deaths(path, train_job if path.is_dir() else None, rank)
    latest: dict[tuple[str, int], Record] = {}
    for death in deaths.deaths:
        latest.setdefault((death.record.identity.train_job, death.record.identity.rank), death.record)
    return "post-mortem" if path.is_dir() else "records", list(latest.values()), deaths.unreadable


def _holds_records(path: Path) -> bool:
    """Whether it is a directory or a record; else it may be a file of baselines."""
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            return True
        if not stat.S_ISREG(mode):
            raise UnusableError(f"{path} is neither a directory nor a file")
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except FileNotFoundError:
        raise UnusableError(f"{path} does not exist") from None
    except OSError as error:
        raise UnusableError(f"{path}: {error.strerror}") from None


def _of_record(record: Record, book: Book, remarks: list[str]) -> Iterable[Held]:
    identity, failure = record.identity, fatal_oom(record)
    is_begun = record.clock.step > 0
    if not is_begun and (failure is None or book is Book.USAGE):
        remarks.append(f"rank {identity.rank} is left out: no step had finished")
        return
    for device in record.devices:
        yield _of_device(record, device, book)


def _of_device(record: Record, device: Device, book: Book) -> Held:
    from torchmem_exporter.drift.composition import Composition, composition

    rank, failure = record.identity.rank, fatal_oom(record)
    if book is Book.USAGE:
        return Held(rank, device.name, composition(device.usage, record.modules, record.reftypes), book.description)
    peak = composition(device.step_peak, record.modules, record.reftypes)
    if failure is None or failure.device != device.name or failure.held_bytes <= peak.total_bytes:
        return Held(rank, device.name, peak, book.description)
    parts = composition(failure.holders, record.modules, record.reftypes).parts
    other_bytes = failure.held_bytes - sum(part.num_bytes for part in parts)
    return Held(rank, device.name, Composition(parts=parts, other_bytes=other_bytes), "when an allocation failed")


def _of_baselines(path: Path, book: Book) -> tuple[str, list[Held]]:
    from torchmem_exporter.drift.composition import Composition

    if book is Book.USAGE:
        raise UnusableError(f"{path}: baselines are of the peaks of steps, and know no usage: leave --usage out")
    run = read_baselines(path)
    devices: dict[tuple[int, str], Held] = {}
    for one in run.baselines:
        usual = one.usual or Composition(other_bytes=round(one.level.highest_bytes))
        if min([usual.other_bytes, *(part.num_bytes for part in usual.parts)]) < 0:
            raise UnusableError(f"{path}: rank {one.rank} {printable(one.device)} holds less than nothing")
        devices[one.rank, one.device] = Held(one.rank, one.device, usual, "as usual at the peak of a step")
    return run.train_job, list(devices.values())


def read_baselines(path: Path) -> Baselines:
    """A file of baselines.

    Raises:
        UnusableError: it is none.
    """
    from torchmem_exporter.drift.baseline import BaselineError, decode

    try:
        with path.open("rb") as file:
            return decode(file.read(MAX_BASELINES_BYTES))
    except OSError as error:
        raise UnusableError(f"{path}: {error.strerror}") from None
    except BaselineError as error:
        raise UnusableError(f"{path}: neither a record nor a file of baselines: {error}") from None


def _filters(rank: int | None, device: str | None) -> str:
    text = f" of rank {rank}" if rank is not None else ""
    return text + (f" on {device!r}" if device is not None else "")
