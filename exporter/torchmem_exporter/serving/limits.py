"""What the HTTP server allows its clients, and what it has counted of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds on what clients can take.

    Attributes:
        num_connections: open at once, or half of the process's descriptors where those are fewer; a new one closes the
            idlest, or is told to come again where all are being served.
        num_workers: threads that make answers.
        header_bytes: of a request's line and headers.
        handshake_seconds: for TLS.
        header_seconds: from the first byte of a request to the end of its headers; for a connection's first request,
            from the beginning of the connection.
        idle_seconds: between two requests of a connection: longer than usual scrape intervals.
        answer_seconds: for making an answer.
        write_seconds: for a client to take an answer.
        close_seconds: for a client to close in good order.
        drain_seconds: for running requests when the sidecar ends.
    """

    num_connections: int = 256
    num_workers: int = 4
    header_bytes: int = 16 << 10
    handshake_seconds: float = 5.0
    header_seconds: float = 5.0
    idle_seconds: float = 90.0
    answer_seconds: float = 30.0
    write_seconds: float = 10.0
    close_seconds: float = 1.0
    drain_seconds: float = 0.6


@dataclass
class ServerCounts:
    """What an operator needs to know of the server; written in its event loop, to be read anywhere."""

    requests: Counter[int] = field(default_factory=Counter)
    """Answers by status code."""
    num_shared: int = 0
    """Answers that were made for another request too."""
    num_in_flight: int = 0
    """Requests being answered now."""
    num_connections: int = 0
    """Open now."""
    num_evicted: int = 0
    """Idle connections closed to make room."""
    num_refused: int = 0
    """Connections turned away, all others being served."""
    num_timed_out: int = 0
    """Connections cut off because their client took too long."""
    num_handshakes_failed: int = 0
    """TLS connections that did not come about."""
