"""The command line of ``torchmem watch``.

Invariants: importing this imports no torch and no Textual; where there is no terminal to draw on, one plain snapshot is
printed and the status is 0; what is missing is one line on stderr that names the command to install it.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchmem.watching.look import Watcher

SNAPSHOT_TOP = 15
LEAST_INTERVAL = 0.1
MISSING = "the live view needs Textual: pip install 'torchmem[watch]'"
HINT = "one look, since this is no terminal: run it in one for the live view"

EPILOG = """\
keys:
  up, down, k, j   choose a rank          u   tell layers.0, layers.1, ... apart
  tab, d           the next device        p   at the peak of a step, or at its end
  s                sort the ranks         q   quit          ?   help
"""


def add_parser(commands: Any) -> None:
    """Adds the command to the parser of ``torchmem``."""
    help_text = "watch who holds the memory of each rank on this host, live"
    parser = commands.add_parser(
        "watch",
        help=help_text,
        description=f"{help_text.capitalize()}.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "directory",
        metavar="DIR",
        nargs="?",
        type=Path,
        help="directory of the records, or a job's folder in it (default: TORCHMEM_DIR, else where jobs write)",
    )
    parser.add_argument("--job", metavar="J", help="only this training job")
    parser.add_argument(
        "--interval", metavar="SECONDS", type=_interval, default=1.0, help="between two looks (default: 1)"
    )
    parser.add_argument(
        "--top", metavar="N", type=_top, help="rows of holders shown, the rest summed (default: what fits)"
    )


def _interval(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not LEAST_INTERVAL <= seconds <= 86400:  # noqa: PLR2004  # a day
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from {LEAST_INTERVAL}")
    return seconds


def _top(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


def run(arguments: argparse.Namespace, print_drawn: Callable[[Callable[[Any], None]], None]) -> int:
    """Runs the command.

    Args:
        arguments: of the parser.
        print_drawn: prints what a function draws on a console.

    Returns:
        The exit status: 0, 1 where Textual is missing or fails, 128 and the number of the signal that ended it.
    """
    from torchmem.watching.look import Watcher
    from torchmem.wire.store import default_dir

    # A sidecar's state that cannot be read costs only a head start; what is logged of it is for its operators.
    logging.getLogger("torchmem_exporter").addHandler(logging.NullHandler())
    watcher = Watcher(arguments.directory or Path(os.environ.get("TORCHMEM_DIR") or default_dir()), arguments.job)
    if is_terminal():
        return _live(watcher, arguments)
    _snapshot(watcher, arguments.top or SNAPSHOT_TOP, print_drawn)
    return 0


def is_terminal() -> bool:
    """Whether there is a terminal to read keys from and to draw on; Textual does the latter through stderr."""
    streams = sys.stdin, sys.stdout, sys.stderr
    return os.environ.get("TERM", "dumb") != "dumb" and all(
        stream is not None and stream.isatty() for stream in streams
    )


def _live(watcher: Watcher, arguments: argparse.Namespace) -> int:
    try:
        from torchmem.watching.app import WatchApp
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "textual":
            raise
        _complain(MISSING)
        return 1
    app = WatchApp(watcher, arguments.interval, arguments.top, sys.stdout.encoding or "ascii")
    status = app.run(mouse=False)  # so that the terminal's own selection works
    return app.return_code or status or 0


def _snapshot(watcher: Watcher, top: int, print_drawn: Callable[[Callable[[Any], None]], None]) -> None:
    from torchmem.watching.choice import Choice
    from torchmem.watching.drawing import snapshot
    from torchmem.watching.lines import Page

    look = watcher.look()
    print_drawn(lambda console: console.print(snapshot(Page(look, Choice(), console.encoding), console.width, top)))
    _complain(HINT)


def _complain(line: str) -> None:
    sys.stderr.write(f"torchmem: {line}\n")
