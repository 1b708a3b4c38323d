"""What is checked in is what the catalogue says, and promtool and a reader can use it."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from generator import reference
from generator.catalogue import ALERTS, RULES, RUNBOOKS, alerts, files
from generator.model import Severity
from generator.settings import DEFAULTS
from torchmem_exporter.catalog import METRICS

GRAFANA = Path(__file__).resolve().parents[3] / "grafana"
NAMES = {
    "TorchMemPeakDrift": "warning",
    "TorchMemLeakSuspected": "warning",
    "TorchMemExhaustionPredicted": "critical",
    "TorchMemHeadroomLow": "critical",
    "TorchMemOutOfMemory": "critical",
    "TorchMemSnapshotStale": "warning",
    "TorchMemRanksMissing": "critical",
    "TorchMemAllocatorRetries": "warning",
    "TorchMemFragmentationHigh": "warning",
    "TorchMemRankSkew": "warning",
    "TorchMemForecastMissed": "warning",
    "TorchMemUnattributedHigh": "warning",
    "TorchMemOverheadHigh": "warning",
    "TorchMemCheckpointPeakHigh": "warning",
    "TorchMemExporterDown": "critical",
    "TorchMemSnapshotRejected": "warning",
    "TorchMemLabelerDown": "warning",
}


def test_the_alerts_are_those_promised():
    """An alert would be missing, or its severity changed unnoticed and be routed elsewhere."""
    assert {alert.name: alert.severity.value for alert in alerts()} == NAMES
    assert len(alerts()) == len(NAMES)


@pytest.mark.parametrize("name", sorted(files()))
def test_checked_in_files_are_as_generated(name):
    """Somebody changed a generated file, or the catalogue and forgot `make generate`."""
    assert (GRAFANA / name).read_text() == files()[name]


def test_the_page_of_metrics_is_as_generated_and_whole():
    """A metric would be looked for in vain, or be described as it once was."""
    text = (GRAFANA.parent / "docs" / reference.METRICS).read_text()
    assert text == reference.page()
    listed = [line.split("`")[1] for line in text.splitlines() if line.startswith("| `")]
    assert sorted(listed) == sorted(metric.prometheus_name for metric in METRICS)


def test_no_runbook_is_left_over():
    """A runbook of an alert that is gone would still be read."""
    assert {path.stem for path in (GRAFANA / RUNBOOKS).iterdir()} == set(NAMES)


def test_promtool_accepts_the_rules(promtool):
    """Prometheus would refuse to start, or to reload."""
    paths = [GRAFANA / RULES, GRAFANA / ALERTS]
    done = subprocess.run(
        [promtool, "check", "rules", "--lint-fatal", *paths], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FAILED" not in done.stdout


def test_labels_are_at_job_level():
    """A label that changes with the worst rank would begin the alert anew again and again."""
    rules = yaml.safe_load((GRAFANA / ALERTS).read_text())["groups"][0]["rules"]
    assert all(set(rule["labels"]) == {"severity"} for rule in rules)


def test_runbook_urls_follow_the_setting():
    """A fleet's alerts would link to pages that nobody there can open."""
    settings = replace(DEFAULTS, runbook_base="https://wiki.example/torchmem")
    rules = yaml.safe_load(files(settings)[ALERTS])["groups"][0]["rules"]
    assert {rule["annotations"]["runbook_url"] for rule in rules} == {
        f"https://wiki.example/torchmem/{name}.md" for name in NAMES
    }
    default = yaml.safe_load(files()[ALERTS])["groups"][0]["rules"]
    root = GRAFANA.parent
    assert all((root / rule["annotations"]["runbook_url"]).is_file() for rule in default)


def changed_files(settings):
    """Names of the files that other settings change."""
    return {name for name, content in files(settings).items() if content != files()[name]}


def test_holds_reach_rules_and_runbooks():
    """An alert would wait for another time than its runbook and the settings say."""
    settings = replace(DEFAULTS, holds={**DEFAULTS.holds, "TorchMemRankSkew": "77m"})
    assert changed_files(settings) == {ALERTS, f"{RUNBOOKS}/TorchMemRankSkew.md"}
    assert all("77m" in files(settings)[name] for name in changed_files(settings))
    assert set(DEFAULTS.holds) == set(NAMES)


def test_thresholds_reach_rules_and_runbooks():
    """A changed threshold would be told in the runbook and not be used, or the other way round."""
    settings = replace(DEFAULTS, max_filled_ratio=0.8125)
    made = files(settings)
    changed = changed_files(settings)
    assert changed == {ALERTS, f"{RUNBOOKS}/TorchMemHeadroomLow.md"}
    assert all("0.8125" in made[name] for name in changed)


def test_a_critical_alert_waits_no_longer_than_ten_minutes():
    """Somebody would be woken too late to save the job."""
    holds = {alert.name: alert.hold for alert in alerts() if alert.severity is Severity.CRITICAL}
    assert set(holds.values()) <= {"", "5m", "10m"}
