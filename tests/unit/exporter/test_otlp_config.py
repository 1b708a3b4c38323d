"""OpenTelemetry's standard variables: what they mean, and what is refused by name."""

from __future__ import annotations

import re

import pytest

from torchmem.errors import ConfigError
from torchmem_exporter.otlp.config import Protocol, from_environ

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
METRICS_ENDPOINT = "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT"
PROTOCOL = "OTEL_EXPORTER_OTLP_PROTOCOL"
HEADERS = "OTEL_EXPORTER_OTLP_HEADERS"
ON = {ENDPOINT: "http://collector:4318"}
GRPC = {PROTOCOL: "grpc"}


@pytest.mark.parametrize(
    ("environ", "is_on"),
    [
        ({}, False),
        ({ENDPOINT: " "}, False),
        ({PROTOCOL: "grpc"}, False),
        (ON, True),
        ({METRICS_ENDPOINT: "http://c:4318/x"}, True),
        ({"OTEL_METRICS_EXPORTER": "otlp"}, True),
        ({"OTEL_METRICS_EXPORTER": "prometheus, otlp"}, True),
        (ON | {"OTEL_METRICS_EXPORTER": "none"}, False),
        (ON | {"OTEL_METRICS_EXPORTER": "prometheus"}, False),
        (ON | {"OTEL_SDK_DISABLED": "TRUE"}, False),
        (ON | {"OTEL_SDK_DISABLED": "false"}, True),
    ],
)
def test_when_there_is_pushing(environ, is_on):
    """A sidecar would push without being asked to, or not although it was."""
    assert (from_environ(environ) is not None) == is_on


@pytest.mark.parametrize(
    ("environ", "endpoint"),
    [
        ({"OTEL_METRICS_EXPORTER": "otlp"}, "http://localhost:4318/v1/metrics"),
        ({"OTEL_METRICS_EXPORTER": "otlp", **GRPC}, "http://localhost:4317"),
        ({ENDPOINT: "http://c:4318"}, "http://c:4318/v1/metrics"),
        ({ENDPOINT: "https://c/"}, "https://c/v1/metrics"),
        ({ENDPOINT: "http://c:4318/base/"}, "http://c:4318/base/v1/metrics"),
        ({ENDPOINT: "http://c:4318/base?key=1"}, "http://c:4318/base/v1/metrics?key=1"),
        ({METRICS_ENDPOINT: "http://c:4318"}, "http://c:4318/"),
        ({METRICS_ENDPOINT: "http://c:4318/opentelemetry"}, "http://c:4318/opentelemetry"),
        ({ENDPOINT: "http://other", METRICS_ENDPOINT: "http://c/x"}, "http://c/x"),
        ({ENDPOINT: "http://[::1]:4318"}, "http://[::1]:4318/v1/metrics"),
        ({ENDPOINT: "http://c:4317", **GRPC}, "http://c:4317"),
        ({ENDPOINT: "https://c:4317/", **GRPC}, "https://c:4317"),
        ({ENDPOINT: "c:4317", **GRPC}, "https://c:4317"),
        ({ENDPOINT: "c:4317", "OTEL_EXPORTER_OTLP_INSECURE": "true", **GRPC}, "http://c:4317"),
        ({ENDPOINT: "https://c:4317", "OTEL_EXPORTER_OTLP_INSECURE": "true", **GRPC}, "https://c:4317"),
        ({ENDPOINT: "http://c:4318", "OTEL_EXPORTER_OTLP_METRICS_PROTOCOL": "grpc"}, "http://c:4318"),
    ],
)
def test_where_requests_go(environ, endpoint):
    """Requests would go to another address or path than the specification says, or unencrypted."""
    assert from_environ(environ).endpoint == endpoint


def test_defaults():
    """Intervals, limits or compression would differ from what is documented."""
    config = from_environ(ON)
    assert (config.protocol, config.timeout, config.interval, config.push_timeout) == (Protocol.HTTP, 10, 60, 30)
    assert config.is_compressed
    assert not config.is_secure


def test_durations_are_milliseconds():
    """A timeout of 10000 would be near three hours."""
    durations = {
        "OTEL_EXPORTER_OTLP_TIMEOUT": "9000",
        "OTEL_EXPORTER_OTLP_METRICS_TIMEOUT": "2500",
        "OTEL_METRIC_EXPORT_INTERVAL": "5000",
        "OTEL_METRIC_EXPORT_TIMEOUT": "4000",
    }
    config = from_environ(ON | durations)
    assert (config.timeout, config.interval, config.push_timeout) == (2.5, 5, 4)


def test_a_push_ends_before_the_next_begins():
    """Pushes would pile up behind a slow receiver."""
    config = from_environ(ON | {"OTEL_METRIC_EXPORT_INTERVAL": "3000"})
    assert (config.timeout, config.push_timeout) == (3, 3)
    unlimited = from_environ(ON | {"OTEL_EXPORTER_OTLP_TIMEOUT": "0", "OTEL_METRIC_EXPORT_TIMEOUT": "0"})
    assert (unlimited.timeout, unlimited.push_timeout) == (60, 60)


def test_headers():
    """Credentials would not arrive as they were meant, or show up where the settings are printed."""
    config = from_environ(ON | {HEADERS: "Authorization=Bearer%20a%3Db%2Cc==, x-scope = 7 ,"})
    assert dict(config.headers) == {"authorization": "Bearer a=b,c==", "x-scope": "7"}
    assert "Bearer" not in repr(config)


def test_settings_of_metrics_come_first():
    """A setting for all signals would override that for metrics."""
    environ = {HEADERS: "a=1", "OTEL_EXPORTER_OTLP_METRICS_HEADERS": "b=2", "OTEL_EXPORTER_OTLP_COMPRESSION": "gzip"}
    config = from_environ(ON | environ | {"OTEL_EXPORTER_OTLP_METRICS_COMPRESSION": "none"})
    assert config.headers == (("b", "2"),)
    assert not config.is_compressed


@pytest.mark.parametrize(
    ("name", "value", "fix"),
    [
        (ENDPOINT, "collector:4318", "http or https URL"),
        (ENDPOINT, "ftp://c", "http or https URL"),
        (ENDPOINT, "http://", "http or https URL"),
        (ENDPOINT, "http://c:port", "http or https URL"),
        (ENDPOINT, "http://c:99999", "http or https URL"),
        (ENDPOINT, "http://c c", "http or https URL"),
        (ENDPOINT, "http://[::1", "http or https URL"),
        (ENDPOINT, "http://user:secret@c", "OTEL_EXPORTER_OTLP_HEADERS"),
        (METRICS_ENDPOINT, "c", "http or https URL"),
        (PROTOCOL, "http/json", "http/protobuf and grpc"),
        ("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL", "GRPC", "http/protobuf and grpc"),
        ("OTEL_EXPORTER_OTLP_COMPRESSION", "zstd", "gzip and none"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "10s", "milliseconds"),
        ("OTEL_METRIC_EXPORT_INTERVAL", "-1", "milliseconds"),
        ("OTEL_METRIC_EXPORT_INTERVAL", "0", "positive"),
        ("OTEL_METRIC_EXPORT_TIMEOUT", "1.5", "milliseconds"),
        ("OTEL_METRIC_EXPORT_TIMEOUT", "9" * 400, "milliseconds"),
        ("OTEL_SDK_DISABLED", "1", "true or false"),
        ("OTEL_METRICS_EXPORTER", "console", "otlp, prometheus"),
        ("OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE", "delta", "cumulativetodelta"),
        (HEADERS, "secret", "name1=value1"),
        (HEADERS, "a b=secret", "name1=value1"),
        (HEADERS, "a=secret%0Ax", "printable ASCII"),
        ("OTEL_RESOURCE_ATTRIBUTES", "region", "key1=value1"),
        ("OTEL_RESOURCE_ATTRIBUTES", "region=%ff", "UTF-8"),
        ("OTEL_EXPORTER_OTLP_CERTIFICATE", "/nowhere/ca.pem", "PEM"),
        ("OTEL_EXPORTER_OTLP_CLIENT_KEY", "/nowhere/key.pem", "needs both"),
        ("OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE", "/nowhere/client.pem", "needs both"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(name, value, fix):
    """An operator would search for the wrong setting, or find credentials in a log."""
    with pytest.raises(ConfigError, match=re.escape(fix)) as refusal:
        from_environ(ON | {name: value})
    assert str(refusal.value).startswith(name)
    assert "secret" not in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("value", "fix"), [("http://c", "4317"), ("c", "4317"), ("http://c:4317/v1/metrics", "no paths")]
)
def test_endpoints_that_grpc_cannot_use(value, fix):
    """gRPC would try another port or ignore the path, and say no more than unavailable."""
    with pytest.raises(ConfigError, match=fix):
        from_environ({ENDPOINT: value, **GRPC})


@pytest.mark.parametrize(
    ("name", "environ"), [("Content-Length", {}), ("grpc-timeout", GRPC), ("token-bin", GRPC), ("a!b", GRPC)]
)
def test_headers_of_the_protocol_itself(name, environ):
    """Each push would fail, with a reason that names no setting."""
    with pytest.raises(ConfigError, match=f"{HEADERS}: {name.lower()} belongs to"):
        from_environ(ON | environ | {HEADERS: f"{name}=1"})


def test_a_file_that_is_no_certificate(tmp_path):
    """A wrong file would be found out at each push instead of at the start."""
    file = tmp_path / "ca.pem"
    file.write_text("nonsense")
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_METRICS_CERTIFICATE: cannot be loaded"):
        from_environ(ON | {"OTEL_EXPORTER_OTLP_METRICS_CERTIFICATE": str(file)})
