"""One run of the demo: the sidecar, Prometheus where it is found, the ranks, and the report at the end.

Invariant: every wait is a loop over ``Supervisor.tick``, so that a signal or a death ends it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import report
from processes import LOOPBACK, Child, DemoError, Supervisor, free_ports
from progress import Bar, Lines, progress
from servers import ROOT, SCRAPE_SECONDS, Prometheus, Sidecar, console_script, find_prometheus

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

STALL_SECONDS = 300.0
SHOW_SECONDS = 30.0
FIRST_SCRAPE_SECONDS = 0.1
"""Between scrapes until one has found rank 0: a training of two steps is over before a second has passed."""
STEP = re.compile(r"step (\d+)/\d+ loss (\S+)")


class Demo:
    """One run, in a folder of its own."""

    def __init__(self, supervisor: Supervisor, folder: Path, num_steps: int, num_ranks: int) -> None:
        self._supervisor = supervisor
        self._folder = folder
        self._records = folder / "records"
        self._num_steps = num_steps
        self._num_ranks = num_ranks
        self._metrics = ""
        """The last scrape that found rank 0's memory, while it ran if any did."""
        self._has_ended = False
        """Whether a scrape has found rank 0 at its end."""

    def run(self) -> None:
        """From nothing to the last table.

        Raises:
            DemoError: something died or did not come up.
            InterruptedDemoError: a signal came.
        """
        self._records.mkdir(mode=0o700)
        sidecar_port, prometheus_port, rendezvous_port = free_ports(3)
        say(f"torchmem demo: {self._num_ranks} ranks, {self._num_steps} steps")
        sidecar = Sidecar(self._supervisor, self._folder, self._records, sidecar_port)
        say(f"  metrics     {sidecar.url}")
        prometheus = self._start_prometheus(sidecar.target, prometheus_port)
        say(f"  table       {near(console_script('torchmem'))} show {near(str(self._records))}")
        ranks = self._start_ranks(rendezvous_port)
        with progress(self._num_steps) as shown:
            self._follow(ranks, sidecar, shown)
        self._report(prometheus)

    def _start_prometheus(self, target: str, port: int) -> Prometheus | None:
        program = find_prometheus()
        if program is None:
            say("  Prometheus  none found: `make tools` unpacks one, or put it on PATH")
            return None
        prometheus = Prometheus(self._supervisor, self._folder, program, target, port)
        say(f"  Prometheus  {prometheus.page()}")
        return prometheus

    def _start_ranks(self, port: int) -> list[Child]:
        environment = {
            **os.environ,
            "MASTER_ADDR": LOOPBACK,
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(self._num_ranks),
            "LOCAL_WORLD_SIZE": str(self._num_ranks),
            "OMP_NUM_THREADS": "1",
            "TORCHMEM_DIR": str(self._records),
            "TORCHMEM_TRAIN_JOB": "demo",
            # torch says so on import where NumPy is not installed; nothing here uses it.
            "PYTHONWARNINGS": "ignore:Failed to initialize NumPy",
        }
        command = [sys.executable, str(ROOT / "demo" / "train.py"), "--steps", str(self._num_steps)]
        return [
            self._supervisor.start(
                f"rank {rank}", command, self._log(rank), {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            )
            for rank in range(self._num_ranks)
        ]

    def _log(self, rank: int) -> Path:
        return self._folder / f"rank-{rank}.log"

    def _follow(self, ranks: list[Child], sidecar: Sidecar, shown: Bar | Lines) -> None:
        """Shows the steps of rank 0 until every rank has ended well."""
        step, stalled_at, next_scrape = 0, time.monotonic() + STALL_SECONDS, 0.0
        log = LogReader(self._log(0))
        is_finished = False
        while not is_finished:
            self._supervisor.tick()
            is_finished = all(rank.is_finished for rank in ranks)
            if time.monotonic() >= next_scrape or is_finished:
                self._scrape(sidecar)
                next_scrape = time.monotonic() + (SCRAPE_SECONDS if self._metrics else FIRST_SCRAPE_SECONDS)
            peak_bytes = report.rank_peak_bytes(self._metrics)
            for remarks, step, loss in log.steps():
                for remark in remarks:
                    shown.note("rank 0: " + remark)
                shown.update(step, loss, peak_bytes)
                stalled_at = time.monotonic() + STALL_SECONDS
            if time.monotonic() > stalled_at:
                raise DemoError(f"no step within {STALL_SECONDS:.0f} s after step {step}")

    def _scrape(self, sidecar: Sidecar) -> None:
        """Keeps what shows rank 0's memory, rather while it runs than at its end.

        Its end is shown twice in all, so that one is left for Prometheus, which reads the same address.
        """
        metrics = None if self._has_ended else sidecar.scrape()
        if metrics is None or not report.has_memory(metrics):
            return
        self._has_ended = not report.is_up(metrics)
        if not (self._metrics and self._has_ended):
            self._metrics = metrics

    def _report(self, prometheus: Prometheus | None) -> None:
        if not self._metrics:
            raise DemoError("the sidecar never showed rank 0's memory")
        say("\nFrom /metrics, rank 0 as it was last seen:\n" + report.excerpt(self._metrics))
        if prometheus is not None:
            say(
                "\nFrom Prometheus, who held most of rank 0, in bytes:\n" + report.holders(self._supervisor, prometheus)
            )
        say("\nFrom `torchmem show`:")
        command = [console_script("torchmem"), "show", str(self._records)]
        # A session of its own: a Ctrl-C is the demo's to handle.
        status = subprocess.run(  # noqa: S603 (our own command)
            command, start_new_session=True, check=False, timeout=SHOW_SECONDS
        ).returncode
        self._supervisor.check()
        if status != 0:
            raise DemoError(f"`torchmem show` failed (exit status {status})")


class LogReader:
    """Reads a growing log of steps, each line once and only when it is whole."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._remarks: list[str] = []

    def steps(self) -> Iterator[tuple[list[str], int, float]]:
        """The new steps: other lines before it, number, loss.

        Other lines wait for a step to follow, because those of a program that dies are shown with its death.
        """
        with self._path.open("rb") as log:
            log.seek(self._offset)
            whole, newline, _ = log.read().rpartition(b"\n")
        self._offset += len(whole) + len(newline)
        for line in whole.decode(errors="replace").splitlines():
            if match := STEP.fullmatch(line):
                remarks, self._remarks = self._remarks, []
                yield remarks, int(match[1]), float(match[2])
            else:
                self._remarks.append(line)


def near(path: str) -> str:
    """The path as short as it can be typed from here."""
    return min(path, os.path.relpath(path), key=len)


def say(text: str) -> None:
    """Prints at once, in order with what children print."""
    print(text, flush=True)
