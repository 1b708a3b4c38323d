"""What ``deploy/`` has to repeat of the rules, the alerts and the dashboards, because its tools read no other folders.

Kustomize turns no file of rules into the operator's PrometheusRule, and a Helm chart packs only what lies below it.
"""

from __future__ import annotations

import textwrap

from generator.catalogue import ALERTS, RULES
from generator.catalogue import files as rule_files
from generator.dashboards import files as dashboard_files
from generator.settings import DEFAULTS, Settings

PROMETHEUS_RULE = "kubernetes/monitoring/prometheusrule.yaml"
CHART = "helm/torchmem-exporter"

_HEAD = """\
# Generated from grafana/rules and grafana/alerts by `make generate`.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: torchmem
spec:
  groups:
"""
_GROUPS = "groups:\n"


def files(settings: Settings = DEFAULTS) -> dict[str, str]:
    """Contents by path below ``deploy``."""
    rules = rule_files(settings)
    dashboards = dashboard_files(settings)
    packed = {f"{CHART}/files/{name}": text for name, text in {RULES: rules[RULES], ALERTS: rules[ALERTS]}.items()}
    packed |= {f"{CHART}/files/{name}": text for name, text in dashboards.items()}
    return {PROMETHEUS_RULE: prometheus_rule(rules[RULES], rules[ALERTS]), **packed}


def prometheus_rule(*documents: str) -> str:
    """The operator's object with all groups of some files of rules."""
    return _HEAD + "".join(textwrap.indent(_groups(document), "  ") for document in documents)


def _groups(document: str) -> str:
    """The list below ``groups:``, as text, so that it reads as in the file it comes from."""
    before, key, groups = document.partition(_GROUPS)
    if not key or any(line and not line.startswith("#") for line in before.splitlines()):
        raise ValueError("a file of rules has nothing but comments before its groups")
    return groups
