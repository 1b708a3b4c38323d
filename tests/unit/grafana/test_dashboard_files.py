"""The dashboards that are checked in are as generated, as Grafana reads them, and lead to each other."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest

from dashboards import FOLDER, UIDS, load, variables

pytest.importorskip("grafana_foundation_sdk", reason="needs Python 3.11")

from generator.dashboards import files
from generator.dashboards.page import TITLES
from generator.dashboards.panels import REFTYPES, WIDTH
from generator.settings import DEFAULTS
from torchmem.model import REFTYPE_LABELS

GRAFANA = FOLDER.parent
SCHEMA = json.loads((GRAFANA / "schema" / "dashboard.schema.json").read_text())
MADE_FROM = ("dashboard.ts", "package-lock.json", "tsconfig.json")
VALIDATOR = jsonschema.Draft7Validator(SCHEMA)


def boxes(dashboard):
    """Where each panel lies: left, top, right, bottom."""
    places = [panel["gridPos"] for panel in dashboard["panels"]]
    return [(place["x"], place["y"], place["x"] + place["w"], place["y"] + place["h"]) for place in places]


def test_the_dashboards_are_those_promised():
    """A bookmark, or a link from elsewhere, would lead nowhere."""
    assert list(TITLES) == list(UIDS)
    assert {path.stem for path in FOLDER.glob("*.json")} == set(UIDS)
    assert [load(uid)["uid"] for uid in UIDS] == list(UIDS)


@pytest.mark.parametrize("name", sorted(files()))
def test_checked_in_dashboards_are_as_generated(name):
    """Somebody changed a dashboard's file, or its source and forgot `make generate`."""
    assert (GRAFANA / name).read_text(encoding="utf-8") == files()[name]


def test_generation_does_not_depend_on_the_process():
    """Each `make generate` would change files that nobody has touched."""
    program = "import sys; from generator.dashboards import files; sys.stdout.write(repr(sorted(files().items())))"
    paths = os.pathsep.join([str(GRAFANA), *sys.path])
    made = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONPATH": paths, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert made == {repr(sorted(files().items()))}


def test_the_schema_is_made_from_what_is_checked_in():
    """The dashboards would be held against types that nobody sees: `make schema` makes them anew."""
    digest = hashlib.sha256(b"".join((GRAFANA / "schema" / name).read_bytes() for name in MADE_FROM)).hexdigest()
    assert SCHEMA["$comment"].endswith(digest)
    lock = json.loads((GRAFANA / "schema" / "package-lock.json").read_text())
    assert lock["packages"]["node_modules/@grafana/schema"]["version"] == "11.6.0"
    assert not any("resolved" in package for package in lock["packages"].values())


@pytest.mark.parametrize("uid", UIDS)
def test_dashboards_are_valid(uid):
    """Grafana would show an error, or leave out what it does not know."""
    assert [f"{list(error.absolute_path)}: {error.message}" for error in VALIDATOR.iter_errors(load(uid))] == []


@pytest.mark.parametrize(
    "spoil",
    [
        lambda dashboard: dashboard["panels"][1]["options"].update(colourMode="value"),
        lambda dashboard: dashboard["panels"][1].update(type="stats"),
        lambda dashboard: dashboard["panels"][1]["options"].update(colorMode="loud"),
        lambda dashboard: dashboard["panels"][1].pop("description"),
        lambda dashboard: dashboard["panels"][1]["targets"][0].pop("expr"),
        lambda dashboard: dashboard["panels"][1]["targets"][0].update(datasource={"type": "loki", "uid": "x"}),
        lambda dashboard: dashboard["panels"][1]["fieldConfig"]["defaults"].update(unit=7),
        lambda dashboard: dashboard["templating"]["list"][0].update(refresh="often"),
        lambda dashboard: dashboard["panels"][1]["fieldConfig"]["defaults"].pop("noValue"),
        lambda dashboard: dashboard["annotations"]["list"][0].pop("titleFormat"),
        lambda dashboard: dashboard.pop("schemaVersion"),
        lambda dashboard: dashboard.pop("uid"),
    ],
)
def test_the_schema_refuses_what_grafana_does_not_know(spoil):
    """The validity of the dashboards would say nothing."""
    dashboard = load("torchmem-fleet")
    spoil(dashboard)
    assert not VALIDATOR.is_valid(dashboard)


@pytest.mark.parametrize("uid", UIDS)
def test_panels_fill_the_grid_without_overlap(uid):
    """Panels would lie on top of each other, or leave holes."""
    dashboard = load(uid)
    taken = {}
    for panel, (left, top, right, bottom) in zip(dashboard["panels"], boxes(dashboard), strict=True):
        cells = {(x, y) for x in range(left, right) for y in range(top, bottom)}
        assert not cells & taken.keys(), panel["title"]
        taken |= dict.fromkeys(cells, panel["title"])
    heights = {y for _, y in taken}
    assert all((x, y) in taken for x in range(WIDTH) for y in heights)


@pytest.mark.parametrize("uid", UIDS)
def test_dashboards_lead_to_the_others_and_take_the_choices_along(uid):
    """Whoever follows a link would have to choose job and rank, and the time, again."""
    dashboard = load(uid)
    links = {link["url"].removeprefix("/d/"): link for link in dashboard["links"]}
    assert set(links) == set(UIDS) - {uid}
    assert all(link["includeVars"] and link["keepTime"] for link in links.values())


@pytest.mark.parametrize("uid", UIDS)
def test_links_of_rows_choose_what_was_clicked(uid):
    """A click on a job or a rank would show another one."""
    text = json.dumps(load(uid))
    urls = re.findall(r'"url": "(/d/[^"?]+\?[^"]*)"', text)
    for url in urls:
        target, _, query = url.removeprefix("/d/").partition("?")
        given = set(re.findall(r"var-(\w+)=", query))
        assert given <= {one["name"] for one in load(target)["templating"]["list"]}
        assert "${__value.raw}" in query
        assert "${__url_time_range}" in query
    assert bool(urls) == (uid in {"torchmem-fleet", "torchmem-job"})


@pytest.mark.parametrize("uid", UIDS)
def test_variables_follow_each_other(uid):
    """A variable's query would use one that is not chosen yet, and offer nothing."""
    dashboard = load(uid)
    source, *rest = dashboard["templating"]["list"]
    assert (source["name"], source["type"], source["query"]) == ("datasource", "datasource", "prometheus")
    assert rest == variables(dashboard)
    known = set()
    for variable in rest:
        assert set(re.findall(r"\$(\w+)", variable["query"])) <= known
        assert bool(variable.get("includeAll")) == bool(variable.get("multi")) == ("allValue" in variable)
        known.add(variable["name"])


def test_jobs_of_several_clusters_stay_apart():
    """Jobs of one name in two clusters would be shown as one."""
    settings = replace(DEFAULTS, job_labels=("cluster", "train_job"))
    for name, content in files(settings).items():
        dashboard = json.loads(content)
        assert [one["name"] for one in dashboard["templating"]["list"]][1:3] == ["cluster", "train_job"]
        for panel in dashboard["panels"]:
            for target in panel.get("targets", []):
                expr = target["expr"]
                assert expr.count("cluster=") == expr.count("train_job="), (name, panel["title"], expr)


def test_each_reftype_has_its_own_colour():
    """Two kinds of memory could not be told apart in a stack, or one would change its colour with those beside it."""
    assert set(REFTYPES) == set(REFTYPE_LABELS)
    assert len(set(REFTYPES.values())) == len(REFTYPES)


def test_files_lie_where_provisioning_looks():
    """A provisioned Grafana would start without the dashboards."""
    assert all(Path(name).parent.name == FOLDER.name for name in files())
