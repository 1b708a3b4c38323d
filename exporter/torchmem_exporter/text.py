"""Points as text: Prometheus' format and OpenMetrics, whichever the scraper asks for.

A line is a constant but for its value, so each series of each block is kept as one template that a scrape fills; what a
block that has not changed gave is used again as it is. Read back, the output says what ``prometheus_client`` would have
written for the same points, which a test demands; at tens of thousands of series that library takes a second.

Invariants: no point carries a timestamp; the lines of a metric follow each other, whatever blocks they come from; what
is remembered of a block is forgotten with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, choose_encoder
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST

from torchmem_exporter.catalog import METRICS, Kind, Metric, unit_word
from torchmem_exporter.points import Block, Series


class Format(NamedTuple):
    """What a scraper understands."""

    content_type: str
    is_openmetrics: bool


def negotiate(accept: str) -> Format:
    """The format for an ``Accept`` header; Prometheus' own where it asks for nothing we know, or makes no sense.

    Newer versions and escapings of a format may be asked for: the names here are plain, so the first version says all.
    """
    try:
        _, content_type = choose_encoder(accept)
    except (TypeError, ValueError):
        content_type = CONTENT_TYPE_PLAIN_0_0_4
    is_openmetrics = content_type.startswith("application/openmetrics-text")
    return Format(CONTENT_TYPE_LATEST if is_openmetrics else CONTENT_TYPE_PLAIN_0_0_4, is_openmetrics)


class _Template(NamedTuple):
    labels: tuple[tuple[str, ...], ...]
    lines: bytes


class _Lines(NamedTuple):
    """What a block gave."""

    block: Block
    of_metric: dict[Metric, bytes]


class TextRenderer:
    """Renders blocks; for use from one thread at a time."""

    def __init__(self) -> None:
        self._templates: dict[tuple[str, ...], dict[Metric, _Template]] = {}
        self._lines: dict[tuple[str, ...], _Lines] = {}

    def render(self, blocks: Iterable[Block], *, is_openmetrics: bool) -> Iterator[bytes]:
        """The text in pieces, without the line that ends OpenMetrics."""
        self._lines = {block.key: self._lines_of(block) for block in blocks}
        self._templates = {key: self._templates[key] for key in self._lines}
        for metric in METRICS:
            pieces = [lines.of_metric[metric] for lines in self._lines.values() if metric in lines.of_metric]
            if pieces:
                yield header(metric, is_openmetrics=is_openmetrics)
                yield from pieces

    def _lines_of(self, block: Block) -> _Lines:
        known = self._lines.get(block.key)
        if known is not None and known.block is block:
            return known
        templates = self._templates.setdefault(block.key, {})
        return _Lines(block, {series.metric: _filled(series, templates) for series in block.series})


def _filled(series: Series, templates: dict[Metric, _Template]) -> bytes:
    template = templates.get(series.metric)
    if template is None or template.labels is not series.labels:
        template = templates[series.metric] = _Template(series.labels, _lines(series.metric, series.labels))
    return template.lines % tuple(series.values)


def _lines(metric: Metric, labels: Iterable[tuple[str, ...]]) -> bytes:
    """Lines with a place for each value, labels in alphabetical order."""
    pairs = sorted((name, position) for position, name in enumerate(metric.labels))
    braces = ",".join(f'{name}="{{{position}}}"' for name, position in pairs)
    # Bytes are whole; %a is what a float, or any other number, prints as.
    value = "%d" if metric.unit == "By" else "%a"
    start = f"{metric.prometheus_name}{{{{{braces}}}}} " if pairs else f"{metric.prometheus_name} "
    return "".join([f"{start.format(*map(_escaped, values))}{value}\n" for values in labels]).encode()


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"").replace("%", "%%")


def header(metric: Metric, *, is_openmetrics: bool) -> bytes:
    """The lines that describe a metric."""
    name = metric.prometheus_name
    if is_openmetrics and metric.kind is Kind.COUNTER:
        name = name.removesuffix("_total")
    kind = "counter" if metric.kind is Kind.COUNTER else "gauge"
    lines = [f"# HELP {name} {metric.help}\n", f"# TYPE {name} {kind}\n"]
    unit = unit_word(metric.unit, metric.kind)
    if is_openmetrics and unit:
        lines.append(f"# UNIT {name} {unit}\n")
    return "".join(lines).encode()
