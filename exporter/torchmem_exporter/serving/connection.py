"""One client's connection: HTTP/1.1 over TCP or TLS, one request after the other.

Invariants: a client can neither send nor leave unread more than ``Limits`` allow, nor take longer: a timer cuts the
connection off. Of an answer no more is copied at a time than ``_WRITE_BYTES``. Whatever a client does costs its own
connection alone.

h11 decides what is HTTP; requests that were sent ahead wait until the one before is answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from email.utils import formatdate
from http import HTTPStatus
from urllib.parse import urlsplit

import h11

from torchmem_exporter.logs import log
from torchmem_exporter.serving.flight import SingleFlight
from torchmem_exporter.serving.limits import Limits, ServerCounts
from torchmem_exporter.serving.routes import Request, Response, Route, Routes, plain
from torchmem_exporter.serving.security import BusyError, Guard
from torchmem_exporter.serving.tls import is_allowed

_READ_BYTES = 4096
_WRITE_BYTES = 64 << 10
_LINGER_BYTES = 256 << 10
_SERVER = ("Server", "torchmem-exporter")

logger = logging.getLogger(__name__)


@dataclass
class Service:
    """What all connections share.

    Attributes:
        is_ending: whether each answer is its connection's last.
    """

    routes: Routes
    guard: Guard
    limits: Limits
    counts: ServerCounts
    pool: ThreadPoolExecutor
    work: SingleFlight[Response]
    is_ending: bool = False


class Connection:
    """A client's connection, from its socket to its end.

    Attributes:
        is_busy: whether a request is being answered.
        since: when that last changed, by the event loop's clock.
    """

    def __init__(self, service: Service, client: socket.socket) -> None:
        self._loop = asyncio.get_running_loop()
        self.is_busy = False
        self.since = self._loop.time()
        self._service = service
        self._client = client
        self._is_taken_over = False
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=service.limits.header_bytes)
        self._reader = asyncio.StreamReader(limit=service.limits.header_bytes, loop=self._loop)
        self._writer: asyncio.StreamWriter | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> asyncio.Task[None]:
        """Serves the client in a task of its own, which never raises."""
        self._task = self._loop.create_task(self._run())
        self._task.add_done_callback(self._close_unused)
        return self._task

    def abort(self) -> None:
        """Ends it at once."""
        if self._writer is not None:
            self._writer.transport.abort()
        elif self._task is not None:
            self._task.cancel()

    def _close_unused(self, _task: asyncio.Task[None]) -> None:
        """Closes the socket where the task was ended before it ran; later it belongs to a transport."""
        if not self._is_taken_over:
            self._client.close()

    async def _run(self) -> None:
        counts = self._service.counts
        counts.num_connections += 1
        try:
            self._writer = await self._opened()
            if self._writer is not None:
                await self._converse(self._writer)
        except OSError as error:
            logger.debug("a client went away: %s", error)
        except asyncio.CancelledError:
            logger.debug("a connection was ended")
        except Exception:
            logger.exception("a connection failed")
        finally:
            counts.num_connections -= 1
            self._within(None)
            if self._writer is not None:
                self._writer.transport.abort()

    async def _opened(self) -> asyncio.StreamWriter | None:
        """A writer to the client, after a TLS handshake where that is served; None where there will be none."""
        guard, limits = self._service.guard, self._service.limits
        protocol = asyncio.StreamReaderProtocol(self._reader, loop=self._loop)
        context = guard.context()
        self._is_taken_over = True
        try:
            transport, _ = await self._loop.connect_accepted_socket(
                lambda: protocol,
                self._client,
                ssl=context,
                ssl_handshake_timeout=limits.handshake_seconds if context else None,
            )
        except (OSError, ssl.CertificateError) as error:
            self._note_refusal(str(error))
            return None
        tls = transport.get_extra_info("ssl_object")
        if tls is not None and not is_allowed(tls, guard.allowed_sans()):
            transport.abort()
            self._note_refusal("the client's certificate has no allowed name")
            return None
        return asyncio.StreamWriter(transport, protocol, self._reader, self._loop)

    def _note_refusal(self, reason: str) -> None:
        self._service.counts.num_handshakes_failed += 1
        log(logger, logging.DEBUG, "a TLS handshake failed", reason=reason)

    async def _converse(self, writer: asyncio.StreamWriter) -> None:
        """Answers one request after the other, then closes."""
        # So that a full buffer is the client's fault, and an answer counts as sent when the system has all of it.
        writer.transport.set_write_buffer_limits(0)
        is_first = True
        while await self._exchange(writer, is_first=is_first):
            is_first = False
        self._within(self._service.limits.close_seconds, self.abort)
        writer.close()
        await writer.wait_closed()

    async def _exchange(self, writer: asyncio.StreamWriter, *, is_first: bool) -> bool:
        """Answers the next request; whether another may follow."""
        try:
            head = await self._head(is_first=is_first)
            if head is None or writer.transport.is_closing():
                return False
            _check_bodiless(head, self._http)
        except h11.RemoteProtocolError as error:
            await self._refuse(writer, HTTPStatus(error.error_status_hint))
            return False
        with self._busy():
            request = _request(head)
            response = await self._answer(request)
            pieces = () if request.method == "HEAD" else response.pieces
            await self._send(writer, response, pieces, is_last=self._service.is_ending)
        is_open = self._http.our_state is h11.DONE and self._http.their_state is h11.DONE
        if self._service.is_ending or not is_open:
            return False
        self._http.start_next_cycle()
        return True

    async def _head(self, *, is_first: bool) -> h11.Request | None:
        """The next request up to the end of its headers; None where the client has no more."""
        limits = self._service.limits
        is_begun = is_first or bool(self._http.trailing_data[0])
        if is_begun:
            self._within(limits.header_seconds, self._expire)
        else:
            self._within(limits.idle_seconds, self.abort)
        while (event := self._http.next_event()) is h11.NEED_DATA:
            data = await self._reader.read(_READ_BYTES)
            if data and not is_begun:
                is_begun = True
                self._within(limits.header_seconds, self._expire)
            self._http.receive_data(data)
        self._within(None)
        return event if isinstance(event, h11.Request) else None

    async def _answer(self, request: Request) -> Response:
        route = self._service.routes.route(request)
        if route.is_open and route.is_instant:
            return route.answer(request)
        try:
            return await asyncio.wait_for(self._authorized(route, request), self._service.limits.answer_seconds)
        except BusyError:
            return plain(HTTPStatus.SERVICE_UNAVAILABLE, "too many passwords to check", ("Retry-After", "1"))
        except asyncio.TimeoutError:
            log(logger, logging.ERROR, "a request took too long", path=request.path)
            return plain(HTTPStatus.SERVICE_UNAVAILABLE, "the answer took too long")

    async def _authorized(self, route: Route, request: Request) -> Response:
        """The answer to those who may have it."""
        guard = self._service.guard
        if not route.is_open and not await guard.allows(request.headers.get("authorization", "")):
            return plain(HTTPStatus.UNAUTHORIZED, "who are you?", *guard.challenges())
        if route.is_instant:
            return route.answer(request)
        if route.shared is None:
            return await self._loop.run_in_executor(self._service.pool, route.answer, request)
        key = (request.path, route.shared(request))
        self._service.counts.num_shared += key in self._service.work
        return await self._service.work.run(key, lambda: route.answer(request))

    async def _refuse(self, writer: asyncio.StreamWriter, status: HTTPStatus) -> None:
        """Says that this cannot be answered, and sees to it that the client can read that."""
        if writer.transport.is_closing():
            return
        response = plain(status, "send a valid request, with small headers and no body")
        with self._busy():
            await self._send(writer, response, response.pieces, is_last=True)
        if writer.can_write_eof():
            # Closed with unread data, the connection would be reset, and the answer lost with it.
            writer.write_eof()
            self._within(self._service.limits.close_seconds, self.abort)
            num_bytes = 0
            while num_bytes < _LINGER_BYTES and (data := await self._reader.read(_WRITE_BYTES)):
                num_bytes += len(data)

    async def _send(
        self, writer: asyncio.StreamWriter, response: Response, pieces: tuple[bytes, ...], *, is_last: bool
    ) -> None:
        """Sends the answer, or its headers where there are no pieces."""
        self._service.counts.requests[int(response.status)] += 1
        self._within(self._service.limits.write_seconds, self._expire)
        headers = _merged(response.all_headers, self._service.guard.headers())
        headers += [("Date", formatdate(usegmt=True)), _SERVER]
        if is_last:
            headers.append(("Connection", "close"))
        head = self._http.send(
            h11.Response(status_code=response.status, reason=response.status.phrase, headers=headers)
        )
        for piece in pieces:
            self._http.send_with_data_passthrough(h11.Data(data=piece))
        self._http.send(h11.EndOfMessage())
        for data in _portions((head or b"", *pieces)):
            writer.write(data)
            await writer.drain()
            if writer.transport.is_closing():
                raise ConnectionAbortedError
        self._within(None)

    def _within(self, seconds: float | None, otherwise: Callable[[], None] | None = None) -> None:
        """From now on there are so many seconds until the next call of this, or else; None: no limit."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(seconds, otherwise) if seconds is not None and otherwise else None

    def _expire(self) -> None:
        self._service.counts.num_timed_out += 1
        logger.debug("a client took too long")
        self.abort()

    @contextlib.contextmanager
    def _busy(self) -> Iterator[None]:
        """While a request is answered."""
        counts = self._service.counts
        counts.num_in_flight += 1
        self.is_busy = True
        try:
            yield
        finally:
            counts.num_in_flight -= 1
            self.is_busy = False
            self.since = self._loop.time()


def _check_bodiless(head: h11.Request, http: h11.Connection) -> None:
    """Raises where a request has a body, or may have one."""
    is_chunked = any(name == b"transfer-encoding" for name, _ in head.headers)
    if is_chunked or not isinstance(http.next_event(), h11.EndOfMessage):
        raise h11.RemoteProtocolError("a body", error_status_hint=HTTPStatus.REQUEST_ENTITY_TOO_LARGE)


def _request(head: h11.Request) -> Request:
    headers: dict[str, str] = {}
    for name, value in head.headers:
        key, text = name.decode("latin-1"), value.decode("latin-1")
        headers[key] = f"{headers[key]},{text}" if key in headers else text
    target = head.target.decode("latin-1")
    path, _, query = (target if target.startswith("/") else _without_server(target)).partition("?")
    return Request(head.method.decode("latin-1"), path, headers, query)


def _without_server(target: str) -> str:
    """Path and query of a target that names the server too, as proxies send it."""
    try:
        parts = urlsplit(target)
    except ValueError:
        return target
    return f"{parts.path or '/'}?{parts.query}"


def _merged(headers: tuple[tuple[str, str], ...], configured: tuple[tuple[str, str], ...]) -> list[tuple[str, str]]:
    """The headers, with the configured ones in place of those of the same name."""
    replaced = {name.lower() for name, _ in configured}
    return [*(header for header in headers if header[0].lower() not in replaced), *configured]


def _portions(pieces: Iterable[bytes]) -> Iterator[bytes | memoryview]:
    """The same bytes in portions that are good to send: small pieces joined, large ones in slices."""
    small: list[bytes] = []
    num_bytes = 0
    for piece in pieces:
        if num_bytes + len(piece) <= _WRITE_BYTES:
            small.append(piece)
            num_bytes += len(piece)
            continue
        if small:
            yield b"".join(small)
        small, num_bytes = [], 0
        view = memoryview(piece)
        yield from (view[start : start + _WRITE_BYTES] for start in range(0, len(piece), _WRITE_BYTES))
    if small:
        yield b"".join(small)
