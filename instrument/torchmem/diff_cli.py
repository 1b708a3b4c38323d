"""The command line of ``torchmem diff``: the gate that a CI job ends with.

Invariants: importing this imports no torch, nor anything of the sidecar; the status is 0 only when all that was named
could be read and nothing grew too much, 1 when a device did, and 2 when the input cannot be used.
"""

from __future__ import annotations

import argparse
from fractions import Fraction
from pathlib import Path
from typing import Any

from torchmem.command_line import complain, print_drawn, print_json, whole

GREW, UNUSABLE = 1, 2

EPILOG = """\
A and B are each a directory of records, a job's folder in it, one record file, a post-mortem folder or a file in it, or
a file that `torchmem baseline save` wrote.

status: 0 no device grew by more than the threshold, 1 one did, 2 the input cannot be used

example:
  torchmem diff before/ after/                         what grew from one run to another
  torchmem diff main.baseline.json /dev/shm/torchmem   this run against what was usual
  torchmem diff a b --by reftype --threshold 2% --json
"""


def add_parser(commands: Any) -> None:
    """Adds the command to the parser of ``torchmem``."""
    help_text = "compare two runs: what grew, by module and reftype"
    parser = commands.add_parser(
        "diff",
        help=help_text,
        description=f"{help_text.capitalize()}.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("before", metavar="A", type=Path, help="the run to compare with")
    parser.add_argument("after", metavar="B", type=Path, help="the run that may have grown")
    parser.add_argument("--job", metavar="J", help="only this training job, where A or B is a directory")
    parser.add_argument("--rank", metavar="N", type=whole(0), help="only this rank")
    parser.add_argument("--device", metavar="D", help="only this device, such as cuda:0")
    parser.add_argument(
        "--by", choices=("module", "reftype", "both"), default="both", help="what a row is (default: both)"
    )
    parser.add_argument(
        "--top", metavar="N", type=whole(1), default=15, help="rows shown, the rest summed (default: 15)"
    )
    parser.add_argument(
        "--threshold",
        metavar="SHARE",
        type=_share,
        default=_share("5%"),
        help="growth of a device that is too much, such as 5%% or 0.05 (default: 5%%)",
    )
    parser.add_argument(
        "--usage", action="store_true", help="what is alive at the end of the last step, not the peak of a step"
    )
    parser.add_argument(
        "--unfold", action="store_true", help="tell layers.0, layers.1, ... apart instead of summing them as layers.*"
    )
    parser.add_argument("--json", action="store_true", help="the same as JSON, unfolded")


def run(arguments: argparse.Namespace) -> int:
    """Compares, prints, and returns the status."""
    from torchmem import diff, diff_show
    from torchmem.diff_input import UnusableError, read_run
    from torchmem.show import Book, By

    book, by = Book.USAGE if arguments.usage else Book.PEAK, By(arguments.by)
    wanted = arguments.job, arguments.rank, arguments.device
    try:
        before, after = (read_run(path, book, *wanted) for path in (arguments.before, arguments.after))
    except UnusableError as error:
        complain(str(error))
        return UNUSABLE
    for one in (before, after):
        for line in one.remarks:
            complain(f"{one.path}: {line}")
    matched = diff.match(before.devices, after.devices)
    if not matched.pairs:
        complain(f"no device of {before.path} can be held against one of {after.path}")
        return UNUSABLE
    compared = diff_show.Comparison(before, after, book, matched, arguments.threshold)
    if arguments.json:
        print_json(diff_show.as_data(compared, by, arguments.top))
    else:
        print_drawn(lambda console: diff_show.draw(console, compared, by, arguments.top, fold=not arguments.unfold))
    if compared.exceeding:
        return GREW
    # What could not be read may have grown: that is no clean result.
    return UNUSABLE if before.remarks or after.remarks else 0


def _share(text: str) -> Fraction:
    """A share as ``5%`` or ``0.05``, exactly."""
    number = text.removesuffix("%")
    try:
        share = Fraction(number) / (100 if number != text else 1)
        float(share)  # as which it is told
    except (ValueError, ZeroDivisionError, OverflowError):
        share = Fraction(-1)
    if share < 0 or (number == text and share >= 1):
        raise argparse.ArgumentTypeError(f"{text!r} is no share: write it like 5% or 0.05")
    return share
