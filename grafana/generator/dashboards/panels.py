"""Panels in the one style of all dashboards: what each is given is what it is about, not how it looks.

Invariants: every panel has a description, a unit, a text for when there is nothing to show, and targets named A, B, C;
a reftype has the same colour everywhere.
"""

from __future__ import annotations

import string
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from grafana_foundation_sdk.builders import bargauge, common, dashboard, heatmap, prometheus, stat, table, timeseries
from grafana_foundation_sdk.builders import statetimeline as timeline
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.cog.variants import Dataquery
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models import heatmap as heatmap_models
from grafana_foundation_sdk.models import units

BYTES, BYTES_PER_SECOND = units.BytesIEC, units.BytesPerSecondIEC
RATIO, SECONDS, PER_SECOND = units.PercentUnit, units.Seconds, "suffix: /s"
COUNT, PLAIN = units.Short, units.NoUnit
DATASOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
NO_VALUE, NO_CELL = "no data", "-"
GOOD, WARNING, BAD, NEUTRAL = "green", "orange", "red", "text"
REFTYPES: Colors = {
    "parameter": "#37872D",
    "sharded_parameter": "#56A64B",
    "unsharded_parameter": "#96D98D",
    "buffer": "#C8F2C2",
    "gradient": "#8F3BB8",
    "sharded_gradient": "#A352CC",
    "unsharded_gradient": "#CA95E5",
    "gradient_bucket": "#DEB6F2",
    "optimizer_state": "#F2CC0C",
    "activation": "#3274D9",
    "recomputation": "#8AB8FF",
    "input": "#C0D8FF",
    "temporary": "#FFB357",
    "all_gather": "#E02F44",
    "reduce_scatter": "#FA6400",
    "all_reduce": "#FF7383",
    "checkpoint": "#19B8B8",
    "other": "#8E8E8E",
}
STATES: Colors = {"running": GOOD, "stale": WARNING, "crashed": BAD, "exited": "#8E8E8E"}
MARKS: Colors = {"baseline": "#8E8E8E", "forecast": "#FF9830", "capacity": "#E02F44"}
"""Lines that others are held against."""
ONE_COLOR = "#3274D9"
"""Of bars that differ in their names only."""
BAR_HEIGHT, BAR_TEXT = 28, 13
MISSED_MILLISECONDS = 60_000
"""Of missed scrapes that a line goes on over."""
WIDTH = 24
"""Of the grid; a row of panels fills it."""

Dressed = TypeVar("Dressed", bargauge.Panel, heatmap.Panel, stat.Panel, table.Panel, timeline.Panel, timeseries.Panel)
Limits = tuple[tuple[float | None, str], ...]
"""From which value on which colour, the lowest from anywhere."""
Colors = Mapping[str, str]
"""Colour by the name of a series."""
Words = Mapping[str, tuple[str, str]]
"""What a value is called, and its colour."""


@dataclass(frozen=True)
class Query:
    """One query of a panel.

    Attributes:
        expr: PromQL with the dashboard's variables.
        legend: template of a series' name.
    """

    expr: str
    legend: str = ""


@dataclass(frozen=True, kw_only=True)
class Show:
    """What a panel is about.

    Attributes:
        title: a few words.
        about: what one sees, and what to do about it.
        unit: of Grafana.
        span: columns of ``WIDTH``.
        height: rows, of some 30 pixels.
        limits: see there.
        no_value: what is said without any series.
    """

    title: str
    about: str
    unit: str
    span: int = 12
    height: int = 8
    limits: Limits = ((None, GOOD),)
    no_value: str = NO_VALUE


_SOFT_MAXIMA = {RATIO: 0.01, COUNT: 1}


def above(warning: float, bad: float | None = None) -> Limits:
    """Limits of what should be low."""
    return ((None, GOOD), (warning, WARNING), *([(bad, BAD)] if bad is not None else []))


def below(warning: float, bad: float) -> Limits:
    """Limits of what should be high."""
    return ((None, BAD), (bad, WARNING), (warning, GOOD))


def lines(
    show: Show, *queries: Query, stacked: bool = False, minimum: float | None = 0, colors: Colors | None = None
) -> timeseries.Panel:
    """Values over time; stacked where they are parts of a whole; marks are thin and dashed."""
    panel = dressed(timeseries.Panel(), show).targets(_targets(queries))
    tooltip = common.VizTooltipOptions().mode(common_models.TooltipDisplayMode.MULTI)
    panel.tooltip(tooltip.sort(common_models.SortOrder.DESCENDING)).legend(_legend()).color_scheme(_by_index())
    panel.line_width(1).fill_opacity(60 if stacked else 8).show_points(common_models.VisibilityMode.NEVER)
    panel.span_nulls(MISSED_MILLISECONDS)
    if show.unit in _SOFT_MAXIMA:  # of an axis of which all values are zero
        panel.axis_soft_max(_SOFT_MAXIMA[show.unit])
    if stacked:
        panel.stacking(common.StackingConfig().mode(common_models.StackingMode.NORMAL).group("A"))
    if len(show.limits) > 1:
        panel.thresholds_style(common.GraphThresholdsStyleConfig().mode(common_models.GraphThresholdsStyleMode.DASHED))
    for name, color in (colors or {}).items():
        panel.override_by_name(name, [_fixed(color)])
    for query in queries:
        if query.legend in MARKS:
            panel.override_by_name(query.legend, [_fixed(MARKS[query.legend]), *_THIN])
    return panel if minimum is None else panel.min(minimum)


def number(show: Show, query: Query, mappings: Words | None = None) -> stat.Panel:
    """The latest value, over a small graph of those before; mapped to words where values stand for some."""
    panel = dressed(stat.Panel(), show).targets(_targets([query])).reduce_options(_last())
    panel.color_mode(common_models.BigValueColorMode.VALUE).graph_mode(common_models.BigValueGraphMode.AREA)
    return panel.mappings(_words(mappings)) if mappings else panel


def bars(show: Show, query: Query, colors: Colors | None = None) -> bargauge.Panel:
    """The values of now, side by side."""
    panel = dressed(bargauge.Panel(), show).targets(_targets([query], is_instant=True)).reduce_options(_last())
    panel.orientation(common_models.VizOrientation.HORIZONTAL).display_mode(common_models.BarGaugeDisplayMode.BASIC)
    panel.value_mode(common_models.BarGaugeValueMode.TEXT).show_unfilled(show_unfilled=False)
    panel.name_placement(common_models.BarGaugeNamePlacement.LEFT)
    panel.sizing(common_models.BarGaugeSizing.MANUAL).min_viz_height(12).max_viz_height(BAR_HEIGHT)
    panel.text(common.VizTextDisplayOptions().title_size(BAR_TEXT).value_size(BAR_TEXT))
    for name, color in (colors or {}).items():
        panel.override_by_name(name, [_fixed(color)])
    one = dashboard.FieldColor().mode(models.FieldColorModeId.FIXED).fixed_color(ONE_COLOR)
    return panel.color_scheme(one).min(0)


def heat(show: Show, query: Query) -> heatmap.Panel:
    """One row for each series, its values as colours."""
    panel = dressed(heatmap.Panel(), show).targets(_targets([query])).calculate(calculate=False)
    panel.rows_frame(heatmap.RowsHeatmapOptions().layout(common_models.HeatmapCellLayout.UNKNOWN))
    panel.cell_values(heatmap.CellValues().unit(show.unit).decimals(1)).show_legend()
    panel.filter_values(heatmap.FilterValueRange().le(-1e9))  # by default what is not above zero is left out
    colors = heatmap.HeatmapColorOptions().mode(heatmap_models.HeatmapColorMode.SCHEME).scheme("Viridis")
    return panel.color(colors.steps(64))


def states(show: Show, query: Query, mappings: Words) -> timeline.Panel:
    """One bar for each series, its values as words."""
    panel = dressed(timeline.Panel(), show).targets(_targets([query])).mappings(_words(mappings))
    return panel.merge_values(merge_values=True).legend(_legend())


def dressed(panel: Dressed, show: Show) -> Dressed:
    """A panel with what all have."""
    panel.title(show.title).description(show.about).datasource(DATASOURCE).span(show.span).height(show.height)
    steps = [models.Threshold(value=value, color=color) for value, color in show.limits]
    panel.thresholds(dashboard.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(steps))
    if show.unit == RATIO:
        panel.decimals(1)
    return panel.unit(show.unit).no_value(show.no_value)


def target(query: Query, ref: str, *, is_instant: bool) -> prometheus.Dataquery:
    """A query as Grafana writes it; an instant one gives the values of now only."""
    made = prometheus.Dataquery().expr(query.expr).ref_id(ref).datasource(DATASOURCE)
    made.legend_format(query.legend or "__auto")
    return made.instant() if is_instant else made.range()


def _targets(queries: Iterable[Query], *, is_instant: bool = False) -> list[Builder[Dataquery]]:
    named = zip(string.ascii_uppercase, queries, strict=False)
    return [target(query, ref, is_instant=is_instant) for ref, query in named]


def _words(mappings: Words) -> list[models.ValueMapping]:
    texts = {
        value: models.ValueMappingResult(text=text, color=color, index=index)
        for index, (value, (text, color)) in enumerate(mappings.items())
    }
    return [models.ValueMap(options=texts)]


def _last() -> common.ReduceDataOptions:
    return common.ReduceDataOptions().calcs(["lastNotNull"])


def _by_index() -> dashboard.FieldColor:
    return dashboard.FieldColor().mode(models.FieldColorModeId.PALETTE_CLASSIC)


def _fixed(color: str) -> models.DynamicConfigValue:
    return models.DynamicConfigValue(id_val="color", value={"mode": "fixed", "fixedColor": color})


_THIN = (
    models.DynamicConfigValue(id_val="custom.fillOpacity", value=0),
    models.DynamicConfigValue(id_val="custom.lineStyle", value={"fill": "dash", "dash": [8, 6]}),
)


def _legend() -> common.VizLegendOptions:
    legend = common.VizLegendOptions().display_mode(common_models.LegendDisplayMode.LIST).show_legend(show_legend=True)
    return legend.placement(common_models.LegendPlacement.BOTTOM)
