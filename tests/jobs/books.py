"""Reads torchmem's books out of a record, for comparison with other counts."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from torchmem.model import RefType
from torchmem.wire.record import unpack_cells

if TYPE_CHECKING:
    from torchmem.wire.record import Device, Record, RingDevice

Composition = dict[str, int]
"""Bytes by reftype label; reftypes that hold nothing are absent."""


def cpu(record: Record) -> Device:
    """The books of the CPU."""
    return next(device for device in record.devices if device.name == "cpu")


def usage(record: Record) -> Composition:
    """What is alive at the end of the last step, over all modules."""
    held: Composition = {}
    for cell in unpack_cells(cpu(record).usage):
        label = record.reftypes[cell.reftype]
        held[label] = held.get(label, 0) + cell.num_bytes
    return held


def step_peaks(record: Record) -> dict[int, Composition]:
    """The CPU's composition at the peak of each step still in the ring, by step number."""
    return _rows(record, [device.step_peak for device in _cpu_ring(record)])


def step_ends(record: Record) -> dict[int, Composition]:
    """The CPU's composition at the end of each step still in the ring, by step number."""
    return _rows(record, [device.step_end for device in _cpu_ring(record)])


def from_display_names(composition: dict[str, int]) -> Composition:
    """A composition by torch's names, by torchmem's labels; names that only torch has are dropped."""
    labels = {reftype.display_name: reftype.label for reftype in RefType}
    return {labels[name]: num_bytes for name, num_bytes in composition.items() if name in labels}


def _cpu_ring(record: Record) -> list[RingDevice]:
    return [device for device in record.ring.devices if device.name == "cpu"]


def _rows(record: Record, columns: list[bytes]) -> dict[int, Composition]:
    (packed,) = columns
    steps = [number for (number,) in struct.iter_unpack("<q", record.ring.steps)]
    rows = struct.iter_unpack(f"<{len(record.reftypes)}q", packed)
    return {
        step: {label: num_bytes for label, num_bytes in zip(record.reftypes, row, strict=True) if num_bytes}
        for step, row in zip(steps, rows, strict=True)
    }
