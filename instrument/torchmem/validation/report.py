"""Shows outcomes as they come: a table on a terminal or in a file, or JSON for machines.

Invariants: torch-free; a row is printed once, complete, as soon as it is known; what a closed pipe does is the
caller's business.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from torchmem.model import RefType
from torchmem.show import binary
from torchmem.validation.outcome import FAILED, OFF, OK, SKIPPED, RowOutcome

_COLORS = {OK: "green", OFF: "bold red", FAILED: "bold red", SKIPPED: "yellow"}
_HEADINGS = ("tracked", "truth", "ratio", "unattributed", "slowdown")
_NUM_REFTYPES = 5


class Summary(msgspec.Struct, kw_only=True, frozen=True):
    """A whole run, as JSON gives it."""

    torchmem_version: str
    environment: dict[str, str | int | float]
    """Versions, device, driver, ranks, steps of a block, tolerance."""
    is_complete: bool
    """False where it was interrupted."""
    num_by_status: dict[str, int]
    remarks: list[str]
    """What is not as one would expect of a run, a line each."""
    rows: list[RowOutcome]


class Reporter(Protocol):
    """Shows a run."""

    def watching(self, num_rows: int) -> AbstractContextManager[None]:
        """Entered while rows run."""

    def begins(self, name: str) -> None:
        """A row begins."""

    def ended(self, outcome: RowOutcome, /) -> None:
        """A row ended."""

    def closes(self, summary: Summary) -> None:
        """All rows have ended, or the run was interrupted."""


def _bar(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True)


class Table:
    """Rows as lines, a progress bar below them where the output is a terminal.

    Args:
        names: of all rows, for the width of the first column.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._width = max((len(name) for name in names), default=0)
        self._console = Console(highlight=False)
        self._progress = _bar(self._console)
        self._task = self._progress.add_task("starting", total=None)

    @contextmanager
    def watching(self, num_rows: int) -> Iterator[None]:
        """As the protocol says."""
        self._progress.update(self._task, total=num_rows)
        heading = "".join(f"{text:>14}" for text in _HEADINGS)
        self._print(Text(f"{'row':{self._width}}{heading}  result", "bold"))
        with self._progress if self._console.is_terminal else nullcontext():
            yield

    def begins(self, name: str) -> None:
        """As the protocol says."""
        self._progress.update(self._task, description=name)

    def ended(self, outcome: RowOutcome) -> None:
        """As the protocol says."""
        for line in row_lines(outcome, self._width):
            self._print(line)
        self._progress.advance(self._task)

    def closes(self, summary: Summary) -> None:
        """As the protocol says."""
        counts = ", ".join(f"{number} {status}" for status, number in summary.num_by_status.items())
        environment = ", ".join(f"{name} {value}" for name, value in summary.environment.items() if value != "")
        self._print(Text(f"{counts or 'no rows'}{'' if summary.is_complete else '; interrupted'}", "bold"))
        for remark in summary.remarks:
            self._print(Text(remark, "yellow"))
        self._print(Text(f"torchmem {summary.torchmem_version}, {environment}", "dim"))

    def _print(self, line: Text) -> None:
        if self._console.is_terminal:
            self._console.print(line, soft_wrap=True)
        else:
            # Not by rich: it ends the process by itself when a pipe closes.
            sys.stdout.write(f"{line.plain}\n")
            sys.stdout.flush()


class Json:
    """One document on stdout at the end; a progress bar on stderr where that is a terminal."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._progress = _bar(self._console)
        self._task = self._progress.add_task("starting", total=None)

    @contextmanager
    def watching(self, num_rows: int) -> Iterator[None]:
        """As the protocol says."""
        self._progress.update(self._task, total=num_rows)
        with self._progress if self._console.is_terminal else nullcontext():
            yield

    def begins(self, name: str) -> None:
        """As the protocol says."""
        self._progress.update(self._task, description=name)

    def ended(self, _outcome: RowOutcome) -> None:
        """As the protocol says."""
        self._progress.advance(self._task)

    def closes(self, summary: Summary) -> None:
        """As the protocol says."""
        text = msgspec.json.format(msgspec.json.encode(summary), indent=2).decode()
        sys.stdout.writelines(f"{line}\n" for line in text.splitlines())


def row_lines(outcome: RowOutcome, width: int) -> list[Text]:
    """A row as lines: the figures, what is wrong, and what the peak was made of."""
    first = Text(f"{outcome.name:{width}}")
    if outcome.ranks:
        figures = (
            binary(outcome.peak_bytes),
            binary(outcome.true_peak_bytes),
            f"{outcome.ratio:.5f}",
            f"{outcome.unattributed_share:.3%}",
            f"{outcome.slowdown:.2f}",
        )
        first.append("".join(f"{text:>14}" for text in figures))
    first.append(f"  {outcome.status}", _COLORS[outcome.status])
    if not outcome.ranks:
        return [first.append(f": {'; '.join(outcome.problems)}")]
    problems = [Text(f"  {problem}", "red") for problem in outcome.problems]
    return [first, *problems, Text(f"  {_composition(outcome)}", "dim")]


def _composition(outcome: RowOutcome) -> str:
    order = [reftype.label for reftype in RefType]
    held = sorted(outcome.peak.items(), key=lambda item: (-item[1], order.index(item[0])))
    parts = [f"{label} {binary(num_bytes)}" for label, num_bytes in held[:_NUM_REFTYPES]]
    if rest := sum(num_bytes for _, num_bytes in held[_NUM_REFTYPES:]):
        parts.append(f"{len(held) - _NUM_REFTYPES} more {binary(rest)}")
    return ", ".join(parts)
