"""Something else that the same thread runs in the midst of code, as a signal handler does."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def at_every_point(file: str):
    """Context managers, each of which runs what it is given one instruction of that file later than the one before."""
    point, reached = 0, True
    while reached:
        interrupt = _Interrupt(file, point)
        yield interrupt.by
        reached, point = interrupt.num_left < 0, point + 1
    assert point > 1, "nothing of it ran"


class _Interrupt:
    def __init__(self, file: str, point: int) -> None:
        self.num_left = point
        self._file = file

    @contextmanager
    def by(self, handler: Callable[[], None]) -> Iterator[None]:
        """What runs inside is interrupted once."""

        def trace(frame, event, _):
            if frame.f_code.co_filename != self._file:
                return None
            frame.f_trace_opcodes = True
            if event == "opcode":
                self.num_left -= 1
                if self.num_left == -1:
                    handler()  # not traced itself
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            yield
        finally:
            sys.settrace(before)
