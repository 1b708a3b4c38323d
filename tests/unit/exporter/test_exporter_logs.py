"""The log: one line an event whatever the event says, in both formats."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

PROGRAM = """
import logging, sys, warnings
from torchmem_exporter import logs
logs.configure(sys.argv[1], sys.argv[2])
logger = logging.getLogger("torchmem_exporter.test")
hostile = 'a "quoted"\\n\\r\\x1b[31m \\\\ = \\u2028 end'
logs.log(logger, logging.DEBUG, "fine detail")
logs.log(logger, logging.INFO, "plain", path="/records", empty="", flag=True, number=1.5, none=None, text=hostile)
logging.getLogger("elsewhere").warning("with %s", "arguments")
try:
    raise ValueError("one\\ntwo")
except ValueError:
    logger.exception("failed")
warnings.warn("careful\\nnow")
"""


def lines(log_format, level="info"):
    command = [sys.executable, "-c", PROGRAM, log_format, level]
    done = subprocess.run(command, capture_output=True, check=True, timeout=60)
    assert done.stdout == b""
    return done.stderr.decode().split("\n")[:-1]


def test_logfmt():
    """A log collector would split an event, or a record's text would forge one or move the cursor."""
    plain, foreign, failed, warned = lines("logfmt")
    time, _, rest = plain.partition(" ")
    assert time.startswith("time=20")
    assert time.endswith("Z")
    assert rest == (
        'level=info logger=torchmem_exporter.test msg=plain path=/records empty="" flag=true number=1.5 none=None '
        r'text="a \"quoted\"\n\r\u001b[31m \\ = \u2028 end"'
    )
    assert ' level=warn logger=elsewhere msg="with arguments"' in foreign
    assert r"ValueError: one\ntwo" in failed
    assert "level=error" in failed
    assert "careful" in warned


def test_json():
    """A log collector would refuse a line."""
    plain, foreign, failed, warned = map(json.loads, lines("json"))
    assert plain["text"] == 'a "quoted"\n\r\x1b[31m \\ = \u2028 end'
    assert (plain["level"], plain["msg"], plain["number"], plain["flag"]) == ("info", "plain", 1.5, True)
    assert (foreign["level"], foreign["msg"]) == ("warn", "with arguments")
    assert failed["exception"].endswith("ValueError: one\ntwo")
    assert warned["logger"] == "py.warnings"


@pytest.mark.parametrize(("level", "num_lines"), [("debug", 5), ("info", 4), ("warn", 3), ("error", 1)])
def test_levels(level, num_lines):
    """What was not asked for would fill the log, or what was asked for be missing."""
    assert len(lines("logfmt", level)) == num_lines
