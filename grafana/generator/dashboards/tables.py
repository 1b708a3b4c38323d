"""Tables in the one style of all dashboards.

Invariants: the values of now only; Grafana merges the queries' rows by the labels that they share, so all queries of a
table aggregate to the same labels.
"""

from __future__ import annotations

import string
from collections.abc import Mapping
from dataclasses import dataclass

from grafana_foundation_sdk.builders import common, prometheus, table
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models import prometheus as prometheus_models

from generator.dashboards.panels import RATIO, Limits, Query, Show, dressed, target

COLORED = {"type": "color-text"}


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column of values.

    Attributes:
        name: its heading.
        expr: instant query.
        unit: of Grafana.
        limits: see ``Show``; empty: not coloured.
    """

    name: str
    expr: str
    unit: str
    limits: Limits = ()


@dataclass(frozen=True, kw_only=True)
class Link:
    """Where the cells of a column lead to.

    Attributes:
        column: its heading.
        title: what the link says.
        url: with Grafana's placeholders of the row's fields.
    """

    column: str
    title: str
    url: str


def rows(
    show: Show,
    labels: Mapping[str, str],
    *columns: Column,
    sort_by: str,
    ascending: bool = False,
    link: Link | None = None,
) -> table.Panel:
    """One row for each set of labels.

    Args:
        show: what it is about.
        labels: shown before the values: heading by label.
        columns: of values; may be hidden by an empty name.
        sort_by: a heading.
        ascending: from the lowest to the highest.
        link: of one of the columns.
    """
    panel = dressed(table.Panel(), show)
    names: dict[str, str] = dict(labels)
    hidden = {"Time": True}
    for ref, column in zip(string.ascii_uppercase, columns, strict=False):
        panel.with_target(_as_table(Query(column.expr), ref))
        field = f"Value #{ref}" if len(columns) > 1 else "Value"
        if column.name:
            names[field] = column.name
            panel.override_by_name(column.name, _look(column))
        else:
            hidden[field] = True
    order = {field: position for position, field in enumerate(names)}
    organize = {"excludeByName": hidden, "indexByName": order, "renameByName": names}
    panel.with_transformation(models.DataTransformerConfig(id_val="merge", options={}))
    panel.with_transformation(models.DataTransformerConfig(id_val="organize", options=organize))
    if link:
        data_link = {"title": link.title, "url": link.url}
        panel.override_by_name(link.column, [models.DynamicConfigValue(id_val="links", value=[data_link])])
    return _sorted(panel, sort_by, ascending=ascending)


def matrix(show: Show, expr: str, row: str, column: str) -> table.Panel:
    """One label down, another across.

    Args:
        show: what it is about.
        expr: instant query by the two labels.
        row: label down.
        column: label across.
    """
    panel = dressed(table.Panel(), show).with_target(_as_table(Query(expr), "A"))
    crossed = {"rowField": row, "columnField": column, "valueField": "Value", "emptyValue": "null"}
    panel.with_transformation(models.DataTransformerConfig(id_val="groupingToMatrix", options=crossed))
    return _sorted(panel, f"{row}\\{column}", ascending=True)


def _as_table(query: Query, ref: str) -> prometheus.Dataquery:
    return target(query, ref, is_instant=True).format(prometheus_models.PromQueryFormat.TABLE)


def _look(column: Column) -> list[models.DynamicConfigValue]:
    look = [models.DynamicConfigValue(id_val="unit", value=column.unit)]
    if column.unit == RATIO:
        look.append(models.DynamicConfigValue(id_val="decimals", value=1))
    if column.limits:
        steps = [{"value": value, "color": color} for value, color in column.limits]
        look.append(models.DynamicConfigValue(id_val="thresholds", value={"mode": "absolute", "steps": steps}))
        look.append(models.DynamicConfigValue(id_val="custom.cellOptions", value=COLORED))
    return look


def _sorted(panel: table.Panel, heading: str, *, ascending: bool) -> table.Panel:
    order = common.TableSortByFieldState().display_name(heading).desc(not ascending)
    return panel.sort_by([order]).filterable(filterable=True)
