"""``torchmem watch`` on the command line: snapshots, and what is missing."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import records
import watched
from torchmem import cli
from torchmem.watching import command

SNAPSHOT = """
import sys
from torchmem.cli import main
status = main(["watch", sys.argv[1]])
unwanted = {"torch", "textual", "yaml", "h11", "bcrypt", "prometheus_client"}
sys.exit(status or str(unwanted & set(sys.modules)) if unwanted & set(sys.modules) else status)
"""


def run(directory, *, encoding="utf-8", folder=None):
    """The command in a process of its own, which has no terminal, and works in that folder."""
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "PYTHONIOENCODING": encoding}
    line = [sys.executable, "-c", SNAPSHOT, str(directory)]
    options = {"capture_output": True, "timeout": 60, "env": environment, "cwd": folder}
    return subprocess.run(line, check=False, stdin=subprocess.DEVNULL, **options)


def test_snapshot_where_there_is_no_terminal(tmp_path):
    """A pipe would get control codes or nothing, or a host without torch and Textual an error."""
    with records.living(tmp_path, watched.trained(0, 520), watched.trained(1, 520)):
        ended = run(tmp_path)
    out = ended.stdout.decode()
    assert (ended.returncode, ended.stderr.decode()) == (0, f"torchmem: {command.HINT}\n")
    assert [text for text in ("> 0/8", "1/8", "who holds", "grown over", "steps 8 to 519") if text not in out] == []
    assert "\x1b" not in out
    assert max(map(len, out.splitlines())) <= 80


def test_snapshot_of_nothing_is_no_error_and_needs_no_utf8(tmp_path):
    """A cron job would fail before the first job has started, or in a plain locale."""
    ended = run("missing", encoding="ascii", folder=tmp_path)  # a longer path may break the line in the words below
    assert ended.returncode == 0
    assert b"does not exist yet" in ended.stdout
    with records.living(tmp_path, watched.trained(0, 520)):
        assert run(tmp_path, encoding="ascii").stdout.isascii()


def test_missing_textual_is_one_line_that_says_what_to_install(tmp_path, monkeypatch, capsys):
    """The user would get a traceback instead of the command to type."""
    monkeypatch.setattr(command, "is_terminal", lambda: True)
    monkeypatch.delitem(sys.modules, "torchmem.watching.app", raising=False)
    monkeypatch.setitem(sys.modules, "textual", None)
    assert cli.main(["watch", str(tmp_path)]) == 1
    assert capsys.readouterr().err == f"torchmem: {command.MISSING}\n"


@pytest.mark.parametrize("arguments", [["--interval", "0"], ["--interval", "nan"], ["--interval", "x"], ["--top", "0"]])
def test_arguments_that_make_no_sense_are_status_2(arguments, capsys):
    """An interval of nothing would burn a core, and no row would be shown."""
    with pytest.raises(SystemExit) as ended:
        cli.main(["watch", *arguments])
    assert ended.value.code == 2
    assert "is not a" in capsys.readouterr().err


@pytest.mark.parametrize(("term", "expected"), [("xterm", True), ("dumb", False), (None, False)])
def test_dumb_terminal_is_none(term, expected, monkeypatch):
    """An editor's shell would fill with control codes."""
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(getattr(sys, name), "isatty", lambda: True, raising=False)
    monkeypatch.delenv("TERM", raising=False) if term is None else monkeypatch.setenv("TERM", term)
    assert command.is_terminal() == expected
