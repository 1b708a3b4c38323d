"""Where and how to push by OTLP: OpenTelemetry's standard variables, checked once.

The variables are those of the OpenTelemetry specification, with ``..._METRICS_...`` before the general ones and an
empty value meaning the same as none. Durations are whole milliseconds, as specified (opentelemetry-python takes some
of them as seconds). They are read here, and not by that SDK, because it logs what it does not understand, credentials
included, and goes on without; here it is refused, by name and without its value where that may be secret.

Invariant: a ``PushConfig`` from ``from_environ`` can be used: its endpoint is an address and its certificates load.
"""

from __future__ import annotations

import enum
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import SplitResult, unquote, urlsplit

from torchmem.errors import ConfigError
from torchmem_exporter.otlp.resource import Resources

_PREFIX = "OTEL_EXPORTER_OTLP_"
_METRICS_PATH = "/v1/metrics"
_EXPORTERS = frozenset({"otlp", "prometheus", "none"})
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_GRPC_NAME = re.compile(r"(?!grpc-)[0-9a-z_.-]+(?<!-bin)")
_OWN_HEADERS = frozenset({"content-encoding", "content-length", "content-type", "host", "transfer-encoding"})
_MILLI = 1e-3
_MAX_DIGITS = 12


class Protocol(enum.Enum):
    """How requests travel."""

    HTTP = "http/protobuf"
    GRPC = "grpc"


_DEFAULT_ENDPOINTS = {Protocol.HTTP: "http://localhost:4318", Protocol.GRPC: "http://localhost:4317"}


@dataclass(frozen=True, kw_only=True)
class PushConfig:
    """Settings of one pusher; times in seconds.

    Attributes:
        protocol: how requests travel.
        endpoint: URL that requests go to; for gRPC of scheme, host and port only.
        headers: sent with each request, names in lower case; may be secret.
        timeout: for one attempt at one request.
        interval: from the start of a push to that of the next.
        push_timeout: for a whole push with its repeated attempts, at most the interval.
        is_compressed: whether requests are gzipped.
        certificate: file of the authorities to trust instead of the system's.
        client_key: file of the private key for mutual TLS.
        client_certificate: file of the certificate to it.
        resources: gives blocks their resource attributes.
    """

    protocol: Protocol
    endpoint: str
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    timeout: float = 10.0
    interval: float = 60.0
    push_timeout: float = 30.0
    is_compressed: bool = True
    certificate: Path | None = None
    client_key: Path | None = None
    client_certificate: Path | None = None
    resources: Resources = field(default_factory=Resources)

    @property
    def is_secure(self) -> bool:
        """Whether the connection is encrypted."""
        return self.endpoint.startswith("https:")

    def tls_context(self) -> ssl.SSLContext:
        """A context with the certificates, read now.

        Raises:
            OSError: one of them cannot be read or is none (``ssl.SSLError``).
        """
        context = ssl.create_default_context(cafile=self.certificate)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if self.client_certificate:
            # A password makes an encrypted key fail instead of asking at the terminal.
            context.load_cert_chain(self.client_certificate, self.client_key, password=lambda: b"")
        return context


def from_environ(environ: Mapping[str, str]) -> PushConfig | None:
    """The settings that the environment gives; None where nothing is to be pushed.

    Pushing is on when an endpoint is set or ``OTEL_METRICS_EXPORTER`` names ``otlp``, and off when that variable names
    only others or ``OTEL_SDK_DISABLED`` is true.

    Raises:
        ConfigError: a variable cannot be used; one line that names it and the fix.
    """
    variables = _Variables(environ)
    if not _is_on(variables):
        return None
    protocol = _protocol(variables)
    interval = variables.seconds("OTEL_METRIC_EXPORT_INTERVAL", 60.0)
    if not interval:
        raise ConfigError("OTEL_METRIC_EXPORT_INTERVAL=0: give a positive number of milliseconds, such as 60000")
    # 0 means no limit of its own, by the specification; what is left is the limit of the whole.
    push_timeout = min(variables.seconds("OTEL_METRIC_EXPORT_TIMEOUT", 30.0) or interval, interval)
    _refuse_delta(variables)
    config = PushConfig(
        protocol=protocol,
        endpoint=_endpoint(variables, protocol),
        headers=_headers(variables, protocol),
        timeout=min(variables.seconds(variables.of("TIMEOUT"), 10.0) or push_timeout, push_timeout),
        interval=interval,
        push_timeout=push_timeout,
        is_compressed=_is_compressed(variables),
        certificate=_file(variables, "CERTIFICATE"),
        client_key=_file(variables, "CLIENT_KEY"),
        client_certificate=_file(variables, "CLIENT_CERTIFICATE"),
        resources=Resources.from_environ(environ),
    )
    _check_certificates(config, variables)
    return config


class _Variables:
    """The environment, in which an empty variable is none."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ

    def get(self, name: str) -> str:
        """The variable without surrounding blanks, or the empty text."""
        return self._environ.get(name, "").strip()

    def of(self, setting: str) -> str:
        """Name of the variable that decides on a setting of the exporter: that for metrics before the general one."""
        special = f"{_PREFIX}METRICS_{setting}"
        return special if self.get(special) else f"{_PREFIX}{setting}"

    def seconds(self, name: str, default: float) -> float:
        """A duration given in whole milliseconds."""
        text = self.get(name)
        if not text:
            return default
        if not (text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS):
            raise ConfigError(f"{name}={text!r}: give whole milliseconds, such as {default / _MILLI:.0f}")
        return int(text) * _MILLI

    def flag(self, name: str) -> bool:
        """A variable that is true or false."""
        text = self.get(name).lower()
        if text not in ("", "true", "false"):
            raise ConfigError(f"{name}={text!r}: give true or false")
        return text == "true"


def _is_on(variables: _Variables) -> bool:
    if variables.flag("OTEL_SDK_DISABLED"):
        return False
    exporters = [name.strip() for name in variables.get("OTEL_METRICS_EXPORTER").split(",") if name.strip()]
    for name in exporters:
        if name not in _EXPORTERS:
            raise ConfigError(f"OTEL_METRICS_EXPORTER={name!r}: there are otlp, prometheus (always served) and none")
    return "otlp" in exporters if exporters else bool(variables.get(variables.of("ENDPOINT")))


def _protocol(variables: _Variables) -> Protocol:
    name = variables.of("PROTOCOL")
    text = variables.get(name)
    try:
        return Protocol(text or Protocol.HTTP.value)
    except ValueError:
        raise ConfigError(f"{name}={text!r}: there are http/protobuf and grpc") from None


def _endpoint(variables: _Variables, protocol: Protocol) -> str:
    """The URL to send to: a general endpoint of HTTP is a base, that for metrics is used as it is."""
    name = variables.of("ENDPOINT")
    text = variables.get(name) or _DEFAULT_ENDPOINTS[protocol]
    if protocol is Protocol.GRPC and "://" not in text:
        is_insecure = variables.flag(variables.of("INSECURE"))
        text = f"{'http' if is_insecure else 'https'}://{text}"
    parts = _split(text, name, _DEFAULT_ENDPOINTS[protocol])
    if protocol is Protocol.GRPC:
        if parts.port is None:
            raise ConfigError(f"{name}={text!r} has no port: add it, usually 4317")
        if parts.path.strip("/") or parts.query:
            raise ConfigError(f"{name}={text!r}: gRPC has no paths: leave {parts.path!r} out, or set http/protobuf")
        return f"{parts.scheme}://{parts.netloc}"
    path = parts.path or "/"
    if name == f"{_PREFIX}ENDPOINT":
        path = parts.path.rstrip("/") + _METRICS_PATH
    return parts._replace(path=path, fragment="").geturl()


def _split(url: str, name: str, example: str) -> SplitResult:
    """The parts of a URL of a host."""
    try:
        parts = urlsplit(url)
        is_usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_usable = False
    if not is_usable or not url.isascii() or any(c.isspace() for c in url):
        raise ConfigError(f"{name} is no http or https URL: give one such as {example}")
    if parts.username is not None:
        raise ConfigError(f"{name} holds credentials: give them in {_PREFIX}HEADERS")
    return parts


def _headers(variables: _Variables, protocol: Protocol) -> tuple[tuple[str, str], ...]:
    """``name=value,name=value`` with percent-encoded values; what is wrong is told without the values."""
    name = variables.of("HEADERS")
    headers: dict[str, str] = {}
    for number, pair in enumerate(filter(str.strip, variables.get(name).split(",")), 1):
        key, equals, value = (unquote(part.strip()) for part in pair.partition("="))
        if not (equals and _HEADER_NAME.fullmatch(key)):
            raise ConfigError(f"{name}: entry {number} is no header: write name1=value1,name2=value2")
        key = key.lower()
        if key in _OWN_HEADERS or (protocol is Protocol.GRPC and not _GRPC_NAME.fullmatch(key)):
            raise ConfigError(f"{name}: {key} belongs to {protocol.value} itself: leave it out")
        if not (value.isascii() and value.isprintable()):
            raise ConfigError(f"{name}: the value of {key} holds characters that headers cannot: use printable ASCII")
        headers[key] = value
    return tuple(headers.items())


def _is_compressed(variables: _Variables) -> bool:
    """Compressed unless said otherwise: the specification leaves it open, and names repeat in every point."""
    name = variables.of("COMPRESSION")
    text = variables.get(name) or "gzip"
    if text not in ("gzip", "none"):
        raise ConfigError(f"{name}={text!r}: there are gzip and none")
    return text == "gzip"


def _refuse_delta(variables: _Variables) -> None:
    name = f"{_PREFIX}METRICS_TEMPORALITY_PREFERENCE"
    text = variables.get(name).lower()
    if text not in ("", "cumulative", "lowmemory"):
        raise ConfigError(
            f"{name}={text!r}: only cumulative is sent: unset it, and let the collector's cumulativetodelta convert"
        )


def _file(variables: _Variables, setting: str) -> Path | None:
    text = variables.get(variables.of(setting))
    return Path(text) if text else None


def _check_certificates(config: PushConfig, variables: _Variables) -> None:
    """Loads what is to be used once, so that a wrong file ends the start and not each push."""
    if bool(config.client_key) != bool(config.client_certificate):
        there, missing = (
            ("CLIENT_KEY", "CLIENT_CERTIFICATE") if config.client_key else ("CLIENT_CERTIFICATE", "CLIENT_KEY")
        )
        raise ConfigError(f"{variables.of(there)} is set without {variables.of(missing)}: mutual TLS needs both")
    names = [
        variables.of(s) for s in ("CERTIFICATE", "CLIENT_KEY", "CLIENT_CERTIFICATE") if variables.get(variables.of(s))
    ]
    try:
        if names:
            config.tls_context()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{', '.join(names)}: cannot be loaded ({reason}): give readable PEM files") from None
