"""Compiles C++ once per machine: a cache folder, a lock and a move into place, for the engine and for any other binary.

A binary is named by what it was made from, so that a changed source or another torch makes another one; it is made
under a file lock, so that the ranks of a host make it once, in a private folder, and renamed into place, so that an
interrupted build leaves nothing half-made; the folder is the user's own, or root's as in an image, or is refused.

Invariants: ``cached`` returns a path only when the binary is complete. Every failure is a ``BuildError`` of one line
that names the reason and the fix.

Limits: Linux, g++ or clang++ with C++17.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import stat
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from torchmem.errors import BuildError

COMPILE_TIMEOUT_SECONDS = 600


def cache_dir() -> Path:
    """The folder for compiled binaries: ``$TORCHMEM_CACHE_DIR``, else the user's cache, else a temporary one."""
    if chosen := os.environ.get("TORCHMEM_CACHE_DIR"):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")  # noqa: PTH111, PTH118  # Path.home() raises where there is none
    if os.path.isabs(base) and _can_make(Path(base) / "torchmem"):  # noqa: PTH117  # same
        return Path(base) / "torchmem"
    return Path(tempfile.gettempdir()) / f"torchmem-cache-{os.geteuid()}"


def cached(name: str, sources: Iterable[Path], torch: Any, make: Callable[[str, Path], None]) -> Path:
    """The binary of this name, made unless the cache has it.

    Args:
        name: how the file's name begins.
        sources: the files it is made from.
        torch: the torch it is made for.
        make: called with a scratch folder and the path at which to leave the binary.

    Raises:
        BuildError: the folder cannot be used, or ``make`` raised it.
    """
    folder = _own_folder(cache_dir())
    binary = folder / f"{name}-{_key(sources, torch)}.so"
    if binary.exists():
        return binary
    if not os.access(folder, os.W_OK | os.X_OK, effective_ids=True):
        raise BuildError(
            f"{folder} lacks {binary.name} and cannot be written: run `torchmem build` as its owner, with this torch,"
            " or set TORCHMEM_CACHE_DIR to a folder you can write"
        )
    with _locked(folder / "build.lock"):
        if not binary.exists():  # another rank may have made it meanwhile
            _clean(folder)
            with tempfile.TemporaryDirectory(prefix="build-", dir=folder) as scratch:
                made = Path(scratch) / binary.name
                make(scratch, made)
                made.replace(binary)
    return binary


def torch_flags(torch: Any) -> list[str]:
    """Compiler flags for a source that includes torch's headers."""
    include = Path(torch.__file__).parent / "include"
    return [
        *("-std=c++17", "-O2", "-g1", "-fPIC", "-fvisibility=hidden", "-w"),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        f"-I{include}",
        f"-I{include}/torch/csrc/api/include",
    ]


def compiler() -> str:
    """The user's C++ compiler.

    Raises:
        BuildError: there is none.
    """
    for candidate in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        if candidate and shutil.which(candidate):
            return candidate
    raise BuildError(
        "no C++ compiler found: install g++, or run `torchmem build` where there is one and share the cache"
    )


def run_all(commands: list[list[str]]) -> None:
    """Runs the commands side by side; the first failure ends all.

    Raises:
        BuildError: with the compiler's own reason.
    """
    running: list[subprocess.Popen[str]] = []
    try:
        for command in commands:
            process = subprocess.Popen(  # noqa: S603  # the user's own compiler
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
            )
            running.append(process)
        for process in running:
            output, _ = process.communicate(timeout=COMPILE_TIMEOUT_SECONDS)
            if process.returncode:
                raise BuildError(f"{commands[0][0]} failed: {_reason(output, process.returncode)}")
    except OSError as error:
        raise BuildError(f"cannot run the compiler: {error}") from None
    except subprocess.TimeoutExpired:
        raise BuildError(f"the compiler took more than {COMPILE_TIMEOUT_SECONDS} s") from None
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
            process.wait()
            if process.stdout:
                process.stdout.close()


def _can_make(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        return os.access(folder, os.W_OK | os.X_OK)
    return False


def _own_folder(folder: Path) -> Path:
    """Makes the folder; refuses one where another user could place a binary."""
    try:
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        raise BuildError(f"{folder}: {error.strerror}: set TORCHMEM_CACHE_DIR to a folder you can write") from None
    if status.st_uid not in {0, os.geteuid()} or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise BuildError(f"{folder} can be written by others: chmod go-w it, or set TORCHMEM_CACHE_DIR")
    return folder


def _key(sources: Iterable[Path], torch: Any) -> str:
    digest = hashlib.sha256()
    for source in sorted(sources):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    for part in (torch.__version__, torch.version.git_version, sysconfig.get_config_var("SOABI"), torch.__file__):
        digest.update(str(part).encode() + b"\0")
    return digest.hexdigest()[:16]


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    # The kernel drops the lock when the holder dies, so a killed build blocks nobody.
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _clean(folder: Path) -> None:
    """Removes what interrupted builds left; the caller holds the lock, so nobody is using it."""
    for leftover in folder.glob("build-*/"):
        shutil.rmtree(leftover, ignore_errors=True)


def _reason(output: str, status: int) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line.lower()), lines[0] if lines else f"exit status {status}")
