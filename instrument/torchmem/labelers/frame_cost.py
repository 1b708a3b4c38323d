"""What opening or closing the frame of a module's call costs, measured when the monitor is installed.

Wall-clock on a busy host: the least of several short runs, so that a preemption does not count; about two
milliseconds in all.
"""

from __future__ import annotations

import time
from typing import Any

from torch import nn
from torch.nn.modules.module import _has_any_global_hook

from torchmem.labelers.frames import ModuleFrames
from torchmem.labelers.hooks import HookSet
from torchmem.labelers.owners import OwnerTable

_NUM_CALLS = 100
_NUM_ROUNDS = 5


class _Nothing(nn.Module):
    def forward(self) -> None:
        """Does nothing: what is left is the call itself."""


def frame_seconds(native: Any) -> float:
    """Seconds that opening, or closing, a frame adds to a module's call; leaves the books reset and the gate shut."""
    if _has_any_global_hook():  # type: ignore[no-untyped-call]  # torch's; they would be called, by a module that is none of the job's
        return 0.0
    module = _Nothing()
    owners = OwnerTable(module, 0)
    native.reset(owners.parents)
    hooks = HookSet("cost")
    bare = _best(module)
    try:
        ModuleFrames(native, owners, _nothing).attach(hooks)
        native.set_gate(True)
        watched = _best(module)
    finally:
        native.set_gate(False)
        hooks.close()
    return max(0.0, watched - bare) / 2


def _nothing(*_: Any) -> None:
    """What precedes the root's frame."""


def _best(module: nn.Module) -> float:
    return min(_round(module) for _ in range(_NUM_ROUNDS))


def _round(module: nn.Module) -> float:
    began = time.perf_counter()
    for _ in range(_NUM_CALLS):
        module()
    return (time.perf_counter() - began) / _NUM_CALLS
