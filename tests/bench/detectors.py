"""What the drift detectors find, and what they make up.

    python tests/bench/detectors.py [--runs 200] [--short] [--json]

Simulated runs of each kind, 4,000 steps each (``simulated_runs``), on seeds that nothing was tuned on. For our two
detectors together and for simple rules beside them (``simple_rules``): the share of runs with an alarm before anything
drifted, the share of drifts found, and how long after their onset. Exits with 1 when a target is missed.
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rich.console import Console
from rich.table import Table

from benchmarks import arguments
from simple_rules import RULES, first_alarm
from simulated_runs import BENIGN, DRIFTING, simulate
from torchmem_exporter.drift.drift import Drift

OURS = "torchmem"
FIRST_SEED = 1_000_000
FED_STEPS = 8
"""Steps fed at once, so that the step of an alarm is known to that."""
MAX_FALSE = 0.01
MIN_FOUND = 0.99
MAX_STEP_DELAY = 300
MAX_GROWN = 0.05
STEP_TARGETS = ("step of 5%", "step of 6 to 30%")
LEAK_TARGETS = ("leak of 0.01% a step", "leak of 0.01% under varying lengths")


def our_alarm(run):
    """The step at which either of our detectors first alarms, or None."""
    drift = Drift()
    drift.begin("attempt", "configuration")
    for start in range(0, len(run.steps), FED_STEPS):
        drift.feed(run.steps[start : start + FED_STEPS])
        judgement = drift.judge()
        if judgement.is_level_drifting or judgement.is_floor_growing:
            return drift.last_step
    return None


def alarms(job):
    """By detector, the step of its first alarm in the run of a kind with a seed; and the run's onset and speed."""
    run = simulate(*job)
    found = {OURS: our_alarm(run)} | {rule: first_alarm(rule, run) for rule in RULES}
    return found, run.onset, run.speed


def summary(rows, detector):
    """A detector's figures over the runs of one kind."""
    onset = [(found[detector], onset, speed) for found, onset, speed in rows]
    false = [step for step, onset, _ in onset if step is not None and (onset is None or step <= onset)]
    delays = [(step - onset, speed) for step, onset, speed in onset if onset is not None and (step or -1) > onset]
    in_time = [delay * speed < MAX_GROWN if speed else delay <= MAX_STEP_DELAY for delay, speed in delays]
    return {
        "false": len(false) / len(rows),
        "found": len(delays) / len(rows),
        "in_time": sum(in_time) / len(rows),
        "median_delay_steps": statistics.median(delay for delay, _ in delays) if delays else None,
        "highest_delay_steps": max((delay for delay, _ in delays), default=None),
        "highest_grown": max((delay * speed for delay, speed in delays), default=None),
    }


def measure(num_runs):
    """By kind and detector, the figures."""
    jobs = [(kind, FIRST_SEED + seed) for kind in (*BENIGN, *DRIFTING) for seed in range(num_runs)]
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        rows = pool.map(alarms, jobs, chunksize=10)
    figures = {}
    for kind in (*BENIGN, *DRIFTING):
        of_kind = [row for job, row in zip(jobs, rows, strict=True) if job[0] == kind]
        figures[kind] = {detector: summary(of_kind, detector) for detector in (OURS, *RULES)}
    return figures


def missed(figures):
    """The targets that were missed, in words."""
    ours = {kind: figures[kind][OURS] for kind in figures}
    found = [f"{kind}: false alarms in {ours[kind]['false']:.1%}" for kind in BENIGN if ours[kind]["false"] > MAX_FALSE]
    late = [kind for kind in (*STEP_TARGETS, *LEAK_TARGETS) if ours[kind]["in_time"] < MIN_FOUND]
    return found + [f"{kind}: found in time in {ours[kind]['in_time']:.1%}" for kind in late]


def cell(kind, figures):
    """What a table says of a detector and a kind."""
    false = f"{figures['false']:.1%}"
    if kind in BENIGN:
        return false
    delay = figures["median_delay_steps"]
    when = "" if delay is None else f" after {delay:.0f}, in time {figures['in_time']:.1%}"
    return f"{figures['found']:.1%}{when}" + (f"; false {false}" if figures["false"] else "")


def show(console, figures, num_runs):
    """Prints the tables."""
    for title, kinds in (("False alarms, share of runs", BENIGN), ("Drifts found; median delay in steps", DRIFTING)):
        table = Table("kind", OURS, *RULES, title=f"{title}; {num_runs} runs a kind")
        for kind in kinds:
            table.add_row(kind, *(cell(kind, figures[kind][detector]) for detector in (OURS, *RULES)))
        console.print(table)
    console.print(
        f"In time: a step within {MAX_STEP_DELAY} steps, a leak before it has grown by {MAX_GROWN:.0%}."
        f" Targets: false alarms in at most {MAX_FALSE:.0%} of the runs of each benign kind; in time in at least"
        f" {MIN_FOUND:.0%} of: {'; '.join((*STEP_TARGETS, *LEAK_TARGETS))}."
    )
    for line in missed(figures):
        console.print(f"missed: {line}")


def main():
    parser = arguments(__doc__, short="ten runs of each kind: shows that it works")
    parser.add_argument("--runs", type=int, default=200, help="simulated runs of each kind (default: 200)")
    flags = parser.parse_args()
    num_runs = 10 if flags.short else flags.runs
    figures = measure(num_runs)
    if flags.json:
        print(json.dumps({"num_runs": num_runs, "kinds": figures, "missed": missed(figures)}, indent=1))
    else:
        show(Console(width=160), figures, num_runs)
    return int(not flags.short and bool(missed(figures)))


if __name__ == "__main__":
    raise SystemExit(main())
