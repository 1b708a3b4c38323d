"""The generated rules on real servers: Prometheus over a real sidecar, and VictoriaMetrics as far as it understands."""

from __future__ import annotations

import contextlib
import json
import time
import urllib.parse
from dataclasses import replace

import msgspec
import pytest

import backends
import records
import sidecars
from generator.catalogue import alerts
from generator.recordings import recordings
from generator.render import alerts_yaml, rules_yaml
from generator.settings import DEFAULTS
from torchmem.wire.record import encode

pytestmark = pytest.mark.slow

JOB = "llama-pretrain"
RECORDED = (
    "job:torchmem_memory_step_peak_bytes:sum",
    "job:torchmem_rank_up:sum",
    "device:torchmem_memory_filled_ratio:max",
)
NUM_LOOKS = 4
"""Evaluations in which a false alarm would come; one is held back."""


def rules_of(server, kind):
    groups = json.loads(backends.get(f"{server.url}/api/v1/rules?type={kind}"))["data"]["groups"]
    return [rule for group in groups for rule in group["rules"]]


def firing(server):
    """Annotations of the alerts that fire, by name."""
    rules = rules_of(server, "alert")
    alive = [alert for rule in rules for alert in rule["alerts"] if alert["state"] == "firing"]
    return {alert["labels"]["alertname"]: alert["annotations"] for alert in alive}


def look(server, looks):
    """Notes when the rules were evaluated last."""
    looks.update(rule["lastEvaluation"] for rule in rules_of(server, "alert"))
    return looks


def now_record(rank, **overrides):
    """The record of a healthy rank, of now, with a floor of bytes that need no name."""
    device = records.make_device(rank)
    device = msgspec.structs.replace(device, allocator=msgspec.structs.replace(device.allocator, num_retries=0))
    now = {"world_size": 2, "labelers": [], "written_at": time.time(), "start_time": time.time() - 60}
    return records.make_record(rank, devices=[device], **{**now, **overrides})


@contextlib.contextmanager
def watching(prometheus, folder, sidecar):
    """A Prometheus that scrapes and judges every second, and holds nothing back for longer than that."""
    rules, judgements = folder / "rules.yml", folder / "alerts.yml"
    rules.write_text(rules_yaml(recordings(DEFAULTS)))
    eager = replace(DEFAULTS, holds=dict.fromkeys(DEFAULTS.holds, "1s"))
    judgements.write_text(alerts_yaml(alerts(eager), eager))
    config = backends.scrape_config(f"127.0.0.1:{sidecar.port}", rule_files=[str(rules), str(judgements)])
    config["global"]["evaluation_interval"] = "1s"
    with backends.prometheus(prometheus, folder, config) as server:
        yield server


def evaluated(server):
    """All rules, once each has been evaluated with series to look at; a scrape may end between two of them."""
    if any(server.value(recorded) is None for recorded in RECORDED):
        return None
    rules = rules_of(server, "alert") + rules_of(server, "record")
    return rules if all(rule["health"] != "unknown" for rule in rules) else None


def test_ranks_that_end_and_ranks_that_die(prometheus, tmp_path):
    """The rules would fit what tests imagine of the sidecar, and not the sidecar: a clean end would wake somebody."""
    folder = tmp_path / "records"
    folder.mkdir()
    with contextlib.ExitStack() as stack:
        first, second = stack.enter_context(records.living(folder, now_record(0), now_record(1)))
        sidecar = stack.enter_context(sidecars.running(folder))
        server = stack.enter_context(watching(prometheus, tmp_path, sidecar))

        rules = backends.wait_until(lambda: evaluated(server), "an evaluation of all rules")
        assert {rule["name"]: rule.get("lastError") for rule in rules if rule["health"] != "ok"} == {}
        peak = sum(records.make_device(rank).step_peak_bytes for rank in (0, 1))
        assert server.value("job:torchmem_memory_step_peak_bytes:sum") == peak
        assert server.value("job:torchmem_rank_up:sum") == 2
        assert len(server.query("device:torchmem_memory_filled_ratio:max")) == 2

        second.write(encode(now_record(1, final=True)))
        second.close()
        gone = 'absent(torchmem_rank_up{rank="1"})'
        backends.wait_until(lambda: server.value(gone), "the clean end of a rank")
        looks = set()
        backends.wait_until(lambda: len(look(server, looks)) > NUM_LOOKS, "some evaluations")
        assert firing(server) == {}

        first.write(encode(now_record(0)))
        first.close()
        annotations = backends.wait_until(lambda: firing(server).get("TorchMemRanksMissing"), "an alert")
        assert annotations["summary"] == f"{JOB}: 1 rank(s) missing"
        assert annotations["ranks"] == "rank 0 crashed"


def test_victoria_metrics_understands_every_expression(victoria_metrics, tmp_path):
    """Users of VictoriaMetrics could load none of the rules."""
    asked = [one.expr for one in (*recordings(DEFAULTS), *alerts())]
    with backends.victoria_metrics(victoria_metrics, tmp_path) as server:
        for expr in asked:
            answer = backends.get(f"{server.url}/api/v1/query?{urllib.parse.urlencode({'query': expr})}")
            assert json.loads(answer)["status"] == "success"
