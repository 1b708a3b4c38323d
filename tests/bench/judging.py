"""What judging drift costs: ``python tests/bench/judging.py [--seconds 60] [--short] [--json]``.

64 ranks of one device and 300 modules, 10 steps a second each; every second each rank leaves a new record. What is
measured is the CPU time of one second's work on all of them: unpacking the new steps of the rings, judging them, and
finding the growers among 1,200 cells. Medians and maxima over seconds; while baselines are learned and afterwards.
Exits with 1 when the limit is exceeded.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import struct
import sys
import time
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rich.console import Console
from rich.table import Table

from records import cells, module_names, total
from torchmem.model import REFTYPE_LABELS, RefType
from torchmem.wire import record as wire
from torchmem_exporter.drift.composition import Growers, composition
from torchmem_exporter.drift.drift import Drift
from torchmem_exporter.drift.ring_steps import steps_after

NUM_RANKS, NUM_MODULES, STEPS_PER_SECOND, RING_STEPS = 64, 300, 10, 512
REFTYPES = tuple(RefType)[1:5]
LEARNING_SECONDS = 55
MAX_CPU_SECONDS = 0.050


class Rank:
    """One rank's records, and what is remembered of it."""

    def __init__(self, number):
        self.random = random.Random(number)
        self.cells = cells(REFTYPES, NUM_MODULES, 1024, number)[1:]
        self.level = total(self.cells)
        self.rows = []
        self.drift = Drift()
        self.drift.begin("attempt", "configuration")
        self.growers = None

    def run(self, second):
        """One second's steps, with noise; the record's ring and its book."""
        for step in range(second * STEPS_PER_SECOND, (second + 1) * STEPS_PER_SECOND):
            peak = round(self.level * self.random.gauss(1, 0.01))
            self.rows.append((step, 1.7e9 + step / STEPS_PER_SECOND, peak, peak // 2))
        del self.rows[:-RING_STEPS]
        others = bytes(8 * (len(REFTYPE_LABELS) - 2))
        halves = [(struct.pack("<qq", p - p // 3, p // 3), struct.pack("<qq", e, 0)) for _, _, p, e in self.rows]
        device = wire.RingDevice(
            name="cuda:0",
            step_peak=b"".join(peak + others for peak, _ in halves),
            step_end=b"".join(end + others for _, end in halves),
        )
        ring = wire.Ring(
            steps=struct.pack(f"<{len(self.rows)}q", *(row[0] for row in self.rows)),
            ended_at=struct.pack(f"<{len(self.rows)}d", *(row[1] for row in self.rows)),
            phases=bytes(8 * len(self.rows)),
            devices=[device],
        )
        grown = [cell._replace(num_bytes=cell.num_bytes + self.random.randrange(1 << 16)) for cell in self.cells]
        return ring, wire.pack_cells(grown)

    def judge(self, ring, book, modules):
        """What the sidecar does with a new record."""
        for steps in steps_after(ring, self.drift.last_step, len(REFTYPE_LABELS)).values():
            self.drift.feed(steps)
        if self.drift.wants_composition:
            self.drift.observe(composition(book, modules, REFTYPE_LABELS))
        elif self.growers is None and self.drift.usual is not None:
            self.growers = Growers(self.drift.usual)
        if self.growers is not None:
            self.growers.find(book, modules, REFTYPE_LABELS)
        return self.drift.judge(80 << 30)


def measure(num_seconds):
    """All figures, by name."""
    ranks = [Rank(number) for number in range(NUM_RANKS)]
    modules = module_names(NUM_MODULES)
    taken = []
    for second in range(num_seconds):
        left = [rank.run(second) for rank in ranks]
        began = time.process_time()
        judgements = [rank.judge(*one, modules) for rank, one in zip(ranks, left, strict=True)]
        taken.append(time.process_time() - began)
    learning, after = taken[:LEARNING_SECONDS], taken[LEARNING_SECONDS:]
    return {
        "num_ranks": NUM_RANKS,
        "num_modules": NUM_MODULES,
        "num_known": sum(judgement.baseline_bytes is not None for judgement in judgements),
        "learning_mean_seconds": statistics.fmean(learning),
        "learning_highest_seconds": max(learning),
        "mean_seconds": statistics.fmean(after),
        "median_seconds": statistics.median(after),
        "highest_seconds": max(after),
        "state_bytes": len(msgspec.msgpack.encode(ranks[0].drift)),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=int, default=60, help="seconds measured after learning (default: 60)")
    parser.add_argument("--short", action="store_true", help="fifteen seconds")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    flags = parser.parse_args()
    figures = measure(LEARNING_SECONDS + (15 if flags.short else flags.seconds))
    if flags.json:
        print(json.dumps(figures, indent=1))
    else:
        table = Table("CPU for a second of 64 ranks", "ms", title="Judging drift")
        for name, value in figures.items():
            if name.endswith("_seconds"):
                table.add_row(name.removesuffix("_seconds").replace("_", " "), f"{1e3 * value:.1f}")
        Console().print(table)
        print(f"limit {1e3 * MAX_CPU_SECONDS:.0f} ms; the state of a device takes {figures['state_bytes']:,} bytes")
    slow = max(figures["mean_seconds"], figures["learning_mean_seconds"]) > MAX_CPU_SECONDS
    return int(not flags.short and slow)


if __name__ == "__main__":
    raise SystemExit(main())
