"""The HTTP server: it listens, bounds what clients can take, and ends in good order.

Invariants: the event loop never waits for an answer being made, so ``/healthz`` is quick whatever a scrape costs; the
number of connections and of threads is bounded; a stop lets running requests end, for a limited time.

Answers come from a small pool of threads, and requests for the same share one (see ``flight``).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
from concurrent.futures import ThreadPoolExecutor

from torchmem.errors import ConfigError
from torchmem_exporter.logs import log
from torchmem_exporter.serving.connection import Connection, Service
from torchmem_exporter.serving.flight import SingleFlight
from torchmem_exporter.serving.limits import Limits, ServerCounts
from torchmem_exporter.serving.routes import Routes
from torchmem_exporter.serving.security import Guard

_BACKLOG = 128
_RETRY_SECONDS = 0.1
_ABORT_SECONDS = 0.1
_BUSY = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nRetry-After: 1\r\nConnection: close\r\n\r\n"

logger = logging.getLogger(__name__)


class Server:
    """Listens from the moment it is made; serves in ``serve``.

    Args:
        routes: what is answered.
        guard: who may ask.
        host: IP address to listen on.
        port: TCP port; 0 lets the system choose.
        limits: on what clients can take.
        counts: where to count.

    Attributes:
        port: the port in use.
        counts: what was counted.

    Raises:
        ConfigError: the address cannot be listened on; one line that names the fix.
    """

    def __init__(
        self,
        routes: Routes,
        guard: Guard,
        host: str,
        port: int,
        *,
        limits: Limits | None = None,
        counts: ServerCounts | None = None,
    ) -> None:
        limits = limits or Limits()
        self.counts = counts or ServerCounts()
        self._host = host
        self._listener = _listener(host, port, limits)
        self.port: int = self._listener.getsockname()[1]
        self._pool = ThreadPoolExecutor(limits.num_workers, thread_name_prefix="torchmem-exporter-answer")
        self._service = Service(routes, guard, limits, self.counts, self._pool, SingleFlight(self._pool))
        self._connections: dict[Connection, asyncio.Task[None]] = {}
        # Half of the descriptors are for reading records and sending them elsewhere.
        num_descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._max_connections = max(1, min(limits.num_connections, num_descriptors // 2))

    @property
    def url(self) -> str:
        """Address of the page."""
        scheme = "https" if self._service.guard.is_tls else "http"
        return f"{scheme}://{_address(self._host, self.port)}/"

    async def serve(self, stop: asyncio.Event) -> None:
        """Serves until told to stop, then drains.

        Raises:
            OSError: the listening socket failed.
        """
        accepting = asyncio.ensure_future(self._accept())
        stopping = asyncio.ensure_future(stop.wait())
        try:
            await asyncio.wait({accepting, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if accepting.done():
                accepting.result()
        finally:
            accepting.cancel()
            stopping.cancel()
            with contextlib.suppress(asyncio.CancelledError, OSError):
                await accepting
            self._listener.close()
            await self._drain()
            self._service.guard.close()
            self._pool.shutdown(wait=False, cancel_futures=True)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                client, _ = await loop.sock_accept(self._listener)
            except OSError as error:
                if self._listener.fileno() < 0:
                    raise
                # Out of descriptors, most likely: those of idle clients are the ones to spare.
                log(logger, logging.WARNING, "a connection could not be accepted", error=str(error.strerror))
                self._evict_idlest()
                await asyncio.sleep(_RETRY_SECONDS)
                continue
            self._admit(client)
            # A full backlog is accepted without waiting: others have their turn in between.
            await asyncio.sleep(0)

    def _admit(self, client: socket.socket) -> None:
        if len(self._connections) >= self._max_connections and not self._evict_idlest():
            self.counts.num_refused += 1
            with client, contextlib.suppress(OSError):
                if not self._service.guard.is_tls:
                    client.send(_BUSY)
            return
        connection = Connection(self._service, client)
        task = connection.start()
        self._connections[connection] = task
        task.add_done_callback(lambda _: self._connections.pop(connection, None))

    def _evict_idlest(self) -> bool:
        """Closes the connection that has been idle for longest; whether there was one."""
        idle = [connection for connection in self._connections if not connection.is_busy]
        if not idle:
            return False
        idlest = min(idle, key=lambda connection: connection.since)
        del self._connections[idlest]
        idlest.abort()
        self.counts.num_evicted += 1
        return True

    async def _drain(self) -> None:
        """Lets running requests end, but nobody hold up the end."""
        self._service.is_ending = True
        for connection in [connection for connection in self._connections if not connection.is_busy]:
            connection.abort()
        for wait_seconds in (self._service.limits.drain_seconds, _ABORT_SECONDS):
            tasks = list(self._connections.values())
            if not tasks:
                return
            await asyncio.wait(tasks, timeout=wait_seconds)
            for connection, task in list(self._connections.items()):
                connection.abort()
                task.cancel()


def _listener(host: str, port: int, limits: Limits) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    is_any = host == "::" and socket.has_dualstack_ipv6()
    try:
        listener = socket.create_server((host, port), family=family, backlog=_BACKLOG, dualstack_ipv6=is_any)
    except OSError as error:
        where, reason = _address(host, port), error.strerror
        raise ConfigError(f"cannot listen on {where} ({reason}): choose another address with --listen") from None
    # Requests are small: what a client sends ahead stays with it.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2 * limits.header_bytes)
    listener.setblocking(False)  # noqa: FBT003  # its only parameter
    return listener


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
