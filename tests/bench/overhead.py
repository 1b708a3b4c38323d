"""What watching costs, two ways: ``python tests/bench/overhead.py [--job fsdp2] [--pairs 100] [--alone] [--short]``.

By the clock: how much longer a step takes with torchmem than without, on a launch-bound job (a transformer of width
128, 12 layers, 2 ranks) under FSDP2, DDP, FSDP1, FSDP2 with activation checkpointing, or FSDP2 with compiled blocks,
from blocks of steps run in turn within one process; beside it torch's FSDPMemTracker where it can, and the ratio of the
bare job to itself, which is what the machine's noise makes of a true 1. By processor time: the same blocks, by what the
process used of the processors, its publisher's thread and the communication's included, but not its waits for the
other ranks, which are most of the noise. With ``--alone`` one process believes that the other rank exists: collectives
allocate and are labelled as ever but move nothing, so nobody waits, and the step is shorter for the same work of
torchmem's.
By account: what a step asks of torchmem (allocator events, hook calls, labels) times what each costs alone, as a share
of the step. The clock shows what nobody thought to count, the account what is too small for the clock.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from rich.console import Console
from rich.table import Table

import torchmem
from jobs.account import Account, account
from jobs.fsdp2 import Variant, fsdp2_job
from jobs.interleave import Contestant, Times, mean_over_ranks, ratio, time_rounds
from jobs.model import Job, Size
from jobs.parallel import Ddp, Fsdp1, ddp_job, fsdp1_job
from jobs.ranks import run_alone, run_ranks
from jobs.torch_tracker import tracked

if TYPE_CHECKING:
    from collections.abc import Iterator

NUM_RANKS = 2
DEPTH = 2
COMPARED = ("bare again", "torchmem", "FSDPMemTracker")
JOBS: dict[str, Callable[[], Job]] = {
    "fsdp2": fsdp2_job,
    "ddp": lambda: ddp_job(Ddp("views", bucket_view=True, bucket_cap_mb=25), Size()),
    "fsdp1": lambda: fsdp1_job(Fsdp1("full", use_orig_params=True), Size()),
    "checkpointing": lambda: fsdp2_job(Variant("recompute", recompute=True)),
    "compiled": lambda: fsdp2_job(Variant("compiled", compiled=True)),
}
TRACKED = ("fsdp2", "checkpointing")
"""Jobs that FSDPMemTracker can watch: it knows FSDP2 only, and runs compiled blocks uncompiled ever after."""
NOT_ALONE = ("ddp",)
"""DDP's reducer asserts on collectives that move nothing."""
TRACKER_EVERY = 4
"""FSDPMemTracker's ratio is far from 1, so a quarter of the pairs show it well enough."""
NUM_ACCOUNT_STEPS = 30
REFERENCE_STEP_SECONDS = 0.150


class Plan(NamedTuple):
    """What each rank is to measure."""

    job: str
    num_pairs: int
    block_seconds: float
    directory: str


class Measured(NamedTuple):
    """What one rank brings home."""

    rounds: list[dict[str, Times]]
    bill: Account


def nothing() -> None:
    """What is done before a step when nobody watches."""


@contextlib.contextmanager
def unwatched(_job: Job) -> Iterator[Callable[[], None]]:
    """The bare job."""
    yield nothing


@contextlib.contextmanager
def by_tracker(job: Job) -> Iterator[Callable[[], None]]:
    """torch's tracker, its module statistics cleared before each step, as it asks."""
    with tracked(job) as tracker:
        yield tracker.reset_mod_stats


def measure(_rank: int, _world_size: int, plan: Plan) -> Measured:
    """One rank's part; all ranks watch and unwatch in the same steps."""

    @contextlib.contextmanager
    def by_torchmem(job: Job) -> Iterator[Callable[[], None]]:
        with torchmem.install(job.model, job.optimizer, dir=plan.directory, depth=DEPTH):
            yield nothing

    contestants = [
        Contestant("bare", unwatched),
        Contestant("bare again", unwatched),
        Contestant("torchmem", by_torchmem),
    ]
    if plan.job in TRACKED:
        contestants.append(Contestant("FSDPMemTracker", by_tracker, every=TRACKER_EVERY))
    warnings.simplefilter("ignore")  # torch deprecates FSDP1
    job = JOBS[plan.job]()
    bill = account(job, NUM_ACCOUNT_STEPS, plan.directory, DEPTH)
    return Measured(time_rounds(job, contestants, plan.num_pairs, plan.block_seconds), bill)


def report(by_rank: list[Measured]) -> dict[str, Any]:
    """Everything that is printed, ready for JSON."""
    all_rounds = [measured.rounds for measured in by_rank]
    rounds = mean_over_ranks(all_rounds, "wall")
    processor = mean_over_ranks(all_rounds, "processor")
    bill = by_rank[0].bill
    return {
        "by_clock": {name: ratio(rounds, name, "bare")._asdict() for name in COMPARED if name in rounds[0]},
        "by_processor": {name: ratio(processor, name, "bare")._asdict() for name in COMPARED if name in rounds[0]},
        "bare_step_seconds": statistics.median(times["bare"] for times in rounds),
        "by_account": {
            "items": [item._asdict() for item in bill.items],
            "total_seconds": bill.total_seconds,
            "step_seconds": bill.step_seconds,
            "share": bill.total_seconds / bill.step_seconds,
            "share_of_150_ms_step": bill.total_seconds / REFERENCE_STEP_SECONDS,
            "record_seconds": bill.record_seconds,
        },
        "environment": {
            "cores": len(os.sched_getaffinity(0)),
            "load_average": os.getloadavg()[0],
            "python": platform.python_version(),
            "torch": torch.__version__,
        },
    }


def show(result: dict[str, Any]) -> None:
    """Prints the two tables."""
    console = Console()
    console.print(", ".join(f"{name} {value}" for name, value in result["environment"].items()))
    ratios = Table("", "by the clock", "95% interval", "by processor time", "95% interval", "pairs")
    ratios.title = "step with / step without"
    for name, by_clock in result["by_clock"].items():
        ratios.add_row(name, *_cells(by_clock), *_cells(result["by_processor"][name]), str(by_clock["num_pairs"]))
    console.print(ratios, f"bare step: {1e3 * result['bare_step_seconds']:.1f} ms")
    bill = result["by_account"]
    table = Table("by account", title="what a step asks of torchmem")
    for column in ("calls a step", "us each", "ms a step"):
        table.add_column(column, justify="right")
    for item in bill["items"]:
        total = 1e3 * item["num_calls"] * item["seconds"]
        table.add_row(item["name"], f"{item['num_calls']:.0f}", f"{1e6 * item['seconds']:.3f}", f"{total:.3f}")
    table.add_row("total", "", "", f"{1e3 * bill['total_seconds']:.3f}")
    console.print(table)
    console.print(
        f"{100 * bill['share']:.2f}% of this {1e3 * bill['step_seconds']:.1f} ms step,"
        f" {100 * bill['share_of_150_ms_step']:.2f}% of a 150 ms step;"
        f" beside it, on the publisher's thread, {1e3 * bill['record_seconds']:.2f} ms to make a record"
    )


def _cells(interval: dict[str, float]) -> tuple[str, str]:
    return f"{interval['median']:.4f}", f"{interval['low']:.4f} to {interval['high']:.4f}"


def main() -> None:
    """Reads the command line, runs the job, prints."""
    parser = argparse.ArgumentParser(description="what watching costs, by the clock and by account")
    parser.add_argument("--job", choices=JOBS, default="fsdp2", help="how the transformer is trained (default: fsdp2)")
    parser.add_argument("--pairs", type=int, default=100, help="pairs of blocks, with and without (default: 100)")
    parser.add_argument("--block-seconds", type=float, default=1.2, help="length of a block (default: 1.2)")
    parser.add_argument("--alone", action="store_true", help="one rank, whose collectives move nothing: less noise")
    parser.add_argument("--short", action="store_true", help="ten short pairs: shows that it runs, measures little")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    options = parser.parse_args()
    if options.alone and options.job in NOT_ALONE:
        parser.error(f"--alone: torch cannot run {options.job} on collectives that move nothing")
    num_pairs, block_seconds = (10, 0.2) if options.short else (options.pairs, options.block_seconds)
    # Four blocks a round at most, one of them by a tracker that is several times slower, and time to start.
    timeout = 240 + num_pairs * (block_seconds + 1) * 8
    with tempfile.TemporaryDirectory() as directory:
        plan = Plan(options.job, num_pairs, block_seconds, directory)
        if options.alone:
            by_rank = [run_alone(measure, NUM_RANKS, plan, timeout=timeout)]
        else:
            by_rank = run_ranks(measure, NUM_RANKS, plan, timeout=timeout)
        result = report(by_rank)
    job = f"{options.job}, alone" if options.alone else options.job
    result["environment"] = {"job": job, **result["environment"]}
    if options.json:
        print(json.dumps(result, indent=1))
    else:
        show(result)


if __name__ == "__main__":
    main()
