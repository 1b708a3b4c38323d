"""An independent count of the CPU memory that torch holds, to check the books against.

A small allocator in C++ (``witness.cpp``) wraps torch's CPU allocator and keeps plain books of its own. It shares no
code with the engine (only the way both are compiled) and knows nothing of modules or reftypes: only how many bytes
are alive and were at most.

Invariants: sizes are as requested, as in torchmem's books; blocks of every thread are counted.
Limits: CPU only; a block allocated before ``install`` is not counted, so install it before the model is made; there is
no uninstall.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

from torchmem.engine import build as builder
from torchmem.engine.native import supported_torch
from torchmem.errors import BuildError

_SOURCE = Path(__file__).with_name("witness.cpp")
_NAME = "torchmem_witness"


def build() -> Path:
    """Compiles the witness unless the cache has it; returns the path of the binary.

    Raises:
        BuildError: naming the reason and the fix.
    """
    torch = supported_torch()
    return builder.cached(_NAME, [_SOURCE], torch, lambda _scratch, binary: _compile(torch, binary))


def install() -> None:
    """Counts every CPU block that torch allocates from now on, for the life of the process; safe to call twice.

    Raises:
        BuildError: the witness cannot be built, or the present allocator cannot be wrapped.
    """
    if _load().witness_install() != 0:
        raise BuildError("torch's present CPU allocator has no raw deleter and cannot be wrapped")


def current() -> int:
    """Bytes alive now, of those allocated since ``install``."""
    return int(_load().witness_current())


def peak() -> int:
    """The most bytes alive at once since ``install`` or the last ``reset_peak``."""
    return int(_load().witness_peak())


def has(address: int) -> bool:
    """Whether torch's allocator made the block at this address, as far as the witness knows; True before ``install``.

    What torch unpickles (numbers that optimizers keep) lies in memory that its allocator has never seen.
    """
    return not _load.cache_info().currsize or bool(_load().witness_has(ctypes.c_void_p(address)))


def reset_peak() -> None:
    """Makes the bytes alive now the peak."""
    _load().witness_reset_peak()


def num_events() -> int:
    """Allocations and frees counted since ``install``."""
    return int(_load().witness_num_events())


def _compile(torch: Any, binary: Path) -> None:
    library = Path(torch.__file__).parent / "lib"
    linked = [str(_SOURCE), "-shared", "-o", str(binary), f"-L{library}", "-lc10"]
    # Its functions are the library's interface: nothing else would export them.
    builder.run_all([[builder.compiler(), *builder.torch_flags(torch), "-fvisibility=default", *linked]])


@functools.cache
def _load() -> ctypes.CDLL:
    path = build()
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"{path} cannot be loaded ({error}): delete it and try again") from None
    for name in ("witness_current", "witness_peak", "witness_num_events"):
        getattr(loaded, name).restype = ctypes.c_int64
    loaded.witness_install.restype = ctypes.c_int
    loaded.witness_reset_peak.restype = None
    return loaded
