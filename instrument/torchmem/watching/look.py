"""One reading of a directory of records: every rank, what is known of its devices, and what could not be read.

Invariants: torch-free; reads only: neither the records nor what a sidecar keeps beside them is written; nothing that
lies in the directory raises.

What a sidecar over the same directory, or over the one that a job's folder lies in, has learned until the start is
taken over; from there on the ranks are judged here, by the same judge. Without one, usual is what the records' rings
show, so that a leak older than those and the growers of before the start are not told.

Known limits: a rank whose record is gone is gone; ages are by this host's clock.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from torchmem.wire.deaths import read_deaths
from torchmem.wire.ranks import Found, RankView, printable, read_ranks
from torchmem.wire.record import Device, forecast_drift_ratio
from torchmem_exporter.drift.judge import Judge, Verdict
from torchmem_exporter.drift.ring_steps import Step, steps_after
from torchmem_exporter.findings import Finding, findings
from torchmem_exporter.reading.lifecycle import State
from torchmem_exporter.reading.reader import Rank
from torchmem_exporter.reading.state import StateFile, state_path

HOST_MEMORY = "cpu"


@dataclass(frozen=True)
class DeviceLook:
    """One device of a rank, judged."""

    device: Device
    verdict: Verdict
    forecast_drift_ratio: float | None = None
    """The step peak over its forecast, less one; None where none is known."""


@dataclass(frozen=True)
class RankLook:
    """One rank, judged."""

    view: RankView
    devices: tuple[DeviceLook, ...]
    """Accelerators first."""

    @property
    def key(self) -> str:
        """Tells ranks apart from reading to reading."""
        return self.view.path

    @property
    def is_alive(self) -> bool:
        """Whether its process lives."""
        return State(self.view.state).is_alive

    def device(self, number: int) -> DeviceLook | None:
        """Its device of that number, around and around; None where it has none."""
        return self.devices[number % len(self.devices)] if self.devices else None

    def findings(self, now: float) -> list[Finding]:
        """What is the matter with it, the worst first.

        Args:
            now: Unix seconds.
        """
        return findings(_read(self.view), {one.device.name: one.verdict for one in self.devices}, now)

    def steps(self, device: Device) -> list[Step]:
        """The steps of a device in the record's ring, oldest first."""
        record = self.view.record
        return steps_after(record.ring, -1, len(record.reftypes)).get(device.name, [])


@dataclass(frozen=True)
class Look:
    """One reading."""

    directory: str
    taken_at: float
    """Unix seconds."""
    ranks: tuple[RankLook, ...] = ()
    """Those that live first, by job and rank."""
    unreadable: tuple[str, ...] = ()
    """One line for each record that could not be read."""
    exists: bool = True
    """Whether there is a directory, or may be one."""
    num_deaths: int = 0
    """Attempts whose last records lie there; only where there are no ranks."""

    @property
    def jobs(self) -> list[str]:
        """Names of all jobs."""
        return sorted({rank.view.record.identity.train_job for rank in self.ranks})


class Watcher:
    """Reads a directory again and again; for use from one thread at a time.

    Args:
        directory: where jobs' folders lie, or the folder of one job.
        train_job: only this job, by its name or by its folder's.
    """

    def __init__(self, directory: Path, train_job: str | None = None) -> None:
        self.directory = directory
        self.train_job = train_job
        self._judge = Judge(StateFile(state_path(directory)))
        self._num_deaths: int | None = None

    def look(self) -> Look:
        """Reads and judges what lies there now."""
        name, now = printable(str(self.directory)), time.time()
        try:
            found = read_ranks(self.directory, self.train_job)
        except OSError as error:
            found = Found(unreadable=[printable(f"{self.directory}: {error.strerror}")])
        ranks = sorted((self._judged(view) for view in found.ranks), key=lambda rank: not rank.is_alive)
        self._judge.release(_read(view) for view in found.ranks)
        # What cannot be read may exist.
        exists = bool(found.unreadable) or os.path.isdir(self.directory)  # noqa: PTH112  # Path's raises
        return Look(name, now, tuple(ranks), tuple(found.unreadable), exists, self._dead(found))

    def _dead(self, found: Found) -> int:
        """How many attempts died; looked for once after the last rank has gone, since all their records are read."""
        if found.ranks:
            self._num_deaths = None
            return 0
        if self._num_deaths is None:
            self._num_deaths = len(read_deaths(self.directory, self.train_job).deaths)
        return self._num_deaths

    def _judged(self, view: RankView) -> RankLook:
        verdicts = self._judge.judge(_read(view))
        devices = sorted(view.record.devices, key=lambda device: device.name == HOST_MEMORY)
        return RankLook(view, tuple(_device_look(view, device, verdicts[device.name]) for device in devices))


def _read(view: RankView) -> Rank:
    """As the sidecar's reader would have it."""
    return Rank(view.path, view.record, State(view.state), has_memory=True)


def _device_look(view: RankView, device: Device, verdict: Verdict) -> DeviceLook:
    return DeviceLook(device, verdict, forecast_drift_ratio(view.record, device))
