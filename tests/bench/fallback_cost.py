"""What the fallback costs: ``python tests/bench/fallback_cost.py [--job fsdp2] [--rounds 40] [--short] [--json]``.

Where the native engine cannot be built, one step in so many is sampled by the dispatch engine. Blocks of steps are run
in turn within one process: bare; bare again, whose ratio is what the machine's noise makes of a true 1; with the
fallback between two samples; and with every second step sampled, which shows what a sample costs, its beginning and
end included: twice what those blocks are slower. That over the default number of steps, and the hooks that are there
between samples, timed alone, is the amortised cost. Ends with status 1 where that is not under 1%, by the clock or by
processor time; the short run is not judged. Known limit: a block should hold eight steps or more, half of them
sampled, so a machine on which a step takes longer than 0.15 s needs a smaller job.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

import torchmem
from benchmarks import arguments, report
from jobs.fsdp2 import Variant, fsdp2_job
from jobs.interleave import NUM_WARM_STEPS, Contestant, Interval, Times, mean_over_ranks, ratio, time_rounds
from jobs.model import Job, plain_job
from jobs.ranks import run_ranks
from torchmem.config import Config

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

DEPTH = 2
NEVER = 1 << 30
CLOCKS = ("wall", "processor")
OFTEN_NAME = "every second step"
OFTEN = 2
"""The most often that can be sampled."""
EVERY = next(field.default for field in dataclasses.fields(Config) if field.name == "sample_every")
MAX_SHARE = 0.01
NUM_HOOK_CALLS = 2000


class Kind(NamedTuple):
    """A job that can be measured."""

    num_ranks: int
    make: Callable[[], Job]


JOBS = {
    "fsdp2": Kind(2, fsdp2_job),
    "checkpointing": Kind(2, functools.partial(fsdp2_job, Variant("recompute", recompute=True))),
    "plain": Kind(1, plain_job),
}


class Plan(NamedTuple):
    """What each rank is to measure."""

    job: str
    num_rounds: int
    block_seconds: float
    directory: str


class Measured(NamedTuple):
    """What one rank brings home."""

    rounds: list[dict[str, Times]]
    between_seconds: float
    """Processor time of the hooks that are there between two samples, of one step."""


@contextlib.contextmanager
def unwatched(_job: Job) -> Iterator[Callable[[], None]]:
    """The bare job."""
    yield lambda: None


@contextlib.contextmanager
def sampled(job: Job, every: int, directory: str) -> Iterator[Callable[[], None]]:
    """With the fallback; the first sample is over with the steps that warm up."""
    with torchmem.install(
        job.model, job.optimizer, dir=directory, depth=DEPTH, engine="dispatch", sample_every=every
    ) as monitor:
        yield lambda: None
        faults = [one for one in monitor.snapshot().labelers if not one.up]
    if faults:
        raise RuntimeError(f"not all of it was on: {faults}")


def measure(_rank: int, _world_size: int, plan: Plan) -> Measured:
    """One rank's part."""
    job = JOBS[plan.job].make()
    contestants = [
        Contestant("bare", unwatched),
        Contestant("bare again", unwatched),
        Contestant("between samples", lambda job: sampled(job, NEVER, plan.directory)),
        Contestant(OFTEN_NAME, lambda job: sampled(job, OFTEN, plan.directory)),
    ]
    rounds = time_rounds(job, contestants, plan.num_rounds, plan.block_seconds)
    with torchmem.install(
        job.model, job.optimizer, dir=plan.directory, depth=DEPTH, engine="dispatch", sample_every=NEVER
    ):
        for _ in range(NUM_WARM_STEPS):  # the sample is over with them
            job.step()
        (before,), (after,) = (table.values() for table in (_global_optimizer_pre_hooks, _global_optimizer_post_hooks))
        began = time.thread_time()
        for _ in range(NUM_HOOK_CALLS):
            before(job.optimizer, (), {})
            after(job.optimizer, (), {})
        between = (time.thread_time() - began) / NUM_HOOK_CALLS
    return Measured(rounds, between)


def figures_of(by_rank: list[Measured]) -> dict[str, float]:
    """Everything that is printed: ratios and shares with the bounds of their 95% intervals."""
    step_seconds = statistics.median(times["bare"].wall for one in by_rank for times in one.rounds)
    between = max(one.between_seconds for one in by_rank) / step_seconds
    figures = {"bare step, ms": 1e3 * step_seconds, "between samples, share": between}
    for clock in CLOCKS:
        rounds = mean_over_ranks([one.rounds for one in by_rank], clock)
        for name in ("bare again", "between samples", OFTEN_NAME):
            figures |= _bounds(f"{clock}: {name}", ratio(rounds, name, "bare"))
        often = ratio(rounds, OFTEN_NAME, "bare")
        sample = [OFTEN * (value - 1) for value in often[:3]]
        figures |= _bounds(f"{clock}: steps a sample", Interval(*sample, often.num_pairs))
        share = [value / EVERY + between for value in sample]
        figures |= _bounds(f"{clock}: amortised share", Interval(*share, often.num_pairs))
    return figures | {"one step in": EVERY, "load average": os.getloadavg()[0]}


def _bounds(name: str, one: Interval) -> dict[str, float]:
    return {name: one.median, f"{name}, low": one.low, f"{name}, high": one.high}


def main() -> int:
    """Reads the command line, runs the job, prints."""
    parser = arguments(__doc__, "three short rounds: shows that it runs")
    parser.add_argument("--job", choices=JOBS, default="fsdp2", help="what is trained (default: fsdp2)")
    parser.add_argument("--rounds", type=int, default=40, help="rounds of four blocks (default: 40)")
    flags = parser.parse_args()
    num_rounds, block_seconds = (3, 0.2) if flags.short else (flags.rounds, 1.2)
    with tempfile.TemporaryDirectory() as directory:
        plan = Plan(flags.job, num_rounds, block_seconds, directory)
        by_rank = run_ranks(measure, JOBS[flags.job].num_ranks, plan, timeout=300 + num_rounds * 40)
    return report(figures_of(by_rank), flags, at_most={f"{clock}: amortised share": MAX_SHARE for clock in CLOCKS})


if __name__ == "__main__":
    sys.exit(main())
