"""``deploy/systemd``: what systemd says of the unit, and the sidecar under the unit's restrictions.

There is no systemd to run it here: what the kernel enforces for a unit (system calls, address families, executable
memory, a read-only file system, no capabilities, no new privileges) is put on by hand, from the unit's own lines.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import deploys
import sandbox
from backends import find_tool, free_address, get, running, wait_until
from backends import rotel as run_rotel
from backends import victoria_metrics as run_victoria_metrics
from records import living, make_record
from sidecars import states

UNIT = deploys.DEPLOY / "systemd" / "torchmem-exporter@.service"
ENVIRONMENT = deploys.DEPLOY / "systemd" / "exporter.env"
EXPORTER = Path(sys.executable).with_name("torchmem-exporter")
MAX_EXPOSURE = 2.0
"""Of 10: "OK" by systemd's own words; a unit without any restriction has 9.6."""


@pytest.fixture(scope="module")
def analyze():
    """Path of systemd-analyze."""
    return find_tool("systemd-analyze", "the package systemd brings it")


@pytest.fixture
def unit(tmp_path):
    """An instance of the unit that starts this environment's exporter."""
    text = UNIT.read_text()
    assert "ExecStart=/opt/torchmem/bin/torchmem-exporter " in text
    text = text.replace("/opt/torchmem/bin/torchmem-exporter", str(EXPORTER))
    (tmp_path / UNIT.name).write_text(text)
    return tmp_path / "torchmem-exporter@alice.service"


def said(*line):
    """What a program prints; it must succeed."""
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_verify_finds_nothing(analyze, unit):
    """systemd would not start it, or ignore a line."""
    assert said(analyze, "verify", unit) == ""
    deploys.passed("systemd-analyze", "systemd/torchmem-exporter@.service")


def test_exposure_is_low(analyze, unit, capsys):
    """Who gets into the sidecar would get at what trains beside it."""
    words = said(analyze, "security", "--offline=true", f"--threshold={MAX_EXPOSURE * 10:.0f}", unit)
    exposure = float(re.search(r"Overall exposure level for \S+: (\S+)", words)[1])
    with capsys.disabled():
        sys.stdout.write(f"\nexposure of the systemd unit: {exposure} of 10\n")
    assert exposure < MAX_EXPOSURE


def assignments(path):
    """All assignments of a unit or an environment file, in order: (name, value)."""
    lines = [line.partition("=") for line in path.read_text().splitlines() if re.match(r"[A-Za-z_]+=", line)]
    return [(name, value) for name, _, value in lines]


def calls(analyze, group):
    """The system calls of one of systemd's groups."""
    found = set()
    for line in map(str.strip, said(analyze, "syscall-filter", group).splitlines()[1:]):
        if line.startswith("@"):
            found |= calls(analyze, line)
        elif line and not line.startswith("#"):
            found.add(line)
    return found


def restrictions(analyze):
    """What ``sandbox`` is to do, by the unit's lines."""
    lines, allowed = assignments(UNIT), set()
    for value in (value for name, value in lines if name == "SystemCallFilter"):
        named = set().union(*(calls(analyze, group) for group in value.lstrip("~").split()))
        allowed = allowed - named if value.startswith("~") else allowed | named
    settings = dict(lines)
    return {
        "calls": sorted(allowed | {"execve"}),
        "families": settings["RestrictAddressFamilies"].split(),
        "no_written_code": settings["MemoryDenyWriteExecute"] == "yes",
    }


def restricted(settings, command, writable):
    """A command line that runs a command under the unit's restrictions."""
    script = 'mount --bind "$1" "$1" && mount -o remount,bind,ro / && shift && exec "$@"'
    rights = [] if os.geteuid() == 0 else ["--map-root-user"]
    line = ["unshare", *rights, "--mount", "sh", "-c", script, "sh", writable]
    line += ["setpriv", "--no-new-privs", "--bounding-set=-all", "--inh-caps=-all"]
    return [*map(str, line), sys.executable, sandbox.__file__, json.dumps(settings), *map(str, command)]


@pytest.fixture(scope="module")
def settings(analyze):
    """What the sidecar is restricted to."""
    if subprocess.run(["unshare", "--map-root-user", "--mount", "true"], capture_output=True, check=False).returncode:
        pytest.skip("a private view of the file system is forbidden on this machine")
    return restrictions(analyze)


@pytest.mark.parametrize(
    ("attempt", "error"),
    [
        ("open('/etc/x', 'w')", "Read-only file system"),
        ("__import__('socket').socket(__import__('socket').AF_NETLINK, 3)", "Operation not permitted"),
        ("__import__('os').setpriority(0, 0, 5)", "Operation not permitted"),
        ("__import__('mmap').mmap(-1, 4096, prot=7)", "Permission denied"),
    ],
)
def test_the_restrictions_are_real(settings, tmp_path, attempt, error):
    """The test below would show nothing."""
    line = restricted(settings, [sys.executable, "-c", attempt], tmp_path)
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)
    assert error in done.stderr


@contextlib.contextmanager
def manager(path):
    """A service manager's socket that is listened to all the time, since a full one loses what comes; yields what came.

    At the end it waits for the service to say that it ends.
    """
    came = []

    def listen():
        with contextlib.suppress(TimeoutError):
            while not came or came[-1] != b"STOPPING=1":
                came.append(end.recv(64))

    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
        end.bind(str(path))
        end.settimeout(30)
        listening = threading.Thread(target=listen)
        listening.start()
        try:
            yield came
        finally:
            listening.join()


@pytest.mark.slow
def test_runs_and_pushes_under_the_units_restrictions(settings, tmp_path, rotel, victoria_metrics):
    """The unit would not start, die at its first push, or be killed by the watchdog."""
    flags = dict(assignments(ENVIRONMENT))["EXPORTER_FLAGS"]
    address = free_address()
    flags = flags.replace("127.0.0.1:20471", address).split()
    assert address in flags
    records = tmp_path / "records"
    with (
        living(records, make_record(train_job="a", written_at=time.time())),
        run_victoria_metrics(victoria_metrics, tmp_path) as storage,
        run_rotel(rotel, tmp_path, storage.otlp_url) as agent,
        manager(tmp_path / "notify") as told,
    ):
        environment = {
            **os.environ,
            "NOTIFY_SOCKET": str(tmp_path / "notify"),
            "WATCHDOG_USEC": "600000",
            "TORCHMEM_DIR": str(records),
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{agent.grpc_address}",
            "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
            "OTEL_METRIC_EXPORT_INTERVAL": "500",
        }
        line = restricted(settings, [EXPORTER, *flags], tmp_path)
        with running(line, tmp_path / "exporter.log", environment) as process:
            wait_until(lambda: len(told) >= 3, "a sign of life")
            assert states(get(f"http://{address}/metrics").decode()) == {"0": "running"}
            status = Path(f"/proc/{process.pid}/status").read_text()
            assert re.search(r"^Seccomp:\t2$", status, re.MULTILINE)
            assert re.search(r"^NoNewPrivs:\t1$", status, re.MULTILINE)
            wait_until(lambda: storage.value('torchmem_rank_up{train_job="a"}') == 1, "the push")
        assert process.returncode == 0
    assert set(told[:2]) == {b"READY=1", b"WATCHDOG=1"}
    assert told[2:] == [b"WATCHDOG=1"] * (len(told) - 3) + [b"STOPPING=1"]
    assert (records / ".exporter-state").exists()
    deploys.passed("its restrictions put on", *deploys.files("its restrictions put on"))
