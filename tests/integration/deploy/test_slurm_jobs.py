"""Sidecars beside jobs of a real Slurm, found by a real Prometheus through what they leave in a shared directory."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest

import deploys
import slurms
from backends import find_tool, get, wait_until
from backends import prometheus as run_prometheus

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]
SCRIPTS = ROOT / "deploy" / "slurm"
HOOKS = {"Prolog": "prolog.sh", "TaskProlog": "task-prolog.sh", "Epilog": "epilog.sh"}
LOOPBACK_FLAGS = "--listen 127.0.0.1:0"
SEEN_SECONDS = 120.0


@pytest.fixture(scope="module", autouse=True)
def _tools():
    for name in slurms.NEEDED:
        find_tool(name)


@pytest.fixture
def folder(tmp_path):
    """Where one Slurm and what its jobs share lie."""
    (tmp_path / "sd").mkdir()
    return tmp_path


@pytest.fixture
def scripts(folder):
    """A copy of the scripts for Slurm's own hooks, with this machine's settings."""
    copy = folder / "scripts"
    shutil.copytree(SCRIPTS, copy)
    settings = {
        "sd_dir": folder / "sd",
        "python": sys.executable,
        "exporter": Path(sys.executable).with_name("torchmem-exporter"),
        "flags": f"({LOOPBACK_FLAGS})",
        "run_dir": folder / "run",
    }
    with (copy / "torchmem.conf").open("a") as file:
        file.writelines(f"{name}={value}\n" for name, value in settings.items())
        file.write(f'records_dir() {{ echo "{folder}/records-$1-$2"; }}\n')
    return copy


@pytest.fixture
def epilogged(folder, scripts):
    """A Slurm with the epilog only, for jobs that start their sidecars themselves."""
    with slurms.cluster(folder, Epilog=scripts / "epilog.sh") as found:
        yield found
    wait_until(lambda: not found.processes(), "the end of what was killed")


@pytest.fixture
def prologged(folder, scripts):
    """A Slurm that starts the sidecars."""
    hooks = {name: scripts / script for name, script in HOOKS.items()}
    with slurms.cluster(folder, PrologFlags="Alloc", **hooks) as found:
        yield found
    wait_until(lambda: not found.processes(), "the end of what was killed")


@pytest.fixture
def server(prometheus, folder):
    """A Prometheus that looks for targets as ours is told to, on files of this test."""
    scrape = {"job_name": "slurm", "file_sd_configs": [{"files": [f"{folder}/sd/*.json"], "refresh_interval": "1s"}]}
    config = {"global": {"scrape_interval": "1s", "scrape_timeout": "1s"}, "scrape_configs": [scrape]}
    (folder / "prometheus").mkdir()
    with run_prometheus(prometheus, folder / "prometheus", config) as found:
        yield found


def submit(cluster, *arguments, **variables):
    """The example of a job, with the sidecar on the loopback interface."""
    shared = {"TORCHMEM_SD_DIR": cluster.folder / "sd", "TORCHMEM_SLURM": SCRIPTS}
    settings = {**shared, "TORCHMEM_EXPORTER_FLAGS": LOOPBACK_FLAGS, **variables}
    output = f"--output={cluster.folder}/job.log"
    values = {name: str(value) for name, value in settings.items()}
    return cluster.submit(output, SCRIPTS / "train.sbatch", *arguments, **values)


def listed(cluster):
    """The targets that Prometheus is told of."""
    return slurms.targets(cluster.folder / "sd")


def submit_idle(cluster):
    """The same with a torchrun that only waits: for what happens to a job, not what it computes."""
    folder = cluster.folder / "bin"
    folder.mkdir()
    (folder / "torchrun").write_text("#!/bin/sh\nexec sleep 600\n")
    (folder / "torchrun").chmod(0o755)
    return submit(cluster, "train.py", PATH=f"{folder}:{cluster.environment['PATH']}")


def log(cluster):
    """What the job said."""
    return (cluster.folder / "job.log").read_text(errors="replace")


def watched(server, job):
    """Rank -> number of modules with a step peak, of a job's ranks that have been up; None until these are two."""
    mine = f'job="torchmem", cluster="test", slurm_job_id="{job}", train_job="train-{job}"'
    peaks = f"count by (rank) (max_over_time(torchmem_module_memory_step_peak_bytes{{{mine}}}[10m]) > 0)"
    found = server.query(f"{peaks} and on (rank) max_over_time(torchmem_rank_up{{{mine}}}[10m]) == 1")
    return {dict(labels)["rank"]: count for (_, labels), count in found.items()} if len(found) == 2 else None


def leftovers(cluster):
    """What runs under this Slurm and is not of it; the daemon of a step may outlive its job by a moment."""
    daemons = ("munged", "slurmctld-wlm", "slurmd-wlm", "slurmstepd")
    return [line for line in cluster.processes().values() if not any(name in line for name in daemons)]


def test_torchrun_job_is_scraped_and_gone_from_discovery_when_it_ends(epilogged, server):
    """Nobody would see what a job of Slurm holds, or each job would leave a target that is down for good."""
    job = submit(epilogged, ROOT / "demo" / "train.py", "--steps", "40")
    try:
        found = wait_until(lambda: watched(server, job), "two ranks", SEEN_SECONDS)
    except TimeoutError:
        pytest.fail(log(epilogged))
    assert sorted(found) == ["0", "1"]
    assert min(found.values()) > 5
    assert epilogged.wait_for_end(job) == "COMPLETED", log(epilogged)
    assert "step 40/40" in log(epilogged)
    assert listed(epilogged) == []
    wait_until(lambda: server.value("count(up)") is None, "the target's end")
    assert not Path(f"/dev/shm/torchmem-{os.geteuid()}-{job}").exists()
    assert leftovers(epilogged) == []
    deploys.passed("Slurm", "slurm/train.sbatch", "slurm/sidecar.py")


def test_cancelled_job_is_gone_from_discovery(epilogged):
    """Each scancel would leave a target that is down for good."""
    job = submit_idle(epilogged)
    ((target, labels),) = wait_until(lambda: listed(epilogged), "a target")
    assert target.startswith("127.0.0.1:")
    assert labels == {"job": "torchmem", "cluster": "test", "slurm_job_id": job, "__scheme__": "http"}
    assert get(f"http://{target}/healthz") == b"ok\n"
    epilogged.run("scancel", job)
    wait_until(lambda: not listed(epilogged), "the target's end")
    assert epilogged.wait_for_end(job) == "CANCELLED"
    assert leftovers(epilogged) == []


def test_killed_sidecar_is_unlisted_by_the_epilog(epilogged):
    """A sidecar that had no time to tidy up would stay a target that is down for good, or end its job."""
    job = submit_idle(epilogged)
    ((target, _),) = wait_until(lambda: listed(epilogged), "a target")
    for process in epilogged.processes("sidecar.py"):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    wait_until(lambda: not epilogged.processes("torchmem-exporter"), "the exporter's end")
    assert [listed_as for listed_as, _ in listed(epilogged)] == [target]
    assert epilogged.state(job) == "RUNNING"
    epilogged.run("scancel", job)
    wait_until(lambda: not listed(epilogged), "the epilog")
    assert epilogged.wait_for_end(job) == "CANCELLED"


RANK = """\
import os, sys, time
from pathlib import Path
from records import living, make_record
job = os.environ["TORCHMEM_TRAIN_JOB"]
with living(Path(os.environ["TORCHMEM_DIR"]), make_record(train_job=job, written_at=time.time())):
    time.sleep(600)
"""
"""A rank as far as the sidecar can tell, from what Slurm's hooks told it."""


def test_prolog_starts_a_sidecar_that_the_job_knows_nothing_of(prologged, server, folder):
    """Jobs of users who never heard of torchmem's sidecar would not be seen, or their sidecars would never end."""
    script = folder / "job.py"
    script.write_text(f"#!{sys.executable}\nimport sys\nsys.path.insert(0, {str(ROOT / 'tests')!r})\n{RANK}")
    job = prologged.submit(f"--output={folder}/job.log", "--job-name=mine", script)
    series = f'torchmem_rank_up{{cluster="test", slurm_job_id="{job}", train_job="mine-{job}"}}'
    try:
        wait_until(lambda: server.value(series) == 1, "the rank", SEEN_SECONDS)
    except TimeoutError:
        pytest.fail(log(prologged))
    records_folder = folder / f"records-{os.geteuid()}-{job}"
    assert records_folder.is_dir()
    prologged.run("scancel", job)
    wait_until(lambda: not listed(prologged), "the target's end")
    assert prologged.wait_for_end(job) == "CANCELLED"
    assert not records_folder.exists()
    assert list((folder / "run").iterdir()) == []
    assert leftovers(prologged) == []
    deploys.passed(
        "Slurm", *(f"slurm/{name}" for name in ("prolog.sh", "task-prolog.sh", "epilog.sh", "torchmem.conf"))
    )


def test_sidecar_that_cannot_start_costs_no_job(prologged, folder, scripts):
    """A broken installation of the exporter would drain every node of the cluster."""
    with (scripts / "torchmem.conf").open("a") as file:
        file.write("python=/nowhere/python\nrun_dir=/proc/nowhere\n")
    script = folder / "job.sh"
    script.write_text("#!/bin/sh\necho done\n")
    job = prologged.submit(f"--output={folder}/job.log", script)
    assert prologged.wait_for_end(job) == "COMPLETED"
    assert log(prologged) == "done\n"
    wait_until(lambda: prologged.node_state() == "idle", "the node")
