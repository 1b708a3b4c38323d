"""Running jobs held against baselines that were kept by name: ``--baseline [JOB=]FILE``.

Invariants: a file is read once, when the sidecar starts, and one that cannot be used is refused then; a baseline is
taken only for the rank, device and number of ranks that it was learned of.
"""

from __future__ import annotations

import fnmatch
import glob
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from torchmem.errors import ConfigError
from torchmem.wire.record import Identity
from torchmem_exporter.drift.baseline import Baseline, BaselineError, Baselines, decode
from torchmem_exporter.labels import clean_label

MAX_FILE_BYTES = 64 << 20


@dataclass(frozen=True)
class HeldRun:
    """What was usual of one run, and the jobs that are held against it.

    Attributes:
        jobs: names of training jobs, as a pattern of the shell.
        run: the baselines.
    """

    jobs: str
    run: Baselines

    @cached_property
    def _by_device(self) -> dict[tuple[int, str], Baseline]:
        return {(one.rank, one.device): one for one in self.run.baselines}

    def of(self, identity: Identity, device: str) -> Baseline | None:
        """The baseline of one device of a running rank; None where this run says nothing of it."""
        is_alike = identity.world_size == self.run.world_size
        if not (is_alike and fnmatch.fnmatchcase(clean_label(identity.train_job), self.jobs)):
            return None
        return self._by_device.get((identity.rank, device))


def held_run(argument: str) -> HeldRun:
    """Reads what ``--baseline`` names.

    Args:
        argument: a file that ``torchmem baseline save`` wrote, for the job that it was saved from; or
            ``JOB=FILE``, for the jobs whose names fit the pattern.

    Raises:
        ConfigError: the file cannot be used.
    """
    jobs, equals, name = ("", "", argument) if Path(argument).is_file() else argument.rpartition("=")
    path = Path(name)
    try:
        with path.open("rb") as file:
            run = decode(file.read(MAX_FILE_BYTES))
    except OSError as error:
        raise ConfigError(f"--baseline {argument}: {path}: {error.strerror}") from None
    except BaselineError as error:
        raise ConfigError(f"--baseline {argument}: {error}") from None
    return HeldRun(jobs if equals else glob.escape(clean_label(run.train_job)), run)


def baseline_of(held: Iterable[HeldRun], identity: Identity, device: str) -> Baseline | None:
    """The first that one of the runs has for a device of a running rank."""
    return next((found for one in held if (found := one.of(identity, device)) is not None), None)
