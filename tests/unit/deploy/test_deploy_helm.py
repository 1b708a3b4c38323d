"""``deploy/helm``: Helm's own library lints and renders the chart, and clusters accept what comes out, for the values
that people set and as a part of their own charts."""

from __future__ import annotations

import copy
import json
import shutil

import pytest
import yaml

import deploys
import manifests
from torchmem_exporter.cli import parse

CHART = deploys.DEPLOY / "helm" / "torchmem-exporter"
MONITORED = {"podMonitor": {"enabled": True}, "prometheusRule": {"enabled": True}, "dashboards": {"enabled": True}}
VALUES = {
    "as it is": {},
    "monitored": MONITORED,
    "with TLS": {
        "web": {"secretName": "web"},
        "podMonitor": {
            "enabled": True,
            "secretName": "scrape",
            "serverName": "torchmem.example",
            "anyNamespace": False,
        },
    },
    "everything set": {
        **MONITORED,
        "image": {"repository": "images.example/torchmem", "tag": "1", "pullPolicy": "Always"},
        "imagePullSecrets": [{"name": "registry"}],
        "port": 9999,
        "level": "full",
        "extraArgs": ["--stale-after=90"],
        "extraEnv": [{"name": "OTEL_METRIC_EXPORT_INTERVAL", "value": "15000"}],
        "runAsNonRoot": False,
        "clusterName": "one",
        "otlp": {"endpoint": "http://collector:4317", "protocol": "grpc"},
        "daemonset": {
            "runAsUser": 0,
            "runAsGroup": 0,
            "maxUnavailable": 1,
            "nodeSelector": {"nvidia.com/gpu.present": "true"},
            "affinity": {"nodeAffinity": {}},
            "priorityClassName": "system-node-critical",
            "podAnnotations": {"a": "1"},
            "podLabels": {"b": "2"},
            "resources": {"limits": {"memory": "1Gi"}},
        },
        "prometheusRule": {
            "enabled": True,
            "labels": {"release": "prometheus"},
            "runbookBase": "https://git.example/torchmem/",
        },
        "dashboards": {"enabled": True, "annotations": {"grafana_folder": "torchmem"}},
    },
    "monitoring alone": {"daemonset": {"enabled": False}, "networkPolicy": {"enabled": False}, **MONITORED},
}
REFUSED = {
    "a misspelt key": {"daemonset": {"enable": False}},
    "a level that is none": {"level": "everything"},
    "a relative directory": {"daemonset": {"hostPath": "run/torchmem"}},
    "a label that is no text": {"daemonset": {"podLabels": {"a": True}}},
    "runbooks at no address": {"prometheusRule": {"runbookBase": "git.example"}},
    "TLS that Prometheus cannot follow": {"web": {"secretName": "web"}, "podMonitor": {"enabled": True}},
}
PARENT = """\
{{- $torchmem := index .Subcharts "torchmem-exporter" }}
apiVersion: v1
kind: Pod
metadata:
  name: train
  labels: {{- include "torchmem.sidecar.labels" $torchmem | nindent 4 }}
spec:
  securityContext:
    runAsUser: 1000
    fsGroup: 1000
  initContainers: {{- include "torchmem.sidecar.container" $torchmem | nindent 4 }}
  containers:
    - name: training
      image: train:latest
      env: {{- include "torchmem.sidecar.env" $torchmem | nindent 8 }}
      volumeMounts: {{- include "torchmem.sidecar.mounts" $torchmem | nindent 8 }}
  volumes: {{- include "torchmem.sidecar.volumes" $torchmem | nindent 4 }}
"""


_rendered = {}


def rendered(helm, path, values):
    """The objects of a release, and the templates that made any."""
    key = path, json.dumps(values)
    if key not in _rendered:
        _rendered[key] = _render(helm, path, values)
    return copy.deepcopy(_rendered[key])


def _render(helm, path, values):
    with helm.Chart.load(path) as chart:
        made = chart.render(values, name="demo", namespace="training")
    texts = {name: text for name, text in made.items() if name.endswith(".yaml") and manifests.objects(text)}
    return [item for text in texts.values() for item in manifests.objects(text)], set(texts)


def below_deploy(templates):
    """Paths of the chart's templates relative to ``deploy/``."""
    return [f"helm/{name}" for name in templates]


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_helm_lints(values, helm):
    """`helm lint --strict` of somebody else would fail."""
    report = helm.lint(CHART, values, strict=True, kube_version="v1.29.0")
    said = [message["error"] for message in report["messages"]]
    assert (report["errors"], said) == ([], ["icon is recommended"])
    deploys.passed("helm", *deploys.files("helm"))


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_clusters_accept_what_is_rendered(values, helm, operator_schemas):
    """`helm install` would fail half way, or an object lose a misspelt property."""
    items, templates = rendered(helm, CHART, values)
    manifests.check_core(items)
    manifests.check_operator(items)
    mine = set(below_deploy(templates))
    deploys.passed("kubernetes-validate", *mine & set(deploys.files("kubernetes-validate")))
    operators = mine & set(deploys.files("@kubernetes-models/prometheus-operator"))
    deploys.passed("@kubernetes-models/prometheus-operator", *operators)


def test_every_template_is_rendered_by_some_values(helm):
    """A template that these tests never see could be broken."""
    seen = {name for values in VALUES.values() for name in rendered(helm, CHART, values)[1]}
    assert seen == {f"torchmem-exporter/templates/{file.name}" for file in CHART.glob("templates/*.yaml")}


@pytest.mark.parametrize("values", REFUSED.values(), ids=REFUSED)
def test_values_that_cannot_be_meant_are_refused(values, helm):
    """Somebody's setting would be ignored, or break the release later."""
    with helm.Chart.load(CHART) as chart, pytest.raises(helm.HelmError):
        chart.render(values, name="demo")


def test_every_value_is_in_the_schema():
    """A value without a description would be refused once somebody sets it."""
    schema = yaml.safe_load((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())

    def undescribed(value, part, path):
        if not isinstance(value, dict) or "properties" not in part:
            return []
        own = [f"{path}.{key}" for key in value if key not in part["properties"]]
        return own + [
            found
            for key in value.keys() & part["properties"].keys()
            for found in undescribed(value[key], part["properties"][key], f"{path}.{key}")
        ]

    assert undescribed(values, schema, "") == []


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_the_exporter_accepts_its_arguments(values, helm):
    """The exporter would end with status 2, again and again."""
    items, _ = rendered(helm, CHART, values)
    port = values.get("port", 20471)
    for _, container in [
        pair for item in items for pair in manifests.containers(item) if pair[1]["name"] == "torchmem"
    ]:
        config = parse(container["args"])
        assert [entry["containerPort"] for entry in container["ports"]] == [config.port] == [port]
        assert str(config.directory) in [mount["mountPath"] for mount in container["volumeMounts"]]
        assert {"name": "TORCHMEM_DIR", "value": str(config.directory)} in container["env"]
        assert config.allow_open_bind == ("web" not in values)
    for policy in [item for item in items if item["kind"] == "NetworkPolicy"]:
        assert policy["spec"]["ingress"][0]["ports"] == [{"protocol": "TCP", "port": port}]


def test_rules_and_dashboards_are_all_there(helm):
    """An alert or a dashboard would be lost on the way through Helm's templates."""
    items, _ = rendered(helm, CHART, MONITORED)
    (rule,) = [item for item in items if item["kind"] == "PrometheusRule"]
    files = ("rules/torchmem.rules.yml", "alerts/torchmem.alerts.yml")
    sources = [yaml.safe_load((CHART / "files" / file).read_text()) for file in files]
    assert rule["spec"]["groups"] == [group for source in sources for group in source["groups"]]
    there = {name: text for item in items if item["kind"] == "ConfigMap" for name, text in item["data"].items()}
    sources = (CHART / "files" / "dashboards").glob("*.json")
    assert there == {file.name: file.read_text() for file in sources}


def test_runbooks_are_where_they_can_be_read(helm):
    """Whoever is woken at night would have the path of a file of some checkout."""
    items, _ = rendered(helm, CHART, VALUES["everything set"])
    (rule,) = [item for item in items if item["kind"] == "PrometheusRule"]
    alerts = [one for group in rule["spec"]["groups"] for one in group["rules"] if "alert" in one]
    assert alerts
    for alert in alerts:
        path = f"grafana/runbooks/{alert['alert']}.md"
        assert alert["annotations"]["runbook_url"] == f"https://git.example/torchmem/{path}"
        assert (deploys.ROOT / path).is_file()


def test_the_notes_say_which_level_the_namespace_needs(helm):
    """No pod of the DaemonSet would start, in a cluster that is strict by default, and nobody know why."""
    with helm.Chart.load(CHART) as chart:
        notes = chart.render({}, name="demo", namespace="training")["torchmem-exporter/templates/NOTES.txt"]
    assert "kubectl label namespace training pod-security.kubernetes.io/enforce=privileged\n" in notes


BESIDE = {
    "open": {},
    "with TLS": {"web": {"secretName": "web"}},
    "as root": {"runAsNonRoot": False, "sidecar": {"runAsUser": 0}},
}


@pytest.mark.parametrize("values", BESIDE.values(), ids=BESIDE)
def test_another_chart_puts_the_sidecar_beside_its_training(values, helm, tmp_path):
    """The named templates would make a pod that no cluster takes, or whose containers do not share the records."""
    (tmp_path / "templates").mkdir()
    (tmp_path / "Chart.yaml").write_text("apiVersion: v2\nname: training\nversion: 1.0.0\n")
    (tmp_path / "templates" / "pod.yaml").write_text(PARENT)
    shutil.copytree(CHART, tmp_path / "charts" / "torchmem-exporter")
    items, _ = rendered(helm, tmp_path, {"torchmem-exporter": {"daemonset": {"enabled": False}, **values}})
    manifests.check_core(items)
    (pod,) = [item["spec"] for item in items if item["kind"] == "Pod"]
    (sidecar,), (training,) = pod["initContainers"], pod["containers"]
    directory = str(parse(sidecar["args"]).directory)
    assert sidecar["restartPolicy"] == "Always"
    assert sidecar["securityContext"].get("runAsUser") == (0 if "runAsNonRoot" in values else None)
    assert sidecar["securityContext"]["runAsNonRoot"] == ("runAsNonRoot" not in values)
    assert training["env"] == [{"name": "TORCHMEM_DIR", "value": directory}]
    assert training["env"][0] in sidecar["env"]
    shared = {"name": "torchmem", "mountPath": directory}
    assert shared in sidecar["volumeMounts"]
    assert training["volumeMounts"] == [shared]
    mounted = {mount["name"] for mount in sidecar["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
