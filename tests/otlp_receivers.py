"""Real OTLP receivers in this process, over HTTP and gRPC, that decode every point and misbehave when told to."""

from __future__ import annotations

import contextlib
import gzip
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

import grpc
from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)

from torchmem_exporter.otlp.transport import GRPC_METHOD

NO_RECORDED_VALUE = 1
LOOPBACK = "127.0.0.1"


class Point(NamedTuple):
    """A decoded point."""

    metric: str
    labels: tuple[tuple[str, str], ...]
    value: float | None
    """None where there is no recorded value."""
    time_ns: int
    start_ns: int
    resource: dict
    kind: str
    """``gauge``, ``counter`` or ``updown``."""

    @property
    def key(self):
        """Which series it is of, by resource too."""
        return tuple(sorted((k, str(v)) for k, v in self.resource.items())), self.metric, self.labels


def decode(body):
    """All points of a message, in its order."""
    found = []
    for resource_metrics in ExportMetricsServiceRequest.FromString(body).resource_metrics:
        resource = {a.key: _value(a.value) for a in resource_metrics.resource.attributes}
        for scope in resource_metrics.scope_metrics:
            assert scope.scope.name == "torchmem"
            for metric in scope.metrics:
                found += [
                    _point(metric, point, resource) for point in getattr(metric, metric.WhichOneof("data")).data_points
                ]
    return found


def _value(any_value):
    return getattr(any_value, any_value.WhichOneof("value"))


def _point(metric, point, resource):
    kind = "gauge"
    if metric.WhichOneof("data") == "sum":
        assert metric.sum.aggregation_temporality == 2
        kind = "counter" if metric.sum.is_monotonic else "updown"
    which = point.WhichOneof("value")
    assert (which is None) == (point.flags == NO_RECORDED_VALUE)
    labels = tuple(sorted((a.key, a.value.string_value) for a in point.attributes))
    value = getattr(point, which) if which else None
    return Point(metric.name, labels, value, point.time_unix_nano, point.start_time_unix_nano, resource, kind)


@dataclass
class Reply:
    """What a receiver does with a request.

    Attributes:
        status: of HTTP, or the name of gRPC's code.
        headers: of HTTP.
        message: in the body, or the details.
        num_rejected: points refused of an accepted request.
        details: bytes of ``grpc-status-details-bin``.
        seconds: before it answers.
    """

    status: int | str = 200
    headers: dict = field(default_factory=dict)
    message: str = ""
    num_rejected: int = 0
    details: bytes = b""
    seconds: float = 0.0

    @property
    def is_ok(self):
        return self.status in (200, "OK")

    def body(self):
        response = ExportMetricsServiceResponse()
        if self.num_rejected or self.message:
            response.partial_success.rejected_data_points = self.num_rejected
            response.partial_success.error_message = self.message
        return (response if self.is_ok else Status(message=self.message)).SerializeToString()


class Receiver:
    """What has arrived, and what to answer.

    Attributes:
        reply: to each request, until another is set.
        bodies: of the accepted requests, decompressed.
        refused: of the others.
        headers: of the last request.
        endpoint: its address.
        num_connections: over which requests came; of HTTP only.
    """

    def __init__(self):
        self.reply = Reply()
        self.bodies = []
        self.refused = []
        self.headers = {}
        self.path = ""
        self.endpoint = ""
        self.num_connections = 0
        self._changed = threading.Condition()
        self._ending = threading.Event()

    def take(self, body, headers, path=""):
        """Notes a request and returns the answer to it."""
        with self._changed:
            reply = self.reply
            (self.bodies if reply.is_ok else self.refused).append(body)
            self.headers, self.path = headers, path
            self._changed.notify_all()
        self._ending.wait(reply.seconds)
        return reply

    def wait_for(self, condition, seconds=60.0):
        """Waits until a condition on this receiver holds, checked at every request."""
        with self._changed:
            assert self._changed.wait_for(lambda: condition(self), seconds), "it did not arrive in time"

    def points(self):
        """All points of all accepted requests."""
        return [point for body in list(self.bodies) for point in decode(body)]

    def pushes(self):
        """The points by push, which all have their time in common but for those without a value."""
        found = {}
        for point in self.points():
            if point.value is not None:
                found.setdefault(point.time_ns, []).append(point)
        return list(found.values())

    def end(self):
        self._ending.set()


def _handler(receiver):
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def setup(self):
            super().setup()
            receiver.num_connections += 1

        def do_POST(self):
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            reply = receiver.take(body, {k.lower(): v for k, v in self.headers.items()}, self.path)
            answer = reply.body()
            with contextlib.suppress(OSError):
                self.send_response(reply.status)
                for name, value in {"content-type": "application/x-protobuf", **reply.headers}.items():
                    self.send_header(name, value)
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

        def log_message(self, *_arguments):
            """Nothing on the terminal of the tests."""

    return Handler


class _QuietServer(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request, client_address):
        """A client that hung up is part of the tests."""


@contextlib.contextmanager
def http_receiver(tls=None, port=0):
    """OTLP/HTTP, on a free port unless told; ``tls`` is a server's SSL context."""
    receiver = Receiver()
    server = _QuietServer((LOOPBACK, port), _handler(receiver))
    if tls:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    receiver.endpoint = f"{'https' if tls else 'http'}://{'localhost' if tls else LOOPBACK}:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield receiver
    finally:
        receiver.end()
        server.shutdown()
        thread.join()
        server.server_close()


class _GrpcHandler(grpc.GenericRpcHandler):
    def __init__(self, receiver):
        self.receiver = receiver

    def service(self, details):
        if details.method != GRPC_METHOD:
            return None
        return grpc.unary_unary_rpc_method_handler(self.export)

    def export(self, body, context):
        reply = self.receiver.take(body, dict(context.invocation_metadata()))
        if not reply.is_ok:
            if reply.details:
                context.set_trailing_metadata((("grpc-status-details-bin", reply.details),))
            context.abort(grpc.StatusCode[reply.status], reply.message)
        return reply.body()


@contextlib.contextmanager
def grpc_receiver(credentials=None, port=0):
    """OTLP/gRPC with gRPC's default limits, on a free port unless told; ``credentials`` are a server's."""
    receiver = Receiver()
    server = grpc.server(ThreadPoolExecutor(4), handlers=[_GrpcHandler(receiver)])
    if credentials:
        port = server.add_secure_port(f"localhost:{port}", credentials)
    else:
        port = server.add_insecure_port(f"{LOOPBACK}:{port}")
    receiver.endpoint = f"https://localhost:{port}" if credentials else f"http://{LOOPBACK}:{port}"
    server.start()
    try:
        yield receiver
    finally:
        receiver.end()
        server.stop(0).wait()


RECEIVERS = {"http/protobuf": http_receiver, "grpc": grpc_receiver}


def wait_until(condition, seconds=60.0):
    """Polls until a condition holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(0.01)
