"""Every query that is generated, in rules, annotations and runbooks, asks for what there is."""

from __future__ import annotations

import re
import shlex
from dataclasses import fields, replace

import pytest

from generator.catalogue import alerts, files
from generator.query import UnknownLabelError, select, select_any
from generator.recordings import recordings
from generator.settings import DEFAULTS
from queries import QueryError, labels_of, recorded_labels
from torchmem_exporter import catalog

RECORDED = recorded_labels(recordings(DEFAULTS))
FLEET = replace(DEFAULTS, job_labels=("cluster", "train_job"))
JOB = {"train_job"}
MORE = {"TorchMemLabelerDown": {"labeler"}}


def templates(alert):
    return [alert.summary, alert.description, *alert.details.values()]


def asked_in(template):
    """The queries in a template, for a job called ``x``."""
    return [re.sub(r"%(\[\d\])?q", '"x"', query) for query in re.findall(r"printf `(.*?)`", template)]


@pytest.mark.parametrize("one", recordings(DEFAULTS), ids=lambda one: one.name)
def test_recorded_series_are_named_by_their_labels(one):
    """A recorded series would have other labels than its name says, and joins on them would find nothing."""
    levels = {
        "job": JOB,
        "job_reftype": JOB | {"reftype"},
        "rank": JOB | {"rank"},
        "device": JOB | {"rank", "device"},
        "host": JOB | {"host"},
    }
    level, metric, operation = one.name.split(":")
    extra = {"host", "dp", "tp", "pp"} if metric == "torchmem_rank_info" else set()
    assert RECORDED[one.name] == levels[level] | extra
    assert operation


@pytest.mark.parametrize("alert", alerts(), ids=lambda alert: alert.name)
def test_alerts_ask_for_what_is_there(alert):
    """An alert would never fire, because of a metric or label that does not exist, or flap with a rank's label."""
    wanted = {"reason"} if alert.name == "TorchMemSnapshotRejected" else JOB | MORE.get(alert.name, set())
    assert labels_of(alert.expr, RECORDED) == wanted


@pytest.mark.parametrize("alert", alerts(), ids=lambda alert: alert.name)
def test_annotations_ask_for_what_is_there(alert):
    """The annotation that names the grower would be empty, or use a label that its query does not give."""
    own = labels_of(alert.expr, RECORDED)
    for template in templates(alert):
        assert set(re.findall(r"\$labels\.(\w+)", template)) <= own
        given = set().union(*(labels_of(query, RECORDED) for query in asked_in(template)))
        assert set(re.findall(r"\.Labels\.(\w+)", template)) <= given
        assert template.count("query") == len(asked_in(template))


@pytest.mark.parametrize("alert", alerts(), ids=lambda alert: alert.name)
def test_runbooks_ask_for_what_is_there(alert):
    """Whoever is woken would paste a query that finds nothing."""
    page = files()[f"runbooks/{alert.name}.md"]
    queries = re.findall(r"```promql\n(.*?)\n```", page, flags=re.DOTALL)
    assert len(queries) > 1
    for query in queries:
        labels_of(query, RECORDED)


@pytest.mark.parametrize("alert", alerts(), ids=lambda alert: alert.name)
def test_runbooks_run_commands_that_exist(alert):
    """Whoever is woken would paste a command that ends in a usage error."""
    from torchmem.cli import _parser

    for check in alert.runbook.confirm:
        words = shlex.split(check.command)
        if words and words[0] == "torchmem":
            _parser().parse_args([word.replace("N", "1") if word == "N" else word for word in words[1:]])


@pytest.mark.parametrize("alert", alerts(), ids=lambda alert: alert.name)
def test_runbooks_say_everything(alert):
    """A runbook would lack a step, or a threshold of its alert."""
    book = alert.runbook
    assert book.meaning
    assert book.act
    assert book.false_when
    used = {name for name in alert.settings if f"`{name}`" in files()[f"runbooks/{alert.name}.md"]}
    assert used == set(alert.settings)


@pytest.mark.parametrize(
    "name",
    [one.name for one in fields(DEFAULTS) if one.name not in {"job_labels", "runbook_base", "holds"}],
)
def test_each_setting_is_told_by_an_alert(name):
    """A threshold could be changed without any runbook saying so, or would change nothing."""
    assert any(name in alert.settings for alert in alerts())
    value = getattr(DEFAULTS, name)
    other = "7m" if isinstance(value, str) else value * 2
    assert files(replace(DEFAULTS, **{name: other}))["alerts/torchmem.alerts.yml"] != files()[
        "alerts/torchmem.alerts.yml"
    ] or (files(replace(DEFAULTS, **{name: other}))["rules/torchmem.rules.yml"] != files()["rules/torchmem.rules.yml"])


def test_jobs_of_several_clusters_stay_apart():
    """Jobs of one name in two clusters would be judged as one."""
    labels = {"cluster", "train_job"}
    for alert in alerts(FLEET):
        grouped = re.findall(r"by \(([^)]*)\)", alert.expr)
        assert all("cluster" in group for group in grouped)
        for template in templates(alert):
            for query in re.findall(r"printf `(.*?)`", template):
                if alert.name != "TorchMemSnapshotRejected":
                    assert "cluster=%[1]q,train_job=%[2]q" in query
    for one in recordings(FLEET):
        assert all(labels <= set(group.split(", ")) for group in re.findall(r" by \(([^)]*)\)", one.expr))


def test_a_selector_of_an_unknown_label_is_refused():
    """A typing error in the catalogue of alerts would give a query that finds nothing."""
    with pytest.raises(UnknownLabelError, match="torchmem_memory_peak_bytes has no label reftype"):
        select(catalog.PEAK, reftype="activation")
    with pytest.raises(UnknownLabelError):
        select_any(catalog.STEP_PEAK, catalog.PEAK, reftype="activation")


@pytest.mark.parametrize(
    "query",
    [
        "torchmem_memory_peak",
        'torchmem_memory_peak_bytes{reftype="x"}',
        "sum by (module) (torchmem_memory_peak_bytes)",
        "torchmem_memory_peak_bytes / on (train_job, reftype) torchmem_memory_usage_bytes",
        "torchmem_memory_peak_bytes / torchmem_memory_usage_bytes",
        "torchmem_memory_peak_bytes * on (train_job, rank) group_left (module) torchmem_rank_info",
        "torchmem_rank_info and ignoring (pod) torchmem_rank_up",
        "sum(torchmem_memory_peak_bytes",
        "avg_over_time(sum:nothing[5m])",
    ],
)
def test_the_check_finds_what_is_wrong(query):
    """The other tests here would pass whatever the queries say."""
    with pytest.raises(QueryError):
        labels_of(query)
