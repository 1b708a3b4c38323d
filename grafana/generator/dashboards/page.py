"""What every dashboard has around its panels: variables, links to the others, alerts as annotations.

Invariants: uids and file names never change, as links and bookmarks hold them; panels are numbered in their order;
equal input gives equal bytes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard as models

from generator.dashboards.panels import DATASOURCE, WARNING
from generator.dashboards.scope import ALL, Scope
from generator.query import select
from torchmem_exporter import catalog

Row = tuple[str, Sequence[Builder[models.Panel]]]
"""A heading and the panels below it."""


FLEET, JOB, RANK, ITSELF = "torchmem-fleet", "torchmem-job", "torchmem-rank", "torchmem-itself"
TITLES = {
    FLEET: "torchmem / Fleet",
    JOB: "torchmem / Job",
    RANK: "torchmem / Rank",
    ITSELF: "torchmem / torchmem itself",
}
"""All dashboards: title by uid."""
TAG = "torchmem"
_OF_INTERVALS = {"auto", "auto_count", "auto_min"}
"""What the SDK gives to every variable, and Grafana knows of intervals only."""


@dataclass(frozen=True, kw_only=True)
class Page:
    """One dashboard.

    Attributes:
        uid: its address.
        about: what it is for.
        scope: what it looks at.
        variables: beyond the data source and the job.
        rows: from top to bottom.
    """

    uid: str
    about: str
    scope: Scope
    variables: Sequence[dashboard.QueryVariable]
    rows: Sequence[Row]


def text(page: Page) -> str:
    """The file of a dashboard."""
    made = json.loads(JSONEncoder(sort_keys=True).encode(_builder(page).build()))
    for number, panel in enumerate(made["panels"], start=1):
        panel["id"] = number
    made["annotations"]["list"][-1] |= _told(page.scope)
    for variable in made["templating"]["list"]:
        for name in _OF_INTERVALS & set(variable):
            del variable[name]
    return json.dumps(made, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def choice(name: str, label: str, query: str, about: str, *, many: bool = False) -> dashboard.QueryVariable:
    """A variable whose values are those of a label.

    Args:
        name: of the variable.
        label: what is written beside it.
        query: Grafana's ``label_values`` or ``query_result``.
        about: what it chooses.
        many: whether several values, or all, may be chosen; all are to begin with.
    """
    made = dashboard.QueryVariable(name).label(label).description(about).datasource(DATASOURCE).query(query)
    made.refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED).sort(models.VariableSort.NATURAL_ASC)
    if many:
        everything = models.VariableOption(selected=True, text="All", value="$__all")
        made.multi(multi=True).include_all(include_all=True).all_value(ALL).current(everything)
    return made


def rank_choice(scope: Scope, *, many: bool) -> dashboard.QueryVariable:
    """The variable ``rank``."""
    query = f"label_values({scope.job(catalog.RANK_UP)}, rank)"
    return choice("rank", "Rank", query, "Rank of the process in its job", many=many)


def device_choice(scope: Scope, *, many: bool) -> dashboard.QueryVariable:
    """The variable ``device``; an accelerator comes before the CPU."""
    query = f"label_values({scope.ranks(catalog.PEAK)}, device)"
    made = choice("device", "Device", query, "Accelerator or CPU of the rank", many=many)
    return made.sort(models.VariableSort.ALPHABETICAL_DESC)


def _job_choices(scope: Scope) -> list[dashboard.QueryVariable]:
    """A variable for each label of a job, each among what those before it leave."""
    made: list[dashboard.QueryVariable] = []
    chosen: dict[str, str] = {}
    for label, value in scope.job_matchers.items():
        query = f"label_values({select(catalog.RANK_UP, extra_labels=set(chosen), **chosen)}, {label})"
        made.append(choice(label, scope.headings[label], query, f"Value of {label}", many=scope.is_fleet))
        chosen[label] = value
    return made


def _builder(page: Page) -> dashboard.Dashboard:
    made = dashboard.Dashboard(TITLES[page.uid]).uid(page.uid).description(page.about).tags([TAG]).editable()
    made.time("now-1h", "now").refresh("30s").timezone("browser").tooltip(models.DashboardCursorSync.CROSSHAIR)
    source = dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus")
    made.with_variable(source.description("Prometheus that scrapes the sidecars"))
    for variable in (*_job_choices(page.scope), *page.variables):
        made.with_variable(variable)
    for uid, title in TITLES.items():
        if uid != page.uid:
            made.link(_link(uid, title))
    alerts = dashboard.AnnotationQuery().name("Alerts").datasource(DATASOURCE).enable(enable=True)
    made.annotation(alerts.icon_color(WARNING).expr(_firing(page.scope)))
    for heading, panels in page.rows:
        made.with_row(dashboard.Row(heading))
        for panel in panels:
            made.with_panel(panel)
    return made


def _link(uid: str, title: str) -> dashboard.DashboardLink:
    link = dashboard.DashboardLink(title.removeprefix("torchmem / ")).type(models.DashboardLinkType.LINK)
    return link.url(f"/d/{uid}").icon("dashboard").include_vars(include_vars=True).keep_time(keep_time=True)


def _firing(scope: Scope) -> str:
    return scope.recorded("ALERTS", alertname="~TorchMem.+", alertstate="firing")


def _told(scope: Scope) -> dict[str, Any]:
    """How Grafana's Prometheus data source writes an annotation; the SDK has no names for it."""
    job = "/".join(f"{{{{{label}}}}}" for label in scope.settings.job_labels)
    return {"step": "30s", "titleFormat": "{{alertname}}", "textFormat": job, "tagKeys": "severity"}
