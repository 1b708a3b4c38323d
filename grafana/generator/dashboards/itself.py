"""The dashboard of torchmem's own parts: whether what the others show can be trusted, and what it costs.

Invariant: it looks at all jobs of the chosen sidecars; series that came by OTLP have no ``instance`` and count when
all are chosen.
"""

from __future__ import annotations

from generator.dashboards.page import ITSELF, Page, Row, choice
from generator.dashboards.panels import (
    BAD,
    COUNT,
    NO_CELL,
    PER_SECOND,
    RATIO,
    SECONDS,
    STATES,
    Query,
    Show,
    above,
    lines,
    number,
)
from generator.dashboards.scope import RATE_WINDOW, Scope
from generator.dashboards.tables import Column, rows
from generator.query import select
from generator.recordings import JOB_OVERHEAD
from generator.settings import Settings
from torchmem_exporter import catalog
from torchmem_exporter.catalog import Metric

SIDECAR = "instance"
SAMPLES = "scrape_samples_scraped"
"""Prometheus' own: series that a scrape brought."""


def page(settings: Settings) -> Page:
    """The dashboard."""
    scope = Scope(settings, is_fleet=True)
    query = f"label_values({catalog.SCRAPE_DURATION.prometheus_name}, {SIDECAR})"
    return Page(
        uid=ITSELF,
        about="torchmem's own parts: sidecars, records they could not use, parts that are off, and what it all costs.",
        scope=scope,
        variables=(choice(SIDECAR, "Sidecar", query, "Address of a sidecar", many=True),),
        rows=(_now(), _records(scope), _labelers(scope), _cost(scope), _serving()),
    )


def _own(metric: Metric, window: str = "", **matchers: str) -> str:
    """A selector of what the chosen sidecars say of themselves."""
    return select(metric, window, extra_labels={SIDECAR}, **{SIDECAR: f"~${SIDECAR}"}, **matchers)


def _of_jobs(scope: Scope, metric: Metric, window: str = "") -> str:
    """A selector of what the chosen sidecars say of the chosen jobs."""
    matchers = {**scope.job_matchers, SIDECAR: f"~${SIDECAR}"}
    return select(metric, window, extra_labels=matchers, **matchers)


def _now() -> Row:
    panels = (
        number(
            Show(title="Sidecars", about="Sidecars that answer.", unit=COUNT, span=4, height=5, no_value="0"),
            Query(f"count({_own(catalog.SCRAPE_DURATION)})", "sidecars"),
        ),
        number(
            Show(
                title="Slowest scrape",
                about="Time that the slowest sidecar took to read the records and render its answer.",
                unit=SECONDS,
                span=4,
                height=5,
                limits=above(1, 5),
            ),
            Query(f"max({_own(catalog.SCRAPE_DURATION)})", "scrape"),
        ),
        number(
            Show(
                title="Rejected within the hour",
                about="Records that could not be used within the last hour; a file counts at each scrape until it is "
                "replaced. Below is why.",
                unit=COUNT,
                span=4,
                height=5,
                limits=above(1),
            ),
            Query(f"sum(increase({_own(catalog.SNAPSHOT_ERRORS, '1h')}))", "rejected"),
        ),
        number(
            Show(
                title="Parts off",
                about="Parts that name memory and have failed, over all ranks. Their bytes count as `other`.",
                unit=COUNT,
                span=4,
                height=5,
                limits=above(1),
            ),
            Query(f"sum(1 - {_own(catalog.LABELER_UP)})", "off"),
        ),
        number(
            Show(
                title="Post-mortems not kept",
                about="Records of crashed ranks that could not be moved to a post-mortem folder: it is full or not "
                "writable.",
                unit=COUNT,
                span=4,
                height=5,
                limits=above(1),
            ),
            Query(f"sum({_own(catalog.UNBURIED)})", "not kept"),
        ),
        number(
            Show(
                title="State not kept",
                about="Times within the last hour that a sidecar could not keep or read what outlives it: baselines "
                "and counters begin anew when it restarts.",
                unit=COUNT,
                span=4,
                height=5,
                limits=above(1),
            ),
            Query(f"sum(increase({_own(catalog.STATE_FAILURES, '1h')}))", "failures"),
        ),
    )
    return "Now", panels


def _records(scope: Scope) -> Row:
    errors = f"sum by (reason) (rate({_own(catalog.SNAPSHOT_ERRORS, RATE_WINDOW)})) > 0"
    age = f"time() - min by ({scope.by.job}) ({_of_jobs(scope, catalog.SNAPSHOT_TIMESTAMP)})"
    panels = (
        lines(
            Show(
                title="Records rejected",
                about="Records that scrapes could not use, by reason. They cost their own ranks' series only. "
                "Another version: the job runs a newer torchmem than the sidecar.",
                unit=PER_SECOND,
                span=8,
                no_value="none is rejected",
            ),
            Query(errors, "{{reason}}"),
        ),
        lines(
            Show(
                title="Age of the oldest record",
                about="Of each job. Ranks write each second; a line that climbs is a rank that hangs, or has crashed.",
                unit=SECONDS,
                span=8,
            ),
            Query(age, "{{train_job}}"),
        ),
        lines(
            Show(
                title="Ranks by state",
                about="Running; stale: alive and no longer writing; crashed: gone without a word; exited: ended "
                "cleanly.",
                unit=COUNT,
                span=8,
            ),
            Query(f"sum by (state) ({_of_jobs(scope, catalog.RANK_STATE)})", "{{state}}"),
            stacked=True,
            colors=STATES,
        ),
    )
    return "Records", panels


def _labelers(scope: Scope) -> Row:
    job, up = scope.by.job, _of_jobs(scope, catalog.LABELER_UP)
    resets = f"sum by (reason) (increase({_of_jobs(scope, catalog.BASELINE_RESETS, RATE_WINDOW)}))"
    panels = (
        lines(
            Show(
                title="Parts off, by name",
                about="Ranks on which a part that names memory has failed.",
                unit=COUNT,
                span=8,
                no_value="all parts work",
            ),
            Query(f"sum by (labeler) (1 - {up}) > 0", "{{labeler}}"),
        ),
        rows(
            Show(
                title="Where parts are off",
                about="Jobs and parts with a failure; the record of such a rank says why (`torchmem show`).",
                unit=COUNT,
                span=8,
                no_value="all parts work",
            ),
            {**scope.headings, "labeler": "Part"},
            Column(name="Ranks", expr=f"count by ({job}, labeler) ({up} == 0)", unit=COUNT, limits=((None, BAD),)),
            sort_by="Ranks",
        ),
        lines(
            Show(
                title="Baselines begun anew",
                about="By reason. Each time drift is unknown until the job has warmed up again.",
                unit=COUNT,
                span=8,
                no_value="none",
            ),
            Query(resets, "{{reason}}"),
        ),
    )
    return "Parts", panels


def _cost(scope: Scope) -> Row:
    folded = f"max by ({scope.by.job}) ({_of_jobs(scope, catalog.MODULES_FOLDED)})"
    ours = f"{SAMPLES} and on ({SIDECAR}) {_own(catalog.SCRAPE_DURATION)}"
    panels = (
        lines(
            Show(
                title="Cost of watching",
                about="Share of the step time that watching takes in each job.",
                unit=RATIO,
                limits=above(scope.settings.max_overhead_ratio),
            ),
            Query(scope.recorded(JOB_OVERHEAD), "{{train_job}}"),
        ),
        lines(
            Show(
                title="Time of a scrape",
                about="Time that each sidecar took to read the records and render its answer. Near Prometheus' "
                "scrape_timeout, series will be missing: lower the sidecar's level.",
                unit=SECONDS,
            ),
            Query(f"max by ({SIDECAR}) ({_own(catalog.SCRAPE_DURATION)})", "{{instance}}"),
        ),
        lines(
            Show(
                title="Series of a scrape",
                about="What each sidecar adds to Prometheus. Above its `sample_limit` a scrape fails whole.",
                unit=COUNT,
            ),
            Query(f"max by ({SIDECAR}) ({ours})", "{{instance}}"),
        ),
        lines(
            Show(
                title="Modules folded",
                about="Modules that hold memory and are not told apart, on the rank with most: the budget sums them.",
                unit=COUNT,
            ),
            Query(folded, "{{train_job}}"),
        ),
    )
    return "Cost", panels


def _serving() -> Row:
    versions = f"count by (version, torch) ({_own(catalog.BUILD_INFO)})"
    panels = (
        lines(
            Show(
                title="Requests",
                about="Answered by the sidecars, by HTTP status.",
                unit=PER_SECOND,
                span=6,
            ),
            Query(f"sum by (code) (rate({_own(catalog.REQUESTS, RATE_WINDOW)}))", "{{code}}"),
        ),
        lines(
            Show(
                title="Requests refused",
                about="By reason; `authentication` that climbs is a scraper with an old password, or somebody trying.",
                unit=PER_SECOND,
                span=6,
            ),
            Query(f"sum by (reason) (rate({_own(catalog.REQUESTS_REFUSED, RATE_WINDOW)}))", "{{reason}}"),
            Query(f"sum(rate({_own(catalog.RELOAD_FAILURES, RATE_WINDOW)}))", "reload failed"),
        ),
        lines(
            Show(
                title="Pushes by OTLP",
                about="By outcome, and points that could not be delivered. Only of sidecars that push.",
                unit=PER_SECOND,
                span=6,
                no_value="no sidecar pushes",
            ),
            Query(f"sum by (outcome) (rate({_own(catalog.PUSHES, RATE_WINDOW)}))", "{{outcome}}"),
            Query(f"sum(rate({_own(catalog.DROPPED_POINTS, RATE_WINDOW)}))", "points dropped"),
        ),
        lines(
            Show(
                title="Time of a push",
                about="What the last push by OTLP took, with its waits.",
                unit=SECONDS,
                span=6,
                no_value="no sidecar pushes",
            ),
            Query(f"max by ({SIDECAR}) ({_own(catalog.PUSH_TIME)})", "{{instance}}"),
        ),
        rows(
            Show(
                title="Versions",
                about="Of torchmem and torch in use, on ranks; of sidecars where torch is empty. Upgrade sidecars "
                "before jobs: they read the records of older versions.",
                unit=COUNT,
                span=24,
                height=6,
                no_value=NO_CELL,
            ),
            {"version": "torchmem", "torch": "torch"},
            Column(name="Sidecars that tell of it", expr=versions, unit=COUNT),
            sort_by="torchmem",
        ),
    )
    return "Serving", panels
