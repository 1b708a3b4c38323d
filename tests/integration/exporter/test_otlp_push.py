"""The pushing thread against real receivers, over HTTP and gRPC, that take everything or misbehave."""

from __future__ import annotations

import itertools
import logging
import socket
import ssl
import threading
import time
from contextlib import contextmanager
from dataclasses import replace

import grpc
import pytest
import trustme
from google.protobuf.any_pb2 import Any
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status

from otlp_receivers import RECEIVERS, Reply, http_receiver, wait_until
from records import make_record
from torchmem_exporter import catalog
from torchmem_exporter.otlp import encoding as otlp
from torchmem_exporter.otlp import push as otlp_push
from torchmem_exporter.otlp.config import from_environ
from torchmem_exporter.otlp.push import Pusher
from torchmem_exporter.points import Block, Series

PROTOCOLS = sorted(RECEIVERS)
BOTH = pytest.mark.parametrize("protocol", PROTOCOLS)
PATIENT_SECONDS = 60.0
NUM_MODULES = 300
LABELS = [tuple(("job", str(r), "cpu", f"layers.{m}", "activation") for m in range(NUM_MODULES)) for r in range(4)]


@pytest.fixture(autouse=True)
def no_chance(monkeypatch):
    """The first push comes at once, and waits between attempts are their shortest."""
    monkeypatch.setattr(otlp_push.random, "uniform", lambda low, _high: low)


class Ranks:
    """Blocks of ranks, whose values are the number of the collection."""

    def __init__(self, num_ranks=4):
        self.num_ranks = num_ranks
        self.num_calls = 0

    def __call__(self):
        self.num_calls += 1
        return [
            Block(
                ("job", str(rank)),
                make_record(rank).identity,
                (Series(catalog.MODULE_USAGE, LABELS[rank], [self.num_calls] * NUM_MODULES),),
            )
            for rank in range(self.num_ranks)
        ]


@contextmanager
def pushing(endpoint, collect=None, protocol="http/protobuf", interval_ms=100, patience=PATIENT_SECONDS, **variables):
    """A running pusher.

    Args:
        endpoint: where it pushes to.
        collect: what it pushes; by default four ranks.
        protocol: how.
        interval_ms: between two pushes.
        patience: seconds for a push, and for the last one: a busy machine may take longer for one than the short
            interval, which bounds it otherwise. None for the limits that the variables give.
        variables: further ones by their names after ``OTEL_EXPORTER_OTLP_``.
    """
    environ = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint,
        "OTEL_EXPORTER_OTLP_PROTOCOL": protocol,
        "OTEL_METRIC_EXPORT_INTERVAL": str(interval_ms),
    }
    config = from_environ(environ | {f"OTEL_EXPORTER_OTLP_{name}": value for name, value in variables.items()})
    if patience:
        config = replace(config, timeout=patience, push_timeout=patience)
    pusher = Pusher(config, collect or Ranks())
    pusher.start()
    try:
        yield pusher
    finally:
        pusher.close(patience or 0.5)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@BOTH
@pytest.mark.parametrize("compression", ["gzip", "none"])
def test_every_point_arrives_at_every_push(protocol, compression):
    """Points would be folded, lost or sent twice."""
    with RECEIVERS[protocol]() as receiver:
        with pushing(receiver.endpoint, protocol=protocol, COMPRESSION=compression) as pusher:
            wait_until(lambda: pusher.num_pushes >= 3)
        pushes = receiver.pushes()
    assert (pusher.num_failed_pushes, pusher.num_dropped_points, pusher.last_error) == (0, 0, "")
    assert pusher.last_push_seconds > 0
    assert len(pushes) == pusher.num_pushes
    for number, points in enumerate(pushes, 1):
        assert {p.value for p in points} == {number}
        assert {tuple(dict(p.labels).values()) for p in points} == {
            tuple(dict(sorted(zip(catalog.MODULE, labels, strict=True))).values()) for labels in sum(LABELS, ())
        }
        assert len(points) == 4 * NUM_MODULES


@BOTH
def test_what_comes_with_a_request(protocol):
    """Credentials would not arrive, or a receiver could not tell what the body is."""
    with RECEIVERS[protocol]() as receiver:
        with pushing(receiver.endpoint, protocol=protocol, HEADERS="Authorization=Bearer%20abc") as pusher:
            wait_until(lambda: pusher.num_pushes)
        assert receiver.headers["authorization"] == "Bearer abc"
        assert "torchmem-exporter/" in receiver.headers["user-agent"]
        if protocol == "http/protobuf":
            assert receiver.path == "/v1/metrics"
            assert receiver.headers["content-type"] == "application/x-protobuf"
            assert receiver.headers["content-encoding"] == "gzip"


@BOTH
def test_more_than_one_message_holds(protocol):
    """A receiver with gRPC's usual limit of 4 MiB would refuse a push of many series whole."""
    labels = tuple(("job", "0", "cpu", f"layers.{m}.{'x' * 60}", "activation") for m in range(40_000))
    block = Block(("job", "0"), make_record().identity, (Series(catalog.MODULE_USAGE, labels, range(40_000)),))
    with (
        RECEIVERS[protocol]() as receiver,
        pushing(receiver.endpoint, lambda: [block], protocol, interval_ms=600_000) as pusher,
    ):
        wait_until(lambda: pusher.num_pushes)
        num_requests, points = len(receiver.bodies), receiver.points()
    assert pusher.last_error == ""
    assert num_requests > 1
    assert {dict(p.labels)["module"]: p.value for p in points} == {name[3]: i for i, name in enumerate(labels)}
    assert len(points) == 40_000


@BOTH
def test_the_last_state_is_pushed_at_the_end(protocol):
    """What happened since the last push would be lost when the sidecar ends."""
    with RECEIVERS[protocol]() as receiver:
        with pushing(receiver.endpoint, protocol=protocol, interval_ms=600_000) as pusher:
            wait_until(lambda: pusher.num_pushes)
            assert pusher.close(10)
        assert pusher.num_pushes == 2
        assert [points[0].value for points in receiver.pushes()] == [1, 2]


@BOTH
def test_a_rank_that_ended_is_told_once_although_refused_at_first(protocol):
    """The receiver would keep the series of a rank that ended while it refused."""
    ranks = Ranks()
    refusal = Reply(400 if protocol == "http/protobuf" else "INVALID_ARGUMENT")
    with RECEIVERS[protocol]() as receiver, pushing(receiver.endpoint, ranks, protocol) as pusher:
        wait_until(lambda: receiver.bodies)
        receiver.reply = refusal
        wait_until(lambda: receiver.refused)
        ranks.num_ranks = 3
        num_refused = len(receiver.refused)
        wait_until(lambda: len(receiver.refused) >= num_refused + 3)
        receiver.reply = Reply()
        num_pushes = pusher.num_pushes
        wait_until(lambda: pusher.num_pushes >= num_pushes + 3)
        gone = [p for p in receiver.points() if p.value is None]
    assert len(gone) == NUM_MODULES
    assert {p.resource["service.instance.id"] for p in gone} == {"rank-3"}


@BOTH
def test_a_receiver_that_is_down_and_comes_back(protocol):
    """A collector's restart would end pushing for good, or pile up what was not sent."""
    port, ranks = free_port(), Ranks()

    def is_told(error):
        return "listening there" in error and ("OTEL" in error or "scheme" in error)

    with pushing(f"http://127.0.0.1:{port}", ranks, protocol, interval_ms=300, patience=None) as pusher:
        wait_until(lambda: pusher.num_failed_pushes >= 3 and is_told(pusher.last_error))
        assert pusher.num_dropped_points >= 3 * 4 * NUM_MODULES
        assert pusher._encoder.num_due == 0
        with RECEIVERS[protocol](port=port) as receiver:
            wait_until(lambda: receiver.bodies)
            (first, *_) = receiver.pushes()
    assert len(first) == 4 * NUM_MODULES
    assert first[0].value > 3, "the state of now, not that of then"


@BOTH
def test_a_receiver_that_does_not_answer(protocol):
    """A hanging collector would hold pushes up for ever, or the end of the sidecar."""
    with RECEIVERS[protocol]() as receiver:
        receiver.reply = Reply(seconds=60)
        with pushing(receiver.endpoint, protocol=protocol, interval_ms=300, patience=None, TIMEOUT="200") as pusher:
            wait_until(lambda: pusher.num_failed_pushes >= 2)
            assert pusher.last_push_seconds < 20
            began = time.monotonic()
            assert not pusher.close(1.0)
            assert time.monotonic() - began < 20


@BOTH
def test_nobody_waits_for_a_push(protocol):
    """A scrape would be delayed by as long as a collector takes."""
    with RECEIVERS[protocol]() as receiver:
        receiver.reply = Reply(seconds=60)
        with pushing(receiver.endpoint, protocol=protocol, interval_ms=60_000, patience=None) as pusher:
            wait_until(lambda: receiver.bodies)
            ticks = []
            for _ in range(50):
                began = time.perf_counter()
                time.sleep(0.001)
                ticks.append(time.perf_counter() - began)
            assert sorted(ticks)[25] < 0.1
            assert pusher.num_pushes == 0


class Times(list):
    """The moments of requests, noted by a receiver."""

    def __init__(self, receiver):
        take = receiver.take

        def noting(*arguments):
            self.append(time.monotonic())
            return take(*arguments)

        receiver.take = noting


def retry_info(seconds):
    detail = Any()
    detail.Pack(RetryInfo(retry_delay=Duration(seconds=seconds)))
    return Status(code=8, message="busy", details=[detail]).SerializeToString()


@pytest.mark.parametrize(
    ("protocol", "reply"),
    [
        ("http/protobuf", Reply(503, {"Retry-After": "2"})),
        ("http/protobuf", Reply(429, {"Retry-After": "2"})),
        ("grpc", Reply("RESOURCE_EXHAUSTED", details=retry_info(2))),
        ("grpc", Reply("UNAVAILABLE", details=retry_info(2))),
    ],
)
def test_a_busy_receiver_is_asked_again_when_it_said(protocol, reply):
    """A collector that asks for a pause would get none, or its points would be dropped although there was time."""
    with RECEIVERS[protocol]() as receiver:
        times = Times(receiver)
        receiver.reply = reply
        with pushing(receiver.endpoint, protocol=protocol, interval_ms=20_000) as pusher:
            wait_until(lambda: receiver.refused)
            receiver.reply = Reply()
            wait_until(lambda: pusher.num_pushes == 1)
    assert times[1] - times[0] >= 2
    assert (pusher.num_failed_pushes, pusher.num_dropped_points) == (0, 0)


@pytest.mark.parametrize(
    ("protocol", "reply"),
    [
        ("http/protobuf", Reply(503, {"Retry-After": "1"})),
        ("grpc", Reply("RESOURCE_EXHAUSTED", details=retry_info(1))),
    ],
)
def test_a_pause_longer_than_the_interval_is_kept(protocol, reply):
    """A collector that asks for a pause would be asked again at the next push."""
    with RECEIVERS[protocol]() as receiver:
        times = Times(receiver)
        receiver.reply = reply
        with pushing(receiver.endpoint, protocol=protocol, interval_ms=200, patience=None) as pusher:
            wait_until(lambda: len(times) >= 3)
            assert pusher.num_dropped_points >= 2 * 4 * NUM_MODULES
    assert all(later - sooner >= 0.95 for sooner, later in itertools.pairwise(times[:3]))


@pytest.mark.parametrize(
    ("protocol", "reply"),
    [("http/protobuf", Reply(status)) for status in (302, 400, 401, 404, 413, 500)]
    + [("grpc", Reply(code)) for code in ("INVALID_ARGUMENT", "UNAUTHENTICATED", "RESOURCE_EXHAUSTED", "INTERNAL")],
)
def test_a_refusal_is_not_asked_again(protocol, reply):
    """A collector that refuses would get the same again and again, or the reason would not be told."""
    reply.message = "no room for it"
    with RECEIVERS[protocol]() as receiver:
        receiver.reply = reply
        with pushing(receiver.endpoint, protocol=protocol, interval_ms=60_000) as pusher:
            wait_until(lambda: pusher.num_pushes)
            assert len(receiver.refused) == 1
            assert pusher.num_dropped_points == 4 * NUM_MODULES
    assert str(reply.status) in pusher.last_error
    assert "no room for it" in pusher.last_error


def test_one_refused_request_does_not_cost_the_others(monkeypatch):
    """One rank that a collector cannot take would cost the points of all."""
    monkeypatch.setattr(otlp, "MAX_REQUEST_BYTES", 60_000)
    with http_receiver() as receiver:
        take, replies = receiver.take, iter([Reply(400)])

        def refusing_first(*arguments):
            receiver.reply = next(replies, Reply())
            return take(*arguments)

        receiver.take = refusing_first
        with pushing(receiver.endpoint, interval_ms=60_000) as pusher:
            wait_until(lambda: pusher.num_pushes)
            (points,) = receiver.pushes()
            assert len(points) + pusher.num_dropped_points == 4 * NUM_MODULES
            assert len(points) > 2 * NUM_MODULES


@BOTH
def test_points_that_a_receiver_rejects(protocol, caplog):
    """Points rejected of an accepted request would vanish without a count, or fill the log."""
    with RECEIVERS[protocol]() as receiver:
        receiver.reply = Reply(message="too many series", num_rejected=7)
        with pushing(receiver.endpoint, protocol=protocol) as pusher:
            wait_until(lambda: pusher.num_pushes >= 3)
    assert (pusher.num_failed_pushes, pusher.num_dropped_points) == (0, 7 * pusher.num_pushes)
    assert "too many series" in pusher.last_error
    assert len(caplog.records) == 1


def test_reasons_are_told_once_and_are_bounded(caplog, monkeypatch):
    """A collector that is down for a night would fill the log, and one that words each refusal anew the memory."""
    monkeypatch.setattr(otlp_push, "MAX_REASONS", 5)
    with http_receiver() as receiver:
        take, count = receiver.take, itertools.count()

        def refusing(*arguments):
            receiver.reply = Reply(400, message=f"refusal {next(count) // 2}")
            return take(*arguments)

        receiver.take = refusing
        with pushing(receiver.endpoint, interval_ms=20) as pusher:
            wait_until(lambda: pusher.num_failed_pushes >= 20)
    assert len(caplog.records) == 5
    assert len({record.torchmem_fields["reason"] for record in caplog.records}) == 5


def test_credentials_are_not_logged(caplog):
    """Whoever reads the log could write to the collector."""
    caplog.set_level(logging.DEBUG)
    with http_receiver() as receiver:
        receiver.reply = Reply(401)
        endpoint = f"{receiver.endpoint}?api-key=hidden"
        with pushing(endpoint, HEADERS="authorization=hidden") as pusher:
            wait_until(lambda: pusher.num_pushes)
        assert "hidden" in receiver.path
    told = [
        f"{record.getMessage()} {record.__dict__}" for record in caplog.records if record.name == otlp_push.logger.name
    ]
    assert told
    assert not any("hidden" in line for line in told)
    assert "hidden" not in pusher.last_error


def test_a_fault_while_collecting_ends_nothing(caplog):
    """One fault would end pushing until the sidecar is restarted."""
    ranks, faults = Ranks(), [RuntimeError("a fault"), RuntimeError("a fault")]

    def collect():
        if faults:
            raise faults.pop()
        return ranks()

    with http_receiver() as receiver, pushing(receiver.endpoint, collect) as pusher:
        receiver.wait_for(lambda r: r.bodies)
        assert pusher.num_failed_pushes == 2
    assert "RuntimeError: a fault" in pusher.last_error
    assert len(caplog.records) == 1


def test_closing_what_never_began():
    """A sidecar that ends before it began to push would fail or wait."""
    config = from_environ({"OTEL_METRICS_EXPORTER": "otlp"})
    assert Pusher(config, Ranks()).close(5)


@pytest.fixture(scope="module")
def authority():
    return trustme.CA()


@pytest.fixture(scope="module")
def files(authority, tmp_path_factory):
    """Certificate of the authority, and a client's key and certificate."""
    folder = tmp_path_factory.mktemp("certificates")
    client = authority.issue_cert("client@example.org")
    authority.cert_pem.write_to_path(folder / "ca.pem")
    client.private_key_pem.write_to_path(folder / "client.key")
    client.cert_chain_pems[0].write_to_path(folder / "client.pem")
    trustme.CA().cert_pem.write_to_path(folder / "other.pem")
    return folder


@contextmanager
def secure_receiver(protocol, authority):
    """A receiver that wants a client's certificate."""
    issued = authority.issue_cert("localhost")
    if protocol == "grpc":
        chain = b"".join(pem.bytes() for pem in issued.cert_chain_pems)
        pair = (issued.private_key_pem.bytes(), chain)
        credentials = grpc.ssl_server_credentials([pair], authority.cert_pem.bytes(), require_client_auth=True)
        with RECEIVERS[protocol](credentials) as receiver:
            yield receiver
        return
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    issued.configure_cert(context)
    authority.configure_trust(context)
    context.verify_mode = ssl.CERT_REQUIRED
    with RECEIVERS[protocol](context) as receiver:
        yield receiver


@BOTH
def test_mutual_tls(protocol, authority, files):
    """A collector that wants a certificate would refuse the sidecar, or the sidecar would send to anybody."""
    pair = {"CLIENT_KEY": str(files / "client.key"), "CLIENT_CERTIFICATE": str(files / "client.pem")}
    with secure_receiver(protocol, authority) as receiver:
        with pushing(receiver.endpoint, protocol=protocol, CERTIFICATE=str(files / "ca.pem"), **pair) as pusher:
            wait_until(lambda: pusher.num_pushes)
        assert len(receiver.pushes()[0]) == 4 * NUM_MODULES
        num_accepted = len(receiver.bodies)
        for wrong in ({"CERTIFICATE": str(files / "ca.pem")}, {**pair, "CERTIFICATE": str(files / "other.pem")}):
            with pushing(receiver.endpoint, protocol=protocol, patience=None, **wrong) as pusher:
                wait_until(lambda pusher=pusher: pusher.num_failed_pushes)
            assert pusher.last_error
        assert len(receiver.bodies) == num_accepted


def test_a_changed_certificate_is_used_at_once(authority, files, tmp_path):
    """When certificates are renewed, pushing would fail until the sidecar is restarted."""
    file = tmp_path / "ca.pem"
    file.write_bytes((files / "other.pem").read_bytes())
    pair = {"CLIENT_KEY": str(files / "client.key"), "CLIENT_CERTIFICATE": str(files / "client.pem")}
    with (
        secure_receiver("http/protobuf", authority) as receiver,
        pushing(receiver.endpoint, interval_ms=300, patience=None, CERTIFICATE=str(file), **pair) as pusher,
    ):
        wait_until(lambda: pusher.num_failed_pushes and pusher.last_error.startswith("TLS:"))
        file.write_bytes((files / "ca.pem").read_bytes())
        receiver.wait_for(lambda r: r.bodies)


def test_a_proxy_is_used(monkeypatch):
    """Behind a proxy nothing would arrive, or what is to go past the proxy would not."""
    with http_receiver() as proxy, http_receiver() as receiver:
        monkeypatch.setenv("http_proxy", proxy.endpoint)
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        with pushing("http://collector.example:4318") as pusher:
            wait_until(lambda: pusher.num_pushes)
        assert proxy.path == "http://collector.example:4318/v1/metrics"
        with pushing(receiver.endpoint) as pusher:
            wait_until(lambda: pusher.num_pushes)
        assert receiver.bodies


def test_answers_of_other_servers():
    """A web server at the wrong address would be taken for a collector, or its page would be kept in memory."""
    with http_receiver() as receiver:
        page = Reply(404, {"content-type": "text/html"})
        page.body = lambda: b"<html>" + b"x" * (1 << 20)
        receiver.reply = page
        with pushing(receiver.endpoint, interval_ms=50) as pusher:
            wait_until(lambda: pusher.num_pushes >= 3)
    assert pusher.last_error.startswith("HTTP 404 Not Found; check the path")


def test_a_connection_is_kept():
    """Each request would cost a new connection, and over TLS a handshake."""
    with http_receiver() as receiver, pushing(receiver.endpoint) as pusher:
        wait_until(lambda: pusher.num_pushes >= 3)
        assert receiver.num_connections == 1


def test_threads_end():
    """A sidecar that is started often in one process would leave threads behind."""
    before = threading.active_count()
    with http_receiver() as receiver, pushing(receiver.endpoint) as pusher:
        wait_until(lambda: pusher.num_pushes)
    wait_until(lambda: threading.active_count() <= before)
