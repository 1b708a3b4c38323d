"""TLS as the web-config file asks for it, by Python's ssl module.

Invariants: at least TLS 1.2, no compression, no renegotiation; a context is made whole or not at all; key material that
stands in the web-config file itself is never written to a disk.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import ssl
from collections.abc import Iterator
from pathlib import Path

from torchmem.errors import ConfigError
from torchmem_exporter.serving.webconfig import Material, TLSConfig

_VERSIONS = {"TLS12": ssl.TLSVersion.TLSv1_2, "TLS13": ssl.TLSVersion.TLSv1_3}
_VERIFY = {
    "NoClientCert": ssl.CERT_NONE,
    "VerifyClientCertIfGiven": ssl.CERT_OPTIONAL,
    "RequireAndVerifyClientCert": ssl.CERT_REQUIRED,
}
_CURVES = {"CurveP256": "prime256v1", "CurveP384": "secp384r1", "CurveP521": "secp521r1", "X25519": "X25519"}
_SUITES_1_2 = {
    f"TLS_ECDHE_{auth}_WITH_{name}": f"ECDHE-{auth}-{openssl_name}"
    for auth in ("ECDSA", "RSA")
    for name, openssl_name in (
        ("AES_128_GCM_SHA256", "AES128-GCM-SHA256"),
        ("AES_256_GCM_SHA384", "AES256-GCM-SHA384"),
        ("CHACHA20_POLY1305_SHA256", "CHACHA20-POLY1305"),
        ("AES_128_CBC_SHA", "AES128-SHA"),
        ("AES_256_CBC_SHA", "AES256-SHA"),
    )
}
"""Go's names of its safe suites for TLS 1.2, and OpenSSL's."""
_SUITES_1_3 = ("TLS_AES_128_GCM_SHA256", "TLS_AES_256_GCM_SHA384", "TLS_CHACHA20_POLY1305_SHA256")
"""May be named, but are always offered, in Go as here."""


def make_context(config: TLSConfig) -> ssl.SSLContext:
    """A context for connections as configured.

    Raises:
        ConfigError: a file cannot be used, or ssl cannot do what is asked; one line.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = _VERSIONS[config.min_version]
    context.maximum_version = _VERSIONS[config.max_version]
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
    if not config.prefer_server_cipher_suites:
        context.options &= ~ssl.OP_CIPHER_SERVER_PREFERENCE
    context.set_alpn_protocols(["http/1.1"])
    _set_suites(context, config)
    _set_curve(context, config.curve)
    _load_certificate(context, config)
    if config.client_ca is not None:
        _load_client_ca(context, config.client_ca)
        context.verify_mode = _VERIFY[config.client_auth]
    return context


def files_of(config: TLSConfig) -> tuple[Path, ...]:
    """The files that a context is made from."""
    materials = (config.cert, config.key, config.client_ca)
    return tuple(material.file for material in materials if material is not None and material.file is not None)


def is_allowed(connection: ssl.SSLObject, allowed_sans: tuple[str, ...]) -> bool:
    """Whether one of the client's alternative names is allowed; with none to choose from, all are."""
    if not allowed_sans:
        return True
    certificate = connection.getpeercert() or {}
    names = certificate.get("subjectAltName", ())
    return any(_plain_name(*map(str, pair)) in allowed_sans for pair in names)


def _plain_name(kind: str, name: str) -> str:
    """A name as it would be written in a configuration; OpenSSL spells IPv6 addresses out."""
    if kind != "IP Address":
        return name
    try:
        return str(ipaddress.ip_address(name.strip()))
    except ValueError:
        return name


def _set_suites(context: ssl.SSLContext, config: TLSConfig) -> None:
    if not config.cipher_suites:
        return
    known = {*_SUITES_1_2, *_SUITES_1_3}
    unknown = [name for name in config.cipher_suites if name not in known]
    if unknown:
        raise ConfigError(f"cipher_suites: {unknown[0]!r} is unknown or unsafe: use {', '.join(sorted(known))}")
    names = [_SUITES_1_2[name] for name in config.cipher_suites if name in _SUITES_1_2]
    if names:
        context.set_ciphers(":".join(names))
    elif config.max_version == "TLS12":
        raise ConfigError("cipher_suites has none for TLS 1.2, and max_version is TLS12: add one")
    else:
        context.minimum_version = ssl.TLSVersion.TLSv1_3


def _set_curve(context: ssl.SSLContext, curve: str | None) -> None:
    if curve is None:
        return
    if curve not in _CURVES:
        raise ConfigError(f"curve_preferences: {curve!r} is unknown: use {', '.join(_CURVES)}")
    try:
        context.set_ecdh_curve(_CURVES[curve])
    except (ssl.SSLError, ValueError):
        raise ConfigError(f"curve_preferences: this Python's ssl cannot do {curve}: use CurveP256") from None


def _load_certificate(context: ssl.SSLContext, config: TLSConfig) -> None:
    for name, material in (("cert_file", config.cert), ("key_file", config.key)):
        _check_readable(name, material)
    with _as_file(config.cert) as cert, _as_file(config.key) as key:
        try:
            # Without a password to answer with, OpenSSL would ask for one on the terminal.
            context.load_cert_chain(cert, key, password=lambda: b"")
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", None) or error
            where = config.cert.file or "cert", config.key.file or "key"
            raise ConfigError(
                f"{where[0]} and {where[1]} are no certificate with its unencrypted key ({reason})"
            ) from None


def _load_client_ca(context: ssl.SSLContext, material: Material) -> None:
    _check_readable("client_ca_file", material)
    with _as_file(material) as path:
        try:
            context.load_verify_locations(path)
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", None) or error
            raise ConfigError(f"{material.file or 'client_ca'} has no certificates in PEM ({reason})") from None


def _check_readable(name: str, material: Material) -> None:
    """The messages of ssl name no file."""
    if material.file is not None:
        try:
            material.file.open("rb").close()
        except OSError as error:
            raise ConfigError(f"{name} {material.file}: {error.strerror}") from None


@contextlib.contextmanager
def _as_file(material: Material) -> Iterator[Path]:
    """A path that ssl can load from: for inline text, that of a file in memory."""
    if material.file is not None:
        yield material.file
        return
    memory = os.memfd_create("torchmem-exporter", os.MFD_CLOEXEC)
    try:
        with open(memory, "wb", closefd=False) as file:
            file.write(material.text.encode())
        yield Path(f"/proc/self/fd/{memory}")
    finally:
        os.close(memory)
