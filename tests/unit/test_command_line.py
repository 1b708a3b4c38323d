"""How the commands print: where what is said cannot be written, and where the terminal lacks a letter."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import records
import small_records

PROGRAM = "import sys; from torchmem.cli import main; sys.exit(main())"
BUILD = """
import pathlib, sys
from torchmem import cli
from torchmem.engine import native
native.build = lambda: pathlib.Path(sys.argv[1])
sys.exit(cli.main(["build"]))
"""


@pytest.fixture
def job(tmp_path):
    """A directory with a record in it."""
    records.leave(tmp_path / "records", small_records.record())
    return str(tmp_path / "records")


@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize(
    ("redirected", "said"),
    [(">/dev/full", "cannot write to standard output: No space left on device"), (">&-", "standard output is closed")],
)
def test_output_that_cannot_be_written_is_one_line(job, redirected, said, unbuffered):
    """A full disk would end in a traceback, or a script take half a table for all of it."""
    script = f'"$0" -c "$1" "${{@:2}}" {redirected}'
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    for arguments, status in ((["show", job], 1), (["show", job, "--json"], 1), (["diff", job, job], 2)):
        line = ["bash", "-c", script, sys.executable, PROGRAM, *arguments]
        ended = subprocess.run(line, capture_output=True, text=True, check=False, timeout=60, env=environment)
        assert (ended.returncode, ended.stderr) == (status, f"torchmem: {said}\n")


def test_path_that_the_encoding_lacks_is_printed_somehow(tmp_path):
    """Building the engine in a plain locale would end in a traceback, below a folder named by a human."""
    binary = tmp_path / "é.so"
    binary.write_bytes(b"")
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    line = [sys.executable, "-c", BUILD, str(binary)]
    ended = subprocess.run(line, capture_output=True, text=True, check=False, timeout=60, env=environment)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "?" in ended.stdout.splitlines()[0]
