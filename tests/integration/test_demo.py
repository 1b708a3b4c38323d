"""The demo as a user runs it: to its end, interrupted at any moment, and with a part of it killed.

Its processes are known by a mark in their environment, which everything they start inherits.
"""

from __future__ import annotations

import contextlib
import os
import pty
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
PROGRAM = [sys.executable, str(ROOT / "demo" / "run.py")]
DEADLINE_SECONDS = 90.0
COMPILE_SECONDS = 300.0
"""For a demo that compiles the engine first: half a minute of a core that it may have to share."""
END_SECONDS = 15.0
MOMENTS = {
    "sidecar started": "torchmem demo:",
    "ranks starting": "  table ",
    "training": "step 1/",
    "reporting": "From /metrics",
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]


class RunningDemo:
    """A demo in a session of its own, with everything that it prints."""

    def __init__(self, output: Path, steps: int, variables: dict[str, str]) -> None:
        self.output = output
        self.mark = f"TORCHMEM_TEST_MARK={uuid.uuid4()}"
        name, value = self.mark.split("=")
        with output.open("wb") as file:
            self.process = subprocess.Popen(
                [*PROGRAM, "--steps", str(steps)],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, **variables, name: value},
                start_new_session=True,
            )

    def text(self) -> str:
        return self.output.read_text()

    def wait_for(self, words: str) -> None:
        poll(lambda: words in self.text() or self.process.poll() is not None, DEADLINE_SECONDS, self.text)
        assert words in self.text()

    def processes(self) -> dict[int, str]:
        """Everything alive that carries the mark, with its command line."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if self.mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                    found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        return found

    def find(self, *words: str, variable: str = "") -> int:
        """The one process with these words in its command line and the variable in its environment."""
        (pid,) = [
            pid
            for pid, command in self.processes().items()
            if all(word in command for word in words)
            and (not variable or variable.encode() in read_quietly(Path(f"/proc/{pid}/environ")).split(b"\0"))
        ]
        return pid

    def folder(self) -> Path | None:
        """Where it keeps what it makes; None as long as it has not said so."""
        said = re.search(r"show (\S+)/records", self.text())
        return None if said is None else Path(said[1])

    def status(self, seconds: float = DEADLINE_SECONDS) -> int:
        """Waits for the end; the exit status."""
        return self.process.wait(timeout=seconds)

    def assert_gone(self) -> None:
        """Nothing of it is alive, its ports can be bound again."""
        poll(lambda: not self.processes(), END_SECONDS, lambda: str(self.processes()))
        for port in re.findall(r"http://127\.0\.0\.1:(\d+)", self.text()):
            # A dying process loses its environment a moment before its sockets.
            poll(lambda port=int(port): can_bind(port), END_SECONDS, lambda port=port: f"port {port} is in use")


def poll(condition, seconds, explain):
    """Waits until the condition holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, explain()
        time.sleep(0.02)


def can_bind(port):
    """Whether a server could listen there now."""
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


@pytest.fixture
def start(tmp_path):
    """Starts demos and leaves none behind, whatever the test did."""
    started = []

    def start_one(steps, **variables):
        demo = RunningDemo(tmp_path / f"output-{len(started)}", steps, variables)
        started.append(demo)
        return demo

    yield start_one
    for demo in started:
        for pid in demo.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        demo.process.wait()
        if (folder := demo.folder()) is not None:  # a demo that failed keeps its logs
            shutil.rmtree(folder, ignore_errors=True)


def test_shows_real_metrics_and_ends(start):
    """A user's first command would not show what torchmem is for, or would leave something running."""
    demo = start(8)
    assert demo.status() == 0, demo.text()
    text = demo.text()
    assert re.search(r"^step 8/8  loss \d\.\d+  peak \d+\.\d MiB$", text, re.MULTILINE)
    assert re.search(r"^torchmem_module_memory_step_peak_bytes\{.*} \d", text, re.MULTILINE)
    assert "layers." in text.partition("From `torchmem show`")[2]
    assert text.rstrip().endswith("nothing is left running")
    demo.assert_gone()
    assert not demo.folder().exists()


def test_shows_a_training_of_one_step(start):
    """A training that is over before the first second has passed would be missed by the demo or by Prometheus."""
    demo = start(1)
    assert demo.status() == 0, demo.text()
    assert re.search(r"^torchmem_module_memory_step_peak_bytes\{.*} \d", demo.text(), re.MULTILINE)
    demo.assert_gone()


def test_asks_a_real_prometheus(start, prometheus):
    """The demo's query would not match the metrics that a real Prometheus has scraped."""
    demo = start(8)
    assert demo.status() == 0, demo.text()
    answer = demo.text().partition("From Prometheus")[2].partition("From `torchmem show`")[0]
    assert len(re.findall(r"^  \S.* [a-z_]+ +[\d,]+$", answer, re.MULTILINE)) == 5
    demo.assert_gone()


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM], ids=lambda signum: signum.name)
@pytest.mark.parametrize("moment", MOMENTS)
def test_ends_cleanly_when_interrupted(start, moment, signum):
    """A Ctrl-C or a kill at that moment would leave ranks, servers or ports behind, or print a traceback."""
    demo = start(2 if moment == "reporting" else 1000)
    demo.wait_for(MOMENTS[moment])
    os.killpg(demo.process.pid, signum)
    assert demo.status() == 128 + signum
    assert f"stopped by {signum.name}" in demo.text()
    assert "Traceback" not in demo.text()
    demo.assert_gone()


@pytest.mark.parametrize("seconds", [0.05, 0.3, 1.0, 2.0, 4.0])
def test_leaves_nothing_when_interrupted_at_any_time(start, seconds):
    """An interruption between two lines of output would leave a process behind."""
    demo = start(1000)
    time.sleep(seconds)
    os.killpg(demo.process.pid, signal.SIGINT)
    demo.status()
    demo.assert_gone()


def test_ends_cleanly_while_the_engine_is_compiled(start, tmp_path):
    """A Ctrl-C in the first run would leave compilers running, or a half-made engine that the next run trusts."""
    cache = str(tmp_path / "cache")
    demo = start(1000, TORCHMEM_CACHE_DIR=cache)
    poll(lambda: any("cc1plus" in command for command in demo.processes().values()), DEADLINE_SECONDS, demo.text)
    os.killpg(demo.process.pid, signal.SIGINT)
    assert demo.status() == 128 + signal.SIGINT
    demo.assert_gone()
    demo = start(3, TORCHMEM_CACHE_DIR=cache)
    assert demo.status(COMPILE_SECONDS) == 0, demo.text()


def test_ends_when_interrupted_again_and_again(start):
    """An impatient user's further Ctrl-Cs would break off the cleaning up."""
    demo = start(1000)
    demo.wait_for("step 1/")
    while demo.process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(demo.process.pid, signal.SIGINT)
        time.sleep(0.03)
    assert demo.status() == 128 + signal.SIGINT
    demo.assert_gone()


def test_ends_cleanly_on_the_terminals_own_ctrl_c():
    """Ctrl-C typed at a terminal that shows the progress bar would leave a process or a broken line behind."""
    mark = str(uuid.uuid4())
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(
            PROGRAM[0], [*PROGRAM, "--steps", "1000"], {**os.environ, "TERM": "xterm", "TORCHMEM_TEST_MARK": mark}
        )
    shown = b""
    is_interrupted = False
    deadline = time.monotonic() + DEADLINE_SECONDS
    with contextlib.suppress(OSError):  # the terminal of an ended program reads as an error
        while time.monotonic() < deadline and (chunk := os.read(terminal, 4096)):
            shown += chunk
            if b"loss" in shown and not is_interrupted:
                os.write(terminal, b"\x03")
                is_interrupted = True
    os.close(terminal)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 128 + signal.SIGINT
    assert b"nothing is left running" in shown
    assert b"\x1b[?25h" in shown  # the cursor is shown again
    assert b"Traceback" not in shown
    marked = [path for path in Path("/proc").glob("[0-9]*/environ") if mark.encode() in read_quietly(path)]
    assert marked == []


def read_quietly(path):
    """The bytes of a file that may be gone or private."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_the_demo_with_its_name(start, rank):
    """The demo would hang on a dead rank, or end as if all were well."""
    demo = start(1000)
    demo.wait_for("step 1/")
    os.kill(demo.find("train.py", variable=f"RANK={rank}"), signal.SIGKILL)
    assert demo.status() == 1
    assert f"rank {rank} died (killed by SIGKILL)" in demo.text()
    demo.assert_gone()


def test_a_killed_sidecar_ends_the_demo_with_its_name(start):
    """The demo would go on watching nothing."""
    demo = start(1000)
    demo.wait_for("step 1/")
    os.kill(demo.find("torchmem-exporter"), signal.SIGKILL)
    assert demo.status() == 1
    assert "the sidecar died (killed by SIGKILL)" in demo.text()
    demo.assert_gone()


def test_nothing_outlives_a_killed_demo(start):
    """``kill -9`` on the demo would leave its ranks computing and its servers listening."""
    demo = start(1000)
    demo.wait_for("step 1/")
    demo.process.kill()
    assert demo.status() == -signal.SIGKILL
    demo.assert_gone()


def test_ends_when_nobody_reads_its_output(start, tmp_path):
    """``make demo | head`` would leave the job running or print a traceback."""
    errors = tmp_path / "errors"
    mark = str(uuid.uuid4())
    with errors.open("wb") as file:
        command = [*PROGRAM, "--steps", "1000"]
        environment = {**os.environ, "TORCHMEM_TEST_MARK": mark}
        demo = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=file, env=environment)
    assert demo.stdout is not None
    demo.stdout.readline()
    demo.stdout.close()
    assert demo.wait(timeout=DEADLINE_SECONDS) == 1
    assert errors.read_text() == ""
    assert [path for path in Path("/proc").glob("[0-9]*/environ") if mark.encode() in read_quietly(path)] == []
