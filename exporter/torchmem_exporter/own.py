"""What the sidecar says of its own parts, as series.

Invariants: every count is there from zero, so that the first failure shows as an increase; a part that does not run
has no series.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchmem_exporter import catalog
from torchmem_exporter.catalog import Metric
from torchmem_exporter.points import Series

if TYPE_CHECKING:
    from torchmem_exporter.otlp.push import Pusher
    from torchmem_exporter.serving.limits import ServerCounts
    from torchmem_exporter.serving.security import Guard


def of_server(counts: ServerCounts, guard: Guard) -> tuple[Series, ...]:
    """The HTTP server and who was let in."""
    refused = {
        "authentication": guard.counts.num_rejected,
        "busy": guard.counts.num_busy,
        "connections": counts.num_refused,
        "handshake": counts.num_handshakes_failed,
        "timeout": counts.num_timed_out,
    }
    answered = {200: 0, **counts.requests}
    return (
        series(catalog.REQUESTS, {(str(int(code)),): number for code, number in sorted(answered.items())}),
        series(catalog.REQUESTS_REFUSED, {(reason,): number for reason, number in refused.items()}),
        series(catalog.RELOAD_FAILURES, {(): guard.num_reload_failures}),
    )


def of_pusher(pusher: Pusher) -> tuple[Series, ...]:
    """The pushes by OTLP."""
    failed = pusher.num_failed_pushes
    return (
        series(catalog.PUSHES, {("success",): pusher.num_pushes - failed, ("failure",): failed}),
        series(catalog.DROPPED_POINTS, {(): pusher.num_dropped_points}),
        series(catalog.PUSH_TIME, {(): pusher.last_push_seconds}),
    )


def series(metric: Metric, points: dict[tuple[str, ...], float]) -> Series:
    """A series of points by their labels."""
    return Series(metric, tuple(points), tuple(points.values()))
