"""Samples as text: Prometheus' format and OpenMetrics, whichever the scraper asks for.

The output is, byte for byte, what ``prometheus_client`` would write for the same families, which a test demands; it is
written here because that takes a tenth of the time and memory at tens of thousands of series. The choice of format and
the spelling of numbers are that library's own.

Invariant: no sample carries a timestamp.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, choose_encoder
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST
from prometheus_client.utils import floatToGoString

from torchmem_exporter.catalog import Kind, Metric, unit_word
from torchmem_exporter.samples import Family

NUM_LINES_PER_PIECE = 500


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


def render(families: Iterable[Family], *, is_openmetrics: bool) -> Iterator[bytes]:
    """The text of a scrape, piece by piece; families are drawn one at a time."""
    for family in families:
        metric = family.metric
        line = _line_writer(metric)
        yield _header(metric, is_openmetrics=is_openmetrics)
        for start in range(0, len(family.samples), NUM_LINES_PER_PIECE):
            samples = family.samples[start : start + NUM_LINES_PER_PIECE]
            yield "".join([line(labels, value) for labels, value in samples]).encode()
    if is_openmetrics:
        yield b"# EOF\n"


def _header(metric: Metric, *, is_openmetrics: bool) -> bytes:
    name = metric.prometheus_name
    if is_openmetrics and metric.kind is Kind.COUNTER:
        name = name.removesuffix("_total")
    kind = "counter" if metric.kind is Kind.COUNTER else "gauge"
    lines = [f"# HELP {name} {metric.help}\n", f"# TYPE {name} {kind}\n"]
    unit = unit_word(metric.unit, metric.kind)
    if is_openmetrics and unit:
        lines.append(f"# UNIT {name} {unit}\n")
    return "".join(lines).encode()


def _line_writer(metric: Metric) -> Callable[[tuple[str, ...], float], str]:
    """A function from label values and a value to a line, with labels in alphabetical order."""
    if not metric.labels:
        return lambda _labels, value: f"{metric.prometheus_name} {_number(value)}\n"
    pairs = sorted((name, position) for position, name in enumerate(metric.labels))
    braces = ",".join(f'{name}="{{{position}}}"' for name, position in pairs)
    template = f"{metric.prometheus_name}{{{{{braces}}}}} {{{len(pairs)}}}\n".format
    return lambda labels, value: template(*map(_escape, labels), _number(value))


def _number(value: float) -> str:
    return str(floatToGoString(value))  # type: ignore[no-untyped-call]  # the library types only part of itself


@lru_cache(maxsize=1 << 14)
def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
