"""Runs a job under torchmem and, independently, under the witness; brings both sets of figures home."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torchmem
from jobs import books
from torchmem.validation import witness
from torchmem.validation.truth import CpuTruth
from torchmem.validation.watch import sums_of_storages

if TYPE_CHECKING:
    from collections.abc import Callable

    from jobs.model import Job

MESH_BYTES = 64
"""What a device mesh keeps of its ranks' numbers, at most: allocated before torchmem comes and reachable by no one."""


class Step(NamedTuple):
    """What one step held, all in bytes; ``true_*`` by the witness, of the job alone."""

    true_peak: int
    true_end: int
    peak: books.Composition
    end: books.Composition
    storages: dict[str, int]
    """At the step's end, the storages of ``parameter``, ``gradient``, ``optimizer_state`` and ``buffer`` tensors."""


class _True(NamedTuple):
    peak: int
    end: int
    storages: dict[str, int]


class Watched(NamedTuple):
    """A job's steps under torchmem and the record made after the last of them."""

    steps: list[Step]
    counters: dict[str, int]
    disabled: list[str]
    """Labelers that failed, with their reasons."""


def count_foreign() -> int:
    """What the witness counts before a job is made, once all have let go of what is not theirs any more; bytes."""
    CpuTruth().clean()
    return witness.current()


def watch(
    job: Job,
    *,
    directory: str,
    num_steps: int,
    foreign_bytes: int,
    optimizer_passed: bool = True,
    by_hand: Callable[[Job], None] | None = None,
) -> Watched:
    """Runs the job for some steps; the witness must have been installed before the job was made.

    Args:
        job: with or without steps behind it.
        directory: where records go.
        num_steps: how many steps to take.
        foreign_bytes: as ``count_foreign`` told before the job was made.
        optimizer_passed: whether torchmem is told of the optimizer.
        by_hand: what a step is, if not a training step; its end is then marked by hand.
    """
    true: list[_True] = []

    def note(*_: object) -> None:
        # torch calls an optimizer's own hooks before the global ones, so torchmem ends its step after this.
        CpuTruth.settle()
        true.append(_True(witness.peak() - foreign_bytes, witness.current() - foreign_bytes, sums_of_storages(job)))
        witness.reset_peak()

    CpuTruth().clean()
    with torchmem.install(job.model, job.optimizer if optimizer_passed else None, dir=directory) as monitor:
        witness.reset_peak()
        handle = job.optimizer.register_step_post_hook(note)
        for _ in range(num_steps):
            if by_hand:
                by_hand(job)
                note()
                monitor.step()
            else:
                job.step()
        handle.remove()
        record = monitor.snapshot()
    peaks, ends = books.step_peaks(record), books.step_ends(record)
    steps = [
        Step(then.peak, then.end, peaks[number], ends[number], then.storages)
        for number, then in zip(sorted(peaks), true, strict=True)
    ]
    disabled = [f"{labeler.name}: {labeler.reason}" for labeler in record.labelers if not labeler.up]
    return Watched(steps, record.counters, disabled)
