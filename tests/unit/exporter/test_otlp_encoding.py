"""Blocks as OTLP messages: every point exactly once, as its metric says, and vanished ones told of until accepted."""

from __future__ import annotations

import math
import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from otlp_receivers import decode
from records import make_record
from torchmem_exporter import catalog
from torchmem_exporter.catalog import Kind
from torchmem_exporter.otlp import encoding as otlp
from torchmem_exporter.otlp.encoding import Encoder
from torchmem_exporter.otlp.resource import Resources
from torchmem_exporter.points import Block, Series

START_NS, NOW_NS = 1_700_000_000 * 10**9, 1_800_000_000 * 10**9
IDENTITY = make_record(3).identity
RESOURCES = Resources(host="node-1")


def make_encoder():
    return Encoder(RESOURCES.attributes, START_NS)


def block(*series, rank=3, **identity):
    """A rank's block."""
    who = msgspec.structs.replace(IDENTITY, rank=rank, **identity)
    return Block(
        (who.train_job, str(rank)), who, tuple(Series(m, tuple(labels), values) for m, labels, values in series)
    )


def push(encoder, *blocks, now_ns=NOW_NS, is_accepted=lambda _request: True):
    """All points of one push; each request's fate is decided as it is drawn."""
    encoder.update(blocks)
    found = []
    for request in encoder.requests(now_ns):
        assert len(request.body) <= otlp.MAX_REQUEST_BYTES
        points = decode(request.body)
        assert request.num_points == sum(p.value is not None for p in points)
        found += points
        if is_accepted(request):
            encoder.accepted(request)
    return found


def device_labels(*devices):
    return tuple(("job", "3", device) for device in devices)


def test_every_metric_says_what_the_catalog_says():
    """A metric would have another name, unit, help, kind or attributes by OTLP than by Prometheus."""
    series = [(m, [tuple(f"{name} of it" for name in m.labels)], [7]) for m in catalog.METRICS]
    encoder = make_encoder()
    encoder.update([block(*series)])
    (request,) = encoder.requests(NOW_NS)
    message = ExportMetricsServiceRequest.FromString(request.body)
    assert message.SerializeToString() == request.body, "it is what the library itself would write"
    metrics = message.resource_metrics[0].scope_metrics[0].metrics
    assert [(m.name, m.unit, m.description) for m in metrics] == [
        (m.otel_name, m.unit, m.help) for m in catalog.METRICS
    ]
    start_ns = int(IDENTITY.start_time * 1e9)
    for point, metric in zip(decode(request.body), catalog.METRICS, strict=True):
        assert point.kind == metric.kind.value
        assert dict(point.labels) == {name: f"{name} of it" for name in metric.labels}
        assert (point.value, point.time_ns) == (7, NOW_NS)
        assert point.start_ns == (0 if metric.kind is Kind.GAUGE else start_ns)


def test_an_empty_label_is_left_out():
    """A label that Prometheus does not have would make another series of it."""
    labels = ("job", "3", "attempt", "1", "host", "native", "", "", "", "")
    (point,) = push(make_encoder(), block((catalog.RANK_INFO, [labels], [1])))
    assert set(dict(point.labels)) == {"train_job", "rank", "attempt", "pid", "host", "engine"}


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0, 0), (-5, -5), (2**63 - 1, 2**63 - 1), (2**63, 2.0**63), (0.25, 0.25), (True, 1), (math.inf, math.inf)],
)
def test_values_arrive_as_they_are(value, expected):
    """A byte count would lose digits, or a ratio its fraction."""
    (point,) = push(make_encoder(), block((catalog.PEAK, device_labels("cpu"), [value])))
    assert (point.value, type(point.value)) == (expected, type(expected))


def test_a_series_may_change_between_whole_and_fractional():
    """A template would keep the tag of another type and garble the value."""
    encoder, labels = make_encoder(), device_labels("cpu", "cuda:0")
    for values in ([1, 2], [0.5, 3], [4, 5]):
        points = push(encoder, block((catalog.FRAGMENTATION, labels, values)))
        assert [p.value for p in points] == values


def test_resources_tell_blocks_apart():
    """Ranks, their job and the sidecar would be one instance to a backend."""
    blocks = [
        block((catalog.STEP_NUMBER, [("job", "3")], [1])),
        block((catalog.STEP_NUMBER, [("job", "4")], [1]), rank=4),
        Block((IDENTITY.train_job,), None, (Series(catalog.WORLD_SIZE, (("job",),), [8]),)),
        Block((), None, (Series(catalog.SNAPSHOT_ERRORS, (("magic",),), [8]),)),
    ]
    points = push(make_encoder(), *blocks)
    instances = [(p.resource["service.name"], p.resource["service.instance.id"]) for p in points]
    job = IDENTITY.train_job
    assert instances == [(job, "rank-3"), (job, "rank-4"), (job, "node-1"), ("torchmem-exporter", "node-1")]
    assert points[-1].start_ns == START_NS, "sums of the sidecar count from its own start"


@pytest.mark.parametrize(("length", "num_requests"), [(1, 5), (190, 8)])
def test_large_expositions_are_split(length, num_requests):
    """A receiver would refuse a message that is too large, or a point at the border would be lost or sent twice."""
    names = [f"{'x' * (i % length)}{i}" for i in range(20_000)]
    labels = tuple(("job", "3", name[:150], name, name[:160]) for name in names)
    ranks = [block((catalog.MODULE_USAGE, labels, range(len(labels))), rank=rank) for rank in (1, 2)]
    encoder = make_encoder()
    encoder.update(ranks)
    requests = list(encoder.requests(NOW_NS))
    assert len(requests) <= num_requests
    assert all(len(r.body) <= otlp.MAX_REQUEST_BYTES and r.num_points <= otlp.MAX_REQUEST_POINTS for r in requests)
    points = [p for r in requests for p in decode(r.body)]
    assert encoder.num_points == len(points) == sum(r.num_points for r in requests) == 2 * len(labels)
    expected = {(f"rank-{k}", name): v for k in (1, 2) for v, name in enumerate(names)}
    assert {(p.resource["service.instance.id"], dict(p.labels)["module"]): p.value for p in points} == expected


def test_a_vanished_point_is_told_once():
    """A backend would show the last value of a module that is gone, or be told of it for ever."""
    encoder = make_encoder()
    push(encoder, block((catalog.OOMS, device_labels("a", "b"), [1, 2])))
    after = block((catalog.OOMS, device_labels("b"), [2]))
    gone, there = push(encoder, after, now_ns=NOW_NS + 5)
    assert (dict(gone.labels)["device"], gone.value) == ("a", None)
    assert gone.start_ns == there.start_ns
    assert gone.time_ns < there.time_ns == NOW_NS + 5, "where both are one series, the value comes last"
    assert [p.value for p in push(encoder, after)] == [2]


def test_a_vanished_block_is_told_once():
    """The series of a rank that ended would linger in a backend."""
    encoder = make_encoder()
    series = [(catalog.PEAK, device_labels("a", "b"), [1, 2]), (catalog.STEPS, [("job", "3")], [9])]
    before = push(encoder, block(*series))
    gone = push(encoder)
    assert {p.key for p in gone} == {p.key for p in before}
    assert {p.value for p in gone} == {None}
    assert push(encoder) == []


def test_a_new_attempt_ends_the_former_ones_series():
    """Series with the former process's id would linger beside the new ones."""
    encoder = make_encoder()
    (before,) = push(encoder, block((catalog.PEAK, device_labels("a"), [1])))
    again = block((catalog.PEAK, device_labels("a"), [1]), pid=77, attempt="other", start_time=1_700_000_500.0)
    gone, there = push(encoder, again)
    assert (gone.key, gone.value) == (before.key, None)
    assert (there.resource["process.pid"], there.value) == (77, 1)


def test_what_was_never_accepted_is_not_told_of():
    """Memory would grow with each rank that comes and goes while the receiver is down."""
    encoder = make_encoder()
    for rank in range(50):
        push(encoder, block((catalog.PEAK, device_labels("a"), [1]), rank=rank), is_accepted=lambda _request: False)
    assert encoder.num_due == 0
    assert push(encoder) == []


def test_what_is_due_is_bounded(monkeypatch):
    """A receiver that stops answering at a moment of many series would cost memory without bound."""
    monkeypatch.setattr(otlp, "MAX_DUE_POINTS", 10)
    encoder = make_encoder()
    ranks = [block((catalog.PEAK, device_labels(*"abcdef"), range(6)), rank=rank) for rank in range(4)]
    push(encoder, *ranks)
    for num_left in (3, 2, 1, 0):
        push(encoder, *ranks[:num_left], is_accepted=lambda _request: False)
    assert encoder.num_due == 10


def test_claims_that_no_message_can_hold_cost_nothing():
    """One record with an absurd process id or start would end pushing for all ranks."""
    for start_time in (math.nan, math.inf, -1.0, 1e300):
        (point,) = push(
            make_encoder(), block((catalog.STEPS, [("job", "3")], [1]), pid=2**64 - 1, start_time=start_time)
        )
        assert (point.start_ns, point.resource["process.pid"]) == (0, str(2**64 - 1))


def test_an_unchanged_block_needs_no_new_templates(monkeypatch):
    """Each push would cost as much as the first."""
    encoder = make_encoder()
    labels = device_labels("a", "b")
    first = block((catalog.PEAK, labels, [1, 2]))
    push(encoder, first)
    monkeypatch.setattr(otlp, "_pieces", None)
    assert [p.value for p in push(encoder, first, now_ns=NOW_NS + 1)] == [1, 2]
    second = block((catalog.PEAK, labels, [3, 4]))
    points = push(encoder, second, now_ns=NOW_NS + 2)
    assert [(p.value, p.time_ns) for p in points] == [(3, NOW_NS + 2), (4, NOW_NS + 2)]


STATES = st.dictionaries(
    st.tuples(st.sampled_from("xyz"), st.sampled_from([1, 2])),
    st.dictionaries(st.sampled_from([catalog.PEAK, catalog.OOMS]), st.sets(st.sampled_from("abcd"), min_size=1)),
    max_size=3,
)


def build(state):
    """Blocks of ranks x, y, z, in their first or second attempt."""
    latest = dict(sorted(state))
    return [
        block(
            *((m, device_labels(*sorted(devices)), [1] * len(devices)) for m, devices in state[rank, attempt].items()),
            rank="xyz".index(rank),
            attempt=str(attempt),
            pid=attempt,
        )
        for rank, attempt in latest.items()
    ]


@given(states=st.lists(st.tuples(STATES, st.sampled_from([0.0, 0.5, 1.0])), max_size=8), seed=st.integers(0, 99))
def test_a_receiver_always_ends_with_what_is_there(states, seed):
    """After some history of changes and refusals a backend would show series that are gone, or lack others."""
    encoder, chance, shown = make_encoder(), random.Random(seed), set()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(otlp, "MAX_REQUEST_BYTES", 700)  # several requests a push, so that some of them can fail
        for state, share in [*states, (states[-1][0] if states else {}, 1.0)]:
            encoder.update(build(state))
            wanted, sent = set(), set()
            for request in encoder.requests(NOW_NS):
                accepted = chance.random() < share
                for point in decode(request.body):
                    if point.value is None:
                        assert point.key in shown, "told of a point that the receiver has not"
                        assert point.key not in sent
                        shown.difference_update({point.key} if accepted else ())
                    else:
                        assert point.key not in wanted, "a point was sent twice"
                        wanted.add(point.key)
                        shown.update({point.key} if accepted else ())
                    sent.add(point.key)
                if accepted:
                    encoder.accepted(request)
            assert len(wanted) == encoder.num_points
        assert shown == wanted
        assert encoder.num_due == 0
