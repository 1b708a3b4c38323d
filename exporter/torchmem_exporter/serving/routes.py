"""What is answered under which path, whatever server carries it.

Invariants: an answer depends on the method, the path, the query and the headers alone; a fault while making one costs
that request alone and shows nothing of the insides; only ``GET /metrics`` counts as a scrape.

``/healthz`` is open to everybody: it says no more than an open port does, and a kubelet's probe has no credentials.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus

from torchmem_exporter import text
from torchmem_exporter.exposition import Exposition

TEXT = "text/plain; charset=utf-8"
_GZIP = 16
"""Asks zlib for a gzip header."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Request:
    """A question."""

    method: str
    path: str
    """Without the query."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """By their names in lower case; those that came several times joined by commas."""
    query: str = ""
    """What follows the question mark; the page's alone."""


@dataclass(frozen=True)
class Response:
    """An answer."""

    pieces: tuple[bytes, ...]
    status: HTTPStatus = HTTPStatus.OK
    content_type: str = TEXT
    headers: tuple[tuple[str, str], ...] = ()

    @property
    def num_bytes(self) -> int:
        """Length of the body."""
        return sum(map(len, self.pieces))

    @property
    def all_headers(self) -> tuple[tuple[str, str], ...]:
        """Those that describe the body, those that every answer has, and its own."""
        return (
            ("Content-Type", self.content_type),
            ("Content-Length", str(self.num_bytes)),
            ("Cache-Control", "no-store"),
            ("X-Content-Type-Options", "nosniff"),
            *self.headers,
        )


def plain(status: HTTPStatus, line: str, *headers: tuple[str, str]) -> Response:
    """An answer of one line."""
    return Response((f"{line}\n".encode(errors="replace"),), status, headers=headers)


@dataclass(frozen=True)
class Route:
    """How a request is answered.

    Attributes:
        make: the answer.
        is_instant: whether ``make`` waits for nothing, so that the server may call it wherever it is.
        is_open: whether it needs no authentication.
        shared: requests of one route for which this gives equal values may share one answer; None: each has its own.
    """

    make: Callable[[Request], Response]
    is_instant: bool = False
    is_open: bool = False
    shared: Callable[[Request], Hashable] | None = None

    def answer(self, request: Request) -> Response:
        """The answer; 500 where making it failed."""
        try:
            return self.make(request)
        except Exception:
            logger.exception("a request for %a failed", request.path)
            return plain(HTTPStatus.INTERNAL_SERVER_ERROR, "the sidecar failed; its log says why")


class Routes:
    """The sidecar's paths.

    Args:
        exposition: of the directory to serve.
    """

    def __init__(self, exposition: Exposition) -> None:
        self._exposition = exposition
        self._reader = exposition.reader
        self._routes = {
            "/": Route(self._page, shared=_asked),
            "/metrics": Route(self._metrics, shared=_variant),
            "/healthz": Route(_healthz, is_instant=True, is_open=True),
            "/readyz": Route(self._readyz, shared=_alike),
        }

    def route(self, request: Request) -> Route:
        """How the request is answered, also where that is a refusal."""
        route = self._routes.get(request.path or "/")
        if route is None:
            return Route(_not_found, is_instant=True)
        if request.method not in ("GET", "HEAD"):
            return Route(_not_allowed, is_instant=True)
        return route

    def answer(self, request: Request) -> Response:
        """The answer to a request, made here and now."""
        return self.route(request).answer(request)

    def _metrics(self, request: Request) -> Response:
        return metrics(self._exposition, request)

    def _readyz(self, _request: Request) -> Response:
        problem = self._reader.scan(None).problem
        return plain(HTTPStatus.SERVICE_UNAVAILABLE, problem) if problem else plain(HTTPStatus.OK, "ok")

    def _page(self, request: Request) -> Response:
        # Only now: most sidecars are never looked at, and the libraries for it would stay in memory.
        from torchmem_exporter.page.render import assets, rendered
        from torchmem_exporter.page.view import Looked

        looked = Looked(*self._exposition.judged(), str(self._reader.directory))
        status, body = rendered(looked, request.query)
        headers = [("Vary", "Accept-Encoding"), ("Content-Security-Policy", assets().policy)]
        headers.append(("Referrer-Policy", "no-referrer"))
        pieces: Iterable[bytes] = (body,)
        if accepts_gzip(request.headers.get("accept-encoding", "")):
            pieces = packed(pieces)
            headers.append(("Content-Encoding", "gzip"))
        return Response(tuple(pieces), status, "text/html; charset=utf-8", tuple(headers))


def metrics(exposition: Exposition, request: Request) -> Response:
    """A scrape, in the form and packing that the request asks for; HEAD takes nothing, so it counts for none."""
    form = text.negotiate(request.headers.get("accept", ""))
    consumer = "prometheus" if request.method == "GET" else None
    pieces: Iterable[bytes] = exposition.text(consumer, is_openmetrics=form.is_openmetrics)
    headers = [("Vary", "Accept, Accept-Encoding")]
    if accepts_gzip(request.headers.get("accept-encoding", "")):
        pieces = packed(pieces)
        headers.append(("Content-Encoding", "gzip"))
    return Response(tuple(pieces), content_type=form.content_type, headers=tuple(headers))


def _variant(request: Request) -> Hashable:
    """What ``metrics`` makes of a request: everything of it that the answer depends on."""
    form = text.negotiate(request.headers.get("accept", ""))
    return form, accepts_gzip(request.headers.get("accept-encoding", "")), request.method == "GET"


def _asked(request: Request) -> Hashable:
    """What the page makes of a request."""
    return request.query, accepts_gzip(request.headers.get("accept-encoding", ""))


def _alike(_request: Request) -> Hashable:
    return None


def _healthz(_request: Request) -> Response:
    return plain(HTTPStatus.OK, "ok")


def _not_found(_request: Request) -> Response:
    return plain(HTTPStatus.NOT_FOUND, "not found: see / for what is here")


def _not_allowed(_request: Request) -> Response:
    return plain(HTTPStatus.METHOD_NOT_ALLOWED, "use GET or HEAD", ("Allow", "GET, HEAD"))


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
