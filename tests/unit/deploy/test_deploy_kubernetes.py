"""``deploy/kubernetes``: kustomize renders it, the schemas of those who define the objects accept it, and what the
objects say of each other, and to the sidecar, holds."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess

import pytest
import trustme
import yaml

import deploys
import manifests
from torchmem.errors import ConfigError
from torchmem_exporter.cli import parse
from torchmem_exporter.otlp.config import from_environ
from torchmem_exporter.otlp.resource import Resources
from torchmem_exporter.serving.security import Guard, Sources

KUBERNETES = deploys.DEPLOY / "kubernetes"
ROOTS = sorted(
    file.parent.relative_to(KUBERNETES).as_posix()
    for file in KUBERNETES.rglob("kustomization.yaml")
    if "kind: Kustomization" in file.read_text()
)
TRAINING = [
    "base",
    *(f"overlays/{name}" for name in ("job", "job-otlp", "job-root", "job-tls", "jobset", "pytorchjob")),
]
PORT = 20471


@pytest.fixture(scope="module")
def render(kubectl):
    """Renders a kustomization into objects, once."""

    @functools.cache
    def rendered(root):
        done = subprocess.run([kubectl, "kustomize", KUBERNETES / root], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        return manifests.objects(done.stdout)

    return rendered


def files_read(folder):
    """The files that a kustomization is made of, those of the folders that it names included."""
    kustomization = folder / "kustomization.yaml"
    content = yaml.safe_load(kustomization.read_text())
    found = {kustomization}
    names = content.get("resources", []) + content.get("components", [])
    names += [entry["path"] for key in ("patches", "replacements") for entry in content.get(key, []) if "path" in entry]
    names += [name for entry in content.get("configMapGenerator", []) for name in entry["files"]]
    for name in names:
        path = (folder / name).resolve()
        found |= files_read(path) if path.is_dir() else {path}
    return found


def below_deploy(paths):
    """Those of the files that lie below ``deploy/``, as paths relative to it."""
    return [path.relative_to(deploys.DEPLOY).as_posix() for path in paths if path.is_relative_to(deploys.DEPLOY)]


def checked_by(tool, root):
    """The files of a kustomization that a tool has to check."""
    return sorted(set(below_deploy(files_read(KUBERNETES / root))) & set(deploys.files(tool)))


def only(items, kind):
    """The one object of a kind."""
    (item,) = [item for item in items if item["kind"] == kind]
    return item


def sidecars(items):
    """The sidecar's containers, with the pod each is in."""
    found = [pair for item in items for pair in manifests.containers(item) if pair[1]["name"] == "torchmem"]
    assert found
    return found


@pytest.mark.parametrize("root", ROOTS)
def test_kustomize_renders(root, render):
    """`kubectl apply -k` would stop with an error."""
    assert render(root)
    deploys.passed("kubectl kustomize", *below_deploy(files_read(KUBERNETES / root)))


def test_every_file_is_rendered():
    """A file that no kustomization names would never be applied."""
    read = {file for root in ROOTS for file in below_deploy(files_read(KUBERNETES / root))}
    assert read == set(deploys.files("kubectl kustomize"))


@pytest.mark.parametrize("root", ROOTS)
def test_kubernetes_accepts(root, render):
    """A cluster would refuse an object, or drop a misspelt property without a word."""
    manifests.check_core(render(root))
    deploys.passed("kubernetes-validate", *checked_by("kubernetes-validate", root))


@pytest.mark.parametrize("root", ["monitoring", "overlays/monitoring-tls"])
def test_prometheus_operator_accepts(root, render, operator_schemas):
    """The operator would not see an object, and nothing would be scraped and nobody alerted."""
    manifests.check_operator(render(root))
    tool = "@kubernetes-models/prometheus-operator"
    deploys.passed("@kubernetes-models/prometheus-operator", *checked_by(tool, root))


def test_kubeflow_accepts(render):
    """The training operator would refuse the job, or drop what it does not know."""
    manifests.check_pytorchjob(only(render("overlays/pytorchjob"), "PyTorchJob"))
    deploys.passed("kubeflow-training", *checked_by("kubeflow-training", "overlays/pytorchjob"))


def test_jobset_accepts(render):
    """The controller of JobSets would refuse the job, or drop what it does not know."""
    manifests.check_jobset(only(render("overlays/jobset"), "JobSet"))
    deploys.passed("kubeflow-trainer-api", *checked_by("kubeflow-trainer-api", "overlays/jobset"))


def test_the_sidecar_is_protected_by_its_web_configuration(tmp_path):
    """The sidecar would refuse to start, or serve anybody."""
    shutil.copy(KUBERNETES / "sidecar-tls" / "web-config.yml", tmp_path)
    certificate = trustme.CA().issue_cert("torchmem.example")
    certificate.private_key_pem.write_to_path(tmp_path / "tls.key")
    certificate.cert_chain_pems[0].write_to_path(tmp_path / "tls.crt")
    (tmp_path / "token").write_text("secret\n")
    Guard(Sources(tmp_path / "web-config.yml", tmp_path / "token", "0.0.0.0"))
    with pytest.raises(ConfigError):
        Guard(Sources(tmp_path / "web-config.yml", None, "0.0.0.0"))
    deploys.passed("torchmem-exporter", "kubernetes/sidecar-tls/web-config.yml")


@pytest.mark.parametrize("root", [*TRAINING, "overlays/daemonset"])
def test_the_sidecar_accepts_its_arguments(root, render):
    """The sidecar would end with status 2, again and again."""
    for _, container in sidecars(render(root)):
        config = parse(container["args"])
        assert config.port == PORT
        assert [port["containerPort"] for port in container["ports"]] == [PORT]
        mounted = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
        assert not mounted[str(config.directory)].get("readOnly")
        assert bool(config.web_config) != config.allow_open_bind
        # For the command line in the container, by `kubectl exec`.
        assert {"name": "TORCHMEM_DIR", "value": str(config.directory)} in container["env"]


NAMES = {
    "Pod": "metadata.name",
    "Job": "metadata.labels['batch.kubernetes.io/job-name']",
    "JobSet": "metadata.labels['jobset.sigs.k8s.io/jobset-name']",
    "PyTorchJob": "metadata.labels['training.kubeflow.org/job-name']",
}


@pytest.mark.parametrize("root", [*TRAINING, "overlays/on-node"])
def test_each_job_has_a_name_of_its_own(root, render):
    """Two jobs of a cluster would become one in the rules, or one job another at each start."""
    (item,) = [item for item in render(root) if manifests.pod_templates(item)]
    for template in manifests.pod_templates(item):
        (training,) = template["spec"]["containers"]
        (name,) = [variable for variable in training["env"] if variable["name"] == "TORCHMEM_TRAIN_JOB"]
        assert name["valueFrom"] == {"fieldRef": {"fieldPath": NAMES[item["kind"]]}}


TORCHRUN = """#!/bin/sh
trap "echo ending; sleep 0.3; exit 3" TERM
echo "$@"
[ "$FATE" = killed ] || exit $FATE
while :; do sleep 0.1; done
"""
POST_MORTEM = """#!/bin/sh
echo torchmem "$@"
"""


@pytest.mark.parametrize("fate", ["0", "9", "killed"])
@pytest.mark.parametrize("root", [*TRAINING, "overlays/on-node"])
def test_training_that_fails_tells_who_held_what(root, fate, render, tmp_path):
    """Post-mortems would go with the pod unseen, a failure be taken for success, or SIGTERM not end the training."""
    for name, text in (("torchrun", TORCHRUN), ("torchmem", POST_MORTEM)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (item, *_) = [item for item in render(root) if manifests.pod_templates(item)]
    command = manifests.pod_templates(item)[0]["spec"]["containers"][0]["command"]
    environment = {"PATH": f"{tmp_path}:{os.defpath}", "FATE": fate, "JOB_COMPLETION_INDEX": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, env=environment, **pipes) as shell:
        given = shell.stdout.readline()
        assert given.endswith("train.py\n")
        assert ("--node-rank=1 " in given) == (item["kind"] in {"Job", "JobSet"})
        if fate == "killed":
            shell.terminate()
        said = shell.stdout.read()
    endings = {"0": (0, ""), "9": (9, "torchmem post-mortem\n"), "killed": (3, "ending\ntorchmem post-mortem\n")}
    assert (shell.returncode, said) == endings[fate]


@pytest.mark.parametrize("root", TRAINING)
def test_training_and_sidecar_share_a_volume_in_memory(root, render):
    """The sidecar would look into an empty directory, or records would be written to a disk."""
    for pod, sidecar in sidecars(render(root)):
        (training,) = pod["containers"]
        directory = str(parse(sidecar["args"]).directory)
        assert {"name": "TORCHMEM_DIR", "value": directory} in training["env"]
        assert all({"name": "torchmem", "mountPath": directory} in one["volumeMounts"] for one in (training, sidecar))
        (volume,) = [volume for volume in pod["volumes"] if volume["name"] == "torchmem"]
        assert volume["emptyDir"] == {"medium": "Memory", "sizeLimit": "64Mi"}


@pytest.mark.parametrize("root", TRAINING)
def test_the_sidecar_is_native_and_costs_the_pod_nothing(root, render):
    """A Job would never complete, training would wait for the sidecar, or the pod would leave the class Guaranteed."""
    for pod, sidecar in sidecars(render(root)):
        assert sidecar in pod["initContainers"]
        assert sidecar["restartPolicy"] == "Always"
        assert "startupProbe" not in sidecar
        assert sidecar["resources"]["requests"] == sidecar["resources"]["limits"]
        assert sidecar["lifecycle"]["preStop"]["sleep"]["seconds"] < pod.get("terminationGracePeriodSeconds", 30)


@pytest.mark.parametrize("root", [root for root in TRAINING if root != "overlays/job-root"])
def test_pods_keep_to_the_restricted_standard(root, render):
    """A namespace that enforces it would refuse the pod."""
    for pod, container in [pair for item in render(root) for pair in manifests.containers(item)]:
        inside = {**pod["securityContext"], **container["securityContext"]}
        assert inside["runAsNonRoot"] is True
        assert inside["runAsUser"] > 0
        assert inside["allowPrivilegeEscalation"] is False
        assert inside["seccompProfile"] == {"type": "RuntimeDefault"}
        assert inside["capabilities"] == {"drop": ["ALL"]}
        assert not any("hostPath" in volume for volume in pod["volumes"])
        assert container["name"] != "torchmem" or container["securityContext"]["readOnlyRootFilesystem"] is True


def user(pod, container):
    """The user that a container runs as; the image's own where nothing else is said."""
    image = 0 if container["name"] == "training" else 65532
    return {"runAsUser": image, **pod.get("securityContext", {}), **container.get("securityContext", {})}["runAsUser"]


@pytest.mark.parametrize("root", TRAINING)
def test_the_sidecar_runs_as_the_user_who_trains(root, render):
    """The sidecar could read none of the records, which are for their owner alone."""
    for pod, sidecar in sidecars(render(root)):
        (training,) = pod["containers"]
        assert user(pod, sidecar) == user(pod, training)
        assert sidecar["securityContext"]["runAsNonRoot"] == (user(pod, sidecar) != 0)
        unprivileged = {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert unprivileged.items() <= sidecar["securityContext"].items()


@pytest.mark.parametrize("root", [*TRAINING, "overlays/daemonset"])
def test_the_sidecar_says_which_pod_it_is_in(root, render):
    """What is pushed by OTLP would not be joined with the cluster's other telemetry."""
    for _, sidecar in sidecars(render(root)):
        resources = Resources.from_environ({variable["name"]: variable["name"] for variable in sidecar["env"]})
        told = {**resources.of_node, **resources.of_pod, **resources.of_container}
        assert {name: value for name, value in told.items() if name.startswith("k8s.")} == {
            "k8s.container.name": "K8S_CONTAINER_NAME",
            "k8s.namespace.name": "K8S_NAMESPACE_NAME",
            "k8s.node.name": "K8S_NODE_NAME",
            "k8s.pod.name": "K8S_POD_NAME",
            "k8s.pod.uid": "K8S_POD_UID",
        }


@pytest.mark.parametrize("root", [*TRAINING, "overlays/daemonset"])
def test_prometheus_finds_every_pod(root, render):
    """Pods would train unseen."""
    spec = only(render("monitoring"), "PodMonitor")["spec"]
    (selected,) = spec["selector"]["matchExpressions"]
    (endpoint,) = spec["podMetricsEndpoints"]
    templates = [pod for item in render(root) for pod in manifests.pod_templates(item)]
    assert templates
    for template in templates:
        assert template["metadata"]["labels"][selected["key"]] in selected["values"]
    for _, sidecar in sidecars(render(root)):
        assert [port["name"] for port in sidecar["ports"]] == [endpoint["port"]]


@pytest.mark.parametrize("root", [*TRAINING, "overlays/daemonset"])
def test_only_prometheus_may_scrape(root, render):
    """Anybody in the cluster would read the port that is open without authentication, or training's ports be closed."""
    spec = only(render(root), "NetworkPolicy")["spec"]
    for template in [pod for item in render(root) for pod in manifests.pod_templates(item)]:
        assert spec["podSelector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    scraping, *peers = spec["ingress"]
    monitoring = only(render("monitoring"), "PodMonitor")["metadata"]["namespace"]
    assert scraping == {
        "from": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": monitoring}}}],
        "ports": [{"protocol": "TCP", "port": PORT}],
    }
    for rule in peers:
        assert rule["from"] == [{"podSelector": {}}]
        tcp = [range(port["port"], port["endPort"] + 1) for port in rule["ports"] if port["protocol"] == "TCP"]
        assert sorted(port for ports in tcp for port in ports) == [port for port in range(1, 65536) if port != PORT]
    assert bool(peers) == (root != "overlays/daemonset")


def test_the_sidecar_pushes_to_the_agent_of_its_node(render):
    """Every push would go nowhere."""
    ((_, sidecar),) = sidecars(render("overlays/job-otlp"))
    (address,) = [variable for variable in sidecar["env"] if variable["name"] == "K8S_NODE_IP"]
    assert address["valueFrom"] == {"fieldRef": {"fieldPath": "status.hostIP"}}
    given = {variable["name"]: variable.get("value", "192.0.2.1") for variable in sidecar["env"]}
    given["OTEL_EXPORTER_OTLP_ENDPOINT"] = given["OTEL_EXPORTER_OTLP_ENDPOINT"].replace("$(K8S_NODE_IP)", "192.0.2.1")
    push = from_environ(given)
    agent = yaml.safe_load((deploys.DEPLOY / "otel" / "agent.yaml").read_text())
    listening = agent["receivers"]["otlp"]["protocols"]["http"]["endpoint"]
    assert push.endpoint == f"http://192.0.2.1:{listening.rpartition(':')[2]}/v1/metrics"


def test_a_pod_beside_the_daemonset_shares_its_directory_and_user(render):
    """The exporter of the node would look elsewhere, or could not read the records."""
    (pod,) = manifests.pod_templates(only(render("overlays/on-node"), "Pod"))
    (node,) = manifests.pod_templates(only(render("overlays/daemonset"), "DaemonSet"))
    assert pod["spec"]["securityContext"]["runAsUser"] == node["spec"]["securityContext"]["runAsUser"]
    paths = [spec["volumes"][0]["hostPath"]["path"] for spec in (pod["spec"], node["spec"])]
    (exporter,) = node["spec"]["containers"]
    assert paths == [str(parse(exporter["args"]).directory)] * 2
    (training,) = pod["spec"]["containers"]
    assert {"name": "TORCHMEM_DIR", "value": paths[0]} in training["env"]


def test_every_dashboard_is_mounted(render):
    """A new dashboard would be missing in clusters: name it in grafana/kustomization.yaml."""
    maps = [item for item in render("monitoring") if item["kind"] == "ConfigMap"]
    there = {name: text for item in maps for name, text in item["data"].items()}
    dashboards = (deploys.ROOT / "grafana" / "dashboards").glob("*.json")
    assert there == {file.name: file.read_text() for file in dashboards}
    assert all(item["metadata"]["labels"] == {"grafana_dashboard": "1"} for item in maps)
