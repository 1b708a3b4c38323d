"""The page of all metrics, ``docs/metrics.md``, from the sidecar's catalog.

Invariants: every metric of the catalog is on it once; pure.
"""

from __future__ import annotations

from collections.abc import Iterable

from torchmem_exporter import catalog
from torchmem_exporter.catalog import Kind, Metric

METRICS = "metrics.md"

_HEAD = """\
# Metrics

All that the sidecar exposes, generated from its catalog; `make generate` writes this page. In Prometheus and over OTLP
a series has the same name and the same labels: the dotted name is the instrument's, and Prometheus derives the other
from it. Bytes of a rank that is gone are told no more; its counters and its state stay for a quarter of an hour.

`train_job` is the name of the training job, `rank` its number in it, `device` `cpu` or `cuda:N`, `module` the
module that holds the bytes, `reftype` what they are for. How many modules are told apart is `--level`'s: `core` none,
`standard` the largest, `full` all.
"""
_KINDS = {Kind.COUNTER: "counter", Kind.GAUGE: "gauge", Kind.UPDOWN: "gauge, may be summed"}
_SECTIONS = (
    ("By module", ("torchmem.module.",)),
    ("By device", ("torchmem.memory.", "torchmem.device.")),
    ("The allocator", ("torchmem.allocator.",)),
    ("Checkpoints", ("torchmem.checkpoint.",)),
    ("The sidecar itself", ("torchmem.exporter.", "torchmem.snapshot.errors", "torchmem.scrape.", "torchmem.build.")),
)
_REST = "Steps, ranks and what watches them"


def page() -> str:
    """The whole page, Markdown."""
    left = list(catalog.METRICS)
    parts = []
    for title, prefixes in _SECTIONS:
        found = [metric for metric in left if metric.otel_name.startswith(prefixes)]
        left = [metric for metric in left if metric not in found]
        parts.append(_section(title, found))
    parts.insert(-1, _section(_REST, left))
    return "\n".join((_HEAD, *parts))


def _section(title: str, metrics: Iterable[Metric]) -> str:
    rows = [
        f"| `{one.prometheus_name}` | {_KINDS[one.kind]} | {_labels(one)} | {one.help} | `{one.otel_name}` |"
        for one in metrics
    ]
    head = ("| metric | kind | labels | meaning | instrument |", "| --- | --- | --- | --- | --- |")
    return "\n".join((f"## {title}", "", *head, *rows, ""))


def _labels(metric: Metric) -> str:
    return ", ".join(f"`{label}`" for label in metric.labels) or "none"
