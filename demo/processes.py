"""The demo's child processes: started, watched, and all ended whatever happens.

Invariants: a signal never interrupts a line of Python here, it is only remembered and acted on at the next ``tick``, so
that no child is started and then forgotten; each child leads a session of its own, so a Ctrl-C of the terminal reaches
the demo alone and everything a child has started (a compiler, say) ends with it; no child outlives the demo even if
that is killed with SIGKILL (Linux); after ``stop`` none is left.

Known limits: a port is found free a while before its server binds it, so a program that wants this very one can take it
in between; the demo then ends with that server's own message.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import FrameType

TICK_SECONDS = 0.1
GRACE_SECONDS = 5.0
NUM_LAST_LINES = 15
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
LOOPBACK = "127.0.0.1"
LEAST_PORT = 20_000
NUM_TRIES = 100
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


class InterruptedDemoError(Exception):
    """The user has had enough.

    Attributes:
        signum: the signal that said so.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


class DemoError(Exception):
    """The demo cannot go on; the message says why."""


class Child:
    """One running program.

    Attributes:
        name: what to call it.
        log: the file that has everything it prints.
        is_server: whether it has to run until it is stopped; others may end with status 0.
    """

    def __init__(
        self, name: str, command: Sequence[str], log: Path, environment: Mapping[str, str], *, is_server: bool
    ) -> None:
        self.name = name
        self.log = log
        self.is_server = is_server
        with log.open("wb") as output:
            self.process = subprocess.Popen(  # noqa: S603 (the demo's own commands)
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
                preexec_fn=functools.partial(_die_with_parent, os.getpid()),  # noqa: PLW1509 (no thread runs yet)
            )

    @property
    def is_finished(self) -> bool:
        """Whether it has ended."""
        return self.process.poll() is not None

    @property
    def is_dead(self) -> bool:
        """Whether it has ended and should not have."""
        return self.is_finished and (self.is_server or self.process.returncode != 0)

    def signal(self, signum: int) -> None:
        """Sends to it and to everything it has started; nothing there is no error."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signum)

    def obituary(self) -> str:
        """How it ended and its last lines."""
        code = self.process.returncode
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        lines = self.log.read_text(errors="replace").splitlines()[-NUM_LAST_LINES:]
        return "\n".join([f"{self.name} died ({how}); its last lines:", *("  " + line for line in lines or ["(none)"])])


class Supervisor:
    """All children of the demo, and the signals sent to it."""

    def __init__(self) -> None:
        self._children: list[Child] = []
        self._signum: int | None = None
        for signum in SIGNALS:
            if signal.getsignal(signum) is not signal.SIG_IGN:  # nohup stays in force
                signal.signal(signum, self._remember)

    def _remember(self, signum: int, _frame: FrameType | None) -> None:
        self._signum = self._signum or signum

    def start(
        self, name: str, command: Sequence[str], log: Path, environment: Mapping[str, str], *, is_server: bool = False
    ) -> Child:
        """Starts a program.

        Raises:
            DemoError: it cannot be started.
            InterruptedDemoError: a signal came first.
        """
        self.check()
        try:
            child = Child(name, command, log, environment, is_server=is_server)
        except OSError as error:
            raise DemoError(f"{name} cannot be started: {error}") from error
        self._children.append(child)
        return child

    def check(self) -> None:
        """Raises what has happened since the last look.

        Raises:
            InterruptedDemoError: a signal came.
            DemoError: a child died.
        """
        if self._signum is not None:
            raise InterruptedDemoError(self._signum)
        if any(child.is_dead for child in self._children):
            # A killed rank makes its peers fail on a closed connection within the same tick: it is the news, also where
            # it died after it was looked at and its peers before they were.
            dead = [child for child in self._children if child.is_dead]
            raise DemoError(min(dead, key=lambda child: child.process.returncode).obituary())

    def tick(self) -> None:
        """Lets a moment pass, then checks."""
        time.sleep(TICK_SECONDS)
        self.check()

    def stop(self) -> None:
        """Ends every child and all that these have started, first politely; takes ``GRACE_SECONDS`` at most.

        Further signals have nothing left to ask for, and are ignored from here to the end of the process.
        """
        for signum in SIGNALS:
            signal.signal(signum, signal.SIG_IGN)
        for child in reversed(self._children):
            child.signal(signal.SIGTERM)
        deadline = time.monotonic() + GRACE_SECONDS
        while not all(child.is_finished for child in self._children) and time.monotonic() < deadline:
            time.sleep(TICK_SECONDS)
        for child in self._children:
            child.signal(signal.SIGKILL)
            child.process.wait()


def _die_with_parent(parent: int) -> None:
    """Runs in a child between fork and exec: has the kernel kill it when the demo is gone."""
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def free_ports(count: int) -> list[int]:
    """Distinct loopback ports that nobody listens on.

    A server may bind its own many seconds later, so they are such as the kernel gives to nobody who asks for any one.
    """
    unassigned = _unassigned_ports()
    untried = iter(random.sample(unassigned, min(len(unassigned), NUM_TRIES)))
    found: list[int] = []
    with contextlib.ExitStack() as stack:
        while len(found) < count:
            each, port = stack.enter_context(socket.socket()), next(untried, 0)
            try:
                each.bind((LOOPBACK, port))
            except OSError:
                if port:  # somebody listens there
                    continue
                raise
            found.append(each.getsockname()[1])
    return found


def _unassigned_ports() -> range:
    """Those between the well-known ones and the kernel's own; none where these are not known."""
    try:
        first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except OSError:
        return range(0)
    return range(LEAST_PORT, first)
