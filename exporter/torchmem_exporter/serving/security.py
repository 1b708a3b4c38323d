"""Who may ask: basic authentication, bearer tokens, and the TLS of new connections, all following their files.

Invariants: where users or tokens are configured, nothing but an open route is answered without one of them; a check
takes as long for an unknown user as for a known one; no password is kept, only keyed hashes of those that were right.
A reload can change users, tokens and certificates, but neither switch TLS on or off nor drop authentication: a file
caught half-written must not open the door. What protects must suffice for the address, also after a reload.

bcrypt runs in one thread of its own, so that a flood of wrong passwords takes no worker from those who are let in.

Known limit: such a flood delays the first request of a client with the right password, or has it told to come again.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
import secrets
import ssl
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import bcrypt

from torchmem.errors import ConfigError
from torchmem_exporter.config import check_exposure
from torchmem_exporter.serving.flight import SingleFlight
from torchmem_exporter.serving.reload import Loaded, Reloaded
from torchmem_exporter.serving.tls import files_of, make_context
from torchmem_exporter.serving.webconfig import WebConfig, read_web_config

NUM_CACHED = 128
MAX_WAITING = 32
"""Passwords that may wait to be checked; beyond that a client is told to come again."""
MAX_TOKEN_FILE_BYTES = 1 << 16
MAX_PASSWORD_BYTES = 72
"""More of it bcrypt does not look at."""

REALM = "torchmem-exporter"
_UNPROTECTED = WebConfig()
_TOKEN = re.compile(rb"[A-Za-z0-9._~+/-]+=*")


class BusyError(Exception):
    """Too many passwords wait to be checked."""


class _Credentials(NamedTuple):
    user: str
    password: bytes


@dataclass(frozen=True)
class _Web:
    """A web-config file with what was made of it."""

    config: WebConfig
    context: ssl.SSLContext | None
    hashes: tuple[bytes, ...]


@dataclass(frozen=True)
class Sources:
    """Where protection comes from.

    Attributes:
        web_config: file in the format of exporter-toolkit, or None.
        bearer_token_file: a valid token on each line, or None.
        exposed_host: address that needs TLS and authentication; None where neither the address nor the user asks.
    """

    web_config: Path | None = None
    bearer_token_file: Path | None = None
    exposed_host: str | None = None


@dataclass
class Counts:
    """What became of authentication, for the sidecar's own metrics."""

    num_rejected: int = 0
    num_password_checks: int = 0
    num_busy: int = 0


class Guard:
    """Decides who may ask; used in one event loop.

    Args:
        sources: the files to follow.

    Attributes:
        counts: see ``Counts``.

    Raises:
        ConfigError: a file cannot be used, or what they say does not protect the address; one line.
    """

    def __init__(self, sources: Sources) -> None:
        self.counts = Counts()
        self._sources = sources
        self._tokens = Reloaded(sources.bearer_token_file, _load_tokens) if sources.bearer_token_file else None
        self._web = Reloaded(sources.web_config, self._load_web) if sources.web_config else None
        if self._web is None:
            self._check(_UNPROTECTED)
        self._key = secrets.token_bytes()
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="torchmem-exporter-password")
        self._checks: SingleFlight[bool] = SingleFlight(self._pool)

    @property
    def num_reload_failures(self) -> int:
        """Changed files that could not be used."""
        return sum(followed.num_failures for followed in (self._web, self._tokens) if followed)

    @property
    def is_tls(self) -> bool:
        """Whether TLS is served, which does not change while the sidecar runs."""
        return self._web is not None and self._web.current().context is not None

    def context(self) -> ssl.SSLContext | None:
        """The TLS context for a new connection."""
        return self._web.current().context if self._web else None

    def allowed_sans(self) -> tuple[str, ...]:
        """Names of which a client's certificate must have one; empty for any."""
        config = self._config()
        return config.tls.client_allowed_sans if config.tls else ()

    def headers(self) -> tuple[tuple[str, str], ...]:
        """What every answer carries besides its own headers."""
        return self._config().headers

    def challenges(self) -> tuple[tuple[str, str], ...]:
        """The headers of a refusal: how one may authenticate."""
        ways = []
        if self._config().users:
            ways.append(f'Basic realm="{REALM}", charset="UTF-8"')
        if self._tokens is not None:
            ways.append(f'Bearer realm="{REALM}"')
        return tuple(("WWW-Authenticate", way) for way in ways)

    async def allows(self, authorization: str) -> bool:
        """Whether a request with this ``Authorization`` header, empty for none, may be answered.

        Raises:
            BusyError: that could not be found out now.
        """
        users, tokens = self._config().users, self._tokens.current() if self._tokens else None
        if not users and tokens is None:
            return True
        scheme, _, rest = authorization.partition(" ")
        is_right = False
        if scheme.lower() == "bearer" and tokens is not None:
            is_right = _is_token(rest.strip(), tokens)
        elif scheme.lower() == "basic" and users:
            is_right = await self._is_password(_decoded(rest.strip()))
        self.counts.num_rejected += not is_right
        return is_right

    def close(self) -> None:
        """Ends the thread, without waiting for it."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _config(self) -> WebConfig:
        return self._web.current().config if self._web else _UNPROTECTED

    async def _is_password(self, credentials: _Credentials | None) -> bool:
        if credentials is None or self._web is None:
            return False
        web = self._web.current()
        known_hash = web.config.users.get(credentials.user)
        # An unknown user's password is checked too, against one of the others' hashes, always the same: so the time
        # tells nothing, also where costs differ.
        password_hash = known_hash or web.hashes[self._pick(credentials.user, len(web.hashes))]
        key = self._digest(credentials.user.encode(errors="replace"), password_hash, credentials.password)
        if key in self._known:
            self._known.move_to_end(key)
            return known_hash is not None
        if key not in self._checks and len(self._checks) >= MAX_WAITING:
            self.counts.num_busy += 1
            raise BusyError
        is_right = await self._checks.run(key, lambda: self._check_password(credentials.password, password_hash))
        if not is_right or known_hash is None:
            return False
        self._known[key] = None
        if len(self._known) > NUM_CACHED:
            self._known.popitem(last=False)
        return True

    def _check_password(self, password: bytes, password_hash: bytes) -> bool:
        self.counts.num_password_checks += 1
        try:
            return bcrypt.checkpw(password[:MAX_PASSWORD_BYTES], password_hash)
        except ValueError:  # a NUL byte, which no hash is of
            return False

    def _pick(self, user: str, num_choices: int) -> int:
        return int.from_bytes(self._digest(user.encode(errors="replace")), "big") % num_choices

    def _digest(self, *parts: bytes) -> bytes:
        digest = hashlib.blake2b(key=self._key, digest_size=32)
        for part in parts:
            digest.update(len(part).to_bytes(8, "big") + part)
        return digest.digest()

    def _load_web(self, path: Path, in_force: _Web | None) -> Loaded[_Web]:
        config = read_web_config(path)
        try:
            context = make_context(config.tls) if config.tls else None
        except ConfigError as error:
            raise ConfigError(f"web-config {path}: {error}") from None
        if in_force is not None:
            _check_change(path, in_force.config, config)
        self._check(config)
        files = (path, *(files_of(config.tls) if config.tls else ()))
        return Loaded(_Web(config, context, tuple(config.users.values())), files)

    def _check(self, config: WebConfig) -> None:
        if self._sources.exposed_host is not None:
            has_certificates = config.tls is not None and config.tls.requires_client_cert
            has_authentication = bool(config.users) or has_certificates or self._tokens is not None
            check_exposure(
                self._sources.exposed_host, has_tls=config.tls is not None, has_authentication=has_authentication
            )


def _check_change(path: Path, before: WebConfig, after: WebConfig) -> None:
    """Refuses what a reload must not do."""
    if (before.tls is None) != (after.tls is None):
        raise ConfigError(f"web-config {path}: TLS cannot be switched on or off without a restart")
    if before.users and not after.users:
        raise ConfigError(f"web-config {path}: basic_auth_users cannot be dropped without a restart")
    was_required = before.tls is not None and before.tls.requires_client_cert
    if was_required and not (after.tls is not None and after.tls.requires_client_cert):
        raise ConfigError(f"web-config {path}: client certificates cannot be made optional without a restart")
    if before.tls and before.tls.client_allowed_sans and not (after.tls and after.tls.client_allowed_sans):
        raise ConfigError(f"web-config {path}: client_allowed_sans cannot be dropped without a restart")


def _load_tokens(path: Path, _in_force: tuple[bytes, ...] | None) -> Loaded[tuple[bytes, ...]]:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_TOKEN_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"bearer token file {path}: {error.strerror}: give a readable --bearer-token-file") from None
    tokens = tuple(filter(None, (line.strip() for line in data.splitlines())))
    if not tokens or len(data) > MAX_TOKEN_FILE_BYTES:
        raise ConfigError(f"bearer token file {path}: empty or too large: put a token on each line")
    if not all(map(_TOKEN.fullmatch, tokens)):
        raise ConfigError(f"bearer token file {path}: a token may have letters, digits and -._~+/ only")
    return Loaded(tokens, (path,))


def _is_token(offered: str, tokens: tuple[bytes, ...]) -> bool:
    """All are compared, so that the time does not tell which one is near."""
    given = offered.encode(errors="replace")
    return sum(hmac.compare_digest(given, token) for token in tokens) > 0


def _decoded(credentials: str) -> _Credentials | None:
    try:
        user, colon, password = base64.b64decode(credentials, validate=True).partition(b":")
        return _Credentials(user.decode(), password) if colon else None
    except (binascii.Error, ValueError):
        return None
