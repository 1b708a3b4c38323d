"""Every query of every dashboard, run by a real Prometheus that scraped a real job: none is empty.

The list of panels with the number of series that each returned is printed (``-s``), and written to the file that
``$TORCHMEM_PANELS`` names: ``make panels`` writes ``grafana/dashboards/PANELS.md``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

import dashboards
from dashboards import FLEET, ITSELF, JOB, RANK, UIDS, load, num_series, panels, resolved, substituted
from live_fleet import GPU_JOB, JOBS, REAL_JOB

pytestmark = pytest.mark.slow

ACCELERATORS_ONLY = {
    (JOB, "Fragmentation"),
    (RANK, "Fragmentation"),
}
"""Panels on what a CPU's allocator does not have: it keeps nothing back, so nothing of it can lie in pieces."""
HEAD = """# What each panel returned

Made by `make panels`: the queries of every panel, with variables as Grafana writes them, over a real Prometheus that
scraped a real sidecar. Series returned for `{real}`, two real ranks of a small FSDP2 job on CPUs, and for `{gpu}`,
four ranks whose records are those of GPUs; *Fleet* and *torchmem itself* show both jobs at once. A CPU's allocator
keeps nothing back, so there is no fragmentation to show of `{real}`.

| dashboard | panel | type | queries | `{real}` | `{gpu}` | both |
| --- | --- | --- | --- | --- | --- | --- |
"""
SHOW_ALL = {FLEET, ITSELF}
"""Dashboards of several jobs at once."""


class Found(NamedTuple):
    """What a panel's queries returned: series by job, for each query."""

    panel: dashboards.Panel
    by_job: dict


def found_in(server, uid):
    """What all panels of a dashboard return, with variables as they are when it is opened, for either job."""
    dashboard = load(uid)
    choices = {JOBS: {}} if uid in SHOW_ALL else {(job,): {"train_job": job} for job in JOBS}
    rows = [Found(panel, {}) for panel in panels(dashboard)]
    for jobs, chosen in choices.items():
        values = resolved(server, dashboard, chosen)
        for row in rows:
            counts = [num_series(server, target, values) for target in row.panel.targets]
            row.by_job.update(dict.fromkeys(jobs, counts))
    return rows


@pytest.fixture(scope="module")
def found(fleet):
    """What every panel of every dashboard returns."""
    rows = [row for uid in UIDS for row in found_in(fleet.server, uid)]
    listing = table(rows)
    sys.stdout.write(f"\n{listing}")
    if path := os.environ.get("TORCHMEM_PANELS"):
        Path(path).write_text(listing, encoding="utf-8")
    return rows


def table(rows):
    """The list as Markdown."""
    lines = [
        f"| {panel.dashboard} | {panel.title} | {panel.kind} | {len(panel.targets)} | {' | '.join(cells)} |\n"
        for panel, counts in rows
        for cells in [_cells(panel.dashboard, {job: str(sum(counts[job])) for job in JOBS})]
    ]
    return HEAD.format(real=REAL_JOB, gpu=GPU_JOB) + "".join(lines)


def _cells(uid, totals):
    return ("", "", totals[REAL_JOB]) if uid in SHOW_ALL else (totals[REAL_JOB], totals[GPU_JOB], "")


def named(rows):
    return {(panel.dashboard, panel.title) for panel, _ in rows}


def test_every_panel_of_a_real_job_returns_data(found):
    """Somebody would open a dashboard and find a panel empty, whatever the job does."""
    assert named(row for row in found if not sum(row.by_job[REAL_JOB])) == ACCELERATORS_ONLY


def test_every_panel_of_a_gpu_job_returns_data(found):
    """What only accelerators have would not be shown where it matters."""
    assert named(row for row in found if not sum(row.by_job[GPU_JOB])) == set()


def test_every_query_returns_data(found):
    """A line of a panel would never be drawn, and nobody would miss it."""
    empty = [
        (row.panel.dashboard, row.panel.title, target["refId"])
        for row in found
        for index, target in enumerate(row.panel.targets)
        if not any(counts[index] for counts in row.by_job.values())
    ]
    assert empty == []


@pytest.mark.parametrize("uid", UIDS)
def test_several_values_of_a_variable_can_be_chosen(fleet, uid):
    """Choosing two ranks, jobs or sidecars would give an error, or nothing."""
    dashboard = load(uid)
    chosen = {
        variable["name"]: ["0", "1"] if variable["name"] == "rank" else list(JOBS)
        for variable in dashboards.variables(dashboard)
        if variable.get("multi") and variable["name"] in {"rank", "train_job"}
    }
    values = resolved(fleet.server, dashboard, chosen)
    first = panels(dashboard)[0]
    assert all(num_series(fleet.server, target, values) for target in first.targets)


@pytest.mark.parametrize("uid", UIDS)
def test_alerts_are_shown_as_annotations(fleet, uid):
    """Whoever looks at a graph would not see when an alert fired."""
    dashboard = load(uid)
    (alerts,) = [one for one in dashboard["annotations"]["list"] if one["name"] == "Alerts"]
    values = resolved(fleet.server, dashboard, {})
    assert fleet.server.query(substituted(alerts["expr"], values))
