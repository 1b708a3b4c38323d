"""``deploy/otel/rotel.env`` started as it says, between a real sidecar that pushes and a real store."""

from __future__ import annotations

import re
import time

import pytest
import yaml

import backends
import deploys
import sidecars
from records import living, make_record

pytestmark = pytest.mark.slow

OTEL = deploys.DEPLOY / "otel"
PUSHED = {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf", "OTEL_METRIC_EXPORT_INTERVAL": "1000"}


def settings():
    """The variables of rotel.env."""
    return dict(re.findall(r"^(ROTEL_\w+)=(.*)$", (OTEL / "rotel.env").read_text(), re.MULTILINE))


def test_both_agents_are_set_alike():
    """Who changes from one agent to the other would have to look for his series."""
    agent, rotel = yaml.safe_load((OTEL / "agent.yaml").read_text()), settings()
    protocols = agent["receivers"]["otlp"]["protocols"]
    assert rotel["ROTEL_OTLP_GRPC_ENDPOINT"] == protocols["grpc"]["endpoint"].replace("env:", "")
    assert rotel["ROTEL_OTLP_HTTP_ENDPOINT"] == protocols["http"]["endpoint"].replace("env:", "")
    assert rotel["ROTEL_OTLP_GRPC_MAX_RECV_MSG_SIZE_MIB"] == str(protocols["grpc"]["max_recv_msg_size_mib"])
    assert agent["service"]["pipelines"] == {
        "metrics": {"receivers": ["otlp"], "processors": ["memory_limiter", "batch"], "exporters": ["otlphttp"]}
    }
    assert "BACKEND_OTLP_ENDPOINT" in agent["exporters"]["otlphttp"]["endpoint"]
    assert "BACKEND_OTLP_ENDPOINT" in rotel["ROTEL_OTLP_EXPORTER_ENDPOINT"]


def test_what_a_sidecar_pushes_arrives(rotel, victoria_metrics, tmp_path, monkeypatch):
    """The agent would not start from the file, or lose series or the rank that they are of."""
    text = (OTEL / "rotel.env").read_text()
    addresses = {name: backends.free_address() for name in ("ROTEL_OTLP_GRPC_ENDPOINT", "ROTEL_OTLP_HTTP_ENDPOINT")}
    for name, address in addresses.items():
        text, number = re.subn(f"(?m)^{name}=.*$", f"{name}={address}", text)
        assert number == 1
    (tmp_path / "rotel.env").write_text(text)
    records = tmp_path / "records"
    for name, value in PUSHED.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://{addresses['ROTEL_OTLP_HTTP_ENDPOINT']}")
    script = 'set -a; . "$1"; exec "$2" start --pid-file="$3"'
    with backends.victoria_metrics(victoria_metrics, tmp_path) as store:
        monkeypatch.setenv("BACKEND_OTLP_ENDPOINT", store.otlp_url)
        command = ["sh", "-c", script, "sh", tmp_path / "rotel.env", rotel, tmp_path / "rotel.pid"]
        with (
            backends.running(command, tmp_path / "rotel.log"),
            living(records, *(make_record(rank, written_at=time.time()) for rank in (0, 1))),
            sidecars.running(records) as sidecar,
        ):
            names = {name for name, _ in sidecars.series(sidecar.ask().body.decode())}
            ours = {name for name in names if name.startswith("torchmem_module_memory")}
            assert ours
            ours.add("torchmem_rank_up")

            def arrived():
                found = store.query('{__name__=~"torchmem_module_memory.+|torchmem_rank_up"}')
                return {(name, dict(labels).get("rank")) for name, labels in found} >= {
                    (name, rank) for name in ours for rank in ("0", "1")
                }

            backends.wait_until(arrived, "the way through the agent", 60)
            jobs = {dict(labels)["service_name"] for _, labels in store.query("torchmem_rank_up")}
            assert jobs == {make_record(0).identity.train_job}
    deploys.passed("rotel", "otel/agent.yaml", "otel/rotel.env")
