"""What systemd wants to be told, by its notification protocol (see sd_notify(3)).

Invariants: where no socket is named nothing happens; a service manager that does not listen costs nothing.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

READY = b"READY=1"
STOPPING = b"STOPPING=1"
ALIVE = b"WATCHDOG=1"
_MICRO = 1e-6


class Notifier:
    """Tells the service manager how the sidecar is.

    Args:
        environment: where the manager names its socket and the watchdog's limit.

    Attributes:
        watchdog_seconds: silence after which the manager takes the process for dead; None: it does not watch.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        name = environment.get("NOTIFY_SOCKET", "")
        # A name that begins with @ is in the abstract namespace, outside of the file system.
        self._address = "\0" + name[1:] if name.startswith("@") else name
        self.watchdog_seconds = _watchdog_seconds(environment) if name else None

    def tell(self, state: bytes) -> None:
        """Sends a state; never waits, and never raises."""
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK) as end:
                end.sendto(state, self._address)
        except (OSError, ValueError):
            return


def _watchdog_seconds(environment: Mapping[str, str]) -> float | None:
    try:
        pid = int(environment.get("WATCHDOG_PID", os.getpid()))
        seconds = int(environment.get("WATCHDOG_USEC", "0")) * _MICRO
    except ValueError:
        return None
    return seconds if seconds > 0 and pid == os.getpid() else None
