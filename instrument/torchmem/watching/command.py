"""The command line of ``torchmem watch``.

Invariants: importing this imports no torch and no Textual; where there is no terminal to draw on, one plain snapshot is
printed and the status is 0; what is missing is one line on stderr that names the command to install it.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from typing import TYPE_CHECKING, Any

from torchmem.command_line import add_directory, complain, print_drawn, records_dir, whole

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
    add_directory(parser)
    parser.add_argument("--job", metavar="J", help="only this training job")
    parser.add_argument(
        "--interval", metavar="SECONDS", type=_interval, default=1.0, help="between two looks (default: 1)"
    )
    parser.add_argument(
        "--top", metavar="N", type=whole(1), help="rows of holders shown, the rest summed (default: what fits)"
    )


def _interval(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not LEAST_INTERVAL <= seconds <= 86400:  # noqa: PLR2004  # a day
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from {LEAST_INTERVAL}")
    return seconds


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; returns its status: 0, 1 without a working Textual, 128 and the signal that ended it."""
    from torchmem.watching.look import Watcher

    # A sidecar's state that cannot be read costs only a head start; what is logged of it is for its operators.
    logging.getLogger("torchmem_exporter").addHandler(logging.NullHandler())
    watcher = Watcher(records_dir(arguments.directory), arguments.job)
    if is_terminal():
        return _live(watcher, arguments)
    _snapshot(watcher, arguments.top or SNAPSHOT_TOP)
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
        complain(MISSING)
        return 1
    app = WatchApp(watcher, arguments.interval, arguments.top, sys.stdout.encoding or "ascii")
    status = app.run(mouse=False)  # so that the terminal's own selection works
    return app.return_code or status or 0


def _snapshot(watcher: Watcher, top: int) -> None:
    from torchmem.watching.choice import Choice
    from torchmem.watching.drawing import snapshot
    from torchmem.watching.lines import Page

    look = watcher.look()
    print_drawn(lambda console: console.print(snapshot(Page(look, Choice(), console.encoding), console.width, top)))
    complain(HINT)
