"""Holds Kubernetes objects against the schemas of those who define them; each problem is an exception that names it.

Kubernetes' own kinds are checked by kubernetes-validate, strictly, and so are the pods inside Kubeflow's and JobSet's
objects; the Prometheus operator's kinds by @kubernetes-models/prometheus-operator; PyTorchJob and JobSet by the models
of their projects' Python packages, which have to give back what they were given.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import warnings
from pathlib import Path
from types import SimpleNamespace

import yaml

ROOT = Path(__file__).resolve().parent.parent
CRDS = ROOT / "tests" / "crds"
RELEASES = ("1.29", "1.37")
"""The first of Kubernetes that has native sidecars by default, and the newest that can be checked."""

OPERATOR = "monitoring.coreos.com/v1"
_accepted = set()
"""Objects that need no second look: many kustomizations and values share some."""
CUSTOM = {"JobSet": "jobset.x-k8s.io/v1alpha2", "PyTorchJob": "kubeflow.org/v1"}


def objects(text):
    """The objects of a stream of YAML."""
    return [document for document in yaml.load_all(text, Loader=yaml.CSafeLoader) if document]


def _key(item):
    return json.dumps(item, sort_keys=True)


def _new(items):
    return [item for item in items if _key(item) not in _accepted]


def is_core(item):
    """Whether Kubernetes itself defines the kind."""
    return item["apiVersion"] != OPERATOR and item["kind"] not in CUSTOM


def check_core(items):
    """Raises what kubernetes-validate says of the kinds that Kubernetes defines, and of all pods in others."""
    import kubernetes_validate

    templates = [
        {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "inner"}, "template": template}
        for item in items
        if not is_core(item)
        for template in pod_templates(item)
    ]
    for item in _new([item for item in items if is_core(item)] + templates):
        for release in RELEASES:
            kubernetes_validate.validate(item, release, strict=True)
        _accepted.add(_key(item))


def check_operator(items):
    """Raises what the Prometheus operator's schemas say, unknown properties included."""
    mine = _new([item for item in items if item["apiVersion"] == OPERATOR])
    if not mine:
        return
    command = [shutil.which("node"), CRDS / "validate.mjs"]
    done = subprocess.run(command, input=json.dumps(mine), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    problems = {item["kind"]: found for item, found in zip(mine, json.loads(done.stdout), strict=True) if found}
    assert problems == {}
    _accepted.update(map(_key, mine))


def has_operator_schemas():
    """Whether `make tools` has installed them, and a Node that can run them is there."""
    return bool(shutil.which("node")) and (CRDS / "node_modules" / ".installed").is_file()


def check_jobset(item):
    """Raises what JobSet's models say, and where they drop something."""
    from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet

    assert JobsetV1alpha2JobSet.from_dict(item).to_dict() == item


def check_pytorchjob(item):
    """Raises what the training operator's models say, and where they drop something."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the Kubernetes client's dependencies
        from kubeflow.training import ApiClient

        client = ApiClient()
    model = client.deserialize(SimpleNamespace(data=json.dumps(item)), "KubeflowOrgV1PyTorchJob")
    assert client.sanitize_for_serialization(model) == item


def pod_templates(item):
    """The templates of pods in an object; a Pod is its own."""
    if item["kind"] == "Pod":
        return [item]
    if item["kind"] == "JobSet":
        return [job["template"]["spec"]["template"] for job in item["spec"]["replicatedJobs"]]
    if item["kind"] == "PyTorchJob":
        return [replica["template"] for replica in item["spec"]["pytorchReplicaSpecs"].values()]
    template = item.get("spec", {}).get("template")
    return [template] if isinstance(template, dict) else []


def containers(item):
    """All containers of an object's pods with the pod they are in, initial ones first."""
    return [
        (template["spec"], container)
        for template in pod_templates(item)
        for container in template["spec"].get("initContainers", []) + template["spec"]["containers"]
    ]
