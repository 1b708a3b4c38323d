"""Independent counts of what a device holds: the witness on the CPU, the allocator's statistics on CUDA.

On CUDA the figure is ``requested_bytes``, which torch's caching allocator keeps beside the rounded ones: the books are
as requested too. It falls when a block is free for every stream that used it, the books when its tensor lets it go:
where blocks are used on several streams (FSDP1's buffers) the truth may be higher for a while.

Invariants: both count blocks of every thread; ``settle`` returns when nothing is being let go any more, so that a
count and the books can be read at one moment.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from pathlib import Path
from typing import Protocol

import torch

from torchmem.validation import witness

_QUIET_SECONDS = 0.003
_SETTLE_SECONDS = 5.0
_BUSY = {"R", "D"}
"""States of a thread, in Linux's letters: it runs or waits for a processor, or for a disk."""


class Truth(Protocol):
    """Counts one device; bytes."""

    def current(self) -> int:
        """What is held now."""

    def peak(self) -> int:
        """The most held since ``reset_peak``."""

    def reset_peak(self) -> None:
        """Makes what is held now the peak."""

    def settle(self) -> None:
        """Waits until the device and the communication library have let go of the last buffers."""

    def clean(self) -> None:
        """Lets go of what nobody uses any more, and of what libraries keep for the next time."""


class CpuTruth:
    """The witness; it must have been installed before anything that is to be counted."""

    current = staticmethod(witness.current)
    peak = staticmethod(witness.peak)
    reset_peak = staticmethod(witness.reset_peak)

    @staticmethod
    def settle() -> None:
        """Waits until all other threads sleep and no block has come or gone for a moment; at most a few seconds.

        Quiet alone is not enough: on a busy host the thread that holds the last buffer may wait longer for a processor.
        """
        deadline = time.monotonic() + _SETTLE_SECONDS
        before = -1
        while ((now := witness.num_events()) != before or _others_are_busy()) and time.monotonic() < deadline:
            before = now
            time.sleep(_QUIET_SECONDS)

    def clean(self) -> None:
        """Collects reference cycles."""
        gc.collect()
        self.settle()


def _others_are_busy() -> bool:
    """Whether another thread of this process has something to do."""
    own = str(threading.get_native_id())
    for task in Path("/proc/self/task").glob("*"):
        with contextlib.suppress(OSError):  # it has just ended
            if task.name != own and (task / "stat").read_text().rpartition(")")[2].split()[0] in _BUSY:
                return True
    return False


class CudaTruth:
    """torch's own statistics of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def current(self) -> int:
        """As the protocol says."""
        return self._requested("current")

    def peak(self) -> int:
        """As the protocol says."""
        return self._requested("peak")

    def reset_peak(self) -> None:
        """As the protocol says."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def settle(self) -> None:
        """Waits for the device and has the allocator take back what was used on several streams."""
        torch.cuda.synchronize(self._device)
        # A block that several streams used is let go when the events recorded behind it have passed, and the allocator
        # looks at these only when it is next asked for memory: `requested_bytes` would stay too high until then. The
        # least request makes it look; empty_cache() would too, but the next step would have to ask the driver again.
        torch.empty(1, dtype=torch.uint8, device=self._device)

    def clean(self) -> None:
        """Collects reference cycles and frees the workspaces of cuBLAS, which would else be older than the books."""
        gc.collect()
        self.settle()
        if clear := getattr(torch._C, "_cuda_clearCublasWorkspaces", None):  # noqa: SLF001  # there is no public way
            clear()

    def _requested(self, what: str) -> int:
        return int(torch.cuda.memory_stats(self._device)[f"requested_bytes.all.{what}"])


def truth_of(device: torch.device) -> Truth:
    """The independent count of a device."""
    return CudaTruth(device) if device.type == "cuda" else CpuTruth()
