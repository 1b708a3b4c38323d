"""The HTTP server with real clients: the protocol, the limits, what is shared, and how it ends."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from hosting import GET, Paths, hosted, read_all, read_until, wait_for
from sidecars import DEADLINE_SECONDS
from torchmem_exporter.serving.routes import Response, Route

LARGE = bytes(range(256)) * (1 << 14)


class Gate:
    """An answer that is made when the test says so."""

    def __init__(self, shared=None):
        self.opened = threading.Event()
        self.num_made = 0
        self.route = Route(self._make, shared=shared)

    def _make(self, _request):
        self.num_made += 1
        assert self.opened.wait(DEADLINE_SECONDS)
        return Response((b"made\n",))


def test_keep_alive_serves_many_requests(monkeypatch):
    """Each scrape would cost a new connection, and with TLS a handshake."""
    with hosted() as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=DEADLINE_SECONDS)
        for method in ("GET", "HEAD", "GET"):
            connection.request(method, "/healthz")
            client = connection.sock
            response = connection.getresponse()
            assert (response.status, response.read()) == (200, b"" if method == "HEAD" else b"ok\n")
            assert connection.sock is client
        connection.close()
        assert server.counts.requests == {200: 3}


def test_requests_sent_ahead_are_answered_in_order():
    """A client that pipelines would get answers mixed up, or lose some."""
    paths = Paths(a=Route(lambda _: Response((b"first",))), b=Route(lambda _: Response((b"second",)), is_instant=True))
    ahead = b"".join(b"GET /%s HTTP/1.1\r\nHost: a\r\n\r\n" % name for name in (b"a", b"b", b"a"))
    with (
        hosted(paths) as server,
        server.connect(ahead + b"GET /b HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n") as client,
    ):
        data = read_all(client)
    bodies = [part.rpartition(b"\r\n\r\n")[2] for part in data.split(b"HTTP/1.1 200 OK")[1:]]
    assert bodies == [b"first", b"second", b"first", b"second"]


def test_old_clients_get_an_answer_and_a_close():
    """A probe that speaks HTTP/1.0 would wait for the end of the answer."""
    with hosted() as server, server.connect(b"GET /healthz HTTP/1.0\r\n\r\n") as client:
        assert read_all(client).endswith(b"\r\n\r\nok\n")


def test_large_answers_arrive_whole():
    """A scrape would be cut or mixed up where the client reads more slowly than the server sends."""
    pieces = (b"a", LARGE, b"b" * 70_000, b"", b"c")
    with hosted(Paths(large=Route(lambda _: Response(pieces)))) as server:
        assert server.ask("/large").body == b"".join(pieces)
        head = server.ask("/large", "HEAD")
    assert (head.body, head.headers["Content-Length"]) == (b"", str(sum(map(len, pieces))))


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        pytest.param(b"POST /healthz HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nhello", 413, id="body"),
        pytest.param(b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999\r\n\r\n", 413, id="promised body"),
        pytest.param(b"GET / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 413, id="chunks"),
        pytest.param(b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"x" * 40_000 + b"\r\n\r\n", 431, id="large header"),
        pytest.param(b"GET /" + b"x" * 40_000, 431, id="large path"),
        pytest.param(b"GET / HTTP/1.1\r\n\r\n", 400, id="no host"),
        pytest.param(b"nonsense\r\n\r\n", 400, id="nonsense"),
        pytest.param(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64), 400, id="TLS"),
        pytest.param(
            b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", 400, id="two lengths"
        ),
    ],
)
def test_what_is_no_plain_request_is_refused_and_closed(sent, status):
    """A client could fill the memory, or slip a request past what stands in front."""
    with hosted() as server, server.connect(sent) as client:
        data = read_all(client)
        assert data.startswith(b"HTTP/1.1 %d " % status)
        assert data.count(b"HTTP/1.1 ") == 1
        assert b"Connection: close" in data
        assert server.ask().status == 200


def test_alike_requests_share_one_answer():
    """Two hundred scrapes a second would each cost a reading of all records."""
    gate = Gate(shared=lambda request: request.headers.get("accept"))
    with hosted(Paths(metrics=gate.route)) as server, ThreadPoolExecutor(32) as clients:
        asked = [clients.submit(server.ask, "/metrics") for _ in range(20)]
        others = [clients.submit(server.ask, "/metrics", headers={"Accept": "b"}) for _ in range(5)]
        wait_for(lambda: server.counts.num_in_flight == 25)
        assert server.ask().status == 200
        gate.opened.set()
        assert {future.result().body for future in (*asked, *others)} == {b"made\n"}
        assert (gate.num_made, server.counts.num_shared) == (2, 23)
        server.ask("/metrics")
        assert gate.num_made == 3


def test_health_is_answered_while_every_worker_is_busy():
    """A kubelet would kill the sidecar because its directory is slow."""
    gate = Gate()
    with hosted(Paths(slow=gate.route), num_workers=2) as server, ThreadPoolExecutor(8) as clients:
        asked = [clients.submit(server.ask, "/slow") for _ in range(8)]
        wait_for(lambda: gate.num_made == 2)
        assert server.ask("/healthz").status == 200
        gate.opened.set()
        assert {future.result().status for future in asked} == {200}


def test_an_answer_that_takes_too_long_is_given_up():
    """A directory that does not answer would hold every scraper's connection for ever."""
    gate = Gate()
    with hosted(Paths(slow=gate.route), answer_seconds=0.1) as server:
        assert server.ask("/slow").status == 503
        gate.opened.set()


@pytest.mark.parametrize("sent", [b"", b"GET /healthz HTTP/1.1\r\nHos", GET + b"GET /he"])
def test_a_client_that_does_not_go_on_is_cut_off(sent):
    """Half-sent requests would pile up until nobody gets in."""
    with hosted(header_seconds=0.2, idle_seconds=60) as server, server.connect(sent) as client:
        began = time.monotonic()
        read_all(client)
        assert time.monotonic() - began < 20
        assert server.counts.num_timed_out == 1
        wait_for(lambda: server.counts.num_connections == 0)


def test_a_client_that_sends_byte_by_byte_is_cut_off():
    """A client could keep a connection by sending a byte now and then."""
    with hosted(header_seconds=0.3) as server, server.connect() as client:
        began = time.monotonic()
        with contextlib.suppress(OSError):
            for byte in GET * 100:
                client.sendall(bytes((byte,)))
                time.sleep(0.02)
        assert time.monotonic() - began < 20


def test_an_idle_connection_is_closed():
    """Connections that nobody uses would be kept for ever."""
    with hosted(idle_seconds=0.2) as server, server.connect(GET) as client:
        assert read_all(client).endswith(b"ok\n")
        assert server.counts.num_timed_out == 0


def test_a_client_that_does_not_read_is_cut_off():
    """Each such client would hold the memory of an answer for ever."""
    large = Route(lambda _: Response((LARGE,) * 4))
    with hosted(Paths(large=large), write_seconds=0.3) as server, socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect(("127.0.0.1", server.port))
        deaf.sendall(b"GET /large HTTP/1.1\r\nHost: a\r\n\r\n")
        wait_for(lambda: server.counts.num_timed_out == 1)
        wait_for(lambda: server.counts.num_connections == 0)
        assert len(read_all(deaf)) < 4 * len(LARGE)


def test_a_new_client_takes_the_place_of_the_idlest():
    """Idle clients could keep a scraper out."""
    with hosted(num_connections=2, header_seconds=60) as server, server.connect() as silent:
        wait_for(lambda: server.counts.num_connections == 1)
        with server.connect(GET) as first:
            read_until(first, b"ok\n")
            with server.connect(GET) as third:
                assert read_until(third, b"ok\n")
                assert read_all(silent) == b""
                assert server.counts.num_evicted == 1
                first.sendall(GET)
                assert read_until(first, b"ok\n")


def test_a_client_too_many_is_told_to_come_again():
    """Requests being answered would be dropped for new ones, or connections grow without bound."""
    gate = Gate()
    with hosted(Paths(slow=gate.route), num_connections=2) as server, ThreadPoolExecutor(2) as clients:
        asked = [clients.submit(server.ask, "/slow") for _ in range(2)]
        wait_for(lambda: server.counts.num_in_flight == 2)
        with server.connect() as third:
            assert read_all(third).startswith(b"HTTP/1.1 503 ")
        gate.opened.set()
        assert {future.result().status for future in asked} == {200}
        assert (server.counts.num_refused, server.counts.num_evicted) == (1, 0)
        assert server.ask().status == 200


def test_running_requests_end_before_the_server():
    """A scrape at the moment of a restart would be lost."""
    gate = Gate()
    with hosted(Paths(slow=gate.route), drain_seconds=DEADLINE_SECONDS) as server, ThreadPoolExecutor(2) as clients:
        asked = clients.submit(server.ask, "/slow")
        wait_for(lambda: gate.num_made == 1)
        with server.connect(GET) as idle:
            read_until(idle, b"ok\n")
            ending = clients.submit(server.stop)
            assert read_all(idle) == b""
        with pytest.raises(ConnectionRefusedError):
            server.connect()
        gate.opened.set()
        reply = asked.result()
        ending.result()
    assert (reply.status, reply.headers["Connection"]) == (200, "close")


def test_nobody_holds_up_the_end():
    """A stuck request would keep the sidecar from ending."""
    gate = Gate()
    with hosted(Paths(slow=gate.route), drain_seconds=0.1) as server:
        with server.connect(b"GET /slow HTTP/1.1\r\nHost: a\r\n\r\n") as client:
            wait_for(lambda: gate.num_made == 1)
            began = time.monotonic()
            server.stop()
            assert time.monotonic() - began < 20
            assert read_all(client) == b""
        gate.opened.set()


def test_a_fault_of_one_connection_costs_no_other(caplog):
    """One failure inside would end the server."""
    with hosted(Paths(bad=Route(lambda _: None, is_instant=True, is_open=True))) as server:
        with server.connect(b"GET /bad HTTP/1.1\r\nHost: a\r\n\r\n") as client:
            assert read_all(client) == b""
        assert server.ask().status == 200
    assert "a connection failed" in caplog.text
