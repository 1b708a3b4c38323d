"""What a record costs: ``python tests/bench/record_cost.py [--repeats 50] [--rounds 3] [--short] [--json]``.

Two figures. The record of a large rank (300 modules x 5 reftypes in each of 3 books, a full ring of 512 steps) is
encoded, written to the default directory's file system, read back and decoded: the median of each, and their sum
against a target of 10 ms. And what publishing it every second takes from a training thread that never lets go of the
interpreter lock by itself: how much longer a fixed piece of pure Python takes with a publisher than in the bare blocks
before and after, beside the ratio of those two, which is what the machine's noise makes of a true 1.
"""

from __future__ import annotations

import argparse
import array
import contextlib
import json
import os
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Console
from rich.table import Table

from torchmem.model import OUTSIDE, REFTYPE_LABELS, ROOT, RefType
from torchmem.wire import record as wire
from torchmem.wire.publisher import Publisher
from torchmem.wire.store import RankStore, default_dir, open_record_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NUM_MODULES = 300
REFTYPES = (RefType.PARAMETER, RefType.GRADIENT, RefType.OPTIMIZER_STATE, RefType.ACTIVATION, RefType.TEMPORARY)
NUM_STEPS = 512
TARGET_MS = 10.0
PUBLISH_INTERVAL = 1.0
BLOCK_SECONDS = 2.0
"""Long enough for two records, short enough that neighbouring blocks see much the same machine."""
NUM_REPEATS, NUM_SHORT_REPEATS = 50, 20
NUM_ROUNDS, NUM_SHORT_ROUNDS = 3, 1
LOOP_LENGTH = 20_000
ME = frozenset({os.geteuid()})


class Costs(NamedTuple):
    """Median milliseconds of each part, and the record's size."""

    encode: float
    write: float
    read: float
    decode: float
    num_bytes: int

    @property
    def total(self) -> float:
        """Milliseconds from the books to the reader's record."""
        return self.encode + self.write + self.read + self.decode


class Slowdown(NamedTuple):
    """How much longer the busy loop takes: medians of ratios."""

    published: float
    """With a publisher, to the mean of the bare blocks around it."""
    bare_again: float
    """The bare block after, to the one before."""
    num_written: int
    """Records written meanwhile."""


def large_record() -> wire.Record:
    """A record of the size that a large model's rank publishes, its books packed as the engine hands them over."""
    names = [OUTSIDE, ROOT, *(f"model.layers.*.blocks.{index}.feed_forward" for index in range(2, NUM_MODULES))]
    cells = [
        wire.Cell(module, reftype, (1 << 20) + 4096 * module + reftype)
        for module in range(NUM_MODULES)
        for reftype in REFTYPES
    ]
    book, book_bytes = wire.pack_cells(cells), sum(cell.num_bytes for cell in cells)
    row = array.array("q", [1 << 30] * len(REFTYPE_LABELS)).tobytes()
    return wire.Record(
        identity=wire.Identity(
            train_job="bench",
            rank=0,
            local_rank=0,
            world_size=1,
            attempt="7d4ad1c4-6f6b-4b52-9a5e-3f2a8c0f7f5e",
            pid=os.getpid(),
            host="bench",
            start_time=time.time(),
            engine="native",
            torch_version="2.13.0",
            torchmem_version="0.1.0",
        ),
        clock=wire.Clock(step=NUM_STEPS, step_seconds=1.0, tracker_seconds=0.01, written_at=time.time()),
        modules=names,
        reftypes=list(REFTYPE_LABELS),
        devices=[
            wire.Device(
                name="cuda:0",
                usage=book,
                step_peak=book,
                active_peak=book,
                usage_bytes=book_bytes,
                step_peak_bytes=book_bytes,
                peak_bytes=book_bytes,
                unattributed_bytes=0,
            )
        ],
        ring=wire.Ring(
            steps=array.array("q", range(NUM_STEPS)).tobytes(),
            ended_at=array.array("d", [time.time()] * NUM_STEPS).tobytes(),
            phases=array.array("q", [7] * NUM_STEPS).tobytes(),
            devices=[wire.RingDevice(name="cuda:0", step_peak=row * NUM_STEPS, step_end=row * NUM_STEPS)],
        ),
    )


@contextlib.contextmanager
def rank_store() -> Iterator[RankStore]:
    """A rank's store on the file system that jobs use by default."""
    with tempfile.TemporaryDirectory(prefix="torchmem-bench-", dir=default_dir().parent) as directory:
        store = RankStore(Path(directory), "bench", 0)
        try:
            yield store
        finally:
            store.close()


def measure_costs(record: wire.Record, num_repeats: int) -> Costs:
    """Medians over repeats of the whole way from the books to the reader."""
    rows: list[tuple[float, ...]] = []
    with rank_store() as store:
        folder = os.open(store.path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            for _ in range(num_repeats):
                times = [time.perf_counter()]
                encoded = wire.encode(record)
                times.append(time.perf_counter())
                store.write(encoded)
                times.append(time.perf_counter())
                data, _status = open_record_bytes(folder, store.path.name, ME)
                times.append(time.perf_counter())
                decoded = wire.decode(data)
                times.append(time.perf_counter())
                rows.append(tuple(1000 * (end - start) for start, end in pairwise(times)))
        finally:
            os.close(folder)
    if decoded != record:
        raise AssertionError("what was read is not what was written")
    encode, write, read, decode = (statistics.median(column) for column in zip(*rows, strict=True))
    return Costs(encode, write, read, decode, len(encoded))


def measure_slowdown(record: wire.Record, num_rounds: int) -> Slowdown:
    """Loops of a busy thread, bare, with a publisher and bare again, in turn."""
    rounds = []
    num_written = 0
    for _ in range(num_rounds):
        before = seconds_per_loop()
        with rank_store() as store:
            publisher = Publisher(store, lambda _is_final: wire.encode(record), PUBLISH_INTERVAL)
            publisher.start()
            published = seconds_per_loop()
            publisher.close()
            num_written += publisher.num_written
        after = seconds_per_loop()
        rounds.append((2 * published / (before + after), after / before))
    published, bare_again = (statistics.median(column) for column in zip(*rounds, strict=True))
    return Slowdown(published, bare_again, num_written)


def seconds_per_loop() -> float:
    """Mean seconds of a fixed piece of pure Python over one block; a mean, so that each record counts."""
    num_loops, started = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - started) < BLOCK_SECONDS:
        work()
        num_loops += 1
    return elapsed / num_loops


def work() -> int:
    """Something that only holds the interpreter."""
    total = 0
    for number in range(LOOP_LENGTH):
        total += number & 7
    return total


def report(say: Callable[..., None], costs: Costs, slowdown: Slowdown) -> None:
    """Prints the figures as a table."""
    size = f"{NUM_MODULES} modules x {len(REFTYPES)} reftypes x 3 books, {NUM_STEPS} steps: {costs.num_bytes:,} bytes"
    say(size)
    table = Table("part", "median ms")
    for name in ("encode", "write", "read", "decode", "total"):
        table.add_row(name, f"{getattr(costs, name):.3f}")
    say(table)
    say(f"target: {TARGET_MS:g} ms in all: {'met' if costs.total < TARGET_MS else 'MISSED'}")
    say(
        f"a busy Python loop with a record every {PUBLISH_INTERVAL:g} s: x {slowdown.published:.4f}"
        f" ({slowdown.num_written} records); the bare loop again: x {slowdown.bare_again:.4f}"
    )


def main() -> int:
    """Measures and prints; status 1 where the target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, help=f"records per median (default: {NUM_REPEATS})")
    parser.add_argument("--rounds", type=int, help=f"rounds of the busy loop, 6 s each (default: {NUM_ROUNDS})")
    parser.add_argument("--short", action="store_true", help="fewer of both")
    parser.add_argument("--json", action="store_true", help="the figures as JSON")
    arguments = parser.parse_args()
    num_repeats, num_rounds = (NUM_SHORT_REPEATS, NUM_SHORT_ROUNDS) if arguments.short else (NUM_REPEATS, NUM_ROUNDS)
    record = large_record()
    costs = measure_costs(record, max(1, arguments.repeats or num_repeats))
    slowdown = measure_slowdown(record, max(1, arguments.rounds or num_rounds))
    if arguments.json:
        figures = {"milliseconds": {**costs._asdict(), "total": costs.total}, "busy_loop": slowdown._asdict()}
        num_bytes = figures["milliseconds"].pop("num_bytes")
        print(json.dumps({"num_bytes": num_bytes, "target_milliseconds": TARGET_MS, **figures}, indent=2))
    else:
        report(Console(highlight=False).print, costs, slowdown)
    return 0 if costs.total < TARGET_MS else 1


if __name__ == "__main__":
    raise SystemExit(main())
