"""The sidecar's independence of torch and of the rest of the library."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import torchmem_exporter

SOURCES = sorted(Path(torchmem_exporter.__file__).parent.rglob("*.py"))
ALLOWED = ("torchmem.wire", "torchmem.model", "torchmem.errors", "torchmem_exporter")
PROGRAM = """
import pathlib, sys
sys.modules["torch"] = None  # importing it now raises
sys.path.insert(0, sys.argv[1])
import records, sidecars
directory = pathlib.Path(sys.argv[2])
with records.living(directory, records.make_record()):
    app = sidecars.application(directory, sidecars.Clock(records.WRITTEN_AT))
    assert sidecars.states(sidecars.ask(app).text) == {"0": "running"}
import torchmem_exporter.cli
assert not [name for name in sys.modules if name.split(".")[0] in {"torch", "numpy"} and sys.modules[name]]
"""


def imported(path):
    """Every module that a file imports, wherever in it; for ``from x import y`` both ``x`` and ``x.y``."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_imports_stay_within_the_contract():
    """An image of the sidecar would need torch or the training library's insides."""
    outside = {
        name
        for path in SOURCES
        for name in imported(path)
        if name.split(".")[0] in {"torch", "torchmem", "torchmem_exporter"}
        and not any(name == allowed or name.startswith(allowed + ".") for allowed in ALLOWED)
    }
    assert outside == {"torchmem.__version__"}


def test_scrape_where_torch_cannot_be_imported(tmp_path):
    """The sidecar would not start in an image without torch."""
    arguments = [sys.executable, "-c", PROGRAM, str(Path(__file__).parents[2]), str(tmp_path)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
