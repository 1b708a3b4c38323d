"""A fixed number of rounds of ``fuzz_record.py``, always the same ones."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("fuzz_record.py")
NUM_RUNS = 100_000
MAX_SECONDS = 500
"""A busy machine takes minutes; how long it takes says nothing."""


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("atheris"), reason="atheris has no wheel for this Python or machine")
def test_fuzzing_finds_nothing(tmp_path):
    """Bytes that nobody thought of would raise in the sidecar, or be believed."""
    line = [sys.executable, PROGRAM, f"-runs={NUM_RUNS}", "-seed=1", f"-artifact_prefix={tmp_path}/"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=MAX_SECONDS, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert f"Done {NUM_RUNS} runs" in done.stderr
