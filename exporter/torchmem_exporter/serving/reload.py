"""A setting kept in files, which follows them without a restart.

Invariants: a look costs one ``stat`` a file; new content is taken only when it could be loaded whole, otherwise the
last good one stays; each broken change is counted and logged once, and looked at again until it is whole.

Known limits: a file written in place may be read half-written; replace it by renaming another over it. A look at a file
system that does not answer does not return.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from torchmem.errors import ConfigError
from torchmem_exporter.logs import log

RETRY_SECONDS = 1.0

Value = TypeVar("Value")
_Stamps = tuple[tuple[int, ...], ...]

logger = logging.getLogger(__name__)


class Loaded(NamedTuple, Generic[Value]):
    """What was read, and where."""

    value: Value
    files: tuple[Path, ...]
    """All files it was made from."""


class Reloaded(Generic[Value]):
    """A value that follows its files.

    Args:
        path: the file that leads to the others.
        load: reads it; given the value in force, None at first, so that it can refuse a change that needs a restart.
        clock: seconds.

    Attributes:
        num_reloads: changes that were taken.
        num_failures: changes that could not be.

    Raises:
        ConfigError: it cannot be loaded a first time.
    """

    def __init__(
        self,
        path: Path,
        load: Callable[[Path, Value | None], Loaded[Value]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_reloads = 0
        self.num_failures = 0
        self._path = path
        self._load = load
        self._clock = clock
        self._problem = ""
        self._tried_at = 0.0
        self._value, self._files, self._stamps = self._settled(None, (path,))

    def current(self) -> Value:
        """The value of now, or the last good one."""
        stamps = _stamps(self._files)
        if stamps != self._stamps:
            self._stamps = stamps
            self._problem = ""
            self._reload()
        elif self._problem and self._clock() - self._tried_at >= RETRY_SECONDS:
            # What the new content lacks may lie in a file that is not known yet.
            self._reload()
        return self._value

    def _reload(self) -> None:
        self._tried_at = self._clock()
        try:
            self._value, self._files, self._stamps = self._settled(self._value, self._files)
        except ConfigError as error:
            problem = str(error)
            if problem != self._problem:
                self._problem = problem
                self.num_failures += 1
                log(logger, logging.ERROR, "a changed file cannot be used; what was in force stays", error=problem)
            return
        self._problem = ""
        self.num_reloads += 1
        log(logger, logging.INFO, "a changed file was loaded", file=str(self._path))

    def _settled(self, in_force: Value | None, files: tuple[Path, ...]) -> tuple[Value, tuple[Path, ...], _Stamps]:
        """A value, and stamps of its files from before they were read: a change during the reading is seen later."""
        while True:
            stamps = _stamps(files)
            loaded = self._load(self._path, in_force)
            if loaded.files == files:
                return loaded.value, files, stamps
            files = loaded.files


def _stamps(files: tuple[Path, ...]) -> _Stamps:
    return tuple(map(_stamp, files))


def _stamp(path: Path) -> tuple[int, ...]:
    """What changes whenever the file does, also where it is reached through links; empty where there is none."""
    try:
        found = os.stat(path)  # noqa: PTH116  # a Path would cost as much again
    except OSError:
        return ()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
