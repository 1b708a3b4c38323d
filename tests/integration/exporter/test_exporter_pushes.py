"""The sidecar as a process that pushes: what it sends is what it serves, and its end brings the last of it."""

from __future__ import annotations

import subprocess
import time

import pytest

from otlp_receivers import RECEIVERS, Reply, http_receiver
from records import living, make_record
from sidecars import command, running, series
from torchmem_exporter import catalog

NAMES = {metric.otel_name: metric.prometheus_name for metric in catalog.METRICS}


@pytest.fixture
def pushing_to(monkeypatch):
    """Sets the standard variables for a receiver."""

    def set_variables(receiver, protocol="http/protobuf", interval_ms=200):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
        monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", str(interval_ms))
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "2000")

    return set_variables


def of_ranks(found):
    """The series that are of ranks and jobs: those of the sidecar itself change from one look to the next."""
    return {key: value for key, value in found.items() if dict(key[1]).get("train_job")}


def arrived(receiver):
    """What has arrived last, under its Prometheus names: (name, labels) -> value."""
    return {(NAMES[point.metric], point.labels): point.value for point in receiver.points()}


@pytest.mark.parametrize("protocol", RECEIVERS)
def test_what_is_pushed_is_what_is_served(tmp_path, pushing_to, protocol):
    """A dashboard would show other figures by OpenTelemetry than by Prometheus."""
    records = [make_record(i, 40, written_at=time.time()) for i in range(3)]
    with living(tmp_path, *records), RECEIVERS[protocol]() as receiver:
        pushing_to(receiver, protocol, interval_ms=2000)  # which bounds each push too: none may fail
        with running(tmp_path, "--level", "full") as sidecar:
            receiver.wait_for(lambda one: len(one.bodies) >= 2)
            served = of_ranks(series(sidecar.ask().text))
            # An empty label is none.
            expected = {(name, tuple(p for p in labels if p[1])): value for (name, labels), value in served.items()}
            assert of_ranks(arrived(receiver)) == expected
            text = sidecar.ask().text
    pushes = {labels: value for (name, labels), value in series(text).items() if "otlp_pushes" in name}
    assert pushes[(("outcome", "failure"),)] == 0
    assert pushes[(("outcome", "success"),)] >= 1


def test_the_end_brings_what_had_not_been_pushed(tmp_path, pushing_to):
    """The last state of a node that is taken down would never arrive."""
    with living(tmp_path, make_record(written_at=time.time())), http_receiver() as receiver:
        pushing_to(receiver, interval_ms=3_600_000)
        with running(tmp_path) as sidecar:
            status, _ = sidecar.end()
        assert status == 0
        assert arrived(receiver)["torchmem_step_number", (("rank", "0"), ("train_job", "llama-pretrain"))] == 40


def test_a_collector_that_hangs_delays_no_scrape(tmp_path, pushing_to):
    """Prometheus would lose the node for as long as the collector is unwell."""
    with living(tmp_path, make_record(written_at=time.time())), http_receiver() as receiver:
        receiver.reply = Reply(seconds=60.0)
        pushing_to(receiver)
        with running(tmp_path) as sidecar:
            receiver.wait_for(lambda one: one.bodies)
            began = time.monotonic()
            assert all(sidecar.ask().status == 200 for _ in range(20))
            assert time.monotonic() - began < 30


def test_a_senseless_variable_is_one_line(tmp_path, monkeypatch):
    """An operator would search for what is wrong in a traceback."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "collector")
    done = subprocess.run(command("--dir", str(tmp_path)), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "OTEL_EXPORTER_OTLP_ENDPOINT" in done.stderr
