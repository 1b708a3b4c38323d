"""What the dispatch engine costs a job with real tensors, beside torch's FSDPMemTracker.

The fallback where no native engine can be built, so its price decides how often it may sample: the job of
``overhead.py`` (a transformer of width 128, 12 layers, 2 ranks, FSDP2) in blocks of steps run in turn within one
process. Ends with status 1 where the engine's slowdown is more than half of FSDPMemTracker's (ratio less 1); the short
run is not judged.

    python tests/bench/dispatch_overhead.py [--rounds 30] [--short] [--json]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from jobs.fsdp2 import fsdp2_job
from jobs.interleave import Contestant, Times, mean_over_ranks, ratio, time_rounds
from jobs.ranks import run_ranks
from jobs.torch_tracker import tracked
from torchmem.counting import Counting
from torchmem.engine.dispatch import DispatchEngine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from jobs.model import Job

NUM_RANKS = 2
DEPTH = 2
MAX_SHARE = 0.5


class Plan(NamedTuple):
    """What each rank is to measure."""

    num_rounds: int
    block_seconds: float


@contextlib.contextmanager
def unwatched(_job: Job) -> Iterator[Callable[[], None]]:
    """The bare job."""
    yield lambda: None


@contextlib.contextmanager
def by_engine(job: Job) -> Iterator[Callable[[], None]]:
    """The dispatch engine with every labeler; a step is closed before the next."""
    engine = DispatchEngine()
    counting = Counting(job.model, job.optimizer, depth=DEPTH, engine=engine)
    counting.attach()
    engine.start()
    try:
        yield engine.end_step
    finally:
        engine.stop()
        counting.detach()
    failed = [one.hooks.failure for one in counting.labelers if one.hooks.failure]
    if failed:
        raise RuntimeError(f"labelers are off: {failed}")


@contextlib.contextmanager
def by_tracker(job: Job) -> Iterator[Callable[[], None]]:
    """torch's tracker, its module statistics cleared before each step, as it asks."""
    with tracked(job) as tracker:
        yield tracker.reset_mod_stats


CONTESTANTS = [
    Contestant("bare", unwatched),
    Contestant("bare again", unwatched),
    Contestant("dispatch engine", by_engine),
    Contestant("FSDPMemTracker", by_tracker),
]


def measure(_rank: int, _world_size: int, plan: Plan) -> list[dict[str, Times]]:
    """One rank's part."""
    return time_rounds(fsdp2_job(), CONTESTANTS, plan.num_rounds, plan.block_seconds)


def main() -> int:
    """Reads the command line, runs the job, prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30, help="rounds of four blocks (default: 30)")
    parser.add_argument("--short", action="store_true", help="three short rounds: shows that it runs")
    parser.add_argument("--json", action="store_true", help="print JSON instead")
    options = parser.parse_args()
    plan = Plan(3, 0.2) if options.short else Plan(options.rounds, 0.5)
    by_rank = run_ranks(measure, NUM_RANKS, plan, timeout=120 + plan.num_rounds * 30)
    result = {}
    for clock in ("wall", "processor"):
        rounds = mean_over_ranks(by_rank, clock)
        result[clock] = {one.name: ratio(rounds, one.name, "bare")._asdict() for one in CONTESTANTS[1:]}
    if options.json:
        print(json.dumps(result, indent=1))
    else:
        for clock, ratios in result.items():
            for name, one in ratios.items():
                print(
                    f"{clock:>10} {name:<16} {one['median']:.3f}"
                    f" ({one['low']:.3f} to {one['high']:.3f}, {one['num_pairs']} pairs)"
                )
    wall = result["wall"]
    share = (wall["dispatch engine"]["median"] - 1) / max(1e-9, wall["FSDPMemTracker"]["median"] - 1)
    print(f"the engine's slowdown is {share:.0%} of FSDPMemTracker's", file=sys.stderr)
    return 0 if options.short or share <= MAX_SHARE else 1


if __name__ == "__main__":
    sys.exit(main())
