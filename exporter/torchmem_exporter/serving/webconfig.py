"""The web-config file: TLS and basic authentication in the format of Prometheus' exporter-toolkit.

Invariants: a ``WebConfig`` is whole and means what the toolkit's documentation says; a key that is unknown, given twice
or of the wrong type is refused, and so is what this server cannot do (below), in one line that names the fix.

Not to be had with Python's ssl module, or not here: TLS below 1.2, HTTP/2, asking for a client certificate without
verifying it (``RequestClientCert``, ``RequireAnyClientCert``), more than one curve.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast, get_args

import msgspec
import yaml

from torchmem.errors import ConfigError

MAX_FILE_BYTES = 1 << 20
MAX_BCRYPT_COST = 17
"""A check takes twice as long with each step; at this cost it takes several seconds."""

ClientAuth = Literal["NoClientCert", "VerifyClientCertIfGiven", "RequireAndVerifyClientCert"]
TLSVersion = Literal["TLS12", "TLS13"]
_UNVERIFIED = ("RequestClientCert", "RequireAnyClientCert", "RequireClientCert")
_BCRYPT = re.compile(r"\$2[aby]\$(\d\d)\$[./A-Za-z0-9]{53}")
_HEADER_VALUE = re.compile(r"[\x20-\x7e]*")
_HEADERS: Mapping[str, tuple[str, ...]] = {
    "Content-Security-Policy": (),
    "X-Frame-Options": ("deny", "sameorigin"),
    "X-Content-Type-Options": ("nosniff",),
    "X-XSS-Protection": (),
    "Strict-Transport-Security": (),
}
"""Headers that may be set, and what each may be set to where that is an enumeration."""


class TLSSection(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """``tls_server_config``; an empty text is as good as none, as in the toolkit."""

    cert: str = ""
    key: str = ""
    client_ca: str = ""
    cert_file: str = ""
    key_file: str = ""
    client_ca_file: str = ""
    client_auth_type: str = ""
    client_allowed_sans: tuple[str, ...] | None = None
    cipher_suites: tuple[str, ...] = ()
    prefer_server_cipher_suites: bool = True
    curve_preferences: tuple[str, ...] = ()
    min_version: Literal["TLS10", "TLS11", "TLS12", "TLS13"] = "TLS12"
    max_version: Literal["TLS10", "TLS11", "TLS12", "TLS13"] = "TLS13"

    @property
    def is_enabled(self) -> bool:
        """Whether TLS was asked for, whole or not."""
        inline = self.cert or self.key or self.client_ca
        return bool(inline or self.cert_file or self.key_file or self.client_ca_file or self.client_auth_type)


class HTTPSection(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """``http_server_config``."""

    http2: bool = False
    headers: dict[str, str] | None = None


class _File(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    tls_server_config: TLSSection | None = None
    http_server_config: HTTPSection | None = None
    basic_auth_users: dict[str, str] | None = None


@dataclass(frozen=True)
class Material:
    """Something in PEM: in a file or in the web-config file itself."""

    file: Path | None
    text: str


@dataclass(frozen=True)
class TLSConfig:
    """How TLS is served; names are those of the toolkit."""

    cert: Material
    key: Material
    client_ca: Material | None
    client_auth: ClientAuth
    client_allowed_sans: tuple[str, ...]
    cipher_suites: tuple[str, ...]
    prefer_server_cipher_suites: bool
    curve: str | None
    min_version: TLSVersion
    max_version: TLSVersion

    @property
    def requires_client_cert(self) -> bool:
        """Whether only clients with a certificate of the named authority get in."""
        return self.client_auth == "RequireAndVerifyClientCert"


@dataclass(frozen=True)
class WebConfig:
    """A web-config file that can be used.

    Attributes:
        tls: None for plain HTTP.
        headers: for every answer.
        users: bcrypt hashes by user; empty for no basic authentication.
    """

    tls: TLSConfig | None = None
    headers: tuple[tuple[str, str], ...] = ()
    users: Mapping[str, bytes] = field(default_factory=dict)


def read_web_config(path: Path) -> WebConfig:
    """The settings in a web-config file; paths in it are relative to its folder.

    Raises:
        ConfigError: it cannot be read or used; one line.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"web-config {path}: {error.strerror}: give a readable file with --web-config") from None
    try:
        file_config = _parsed(data)
        tls, http = file_config.tls_server_config, file_config.http_server_config
        return WebConfig(
            tls=_tls(tls, path.absolute().parent) if tls and tls.is_enabled else None,
            headers=_headers(http) if http else (),
            users=_users(file_config.basic_auth_users or {}),
        )
    except ConfigError as error:
        raise ConfigError(f"web-config {path}: {error}") from None


class _Loader(yaml.SafeLoader):
    """Safe YAML in which no key comes twice: of two passwords for one user, the reader of the file sees only one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:  # noqa: FBT001, FBT002  # as overridden
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable) or key in seen:
                raise ConfigError(f"{key!r} is there twice, or no name (line {key_node.start_mark.line + 1})")
            seen.add(key)
        return super().construct_mapping(node, deep)


def _parsed(data: bytes) -> _File:
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"larger than {MAX_FILE_BYTES} bytes: is it another file?")
    try:
        content = yaml.load(data, Loader=_Loader)  # noqa: S506  # a safe loader
    except yaml.MarkedYAMLError as error:
        line = f" in line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"no YAML{line}: {error.problem or error.context}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"no YAML: {' '.join(str(error).split())}") from None
    if content is None:
        raise ConfigError("empty: nothing would be protected; leave --web-config out if that is meant")
    try:
        return msgspec.convert(content, _File)
    except msgspec.ValidationError as error:
        raise ConfigError(str(error)) from None


def _tls(section: TLSSection, folder: Path) -> TLSConfig:
    client_ca = _material(section, "client_ca", folder)
    client_auth = _client_auth(section.client_auth_type)
    if client_ca and client_auth == "NoClientCert":
        raise ConfigError("a client CA without client_auth_type: set it to RequireAndVerifyClientCert")
    if not client_ca and client_auth != "NoClientCert":
        raise ConfigError(f"client_auth_type {client_auth} needs client_ca_file or client_ca")
    if section.client_allowed_sans is not None and client_auth != "RequireAndVerifyClientCert":
        raise ConfigError("client_allowed_sans needs client_auth_type RequireAndVerifyClientCert")
    if section.client_allowed_sans == ():
        raise ConfigError("client_allowed_sans is empty, so no client would get in: name one or leave it out")
    if len(section.curve_preferences) > 1:
        raise ConfigError("curve_preferences: Python's ssl takes one curve only; name one, or none for the defaults")
    min_version, max_version = _version(section.min_version), _version(section.max_version)
    if min_version > max_version:
        raise ConfigError("min_version is above max_version")
    return TLSConfig(
        cert=_needed(section, "cert", folder),
        key=_needed(section, "key", folder),
        client_ca=client_ca,
        client_auth=client_auth,
        client_allowed_sans=section.client_allowed_sans or (),
        cipher_suites=section.cipher_suites,
        prefer_server_cipher_suites=section.prefer_server_cipher_suites,
        curve=next(iter(section.curve_preferences), None),
        min_version=min_version,
        max_version=max_version,
    )


def _version(name: str) -> TLSVersion:
    if name in get_args(TLSVersion):
        return cast("TLSVersion", name)
    raise ConfigError(f"{name}: TLS below 1.2 is not served: set min_version and max_version to TLS12 or TLS13")


def _material(section: TLSSection, name: str, folder: Path) -> Material | None:
    text, file = getattr(section, name), getattr(section, f"{name}_file")
    if text and file:
        raise ConfigError(f"both {name} and {name}_file: leave one of them out")
    return Material(folder / file if file else None, text) if text or file else None


def _needed(section: TLSSection, name: str, folder: Path) -> Material:
    material = _material(section, name, folder)
    if material is None:
        raise ConfigError(f"tls_server_config has neither {name} nor {name}_file: add one")
    return material


def _client_auth(name: str) -> ClientAuth:
    if name in _UNVERIFIED:
        raise ConfigError(
            f"client_auth_type {name} would take any certificate, which Python's ssl cannot do:"
            " use RequireAndVerifyClientCert or VerifyClientCertIfGiven"
        )
    for known in get_args(ClientAuth):
        if name == known or not name:
            return cast("ClientAuth", known)
    raise ConfigError(f"client_auth_type {name!r}: use {', '.join(get_args(ClientAuth))}")


def _headers(section: HTTPSection) -> tuple[tuple[str, str], ...]:
    if section.http2:
        raise ConfigError("http2: this server speaks HTTP/1.1 only; set it to false or leave it out")
    headers = section.headers or {}
    for name, value in headers.items():
        if name not in _HEADERS:
            raise ConfigError(f"header {name!r} cannot be set: use {', '.join(_HEADERS)}")
        if value and _HEADERS[name] and value not in _HEADERS[name]:
            raise ConfigError(f"header {name} cannot be {value!r}: use {' or '.join(_HEADERS[name])}")
        if not _HEADER_VALUE.fullmatch(value):
            raise ConfigError(f"header {name} has characters that no header can have: use plain ASCII")
    return tuple((name, value.strip()) for name, value in headers.items() if value.strip())


def _users(users: Mapping[str, str]) -> dict[str, bytes]:
    for user, password_hash in users.items():
        if ":" in user:
            raise ConfigError(f"user {user!r}: a name with a colon cannot be sent")
        match = _BCRYPT.fullmatch(password_hash)
        if not match:
            raise ConfigError(f"user {user!r}: no bcrypt hash; make one with `htpasswd -nBC 10 ''`")
        if not 4 <= int(match.group(1)) <= MAX_BCRYPT_COST:  # noqa: PLR2004  # bcrypt's least
            raise ConfigError(f"user {user!r}: a bcrypt cost from 4 to {MAX_BCRYPT_COST} is taken, 10 is usual")
    return {user: password_hash.encode() for user, password_hash in users.items()}
