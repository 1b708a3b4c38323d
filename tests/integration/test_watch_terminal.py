"""``torchmem watch`` in a real terminal: tmux types the keys and reads the screen while ranks live, leak and die."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

import records
import watched
from torchmem.wire import record as wire

pytestmark = pytest.mark.slow

DEADLINE_SECONDS = 30.0
PROMPT = "ready>"
COLOUR = re.compile(r"\x1b\[(?:\d+;)*(?:3[0-8]|9[0-7])[;m]")
"""An escape sequence that colours what follows."""


class Terminal:
    """A terminal of its own, with a shell in it.

    Args:
        tmux: path of the program.
        folder: short, since a socket's path must be.
    """

    def __init__(self, tmux, folder):
        self._tmux = [tmux, "-S", f"{folder}/socket", "-f", "/dev/null"]
        environment = {**os.environ, "PS1": PROMPT, "HISTFILE": ""}
        environment.pop("NO_COLOR", None)
        line = [*self._tmux, "new-session", "-d", "-x", "80", "-y", "24", "bash", "--norc", "--noprofile"]
        subprocess.run(line, check=True, env=environment, timeout=DEADLINE_SECONDS)

    def run(self, *arguments):
        """One command of tmux; returns what it prints."""
        line = [*self._tmux, *map(str, arguments)]
        return subprocess.run(line, check=True, capture_output=True, text=True, timeout=DEADLINE_SECONDS).stdout

    def type(self, *keys):
        """Presses keys, each by its name in tmux."""
        self.run("send-keys", *keys)

    def resize(self, width, height):
        """Gives the terminal another size."""
        self.run("resize-window", "-x", width, "-y", height)

    def screen(self):
        """The text on the screen."""
        return self.run("capture-pane", "-p")

    def shows(self, *texts, without=()):
        """Waits until all these texts, and none of those, are on the screen; returns its lines."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        while True:
            screen = self.screen()
            if all(text in screen for text in texts) and not any(text in screen for text in without):
                return screen.splitlines()
            assert time.monotonic() < deadline, screen
            time.sleep(0.1)

    def settings(self):
        """What programs may have switched on."""
        flags = ("alternate_on", "cursor_flag", "mouse_any_flag", "keypad_flag", "keypad_cursor_flag")
        return self.run("display-message", "-p", " ".join(f"#{{{flag}}}" for flag in flags))

    def child(self):
        """Process id of what the shell has started."""
        shell = self.run("display-message", "-p", "#{pane_pid}").strip()
        return int(Path(f"/proc/{shell}/task/{shell}/children").read_text())


@pytest.fixture
def terminal():
    """A terminal of 80x24; its programs end with the test."""
    tmux = shutil.which("tmux")
    if not tmux:
        pytest.skip("tmux is missing: the distribution's package brings it")
    with tempfile.TemporaryDirectory(prefix="watch-", dir="/tmp") as folder:
        opened = Terminal(tmux, folder)
        try:
            opened.shows(PROMPT)
            yield opened
        finally:
            opened.run("kill-server")


def saving_modes(folder, line):
    """The line of a shell, with how the kernel treats what is typed saved before and after it."""
    return f"stty -g >{folder}/before; {line}; echo ended with $?; stty -g >{folder}/after"


def modes(folder, name):
    """What was saved; waits until all of it is."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not (path := folder / name).exists() or not path.read_text().endswith("\n"):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return path.read_text()


def watch(directory, prefix=""):
    """The line that a user types."""
    return (
        f"{prefix} {sys.executable} -c 'from torchmem.cli import main; exit(main())' watch {directory} --interval 0.2"
    )


def test_living_ranks_are_watched_from_before_they_start_until_they_die(terminal, tmp_path):
    """What the unit tests promise would not hold in a terminal that people use."""
    directory = tmp_path / "records"
    before = terminal.settings()
    # By its name alone: a path of any other length breaks the line elsewhere.
    terminal.type(saving_modes(tmp_path, watch(directory.name, f"cd {tmp_path};")), "Enter")
    terminal.shows("does not exist yet")
    with records.living(directory, watched.trained(0, 520), watched.trained(1, 520)) as (calm, leaky):
        lines = terminal.shows("> 0/8", "2 running of llama-pretrain", "who holds", "steps 8 to 519", "q quit")
        assert [len(lines), max(map(len, lines)) <= 80] == [24, True]
        calm.write(wire.encode(watched.trained(0, 1000)))
        leaky.write(wire.encode(watched.trained(1, 1000, leaks_from=520)))
        terminal.shows("leaks 32.", "full in ", "running 1000")
        terminal.type("Down")
        terminal.shows("> 1/8", "layers.3.attention activation", "+7.4")
        terminal.type("u")
        terminal.shows("layers.7.attention_norm", without=["layers.*"])
        terminal.type("p")
        terminal.shows("at the end of the last step")
        terminal.resize(120, 40)
        lines = terminal.shows("baseline", "growth", "grown over")
        assert len(lines) == 40
        terminal.resize(200, 60)
        assert len(terminal.shows("host", "node-17 4001")) == 60
        terminal.resize(80, 24)
        terminal.type("?")
        terminal.shows("any key closes this")
        terminal.type("j")
        calm.write(wire.encode(watched.trained(0, 1000)))  # a minute after its last record it would be stale
        leaky.close()
        terminal.shows("> 1/8  crashed", "1 running, 1 crashed", "! rank 1/8: ended without a clean end")
    terminal.type("q")
    terminal.shows("ended with 0", without=["crashed"])
    assert (terminal.settings(), modes(tmp_path, "after")) == (before, modes(tmp_path, "before"))


@pytest.mark.parametrize(("ending", "status"), [("q", 0), ("C-c", 130), ("TERM", 143)])
def test_terminal_is_as_before_however_the_view_ends(terminal, tmp_path, ending, status):
    """The user would be left with a shell that does not echo, or with a screen full of remains."""
    before = terminal.settings()
    with records.living(tmp_path / "records", watched.trained(0, 520)):
        terminal.type(saving_modes(tmp_path, watch(tmp_path / "records")), "Enter")
        terminal.shows("> 0/8")
        assert terminal.settings() != before
        if ending == "TERM":
            os.kill(terminal.child(), signal.SIGTERM)
        else:
            terminal.type(ending)
        terminal.shows(f"ended with {status}", without=["who holds"])
    assert (terminal.settings(), modes(tmp_path, "after")) == (before, modes(tmp_path, "before"))


@pytest.mark.parametrize(("prefix", "is_coloured"), [("", True), ("NO_COLOR=1", False)])
def test_colours_are_used_unless_they_are_refused(terminal, tmp_path, prefix, is_coloured):
    """NO_COLOR would be ignored, or the view be grey for everybody."""
    with records.living(tmp_path, watched.trained(0, 520)):
        terminal.type(watch(tmp_path, prefix), "Enter")
        terminal.shows("> 0/8", "running")
        assert bool(COLOUR.search(terminal.run("capture-pane", "-p", "-e"))) == is_coloured
        terminal.type("q")
        terminal.shows(PROMPT, without=["running"])


def test_suspended_view_comes_back(terminal, tmp_path):
    """Ctrl-Z would leave the shell unusable, or the view be lost."""
    before = terminal.settings()
    with records.living(tmp_path, watched.trained(0, 520)):
        terminal.type(watch(tmp_path), "Enter")
        terminal.shows("> 0/8")
        terminal.type("C-z")
        terminal.shows("topped", PROMPT, without=["who holds"])
        terminal.type("fg; echo ended with $?", "Enter")
        terminal.shows("> 0/8", "who holds")
        terminal.type("q")
        # The old prompt is there again before the cursor is.
        terminal.shows("ended with 0", without=["who holds"])
    assert terminal.settings() == before


def test_view_ends_with_its_terminal(terminal, tmp_path):
    """Every closed window would leave a process behind that reads records for ever."""
    with records.living(tmp_path, watched.trained(0, 520)):
        terminal.type(watch(tmp_path), "Enter")
        terminal.shows("> 0/8")
        process = Path(f"/proc/{terminal.child()}")
        pane = terminal.run("display-message", "-p", "#{pane_id}").strip()
        terminal.run("new-window", "bash")
        terminal.run("kill-pane", "-t", pane)
        deadline = time.monotonic() + DEADLINE_SECONDS
        while process.exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
