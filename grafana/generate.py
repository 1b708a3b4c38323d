"""Writes what is generated, beside this file: ``python grafana/generate.py``.

Only files of its own are touched; a runbook without an alert is deleted.
"""

from __future__ import annotations

import sys
from pathlib import Path

from generator.catalogue import RUNBOOKS, files

FOLDER = Path(__file__).resolve().parent


def main() -> int:
    """Writes all files; returns the exit status."""
    contents = files()
    for page in (FOLDER / RUNBOOKS).glob("TorchMem*.md"):
        if f"{RUNBOOKS}/{page.name}" not in contents:
            page.unlink()
    for name, content in contents.items():
        path = FOLDER / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
