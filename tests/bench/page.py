"""What the sidecar's page costs with 64 ranks: ``python tests/bench/page.py [--rounds 20] [--short] [--json]``.

Its size; the server's processor and wall-clock time for it, when nothing, one rank or every rank has written anew; a
real Chromium's time to load it, by its own navigation timing; and how soon an open page shows a step after it was
written. Processor time is the server's own whatever else the machine does; of wall-clock times on a busy machine the
least says most. Without the Chromium of ``make tools`` its figures are left out. Exits with 1 when a full run exceeds a
limit.
"""

from __future__ import annotations

import gzip
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from backends import find_program
from benchmarks import arguments, report
from pages import HELD_GIB, browsing, held, launched, trained, wait_for
from records import living
from sidecars import application, ask, running
from torchmem.wire import record as wire

NUM_RANKS = 64
RING_STEPS = 512
LIMITS = {
    "bytes": 100_000,
    "nothing new, cpu ms": 100.0,
    "loaded, least ms": 200.0,
    "new step, s": 2.0,
}
STEP = "document.querySelector('tr[data-k^=\"0 \"]').cells[2].textContent"


def fresh(rank, step):
    """A record of this moment."""
    return trained(rank, step, written_at=time.time(), start_time=time.time() - step)


def milliseconds(work):
    """Processor and wall-clock milliseconds, and the result."""
    cpu, wall = time.process_time(), time.perf_counter()
    result = work()
    return 1000 * (time.process_time() - cpu), 1000 * (time.perf_counter() - wall), result


def server(directory, stores, num_rounds):
    """Figures of the page made in this process, and the number of the last step."""
    app = application(directory)
    figures, step = {}, RING_STEPS
    figures["first look, cpu ms"], figures["first look, ms"], _ = milliseconds(lambda: ask(app, "/"))
    for what, written in (("nothing new", ()), ("one rank new", stores[:1]), ("all ranks new", stores)):
        cpu, wall = [], []
        for _ in range(num_rounds):
            step += 1
            for rank, store in enumerate(written):
                store.write(wire.encode(fresh(rank, step)))
            taken = milliseconds(lambda: ask(app, "/"))
            cpu.append(taken[0])
            wall.append(taken[1])
        figures |= {f"{what}, cpu ms": median(cpu), f"{what}, ms": median(wall), f"{what}, least ms": min(wall)}
        body = taken[2].body
    return {"bytes": len(body), "bytes packed": len(gzip.compress(body, 1)), **figures}, step


def browser(program, directory, store, step, num_rounds):
    """Figures of the page in Chromium."""
    loads, waits = [], []
    with running(directory) as sidecar, launched(program) as chromium, browsing(chromium) as page:
        sidecar.ask("/")
        for _ in range(num_rounds):
            page.goto(f"http://127.0.0.1:{sidecar.port}/")
            loads.append(page.evaluate("performance.getEntriesByType('navigation')[0].toJSON()"))
        for at in range(step + 1, step + 1 + num_rounds):
            record = wire.encode(fresh(0, at))
            began = time.monotonic()
            store.write(record)
            wait_for(page, STEP, str(at))
            waits.append(time.monotonic() - began)
    loaded = [load["loadEventEnd"] for load in loads]
    return {
        "answer read, ms": median(load["responseEnd"] for load in loads),
        "loaded, ms": median(loaded),
        "loaded, least ms": min(loaded),
        "new step, s": median(waits),
        "new step, most s": max(waits),
    }


def main():
    parser = arguments(__doc__, short="four rounds, and no limits")
    parser.add_argument("--rounds", type=int, default=20, help="times everything is measured (default: 20)")
    flags = parser.parse_args()
    num_rounds = 4 if flags.short else flags.rounds
    program = find_program("chromium-headless-shell")
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        with living(directory, *(fresh(rank, RING_STEPS) for rank in range(NUM_RANKS))) as stores:
            figures, step = server(directory, stores, num_rounds)
            figures = {"ranks": NUM_RANKS, "cells a rank": len(held(tuple(HELD_GIB))), **figures}
            if program:
                figures |= browser(program, directory, stores[0], step, num_rounds)
    return report(figures, flags, at_most={name: limit for name, limit in LIMITS.items() if name in figures})


if __name__ == "__main__":
    raise SystemExit(main())
