"""Records like those of a small FSDP2 job, made without torch, and writers of them."""

from __future__ import annotations

import contextlib
import struct

import msgspec

from torchmem.model import OUTSIDE, REFTYPE_LABELS, ROOT, RefType
from torchmem.wire import record as wire
from torchmem.wire.store import RankStore

STARTED_AT = 1_700_000_000.0
WRITTEN_AT = STARTED_AT + 120.5
PARTS = ("", ".attention", ".feed_forward", ".attention_norm", ".ffn_norm")
GIB = 1 << 30

USAGE = (RefType.SHARDED_PARAMETER, RefType.SHARDED_GRADIENT, RefType.OPTIMIZER_STATE)
STEP_PEAK = (*USAGE, RefType.ACTIVATION, RefType.TEMPORARY)
ACTIVE_PEAK = (*STEP_PEAK, RefType.UNSHARDED_PARAMETER)


def module_names(num_modules):
    """Labels of ``num_modules`` modules, after the one of what is outside of all of them."""
    layers = (f"layers.{i // len(PARTS)}{PARTS[i % len(PARTS)]}" for i in range(num_modules - 1))
    return [OUTSIDE, ROOT, *layers][: num_modules + 1]


def cells(reftypes, num_modules, scale, rank):
    """One cell for every module and reftype; each amount is found nowhere else in the book."""
    rows = [(0, int(RefType.OTHER))] + [(m, int(r)) for m in range(1, num_modules + 1) for r in reftypes]
    return [wire.Cell(m, r, scale * (1000 + 64 * i) + rank) for i, (m, r) in enumerate(rows)]


def total(rows):
    """Bytes of a book's cells."""
    return sum(row.num_bytes for row in rows)


def make_device(rank=0, num_modules=12, **overrides):
    """Books of one device that agree with themselves, as of a GPU."""
    usage = cells(USAGE, num_modules, 512, rank)
    peak = cells(STEP_PEAK, num_modules, 1024, rank)
    active = cells(ACTIVE_PEAK, num_modules, 2048, rank)
    fields = {
        "name": f"cuda:{rank}",
        "usage": wire.pack_cells(usage),
        "step_peak": wire.pack_cells(peak),
        "active_peak": wire.pack_cells(active),
        "usage_bytes": total(usage),
        "step_peak_bytes": total(peak),
        "peak_bytes": total(peak) + 4096,
        "unattributed_bytes": 8192 + rank,
        "limit_bytes": 80 * GIB,
        "other_bytes": GIB // 2,
        "model": "NVIDIA H100 80GB HBM3",
        "uuid": f"GPU-00000000-0000-0000-0000-{rank:012d}",
        "allocator": wire.Allocator(
            allocated_bytes=total(usage) + 8192 + rank,
            active_bytes=total(usage) + 16384,
            reserved_bytes=4 * total(peak),
            inactive_split_bytes=total(peak),
            num_retries=rank,
        ),
        "checkpoint_peaks": {"save": total(peak) + 2048, "load": total(usage) + 1024},
    }
    return wire.Device(**{**fields, **overrides})


def make_ring(num_steps, device):
    """A ring of steps whose columns fit the books."""
    row = struct.pack("<q", device.usage_bytes) + bytes(8 * (len(REFTYPE_LABELS) - 1))
    return wire.Ring(
        steps=b"".join(struct.pack("<q", step) for step in range(num_steps)),
        ended_at=b"".join(struct.pack("<d", STARTED_AT + step) for step in range(num_steps)),
        phases=bytes(8 * num_steps),
        input_sizes=bytes(8 * num_steps),
        devices=[wire.RingDevice(name=device.name, step_peak=row * num_steps, step_end=row * num_steps)],
    )


def make_record(rank=0, num_modules=12, **overrides):
    """A record; an override replaces the field of that name of the record, its identity, its clock or its device."""
    device = make_device(rank, num_modules, **_taken(overrides, wire.Device))
    identity = {
        "train_job": "llama-pretrain",
        "rank": rank,
        "local_rank": rank,
        "world_size": 8,
        "attempt": f"5f0c7a52-0000-4000-8000-{rank:012d}",
        "pid": 4000 + rank,
        "host": "node-17",
        "start_time": STARTED_AT,
        "engine": "native",
        "torch_version": "2.13.0+cpu",
        "torchmem_version": "0.1.0",
        "mesh": {"dp": rank},
    }
    clock = {"step": 40, "step_seconds": 12.25, "tracker_seconds": 0.0625, "written_at": WRITTEN_AT}
    labelers = [wire.Labeler(name="modules", up=True), wire.Labeler(name="fsdp2", up=False, reason="no such hook")]
    record = {
        "identity": wire.Identity(**{**identity, **_taken(overrides, wire.Identity)}),
        "clock": wire.Clock(**{**clock, **_taken(overrides, wire.Clock)}),
        "modules": module_names(num_modules),
        "reftypes": list(REFTYPE_LABELS),
        "devices": [device],
        "ring": make_ring(16, device),
        "labelers": labelers,
        "counters": {"events": 123456},
    }
    return wire.Record(**{**record, **overrides})


def _taken(overrides, struct_type):
    """Takes the fields of one struct out of the overrides."""
    names = {field.name for field in msgspec.structs.fields(struct_type)}
    return {name: overrides.pop(name) for name in names & overrides.keys()}


@contextlib.contextmanager
def living(directory, *records):
    """Ranks that live, as seen by this process: their records written, their locks held; yields their stores."""
    with contextlib.ExitStack() as stack:
        stores = []
        for record in records:
            store = RankStore(directory, record.identity.train_job, record.identity.rank)
            stack.callback(store.close)
            store.write(wire.encode(record))
            stores.append(store)
        yield stores


def leave(directory, record):
    """The record of a rank that lives no more; returns its path."""
    with living(directory, record) as (store,):
        return store.path
