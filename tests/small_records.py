"""A small record whose numbers are easy to check, for the tests of the wire and of the command line."""

from __future__ import annotations

import array

from torchmem.model import OUTSIDE, REFTYPE_LABELS, ROOT, RefType
from torchmem.wire import record as wire

MIB = 1 << 20
MODULES = [OUTSIDE, ROOT, "layers.*", "layers.*.attention", "head"]
PEAK = [
    wire.Cell(3, RefType.ACTIVATION, 6 * MIB),
    wire.Cell(2, RefType.ACTIVATION, 4 * MIB),
    wire.Cell(2, RefType.PARAMETER, 3 * MIB),
    wire.Cell(4, RefType.PARAMETER, 2 * MIB),
    wire.Cell(0, RefType.OTHER, 1 * MIB),
]
USAGE = [wire.Cell(2, RefType.PARAMETER, 3 * MIB), wire.Cell(4, RefType.PARAMETER, 2 * MIB)]


def identity(**changes):
    """Rank 0 of 2 of the job ``train``, with changes."""
    return wire.Identity(
        **{
            "train_job": "train",
            "rank": 0,
            "local_rank": 0,
            "world_size": 2,
            "attempt": "7d4ad1c4-6f6b-4b52-9a5e-3f2a8c0f7f5e",
            "pid": 4321,
            "host": "node-1",
            "start_time": 1_700_000_000.0,
            "engine": "native",
            "torch_version": "2.13.0",
            "torchmem_version": "0.1.0",
            "mesh": {"dp": 1},
            **changes,
        }
    )


def clock(**changes):
    """After step 412, with changes."""
    return wire.Clock(
        **{"step": 412, "step_seconds": 61.5, "tracker_seconds": 0.25, "written_at": 1_700_000_100.0, **changes}
    )


def device(**changes):
    """``cuda:0`` with 16 MiB at the peak of a step and 5 MiB at its end, with changes."""
    return wire.Device(
        **{
            "name": "cuda:0",
            "usage": wire.pack_cells(USAGE),
            "step_peak": wire.pack_cells(PEAK),
            "active_peak": wire.pack_cells(PEAK[:2]),
            "usage_bytes": 5 * MIB,
            "step_peak_bytes": 16 * MIB,
            "peak_bytes": 17 * MIB,
            "unattributed_bytes": MIB // 2,
            "limit_bytes": 1024 * MIB,
            "allocator": wire.Allocator(allocated_bytes=5 * MIB, num_ooms=1),
            **changes,
        }
    )


def ring(num_steps=2):
    """A ring of steps that holds numbers only where they are easy to make."""
    row = array.array("q", range(len(REFTYPE_LABELS))).tobytes()
    return wire.Ring(
        steps=array.array("q", range(num_steps)).tobytes(),
        ended_at=array.array("d", [1_700_000_000.0 + step for step in range(num_steps)]).tobytes(),
        phases=array.array("q", [7] * num_steps).tobytes(),
        input_sizes=array.array("q", [512] * num_steps).tobytes(),
        devices=[wire.RingDevice(name="cuda:0", step_peak=row * num_steps, step_end=row * num_steps)],
    )


def record(**changes):
    """The whole record, with changes."""
    return wire.Record(
        **{
            "identity": identity(),
            "clock": clock(),
            "modules": MODULES,
            "reftypes": list(REFTYPE_LABELS),
            "devices": [device()],
            "ring": ring(),
            "labelers": [wire.Labeler(name="fsdp2", up=False, reason="KeyError: 'x'")],
            "counters": {"num_events": 5},
            **changes,
        }
    )
