"""How fast a forecast is, construction included, against torch's own tracker on the same script.

Each runs in a process of its own, one after the other: 6.7 and 65 billion parameters under FSDP2 with AdamW on 1,024
ranks, two steps. ``--short`` does a model of 60 million instead. Ends with status 1 where a forecast is not at least
three times as fast or takes 4 GB; the short one is not judged by its speed.

    python tests/bench/forecast_speed.py [--short] [--only 6.7B]
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

WORLD_SIZE = 1024
SEQUENCE = 2048
MIN_SPEEDUP = 3.0
MAX_BYTES = 4 * 10**9
TIMEOUT_SECONDS = 900
TESTS = Path(__file__).resolve().parent.parent


def measure(who, size):
    """In a process of its own: seconds with construction, without imports; the process's largest size."""
    import warnings

    warnings.simplefilter("ignore")
    sys.path.insert(0, str(TESTS))
    import torch._dynamo  # noqa: F401  # every optimizer imports it: no part of either
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker  # noqa: F401  # as above

    import torchmem.forecasting.job
    from jobs import forecast_models

    arguments = {"size": size, "sequence": SEQUENCE}
    began = time.perf_counter()
    if who == "torchmem":
        forecast = torchmem.forecast(forecast_models.fsdp2, world_size=WORLD_SIZE, arguments=arguments)
        state, peak = forecast.by_reftype["optimizer_state"], forecast.peak_bytes
    else:
        found = forecast_models.job_under_torch_tracker(forecast_models.fsdp2, WORLD_SIZE, **arguments)
        state, peak = found["OptState"], found["Total"]
    seconds = time.perf_counter() - began
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"seconds": seconds, "resident_bytes": resident, "optimizer_state": state, "peak": peak}))


def run(who, size):
    """What ``measure`` says in a new process."""
    command = [sys.executable, __file__, "--measure", who, size]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False)
    if done.returncode:
        raise SystemExit(f"{who} failed on {size}:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="one small model")
    parser.add_argument("--only", help="one size")
    parser.add_argument("--measure", nargs=2, metavar=("WHO", "SIZE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        measure(*arguments.measure)
        return 0
    sizes = [arguments.only] if arguments.only else ["small"] if arguments.short else ["6.7B", "65B"]
    print(f"FSDP2, AdamW(foreach), {WORLD_SIZE} ranks, construction and two steps, sequence {SEQUENCE}")
    print(f"{'size':>6} {'who':>9} {'seconds':>8} {'process':>9} {'peak':>10} {'optimizer state':>16}")
    good = True
    for size in sizes:
        found = {who: run(who, size) for who in ("torchmem", "torch")}
        for who, one in found.items():
            gib = {name: one[name] / 2**30 for name in ("resident_bytes", "peak", "optimizer_state")}
            print(
                f"{size:>6} {who:>9} {one['seconds']:>8.1f} {gib['resident_bytes']:>5.2f} GiB"
                f" {gib['peak']:>6.2f} GiB {gib['optimizer_state']:>12.3f} GiB"
            )
        speedup = found["torch"]["seconds"] / found["torchmem"]["seconds"]
        print(f"{size:>6} is forecast {speedup:.1f} times as fast")
        judged = size in ("small", "tiny") or speedup >= MIN_SPEEDUP
        good = good and judged and found["torchmem"]["resident_bytes"] < MAX_BYTES
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
