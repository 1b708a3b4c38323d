"""The composition of one step's peak by reftype, by torchmem and by torch's FSDPMemTracker, on the same jobs.

Everything runs in one process that believes the other ranks exist: there a job allocates the same bytes in the same
order in every run, so that two watchers can be compared byte for byte though each watches a run of its own.
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, NamedTuple, cast

from jobs import books
from jobs.fsdp2 import Variant, fsdp2_job, variants
from jobs.model import Job, Size
from jobs.torch_tracker import TOTAL, peak_of, step_peak
from jobs.watched import Step, watch
from torchmem.validation import witness

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.fsdp import FSDPModule

    from jobs.model import Transformer

_SMALL = Size(num_layers=3, batch=1, seq=8)
SIZES: dict[str, Size] = {
    "backward": Size(num_layers=3),
    "optimizer": _SMALL,
    "forward": Size(num_layers=3, scratch_bytes=1 << 24),
    "evaluation": _SMALL,
    "unshard": _SMALL,
}
"""By where a step's peak tends to lie."""
NUM_STEPS = 3


def _unshard_first_block(job: Job) -> None:
    cast("FSDPModule", cast("Transformer", job.model).layers[0]).unshard(async_op=True)


BY_HAND: dict[str, Callable[[Job], None]] = {"evaluation": Job.evaluate, "unshard": _unshard_first_block}
"""Cases that take one step, which is not a training step."""


class Case(NamedTuple):
    """One job to compare."""

    variant: Variant
    size: str


class Compared(NamedTuple):
    """One job's steady step, seen twice."""

    ours: Step
    torch_total: int
    """The most torch's tracker saw, in bytes; 0 where it cannot track the job."""
    torch: books.Composition
    torch_error: str
    """Why torch's tracker cannot."""


def cases(world_size: int) -> list[Case]:
    """Every variant in training, in both sizes; two of them also where other things peak."""
    trained = [Case(variant, size) for variant in variants(world_size) for size in ("backward", "optimizer")]
    others = [variant for variant in variants(world_size) if variant.name in ("reshard", "mixed")]
    return trained + [Case(variant, size) for variant in others for size in ("forward", *BY_HAND)]


def compare(_rank: int, world_size: int, directory: str) -> dict[tuple[str, str], Compared]:
    """All cases for this many ranks, by (variant, size).

    torch's tracker comes last: it keeps what it tracked alive, which would show in the other counts.
    """
    witness.install()
    ours = {case: _ours(case, directory) for case in cases(world_size)}
    return {(case.variant.name, case.size): Compared(step, *_theirs(case)) for case, step in ours.items()}


def _ours(case: Case, directory: str) -> Step:
    gc.collect()
    foreign_bytes = witness.current()
    by_hand = BY_HAND.get(case.size)
    return watch(
        fsdp2_job(case.variant, SIZES[case.size]),
        directory=directory,
        num_steps=1 if by_hand else NUM_STEPS,
        foreign_bytes=foreign_bytes,
        optimizer_passed=case.variant.optimizer_passed,
        by_hand=by_hand,
    ).steps[-1]


def _theirs(case: Case) -> tuple[int, books.Composition, str]:
    job = fsdp2_job(case.variant, SIZES[case.size])
    by_hand = BY_HAND.get(case.size)
    try:
        if by_hand:
            peak = peak_of(job, by_hand)
        else:
            for _ in range(NUM_STEPS - 1):
                job.step()
            peak = step_peak(job, optimizer_passed=case.variant.optimizer_passed)
    except AssertionError as refusal:
        return 0, {}, str(refusal)
    return peak[TOTAL], books.from_display_names(peak), ""
