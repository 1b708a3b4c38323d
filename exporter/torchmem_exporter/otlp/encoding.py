"""Blocks as OTLP metrics: ``ExportMetricsServiceRequest`` messages, from cached templates.

In a protobuf message of a data point, the start, the time and the value take a fixed number of bytes, so a point is
the same bytes from push to push but for two slots that stand side by side. They are made once, when a series gains or
loses a point, and filled in place. What can differ in length is encoded by the messages of opentelemetry-proto.

Invariants: every point of the blocks is in exactly one request; no request exceeds ``MAX_REQUEST_BYTES`` (a single
point with its resource is far below) or ``MAX_REQUEST_POINTS``; a point that the receiver has and that is no longer
there is sent as no-recorded-value until a request with it is accepted, and not again; all points have the time of the
push, those without a value a moment before it.

Known limit: at most ``MAX_DUE_POINTS`` of the vanished points are remembered while no request is accepted.
"""

from __future__ import annotations

import struct
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain, groupby, repeat
from operator import itemgetter
from typing import NamedTuple

import opentelemetry.proto.metrics.v1.metrics_pb2 as pb
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, InstrumentationScope, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource

from torchmem_exporter import __version__
from torchmem_exporter.catalog import Kind, Metric
from torchmem_exporter.otlp.resource import Attributes
from torchmem_exporter.points import Block, Series

MAX_REQUEST_BYTES = 3 << 20
"""Below the 4 MiB that a gRPC server takes by default."""

MAX_REQUEST_POINTS = 8192
"""What agents take as one batch by default: of a larger request some of them split off a part, others drop all."""

MAX_PIECE_POINTS = 512
"""So that pieces stay far below the limits of a request: the longest labels make a point of some 2 KiB."""

MAX_DUE_POINTS = 100_000
SCOPE = "torchmem"

_NANO = 10**9
_MAX_INT = 2**63 - 1
_MARKER_LEAD_NS = 1_000_000
_FIXED64, _DELIMITED = 1, 2
_PREFIX_BYTES = 6
"""At most, of a tag and a length below 2^31."""


def _tag(message: type, name: str, wire_type: int) -> int:
    return int(message.DESCRIPTOR.fields_by_name[name].number << 3 | wire_type)  # type: ignore[attr-defined]  # all generated messages have it


_START_TAG = _tag(pb.NumberDataPoint, "start_time_unix_nano", _FIXED64)
_TIME_TAG = _tag(pb.NumberDataPoint, "time_unix_nano", _FIXED64)
_INT_TAG = _tag(pb.NumberDataPoint, "as_int", _FIXED64)
_DOUBLE_TAG = _tag(pb.NumberDataPoint, "as_double", _FIXED64)
_POINT_TAG = _tag(pb.Gauge, "data_points", _DELIMITED)
_METRIC_TAG = _tag(pb.ScopeMetrics, "metrics", _DELIMITED)
_SCOPE_METRICS_TAG = _tag(pb.ResourceMetrics, "scope_metrics", _DELIMITED)
_RESOURCE_METRICS_TAG = _tag(pb.MetricsData, "resource_metrics", _DELIMITED)

_START = struct.Struct("<BQ")
_TIME = struct.Struct("<Q")
_INT_SLOT = struct.Struct("<QBq")
_DOUBLE_SLOT = struct.Struct("<QBd")
"""The time, the tag of the value and the value, which stand side by side."""

_NO_VALUE = pb.NumberDataPoint(flags=pb.DATA_POINT_FLAGS_NO_RECORDED_VALUE_MASK).SerializeToString()
_SCOPE_BYTES = pb.ScopeMetrics(scope=InstrumentationScope(name=SCOPE, version=__version__)).SerializeToString()


class Origin(NamedTuple):
    """What a block's points have in common."""

    resource: bytes
    """The resource, as its field of a ``ResourceMetrics``."""
    start_ns: int
    """Unix time from which sums count."""


Labels = tuple[str, ...]
Point = tuple[Metric, Labels]


@dataclass(eq=False)
class _Piece:
    """Some points of one metric, as their whole field of a ``ScopeMetrics``.

    Attributes:
        slots: offset of each point's time in the buffer.
        series: gives the values, from ``first`` on; None where the points have none.
        is_delivered: whether a receiver has accepted these points.
    """

    metric: Metric
    labels: tuple[Labels, ...]
    buffer: bytearray
    slots: array[int]
    series: Series | None
    first: int
    is_delivered: bool = False

    def fill(self, now_ns: int) -> None:
        """Writes the values that the series has now."""
        if self.series is None:
            _fill(_TIME.pack_into, self, repeat(now_ns - _MARKER_LEAD_NS))
            return
        values = self.series.values[self.first : self.first + len(self.slots)]
        try:
            _fill(_INT_SLOT.pack_into, self, repeat(now_ns), repeat(_INT_TAG), values)
        except struct.error:  # a fraction, or a count beyond 64 bits
            _fill(_DOUBLE_SLOT.pack_into, self, repeat(now_ns), repeat(_DOUBLE_TAG), values)


def _fill(pack_into: Callable[..., None], piece: _Piece, *columns: Iterable[float]) -> None:
    """One call a point, without a step of the interpreter between them."""
    deque(map(pack_into, repeat(piece.buffer), piece.slots, *columns), maxlen=0)


@dataclass(eq=False)
class _Template:
    """All points of one series.

    Attributes:
        carried: points that a receiver has from requests before these pieces were made.
    """

    series: Series
    pieces: list[_Piece]
    carried: set[Labels] = field(default_factory=set)

    def delivered(self) -> set[Labels]:
        """The points that a receiver has."""
        return self.carried.union(*(piece.labels for piece in self.pieces if piece.is_delivered))

    def follow(self, series: Series) -> None:
        """Takes new values for the same points."""
        self.series = series
        for piece in self.pieces:
            piece.series = series


@dataclass(eq=False)
class _Entry:
    """What is kept of one block."""

    block: Block
    origin: Origin
    templates: dict[Metric, _Template] = field(default_factory=dict)


@dataclass(frozen=True)
class Request:
    """One message to be sent.

    Attributes:
        body: the encoded ``ExportMetricsServiceRequest``.
        num_points: points with a value in it.
    """

    body: bytes
    num_points: int
    parts: tuple[tuple[Origin, _Piece], ...] = field(repr=False)


class Encoder:
    """Keeps the templates and what a receiver has; used by one thread.

    Args:
        attributes: gives a block its resource attributes.
        start_ns: Unix time from which sums count that belong to no rank.
    """

    def __init__(self, attributes: Callable[[Block], Attributes], start_ns: int) -> None:
        self._attributes = attributes
        self._start_ns = start_ns
        self._entries: dict[tuple[str, ...], _Entry] = {}
        self._due: dict[Origin, dict[Point, None]] = {}

    @property
    def num_points(self) -> int:
        """Points with a value that the next requests hold."""
        return sum(len(t.series.labels) for entry in self._entries.values() for t in entry.templates.values())

    @property
    def num_due(self) -> int:
        """Vanished points that a receiver has still to be told of."""
        return sum(map(len, self._due.values()))

    def update(self, blocks: Sequence[Block]) -> None:
        """Makes these blocks the ones that are sent."""
        former, self._entries = self._entries, {}
        for block in blocks:
            entry = former.get(block.key)
            if entry is not None and (entry.block is block or entry.block.identity == block.identity):
                del former[block.key]
            else:
                entry = _Entry(Block(block.key, block.identity, ()), self._origin(block))
            if entry.block is not block:
                self._follow(entry, block)
            self._entries[block.key] = entry
        for entry in former.values():
            for template in entry.templates.values():
                self._note_gone(entry.origin, template.series.metric, template.delivered())

    def requests(self, now_ns: int) -> Iterator[Request]:
        """The messages of one push, each made when it is drawn, with the values of the last ``update``.

        Args:
            now_ns: Unix time of the push.
        """
        size, num_points = 0, 0
        parts: list[tuple[Origin, _Piece]] = []
        # First those without a value: where a backend takes a point of a rank's former life and its new one for the
        # same series, time only moves on and the value stands.
        for origin, piece in chain(self._markers(), self._values()):
            overhead = len(origin.resource) + len(_SCOPE_BYTES) + 2 * _PREFIX_BYTES
            is_full = (
                size + overhead + len(piece.buffer) > MAX_REQUEST_BYTES
                or num_points + len(piece.slots) > MAX_REQUEST_POINTS
            )
            if parts and is_full:
                yield _request(parts, now_ns)
                parts, size, num_points = [], 0, 0
            num_points += len(piece.slots)
            size += len(piece.buffer) + (overhead if not parts or parts[-1][0] is not origin else 0)
            parts.append((origin, piece))
        if parts:
            yield _request(parts, now_ns)

    def accepted(self, request: Request) -> None:
        """Notes that the receiver has what is in a request."""
        for origin, piece in request.parts:
            piece.is_delivered = True
            if piece.series is None:
                for labels in piece.labels:
                    self._forget(origin, (piece.metric, labels))

    def _origin(self, block: Block) -> Origin:
        pairs = [KeyValue(key=key, value=_any(value)) for key, value in self._attributes(block).items()]
        start_ns = _nanoseconds(block.identity.start_time) if block.identity else self._start_ns
        return Origin(pb.ResourceMetrics(resource=Resource(attributes=pairs)).SerializeToString(), start_ns)

    def _follow(self, entry: _Entry, block: Block) -> None:
        """Brings the templates of a block up to date; those of series that have the same points stay."""
        former, entry.templates, entry.block = entry.templates, {}, block
        for series in block.series:
            template = former.pop(series.metric, None)
            if template is not None and template.series.labels is series.labels:
                template.follow(series)
            else:
                delivered = template.delivered() if template else set()
                template = self._template(entry.origin, series, delivered)
            entry.templates[series.metric] = template
        for template in former.values():
            self._note_gone(entry.origin, template.series.metric, template.delivered())

    def _template(self, origin: Origin, series: Series, delivered: set[Labels]) -> _Template:
        """Templates for new points, of which the receiver has some already."""
        present = set(series.labels) if delivered or origin in self._due else set()
        self._note_gone(origin, series.metric, delivered - present)
        back = {labels for labels in present if self._forget(origin, (series.metric, labels))}
        pieces = list(_pieces(series.metric, series.labels, origin.start_ns, series))
        return _Template(series, pieces, (delivered & present) | back)

    def _note_gone(self, origin: Origin, metric: Metric, gone: Iterable[Labels]) -> None:
        room = MAX_DUE_POINTS - self.num_due
        points = [(metric, labels) for labels in gone][: max(room, 0)]
        if points:
            self._due.setdefault(origin, {}).update(dict.fromkeys(points))

    def _forget(self, origin: Origin, point: Point) -> bool:
        """Strikes a point off those to be told of; whether it was one."""
        due = self._due.get(origin, {})
        if point not in due:
            return False
        del due[point]
        if not due:
            del self._due[origin]
        return True

    def _markers(self) -> Iterator[tuple[Origin, _Piece]]:
        for origin, points in list(self._due.items()):
            by_metric: dict[Metric, list[Labels]] = {}
            for metric, labels in points:
                by_metric.setdefault(metric, []).append(labels)
            for metric, gone in by_metric.items():
                for piece in _pieces(metric, tuple(gone), origin.start_ns, None):
                    yield origin, piece

    def _values(self) -> Iterator[tuple[Origin, _Piece]]:
        for entry in self._entries.values():
            for template in entry.templates.values():
                for piece in template.pieces:
                    yield entry.origin, piece


def _pieces(metric: Metric, labels: tuple[Labels, ...], start_ns: int, series: Series | None) -> Iterator[_Piece]:
    """The points as templates, a bounded number in each."""
    for first in range(0, len(labels), MAX_PIECE_POINTS):
        yield _piece(metric, labels[first : first + MAX_PIECE_POINTS], start_ns, series, first)


def _piece(metric: Metric, labels: tuple[Labels, ...], start_ns: int, series: Series | None, first: int) -> _Piece:
    start = b"" if metric.kind is Kind.GAUGE else _START.pack(_START_TAG, start_ns)
    head = start + bytes([_TIME_TAG]) + bytes(_INT_SLOT.size if series else _TIME.size)
    tail = b"" if series else _NO_VALUE
    points: list[bytes] = []
    slots = array("I")
    size = 0
    for texts in labels:
        body = b"".join([head, *map(_attribute, metric.labels, texts), tail])
        prefix = _prefix(_POINT_TAG, len(body))
        slots.append(size + len(prefix) + len(start) + 1)
        points += (prefix, body)
        size += len(prefix) + len(body)
    before, after = _around(metric, size)
    buffer = bytearray(b"".join([before, *points, after]))
    return _Piece(metric, labels, buffer, array("I", (len(before) + slot for slot in slots)), series, first)


def _around(metric: Metric, size: int) -> tuple[bytes, bytes]:
    """What stands before and after the points of a metric, which take so many bytes, in its field."""
    about, data_tag, after = _frame(metric)
    data_head = _prefix(data_tag, size + len(after))
    return _prefix(_METRIC_TAG, len(about) + len(data_head) + size + len(after)) + about + data_head, after


def _frame(metric: Metric) -> tuple[bytes, int, bytes]:
    """What a metric's message says before its points, the tag of the field that they are in, and what follows them."""
    about = pb.Metric(name=metric.otel_name, description=metric.help, unit=metric.unit).SerializeToString()
    if metric.kind is Kind.GAUGE:
        return about, _tag(pb.Metric, "gauge", _DELIMITED), b""
    is_monotonic = metric.kind is Kind.COUNTER
    tail = pb.Sum(aggregation_temporality=pb.AGGREGATION_TEMPORALITY_CUMULATIVE, is_monotonic=is_monotonic)
    return about, _tag(pb.Metric, "sum", _DELIMITED), tail.SerializeToString()


@lru_cache(maxsize=1 << 14)
def _attribute(name: str, value: str) -> bytes:
    """One attribute of a point, as the field it is in; none for an empty value, as Prometheus has it."""
    if not value:
        return b""
    return bytes(pb.NumberDataPoint(attributes=[KeyValue(key=name, value=_any(value))]).SerializeToString())


def _any(value: str | int) -> AnyValue:
    """The value; a record may claim numbers that no message can hold, which must not cost the other ranks theirs."""
    is_int = isinstance(value, int) and abs(value) <= _MAX_INT
    return AnyValue(int_value=value) if is_int else AnyValue(string_value=str(value))


def _nanoseconds(seconds: float) -> int:
    """Unix time; 0, which means unknown, for what no clock shows."""
    return int(seconds * _NANO) if 0 < seconds < _MAX_INT / _NANO else 0


def _prefix(tag: int, size: int) -> bytes:
    """Tag and length of a field; tags are below 128 here."""
    encoded = bytearray([tag])
    while size > 0x7F:  # noqa: PLR2004  # seven bits a byte, the lowest first
        encoded.append(size & 0x7F | 0x80)
        size >>= 7
    encoded.append(size)
    return bytes(encoded)


def _request(parts: Sequence[tuple[Origin, _Piece]], now_ns: int) -> Request:
    chunks: list[bytes | bytearray] = []
    num_points = 0
    for origin, group in groupby(parts, key=itemgetter(0)):
        pieces = [piece for _, piece in group]
        for piece in pieces:
            piece.fill(now_ns)
            num_points += len(piece.slots) if piece.series else 0
        size = len(_SCOPE_BYTES) + sum(len(piece.buffer) for piece in pieces)
        scope_head = _prefix(_SCOPE_METRICS_TAG, size)
        resource_head = _prefix(_RESOURCE_METRICS_TAG, len(origin.resource) + len(scope_head) + size)
        chunks += (resource_head, origin.resource, scope_head, _SCOPE_BYTES, *(piece.buffer for piece in pieces))
    return Request(b"".join(chunks), num_points, tuple(parts))
