"""The routes' answers: paths, methods, negotiation, what may be shared, and what a fault costs."""

from __future__ import annotations

import gzip

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics

from records import WRITTEN_AT, leave, living, make_record
from sidecars import Clock, application, ask, series, states
from torchmem_exporter.reading.reader import Reader
from torchmem_exporter.serving.routes import Request

OPENMETRICS = "application/openmetrics-text;version=1.0.0"
PROMETHEUS_2_42 = f"{OPENMETRICS},application/openmetrics-text;version=0.0.1;q=0.75,text/plain;version=0.0.4;q=0.5,*/*"


@pytest.fixture
def app(tmp_path):
    return application(tmp_path / "records", Clock(WRITTEN_AT + 1))


@pytest.fixture
def ranks(tmp_path):
    with living(tmp_path / "records", make_record(0), make_record(1)) as stores:
        yield stores


@pytest.mark.parametrize(
    ("path", "status", "content_type"),
    [
        ("/metrics", 200, "text/plain; version=0.0.4; charset=utf-8"),
        ("/healthz", 200, "text/plain; charset=utf-8"),
        ("/readyz", 200, "text/plain; charset=utf-8"),
        ("/", 200, "text/html; charset=utf-8"),
        ("/nowhere", 404, "text/plain; charset=utf-8"),
    ],
)
def test_routes(app, ranks, path, status, content_type):
    """A probe or a scraper would be told the wrong thing."""
    reply = ask(app, path)
    assert (reply.status, reply.headers["Content-Type"]) == (status, content_type)
    assert int(reply.headers["Content-Length"]) == len(reply.body)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_other_methods_are_refused(app, method):
    """A write would appear to have worked."""
    reply = ask(app, "/metrics", method)
    assert (reply.status, reply.headers["Allow"]) == (405, "GET, HEAD")


def test_readiness_waits_for_the_directory(app, tmp_path):
    """A sidecar would call itself ready while it cannot see any rank."""
    assert (ask(app, "/readyz").status, ask(app, "/healthz").status) == (503, 200)
    (tmp_path / "records").mkdir()
    assert ask(app, "/readyz").status == 200


def test_scrape_without_directory_still_tells_of_itself(app):
    """Prometheus would call the sidecar down because no job has started yet."""
    found = series(ask(app).text)
    assert found["torchmem_snapshot_errors_total", (("reason", "directory"),)] == 0
    assert found["torchmem_scrape_duration_seconds", ()] == 0.25


@pytest.mark.parametrize("accept", [OPENMETRICS, PROMETHEUS_2_42])
def test_openmetrics_when_asked_for(app, ranks, accept):
    """Prometheus would be sent a format that it did not ask for, or one that a strict parser refuses."""
    reply = ask(app, accept=accept)
    assert reply.headers["Content-Type"].startswith(OPENMETRICS.replace(";", "; "))
    families = {family.name: family for family in parse_openmetrics(reply.text)}
    assert (families["torchmem_step_time_seconds"].type, families["torchmem_step_time_seconds"].unit) == (
        "counter",
        "seconds",
    )
    assert families["torchmem_memory_peak_bytes"].unit == "bytes"


@pytest.mark.parametrize(
    "accept", ["", "*/*", "text/html", OPENMETRICS + "x;;", "application/openmetrics-text;version=", ";"]
)
def test_odd_accept_headers_get_an_answer(app, ranks, accept):
    """A client with an odd header would cost an error instead of a scrape."""
    assert ask(app, accept=accept).status == 200


@pytest.mark.parametrize(
    ("accepted", "is_packed"),
    [("gzip", True), ("deflate, GZIP;q=0.5", True), ("", False), ("identity", False), ("gzip;q=0", False)],
)
def test_compression_when_accepted(app, ranks, accepted, is_packed):
    """A client would get bytes that it cannot read, or ten times as many as needed."""
    reply = ask(app, accept_encoding=accepted)
    assert (reply.headers.get("Content-Encoding") == "gzip") == is_packed
    assert states(reply.text) == {"0": "running", "1": "running"}
    assert gzip.decompress(reply.body) if is_packed else reply.body.startswith(b"# HELP")


def test_only_a_scrape_counts(app, tmp_path):
    """Whoever opens the page or probes readiness would use up the last showings of an ended rank."""
    leave(tmp_path / "records", make_record(final=True))
    for path, method in (("/", "GET"), ("/readyz", "GET"), ("/metrics", "HEAD")):
        for _ in range(3):
            ask(app, path, method)
    assert [states(ask(app).text) for _ in range(3)] == [{"0": "exited"}, {"0": "exited"}, {}]


def test_a_fault_costs_one_request(app, ranks, monkeypatch, caplog):
    """One failure inside would end the server, or show its insides to a client."""
    with monkeypatch.context() as patch:
        patch.setattr(Reader, "scan", lambda *_, **__: 1 / 0)
        reply = ask(app)
    assert (reply.status, b"division" in reply.body) == (500, False)
    assert "division" in caplog.text
    assert ask(app).status == 200


def test_no_sample_carries_a_timestamp(app, ranks):
    """Prometheus would not mark series as stale when a rank goes."""
    lines = [line for line in ask(app).text.splitlines() if not line.startswith("#")]
    assert [line for line in lines if line.count(" ") != 1 and "(outside modules)" not in line] == []


def test_only_like_requests_share_an_answer(app):
    """A scraper would be sent what another one asked for, or a look would use up the showing of a scrape."""

    def shared(method="GET", **headers):
        request = Request(method, "/metrics", {name.replace("_", "-"): value for name, value in headers.items()})
        return app.route(request).shared(request)

    kinds = [shared(), shared(accept=OPENMETRICS), shared(accept_encoding="gzip"), shared("HEAD")]
    assert len(set(kinds)) == len(kinds)
    assert shared(accept=PROMETHEUS_2_42, accept_encoding="br, gzip") == shared(
        accept=OPENMETRICS, accept_encoding="gzip"
    )


def test_only_health_is_open_and_never_waits(app):
    """Figures would be shown to anybody, or a probe would have to wait for a scrape."""
    routes = {path: app.route(Request("GET", path)) for path in ("/", "/metrics", "/healthz", "/readyz", "/nowhere")}
    assert {path for path, route in routes.items() if route.is_open} == {"/healthz"}
    assert {path for path, route in routes.items() if route.is_instant} == {"/healthz", "/nowhere"}
