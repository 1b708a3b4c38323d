"""``deploy/otel``: what can be said of a Collector's configuration without one, which no package has whole."""

from __future__ import annotations

import shutil
import subprocess

import pytest
import yaml

import deploys
from torchmem_exporter.otlp.config import from_environ

OTEL = deploys.DEPLOY / "otel"
CONFIGURATIONS = ["agent.yaml", "scrape.yaml"]


def read(name):
    """A configuration."""
    return yaml.safe_load((OTEL / name).read_text())


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_pipelines_use_what_is_there(name):
    """The Collector would not start, or a part of the file would do nothing."""
    config = read(name)
    pipelines = config.pop("service")["pipelines"].values()
    used = {kind: {part for pipeline in pipelines for part in pipeline[kind]} for kind in config}
    assert used == {kind: set(parts) for kind, parts in config.items()}
    assert all(pipeline["processors"][0] == "memory_limiter" for pipeline in pipelines)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_collector_accepts(name):
    """The Collector would not start."""
    collector = shutil.which("otelcol-contrib") or shutil.which("otelcol")
    if collector is None:
        pytest.skip("no otelcol on PATH: no package of PyPI, npm or Debian has one with these receivers")
    environment = {"BACKEND_OTLP_ENDPOINT": "http://127.0.0.1:8428/opentelemetry", "NODE_NAME": "node"}
    command = [collector, "validate", f"--config={OTEL / name}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_sidecars_push_to_where_the_agent_listens():
    """Every push would fail."""
    protocols = read("agent.yaml")["receivers"]["otlp"]["protocols"]
    for protocol, place in (("grpc", "grpc"), ("http/protobuf", "http")):
        pushed = from_environ({"OTEL_METRICS_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": protocol}).endpoint
        listening = protocols[place]["endpoint"].replace("${env:LISTEN_ADDRESS:-127.0.0.1}", "localhost")
        assert pushed.startswith(f"http://{listening}")


def test_what_the_collector_scrapes(victoria_metrics, tmp_path):
    """The Collector would refuse the part that is Prometheus' own, or find nothing."""
    text = (OTEL / "scrape.yaml").read_text().replace("${env:NODE_NAME}", "node")
    config = yaml.safe_load(text)["receivers"]["prometheus"]["config"]
    path = tmp_path / "scrape.yml"
    path.write_text(yaml.safe_dump(config))
    command = [victoria_metrics, f"-promscrape.config={path}", "-promscrape.config.strictParse", "-dryRun"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    deploys.passed("victoria-metrics", "otel/scrape.yaml")
