"""Nanoseconds per event of the native ledger: flat in the number of owners, with one thread and with four.

    python tests/bench/ledger_ns.py [--short] [--json]

Each figure is the median over interleaved rounds of a private ledger under its own lock; a round allocates and frees
blocks over all owners and reftypes, in stacks of 64 to 512 as a training step does. Four threads share the lock.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections import defaultdict

from torchmem.engine import native

OWNERS = (10, 100, 1_000, 5_000)
THREADS = (1, 4)


def measure(num_events: int, num_rounds: int) -> dict[tuple[int, int], float]:
    """Median nanoseconds per event by (owners, threads)."""
    engine = native.load()
    ledgers = {owners: engine.Ledger([0, 0, *[1] * (owners - 2)]) for owners in OWNERS}
    samples: dict[tuple[int, int], list[float]] = defaultdict(list)
    for _ in range(num_rounds):
        for owners, ledger in ledgers.items():
            for threads in THREADS:
                samples[owners, threads].append(ledger.time_events(threads, num_events // threads))
    return {key: statistics.median(values) for key, values in samples.items()}


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="a few seconds instead of half a minute")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    wanted = parser.parse_args()
    figures = measure(400_000 if wanted.short else 2_000_000, 5 if wanted.short else 15)
    if wanted.json:
        json.dump([{"owners": o, "threads": t, "ns_per_event": ns} for (o, t), ns in figures.items()], sys.stdout)
        return 0
    print(f"nanoseconds per event ({os.cpu_count()} cores)")
    print("owners    " + "".join(f"{threads} thread{'s' * (threads > 1)}".rjust(12) for threads in THREADS))
    for owners in OWNERS:
        print(f"{owners:<10}" + "".join(f"{figures[owners, threads]:12.1f}" for threads in THREADS))
    return 0


if __name__ == "__main__":
    sys.exit(main())
