"""Resource attributes: who a point comes from, and what the user may say about it."""

from __future__ import annotations

import os
import socket

import pytest

from records import make_record
from torchmem_exporter import __version__
from torchmem_exporter.otlp.resource import Resources
from torchmem_exporter.points import Block

POD = {
    "K8S_POD_NAME": "train-0",
    "K8S_POD_UID": "0000-11",
    "K8S_NAMESPACE_NAME": "ml",
    "K8S_NODE_NAME": "gpu-7",
    "K8S_CONTAINER_NAME": "sidecar",
    "K8S_CLUSTER_NAME": "",
}
SIDECAR = Block((), None, ())
JOB = Block(("job",), None, ())


def rank_block(host=None):
    return Block(("job", "3"), make_record(3, host=host or socket.gethostname()).identity, ())


def test_a_rank():
    """A rank would not be found by its job, or be another instance after a restart."""
    block = rank_block()
    found = Resources.from_environ({}).attributes(block)
    assert found == {
        "service.name": "job",
        "service.instance.id": "rank-3",
        "host.name": socket.gethostname(),
        "host.arch": found["host.arch"],
        "os.type": "linux",
        "process.pid": block.identity.pid,
    }
    assert found["host.arch"] in ("amd64", "arm64") or os.uname().machine not in ("x86_64", "aarch64")


def test_the_sidecar_itself():
    """The sidecar's own metrics would count as a job's."""
    found = Resources.from_environ({}).attributes(SIDECAR)
    assert found["service.name"] == "torchmem-exporter"
    assert (found["service.version"], found["process.pid"]) == (__version__, os.getpid())
    named = Resources.from_environ({"OTEL_SERVICE_NAME": "memory", "OTEL_RESOURCE_ATTRIBUTES": "service.name=x"})
    assert named.attributes(SIDECAR)["service.name"] == "memory"


def test_a_job_is_told_by_each_host():
    """Two hosts would write to one series of the job."""
    found = Resources(host="node-1").attributes(JOB)
    assert (found["service.name"], found["service.instance.id"]) == ("job", "node-1")
    assert "process.pid" not in found


def test_kubernetes_attributes_of_a_sidecar_container():
    """Dashboards could not go from a rank to its pod, or would take the sidecar's container for it."""
    resources = Resources.from_environ(POD)
    pod = {"k8s.pod.name": "train-0", "k8s.pod.uid": "0000-11", "k8s.namespace.name": "ml", "k8s.node.name": "gpu-7"}
    assert {k: v for k, v in resources.attributes(rank_block()).items() if k.startswith("k8s.")} == pod
    own = {k: v for k, v in resources.attributes(SIDECAR).items() if k.startswith("k8s.")}
    assert own == pod | {"k8s.container.name": "sidecar"}


def test_a_rank_in_another_pod_of_the_node():
    """A sidecar that serves the whole node would give its own pod's name to every rank."""
    found = Resources.from_environ(POD).attributes(rank_block(host="other-pod"))
    assert {k: v for k, v in found.items() if k.startswith("k8s.")} == {"k8s.node.name": "gpu-7"}
    assert found["host.name"] == "other-pod"


def test_the_user_says_more():
    """What a site says of its hosts would not be on the points, or would make all ranks one service."""
    text = (
        "deployment.environment.name=prod%2Ceu, host.name=rack-1,service.name=mine,service.instance.id=me,process.pid=1"
    )
    resources = Resources.from_environ({"OTEL_RESOURCE_ATTRIBUTES": text})
    found = resources.attributes(rank_block())
    assert (found["deployment.environment.name"], found["host.name"]) == ("prod,eu", "rack-1")
    assert (found["service.name"], found["service.instance.id"]) == ("job", "rank-3")
    assert found["process.pid"] != "1"
    assert resources.attributes(SIDECAR)["service.instance.id"] == "me"


@pytest.mark.parametrize("host", ["a\nb", "x" * 5000, "\udcff"])
def test_a_host_name_of_any_kind(host):
    """A record with a strange host name would end pushing for all ranks."""
    name = Resources(host="h").attributes(rank_block(host=host))["host.name"]
    assert len(name.encode()) <= 200
    assert name.isprintable()
