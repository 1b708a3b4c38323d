"""Pictures of the sidecar's page, taken from a running sidecar by a headless Chromium; run by ``make pictures``.

Sixteen ranks of a large job, of which one leaks, one has crashed, one ran out of memory and one lost a labeler.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import time
from pathlib import Path

import backends
from pages import GIB, LEAKING, STEP_SECONDS, browsing, launched, trained, wait_for
from records import leave, living
from sidecars import running
from torchmem.model import Phase, RefType
from torchmem.wire import record as wire

KEPT = Path(__file__).resolve().parent.parent / "docs" / "pictures"
NUM_RANKS = 16
LEAKS, LOST_A_LABELER, RAN_OUT, CRASHED = 1, 3, 5, 7
LEAK_STEP, STEP = 310, 700
SEEN_STEPS = range(60, STEP + 1, 20)
WHOLE = {"width": 1280, "height": 1000}


def record(rank, step):
    """What a rank wrote at the end of a step, the last of which ends now."""
    written_at = time.time() - (STEP - step) * STEP_SECONDS
    overrides = {"written_at": written_at, "start_time": written_at - step * STEP_SECONDS}
    if rank == LEAKS:
        overrides["leak_from"] = LEAK_STEP
    if rank == LOST_A_LABELER:
        reason = "AttributeError: 'FSDPParamGroup' object has no attribute 'unshard'"
        overrides["labelers"] = [wire.Labeler(name="fsdp2", up=False, reason=reason)]
    if rank == RAN_OUT:
        event = wire.OutOfMemory(
            number=1, device=f"cuda:{rank}", time=written_at, step=step, phase=int(Phase.FORWARD), module=LEAKING,
            reftype=int(RefType.ACTIVATION), requested_bytes=2 * GIB, held_bytes=57 * GIB,
        )  # fmt: skip
        overrides["oom_events"] = [event]
    return trained(rank, step, **overrides)


def main():
    """Takes both pictures."""
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        alive = [rank for rank in range(NUM_RANKS) if rank != CRASHED]
        stores = stack.enter_context(living(directory, *(record(rank, 1) for rank in alive)))
        leave(directory, record(CRASHED, STEP))
        sidecar = stack.enter_context(running(directory))
        for step in SEEN_STEPS:
            for rank, store in zip(alive, stores, strict=True):
                store.write(wire.encode(record(rank, step)))
            sidecar.ask("/")  # learns what is usual, and who grew
        browser = stack.enter_context(launched(backends.find_program("chromium-headless-shell")))
        url = f"http://127.0.0.1:{sidecar.port}/?rank={LEAKS}"
        for name, scheme, part in (("page-ranks", "light", None), ("page-rank", "dark", "section[data-k=rank]")):
            page = stack.enter_context(browsing(browser, color_scheme=scheme))
            page.set_viewport_size(WHOLE)
            page.goto(url)
            wait_for(page, "document.querySelector('.warnings').textContent.includes('leaks')")
            path = KEPT / f"{name}.png"
            (page.locator(part) if part else page).screenshot(path=path)
            sys.stdout.write(f"{path}\n")


if __name__ == "__main__":
    main()
