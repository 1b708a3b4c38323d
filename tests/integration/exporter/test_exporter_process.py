"""The sidecar as users run it: a process, a port, and the real tools that read it."""

from __future__ import annotations

import contextlib
import json
import math
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics

from records import living, make_record
from sidecars import DEADLINE_SECONDS, running, series, states

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
    assert sidecar.first_line.startswith("torchmem-exporter")
    assert sidecar.first_line.endswith(f"serving {address} from {tmp_path / 'records'}\n")


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
def test_it_ends_within_a_second(sidecar, ending):
    """A host that shuts down, or a user's Ctrl-C, would wait for the sidecar or see a traceback."""
    assert sidecar.ask("/healthz").status == 200
    status, seconds = sidecar.end(ending)
    assert (status, sidecar.errors.read()) == (0, "")
    assert seconds < 1.0


def test_promtool_finds_no_fault(sidecar, promtool):
    """The output would break a rule of Prometheus' own linter."""
    body = sidecar.ask().body
    done = subprocess.run([promtool, "check", "metrics"], input=body, capture_output=True, timeout=30, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_strict_parser_takes_the_openmetrics(sidecar):
    """A scraper that asks for OpenMetrics would refuse the scrape."""
    found = list(parse_openmetrics(sidecar.ask(headers={"Accept": OPENMETRICS}).text))
    plain = {name for name, _ in series(sidecar.ask().text)}
    assert {sample.name for family in found for sample in family.samples} == plain


@pytest.mark.slow
def test_prometheus_returns_the_values_to_the_byte(sidecar, prometheus, tmp_path):
    """What an operator queries would differ from what a rank has written."""
    wanted = series(sidecar.ask().text)
    del wanted["torchmem_scrape_duration_seconds", ()]
    # To Prometheus an empty label is none.
    wanted = {(name, tuple(pair for pair in labels if pair[1])): value for (name, labels), value in wanted.items()}
    with serving_prometheus(prometheus, tmp_path, sidecar.port) as url:
        deadline = time.monotonic() + 60
        while not (found := queried(url)) and time.monotonic() < deadline:
            time.sleep(0.2)
    assert found.keys() >= wanted.keys()
    assert {key: value for key, value in found.items() if wanted.get(key) != value and key in wanted} == {}
    assert all(math.isfinite(value) for value in found.values())


@contextlib.contextmanager
def serving_prometheus(binary, folder, target_port):
    """A real Prometheus that scrapes the port each second; yields its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    config = folder / "prometheus.yml"
    scrape = {"job_name": "torchmem", "static_configs": [{"targets": [f"127.0.0.1:{target_port}"]}]}
    config.write_text(json.dumps({"global": {"scrape_interval": "1s"}, "scrape_configs": [scrape]}))
    arguments = [f"--config.file={config}", f"--storage.tsdb.path={folder / 'tsdb'}", f"--web.listen-address={address}"]
    with (folder / "prometheus.log").open("wb") as log:
        server = subprocess.Popen([binary, *arguments], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            yield f"http://{address}"
        finally:
            server.terminate()
            try:
                server.wait(DEADLINE_SECONDS)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def queried(url):
    """All of our series that Prometheus has: (name, labels) -> value; none while it is not there yet."""
    query = urllib.parse.urlencode({"query": '{__name__=~"torchmem_.+"}'})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{url}/api/v1/query?{query}", timeout=5) as response:
            rows = json.load(response)["data"]["result"]
    except (OSError, urllib.error.URLError):
        return {}
    found = {}
    for row in rows:
        labels = row["metric"]
        name = labels.pop("__name__")
        del labels["job"], labels["instance"]
        found[name, tuple(sorted(labels.items()))] = float(row["value"][1])
    return found
