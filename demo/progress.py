"""How far the training is: a bar on a terminal, a plain line now and then anywhere else.

Invariant: on a terminal the cursor and the line are given back however the block ends.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

PLAIN_SECONDS = 5.0
STARTING = "starting (a first run compiles the native engine)"
MIB = 1 << 20


class Bar:
    """A progress bar; a context manager."""

    def __init__(self, num_steps: int) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[facts]}"),
            TimeRemainingColumn(),
        )
        self._task = self._progress.add_task(STARTING, total=num_steps, facts="", start=False)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def update(self, step: int, loss: float, peak_bytes: float | None) -> None:
        """Shows that ``step`` is done."""
        if not self._progress.tasks[0].started:
            self._progress.start_task(self._task)
        self._progress.update(self._task, description="training", completed=step, facts=facts(loss, peak_bytes))

    def note(self, line: str) -> None:
        """Prints a line above the bar."""
        self._progress.console.print(line, markup=False, highlight=False)


class Lines:
    """The same without a terminal."""

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self._next_at = 0.0

    def __enter__(self) -> Self:
        self.note(STARTING)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def update(self, step: int, loss: float, peak_bytes: float | None) -> None:
        """Prints that ``step`` is done, unless a line was printed a moment ago."""
        if step < self._num_steps and time.monotonic() < self._next_at:
            return
        self._next_at = time.monotonic() + PLAIN_SECONDS
        self.note(f"step {step}/{self._num_steps}  {facts(loss, peak_bytes)}")

    def note(self, line: str) -> None:
        """Prints a line."""
        print(line, flush=True)


def progress(num_steps: int) -> Bar | Lines:
    """The one that suits standard output."""
    return Bar(num_steps) if sys.stdout.isatty() else Lines(num_steps)


def facts(loss: float, peak_bytes: float | None) -> str:
    """Loss and peak memory of rank 0; the peak once it is known."""
    peak = "" if peak_bytes is None else f"  peak {peak_bytes / MIB:.1f} MiB"
    return f"loss {loss:.3f}{peak}"
