"""What the demo shows when the training is over: real lines of ``/metrics`` and a real answer of Prometheus."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from processes import DemoError
from servers import HOLDERS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from processes import Supervisor
    from servers import Prometheus

NUM_HOLDERS = 5
ANSWER_SECONDS = 10.0
EXCERPT = {
    "torchmem_rank_up": 1,
    "torchmem_steps_total": 1,
    "torchmem_memory_peak_bytes": 1,
    "torchmem_memory_step_peak_bytes": 4,
    HOLDERS: 6,
}
"""Metric: how many samples of rank 0 to show, the largest first."""

# Layers are alike, so they are added up; a finished rank's series end, so the range reaches back to its life.
QUERY = (
    f'topk({NUM_HOLDERS}, sum by (part, reftype) (label_replace(max_over_time({HOLDERS}{{rank="0"}}[10m]), '
    '"part", "$2", "module", "(layers[.][0-9]+[.])?(.*)")))'
)


def samples(metrics: str, name: str) -> Iterator[tuple[str, float]]:
    """Rank 0's samples of one metric: the line and its value."""
    for line in metrics.splitlines():
        if line.startswith(name + "{") and 'rank="0"' in line:
            yield line, float(line.rpartition(" ")[2])


def excerpt(metrics: str) -> str:
    """The lines of ``metrics`` that say most, as they are."""
    lines = metrics.splitlines()
    chosen: list[str] = []
    for name, count in EXCERPT.items():
        chosen += [line for line in lines if line.startswith((f"# HELP {name} ", f"# TYPE {name} "))]
        largest = sorted(samples(metrics, name), key=lambda sample: sample[1], reverse=True)[:count]
        chosen += [line for line, _ in largest]
    return "\n".join(chosen)


def has_memory(metrics: str) -> bool:
    """Whether rank 0 has published its books."""
    return any(samples(metrics, HOLDERS))


def is_up(metrics: str) -> bool:
    """Whether rank 0 runs."""
    return any(value == 1 for _, value in samples(metrics, "torchmem_rank_up"))


def rank_peak_bytes(metrics: str) -> float | None:
    """The most that rank 0 held, over its devices; None where it has published nothing."""
    return max((value for _, value in samples(metrics, "torchmem_memory_peak_bytes")), default=None)


def holders(supervisor: Supervisor, prometheus: Prometheus) -> str:
    """Who held most of rank 0 at its peak, asked of Prometheus.

    Raises:
        DemoError: it has no answer.
    """
    deadline = time.monotonic() + ANSWER_SECONDS
    while not (answer := prometheus.query(QUERY)):
        if time.monotonic() > deadline:
            raise DemoError(f"Prometheus has no answer to {QUERY}")
        supervisor.tick()
    rows = [f"  {labels['part']:<28} {labels['reftype']:<20} {value:>14,.0f}" for labels, value in answer]
    return "\n".join([QUERY, *rows])
