"""The sidecar as users run it: a process, a port, and the real tools that read it."""

from __future__ import annotations

import math
import signal
import subprocess
import time

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics

import backends
from records import living, make_record
from sidecars import running, series, states
from torchmem_exporter.budget import Level

OPENMETRICS = "application/openmetrics-text;version=1.0.0"


@pytest.fixture
def sidecar(tmp_path):
    """A sidecar over two ranks that live."""
    ranks = [make_record(i, written_at=time.time()) for i in range(2)]
    with living(tmp_path / "records", *ranks), running(tmp_path / "records") as sidecar:
        yield sidecar


def test_it_says_what_it_serves_from_where(sidecar, tmp_path):
    """Whoever starts it would not learn the port that the system picked."""
    address = f"http://127.0.0.1:{sidecar.port}/metrics"
    assert f'level=info logger=torchmem_exporter.cli msg="serving {address} from {tmp_path / "records"}"' in (
        sidecar.first_line
    )


def test_routes_over_http(sidecar):
    """The server would answer otherwise than the application that it serves."""
    answers = {path: sidecar.ask(path).status for path in ("/", "/metrics", "/healthz", "/readyz", "/nowhere")}
    assert answers == {"/": 200, "/metrics": 200, "/healthz": 200, "/readyz": 200, "/nowhere": 404}
    assert sidecar.ask("/metrics", "POST").status == 405
    head = sidecar.ask("/metrics", "HEAD")
    assert (head.status, head.body) == (200, b"")
    packed = sidecar.ask(headers={"Accept-Encoding": "gzip"})
    assert (packed.headers["Content-Encoding"], states(packed.text)) == ("gzip", {"0": "running", "1": "running"})


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGINT])
def test_it_ends_when_told(sidecar, ending):
    """A host that shuts down, or a user's Ctrl-C, would wait for the sidecar or see a traceback."""
    assert sidecar.ask("/healthz").status == 200
    status, seconds = sidecar.end(ending)
    said = sidecar.errors.read()
    assert (status, said.count("\n")) == (0, 1)
    assert f"level=info logger=torchmem_exporter.cli msg=ending signal={ending.name}" in said
    assert seconds < 5


@pytest.mark.parametrize("level", [level.value for level in Level])
def test_promtool_finds_no_fault(tmp_path, level, promtool):
    """The output would break a rule of Prometheus' own linter."""
    with living(tmp_path, make_record(0, 40, written_at=time.time())), running(tmp_path, "--level", level) as sidecar:
        body = sidecar.ask().body
    done = subprocess.run([promtool, "check", "metrics"], input=body, capture_output=True, timeout=30, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


@pytest.mark.parametrize("level", [level.value for level in Level])
def test_strict_parser_takes_the_openmetrics(tmp_path, level):
    """A scraper that asks for OpenMetrics would refuse the scrape."""
    with living(tmp_path, make_record(0, 40, written_at=time.time())), running(tmp_path, "--level", level) as sidecar:
        found = list(parse_openmetrics(sidecar.ask(headers={"Accept": OPENMETRICS}).text))
        plain = {name for name, _ in series(sidecar.ask().text)}
    assert {sample.name for family in found for sample in family.samples} == plain


@pytest.mark.slow
def test_prometheus_returns_the_values_to_the_byte(sidecar, prometheus, tmp_path):
    """What an operator queries would differ from what a rank has written."""
    wanted = series(sidecar.ask().text)
    # Those of the sidecar itself change with every scrape. To Prometheus an empty label is none.
    wanted = {
        (name, tuple(pair for pair in labels if pair[1])): value
        for (name, labels), value in wanted.items()
        if "train_job" in dict(labels)
    }
    config = backends.scrape_config(f"127.0.0.1:{sidecar.port}")
    with backends.prometheus(prometheus, tmp_path, config) as server:
        found = backends.wait_until(server.query, "the first scrape", seconds=60)
    assert found.keys() >= wanted.keys()
    assert {key: value for key, value in found.items() if wanted.get(key) != value and key in wanted} == {}
    assert all(math.isfinite(value) for value in found.values())
