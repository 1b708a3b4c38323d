"""An independent count of the CPU memory that torch holds, to check torchmem against.

A small allocator in C++ (``counting_allocator.cpp``) wraps torch's CPU allocator and keeps its own plain books. It
shares no code with torchmem and knows nothing of modules or reftypes: only how many bytes are alive and were at most.

Invariants: compiled once per torch version and source, then loaded from a cache folder; ranks that start together take
a file lock; an interrupted build leaves nothing half-made behind.
Known limits: a block allocated before ``install`` is not counted, so install it before the model is made; CPU only.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import os
import subprocess
from pathlib import Path

import torch

_SOURCE = Path(__file__).with_name("counting_allocator.cpp")


def _command(target: Path) -> list[str]:
    root = Path(torch.__file__).parent
    return [
        os.environ.get("CXX", "g++"),
        "-std=c++20",
        "-O2",
        "-fPIC",
        "-shared",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
        f"-I{root / 'include'}",
        str(_SOURCE),
        "-o",
        str(target),
        f"-L{root / 'lib'}",
        "-lc10",
    ]


def _library_path() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torchmem-tests"
    key = hashlib.sha256()
    key.update(_SOURCE.read_bytes())
    key.update(f"{torch.__version__} {torch.version.git_version} {torch._C._GLIBCXX_USE_CXX11_ABI}".encode())
    return cache / f"truth-{key.hexdigest()[:16]}.so"


def _build(library: Path) -> None:
    """Compiles under a lock that the kernel drops if its holder dies, and puts the result in place in one move."""
    library.parent.mkdir(parents=True, exist_ok=True)
    with library.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if library.exists():
            return
        half_made = library.with_suffix(f".{os.getpid()}")
        try:
            subprocess.run(_command(half_made), check=True, capture_output=True, text=True)
            half_made.replace(library)
        except subprocess.CalledProcessError as error:
            raise RuntimeError(f"the counting allocator does not compile:\n{error.stderr}") from error
        finally:
            half_made.unlink(missing_ok=True)


@functools.cache
def load() -> ctypes.CDLL:
    """The compiled allocator, built on first use; raises ``RuntimeError`` with the compiler's words if it cannot be."""
    library = _library_path()
    if not library.exists():
        _build(library)
    loaded = ctypes.CDLL(str(library))
    loaded.truth_install.restype = ctypes.c_int
    for name in ("truth_current", "truth_peak", "truth_num_events"):
        getattr(loaded, name).restype = ctypes.c_int64
    loaded.truth_reset_peak.restype = None
    return loaded


def install() -> None:
    """Counts every CPU block that torch allocates from now on, for the life of the process; idempotent."""
    if load().truth_install() != 0:
        raise RuntimeError("torch's present CPU allocator has no raw deleter and cannot be wrapped")


def current() -> int:
    """Bytes alive now, of those allocated since ``install``."""
    return int(load().truth_current())


def peak() -> int:
    """The most bytes alive at once since ``install`` or the last ``reset_peak``."""
    return int(load().truth_peak())


def reset_peak() -> None:
    """Makes the bytes alive now the peak."""
    load().truth_reset_peak()


def num_events() -> int:
    """Allocations and frees counted since ``install``."""
    return int(load().truth_num_events())
