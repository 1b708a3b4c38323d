"""The dashboard of all jobs: which of them needs a look.

Invariant: over time it reads recorded series only, and those by module at one instant, so that it stays quick over
thousands of ranks.
"""

from __future__ import annotations

from generator.dashboards.page import FLEET, JOB, Page, Row
from generator.dashboards.panels import (
    BAD,
    BYTES,
    BYTES_PER_SECOND,
    COUNT,
    GOOD,
    NEUTRAL,
    NO_CELL,
    PER_SECOND,
    PLAIN,
    RATIO,
    REFTYPES,
    Query,
    Show,
    above,
    bars,
    below,
    heat,
    lines,
    number,
)
from generator.dashboards.scope import Scope
from generator.dashboards.tables import Column, Link, rows
from generator.query import Levels
from generator.recordings import (
    JOB_DRIFT,
    JOB_FILLED,
    JOB_OVERHEAD,
    JOB_STEP_PEAK,
    JOB_STEPS,
    JOB_UP,
    JOB_USAGE,
    RANK_SKEW,
)
from generator.settings import Settings
from torchmem_exporter import catalog

NUM_GROWERS = 12


def page(settings: Settings) -> Page:
    """The dashboard."""
    scope = Scope(settings, is_fleet=True)
    return Page(
        uid=FLEET,
        about="All jobs: how full their devices are, and whose memory drifts, grows or is uneven.",
        scope=scope,
        variables=(),
        rows=(_now(scope), _jobs(scope), _filling(scope), _changing(scope)),
    )


def _now(scope: Scope) -> Row:
    up, job = scope.recorded(JOB_UP), scope.by.job
    headroom = _headroom_limits(scope.settings)
    alerts = scope.recorded("ALERTS", alertname="~TorchMem.+", alertstate="firing")
    stats = (
        number(
            Show(title="Jobs alive", about="Jobs with a living rank.", unit=COUNT, span=4, height=5, no_value="0"),
            Query(f"count({up} > 0)", "jobs"),
        ),
        number(
            Show(title="Ranks alive", about="Processes that train, of all jobs.", unit=COUNT, span=4, height=5),
            Query(f"sum({up})", "ranks"),
        ),
        number(
            Show(
                title="Ranks not alive",
                about="Ranks that jobs are meant to have and that do not live: not begun, crashed, or ended cleanly "
                "before the others. The table below says whose.",
                unit=COUNT,
                span=4,
                height=5,
                limits=above(1),
            ),
            Query(f"sum(clamp_min({_world_size(scope)} - {up}, 0))", "ranks"),
        ),
        number(
            Show(
                title="Least headroom",
                about="What the fullest device of all jobs has left at the peak of its steps. Near zero, the next "
                "larger batch ends in an out-of-memory error: see the job's dashboard for what fills it.",
                unit=RATIO,
                span=4,
                height=5,
                limits=headroom,
            ),
            Query(f"1 - max({scope.recorded(JOB_FILLED)})", "headroom"),
        ),
        number(
            Show(
                title="Highest drift",
                about="Step peak over baseline, less one, of the rank that drifts most. The growers below say which "
                "module and what kind of memory.",
                unit=RATIO,
                span=4,
                height=5,
                limits=above(scope.settings.min_drift_ratio, 0.1),
                no_value="no baseline yet",
            ),
            Query(f"max({scope.recorded(JOB_DRIFT)})", "drift"),
        ),
        number(
            Show(
                title="Alerts firing",
                about="Alerts of torchmem that fire now. Their runbooks say what to look at and what to do.",
                unit=COUNT,
                span=4,
                height=5,
                limits=above(1, 5),
                no_value="0",
            ),
            Query(f"count(count by (alertname, {job}) ({alerts})) or vector(0)", "alerts"),
        ),
    )
    return "Now", stats


def _world_size(scope: Scope) -> str:
    return f"max by ({scope.by.job}) ({scope.job(catalog.WORLD_SIZE)})"


def _headroom_limits(settings: Settings) -> tuple[tuple[float | None, str], ...]:
    least = round(1 - settings.max_filled_ratio, 6)
    return below(3 * least, least)


def _highest(scope: Scope, name: str) -> str:
    """A recorded series by job, without the name of the metric, by which rows of a table would be told apart."""
    return f"max by ({scope.by.job}) ({scope.recorded(name)})"


def _jobs(scope: Scope) -> Row:
    settings, job = scope.settings, scope.by.job
    columns = (
        Column(name="Ranks", expr=_highest(scope, JOB_UP), unit=COUNT),
        Column(name="of", expr=_world_size(scope), unit=COUNT),
        Column(name="Step peak", expr=_highest(scope, JOB_STEP_PEAK), unit=BYTES),
        Column(
            name="Headroom",
            expr=f"1 - {_highest(scope, JOB_FILLED)}",
            unit=RATIO,
            limits=_headroom_limits(settings),
        ),
        Column(name="Drift", expr=_highest(scope, JOB_DRIFT), unit=RATIO, limits=above(settings.min_drift_ratio, 0.1)),
        Column(name="Growth", expr=f"max by ({job}) ({scope.job(catalog.GROWTH)})", unit=BYTES_PER_SECOND),
        Column(
            name="Skew",
            expr=f"{_highest(scope, RANK_SKEW)} - 1",
            unit=RATIO,
            limits=above(round(settings.max_skew_ratio - 1, 6)),
        ),
        Column(name="Steps", expr=_highest(scope, JOB_STEPS), unit=PER_SECOND),
        Column(
            name="Watching",
            expr=_highest(scope, JOB_OVERHEAD),
            unit=RATIO,
            limits=above(settings.max_overhead_ratio),
        ),
    )
    show = Show(
        title="Jobs",
        about="One row for each job: ranks alive of those expected, step peak of the highest rank, room left on the "
        "fullest device, drift over the baseline, growth between steps, how much the highest rank is above the median "
        "of its peers, pace, and what watching costs. Click a job to see what fills it.",
        unit=PLAIN,
        span=24,
        height=8,
        no_value=NO_CELL,
    )
    chosen = "&".join(f"var-{label}=${{__data.fields.{label}}}" for label in settings.job_labels[:-1])
    url = f"/d/{JOB}?var-datasource=${{datasource}}&{chosen}{'&' if chosen else ''}"
    url += "var-train_job=${__value.raw}&${__url_time_range}"
    link = Link(column="Job", title="What fills this job's devices", url=url)
    headings = scope.headings
    alerts = Column(name="", expr=_alerts(scope.by, scope), unit=COUNT)
    listing = Show(
        title="Alerts",
        about="Alerts of torchmem, pending and firing. `kubectl`, Slurm or the job's owner do the rest: each alert's "
        "runbook begins with what to look at.",
        unit=PLAIN,
        span=24,
        height=8,
        no_value="no alerts",
    )
    told = {"alertname": "Alert", "severity": "Severity", "alertstate": "State", **headings}
    return "Jobs", (
        rows(show, headings, *columns, sort_by="Headroom", ascending=True, link=link),
        rows(listing, told, alerts, sort_by="Severity", ascending=True),
    )


def _alerts(by: Levels, scope: Scope) -> str:
    return f"max by (alertname, severity, alertstate, {by.job}) ({scope.recorded('ALERTS', alertname='~TorchMem.+')})"


def _filling(scope: Scope) -> Row:
    panels = (
        lines(
            Show(
                title="Headroom",
                about="Room left on each job's fullest device at the peak of its steps. A line that falls towards "
                "zero runs out of memory there.",
                unit=RATIO,
                limits=((None, BAD), (round(1 - scope.settings.max_filled_ratio, 6), GOOD)),
            ),
            Query(f"1 - {scope.recorded(JOB_FILLED)}", "{{train_job}}"),
        ),
        lines(
            Show(
                title="Step peak of the highest rank",
                about="The most that a rank of each job holds within a step.",
                unit=BYTES,
            ),
            Query(scope.recorded(JOB_STEP_PEAK), "{{train_job}}"),
        ),
        lines(
            Show(
                title="Memory between steps, by what it is for",
                about="Bytes alive at the ends of steps, of all jobs together. Parameters, gradients and optimizer "
                "state should be flat; what rises steadily is kept by mistake.",
                unit=BYTES,
            ),
            Query(f"sum by (reftype) ({scope.recorded(JOB_USAGE)})", "{{reftype}}"),
            stacked=True,
            colors=REFTYPES,
        ),
        heat(
            Show(
                title="Skew between ranks",
                about="One row for each job, coloured by how much its highest rank takes over the median of the ranks "
                "that do the same work. Dark is even. A row that lights up has one rank that will run out first: see "
                "the job's dashboard for which.",
                unit=RATIO,
                limits=((None, NEUTRAL),),
            ),
            Query(f"max by ({scope.by.job}) ({scope.recorded(RANK_SKEW)}) - 1", "{{train_job}}"),
        ),
    )
    return "Filling", panels


def _changing(scope: Scope) -> Row:
    job = scope.by.job
    excess = f"max by ({job}, module, reftype) ({scope.job(catalog.MODULE_EXCESS)})"
    panels = (
        lines(
            Show(
                title="Drift",
                about="Step peak of each job over its baseline, less one. Flat is well. A step up came with a change "
                "of shapes or code; a ramp is a leak.",
                unit=RATIO,
                limits=above(scope.settings.min_drift_ratio),
                no_value="no baseline yet",
            ),
            Query(scope.recorded(JOB_DRIFT), "{{train_job}}"),
            minimum=None,
        ),
        lines(
            Show(
                title="Growth between steps",
                about="Robust slope of the bytes alive at the ends of steps, of the rank that grows most. Above zero "
                "for long, something is kept.",
                unit=BYTES_PER_SECOND,
                no_value="too few steps yet",
            ),
            Query(f"max by ({job}) ({scope.job(catalog.GROWTH)})", "{{train_job}}"),
            minimum=None,
        ),
        bars(
            Show(
                title="Top growers",
                about="Modules that hold most over their own baseline at the step peak, on the rank where they do: "
                "the first place to look when a job drifts.",
                unit=BYTES,
                span=24,
                no_value="nothing has grown",
            ),
            Query(f"topk({NUM_GROWERS}, {excess})", "{{train_job}} {{module}} {{reftype}}"),
        ),
    )
    return "Changing", panels
