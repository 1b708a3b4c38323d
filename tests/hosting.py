"""The sidecar's HTTP server in this process, with limits that a test can wait for, and clients of every manner."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import socket
import ssl
import threading
import time
from dataclasses import dataclass

from sidecars import DEADLINE_SECONDS, Reply
from torchmem_exporter.serving.limits import Limits
from torchmem_exporter.serving.routes import Response, Route
from torchmem_exporter.serving.security import Guard, Sources
from torchmem_exporter.serving.server import Server

GET = b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n"


class Paths:
    """Routes made by hand: path -> route; what is not there has an empty answer."""

    def __init__(self, **routes):
        self._routes = {f"/{name}": route for name, route in routes.items()}

    def route(self, request):
        return self._routes.get(request.path) or Route(lambda _: Response((b"ok\n",)), is_instant=True)


@dataclass
class Hosted:
    """A server that runs in a thread of this process."""

    server: Server
    guard: Guard
    stop: callable
    thread: threading.Thread

    @property
    def port(self):
        return self.server.port

    @property
    def counts(self):
        return self.server.counts

    def connect(self, data=b""):
        """A client that has sent something."""
        client = socket.create_connection(("127.0.0.1", self.port), timeout=DEADLINE_SECONDS)
        client.sendall(data)
        return client

    def ask(self, path="/healthz", method="GET", headers=None, tls=None):
        """One request, over TLS where a context is given."""
        if tls is None:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=DEADLINE_SECONDS)
        else:
            connection = http.client.HTTPSConnection("127.0.0.1", self.port, timeout=DEADLINE_SECONDS, context=tls)
        with contextlib.closing(connection):
            connection.request(method, path, headers=headers or {})
            response = connection.getresponse()
            return Reply(response.status, dict(response.headers), response.read())


@contextlib.contextmanager
def hosted(routes=None, sources=None, **limits):
    """A server on a free port of the loopback interface, stopped at the end."""
    guard = Guard(sources or Sources())
    server = Server(routes or Paths(), guard, "127.0.0.1", 0, limits=Limits(**limits))
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    def run():
        asyncio.set_event_loop(loop)
        loop.run_until_complete(server.serve(stop))
        loop.close()

    thread = threading.Thread(target=run)
    thread.start()

    def end():
        with contextlib.suppress(RuntimeError):  # it has ended
            loop.call_soon_threadsafe(stop.set)
        thread.join(DEADLINE_SECONDS)
        assert not thread.is_alive()

    try:
        yield Hosted(server, guard, end, thread)
    finally:
        end()


def read_all(client):
    """What a server sends until it closes; a reset counts as that."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while more := client.recv(1 << 16):
            data += more
    return data


def read_until(client, ending):
    """What a server sends up to some bytes."""
    data = b""
    while ending not in data:
        more = client.recv(1 << 16)
        assert more, data
        data += more
    return data


def wait_for(condition, seconds=DEADLINE_SECONDS):
    """Until a condition holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.005)


def client_tls(authority, certificate=None):
    """A client's TLS context that trusts an authority of trustme, with a certificate of its own where given."""
    context = ssl.create_default_context()
    authority.configure_trust(context)
    if certificate is not None:
        certificate.configure_cert(context)
    return context
