"""Selectors and templates, made from the exporter's catalog: what is not in it cannot be asked for.

Invariants: a selector names a metric of the catalog, or a recorded series, and only labels that it has; templates hold
their queries between backquotes, so that no query needs escaping.

Known limit: ``up`` is Prometheus' own and has the labels that scraping gives everything.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from generator.settings import Settings
from torchmem_exporter.catalog import MODULE_EXCESS, Metric

SCRAPE_LABELS = ("job", "instance")
"""What every scraped series has besides its own labels."""

UP = "up"

JOB = "JOB"
"""Stands for the job's name in the queries and commands of runbooks."""

GROWER = "{{ .Labels.module }}/{{ .Labels.reftype }} +{{ .Value | humanize1024 }}B"
DEVICE_RATIO = "rank {{ .Labels.rank }} {{ .Labels.device }} {{ .Value | humanizePercentage }}"
"""Templates of one result."""

_SIGNS = {"!": "!=", "~": "=~"}


class UnknownLabelError(ValueError):
    """A selector asks for a label that the metric does not have."""


def select(metric: Metric, window: str = "", *, extra_labels: Collection[str] = (), **matchers: str) -> str:
    """A selector.

    Args:
        metric: from the catalog.
        window: of a range selector: a duration, and an offset where needed.
        extra_labels: which scraping adds, beyond the metric's own.
        matchers: by label what it must be; ``"!cpu"`` is anything but ``cpu``, ``"~a|b"`` is what matches ``a|b``.

    Raises:
        UnknownLabelError: the metric has no such label.
    """
    _check(metric, set(matchers) - set(extra_labels))
    return metric.prometheus_name + _braces(matchers) + (f"[{window}]" if window else "")


def select_recorded(name: str, **matchers: str) -> str:
    """A selector of a recorded series; see ``select``."""
    return name + _braces(matchers)


def select_any(*metrics: Metric, **matchers: str) -> str:
    """A selector of several metrics' series at once, for a sum in which some may be missing; see ``select``."""
    for metric in metrics:
        _check(metric, matchers)
    name = f'__name__=~"{"|".join(metric.prometheus_name for metric in metrics)}"'
    return "{" + ",".join(filter(None, [name, _braces(matchers).strip("{}")])) + "}"


def _check(metric: Metric, matchers: Iterable[str]) -> None:
    unknown = set(matchers) - set(metric.labels)
    if unknown:
        raise UnknownLabelError(f"{metric.prometheus_name} has no label {', '.join(sorted(unknown))}")


def _braces(matchers: dict[str, str]) -> str:
    parts = [f"{label}{_matcher(value)}" for label, value in matchers.items()]
    return "{" + ",".join(parts) + "}" if parts else ""


def _matcher(value: str) -> str:
    sign = _SIGNS.get(value[:1])
    return f'{sign}"{value[1:]}"' if sign else f'="{value}"'


@dataclass(frozen=True)
class Levels:
    """Label lists of the levels that queries aggregate to.

    Attributes:
        settings: what they are made with.
    """

    settings: Settings

    @property
    def job(self) -> str:
        """A training job."""
        return ", ".join(self.settings.job_labels)

    @property
    def rank(self) -> str:
        """A rank of a job."""
        return f"{self.job}, rank"

    @property
    def device(self) -> str:
        """A device of a rank."""
        return f"{self.rank}, device"

    @property
    def host(self) -> str:
        """A job's ranks on one host."""
        return f"{self.job}, host"

    def of_this_job(self, metric: Metric, **matchers: str) -> str:
        """A selector of the alert's own job, for a query in a template."""
        others = select(metric, **matchers).removeprefix(metric.prometheus_name).strip("{}")
        return metric.prometheus_name + "{" + ",".join(filter(None, [self._job_matchers(), others])) + "}"

    def recorded_of_this_job(self, name: str) -> str:
        """A recorded series of the alert's own job, for a query in a template."""
        return f"{name}{{{self._job_matchers()}}}"

    def _job_matchers(self) -> str:
        return ",".join(f"{label}=%[{position}]q" for position, label in enumerate(self.settings.job_labels, start=1))

    def listing(self, query: str, item: str, empty: str, *, by_label: str = "") -> str:
        """A template that lists a query's results, or says that there is none.

        Args:
            query: of the alert's own job, see ``of_this_job``.
            item: template of one result, of ``.Labels`` and ``.Value``.
            empty: what is said without any.
            by_label: whose order the results are in; empty: the query's.
        """
        arguments = " ".join(f"$labels.{label}" for label in self.settings.job_labels)
        flat = " ".join(query.split())
        call = f"query (printf `{flat}` {arguments})"
        call = f'sortByLabel "{by_label}" ({call})' if by_label else call
        return f"{{{{ range $i, $x := {call} }}}}{{{{ if $i }}}}, {{{{ end }}}}{item}{{{{ else }}}}{empty}{{{{ end }}}}"

    def growers(self) -> str:
        """A template that names the three modules and reftypes that grew most, on the rank where they did."""
        excess = f"max by (module, reftype) ({self.of_this_job(MODULE_EXCESS)}) > 0"
        return self.listing(f"sort_desc(topk(3, {excess}))", GROWER, "not told: no series by module, or no baseline")

    def worst(self, ratio: str, empty: str = "gone by now") -> str:
        """A template that lists the three devices with the highest ratio."""
        return self.listing(f"sort_desc(topk(3, max by (rank, device) ({ratio})))", DEVICE_RATIO, empty)
