"""The sidecar's settings: what cannot be used cannot be represented.

Invariant: a ``ValidatedConfig`` checks itself whenever one is made, so one that exists can be run.
"""

from __future__ import annotations

import ipaddress
import math
from dataclasses import dataclass, field
from pathlib import Path

from torchmem.errors import ConfigError
from torchmem_exporter.budget import Budget
from torchmem_exporter.drift.held import HeldRun
from torchmem_exporter.logs import FORMATS, LEVELS
from torchmem_exporter.otlp.config import PushConfig

DEFAULT_LISTEN = "127.0.0.1:20471"
DEFAULT_STALE_AFTER_SECONDS = 60.0
DEFAULT_KEEP_DAYS = 14.0
DEFAULT_LOG_FORMAT = "logfmt"
DEFAULT_LOG_LEVEL = "info"
_MAX_PORT = 65535


@dataclass(frozen=True, kw_only=True)
class ValidatedConfig:
    """Settings of one sidecar.

    Attributes:
        directory: where the jobs leave their records; need not exist yet.
        host: IP address to listen on.
        port: TCP port; 0 lets the system choose.
        stale_after: seconds after which the record of a live rank counts as old.
        keep_days: how long after its last write what an ended job has left stays; 0 for always.
        budget: what a rank may cost in series.
        held: baselines that running jobs are held against.
        state_file: where what outlives the sidecar is kept; None for a file in the directory.
        push: where to push by OTLP; None for not at all.
        allow_open_bind: whether other machines may be served without TLS or without authentication.
        web_config: file with TLS and basic authentication, in the format of exporter-toolkit.
        bearer_token_file: file with a valid token on each line.
        log_format: one of ``logs.FORMATS``.
        log_level: one of ``logs.LEVELS``.

    Raises:
        ConfigError: a setting cannot be used; one line that names the fix.
    """

    directory: Path
    host: str
    port: int
    stale_after: float = DEFAULT_STALE_AFTER_SECONDS
    keep_days: float = DEFAULT_KEEP_DAYS
    budget: Budget = field(default_factory=Budget)
    held: tuple[HeldRun, ...] = ()
    state_file: Path | None = None
    push: PushConfig | None = None
    allow_open_bind: bool = False
    web_config: Path | None = None
    bearer_token_file: Path | None = None
    log_format: str = DEFAULT_LOG_FORMAT
    log_level: str = DEFAULT_LOG_LEVEL

    def __post_init__(self) -> None:
        if not self.directory.is_absolute():
            raise ConfigError(f"the directory {self.directory} is not absolute: give its whole path")
        if not 0 <= self.port <= _MAX_PORT:
            raise ConfigError(f"port {self.port} does not exist: give one from 1 to {_MAX_PORT}")
        if not (math.isfinite(self.stale_after) and self.stale_after > 0):
            raise ConfigError(f"--stale-after {self.stale_after:g}: give a positive number of seconds")
        if not (math.isfinite(self.keep_days) and self.keep_days >= 0):
            raise ConfigError(f"--keep-days {self.keep_days:g}: give a number of days, or 0 to keep everything")
        if self.log_format not in FORMATS:
            raise ConfigError(f"--log-format {self.log_format!r}: give {' or '.join(FORMATS)}")
        if self.log_level not in LEVELS:
            raise ConfigError(f"--log-level {self.log_level!r}: give one of {', '.join(LEVELS)}")
        try:
            ipaddress.ip_address(self.host)
        except ValueError:
            raise ConfigError(
                f"--listen {self.host!r} is no IP address: give one, such as 127.0.0.1, [::1] or 0.0.0.0"
            ) from None
        if self.exposed_host is not None and self.web_config is None:
            check_exposure(self.host, has_tls=False, has_authentication=self.bearer_token_file is not None)

    @property
    def keep_seconds(self) -> float:
        """How long what an ended job has left stays; infinite for always."""
        return self.keep_days * 86400 or math.inf

    @property
    def exposed_host(self) -> str | None:
        """The address where other machines reach it, and so need both TLS and authentication; else None."""
        return None if self.allow_open_bind or ipaddress.ip_address(self.host).is_loopback else self.host


def check_exposure(host: str, *, has_tls: bool, has_authentication: bool) -> None:
    """Refuses to be reached from other machines without protection.

    Raises:
        ConfigError: TLS or authentication is missing; one line that names the fix.
    """
    if has_tls and has_authentication:
        return
    if has_authentication:
        missing, fix = "no TLS", "add a certificate with --web-config"
    elif has_tls:
        missing = "no authentication"
        fix = "add basic_auth_users or client certificates to the --web-config file, or --bearer-token-file"
    else:
        missing, fix = "neither TLS nor authentication", "give it both with --web-config"
    raise ConfigError(
        f"{host} can be reached from other machines, and this server has {missing}: {fix}, listen on 127.0.0.1,"
        " or add --allow-open-bind where the network itself is trusted"
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
