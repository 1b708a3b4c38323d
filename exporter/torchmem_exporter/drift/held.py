"""Running jobs held against baselines that were kept by name: ``--baseline [JOB=]FILE``.

Invariants: a file is read once, when the sidecar starts, and one that cannot be used is refused then; a baseline is
taken only for the rank, device and number of ranks that it was learned of; a job that a file is for, and that it does
not fit, is told of in the log, once.
"""

from __future__ import annotations

import fnmatch
import glob
import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from torchmem.errors import ConfigError
from torchmem.wire.record import Device, Identity
from torchmem_exporter.drift.baseline import Baseline, BaselineError, Baselines, decode
from torchmem_exporter.labels import clean_label
from torchmem_exporter.logs import log

MAX_FILE_BYTES = 64 << 20

logger = logging.getLogger("torchmem_exporter")


@dataclass(frozen=True)
class HeldRun:
    """What was usual of one run, and the jobs that are held against it.

    Attributes:
        jobs: names of training jobs, as a pattern of the shell.
        run: the baselines.
        argument: what ``--baseline`` says.
    """

    jobs: str
    run: Baselines
    argument: str
    _told: set[str] = field(default_factory=set, init=False, repr=False, compare=False)
    """Jobs that it does not fit, which was logged."""

    @cached_property
    def _by_device(self) -> dict[tuple[int, str], Baseline]:
        return {(one.rank, one.device): one for one in self.run.baselines}

    def is_for(self, identity: Identity) -> bool:
        """Whether a running rank's job is held against it."""
        return fnmatch.fnmatchcase(clean_label(identity.train_job), self.jobs)

    def of(self, identity: Identity, device: str) -> Baseline | None:
        """The baseline of one device of a running rank; None where this run says nothing of it."""
        if identity.world_size != self.run.world_size or not self.is_for(identity):
            return None
        return self._by_device.get((identity.rank, device))

    def tell_misfit(self, identity: Identity, device: str) -> None:
        """Says in the log, once a job, why a device of a running rank has no baseline here."""
        job = clean_label(identity.train_job)
        if job in self._told:
            return
        self._told.add(job)
        message = (
            "a device is not held against the baseline of its job, but against what is learned of it: save a baseline"
            " of such a run with `torchmem baseline save`, or leave this one out"
        )
        fields = {"job": job, "rank": identity.rank, "device": clean_label(device), "baseline": self.argument}
        log(logger, logging.WARNING, message, **fields, reason=self._misfit(identity, device))

    def _misfit(self, identity: Identity, device: str) -> str:
        rank, ranks = identity.rank, {one.rank for one in self.run.baselines}
        if identity.world_size != self.run.world_size:
            return f"the baseline is of world size {self.run.world_size}, the job runs on {identity.world_size}"
        if rank not in ranks:
            of_ranks = f"of {len(ranks)} ranks from {min(ranks)} to {max(ranks)}" if ranks else "of no rank"
            return f"the baseline is {of_ranks}, without the job's rank {rank}"
        devices = ", ".join(sorted(one.device for one in self.run.baselines if one.rank == rank))
        return f"the baseline of rank {rank} is of {devices}, the job runs on {clean_label(device)}"


def held_run(argument: str) -> HeldRun:
    """Reads what ``--baseline`` names.

    Args:
        argument: a file that ``torchmem baseline save`` wrote, for the job that it was saved from; or
            ``JOB=FILE``, for the jobs whose names fit the pattern.

    Raises:
        ConfigError: the file cannot be used.
    """
    is_file = os.path.isfile(argument)  # noqa: PTH113  # Path's raises
    jobs, equals, name = ("", "", argument) if is_file else argument.rpartition("=")
    path = Path(name)
    try:
        with path.open("rb") as file:
            run = decode(file.read(MAX_FILE_BYTES))
    except OSError as error:
        raise ConfigError(f"--baseline {argument}: {path}: {error.strerror}") from None
    except BaselineError as error:
        raise ConfigError(f"--baseline {argument}: {error}") from None
    return HeldRun(jobs if equals else glob.escape(clean_label(run.train_job)), run, argument)


def baseline_of(held: Iterable[HeldRun], identity: Identity, device: Device) -> Baseline | None:
    """The first that one of the runs has for a device of a running rank; that none has one is told in the log."""
    for_job = [one for one in held if one.is_for(identity)]
    for one in for_job:
        if (found := one.of(identity, device.name)) is not None:
            return found
    if device.step_peak_bytes > 0:  # of a device that holds nothing, nothing is usual
        for one in for_job:
            one.tell_misfit(identity, device.name)
    return None
