"""What judging drift costs: ``python tests/bench/judging.py [--seconds 60] [--short] [--json]``.

64 ranks of one device and 300 modules, 10 steps a second each; every second each rank leaves a new record. What is
measured is the CPU time of one second's work on all of them, as the sidecar does it: unpacking the new steps of the
rings, judging them, and finding the growers among 1,200 cells. Medians and maxima over seconds; while baselines are
learned and afterwards. Exits with 1 when the limit is exceeded.
"""

from __future__ import annotations

import json
import random
import statistics
import struct
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rich.console import Console
from rich.table import Table

from benchmarks import arguments
from records import STARTED_AT, cells, make_device, make_record, module_names, total
from torchmem.model import REFTYPE_LABELS, RefType
from torchmem.wire import record as wire
from torchmem_exporter.drift.judge import SECTION, Judge
from torchmem_exporter.reading.lifecycle import State
from torchmem_exporter.reading.reader import Rank
from torchmem_exporter.reading.state import StateFile

NUM_RANKS, NUM_MODULES, STEPS_PER_SECOND, RING_STEPS = 64, 300, 10, 512
REFTYPES = tuple(RefType)[1:5]
LEARNING_SECONDS = 55
MAX_CPU_SECONDS = 0.050


MODULES = module_names(NUM_MODULES)


class Job:
    """One rank's job, and the records it leaves."""

    def __init__(self, number):
        self.number = number
        self.random = random.Random(number)
        self.cells = cells(REFTYPES, NUM_MODULES, 1024, number)[1:]
        self.level = total(self.cells)
        self.rows = []

    def run(self, second):
        """One second's steps, with noise; the rank as the reader finds it then."""
        for step in range(second * STEPS_PER_SECOND, (second + 1) * STEPS_PER_SECOND):
            peak = round(self.level * self.random.gauss(1, 0.01))
            self.rows.append((step, STARTED_AT + step / STEPS_PER_SECOND, peak, peak // 2))
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
        books = {"step_peak": wire.pack_cells(grown), "step_peak_bytes": total(grown)}
        devices = [make_device(self.number, 1, name="cuda:0", **books)]
        record = make_record(self.number, 1, modules=MODULES, devices=devices, ring=ring)
        return Rank(f"rank-{self.number}.record", record, State.RUNNING, has_memory=True)


def measure(num_seconds):
    """All figures, by name."""
    jobs = [Job(number) for number in range(NUM_RANKS)]
    taken = []
    with tempfile.TemporaryDirectory() as folder:
        state = StateFile(Path(folder) / "state")
        judge = Judge(state, clock=lambda: STARTED_AT)
        for second in range(num_seconds):
            ranks = [job.run(second) for job in jobs]
            began = time.process_time()
            verdicts = [judge.judge(rank)["cuda:0"] for rank in ranks]
            taken.append(time.process_time() - began)
        judge.save(is_due=True)
        state_bytes = len(state.section(SECTION))
    learning, after = taken[:LEARNING_SECONDS], taken[LEARNING_SECONDS:]
    return {
        "num_ranks": NUM_RANKS,
        "num_modules": NUM_MODULES,
        "num_known": sum(verdict.judgement.baseline_bytes is not None for verdict in verdicts),
        "learning_mean_seconds": statistics.fmean(learning),
        "learning_highest_seconds": max(learning),
        "mean_seconds": statistics.fmean(after),
        "median_seconds": statistics.median(after),
        "highest_seconds": max(after),
        "state_bytes": state_bytes // NUM_RANKS,
    }


def main():
    parser = arguments(__doc__, short="fifteen seconds")
    parser.add_argument("--seconds", type=int, default=60, help="seconds measured after learning (default: 60)")
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
