"""Where records lie and who may write them: one file and one lock per rank.

    <directory>/<folder of the job>/rank-<N>.record    replaced atomically, never written in place
    <directory>/<folder of the job>/rank-<N>.lock      POSIX-locked for the life of the writer; empty
    <directory>/<folder of the job>/post-mortem/       records of attempts that died, see ``postmortem``

A POSIX ``fcntl`` lock belongs to the process, so the kernel frees it when the trainer is killed even while forked
workers, which inherit its descriptors, live on (a ``flock`` would stay with them), and it is seen across containers,
where a pid means nothing. Its price: closing *any* descriptor of the lock file in the holding process drops it.
Hence no function here opens a lock file that this process holds, and every write takes the lock again, which heals a
lock that foreign code dropped by reading the file.

Invariants: torch-free; a reader never sees half a record; nothing blocks on a FIFO, a symlink is never followed below
the directory; the lock file outlives its holder, so that no two processes ever lock different files of one name.

Known limits: Linux on 64 bit; records are not synced to disk (a power cut may cost the last one, which the checksum
shows); a directory deleted under a live writer is not made anew (every write fails, and is counted by the publisher).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import re
import stat
import struct
import tempfile
import threading
from pathlib import Path

from torchmem.errors import RecordError, StoreError
from torchmem.wire.record import HEADER, MAX_PAYLOAD_BYTES

MAX_RECORD_BYTES = HEADER.size + MAX_PAYLOAD_BYTES
"""No file above this size is read."""

RECORD_NAME = re.compile(r"rank-(0|[1-9][0-9]{0,8})\.record")
"""Names of record files; temporary files and locks never match in full."""

BURIED_NAME = re.compile(r"rank-(0|[1-9][0-9]{0,8})\.([A-Za-z0-9-]{1,64})\.record")
"""Names of record files in a post-mortem folder: rank and attempt."""

logger = logging.getLogger("torchmem")

_PLAIN_FOLDER = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
_FLOCK = struct.Struct("hhqqi4x")  # l_type, l_whence, l_start, l_len, l_pid
_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

_held_guard = threading.Lock()
_held: set[tuple[int, int]] = set()
"""Device and inode of every lock file this process holds."""


def default_dir() -> Path:
    """The directory used when none is set: in memory where the host has ``/dev/shm``, else the temporary one."""
    shared = Path("/dev/shm")  # noqa: S108  # safe: the directory made below it is checked to be ours
    base = shared if os.access(shared, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())
    return base / f"torchmem-{os.geteuid()}"


def folder_name(train_job: str) -> str:
    """The folder of a job: its name, where that is a plain file name, else a readable form of it with a hash.

    Raises:
        StoreError: the name is empty.
    """
    if not train_job:
        raise StoreError("the job has no name: set TORCHMEM_TRAIN_JOB")
    if _PLAIN_FOLDER.fullmatch(train_job):
        return train_job
    digest = hashlib.sha256(train_job.encode("utf-8", "surrogatepass")).hexdigest()[:12]
    return re.sub(r"[^A-Za-z0-9._-]", "_", train_job).lstrip(".")[:112] + "-" + digest


def record_name(rank: int) -> str:
    """File name of a rank's record."""
    return f"rank-{rank}.record"


def lock_name(rank: int) -> str:
    """File name of a rank's lock."""
    return f"rank-{rank}.lock"


def is_held(directory: int | Path, name: str) -> bool:
    """Whether a live process, here or in another container, holds the lock file; never blocks, never takes the lock.

    Args:
        directory: the folder of the job, as a descriptor or a path.
        name: the lock file's name in it.

    Returns:
        False also where the file is missing or cannot be opened: nothing then proves that the rank lives.
    """
    if isinstance(directory, int):
        return _is_held(directory, name)
    try:
        dir_fd = os.open(directory, _DIRECTORY_FLAGS)
    except OSError:
        return False
    try:
        return _is_held(dir_fd, name)
    finally:
        os.close(dir_fd)


def open_record_bytes(dir_fd: int, name: str, allowed_uids: frozenset[int]) -> tuple[bytes, os.stat_result]:
    """The bytes of a record file and its status, trusting neither its name nor what lies under it.

    Args:
        dir_fd: descriptor of the folder of the job.
        name: must match ``RECORD_NAME`` or ``BURIED_NAME``.
        allowed_uids: who may own the file.

    Raises:
        RecordError: with reason ``name``, ``open``, ``not_regular``, ``hard_link``, ``uid`` or ``oversize``.
    """
    if not (RECORD_NAME.fullmatch(name) or BURIED_NAME.fullmatch(name)):
        raise RecordError("name", f"{name!r} is no record's name")
    try:
        fd = os.open(name, _READ_FLAGS, dir_fd=dir_fd)
    except OSError as error:
        raise RecordError("open", f"{name}: {error.strerror}") from None
    try:
        status = os.fstat(fd)
        _check_status(name, status, allowed_uids)
        return _read_capped(fd, name), status
    except OSError as error:
        raise RecordError("open", f"{name}: {error.strerror}") from None
    finally:
        os.close(fd)


class RankStore:
    """The writer's side of one rank's record; holds the rank's lock until ``close``.

    The record of an attempt that died before is kept in the post-mortem folder.
    Not for use from several threads at once. A forked child neither holds the lock nor writes.

    Args:
        directory: where all jobs' folders lie; made with mode 0700 where missing.
        train_job: the job's name, see ``folder_name``.
        rank: the rank, from 0.

    Attributes:
        path: the record's file.

    Raises:
        StoreError: the directory cannot be used, or a live process holds the rank; one line that names the fix.
    """

    path: Path

    def __init__(self, directory: Path, train_job: str, rank: int) -> None:
        if rank < 0:
            raise StoreError(f"rank {rank} is negative: set RANK to the process's rank")
        directory = Path(directory).absolute()
        self._train_job = train_job
        self._rank = rank
        self._folder = directory / folder_name(train_job)
        self.path = self._folder / record_name(rank)
        self._temporary = f".{record_name(rank)}.tmp"
        self._pid = os.getpid()
        self._dir_fd, self._lock_fd, self._key = self._take_place()
        self._open = True
        with contextlib.suppress(OSError):
            self._remove_temporary()
        self._keep_predecessor(rank)

    def write(self, data: bytes) -> None:
        """Replaces the record; on any failure the former record stays and nothing else is left behind.

        Raises:
            OSError: what the file system said (no space, no directory), or the lock was lost to another process.
            StoreError: the store is closed, this is a forked child, or the directory was removed and cannot be made
                anew.
        """
        if not self._open or os.getpid() != self._pid:
            raise StoreError(f"the record {self.path} is no longer this process's to write")
        if not self._is_in_place():
            self._return()
        if not _try_lock(self._lock_fd):
            raise BlockingIOError(errno.EAGAIN, "the rank's lock was lost and another process took it")
        self._remove_temporary()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(self._temporary, flags, 0o644, dir_fd=self._dir_fd)
        try:
            try:
                _write_all(fd, data)
            finally:
                os.close(fd)
            os.rename(self._temporary, self.path.name, src_dir_fd=self._dir_fd, dst_dir_fd=self._dir_fd)
        except BaseException:
            with contextlib.suppress(OSError):
                self._remove_temporary()
            raise

    def close(self) -> None:
        """Releases the lock and leaves the record; calling it again does nothing."""
        if not self._open:
            return
        self._open = False
        self._leave_place()

    def _take_place(self) -> tuple[int, int, tuple[int, int]]:
        """Opens the folder, made where missing, and locks the rank there; descriptors, and the identity of the lock."""
        try:
            _make_private(self._folder.parent, owners=(os.geteuid(), 0))
            _make_private(self._folder, owners=(os.geteuid(),))
            dir_fd = os.open(self._folder, _DIRECTORY_FLAGS)
        except OSError as error:
            raise _unusable(self._folder, error) from None
        try:
            return (dir_fd, *_take_lock(dir_fd, self._rank, self._train_job))
        except OSError as error:
            os.close(dir_fd)
            raise _unusable(self._folder, error) from None
        except StoreError:
            os.close(dir_fd)
            raise

    def _leave_place(self) -> None:
        with _held_guard:
            _held.discard(self._key)
            os.close(self._lock_fd)
        os.close(self._dir_fd)

    def _is_in_place(self) -> bool:
        """Whether readers still find the lock where this rank's lies."""
        try:
            status = (self._folder / lock_name(self._rank)).lstat()
        except OSError:
            return False
        return _identity(status) == self._key

    def _return(self) -> None:
        """Takes its place anew: whoever cleaned up there took the folder, or the lock without which it seems dead."""
        place = self._take_place()
        self._leave_place()
        self._dir_fd, self._lock_fd, self._key = place

    def _keep_predecessor(self, rank: int) -> None:
        """Moves the record of an attempt that died out of the way of the first write, to be read post mortem."""
        from torchmem.wire import postmortem

        try:
            postmortem.bury_predecessor(self._dir_fd, rank)
        except OSError as error:
            logger.warning("the last record of the attempt before is lost: %s", error.strerror)

    def _remove_temporary(self) -> None:
        """Removes what an attempt that died while writing left behind; holding the lock proves that it is dead."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._temporary, dir_fd=self._dir_fd)


def _forget_locks() -> None:
    """In a forked child: locks are not inherited, and a guard that another thread held would never be released."""
    global _held_guard  # noqa: PLW0603  # a lock can only be replaced
    _held_guard = threading.Lock()
    _held.clear()


os.register_at_fork(after_in_child=_forget_locks)


def _make_private(directory: Path, owners: tuple[int, ...]) -> None:
    """Makes the directory for this user alone where missing, and refuses one that another user could have planted."""
    with contextlib.suppress(FileExistsError):  # a file in the way is named better by what follows
        directory.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    status = directory.lstat()
    if stat.S_ISLNK(status.st_mode):
        raise StoreError(f"{directory} is a symbolic link: set TORCHMEM_DIR to the directory itself")
    if not stat.S_ISDIR(status.st_mode):
        raise StoreError(f"{directory} is not a directory: set TORCHMEM_DIR to one")
    if status.st_uid not in owners:
        me, owner = os.geteuid(), status.st_uid
        raise StoreError(
            f"{directory} belongs to uid {owner}, not to {me}: set TORCHMEM_DIR to a directory of your own"
        )


def _unusable(folder: Path, error: OSError) -> StoreError:
    return StoreError(
        f"cannot keep records in {folder} ({error.strerror}): set TORCHMEM_DIR to a local directory you can write"
    )


def _take_lock(dir_fd: int, rank: int, train_job: str) -> tuple[int, tuple[int, int]]:
    """Opens and locks a rank's lock file; returns its descriptor and identity, which is entered as held."""
    name = lock_name(rank)
    with _held_guard:
        with contextlib.suppress(FileNotFoundError):
            if _identity(os.stat(name, dir_fd=dir_fd, follow_symlinks=False)) in _held:
                raise _taken(rank, train_job, os.getpid())
        fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644, dir_fd=dir_fd)
        try:
            if not _try_lock(fd):
                raise _taken(rank, train_job, _holder(fd) or 0)
            key = _identity(os.fstat(fd))
        except BaseException:
            os.close(fd)
            raise
        _held.add(key)
    return fd, key


def _taken(rank: int, train_job: str, pid: int) -> StoreError:
    who = "this process" if pid == os.getpid() else f"live process {pid}" if pid else "a live process"
    return StoreError(
        f"rank {rank} of job {train_job!r} is already held by {who}: set TORCHMEM_TRAIN_JOB to another name"
    )


def _try_lock(fd: int) -> bool:
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True


def _holder(fd: int) -> int | None:
    """The process that holds a lock on the file: its pid, 0 if it is in another pid namespace, None if nobody does."""
    answer = fcntl.fcntl(fd, fcntl.F_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
    kind, _, _, _, pid = _FLOCK.unpack(answer)
    return None if kind == fcntl.F_UNLCK else int(pid)


def _is_held(dir_fd: int, name: str) -> bool:
    with _held_guard:
        try:
            if _identity(os.stat(name, dir_fd=dir_fd, follow_symlinks=False)) in _held:
                return True
            fd = os.open(name, _READ_FLAGS, dir_fd=dir_fd)
        except OSError:
            return False
        try:
            return _holder(fd) is not None
        except OSError:
            return False
        finally:
            os.close(fd)


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _check_status(name: str, status: os.stat_result, allowed_uids: frozenset[int]) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise RecordError("not_regular", f"{name}: not a regular file")
    if status.st_nlink > 1:  # 0 is a file that its writer has just replaced: whole, and ours to read
        raise RecordError("hard_link", f"{name}: has {status.st_nlink} names")
    if status.st_uid not in allowed_uids:
        raise RecordError("uid", f"{name}: belongs to uid {status.st_uid}")
    if status.st_size > MAX_RECORD_BYTES:
        raise RecordError("oversize", f"{name}: {status.st_size} bytes exceed {MAX_RECORD_BYTES}")


def _read_capped(fd: int, name: str) -> bytes:
    chunks: list[bytes] = []
    num_left = MAX_RECORD_BYTES + 1
    while num_left and (chunk := os.read(fd, min(num_left, 1 << 20))):
        chunks.append(chunk)
        num_left -= len(chunk)
    if not num_left:
        raise RecordError("oversize", f"{name}: grew past {MAX_RECORD_BYTES} bytes")
    return b"".join(chunks)


def _write_all(fd: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]
