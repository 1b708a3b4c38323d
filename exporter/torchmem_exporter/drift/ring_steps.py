"""The steps of a record's ring, by device, as numbers.

Invariants: only steps after the last one known are unpacked, so that a record that is read often costs little.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from torchmem.wire.record import Ring


class Step(NamedTuple):
    """One step of one device."""

    number: int
    ended_at: float
    """Unix seconds."""
    phases: int
    """``torchmem.model.Phase`` flags."""
    peak_bytes: int
    end_bytes: int
    size: float = 0
    """Of its input, in any unit; 0 if unknown."""


def steps_after(ring: Ring, last_step: int, num_reftypes: int, sizes: Sequence[float] = ()) -> dict[str, list[Step]]:
    """The steps after one, oldest first, by the device's name.

    Args:
        ring: of a record that was decoded, so that its columns fit.
        last_step: number of the last step known; a number below the first gives all.
        num_reftypes: of the record.
        sizes: of the inputs, one for each step of the ring; empty if unknown.
    """
    numbers = memoryview(ring.steps).cast("q").tolist()
    start = bisect_right(numbers, last_step)
    if start == len(numbers) or not num_reftypes:  # a row of nothing says nothing
        return {device.name: [] for device in ring.devices}
    ended = memoryview(ring.ended_at).cast("d")[start:].tolist()
    phases = memoryview(ring.phases).cast("q")[start:].tolist()
    known = list(sizes[start:]) if sizes else [0] * len(ended)
    return {
        device.name: [
            Step(*row)
            for row in zip(
                numbers[start:],
                ended,
                phases,
                _sums(device.step_peak, start, num_reftypes),
                _sums(device.step_end, start, num_reftypes),
                known,
                strict=True,
            )
        ]
        for device in ring.devices
    }


def _sums(rows: bytes, start: int, num_reftypes: int) -> list[int]:
    """Of each row from one on the sum of its values."""
    values = memoryview(rows).cast("q")[start * num_reftypes :].tolist()
    return [sum(values[i : i + num_reftypes]) for i in range(0, len(values), num_reftypes)]
