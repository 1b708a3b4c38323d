"""Every query of the dashboards asks for what there is, and every panel says what it shows, in its unit."""

from __future__ import annotations

import re

import promql_parser as promql
import pytest

from dashboards import BUILT_IN, LABEL_VALUES, QUERY_RESULT, UIDS, load, substituted, variables
from generator.recordings import recordings
from generator.settings import DEFAULTS
from queries import labels_of, recorded_labels

RECORDED = recorded_labels(recordings(DEFAULTS))
UNITS = {"_bytes": "bytes", "_ratio": "percentunit", "_bytes_per_second": "binBps"}
"""What a panel must show of a metric of that ending, where it does no arithmetic between two."""
CHOSEN = {"train_job": "a", "rank": ".*", "device": ".*", "instance": ".*", "highest": "0"}


def shown(uid):
    return [panel for panel in load(uid)["panels"] if panel["type"] != "row"]


PANELS = [pytest.param(uid, panel, id=f"{uid}: {panel['title']}") for uid in UIDS for panel in shown(uid)]


def given(target):
    """The labels that a target's result may have."""
    return labels_of(substituted(target["expr"], CHOSEN), RECORDED)


@pytest.mark.parametrize(("uid", "panel"), PANELS)
def test_queries_ask_for_what_is_there(uid, panel):
    """A panel would stay empty, because of a metric or label that nobody exposes."""
    for target in panel["targets"]:
        assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= given(target)


@pytest.mark.parametrize(("uid", "panel"), PANELS)
def test_queries_use_variables_of_their_dashboard(uid, panel):
    """Grafana would send a variable's name instead of its value."""
    known = {one["name"] for one in load(uid)["templating"]["list"]} | BUILT_IN.keys()
    for text in (panel["title"], *(target["expr"] for target in panel["targets"])):
        assert set(re.findall(r"\$(\w+)", text)) <= known


@pytest.mark.parametrize(("uid", "panel"), PANELS)
def test_a_choice_of_many_is_matched_as_such(uid, panel):
    """Choosing two ranks, or all, would show none."""
    many = {one["name"] for one in variables(load(uid)) if one.get("multi")}
    for target in panel["targets"]:
        for sign, name in re.findall(r'(=~?)"\$(\w+)"', target["expr"]):
            assert (sign == "=~") or name not in many, target["expr"]


@pytest.mark.parametrize(("uid", "panel"), PANELS)
def test_panels_say_what_they_show(uid, panel):
    """Somebody would look at a graph and not know what it means, or what to do."""
    assert re.fullmatch(r"[A-Z].+", panel["title"])
    assert panel["description"].endswith(".")
    assert len(panel["description"]) > 15
    assert panel["fieldConfig"]["defaults"]["noValue"]
    assert [target["refId"] for target in panel["targets"]] == [chr(65 + n) for n in range(len(panel["targets"]))]
    assert all(target["legendFormat"] for target in panel["targets"])


@pytest.mark.parametrize(("uid", "panel"), PANELS)
def test_units_are_those_of_the_metrics(uid, panel):
    """Bytes would be shown as a plain number, or a ratio as bytes."""
    overrides = panel["fieldConfig"]["overrides"]
    unit_of = {field["matcher"]["options"]: unit for field in overrides if (unit := look(field))}
    columns = renamed(panel)
    for target in panel["targets"]:
        if re.search(r"[/]|count", target["expr"]):
            continue
        names = set(re.findall(r"\w*torchmem_\w+(?=[{:\[])", target["expr"]))
        expected = {unit for name in names for ending, unit in UNITS.items() if name.endswith(ending)}
        unit = unit_of.get(columns.get(f"Value #{target['refId']}", ""), panel["fieldConfig"]["defaults"]["unit"])
        assert expected <= {unit}


def look(field):
    return next((one["value"] for one in field["properties"] if one["id"] == "unit"), None)


def renamed(panel):
    """The headings of a table's fields."""
    options = (one["options"].get("renameByName", {}) for one in panel.get("transformations", []))
    return {field: name for names in options for field, name in names.items()}


@pytest.mark.parametrize(("uid", "panel"), [one for one in PANELS if one.values[1]["type"] == "table"])
def test_tables_show_labels_that_their_queries_give(uid, panel):
    """A column would be missing, or rows of different queries not be merged."""
    results = {given(target) for target in panel["targets"]}
    assert len(results) == 1
    (labels,) = results
    for target in panel["targets"]:
        assert target["instant"]
        assert target["format"] == "table"
        parsed = promql.parse(substituted(target["expr"], CHOSEN))
        assert isinstance(parsed, (promql.AggregateExpr, promql.BinaryExpr)), "the metric's name would be a column too"
    assert {field for field in renamed(panel) if not field.startswith("Value")} <= labels
    for one in panel["transformations"]:
        if one["id"] == "groupingToMatrix":
            assert {one["options"]["rowField"], one["options"]["columnField"]} == labels


@pytest.mark.parametrize("uid", UIDS)
def test_titles_are_told_apart(uid):
    """Two panels of one name could not be told apart in a list or in a talk."""
    titles = [panel["title"] for panel in shown(uid)]
    assert len(set(titles)) == len(titles)


@pytest.mark.parametrize("uid", UIDS)
def test_variables_ask_for_what_is_there(uid):
    """A variable would offer nothing, and every panel be empty."""
    for variable in variables(load(uid)):
        query = substituted(variable["query"], CHOSEN)
        if match := LABEL_VALUES.fullmatch(query):
            assert match.group(2) in labels_of(match.group(1), RECORDED)
        else:
            label = re.match(r'/(\w+)="', variable["regex"]).group(1)
            assert label in labels_of(QUERY_RESULT.fullmatch(query).group(1), RECORDED)


@pytest.mark.parametrize("uid", UIDS)
def test_alerts_of_the_chosen_job_are_annotations(uid):
    """Graphs would show another job's alerts, or none."""
    (alerts,) = load(uid)["annotations"]["list"]
    assert "train_job" in labels_of(substituted(alerts["expr"], CHOSEN), RECORDED)
    assert re.search(r'train_job=~?"\$train_job"', alerts["expr"])
    assert set(re.findall(r"{{(\w+)}}", alerts["titleFormat"] + alerts["textFormat"])) == {"alertname", "train_job"}
