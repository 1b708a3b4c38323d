"""Many steps of every way people train: nothing of torchmem's grows, sticks or goes below zero.

``TORCHMEM_TEST_STEPS=500`` takes five hundred steps of each (half an hour on two cores).
"""

from __future__ import annotations

import gc
import os
import struct
import tempfile
import time
import warnings
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

import torchmem
from jobs.ranks import run_ranks
from torchmem import monitor as monitors
from torchmem.model import RefType
from torchmem.validation.rows import ROWS, Machine
from torchmem.validation.workloads import Place

NUM_RANKS = 2
NUM_STEPS = int(os.environ.get("TORCHMEM_TEST_STEPS", "60"))
NUM_WARM_STEPS = NUM_STEPS // 5
TIMEOUT_SECONDS = 30.0 * NUM_STEPS
SETTLE_SECONDS = 5.0  # other threads hold finished buffers, and saves in the background their executors, for a moment
MAX_MORE_OBJECTS = NUM_STEPS // 10
NAMES = [row.name for row in ROWS if not row.reason_to_skip(Machine("cpu", NUM_RANKS))]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(TIMEOUT_SECONDS)]

LOOSE = ("num_unknown_frees", "num_double_allocations", "num_unmatched_pops", "num_ignored_devices")


class Sizes(NamedTuple):
    """What torchmem holds at the end of a step."""

    num_blocks: int
    num_bytes: int
    num_objects: int


class Endured(NamedTuple):
    """One row's steps on one rank."""

    warm: Sizes
    end: Sizes
    num_negative: int
    max_stack_depth: int
    phases: set[int]
    """Of the steps after the warm ones."""
    loose: dict[str, int]
    disabled: list[str]


def endure_all(rank: int, world_size: int, folder: str) -> dict[str, Endured]:
    """Every row, one after the other."""
    warnings.simplefilter("ignore")
    monitors.RING_STEPS = NUM_WARM_STEPS // 2  # full before the sizes are first taken
    place = Place(rank, world_size, torch.device("cpu"), Path(folder))
    rows = {row.name: row for row in ROWS}
    endured = {}
    for name in NAMES:
        gc.collect()
        gc.freeze()  # else each look at the objects goes through all that torch has ever imported
        endured[name] = _endure(rows[name].build(place))
    return endured


def _endure(workload) -> Endured:
    num_negative = depth = 0
    with (
        tempfile.TemporaryDirectory() as folder,
        torchmem.install(workload.model, workload.optimizer, dir=folder) as monitor,
    ):
        for step in range(NUM_STEPS):
            workload.step()
            num_negative += sum(_num_negative(row) for row in monitor._native.totals())
            depth = max(depth, monitor._native.stack_depth())
            if step == NUM_WARM_STEPS:
                dist.barrier()
                warm = _sizes(monitor)
        dist.barrier()
        end = _settled_sizes(monitor, warm)
        record = monitor.snapshot()
    workload.close()
    phases = {phase for (phase,) in struct.iter_unpack("<q", record.ring.phases)}
    disabled = [f"{labeler.name}: {labeler.reason}" for labeler in record.labelers if not labeler.up]
    return Endured(warm, end, num_negative, depth, phases, {key: record.counters[key] for key in LOOSE}, disabled)


def _num_negative(row: tuple[int, int, bytes, int, bytes]) -> int:
    _, current, totals, peak, at_peak = row
    cells = struct.unpack(f"<{2 * len(RefType)}q", totals + at_peak)
    return sum(number < 0 for number in (current, peak - current, *cells))


def _settled_sizes(monitor: torchmem.Monitor, warm: Sizes) -> Sizes:
    """Once they are no more than those, or at the deadline."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        sizes = _sizes(monitor)
        if not _grown(warm, sizes) or time.monotonic() > deadline:
            return sizes
        time.sleep(0.01)


def _grown(warm: Sizes, end: Sizes) -> dict[str, int]:
    """By how much more than it may have."""
    allowed = Sizes(0, 0, MAX_MORE_OBJECTS)
    more = {name: getattr(end, name) - getattr(warm, name) - getattr(allowed, name) for name in Sizes._fields}
    return {name: number for name, number in more.items() if number > 0}


def _sizes(monitor: torchmem.Monitor) -> Sizes:
    gc.collect()
    counters = monitor._native.counters()
    num_bytes = sum(row[1] for row in monitor._native.totals())
    return Sizes(counters["num_live_blocks"], num_bytes, len(gc.get_objects()))


@pytest.fixture(scope="module")
def endured(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Endured]]:
    """By rank and row."""
    return run_ranks(endure_all, NUM_RANKS, str(tmp_path_factory.mktemp("rows")), timeout=TIMEOUT_SECONDS)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_grows(endured, name):
    """A long job would fill up with blocks that are gone, or with torchmem's own tables."""
    for by_row in endured:
        assert _grown(by_row[name].warm, by_row[name].end) == {}


@pytest.mark.parametrize("name", NAMES)
def test_nothing_sticks_or_sinks(endured, name):
    """A count would go negative, a phase or a frame outlive its step, or a labeler give up."""
    for by_row in endured:
        row = by_row[name]
        assert (row.num_negative, row.max_stack_depth, row.disabled) == (0, 0, [])
        assert row.loose == dict.fromkeys(LOOSE, 0)
        assert len(row.phases) == 1
