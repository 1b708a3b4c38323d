"""What ending a step costs the training thread, publishing included, for a model of 300 modules.

    python tests/bench/step_end.py [--short] [--json]

A step of the model runs, then ``monitor.step()`` is timed on the training thread while the publisher writes a record
every 50 ms, twenty times as often as by default. The target is 0.2 ms a step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time

import torch
from torch import nn

import torchmem

NUM_MODULES = 300
TARGET_MS = 0.2


class Chain(nn.Module):
    """300 watched modules one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(16, 16) for _ in range(NUM_MODULES - 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = part(x)
        return x


def measure(num_steps: int) -> list[float]:
    """Milliseconds of ``monitor.step()``, by step."""
    torch.set_num_threads(1)
    model, taken = Chain(), []
    with torchmem.install(model, dir=tempfile.mkdtemp(), publish_interval=0.05) as monitor:
        for _ in range(num_steps):
            model(torch.ones(4, 16)).sum().backward()
            began = time.perf_counter()
            monitor.step()
            taken.append((time.perf_counter() - began) * 1e3)
        assert len(monitor.snapshot().modules) == NUM_MODULES + 1
        assert monitor.snapshot().devices[0].usage
    return taken[10:]


def main() -> int:
    """Prints the figures; status 1 when the median of a full run misses the target."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="a few seconds instead of half a minute")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    wanted = parser.parse_args()
    taken = measure(200 if wanted.short else 1000)
    figures = {
        "median_ms": statistics.median(taken),
        "mean_ms": statistics.mean(taken),
        "p99_ms": statistics.quantiles(taken, n=100)[98],
        "target_ms": TARGET_MS,
    }
    if wanted.json:
        json.dump(figures, sys.stdout)
    else:
        print(f"end of a step, {NUM_MODULES} modules, on the training thread")
        for name, value in figures.items():
            print(f"  {name:<10} {value:8.3f}")
    return int(not wanted.short and figures["median_ms"] > TARGET_MS)


if __name__ == "__main__":
    sys.exit(main())
