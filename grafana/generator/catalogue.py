"""Everything that is generated: the alerts in the order of the file, and the files by their paths."""

from __future__ import annotations

from generator import drift_alerts, memory_alerts, rank_alerts, watch_alerts
from generator.model import Alert
from generator.recordings import recordings
from generator.render import alerts_yaml, rules_yaml, runbook_markdown
from generator.settings import DEFAULTS, Settings

RULES = "rules/torchmem.rules.yml"
ALERTS = "alerts/torchmem.alerts.yml"
RUNBOOKS = "runbooks"


def alerts(settings: Settings = DEFAULTS) -> tuple[Alert, ...]:
    """All alerts."""
    subjects = (drift_alerts, memory_alerts, rank_alerts, watch_alerts)
    return tuple(alert for subject in subjects for alert in subject.alerts(settings))


def files(settings: Settings = DEFAULTS) -> dict[str, str]:
    """Contents by path below ``grafana``."""
    pages = {f"{RUNBOOKS}/{alert.name}.md": runbook_markdown(alert, settings) for alert in alerts(settings)}
    return {
        RULES: rules_yaml(recordings(settings)),
        ALERTS: alerts_yaml(alerts(settings), settings),
        **pages,
    }
