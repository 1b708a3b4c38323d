"""Writes what is generated, beside this file and below ``deploy`` and ``docs``: ``python grafana/generate.py``.

Only files of its own are touched; a runbook without an alert is deleted.
"""

from __future__ import annotations

import sys
from pathlib import Path

from generator import dashboards, deployed, reference
from generator.catalogue import RUNBOOKS, files

FOLDER = Path(__file__).resolve().parent
DEPLOY = FOLDER.parent / "deploy"
DOCS = FOLDER.parent / "docs"


def main() -> int:
    """Writes all files; returns the exit status."""
    contents = files() | dashboards.files()
    for page in (FOLDER / RUNBOOKS).glob("TorchMem*.md"):
        if f"{RUNBOOKS}/{page.name}" not in contents:
            page.unlink()
    written = {FOLDER / name: content for name, content in contents.items()}
    written |= {DEPLOY / name: content for name, content in deployed.files().items()}
    written[DOCS / reference.METRICS] = reference.page()
    for path, content in written.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
