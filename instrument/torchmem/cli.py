"""The command line: ``torchmem show``, ``watch``, ``diff``, ``baseline``, ``post-mortem``, ``forecast``, ``build`` and
``validate``.

Invariants: those of them that read records import no torch, so that they run beside a job in an image that has none; a
failure is one line on stderr and exit status 1 (of ``diff`` 2, as 1 says that memory grew), arguments that make no
sense are status 2; Ctrl-C and a closed pipe end it quietly, with the status a shell expects (130, 141).
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torchmem
from torchmem import baseline_cli, diff_cli
from torchmem.command_line import add_directory, complain, print_drawn, print_json, print_line, records_dir, whole
from torchmem.errors import BuildError
from torchmem.forecasting import command as forecasting
from torchmem.watching import command as watching

EXAMPLE = """\
example:
  torchmem show                          every rank of every job of this host
  torchmem show --job train --rank 0     one rank
  torchmem show --by reftype --usage     what is alive between steps, by purpose
  torchmem watch                         the same, live
  torchmem post-mortem                   who died, how, and who held what then
  torchmem diff before/ after/           what grew from one run to another; status 1 where it is more than 5%
  torchmem baseline save main            keep what is usual of a run, to compare later ones with
  torchmem forecast train.py:build       what the job will hold, before it starts and without its hardware
  torchmem build                         compile the engine ahead of the job
  torchmem validate                      check every way of training against independent counts, on this host
  torchmem validate --only 'fsdp2/*'     some of them
"""
BAD_ARGUMENTS = 2
INTERRUPTED = 130
CLOSED_PIPE = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: the arguments; those of the process where ``None``.

    Returns:
        The exit status: 0, or 1 where there was nothing to show, the engine could not be built, a row was not right
        or standard output cannot be written to.

    Raises:
        SystemExit: by ``argparse``, for ``--help``, ``--version`` and arguments that make no sense.
    """
    try:
        return _run(_parser().parse_args(argv))
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _give_stdout_up()
        return CLOSED_PIPE


def _run(arguments: argparse.Namespace) -> int:
    failed = diff_cli.UNUSABLE if arguments.command == "diff" else 1
    if sys.stdout is None:
        complain("standard output is closed")
        return failed
    try:
        status = _COMMANDS[arguments.command](arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        if error.filename is not None:  # what fails to be written has no name
            raise
        _give_stdout_up()
        complain(f"cannot write to standard output: {error.strerror}")
        return failed
    return status


def _give_stdout_up() -> None:
    # The interpreter flushes stdout once more on its way out, and would complain then.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    summary = "Which bytes fill each device of a PyTorch training job, and why."
    parser = argparse.ArgumentParser(prog="torchmem", description=summary, epilog=EXAMPLE, formatter_class=raw)
    parser.add_argument("--version", action="version", version=f"torchmem {torchmem.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    help_text = "show who holds the memory of each rank on this host"
    show = commands.add_parser("show", help=help_text, description=f"{help_text.capitalize()}.")
    add_directory(show)
    show.add_argument("--job", metavar="J", help="only this training job")
    show.add_argument("--rank", metavar="N", type=whole(0), help="only this rank")
    show.add_argument("--top", metavar="N", type=whole(1), default=15, help="rows shown, the rest summed (default: 15)")
    show.add_argument(
        "--by", choices=("module", "reftype", "both"), default="both", help="what a row is (default: both)"
    )
    book = show.add_mutually_exclusive_group()
    book.add_argument(
        "--peak", dest="book", action="store_const", const="peak", help="at the peak of a step (the default)"
    )
    book.add_argument("--usage", dest="book", action="store_const", const="usage", help="at the end of the last step")
    show.add_argument(
        "--unfold", action="store_true", help="tell layers.0, layers.1, ... apart instead of summing them as layers.*"
    )
    show.add_argument("--json", action="store_true", help="the same as JSON, unfolded")
    show.set_defaults(book="peak")
    _add_post_mortem(commands)
    help_text = "compile the native engine into the cache"
    commands.add_parser("build", help=help_text, description=f"{help_text.capitalize()}.")
    forecasting.add_parser(commands)
    _add_validate(commands)
    watching.add_parser(commands)
    diff_cli.add_parser(commands)
    baseline_cli.add_parser(commands)
    return parser


def _add_post_mortem(commands: Any) -> None:
    help_text = "show who held what when an attempt died, and which allocations failed"
    command = commands.add_parser("post-mortem", help=help_text, description=f"{help_text.capitalize()}.")
    command.add_argument(
        "path",
        metavar="DIR",
        nargs="?",
        type=Path,
        help="directory of the records, a job's folder in it, its post-mortem folder, or one record file"
        " (default: TORCHMEM_DIR, else where jobs write)",
    )
    command.add_argument("--job", metavar="J", help="only this training job")
    command.add_argument("--rank", metavar="N", type=whole(0), help="only this rank")
    command.add_argument("--last", metavar="N", type=whole(1), help="only the latest N deaths (default: all)")
    command.add_argument(
        "--top", metavar="N", type=whole(1), default=10, help="rows of a peak shown, the rest summed (default: 10)"
    )
    command.add_argument(
        "--unfold", action="store_true", help="tell layers.0, layers.1, ... apart instead of summing them as layers.*"
    )
    command.add_argument("--json", action="store_true", help="the same as JSON, unfolded")


def _add_validate(commands: Any) -> None:
    help_text = "run every way of training here and compare the books with independent counts"
    validate = commands.add_parser("validate", help=help_text, description=f"{help_text.capitalize()}.")
    validate.add_argument("--device", choices=("cpu", "cuda"), help="where to run (default: cuda where there is one)")
    validate.add_argument(
        "--ranks", metavar="N", type=whole(1), help="processes (default: one a GPU, at most those; 2 on the CPU)"
    )
    validate.add_argument(
        "--only",
        metavar="PATTERN",
        action="append",
        default=[],
        help="only rows whose name contains this, or matches it where it has * or ?; may be repeated",
    )
    validate.add_argument(
        "--steps", metavar="N", type=whole(2), default=3, help="steps of each of four blocks (default: 3)"
    )
    validate.add_argument(
        "--tolerance",
        metavar="SHARE",
        type=_share,
        default=0.001,
        help="how far a step's peak may be from the truth, as a share of it (default: 0.001)",
    )
    validate.add_argument("--list", action="store_true", help="name the rows and end")
    validate.add_argument("--json", action="store_true", help="everything, as one JSON document at the end")


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to below 1")
    return share


def _build(_arguments: argparse.Namespace) -> int:
    from torchmem.engine import native

    started = time.time()
    try:
        binary = native.build()
    except BuildError as error:
        complain(str(error))
        return 1
    cached = binary.stat().st_mtime < started
    print_line(str(binary))
    print_line(f"{'found in the cache' if cached else 'compiled'} in {time.time() - started:.1f} s")
    return 0


def _validate(arguments: argparse.Namespace) -> int:
    from torchmem.engine import native

    try:
        native.supported_torch()
    except BuildError as error:
        complain(str(error))
        return 1
    from torchmem.validation import report, rows, run

    chosen = rows.find(arguments.only)
    names = [row.name for row in chosen]
    if not chosen:
        complain(f"no row matches {' or '.join(map(repr, arguments.only))}: `torchmem validate --list` names them")
        return BAD_ARGUMENTS
    if arguments.list:
        sys.stdout.writelines(f"{name}\n" for name in names)
        return 0
    try:
        machine = run.machine(arguments.device, arguments.ranks)
        options = run.Options(machine, chosen, arguments.steps, arguments.tolerance)
        outcomes = run.run(options, report.Json() if arguments.json else report.Table(names))
    except run.UnusableError as error:
        complain(str(error))
        return BAD_ARGUMENTS
    except BuildError as error:
        complain(str(error))
        return 1
    return 0 if run.is_right(outcomes) else 1


def _show(arguments: argparse.Namespace) -> int:
    from torchmem import show
    from torchmem.wire.ranks import read_ranks

    directory = records_dir(arguments.directory)
    found = read_ranks(directory, arguments.job, arguments.rank)
    for line in found.unreadable:
        complain(line)
    if not found.ranks:
        if not found.unreadable or arguments.job is not None or arguments.rank is not None:
            complain(_nothing(directory, arguments.job, arguments.rank))
        return 1
    book, by = show.Book(arguments.book), show.By(arguments.by)
    if arguments.json:
        print_json(show.as_data(found.ranks, book, by, arguments.top))
    else:
        print_drawn(lambda console: show.draw(console, found.ranks, book, by, arguments.top, fold=not arguments.unfold))
    return 0


def _post_mortem(arguments: argparse.Namespace) -> int:
    from torchmem import postmortem_show
    from torchmem.wire.deaths import read_deaths

    path = records_dir(arguments.path)
    found = read_deaths(path, arguments.job, arguments.rank)
    for line in found.unreadable:
        complain(line)
    deaths = found.deaths[: arguments.last]
    if not deaths:
        if not found.unreadable:
            complain(_nobody(path, arguments.job, arguments.rank))
        return 1
    if arguments.json:
        print_json(postmortem_show.as_data(deaths, arguments.top))
    else:
        print_drawn(lambda console: postmortem_show.draw(console, deaths, arguments.top, fold=not arguments.unfold))
    return 0


def _nothing(directory: Path, train_job: str | None, rank: int | None) -> str:
    from torchmem.postmortem_show import hint
    from torchmem.wire.deaths import read_deaths

    question = "is a job running with torchmem.install(...)?"
    line = f"no records{_wanted(train_job, rank)} under {directory}: {question} set TORCHMEM_DIR or pass DIR"
    num_deaths = len(read_deaths(directory, train_job, rank).deaths)
    return f"{line}; {hint(num_deaths, str(directory))}" if num_deaths else line


def _nobody(path: Path, train_job: str | None, rank: int | None) -> str:
    if not path.exists():
        return f"{path} does not exist: set TORCHMEM_DIR or pass DIR"
    return f"no attempt{_wanted(train_job, rank)} has died, as far as {path} tells"


def _wanted(train_job: str | None, rank: int | None) -> str:
    wanted = f" of job {train_job!r}" if train_job is not None else ""
    return wanted + (f" of rank {rank}" if rank is not None else "")


_COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "baseline": baseline_cli.run,
    "build": _build,
    "diff": diff_cli.run,
    "forecast": forecasting.run,
    "post-mortem": _post_mortem,
    "show": _show,
    "validate": _validate,
    "watch": watching.run,
}
