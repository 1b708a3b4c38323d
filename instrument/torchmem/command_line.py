"""What the commands of ``torchmem`` have in common: arguments and their checks, and how they print.

Invariants: importing this imports no torch; a pipe that closes early raises ``BrokenPipeError``, however little was
printed.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def add_directory(parser: argparse.ArgumentParser) -> argparse.Action:
    """Adds the directory of the records, for ``records_dir``."""
    return parser.add_argument(
        "directory",
        metavar="DIR",
        nargs="?",
        type=Path,
        help="directory of the records, or a job's folder in it (default: TORCHMEM_DIR, else where jobs write)",
    )


def records_dir(given: Path | None) -> Path:
    """The directory that was given, or else the one where jobs of this environment write."""
    from torchmem.wire.store import default_dir

    return given or Path(os.environ.get("TORCHMEM_DIR") or default_dir())


def whole(least: int) -> Callable[[str], int]:
    """A check for ``type=``: a whole number, at least so large."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of {least} or more")
        return int(text)

    return parse


def complain(line: str) -> None:
    """Says on stderr what is wrong."""
    sys.stderr.write(f"torchmem: {line}\n")


def print_line(text: str) -> None:
    """Prints a line, which may hold a path or another name."""
    _replace_what_cannot_be_shown()
    sys.stdout.write(f"{text}\n")


def print_json(data: Any) -> None:
    """Prints plain data as JSON."""
    import json

    _print_lines(json.dumps(data, indent=2, allow_nan=False) + "\n")


def print_drawn(draw: Callable[[Any], None]) -> None:
    """Prints what a function draws on a console of rich."""
    from rich.console import Console

    _replace_what_cannot_be_shown()
    console = Console(highlight=False)
    with console.capture() as drawn:  # rich has an end of its own, with status 1, for a pipe that closes
        draw(console)
    _print_lines(drawn.get())


def _replace_what_cannot_be_shown() -> None:
    """From now on; a name may not fit the terminal's encoding."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def _print_lines(text: str) -> None:
    # Line by line: unbuffered, Python would take a single write that a closed pipe cut short for a whole one.
    sys.stdout.writelines(text.splitlines(keepends=True))
