"""What provisions a Grafana names the files and settings that there are, as Grafana 11.6 spells them."""

from __future__ import annotations

import json

import pytest
import yaml

from dashboards import FOLDER, UIDS

PROVISIONING = FOLDER.parent / "provisioning"
SOURCE = {
    "access",
    "basicAuth",
    "basicAuthUser",
    "correlations",
    "database",
    "editable",
    "isDefault",
    "jsonData",
    "name",
    "orgId",
    "orgName",
    "secureJsonData",
    "type",
    "uid",
    "url",
    "user",
    "version",
    "withCredentials",
}
SOURCE_DATA = {
    "cacheLevel",
    "customQueryParameters",
    "disableMetricsLookup",
    "exemplarTraceIdDestinations",
    "httpMethod",
    "incrementalQuerying",
    "manageAlerts",
    "prometheusType",
    "prometheusVersion",
    "queryTimeout",
    "timeInterval",
}
PROVIDER = {
    "allowUiUpdates",
    "disableDeletion",
    "folder",
    "folderUid",
    "name",
    "options",
    "orgId",
    "type",
    "updateIntervalSeconds",
}
PROVIDER_OPTIONS = {"foldersFromFilesStructure", "path"}


def provisioned(kind, section):
    """What all files of one kind provision."""
    files = [yaml.safe_load(path.read_text()) for path in sorted((PROVISIONING / kind).glob("*.yaml"))]
    assert files
    assert all(set(file) == {"apiVersion", section} and file["apiVersion"] == 1 for file in files)
    return [one for file in files for one in file[section]]


def test_kinds_are_those_that_grafana_reads():
    """Grafana would never look into a folder of another name."""
    assert {path.name for path in PROVISIONING.iterdir()} <= {"access-control", "alerting", "dashboards", "datasources"}


def test_data_sources_are_spelt_as_grafana_does():
    """Grafana ignores what it does not know: queries would go nowhere, or rates be taken over too short a time."""
    for source in provisioned("datasources", "datasources"):
        assert set(source) <= SOURCE
        assert set(source["jsonData"]) <= SOURCE_DATA
        assert (source["type"], source["access"]) == ("prometheus", "proxy")
        assert source["jsonData"]["httpMethod"] in {"GET", "POST"}


def test_rates_are_taken_over_what_the_bundled_prometheus_scrapes():
    """Panels of rates would be empty: their window would hold less than two scrapes."""
    compose = yaml.safe_load((FOLDER.parents[1] / "deploy" / "compose" / "prometheus.yml").read_text())
    (source,) = provisioned("datasources", "datasources")
    assert source["jsonData"]["timeInterval"] == compose["global"]["scrape_interval"]


def test_dashboards_are_looked_for_where_they_are():
    """Grafana would start without the dashboards, or let somebody's changes be lost."""
    for provider in provisioned("dashboards", "providers"):
        assert set(provider) <= PROVIDER
        assert set(provider["options"]) <= PROVIDER_OPTIONS
        assert provider["type"] == "file"
        assert provider["allowUiUpdates"] is False


@pytest.mark.parametrize("uid", UIDS)
def test_dashboards_name_no_data_source_of_their_own(uid):
    """A dashboard would work with a data source of one name only."""
    text = json.dumps(json.loads((FOLDER / f"{uid}.json").read_text()))
    assert text.count('"uid": "${datasource}"') == text.count('"type": "prometheus"')
