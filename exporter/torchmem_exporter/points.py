"""The frozen model between reading and rendering: points, grouped by what they are of and by metric.

Invariants: a block has at most one series a metric, and a series no two points with the same labels; what has not
changed is the same object from one exposition to the next, so that a renderer may keep what it made of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torchmem.wire.record import Identity
from torchmem_exporter.catalog import METRICS, Metric


@dataclass(frozen=True, eq=False)
class Series:
    """All points of one metric in one block.

    Attributes:
        labels: for each point the values of the metric's labels, in their order, cleaned; the same object as long as
            the points are the same.
        values: for each point its value; bytes and counts are ints.
    """

    metric: Metric
    labels: tuple[tuple[str, ...], ...]
    values: Sequence[float]


@dataclass(frozen=True, eq=False)
class Block:
    """All that is exposed of one rank, of a job as a whole, or of the sidecar itself.

    Attributes:
        key: (train_job, rank), (train_job,), or () for the sidecar; unique in one exposition.
        identity: of a rank's block, else None.
        series: in the catalog's order.
    """

    key: tuple[str, ...]
    identity: Identity | None
    series: tuple[Series, ...]


_POSITIONS = {metric: position for position, metric in enumerate(METRICS)}


def in_order(series: Iterable[Series]) -> tuple[Series, ...]:
    """The series in the catalog's order."""
    return tuple(sorted(series, key=lambda one: _POSITIONS[one.metric]))
