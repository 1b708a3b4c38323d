"""What the demo shows when the training is over: real lines of ``/metrics`` and a real answer of Prometheus."""

from __future__ import annotations

import time

from processes import DemoError, Supervisor
from servers import HOLDERS, Prometheus

NUM_HOLDERS = 5
ANSWER_SECONDS = 10.0
EXCERPT = {
    "torchmem_rank_up": 2,
    "torchmem_steps_total": 2,
    "torchmem_memory_peak_bytes": 2,
    "torchmem_memory_step_peak_bytes": 4,
    HOLDERS: 6,
}
"""Metric: how many of its samples to show, the largest first."""


def excerpt(metrics: str) -> str:
    """The lines of ``metrics`` that say most, as they are."""
    lines = metrics.splitlines()
    chosen: list[str] = []
    for name, count in EXCERPT.items():
        chosen += [line for line in lines if line.startswith((f"# HELP {name} ", f"# TYPE {name} "))]
        samples = [line for line in lines if line.startswith(name + "{")]
        chosen += sorted(samples, key=value_of, reverse=True)[:count]
    return "\n".join(chosen)


def value_of(sample: str) -> float:
    """The value at the end of a sample's line."""
    return float(sample.rpartition(" ")[2])


def rank_peak_bytes(metrics: str) -> float | None:
    """The most that rank 0 held, over its devices; None before its first record."""
    samples = [
        line for line in metrics.splitlines() if line.startswith("torchmem_memory_peak_bytes{") and 'rank="0"' in line
    ]
    return max(map(value_of, samples), default=None)


def holders(supervisor: Supervisor, prometheus: Prometheus) -> str:
    """Who held most of rank 0 at its peak, asked of Prometheus.

    Raises:
        DemoError: it has no answer.
    """
    # A finished rank's series end; the range still reaches the samples of its life.
    expression = f'topk({NUM_HOLDERS}, max_over_time({HOLDERS}{{rank="0"}}[10m]))'
    deadline = time.monotonic() + ANSWER_SECONDS
    while not (samples := prometheus.query(expression)):
        if time.monotonic() > deadline:
            raise DemoError(f"Prometheus has no answer to {expression}")
        supervisor.tick()
    rows = [f"{labels['module']:<28} {labels['reftype']:<20} {value:>14,.0f}" for labels, value in samples]
    return "\n".join([expression, *("  " + row for row in rows)])
