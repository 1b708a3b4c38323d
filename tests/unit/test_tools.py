"""``scripts/tools.sh``: what it says and leaves behind, with a stand-in for apt that records what it is asked."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "tools.sh"
PROGRAMS = (
    "prometheus",
    "promtool",
    "victoria-metrics",
    "prometheus-alertmanager",
    "amtool",
    "docker-compose",
    "chromium-headless-shell",
    *(
        "slurmd-wlm",
        "slurmctld-wlm",
        "slurmstepd-wlm",
        "munged",
        "srun",
        "sbatch",
        "scancel",
        "scontrol",
        "squeue",
        "sinfo",
    ),
    *("buildah", "debootstrap"),
)
STARTED_SECONDS = 60.0


@pytest.fixture
def checkout(tmp_path):
    """A checkout that holds the script alone, and a folder that is first on PATH."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "path").mkdir()
    shutil.copy(SCRIPT, tmp_path / "scripts")
    return tmp_path


def program(path, text):
    """An executable shell script."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def start(checkout):
    """The script, started with the stand-ins first on PATH."""
    environment = {**os.environ, "PATH": f"{checkout / 'path'}:{os.environ['PATH']}", "SEEN": str(checkout / "seen")}
    line = ["bash", str(checkout / "scripts" / "tools.sh")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
    return subprocess.Popen(line, env=environment, text=True, start_new_session=True, **pipes)


def left_behind(checkout):
    """What a later run could stumble over."""
    files = {path.relative_to(checkout / ".tools").as_posix() for path in (checkout / ".tools").rglob("*")}
    return files - {"lock", "packages", "usr", "usr/bin"}


def test_nothing_is_done_twice(checkout):
    """Each `make tools` would download a hundred megabytes."""
    for name in PROGRAMS:
        program(checkout / ".tools" / "usr" / "bin" / name, "exit 0")
    program(checkout / "path" / "apt-get", "exit 1")
    said, errors = start(checkout).communicate(timeout=STARTED_SECONDS)
    assert (said, errors) == (f"tools: {' '.join(PROGRAMS)}: in .tools/usr/bin\n", "")


def test_failed_download_is_one_line_and_leaves_nothing(checkout):
    """A run without a network would leave what a later one takes for a server."""
    program(checkout / "path" / "apt-get", "echo 'E: no route to anywhere'; exit 100")
    process = start(checkout)
    _, errors = process.communicate(timeout=STARTED_SECONDS)
    assert process.returncode == 1
    assert errors == "tools: the package prometheus could not be downloaded (offline?): E: no route to anywhere\n"
    assert left_behind(checkout) == set()


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_interrupted_run_leaves_nothing(checkout, ending):
    """A Ctrl-C during the download would leave half a server, or a folder for each try."""
    program(checkout / "path" / "apt-get", 'touch "$SEEN"; sleep 60')
    process = start(checkout)
    deadline = time.monotonic() + STARTED_SECONDS
    while not (checkout / "seen").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.killpg(process.pid, ending)
    process.communicate(timeout=STARTED_SECONDS)
    assert process.returncode != 0
    if ending == signal.SIGKILL:  # cannot tidy up: the next run does
        program(checkout / "path" / "apt-get", "exit 100")
        start(checkout).communicate(timeout=STARTED_SECONDS)
    assert left_behind(checkout) == set()


def test_next_release_comes_from_where_this_one_does(checkout):
    """A package of the next release would be fetched from a place that the machine's owner never named, or unsigned."""
    release = Path("/etc/os-release")
    own = re.search(r"^VERSION_CODENAME=(\w+)", release.read_text(), re.MULTILINE) if release.exists() else None
    if not own or own[1] == "trixie" or not shutil.which("apt-get"):
        pytest.skip("needs a Debian older than the next one")
    for name in PROGRAMS[:2]:
        program(checkout / ".tools" / "usr" / "bin" / name, "exit 0")
    keep = (
        'for option; do case $option in Dir::Etc::SourceParts=*) cp -rT "${option#*=}" "$SEEN";; esac; done; exit 100'
    )
    program(checkout / "path" / "apt-get", f"for option; do {keep}; done; exit 100")
    start(checkout).communicate(timeout=STARTED_SECONDS)
    derived = "\n".join(path.read_text() for path in (checkout / "seen").iterdir())
    apt = Path("/etc/apt")
    files = [
        apt / "sources.list",
        *(apt / "sources.list.d").glob("*.list"),
        *(apt / "sources.list.d").glob("*.sources"),
    ]
    words = {word for path in files if path.exists() for word in path.read_text().split()}
    assert "trixie" in derived
    assert own[1] not in derived
    assert {word for word in derived.split() if "trixie" not in word} <= words
