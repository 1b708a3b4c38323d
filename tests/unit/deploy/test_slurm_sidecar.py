"""``deploy/slurm/sidecar.py`` without a Slurm: a real exporter, listed while it lives and not after."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import bcrypt
import pytest
import trustme
import yaml

import deploys
from backends import get, wait_until
from slurms import targets
from torchmem.errors import ConfigError
from torchmem_exporter.serving.security import Guard, Sources

SLURM = deploys.DEPLOY / "slurm"
JOB = {"SLURM_CLUSTER_NAME": "alps", "SLURM_JOB_ID": "77", "SLURMD_NODENAME": "n3"}
EXPORTER = f"--exporter={Path(sys.executable).with_name('torchmem-exporter')}"


@contextlib.contextmanager
def sidecar(folder, *flags, options=(EXPORTER,), **environment):
    """A running sidecar.py over an empty directory of records, ended by its pid whatever happens."""
    outer = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    line = [sys.executable, SLURM / "sidecar.py", "--sd-dir", folder, *options]
    line += ["--", "--dir", folder / "records", *flags]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(line, env={**outer, **JOB, **environment}, **pipes) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def ended(process):
    """Exit status and what was said on standard error."""
    _, said = process.communicate(timeout=30)
    return process.returncode, said


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGINT])
def test_lists_the_exporter_while_it_lives(tmp_path, ending):
    """Prometheus would not find the exporter, or go on looking for it."""
    with sidecar(tmp_path, "--listen", "127.0.0.1:0") as process:
        ((target, labels),) = wait_until(lambda: targets(tmp_path), "the target")
        assert get(f"http://{target}/healthz") == b"ok\n"
        assert labels == {"job": "torchmem", "cluster": "alps", "slurm_job_id": "77", "__scheme__": "http"}
        assert (tmp_path / "alps-77-n3.json").stat().st_mode & 0o777 == 0o644
        process.send_signal(ending)
        assert ended(process)[0] == 0
    assert [path.name for path in tmp_path.iterdir()] == []
    with pytest.raises(OSError, match="refused"):
        get(f"http://{target}/healthz")


def test_who_listens_everywhere_is_reached_by_the_nodes_name(tmp_path):
    """Prometheus would ask 0.0.0.0, which is itself."""
    with sidecar(tmp_path, "--listen", "0.0.0.0:0", "--allow-open-bind"):
        ((target, _),) = wait_until(lambda: targets(tmp_path), "the target")
    assert target.startswith("n3:")


def test_exporter_that_ends_by_itself_is_unlisted(tmp_path):
    """A crashed exporter would stay a target for the rest of the job."""
    script = tmp_path / "exporter"
    script.write_text(
        "#!/bin/sh\necho 'msg=\"serving http://127.0.0.1:9/metrics from x\"' >&2\n"
        f"while [ ! -e {tmp_path}/enough ]; do sleep 0.05; done\nexit 3\n"
    )
    script.chmod(0o755)
    with sidecar(tmp_path, options=(f"--exporter={script}",)) as process:
        wait_until(lambda: targets(tmp_path), "the target")
        (tmp_path / "enough").touch()
        assert ended(process)[0] == 3
    assert targets(tmp_path) == []


def test_exporter_does_not_outlive_a_killed_sidecar(tmp_path):
    """A job's user would find an exporter that nobody ends."""
    with sidecar(tmp_path, "--listen", "127.0.0.1:0") as process:
        ((target, _),) = wait_until(lambda: targets(tmp_path), "the target")
        process.kill()

    def is_gone():
        try:
            return not get(f"http://{target}/healthz")
        except OSError:
            return True

    wait_until(is_gone, "the exporter's end")


@pytest.mark.parametrize(
    ("options", "environment", "status", "said"),
    [
        ((), {"SLURM_JOB_ID": ""}, 1, "SLURM_JOB_ID is '': run this in a job of Slurm"),
        ((), {"SLURM_JOB_ID": "../../etc/1"}, 1, "SLURM_JOB_ID is '../../etc/1': run this in a job of Slurm"),
        (("--exporter=/nowhere/exporter",), {}, 127, "/nowhere/exporter: No such file or directory"),
        ((EXPORTER, "--sd-dir=/nowhere"), {}, 0, "/nowhere/alps-77-n3.json: No such file or directory"),
    ],
)
def test_what_cannot_work_is_said_in_a_line(tmp_path, options, environment, status, said):
    """Who set it up would have to read a traceback, or nothing at all, in a node's log."""
    with sidecar(tmp_path, "--listen=127.0.0.1:0", options=options or (EXPORTER,), **environment) as process:
        code, errors = ended(process)
    assert code == status
    assert f"sidecar.py: {said}\n" in errors
    assert "Traceback" not in errors


def test_shellcheck_finds_nothing():
    """A script that runs as root on every node would have a mistake that a tool knows."""
    files = deploys.files("shellcheck")
    line = [Path(sys.executable).with_name("shellcheck"), "--external-sources", f"--source-path={deploys.ROOT}", *files]
    done = subprocess.run(line, cwd=deploys.DEPLOY, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout
    deploys.passed("shellcheck", *files)


def test_promtool_takes_the_configuration(promtool, tmp_path):
    """Who copies the example would be told by Prometheus that it is wrong."""
    path = SLURM / "prometheus.yml"
    line = [promtool, "check", "config", "--syntax-only", str(path)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    deploys.passed("promtool", "slurm/prometheus.yml")


def test_the_web_configuration_lets_in_who_has_the_password(tmp_path):
    """The sidecar would not start with the example once it is filled in, or would with the example as it is."""
    path = tmp_path / "web.yml"
    text = (SLURM / "web.yml.example").read_text()
    certificate = trustme.CA().issue_cert("n3")
    certificate.private_key_pem.write_to_path(tmp_path / "web.key")
    certificate.cert_chain_pems[0].write_to_path(tmp_path / "web.crt")
    path.write_text(text)
    with pytest.raises(ConfigError):
        Guard(Sources(path, None, "0.0.0.0"))
    path.write_text(text.replace("BCRYPT_HASH", bcrypt.hashpw(b"secret", bcrypt.gensalt(4)).decode()))
    guard = Guard(Sources(path, None, "0.0.0.0"))
    assert guard.is_tls
    (scrape,) = yaml.safe_load((SLURM / "prometheus.yml").read_text())["scrape_configs"]
    user = scrape["basic_auth"]["username"]
    for password, is_let_in in (("secret", True), ("guessed", False)):
        given = base64.b64encode(f"{user}:{password}".encode()).decode()
        assert asyncio.run(guard.allows(f"Basic {given}")) is is_let_in
    deploys.passed("torchmem-exporter", "slurm/web.yml.example")
