"""What is generated: recorded series, alerts and their runbooks, as data."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field


class Severity(enum.Enum):
    """What an alert asks for, as the ``severity`` label spells it."""

    WARNING = "warning"
    """Look at it today."""
    CRITICAL = "critical"
    """The job fails, or has failed: look now."""


@dataclass(frozen=True, kw_only=True)
class Recording:
    """One recorded series.

    Attributes:
        name: ``level:metric:operation``.
        expr: what is recorded.
        about: what it is good for.
    """

    name: str
    expr: str
    about: str


@dataclass(frozen=True, kw_only=True)
class Check:
    """One thing to look at.

    Attributes:
        what: it tells.
        query: PromQL, with the job written ``JOB``; empty where a command is run.
        command: for a shell on the host of a rank; empty where a query is made.
    """

    what: str
    query: str = ""
    command: str = ""


@dataclass(frozen=True, kw_only=True)
class Runbook:
    """What whoever is woken by an alert reads.

    Attributes:
        meaning: what has happened.
        confirm: what to look at.
        act: what to do, likeliest cause first.
        false_when: when the alert is no reason to do anything.
    """

    meaning: str
    confirm: tuple[Check, ...]
    act: tuple[str, ...]
    false_when: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Alert:
    """One alert.

    Attributes:
        name: begins with ``TorchMem``.
        severity: what it asks for.
        expr: its labels are the job's, so that no change of the worst rank or module begins the alert anew.
        hold: how long the expression must hold, in Prometheus' notation; empty for at once.
        summary: template of one line.
        description: template of what is known beyond that.
        details: templates that name the ranks, devices and growers, by annotation.
        settings: names of the settings that the alert depends on.
        runbook: see there.
    """

    name: str
    severity: Severity
    expr: str
    summary: str
    description: str
    runbook: Runbook
    hold: str = ""
    details: dict[str, str] = field(default_factory=dict)
    settings: tuple[str, ...] = ()
