"""The command line: ``torchmem show`` and ``torchmem build``.

Invariants: ``show`` imports no torch, so that it runs beside a job in an image that has none; a failure is one line on
stderr and exit status 1; Ctrl-C and a closed pipe end it quietly, with the status a shell expects (130, 141).
"""

from __future__ import annotations

import argparse
import io
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torchmem
from torchmem.errors import BuildError

EXAMPLE = """\
example:
  torchmem show                          every rank of every job of this host
  torchmem show --job train --rank 0     one rank
  torchmem show --by reftype --usage     what is alive between steps, by purpose
  torchmem build                         compile the engine ahead of the job
"""
INTERRUPTED = 130
CLOSED_PIPE = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: the arguments; those of the process where ``None``.

    Returns:
        The exit status: 0, or 1 where there was nothing to show or the engine could not be built.

    Raises:
        SystemExit: by ``argparse``, for ``--help``, ``--version`` and arguments that make no sense.
    """
    try:
        arguments = _parser().parse_args(argv)
        status = _build() if arguments.command == "build" else _show(arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The interpreter flushes stdout once more on its way out, and would complain then.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED_PIPE
    return status


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    summary = "Which bytes fill each device of a PyTorch training job, and why."
    parser = argparse.ArgumentParser(prog="torchmem", description=summary, epilog=EXAMPLE, formatter_class=raw)
    parser.add_argument("--version", action="version", version=f"torchmem {torchmem.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    help_text = "show who holds the memory of each rank on this host"
    show = commands.add_parser("show", help=help_text, description=f"{help_text.capitalize()}.")
    show.add_argument(
        "directory",
        metavar="DIR",
        nargs="?",
        type=Path,
        help="directory of the records, or a job's folder in it (default: TORCHMEM_DIR, else where jobs write)",
    )
    show.add_argument("--job", metavar="J", help="only this training job")
    show.add_argument("--rank", metavar="N", type=_rank, help="only this rank")
    show.add_argument("--top", metavar="N", type=_top, default=15, help="rows shown, the rest summed (default: 15)")
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
    help_text = "compile the native engine into the cache"
    commands.add_parser("build", help=help_text, description=f"{help_text.capitalize()}.")
    return parser


def _rank(text: str) -> int:
    return _whole(text, 0)


def _top(text: str) -> int:
    return _whole(text, 1)


def _whole(text: str, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of {least} or more")
    return int(text)


def _build() -> int:
    from torchmem.engine import native

    started = time.time()
    try:
        binary = native.build()
    except BuildError as error:
        _complain(str(error))
        return 1
    cached = binary.stat().st_mtime < started
    print(binary)
    print(f"{'found in the cache' if cached else 'compiled'} in {time.time() - started:.1f} s")
    return 0


def _show(arguments: argparse.Namespace) -> int:
    from torchmem import show
    from torchmem.wire.ranks import read_ranks
    from torchmem.wire.store import default_dir

    directory: Path = arguments.directory or Path(os.environ.get("TORCHMEM_DIR") or default_dir())
    found = read_ranks(directory, arguments.job, arguments.rank)
    for line in found.unreadable:
        _complain(line)
    if not found.ranks:
        if not found.unreadable or arguments.job is not None or arguments.rank is not None:
            _complain(_nothing(directory, arguments.job, arguments.rank))
        return 1
    book, by = show.Book(arguments.book), show.By(arguments.by)
    if arguments.json:
        import json

        text = json.dumps(show.as_data(found.ranks, book, by, arguments.top), indent=2, allow_nan=False) + "\n"
    else:
        from rich.console import Console

        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # a module's name may not fit the terminal's encoding
        console = Console(highlight=False)
        with console.capture() as drawn:  # rich has an end of its own, with status 1, for a pipe that closes
            show.draw(console, found.ranks, book, by, arguments.top, fold=not arguments.unfold)
        text = drawn.get()
    # Line by line: unbuffered, Python would take a single write that a closed pipe cut short for a whole one.
    sys.stdout.writelines(text.splitlines(keepends=True))
    return 0


def _nothing(directory: Path, train_job: str | None, rank: int | None) -> str:
    wanted = f" of job {train_job!r}" if train_job is not None else ""
    wanted += f" of rank {rank}" if rank is not None else ""
    question = "is a job running with torchmem.install(...)?"
    return f"no records{wanted} under {directory}: {question} set TORCHMEM_DIR or pass DIR"


def _complain(line: str) -> None:
    print(f"torchmem: {line}", file=sys.stderr)
