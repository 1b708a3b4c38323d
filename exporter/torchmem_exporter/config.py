"""What the sidecar runs on, judged before anything starts.

Invariant: a ``ValidatedConfig`` can only be had from ``validate``; whoever holds one need not check it again.
"""

from __future__ import annotations

import ipaddress
import math
import os
from collections.abc import Mapping
from dataclasses import InitVar, dataclass
from pathlib import Path

from torchmem.errors import ConfigError
from torchmem.wire.store import default_dir

DEFAULT_PORT = 20471
DEFAULT_LISTEN = f"127.0.0.1:{DEFAULT_PORT}"
DEFAULT_STALE_AFTER_SECONDS = 60.0

_VALIDATED = object()


@dataclass(frozen=True, kw_only=True)
class ValidatedConfig:
    """Settings that can be used as they are.

    Attributes:
        directory: where the ranks leave their records; may not exist yet.
        host: address to listen on.
        port: port to listen on; 0 lets the system pick one.
        stale_after_seconds: age past which the record of a living rank counts as stale.
    """

    directory: Path
    host: str
    port: int
    stale_after_seconds: float
    proof: InitVar[object]

    def __post_init__(self, proof: object) -> None:
        if proof is not _VALIDATED:
            raise TypeError("a ValidatedConfig is made by torchmem_exporter.config.validate only")


def validate(
    *,
    directory: str | os.PathLike[str] | None = None,
    listen: str = DEFAULT_LISTEN,
    stale_after: float = DEFAULT_STALE_AFTER_SECONDS,
    allow_open_bind: bool = False,
    environment: Mapping[str, str] | None = None,
) -> ValidatedConfig:
    """Judges the settings of the command line.

    Args:
        directory: the directory of records; without one ``TORCHMEM_DIR``, else the library's default.
        listen: ``HOST:PORT``; an IPv6 address in brackets; no host means every address.
        stale_after: seconds.
        allow_open_bind: whether an address that other machines can reach is meant.
        environment: instead of the process's own.

    Raises:
        ConfigError: one line that says which setting cannot be used and what to give instead.
    """
    environment = os.environ if environment is None else environment
    chosen = Path(directory or environment.get("TORCHMEM_DIR") or default_dir()).absolute()
    if chosen.is_symlink():
        raise ConfigError(f"{chosen} is a symbolic link: give --dir the directory itself")
    if chosen.exists() and not chosen.is_dir():
        raise ConfigError(f"{chosen} is not a directory: give --dir the directory of the records")
    if not (math.isfinite(stale_after) and stale_after > 0):
        raise ConfigError(f"--stale-after {stale_after:g}: give a positive number of seconds")
    host, port = _address(listen)
    if not allow_open_bind and not _is_loopback(host):
        raise ConfigError(
            f"--listen {listen} can be reached from other machines, without encryption or a password: "
            "listen on 127.0.0.1, or say --allow-open-bind if that is meant"
        )
    return ValidatedConfig(
        directory=chosen, host=host, port=port, stale_after_seconds=float(stale_after), proof=_VALIDATED
    )


def _address(listen: str) -> tuple[str, int]:
    host, colon, port = listen.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ConfigError(f"--listen {listen}: write an IPv6 address in brackets, as in [::1]:{DEFAULT_PORT}")
    if not colon or not (port.isascii() and port.isdecimal()) or int(port) > 0xFFFF:  # noqa: PLR2004  # the last port
        raise ConfigError(f"--listen {listen}: give HOST:PORT, as in {DEFAULT_LISTEN}")
    return host or "0.0.0.0", int(port)  # noqa: S104  # judged by the caller like any other open address


def _is_loopback(host: str) -> bool:
    """Whether only this machine reaches the address; a name other than localhost may resolve to anything."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
