"""One request to one OTLP receiver, over HTTP or gRPC, and what became of it.

Invariants: ``send`` returns within about its time limit, whatever the receiver does, and does not raise for anything
that a receiver or the network can do; answers are read up to ``MAX_RESPONSE_BYTES``; redirects are not followed, so
that credentials go where they were meant to. Proxies are those of ``HTTPS_PROXY``, ``HTTP_PROXY`` and ``NO_PROXY``.

Known limits: gRPC's library chooses the level of its gzip; a receiver that answers HTTP byte by byte may take longer
than the time limit.
"""

from __future__ import annotations

import contextlib
import ssl
import urllib.request
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from typing import Protocol as Interface
from urllib.parse import urlsplit

import urllib3
from google.protobuf.message import DecodeError
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceResponse

from torchmem_exporter import __version__
from torchmem_exporter.labels import clean_label
from torchmem_exporter.otlp.config import Protocol, PushConfig

GRPC_METHOD = "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export"
MAX_RESPONSE_BYTES = 64 << 10
USER_AGENT = f"torchmem-exporter/{__version__}"

_CONTENT_TYPE = "application/x-protobuf"
_GZIP = 16
"""Asks zlib for a gzip header."""

_RETRYABLE_STATUSES = frozenset({429, 502, 503, 504})
_RETRYABLE_CODES = frozenset({"CANCELLED", "DEADLINE_EXCEEDED", "ABORTED", "OUT_OF_RANGE", "UNAVAILABLE", "DATA_LOSS"})
"""Those of the OTLP specification."""

_FIXES = {
    "400": "the receiver does not take what is sent: see its log",
    "401": "set credentials in OTEL_EXPORTER_OTLP_HEADERS",
    "403": "the credentials of OTEL_EXPORTER_OTLP_HEADERS do not suffice",
    "404": "check the path: OTEL_EXPORTER_OTLP_ENDPOINT is a base, OTEL_EXPORTER_OTLP_METRICS_ENDPOINT a whole address",
    "405": "the address is not one of OTLP: check the endpoint and the protocol",
    "413": "raise the receiver's limit to 4 MiB",
    "415": "the receiver takes no protobuf or no gzip: set OTEL_EXPORTER_OTLP_COMPRESSION=none or another endpoint",
    "UNAUTHENTICATED": "set credentials in OTEL_EXPORTER_OTLP_HEADERS",
    "PERMISSION_DENIED": "the credentials of OTEL_EXPORTER_OTLP_HEADERS do not suffice",
    "UNIMPLEMENTED": "the receiver takes no metrics, or not so compressed: check the endpoint and the compression",
    "UNAVAILABLE": "is a gRPC receiver listening there, and is the scheme (http, https) the right one?",
}
"""What to do about a status, by its number or name."""

_FIX_REACH = "is a receiver listening there? set OTEL_EXPORTER_OTLP_ENDPOINT"
_FIX_TLS = "check OTEL_EXPORTER_OTLP_CERTIFICATE, _CLIENT_CERTIFICATE, _CLIENT_KEY and the scheme"


@dataclass(frozen=True)
class Outcome:
    """What became of a request.

    Attributes:
        is_accepted: whether the receiver has taken it, at least in part.
        num_rejected: points of an accepted request that it has not taken.
        message: why it was not taken in whole, or what else the receiver says; the same for the same reason.
        is_retryable: whether it may be sent again.
        retry_after: seconds that the receiver asks to wait first, or None.
    """

    is_accepted: bool
    num_rejected: int = 0
    message: str = ""
    is_retryable: bool = False
    retry_after: float | None = None


class Transport(Interface):
    """A way to a receiver; used by one thread."""

    def send(self, body: bytes, timeout: float) -> Outcome:
        """Sends one ``ExportMetricsServiceRequest`` within so many seconds."""

    def close(self) -> None:
        """Gives the connection up."""


def connect(config: PushConfig) -> Transport:
    """A way to the receiver; certificates are read now, nothing is sent yet.

    Raises:
        OSError: a certificate cannot be read any more.
    """
    return GrpcTransport(config) if config.protocol is Protocol.GRPC else HttpTransport(config)


class HttpTransport:
    """OTLP/HTTP with protobuf bodies."""

    def __init__(self, config: PushConfig) -> None:
        self._url = config.endpoint
        self._is_compressed = config.is_compressed
        self._headers = {"user-agent": USER_AGENT, **dict(config.headers), "content-type": _CONTENT_TYPE}
        if config.is_compressed:
            self._headers["content-encoding"] = "gzip"
        tls = config.tls_context() if config.is_secure else None
        proxy = _proxy(config.endpoint)
        self._pool = urllib3.ProxyManager(proxy, ssl_context=tls) if proxy else urllib3.PoolManager(ssl_context=tls)

    def send(self, body: bytes, timeout: float) -> Outcome:
        """See ``Transport``."""
        if self._is_compressed:
            compressor = zlib.compressobj(level=1, wbits=zlib.MAX_WBITS | _GZIP)
            body = compressor.compress(body) + compressor.flush()
        try:
            response = self._pool.request(
                "POST",
                self._url,
                body=body,
                headers=self._headers,
                timeout=urllib3.Timeout(total=timeout),
                retries=False,
                redirect=False,
                preload_content=False,
            )
            answer = _read(response)
        except (urllib3.exceptions.HTTPError, OSError) as error:
            return Outcome(is_accepted=False, message=_why(error), is_retryable=True)
        if 200 <= response.status < 300:  # noqa: PLR2004  # success, by HTTP
            return _success(answer if _is_protobuf(response.headers) else b"")
        return _http_failure(response, answer)

    def close(self) -> None:
        """See ``Transport``."""
        self._pool.clear()


class GrpcTransport:
    """OTLP/gRPC, which sends bodies as they are."""

    def __init__(self, config: PushConfig) -> None:
        import grpc

        self._grpc = grpc
        target = urlsplit(config.endpoint).netloc
        options = [
            ("grpc.max_receive_message_length", MAX_RESPONSE_BYTES),
            ("grpc.primary_user_agent", USER_AGENT),
        ]
        if config.is_secure:
            files = (config.certificate, config.client_key, config.client_certificate)
            credentials = grpc.ssl_channel_credentials(*(file.read_bytes() if file else None for file in files))
            self._channel = grpc.secure_channel(target, credentials, options)
        else:
            self._channel = grpc.insecure_channel(target, options)
        self._export = self._channel.unary_unary(GRPC_METHOD)
        self._compression = grpc.Compression.Gzip if config.is_compressed else grpc.Compression.NoCompression
        self._metadata = config.headers

    def send(self, body: bytes, timeout: float) -> Outcome:
        """See ``Transport``."""
        try:
            answer = self._export(body, timeout=timeout, metadata=self._metadata, compression=self._compression)
        except self._grpc.RpcError as error:
            return _grpc_failure(error)
        return _success(answer)

    def close(self) -> None:
        """See ``Transport``."""
        self._channel.close()


def _read(response: urllib3.BaseHTTPResponse) -> bytes:
    """The body, or its beginning; the connection is kept only where all of it was read."""
    try:
        answer = response.read(MAX_RESPONSE_BYTES)
        if response.length_remaining == 0:
            response.release_conn()
    finally:
        response.close()
    return answer


def _success(answer: bytes) -> Outcome:
    try:
        partial = ExportMetricsServiceResponse.FromString(answer).partial_success
    except DecodeError:
        return Outcome(is_accepted=True, message="the receiver answers something other than OTLP: check the endpoint")
    num_rejected = max(partial.rejected_data_points, 0)
    message = f"the receiver says: {clean_label(partial.error_message)}" if partial.error_message else ""
    if num_rejected and not message:
        message = "the receiver rejects points without a reason: see its log"
    return Outcome(is_accepted=True, num_rejected=num_rejected, message=message)


def _http_failure(response: urllib3.BaseHTTPResponse, answer: bytes) -> Outcome:
    message = f"HTTP {response.status} {clean_label(response.reason or '')}".rstrip()
    if _is_protobuf(response.headers):
        with contextlib.suppress(DecodeError):
            message += f": {clean_label(Status.FromString(answer).message)}"
    return Outcome(
        is_accepted=False,
        message=_with_fix(message, str(response.status)),
        is_retryable=response.status in _RETRYABLE_STATUSES,
        retry_after=_retry_after(response),
    )


def _retry_after(response: urllib3.BaseHTTPResponse) -> float | None:
    """The header's seconds, whether given as such or as a date."""
    try:
        return urllib3.Retry().get_retry_after(response)
    except (urllib3.exceptions.InvalidHeader, ValueError, OverflowError):
        return None


def _grpc_failure(error: Any) -> Outcome:
    code, details = error.code().name, clean_label(error.details() or "")
    retry_after = _retry_delay(dict(error.trailing_metadata() or ()))
    is_retryable = code in _RETRYABLE_CODES or (code == "RESOURCE_EXHAUSTED" and retry_after is not None)
    message = _with_fix(f"gRPC {code}: {details}", code)
    return Outcome(is_accepted=False, message=message, is_retryable=is_retryable, retry_after=retry_after)


def _retry_delay(metadata: Mapping[str, str | bytes]) -> float | None:
    """The delay of a ``RetryInfo`` among the details of a status."""
    packed = metadata.get("grpc-status-details-bin")
    if not isinstance(packed, bytes):
        return None
    try:
        for detail in Status.FromString(packed).details:
            info = RetryInfo()
            if detail.Unpack(info):
                return float(info.retry_delay.seconds + info.retry_delay.nanos * 1e-9)
    except DecodeError:
        pass
    return None


def _with_fix(message: str, status: str) -> str:
    return f"{message}; {_FIXES[status]}" if status in _FIXES else message


def _is_protobuf(headers: Mapping[str, str]) -> bool:
    return headers.get("content-type", "").partition(";")[0].strip().lower() == _CONTENT_TYPE


def _proxy(url: str) -> str | None:
    """The proxy that the environment names for a URL."""
    parts = urlsplit(url)
    if urllib.request.proxy_bypass(parts.netloc.rpartition("@")[2]):
        return None
    proxy = urllib.request.getproxies().get(parts.scheme)
    return proxy if proxy is None or "://" in proxy else f"http://{proxy}"


def _why(error: BaseException) -> str:
    """The reason in the system's words, without addresses in memory, so that the same failure reads the same."""
    causes = _causes(error)
    for cause in causes:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return f"TLS: {cause.verify_message}; {_FIX_TLS}"
        if isinstance(cause, ssl.SSLError):
            return f"TLS: {cause.reason or 'handshake failed'}; {_FIX_TLS}"
    for cause in causes:
        if isinstance(cause, OSError) and cause.strerror:
            return f"cannot reach it: {cause.strerror}; {_FIX_REACH}"
    if isinstance(error, urllib3.exceptions.TimeoutError):
        return "no answer in time: the receiver is slow, or something on the way drops what is sent"
    return f"cannot reach it: {type(error).__name__}; {_FIX_REACH}"


def _causes(error: BaseException) -> list[BaseException]:
    """The error and what is behind it."""
    found: list[BaseException] = []
    waiting: list[object] = [error]
    while waiting:
        cause = waiting.pop()
        if isinstance(cause, BaseException) and not any(cause is other for other in found):
            found.append(cause)
            waiting += [cause.__cause__, cause.__context__, *cause.args]
    return found
