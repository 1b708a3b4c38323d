"""Drift from end to end: five real training jobs, one sidecar, Prometheus, Alertmanager and a webhook.

Four jobs go wrong, each in its own way, once the baselines of all are known; the fifth stays healthy, with checkpoints,
evaluations and sequences of many lengths. See ``jobs/drifting.py`` for what they do.

Shortened, against a production's intervals: Prometheus scrapes and evaluates every second (15 s or more), Alertmanager
groups for a second (30 s), a step takes some 30 ms, and alerts hold for ``MEMORY_HOLD`` where memory is judged, and
for ``LIFE_HOLD`` where a busy machine may be late (5 min or more, ``settings.HOLDS``). The detectors are as ever: they
count steps. No threshold is changed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

import backends
import sidecars
import webhook
from generator.catalogue import alerts
from generator.recordings import recordings
from generator.render import alerts_yaml, rules_yaml
from generator.settings import DEFAULTS
from torchmem_exporter.drift.judge import learned
from torchmem_exporter.reading.state import FILE_NAME, StateFile

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).resolve().parents[2] / "jobs" / "drifting.py"
JOBS = {"leak": 1, "steps-up": 1, "optimizer": 1, "unsharded": 2, "control": 1}
"""Ranks by job."""
EXPECTED = {
    "leak": ("TorchMemLeakSuspected", "layers.2.up/activation"),
    "steps-up": ("TorchMemPeakDrift", "layers.*.act/activation"),
    "optimizer": ("TorchMemLeakSuspected", "head.adapters/optimizer_state"),
    "unsharded": ("TorchMemPeakDrift", "layers.*.up/unsharded_gradient"),
}
"""By job the alert that must come, and who must be named as the one that grew most."""
RIGHT = {
    "leak": {"TorchMemLeakSuspected", "TorchMemPeakDrift", "TorchMemExhaustionPredicted"},
    "steps-up": {"TorchMemPeakDrift"},
    "optimizer": {"TorchMemLeakSuspected", "TorchMemPeakDrift", "TorchMemExhaustionPredicted"},
    "unsharded": {"TorchMemPeakDrift"},
}
"""By job what may be said of it: what leaks is soon above its baseline as well, and ends somewhere."""

MEMORY_HOLD, LIFE_HOLD = "2s", "30s"
LIFE = {
    "TorchMemRanksMissing",
    "TorchMemSnapshotStale",
    "TorchMemExporterDown",
    "TorchMemSnapshotRejected",
    "TorchMemLabelerDown",
    "TorchMemOverheadHigh",
}
KNOWN_SECONDS = 240.0
"""For five jobs to start and to show what is usual of them, on a busy machine."""
FOUND_SECONDS = 240.0
HEALTHY_STEPS = 512
"""That the control must have taken since the faults began."""
TELLING = r"torchmem_\w*(drift|growth|excess|baseline|exhaustion|steps_total|rank_up|snapshot_errors)"
UNHEALTHY = "up or torchmem_memory_drifting or torchmem_memory_drift_ratio"

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def training(folder):
    """All ranks of all jobs, their records in ``folder/records``."""
    with contextlib.ExitStack() as stack:
        for job, world_size in JOBS.items():
            for rank in range(world_size):
                places = [str(folder / "records"), str(folder)]
                command = [sys.executable, str(SCRIPT), job, job, *places, str(rank), str(world_size)]
                stack.enter_context(backends.running(command, folder / f"{job}-{rank}.log"))
        yield


def write_rules(folder):
    """The generated rules, with shorter holds; returns the files."""
    holds = {name: LIFE_HOLD if name in LIFE else MEMORY_HOLD for name in DEFAULTS.holds}
    eager = replace(DEFAULTS, holds=holds)
    files = folder / "rules.yml", folder / "alerts.yml"
    files[0].write_text(rules_yaml(recordings(eager)))
    files[1].write_text(alerts_yaml(alerts(eager), eager))
    return [str(file) for file in files]


@contextlib.contextmanager
def watching(prometheus, folder, sidecar, alertmanager):
    """A Prometheus that scrapes the sidecar, judges by the rules and tells Alertmanager."""
    config = backends.scrape_config(
        f"127.0.0.1:{sidecar.port}",
        rule_files=write_rules(folder),
        alerting={"alertmanagers": [{"static_configs": [{"targets": [alertmanager.address]}]}]},
    )
    config["global"]["evaluation_interval"] = "1s"
    with backends.prometheus(prometheus, folder, config) as server:
        yield server


@contextlib.contextmanager
def told_when_it_fails(folder, server, sidecar, received):
    """Logs what everybody saw, if the test fails in here."""
    try:
        yield
    except BaseException:
        for title, lines in seen(folder, server, sidecar, received).items():
            logger.warning("%s:\n%s", title, "\n".join(lines))
        raise


def seen(folder, server, sidecar, received):
    """What the jobs said, the sidecar exposes, Prometheus judged and the webhook got: lines by whom they are of."""
    logs = sorted(folder.glob("*.log"))
    found = {log.name: log.read_text(errors="replace").splitlines()[-5:] for log in logs}
    found["webhook"] = [str(alert) for alert in received.alerts]
    with contextlib.suppress(OSError):
        found["sidecar"] = [line for line in sidecar.ask().text.splitlines() if re.match(TELLING, line)]
    with contextlib.suppress(OSError):
        groups = json.loads(backends.get(f"{server.url}/api/v1/rules"))["data"]["groups"]
        rules = [rule for group in groups for rule in group["rules"]]
        found["rules"] = [json.dumps(rule) for rule in rules if rule.get("alerts") or rule["health"] == "err"]
        found["Prometheus"] = [f"{dict(labels)} {value:g}" for (_, labels), value in server.query(UNHEALTHY).items()]
    return found


def latest(metric):
    """What was last scraped of a metric: where a scrape comes too late, Prometheus says that there is none."""
    return f"last_over_time({metric}[{LIFE_HOLD}])"


def by_job(server, query):
    """A query's values by job."""
    return {dict(labels)["train_job"]: value for (_, labels), value in server.query(query).items()}


def ranks_with_baseline(server):
    """How many ranks of each job have one."""
    return by_job(server, "count by (train_job) (torchmem_memory_baseline_bytes and torchmem_memory_drift_ratio)")


def ranks_seen(directory):
    """Of how many ranks of each job the sidecar has kept what usually holds their memory; else nobody can be named.

    It may come later than the baseline: peaks under gloo vary, and an odd one is not taken for the usual.
    """
    return {
        job: sum(all(drift.usual for drift in drifts.values()) for drifts in ranks.values())
        for job, ranks in learned(StateFile(directory / FILE_NAME)).items()
    }


def wrong(received):
    """Alerts that should not have come."""
    return [alert for alert in received.alerts if alert.name not in RIGHT.get(alert.train_job, set())]


def named(alert):
    """Who grew by an alert's annotation, ``module/reftype``, the most grown first."""
    return [item.split(" +")[0] for item in alert.annotations["growers"].split(", ")]


def test_each_fault_is_told_with_its_name_and_the_healthy_job_is_left_alone(prometheus, alertmanager, tmp_path):
    """Nobody would be told of a drift, or of the wrong module, or somebody would be woken for nothing."""
    (tmp_path / "records").mkdir()
    with contextlib.ExitStack() as stack:
        received = stack.enter_context(webhook.receiving())
        stack.enter_context(training(tmp_path))
        sidecar = stack.enter_context(sidecars.running(tmp_path / "records"))
        teller = stack.enter_context(backends.alertmanager(alertmanager, tmp_path, received.url))
        server = stack.enter_context(watching(prometheus, tmp_path, sidecar, teller))
        stack.enter_context(told_when_it_fails(tmp_path, server, sidecar, received))

        backends.wait_until(lambda: ranks_with_baseline(server) == JOBS, "learning all baselines", KNOWN_SECONDS, 1)
        backends.wait_until(lambda: ranks_seen(tmp_path / "records") == JOBS, "seeing what is usual", KNOWN_SECONDS, 1)
        assert received.alerts == ()

        (tmp_path / "fault").touch()
        began, steps = time.monotonic(), server.value(latest('torchmem_steps_total{train_job="control"}'))
        found = {}

        def all_found():
            for job, (name, _) in EXPECTED.items():
                if job not in found and received.first(name, job):
                    found[job] = received.first(name, job)
                    seconds, growers = time.monotonic() - began, found[job].annotations["growers"]
                    logger.info("%s: told after %.0f s: %s", job, seconds, growers)
            return len(found) == len(EXPECTED)

        backends.wait_until(all_found, "the four alerts", FOUND_SECONDS)
        later = f'torchmem_steps_total{{train_job="control"}} > {steps + HEALTHY_STEPS}'
        backends.wait_until(lambda: server.value(later), "the control's steps", FOUND_SECONDS, 1)

        assert wrong(received) == []
        # Of each job, in every alert, the same: the one that is to blame.
        told = {(alert.train_job, named(alert)[0]) for alert in received.alerts}
        assert told == {(job, grower) for job, (_, grower) in EXPECTED.items()}
        drifting, saved, up = (
            by_job(server, f"{how} by (train_job) ({latest(metric)})")
            for how, metric in (
                ("max", "torchmem_memory_drifting"),
                ("max", "torchmem_checkpoint_memory_peak_bytes"),
                ("min", "torchmem_rank_up"),
            )
        )
        assert drifting["control"] == 0
        assert saved["control"] > 0
        assert up == dict.fromkeys(JOBS, 1)
