"""Readings for the tests of ``torchmem watch``: ranks whose steps drift as told, and readings judged as told."""

from __future__ import annotations

import array
import random
import time

import msgspec

import records
import small_records
from torchmem.model import REFTYPE_LABELS, Phase, RefType
from torchmem.watching.look import DeviceLook, Look, RankLook
from torchmem.wire import record as wire
from torchmem.wire.ranks import RankView
from torchmem_exporter.drift.drift import Judgement
from torchmem_exporter.drift.judge import Verdict

GIB, MIB = 1 << 30, 1 << 20
NOW = 1_700_000_101.0
STEP_SECONDS = 0.5
RING_STEPS = 512
LEAKING_MODULE = 18
LEAK_BYTES = 16 * MIB
"""A step."""


def judgement(**changes):
    """Of a device on which all is as usual, with changes."""
    fields = {
        "baseline_bytes": 16 * MIB,
        "drift_ratio": 0.001,
        "is_level_drifting": False,
        "growth_bytes_per_second": 0.0,
        "is_floor_growing": False,
        "exhausted_at": None,
        "num_resets": {},
    }
    return Judgement(**{**fields, **changes})


def device_look(device=None, growers=(), forecast_drift_ratio=None, **changes):
    """A device that was judged so."""
    return DeviceLook(
        device or small_records.device(allocator=wire.Allocator()),
        Verdict(judgement(**changes), growers),
        forecast_drift_ratio,
    )


def rank_look(rank=0, state="running", devices=None, **changes):
    """A rank in that state, with these devices; changes are of its record."""
    devices = (device_look(),) if devices is None else tuple(devices)
    identity = changes.pop("identity", small_records.identity(rank=rank))
    changes.setdefault("labelers", [])
    record = small_records.record(identity=identity, devices=[one.device for one in devices], **changes)
    return RankLook(RankView(record, state, f"{identity.train_job}/rank-{rank}.record"), devices)


def look(*ranks, **changes):
    """A reading of those ranks."""
    return Look(**{"directory": "/dev/shm/x", "taken_at": NOW, "ranks": ranks, **changes})


def ring(first, peaks, ends, device="cuda:0", phases=None, ended_at=NOW):
    """A ring of steps with these totals, the last of which ended then."""
    rest = [0] * (len(REFTYPE_LABELS) - 1)

    def rows(values):
        return array.array("q", [part for value in values for part in (value, *rest)]).tobytes()

    num_steps = len(peaks)
    return wire.Ring(
        steps=array.array("q", range(first, first + num_steps)).tobytes(),
        ended_at=array.array("d", [ended_at - STEP_SECONDS * i for i in reversed(range(num_steps))]).tobytes(),
        phases=array.array("q", phases or [0] * num_steps).tobytes(),
        input_sizes=bytes(8 * num_steps),
        devices=[wire.RingDevice(name=device, step_peak=rows(peaks), step_end=rows(ends))],
    )


def trained(rank, step, *, leaks_from=None):
    """The record of a rank after so many steps, just written; it may leak activations of one module from a step on."""
    plain = records.make_device(rank, num_modules=40)
    scale = 60 * GIB // plain.step_peak_bytes

    def leaked(number):
        return 0 if leaks_from is None else max(0, number - leaks_from) * LEAK_BYTES

    def held(book, extra):
        cells = [cell._replace(num_bytes=cell.num_bytes * scale) for cell in wire.unpack_cells(book)]
        key = (LEAKING_MODULE, int(RefType.ACTIVATION))
        before = sum(cell.num_bytes for cell in cells if cell[:2] == key)
        rest = [cell for cell in cells if cell[:2] != key]
        return [*rest, wire.Cell(*key, before + extra)] if before + extra else rest

    last = leaked(step - 1)
    peak, usage = held(plain.step_peak, last), held(plain.usage, last)
    peak_bytes, usage_bytes = records.total(peak), records.total(usage)
    first = max(0, step - RING_STEPS)
    noise = [random.Random(rank * 100_003 + number).randrange(16 * MIB) for number in range(first, step - 1)]
    less = [last - leaked(number) for number in range(first, step)]
    made = records.make_record(
        rank,
        num_modules=40,
        step_peak=wire.pack_cells(peak),
        usage=wire.pack_cells(usage),
        step_peak_bytes=peak_bytes,
        usage_bytes=usage_bytes,
        peak_bytes=peak_bytes,
        labelers=[],
        step=step,
        written_at=time.time(),
    )
    peaks = [peak_bytes - a - b for a, b in zip(less, [*noise, 0], strict=True)]
    ends = [usage_bytes - one for one in less]
    return msgspec.structs.replace(made, ring=ring(first, peaks, ends, f"cuda:{rank}", ended_at=time.time()))


def apart(num_steps, every):
    """Phases of steps of which one in so many holds a checkpoint."""
    return [int(Phase.CHECKPOINT) if number % every == every - 1 else 0 for number in range(num_steps)]
