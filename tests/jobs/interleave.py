"""Times one job under several watchers in turn, so that whatever else the machine does falls on all of them alike.

A round runs one block of steps under each contestant, in an order drawn anew each round and the same on every rank; a
ratio compares two blocks of one round, by the clock on the wall or by the processor time of the process, which what
other processes do disturbs less. Invariants: contestants are put on and taken off between blocks by all ranks
together; the first steps of a block, and putting the watcher on and taking it off, are not timed.
Known limits: a watcher's work that is done once in a while shows only if a block is long enough to meet it.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from jobs.model import Job

NUM_WARM_STEPS = 2


class Contestant(NamedTuple):
    """A way of watching a job."""

    name: str
    watch: Callable[[Job], AbstractContextManager[Callable[[], None]]]
    """Enters the watcher; gives what to call before each step."""
    every: int = 1
    """Takes part in one round of so many."""


class Times(NamedTuple):
    """How long a step took, in seconds."""

    wall: float
    processor: float
    """Of all threads of the process, those of the communication library among them."""


class Interval(NamedTuple):
    """A median and the bounds of its 95% confidence interval."""

    median: float
    low: float
    high: float
    num_pairs: int


def time_rounds(
    job: Job, contestants: Sequence[Contestant], num_rounds: int, block_seconds: float
) -> list[dict[str, Times]]:
    """Times per step of each contestant in each round, on this rank."""
    for _ in range(3):
        job.step()
    gc.collect()
    gc.freeze()  # a collection then costs what the steps left, not what torch's import left
    num_steps = _num_steps(job, block_seconds)
    return [
        {contestant.name: _time_block(job, contestant, num_steps) for contestant in _order(contestants, number)}
        for number in range(num_rounds)
    ]


def ratio(rounds: Sequence[dict[str, float]], name: str, baseline: str) -> Interval:
    """Median over rounds of ``name``'s time over ``baseline``'s, with a bootstrap interval."""
    ratios = [times[name] / times[baseline] for times in rounds if name in times]
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(4000))
    return Interval(statistics.median(ratios), medians[100], medians[-101], len(ratios))


def mean_over_ranks(by_rank: Sequence[Sequence[dict[str, Times]]], clock: str) -> list[dict[str, float]]:
    """Joins what each rank timed: ranks of one step wait for each other, so their mean is the step.

    Args:
        by_rank: each rank's rounds.
        clock: a field of ``Times``.
    """
    return [
        {name: statistics.fmean(getattr(times[name], clock) for times in same_round) for name in same_round[0]}
        for same_round in zip(*by_rank, strict=True)
    ]


def _order(contestants: Sequence[Contestant], number: int) -> list[Contestant]:
    present = [contestant for contestant in contestants if number % contestant.every == 0]
    random.Random(number).shuffle(present)
    return present


def _num_steps(job: Job, block_seconds: float) -> int:
    """How many steps fill a block: the same number on every rank."""
    start = time.perf_counter()
    for _ in range(5):
        job.step()
    wanted = torch.tensor([max(1, round(block_seconds * 5 / (time.perf_counter() - start)))])
    dist.broadcast(wanted, src=0)
    return int(wanted.item())


def _time_block(job: Job, contestant: Contestant, num_steps: int) -> Times:
    gc.collect()
    with contestant.watch(job) as before_step:
        for _ in range(NUM_WARM_STEPS):
            before_step()
            job.step()
        dist.barrier()
        start, processor_start = time.perf_counter(), time.process_time()
        for _ in range(num_steps):
            before_step()
            job.step()
        wall, processor = time.perf_counter() - start, time.process_time() - processor_start
        return Times(wall / num_steps, processor / num_steps)
