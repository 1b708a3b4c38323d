"""What the sidecar keeps over its own restarts: one small file of named sections.

    {"version": 1, "sections": {"counters": ..., ...}}                     msgpack

Invariants: nothing here raises: a file that cannot be used is the same as none, one that cannot be written leaves the
former, both are counted and logged once; replaced atomically; links are never followed; sections that this release does
not know are kept.

Known limit: two sidecars over one directory overwrite each other's.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import threading
from pathlib import Path

import msgspec

VERSION = 1
FILE_NAME = ".exporter-state"
MAX_BYTES = 16 << 20

logger = logging.getLogger("torchmem_exporter")


class _Content(msgspec.Struct, kw_only=True):
    version: int
    sections: dict[str, msgspec.Raw] = {}


def state_path(directory: Path) -> Path:
    """Where a sidecar over a directory, or over the one that this job's folder lies in, keeps its state by default."""
    paths = [folder / FILE_NAME for folder in (directory, directory.absolute().parent)]
    return next((path for path in paths if os.path.exists(path)), paths[0])  # noqa: PTH110  # Path's raises


class StateFile:
    """The file; read when made; safe to use from several threads.

    Args:
        path: of the file; its folder need not exist yet.

    Attributes:
        num_failures: how often it could not be read or written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_failures = 0
        self._told: set[str] = set()
        self._guard = threading.Lock()
        self._sections: dict[str, msgspec.Raw] = {}
        try:
            self._sections = _read(path)
        except FileNotFoundError:
            pass
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError, _UnusableError) as error:
            self._failed("read, so counting starts anew", error)

    def section(self, name: str) -> bytes:
        """What was saved under a name, as msgpack; empty when nothing was."""
        return bytes(self._sections.get(name, b""))

    def refuse(self, name: str, error: Exception) -> None:
        """Notes that a section makes no sense; it is forgotten."""
        self._sections.pop(name, None)
        self._failed(f"used for its {name}, so that counting starts anew", error)

    def save(self, name: str, section: bytes) -> None:
        """Replaces one section, and with it the file."""
        with self._guard:
            self._sections[name] = msgspec.Raw(section)
            content = msgspec.msgpack.encode(_Content(version=VERSION, sections=self._sections))
            try:
                if len(content) > MAX_BYTES:
                    raise _UnusableError(f"it would be larger than {MAX_BYTES} bytes, and not be read again")
                _replace(self.path, content)
            except (OSError, _UnusableError) as error:
                self._failed("written: a restart of the sidecar will forget what it has counted", error)

    def _failed(self, what: str, error: Exception) -> None:
        self.num_failures += 1
        if what not in self._told:
            self._told.add(what)
            reason = error.strerror if isinstance(error, OSError) else str(error)
            logger.warning("the state in %s cannot be %s: %s", self.path, what, reason)


class _UnusableError(Exception):
    """The file is not what this release writes."""


def _read(path: Path) -> dict[str, msgspec.Raw]:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, "rb") as file:  # noqa: PTH123  # a descriptor
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1 or status.st_uid not in (os.geteuid(), 0):
            raise _UnusableError("it is no plain file of this user's")
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise _UnusableError(f"it is larger than {MAX_BYTES} bytes")
    content = msgspec.msgpack.decode(data, type=_Content)
    if content.version != VERSION:
        raise _UnusableError(f"it is of version {content.version}; this release knows {VERSION}")
    return {name: msgspec.Raw(bytes(section)) for name, section in content.sections.items()}


def _replace(path: Path, content: bytes) -> None:
    folder_fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    temporary = f"{path.name}.tmp"
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=folder_fd)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            with open(os.open(temporary, flags, 0o600, dir_fd=folder_fd), "wb") as file:  # noqa: PTH123  # as above
                file.write(content)
            os.rename(temporary, path.name, src_dir_fd=folder_fd, dst_dir_fd=folder_fd)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=folder_fd)
            raise
    finally:
        os.close(folder_fd)
