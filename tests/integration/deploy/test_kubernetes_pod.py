"""What the pods of ``deploy/kubernetes`` rest on, with the kernel's own means: two containers, each with processes and
mounts of its own, that share one volume; the sidecar with the arguments that kustomize renders, as process 1, without
capabilities and with nothing to write to but the volume."""

from __future__ import annotations

import contextlib
import subprocess
import sys

import pytest

import backends
import deploys
import manifests
import sidecars

BASE = deploys.DEPLOY / "kubernetes" / "base"
CONTAINER = ["unshare", "--map-root-user", "--mount", "--pid", "--fork"]
MOUNTS = """
mount -t proc proc /proc && mount -t tmpfs tmpfs /run && mkdir /run/torchmem &&
mount --bind "$0" /run/torchmem && mount -o remount,bind,ro / &&
exec setpriv --bounding-set=-all --inh-caps=-all --no-new-privs "$@"
"""
TRAINING = """
import os, pathlib, sys, time
sys.path.insert(0, sys.argv[1])
from records import living, make_record
assert os.getpid() == 1
with living(pathlib.Path(os.environ["TORCHMEM_DIR"]), make_record(written_at=time.time(), pid=1)):
    print("training", flush=True)
    time.sleep(600)
"""


@contextlib.contextmanager
def container(volume, *command, ending, **options):
    """A process that is number 1 of its container; it gets a signal when its parent, which is yielded, ends."""
    line = [*CONTAINER, f"--kill-child={ending}", "sh", "-c", MOUNTS, volume, *command]
    process = subprocess.Popen(line, stdin=subprocess.DEVNULL, **options)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def pod(kubectl):
    """The specification of the pod."""
    done = subprocess.run([kubectl, "kustomize", BASE], capture_output=True, text=True, check=True)
    (pod,) = [item for item in manifests.objects(done.stdout) if item["kind"] == "Pod"]
    return pod["spec"]


@pytest.fixture
def namespaces(tmp_path):
    """Leave to make containers."""
    trial = [*CONTAINER, "sh", "-c", MOUNTS, tmp_path, "true"]
    if subprocess.run(trial, capture_output=True, check=False).returncode:
        pytest.skip("this machine forbids containers made by hand (user namespaces)")


def test_a_death_is_seen_from_the_other_container(pod, namespaces, tmp_path, monkeypatch):
    """A pod whose training was killed would look as if it trained on, or a living one as if it were dead."""
    (sidecar,) = pod["initContainers"]
    address = backends.free_address()
    arguments = [f"--listen={address}" if "--listen" in argument else argument for argument in sidecar["args"]]
    (directory,) = [one["value"] for one in pod["containers"][0]["env"] if one["name"] == "TORCHMEM_DIR"]
    monkeypatch.setenv("TORCHMEM_DIR", directory)
    training = [sys.executable, "-c", TRAINING, deploys.ROOT / "tests"]

    def states():
        try:
            return sidecars.states(backends.get(f"http://{address}/metrics").decode())
        except OSError:
            return None

    with (
        container(tmp_path, *training, ending="KILL", stdout=subprocess.PIPE) as job,
        container(tmp_path, *sidecars.command(*arguments), ending="TERM", stderr=subprocess.DEVNULL),
    ):
        assert job.stdout.readline() == b"training\n"
        backends.wait_until(lambda: states() == {"0": "running"}, "the sight of a running rank")
        job.kill()
        backends.wait_until(lambda: states() == {"0": "crashed"}, "the sight of its death")
        job.stdout.close()
