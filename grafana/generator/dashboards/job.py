"""The dashboard of one job: what fills its devices, on which ranks, and whether that changes.

Invariant: what is shown by module is of one rank, the one with the highest step peak unless another is chosen: series
by module of all ranks would be too many to read.
"""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard

from generator.dashboards.page import JOB, RANK, Page, Row, choice, device_choice, rank_choice
from generator.dashboards.panels import (
    BYTES,
    BYTES_PER_SECOND,
    COUNT,
    NEUTRAL,
    NO_CELL,
    PER_SECOND,
    PLAIN,
    RATIO,
    REFTYPES,
    SECONDS,
    Query,
    Show,
    above,
    bars,
    below,
    heat,
    lines,
    number,
)
from generator.dashboards.scope import RATE_WINDOW, Scope, accelerators_first, overhead, stack
from generator.dashboards.tables import Column, Link, rows
from generator.recordings import JOB_FILLED, RANK_INFO, RANK_SKEW, RANK_STEP_PEAK
from generator.settings import Settings
from torchmem_exporter import catalog

HIGHEST = "$highest"
"""The rank whose memory is told by module."""
NUM_GROWERS = 12


def page(settings: Settings) -> Page:
    """The dashboard."""
    scope = Scope(settings)
    return Page(
        uid=JOB,
        about="One job: what fills its devices at the peak, how even its ranks are, and what drifts.",
        scope=scope,
        variables=(rank_choice(scope, many=True), device_choice(scope, many=True), _highest(scope)),
        rows=(_now(scope), _composition(scope), _ranks(scope), _drift(scope), _beside(scope)),
    )


def _highest(scope: Scope) -> dashboard.QueryVariable:
    peaks = accelerators_first(lambda device: f"sum by (rank) ({scope.ranks(catalog.STEP_PEAK, device=device)})")
    query = f"query_result(topk(1, {' '.join(peaks.split())}))"
    made = choice("highest", "Highest rank", query, "Of the chosen ranks, the one with the highest step peak")
    return made.regex('/rank="([^"]+)"/')


def _now(scope: Scope) -> Row:
    settings = scope.settings
    least = round(1 - settings.max_filled_ratio, 6)
    peak = scope.recorded(RANK_STEP_PEAK, rank="~$rank")
    stats = (
        number(
            Show(
                title="Step peak", about="The most that the highest rank holds in a step.", unit=BYTES, span=4, height=5
            ),
            Query(f"max({peak})", "step peak"),
        ),
        number(
            Show(
                title="Headroom",
                about="Room left on the job's fullest device at the peak. Near zero, the next larger batch fails.",
                unit=RATIO,
                span=4,
                height=5,
                limits=below(3 * least, least),
            ),
            Query(f"1 - max({scope.recorded(JOB_FILLED)})", "headroom"),
        ),
        number(
            Show(
                title="Highest drift",
                about="Step peak over the baseline that this run has learned, less one, of the rank that drifts most.",
                unit=RATIO,
                span=4,
                height=5,
                limits=above(settings.min_drift_ratio, 0.1),
                no_value="no baseline yet",
            ),
            Query(f"max({scope.devices(catalog.DRIFT_RATIO)})", "drift"),
        ),
        number(
            Show(
                title="Over forecast",
                about="Step peak over what was forecast before the job began, less one. A forecast that is missed was "
                "made with other shapes, or the job does what nobody planned.",
                unit=RATIO,
                span=4,
                height=5,
                limits=above(settings.max_forecast_ratio),
                no_value="no forecast",
            ),
            Query(f"max({scope.devices(catalog.FORECAST_DRIFT_RATIO)})", "over forecast"),
        ),
        number(
            Show(
                title="Full in",
                about="Time until the first device is full if it goes on growing as it does now.",
                unit=SECONDS,
                span=4,
                height=5,
                limits=below(6 * settings.exhaustion_seconds, settings.exhaustion_seconds),
                no_value="nothing grows",
            ),
            Query(f"clamp_min(min({scope.devices(catalog.EXHAUSTION)}) - time(), 0)", "full in"),
        ),
        number(
            Show(title="Pace", about="Steps a second. Zero while the job hangs.", unit=PER_SECOND, span=4, height=5),
            Query(f"max(rate({scope.ranks(catalog.STEPS, RATE_WINDOW)}))", "steps"),
        ),
    )
    return "Now", stats


def _composition(scope: Scope) -> Row:
    by_reftype = stack(scope, catalog.STEP_PEAK, "reftype", HIGHEST)
    panels = (
        lines(
            Show(
                title="Step peak by what it is for, rank $highest",
                about="What fills the highest rank's device at the instant of its step peak; the parts add up to the "
                "peak. `activation` is answered by checkpointing or smaller batches; `parameter`, `gradient` and "
                "`optimizer_state` by sharding over more ranks or offloading.",
                unit=BYTES,
                height=10,
            ),
            Query(by_reftype, "{{reftype}}"),
            stacked=True,
            colors=REFTYPES,
        ),
        lines(
            Show(
                title="Step peak by module, rank $highest",
                about="The same bytes by who holds them: the module whose forward or backward allocated them. Modules "
                "beyond the budget of series are `__other__`.",
                unit=BYTES,
                height=10,
            ),
            Query(stack(scope, catalog.MODULE_STEP_PEAK, "module", HIGHEST), "{{module}}"),
            stacked=True,
        ),
        bars(
            Show(
                title="Composition at the peak, rank $highest",
                about="The step peak of now by what it is for, the largest first to look at when room is short.",
                unit=BYTES,
                height=10,
            ),
            Query(f"sort_desc({by_reftype})", "{{reftype}}"),
            colors=REFTYPES,
        ),
        bars(
            Show(
                title="Largest parts of the peak, rank $highest",
                about="Module and kind of memory together, the largest first: where a change saves most.",
                unit=BYTES,
                height=10,
            ),
            Query(f"topk({NUM_GROWERS}, {_parts(scope)})", "{{module}} {{reftype}}"),
        ),
    )
    return "What fills it", panels


def _parts(scope: Scope) -> str:
    return accelerators_first(
        lambda device: f"max by (module, reftype) ({scope.job(catalog.MODULE_STEP_PEAK, rank=HIGHEST, device=device)})"
    )


def _ranks(scope: Scope) -> Row:
    peak, skew, info = (scope.recorded(name, rank="~$rank") for name in (RANK_STEP_PEAK, RANK_SKEW, RANK_INFO))
    spread = (
        Query(f"max({peak})", "highest"),
        Query(f"quantile(0.95, {peak})", "95 % of ranks below"),
        Query(f"quantile(0.5, {peak})", "median"),
        Query(f"min({peak})", "lowest"),
    )
    columns = (
        Column(name="Step peak", expr=f"max by (rank) ({peak})", unit=BYTES),
        Column(
            name="Skew",
            expr=f"max by (rank) ({skew}) - 1",
            unit=RATIO,
            limits=above(round(scope.settings.max_skew_ratio - 1, 6)),
        ),
        Column(
            name="Drift",
            expr=f"max by (rank) ({scope.devices(catalog.DRIFT_RATIO)})",
            unit=RATIO,
            limits=above(scope.settings.min_drift_ratio, 0.1),
        ),
        Column(name="Without a name", expr=f"max by (rank) ({scope.devices(catalog.UNATTRIBUTED)})", unit=BYTES),
        Column(name="Failed allocations", expr=f"sum by (rank) ({scope.devices(catalog.OOMS)})", unit=COUNT),
        Column(name="Step", expr=f"max by (rank) ({scope.ranks(catalog.STEP_NUMBER)})", unit=PLAIN),
    )
    jobs = "&".join(f"var-{label}=${{{label}}}" for label in scope.settings.job_labels)
    url = f"/d/{RANK}?var-datasource=${{datasource}}&{jobs}&var-rank=${{__value.raw}}&${{__url_time_range}}"
    panels = (
        lines(
            Show(
                title="Step peaks over the ranks",
                about="Highest, median and lowest step peak of the chosen ranks. Ranks that do the same work should "
                "lie together; a gap that opens is one rank's own trouble.",
                unit=BYTES,
            ),
            *spread,
        ),
        heat(
            Show(
                title="Skew of each rank",
                about="One row for each rank, coloured by its step peak over the median of the ranks that do the same "
                "work. A lit row runs out first, and holds up the others if it swaps or retries.",
                unit=RATIO,
                limits=((None, NEUTRAL),),
            ),
            Query(f"{skew} - 1", "{{rank}}"),
        ),
        rows(
            Show(
                title="Ranks",
                about="One row for each rank, the highest first. Click a rank for its timeline and modules.",
                unit=PLAIN,
                span=16,
                no_value=NO_CELL,
            ),
            {"rank": "Rank"},
            *columns,
            sort_by="Step peak",
            link=Link(column="Rank", title="This rank's memory", url=url),
        ),
        rows(
            Show(title="Places", about="Host and mesh coordinates of each living rank.", unit=PLAIN, span=8),
            {"rank": "Rank", "host": "Host", "dp": "dp", "tp": "tp", "pp": "pp"},
            Column(name="", expr=f"max by (rank, host, dp, tp, pp) ({info})", unit=PLAIN),
            sort_by="Rank",
            ascending=True,
        ),
    )
    return "Ranks", panels


def _drift(scope: Scope) -> Row:
    settings = scope.settings
    usual = (
        Query(f"max({scope.recorded(RANK_STEP_PEAK, rank='~$rank')})", "step peak"),
        Query(f"max({scope.devices(catalog.BASELINE)})", "baseline"),
        Query(f"max({scope.devices(catalog.FORECAST)})", "forecast"),
    )
    excess = f"max by (module, reftype) ({scope.devices(catalog.MODULE_EXCESS)})"
    panels = (
        lines(
            Show(
                title="Step peak against baseline and forecast",
                about="The highest rank's step peak beside what this run has learned to be usual, and what was "
                "forecast before it began. The peak should lie on the baseline.",
                unit=BYTES,
                no_value="no baseline yet",
            ),
            *usual,
        ),
        lines(
            Show(
                title="Drift",
                about="Step peak over baseline, and over forecast, less one, of the rank where it is most. A step up "
                "came with a change of shapes or code; a ramp is a leak.",
                unit=RATIO,
                limits=above(settings.min_drift_ratio),
                no_value="no baseline yet",
            ),
            Query(f"max({scope.devices(catalog.DRIFT_RATIO)})", "over baseline"),
            Query(f"max({scope.devices(catalog.FORECAST_DRIFT_RATIO)})", "over forecast"),
            minimum=None,
        ),
        lines(
            Show(
                title="Growth between steps",
                about="Robust slope of the bytes alive at the ends of steps, of the ranks that grow most. Above zero "
                "for long, something is kept: the growers say what.",
                unit=BYTES_PER_SECOND,
                no_value="too few steps yet",
            ),
            Query(f"topk(5, max by (rank, device) ({scope.devices(catalog.GROWTH)}))", "rank {{rank}} {{device}}"),
            minimum=None,
        ),
        bars(
            Show(
                title="Top growers",
                about="Modules and kinds of memory that hold most over their own baseline, on the rank where they do.",
                unit=BYTES,
                no_value="nothing has grown",
            ),
            Query(f"topk({NUM_GROWERS}, {excess})", "{{module}} {{reftype}}"),
        ),
    )
    return "Drift", panels


def _beside(scope: Scope) -> Row:
    settings = scope.settings
    unnamed = f"max by (rank, device) ({scope.devices(catalog.UNATTRIBUTED)})"
    named = f"sum by (rank, device) (max by (rank, device, reftype) ({scope.devices(catalog.USAGE)}))"
    panels = (
        lines(
            Show(
                title="Checkpoint peaks",
                about="The most that a device held while the latest checkpoint was saved or loaded, beside the step "
                "peak. A save that towers over the steps gathers what is sharded: save it sharded.",
                unit=BYTES,
                span=8,
                no_value="no checkpoint yet",
            ),
            Query(f"max by (operation) ({scope.devices(catalog.CHECKPOINT_PEAK)})", "{{operation}}"),
            Query(f"max({scope.recorded(RANK_STEP_PEAK, rank='~$rank')})", "step peak"),
        ),
        lines(
            Show(
                title="Memory without a name",
                about="Bytes that the allocator has handed out and no module could be named for, on the devices with "
                "most of them. Libraries that allocate for themselves show here.",
                unit=BYTES,
                span=8,
            ),
            Query(f"topk(5, {unnamed})", "rank {{rank}} {{device}}"),
        ),
        lines(
            Show(
                title="Share without a name",
                about="The same as a share of what is alive between steps. Above the line, look at which parts "
                "of torchmem are off.",
                unit=RATIO,
                span=8,
                limits=above(settings.max_unattributed_ratio),
            ),
            Query(f"topk(5, {unnamed} / ({named} + {unnamed} > 0))", "rank {{rank}} {{device}}"),
        ),
        lines(
            Show(
                title="Fragmentation",
                about="Share of what the allocator has reserved that is free but in pieces, on the devices with most. "
                "High and nearly full at once: set `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`.",
                unit=RATIO,
                span=8,
                limits=above(settings.max_fragmentation_ratio),
                no_value="accelerators only",
            ),
            Query(
                f"topk(5, max by (rank, device) ({scope.devices(catalog.FRAGMENTATION)}))", "rank {{rank}} {{device}}"
            ),
        ),
        lines(
            Show(
                title="Allocations retried and failed",
                about="Allocations that succeeded only after cached blocks were given back, and those that failed, in "
                "the time of one point. Retries cost pace and come before failures.",
                unit=COUNT,
                span=8,
            ),
            Query(f"sum(increase({scope.devices(catalog.RETRIES, RATE_WINDOW)}))", "retried"),
            Query(f"sum(increase({scope.devices(catalog.OOMS, RATE_WINDOW)}))", "failed"),
        ),
        lines(
            Show(
                title="Cost of watching",
                about="Share of the step time that torchmem itself takes.",
                unit=RATIO,
                span=8,
                limits=above(settings.max_overhead_ratio),
            ),
            Query(overhead(scope, scope.by.job), "watching"),
        ),
    )
    return "Checkpoints, remainder, fragmentation", panels
