"""The sidecar's settings: what cannot be used cannot be represented.

Invariant: a ``ValidatedConfig`` checks itself whenever one is made, so one that exists can be run.
"""

from __future__ import annotations

import ipaddress
import math
from dataclasses import dataclass
from pathlib import Path

from torchmem.errors import ConfigError

DEFAULT_LISTEN = "127.0.0.1:20471"
DEFAULT_STALE_AFTER_SECONDS = 60.0
_MAX_PORT = 65535


@dataclass(frozen=True, kw_only=True)
class ValidatedConfig:
    """Settings of one sidecar.

    Attributes:
        directory: where the jobs leave their records; need not exist yet.
        host: IP address to listen on.
        port: TCP port; 0 lets the system choose.
        stale_after: seconds after which the record of a live rank counts as old.
        allow_open_bind: whether other machines may be served, although there is neither TLS nor authentication.

    Raises:
        ConfigError: a setting cannot be used; one line that names the fix.
    """

    directory: Path
    host: str
    port: int
    stale_after: float = DEFAULT_STALE_AFTER_SECONDS
    allow_open_bind: bool = False

    def __post_init__(self) -> None:
        if not self.directory.is_absolute():
            raise ConfigError(f"the directory {self.directory} is not absolute: give its whole path")
        if not 0 <= self.port <= _MAX_PORT:
            raise ConfigError(f"port {self.port} does not exist: give one from 1 to {_MAX_PORT}")
        if not (math.isfinite(self.stale_after) and self.stale_after > 0):
            raise ConfigError(f"--stale-after {self.stale_after:g}: give a positive number of seconds")
        try:
            is_loopback = ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            raise ConfigError(
                f"--listen {self.host!r} is no IP address: give one, such as 127.0.0.1, [::1] or 0.0.0.0"
            ) from None
        if not (is_loopback or self.allow_open_bind):
            raise ConfigError(
                f"{self.host} can be reached from other machines, and this server has neither TLS nor authentication:"
                " listen on 127.0.0.1, or add --allow-open-bind where the network itself is trusted"
            )


def split_address(listen: str) -> tuple[str, int]:
    """Host and port of ``ADDRESS:PORT``, with an IPv6 address in brackets and ``localhost`` as 127.0.0.1.

    Raises:
        ConfigError: it is nothing of the kind.
    """
    host, colon, port = listen.rpartition(":")
    if not (colon and port.isascii() and port.isdecimal()):
        raise ConfigError(f"--listen {listen!r}: give an address and a port, such as {DEFAULT_LISTEN}")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ConfigError(f"--listen {listen!r}: put the IPv6 address in brackets, such as [::1]:{port}")
    return "127.0.0.1" if host == "localhost" else host, int(port)
