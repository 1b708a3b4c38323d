"""What systemd is told, with a real socket at the other end."""

from __future__ import annotations

import os
import signal
import socket
import sys

import pytest

from sidecars import DEADLINE_SECONDS, command
from torchmem_exporter.notify import READY, Notifier


@pytest.fixture(params=["path", "abstract"])
def manager(request, tmp_path):
    """A service manager's socket, and the name by which a service knows it."""
    name = str(tmp_path / "notify") if request.param == "path" else f"@torchmem-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
        end.bind("\0" + name[1:] if name.startswith("@") else name)
        end.settimeout(DEADLINE_SECONDS)
        yield name, end


def test_states_arrive(manager):
    """systemd would wait for a service that has long been ready, and end it."""
    name, end = manager
    Notifier({"NOTIFY_SOCKET": name}).tell(READY)
    assert end.recv(100) == b"READY=1"


@pytest.mark.parametrize("name", ["", "/nowhere/at/all", "@nobody-listens", "/" + "x" * 200])
def test_without_a_manager_nothing_happens(name):
    """A sidecar outside of systemd, or under a broken one, would not start."""
    Notifier({"NOTIFY_SOCKET": name}).tell(READY)


@pytest.mark.parametrize(
    ("environment", "seconds"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "3000000"}, 3.0),
        ({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": str(os.getpid())}, 3.0),
        ({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
    ],
)
def test_the_watchdog_is_for_this_process_or_none(environment, seconds):
    """The sidecar would be killed for not reporting, or report in another's name."""
    found = Notifier({"NOTIFY_SOCKET": "@a", **environment}).watchdog_seconds
    assert found == (None if seconds is None else pytest.approx(seconds))


def test_a_life_under_systemd(manager, tmp_path):
    """A unit of Type=notify with a watchdog would be killed while it works, or said to be up before it is."""
    name, end = manager
    arguments = command("--dir", str(tmp_path), "--listen", "127.0.0.1:0")
    environment = {**os.environ, "NOTIFY_SOCKET": name, "WATCHDOG_USEC": "300000"}
    environment.pop("WATCHDOG_PID", None)
    with open(tmp_path / "log", "wb") as log:  # noqa: PTH123  # a context manager of the file itself
        pid = os.posix_spawn(
            sys.executable, arguments, environment, file_actions=[(os.POSIX_SPAWN_DUP2, log.fileno(), 2)]
        )
    try:
        states = [end.recv(100) for _ in range(4)]
        os.kill(pid, signal.SIGTERM)
        while states[-1] != b"STOPPING=1":
            states.append(end.recv(100))
    finally:
        if states[-1:] != [b"STOPPING=1"]:
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert states.count(b"READY=1") == 1
    assert states.index(b"READY=1") <= 1
    assert states.count(b"WATCHDOG=1") >= 3
