"""Reads torchmem's books out of a record, for comparison with other counts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchmem.model import RefType
from torchmem.validation.books import Composition, step_ends, step_peaks
from torchmem.wire.record import unpack_cells

if TYPE_CHECKING:
    from torchmem.wire.record import Device, Record

__all__ = ["Composition", "cpu", "from_display_names", "step_ends", "step_peaks", "usage"]


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


def from_display_names(composition: dict[str, int]) -> Composition:
    """A composition by torch's names, by torchmem's labels; names that only torch has are dropped."""
    labels = {reftype.display_name: reftype.label for reftype in RefType}
    return {labels[name]: num_bytes for name, num_bytes in composition.items() if name in labels}
