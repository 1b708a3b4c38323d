"""From the catalogue to files: rules and alerts as Prometheus' YAML, runbooks as Markdown.

Invariant: equal input gives equal bytes, whatever the machine.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import yaml

from generator.model import Alert, Check, Recording
from generator.query import JOB
from generator.settings import Settings

HEADER = "# Generated: change grafana/generator and run `make generate`.\n"


class _Text(str):
    """Written as a block of lines."""

    __slots__ = ()


class _Dumper(yaml.SafeDumper):
    """Keeps lines as they are, and lists indented."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:  # noqa: FBT001, FBT002, ARG002
        super().increase_indent(flow, indentless=False)


_Dumper.add_representer(
    _Text, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", str(text), style="|")
)


def rules_yaml(recordings: Iterable[Recording]) -> str:
    """The file of recording rules."""
    rules = [{"record": one.name, "expr": _block(one.expr)} for one in recordings]
    return _yaml("torchmem.rules", rules)


def alerts_yaml(alerts: Iterable[Alert], settings: Settings) -> str:
    """The file of alerts."""
    return _yaml("torchmem.alerts", [_alert(one, settings) for one in alerts])


def _alert(alert: Alert, settings: Settings) -> dict[str, Any]:
    annotations = {"summary": alert.summary, "description": alert.description, **alert.details}
    annotations["runbook_url"] = f"{settings.runbook_base}/{alert.name}.md"
    rule: dict[str, Any] = {"alert": alert.name, "expr": _block(alert.expr)}
    if alert.hold:
        rule["for"] = alert.hold
    return rule | {"labels": {"severity": alert.severity.value}, "annotations": annotations}


def _block(expr: str) -> str:
    return _Text(expr + "\n") if "\n" in expr else expr


def _yaml(group: str, rules: list[dict[str, Any]]) -> str:
    groups = {"groups": [{"name": group, "rules": rules}]}
    return HEADER + yaml.dump(groups, Dumper=_Dumper, sort_keys=False, width=10_000, allow_unicode=True)


def runbook_markdown(alert: Alert, settings: Settings) -> str:
    """The page of one alert."""
    book = alert.runbook
    pieces = [
        f"<!-- {HEADER.strip('# ').strip()} -->",
        f"# {alert.name}",
        f"Severity **{alert.severity.value}**, after {alert.hold or 'no delay'}. {book.meaning}",
        f"```promql\n{alert.expr}\n```",
        _thresholds(alert, settings),
        f"## Confirm\n\nWrite the job's name for `{JOB}`.",
        *map(_check, book.confirm),
        "## Do\n\n" + "\n".join(f"{number}. {step}" for number, step in enumerate(book.act, start=1)),
        "## When it is false\n\n" + "\n".join(f"- {case}" for case in book.false_when),
    ]
    return "\n\n".join(filter(None, pieces)) + "\n"


def _thresholds(alert: Alert, settings: Settings) -> str:
    if not alert.settings:
        return ""
    rows = [f"| `{name}` | `{getattr(settings, name)}` | {settings.about(name)} |" for name in alert.settings]
    head = "Thresholds, in `grafana/generator/settings.py`:\n\n| setting | value | what |\n| --- | --- | --- |\n"
    return head + "\n".join(rows)


def _check(check: Check) -> str:
    language, code = ("promql", check.query) if check.query else ("console", check.command)
    return f"{check.what}\n\n```{language}\n{code}\n```"
