"""Selectors of what a dashboard's variables choose, made from the exporter's catalog.

Invariants: a selector names a metric of the catalog, or a recorded series, and only labels that it has; a variable
that may stand for several values, or for all, is matched as a regular expression; "all" also matches what lacks the
label, as series pushed by OTLP lack ``instance``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from generator.query import Levels, select, select_recorded
from generator.settings import Settings
from torchmem_exporter import catalog
from torchmem_exporter.catalog import Metric

ALL = ".*"
"""What a variable is when everything is chosen."""
RATE_WINDOW = "$__rate_interval"
"""Grafana's own: at least four scrapes."""


@dataclass(frozen=True)
class Scope:
    """What one dashboard looks at.

    Attributes:
        settings: name the labels of a job.
        is_fleet: whether several jobs may be chosen.
    """

    settings: Settings
    is_fleet: bool = False

    @property
    def by(self) -> Levels:
        """Label lists to aggregate to."""
        return Levels(self.settings)

    @property
    def job_matchers(self) -> dict[str, str]:
        """What the variables demand of a job's labels, as ``select`` takes it."""
        mark = "~" if self.is_fleet else ""
        return {label: f"{mark}${label}" for label in self.settings.job_labels}

    @property
    def headings(self) -> dict[str, str]:
        """What a table calls the labels of a job."""
        return {label: "Job" if label == "train_job" else label.capitalize() for label in self.settings.job_labels}

    def job(self, metric: Metric, window: str = "", **matchers: str) -> str:
        """A selector of the chosen jobs."""
        added = set(self.settings.job_labels) - set(metric.labels)
        return select(metric, window, extra_labels=added, **self.job_matchers, **matchers)

    def ranks(self, metric: Metric, window: str = "", **matchers: str) -> str:
        """A selector of the chosen ranks of the chosen job."""
        return self.job(metric, window, **{"rank": "~$rank", **matchers})

    def devices(self, metric: Metric, window: str = "", **matchers: str) -> str:
        """A selector of the chosen devices of the chosen ranks."""
        return self.ranks(metric, window, **{"device": "~$device", **matchers})

    def recorded(self, name: str, **matchers: str) -> str:
        """A recorded series of the chosen jobs, by labels that it has."""
        return select_recorded(name, **self.job_matchers, **matchers)


def accelerators_first(query: Callable[[str], str]) -> str:
    """A query of accelerators; of the CPU where there is none.

    Args:
        query: makes it, given what the label ``device`` must be.
    """
    return f"{query('!cpu')}\nor on ()\n{query('cpu')}"


def stack(scope: Scope, metric: Metric, label: str, rank: str) -> str:
    """Bytes of one rank's device by a label, parts that add up to the whole.

    Args:
        scope: whose job it is.
        metric: by ``reftype``, or by ``module`` and ``reftype``.
        label: one of those.
        rank: a variable that is one rank.
    """
    level = ", ".join(label for label in metric.labels if label not in scope.settings.job_labels)

    def of(device: str) -> str:
        # what two sidecars tell of the same rank counts once
        chosen = scope.job(metric, rank=rank, device=device)
        return f"sum by ({label}) (max by ({level}) ({chosen}))"

    return accelerators_first(of)


def overhead(scope: Scope, by: str) -> str:
    """Share of the step time that watching takes, by labels."""
    spent, steps = (scope.ranks(metric, RATE_WINDOW) for metric in (catalog.TRACKER_TIME, catalog.STEP_TIME))
    return f"sum by ({by}) (rate({spent})) / (sum by ({by}) (rate({steps})) > 0)"
