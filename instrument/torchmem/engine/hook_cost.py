"""What one hook of ours costs a module call, measured when the monitor is installed.

Wall-clock on a busy host: the least of several short runs, so that a preemption does not count; about two
milliseconds in all.
"""

from __future__ import annotations

import time
from typing import Any

from torch import nn

_NUM_CALLS = 100
_NUM_ROUNDS = 5


class _Nothing(nn.Module):
    def forward(self) -> None:
        """Does nothing: what is left is the call itself."""


def hook_seconds(engine: Any) -> float:
    """Seconds that one hook adds to a module's call; the engine's gate must be closed, its books freshly reset."""
    plain, hooked = _Nothing(), _Nothing()
    hooked.register_forward_pre_hook(engine.make_hook(0, 1), prepend=True)
    hooked.register_forward_hook(engine.make_hook(0, 0), always_call=True)
    engine.set_gate(True)
    best = [min(_round(module) for _ in range(_NUM_ROUNDS)) for module in (plain, hooked)]
    engine.set_gate(False)
    return max(0.0, best[1] - best[0]) / 2


def _round(module: nn.Module) -> float:
    began = time.perf_counter()
    for _ in range(_NUM_CALLS):
        module()
    return (time.perf_counter() - began) / _NUM_CALLS
