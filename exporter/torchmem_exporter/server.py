"""HTTP: the metrics, health, readiness and a page for people.

Invariants: a bounded number of workers, each connection with a time limit for reading and writing, so that idle or slow
clients cannot pile up; every answer states its length; only ``/metrics`` counts as a scrape.

Known limit: as many silent clients as there are workers delay a scrape by up to the time limit.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cheroot import wsgi

from torchmem.errors import ConfigError
from torchmem_exporter import __version__, landing, prometheus, samples

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

    from torchmem_exporter.reader import Reader

NUM_WORKERS = 8
TIMEOUT_SECONDS = 5
SHUTDOWN_SECONDS = 0.3
STOP_SECONDS = 0.7
MAX_HEADER_BYTES = 16 << 10

_GZIP = 16
"""Asks zlib for a gzip header."""

_TEXT = "text/plain; charset=utf-8"

logger = logging.getLogger("torchmem_exporter")


@dataclass(frozen=True)
class Response:
    """An answer."""

    pieces: tuple[bytes, ...]
    status: str = "200 OK"
    content_type: str = _TEXT
    headers: tuple[tuple[str, str], ...] = ()


def application(reader: Reader, timer: Callable[[], float] = time.perf_counter) -> WSGIApplication:
    """The sidecar as a WSGI application.

    Args:
        reader: of the directory to serve.
        timer: seconds, for the duration of a scrape.
    """

    def metrics(environ: WSGIEnvironment) -> Response:
        form = prometheus.negotiate(environ.get("HTTP_ACCEPT", ""))
        found = samples.scrape(reader, timer, is_scrape=environ["REQUEST_METHOD"] == "GET")
        pieces = prometheus.render(found, is_openmetrics=form.is_openmetrics)
        headers = [("Vary", "Accept, Accept-Encoding")]
        if accepts_gzip(environ.get("HTTP_ACCEPT_ENCODING", "")):
            pieces = packed(pieces)
            headers.append(("Content-Encoding", "gzip"))
        return Response(tuple(pieces), content_type=form.content_type, headers=tuple(headers))

    def healthz(_environ: WSGIEnvironment) -> Response:
        return Response((b"ok\n",))

    def readyz(_environ: WSGIEnvironment) -> Response:
        problem = reader.scan(is_scrape=False).problem
        return (
            Response((f"{problem}\n".encode(errors="replace"),), "503 Service Unavailable")
            if problem
            else Response((b"ok\n",))
        )

    def index(_environ: WSGIEnvironment) -> Response:
        page = landing.page(reader.scan(is_scrape=False), reader.directory)
        policy = ("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'")
        return Response((page,), content_type="text/html; charset=utf-8", headers=(policy,))

    routes = {"/": index, "/metrics": metrics, "/healthz": healthz, "/readyz": readyz}

    def respond(environ: WSGIEnvironment) -> Response:
        route = routes.get(environ["PATH_INFO"] or "/")
        if route is None:
            return Response((b"not found: see / for what is here\n",), "404 Not Found")
        if environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
            return Response((b"use GET or HEAD\n",), "405 Method Not Allowed", headers=(("Allow", "GET, HEAD"),))
        return route(environ)

    return _answering(respond)


def _answering(respond: Callable[[WSGIEnvironment], Response]) -> WSGIApplication:
    """The protocol around the answers; a fault while making one costs that request alone."""

    def app(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        try:
            response = respond(environ)
        except Exception:
            logger.exception("a request for %a failed", environ["PATH_INFO"])
            response = Response((b"the sidecar failed; its log says why\n",), "500 Internal Server Error")
        headers = [
            ("Content-Type", response.content_type),
            ("Content-Length", str(sum(map(len, response.pieces)))),
            ("Cache-Control", "no-store"),
            ("X-Content-Type-Options", "nosniff"),
            *response.headers,
        ]
        start_response(response.status, headers)
        return () if environ["REQUEST_METHOD"] == "HEAD" else response.pieces

    return app


def packed(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """The pieces as gzip, so fast that it costs less than sending what it saves."""
    compressor = zlib.compressobj(level=1, wbits=zlib.MAX_WBITS | _GZIP)
    for piece in pieces:
        yield compressor.compress(piece)
    yield compressor.flush()


def accepts_gzip(accept_encoding: str) -> bool:
    """Whether an ``Accept-Encoding`` header names gzip and does not refuse it."""
    for accepted in accept_encoding.lower().split(","):
        name, *parameters = (part.strip() for part in accepted.split(";"))
        if name == "gzip":
            return not any(parameter.rstrip("0") in ("q=", "q=0.") for parameter in parameters)
    return False


class _Server(wsgi.Server):
    """cheroot, which says why it could not bind and keeps clients' hang-ups out of the log."""

    bind_failure = ""

    def bind(self, family: Any, type: Any, proto: int = 0) -> Any:  # noqa: A002  # the overridden method's name
        try:
            return super().bind(family, type, proto)
        except OSError as error:
            self.bind_failure = str(error.strerror)
            raise

    def error_log(self, msg: str = "", level: int = logging.INFO, traceback: bool = False) -> None:  # noqa: FBT001, FBT002  # as overridden
        if level >= logging.ERROR:
            super().error_log(msg, level, traceback)


@dataclass(frozen=True)
class Serving:
    """A running server."""

    host: str
    port: int
    thread: threading.Thread

    @property
    def url(self) -> str:
        """Address of the landing page."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/"


@contextlib.contextmanager
def serving(app: WSGIApplication, host: str, port: int) -> Iterator[Serving]:
    """Serves until the block is left, then ends within a second, leaving a worker behind that a client still holds up.

    Raises:
        ConfigError: the address cannot be listened on; one line that names the fix.
    """
    # cheroot would take descriptor 3 for its socket, whatever it is and whoever may reach it.
    os.environ.pop("LISTEN_PID", None)
    server = _Server(
        (host, port),
        app,
        numthreads=NUM_WORKERS,
        max=NUM_WORKERS,
        server_name="torchmem-exporter",
        request_queue_size=4 * NUM_WORKERS,
        timeout=TIMEOUT_SECONDS,
        shutdown_timeout=SHUTDOWN_SECONDS,  # type: ignore[arg-type]  # its stub says whole seconds; it is a wait
    )
    server.software = f"torchmem-exporter/{__version__}"
    server.max_request_header_size = MAX_HEADER_BYTES
    server.max_request_body_size = 1
    server.expiration_interval = SHUTDOWN_SECONDS
    try:
        server.prepare()
    except OSError:
        reason = server.bind_failure
        raise ConfigError(f"cannot listen on {host}:{port} ({reason}): choose another address with --listen") from None
    thread = threading.Thread(target=server.serve, name="torchmem-exporter-accept", daemon=True)
    thread.start()
    try:
        yield Serving(host, server.bind_addr[1], thread)
    finally:
        # A worker that sends to a client that does not read would hold up the end for as long as its time limit.
        stopping = threading.Thread(target=server.stop, name="torchmem-exporter-stop", daemon=True)
        stopping.start()
        stopping.join(STOP_SECONDS)
        thread.join(STOP_SECONDS - SHUTDOWN_SECONDS if stopping.is_alive() else None)
