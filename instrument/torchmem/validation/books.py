"""Reads a record's ring for comparison with other counts.

Invariant: torch-free; reftypes that hold nothing are absent.
"""

from __future__ import annotations

import struct

from torchmem.wire.record import Record

Composition = dict[str, int]
"""Bytes by reftype label."""


def step_peaks(record: Record, device: str = "cpu") -> dict[int, Composition]:
    """The device's composition at the peak of each step still in the ring, by step number."""
    return _rows(record, [d.step_peak for d in record.ring.devices if d.name == device])


def step_ends(record: Record, device: str = "cpu") -> dict[int, Composition]:
    """The device's composition at the end of each step still in the ring, by step number."""
    return _rows(record, [d.step_end for d in record.ring.devices if d.name == device])


def _rows(record: Record, columns: list[bytes]) -> dict[int, Composition]:
    steps = [number for (number,) in struct.iter_unpack("<q", record.ring.steps)]
    if not columns:
        return {step: {} for step in steps}
    rows = struct.iter_unpack(f"<{len(record.reftypes)}q", columns[0])
    return {
        step: {label: num_bytes for label, num_bytes in zip(record.reftypes, row, strict=True) if num_bytes}
        for step, row in zip(steps, rows, strict=True)
    }
