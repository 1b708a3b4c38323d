"""The last steps of one device as columns of a chart.

Invariants: pure; never more than ``MAX_COLUMNS`` columns, each of at least one step, in the steps' order; no peak, no
checkpoint, evaluation or failed allocation is lost where one column stands for several steps; the parts of a column
add up to its peak; whatever numbers a ring holds, none is negative.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from torchmem.model import Phase
from torchmem.wire.record import Record
from torchmem_exporter.drift.ring_steps import Step, steps_after
from torchmem_exporter.page.palette import order_of

MAX_COLUMNS = 96
_TICKS = 4
_BEFORE_ALL = -(1 << 63) - 1
_KNOWN_PHASES = int(Phase.FORWARD | Phase.BACKWARD | Phase.OPTIMIZER | Phase.CHECKPOINT | Phase.EVAL)


class Column(NamedTuple):
    """Some steps in a row, most often one."""

    first_step: int
    last_step: int
    peak_bytes: int
    """The highest of their step peaks."""
    parts: tuple[int, ...]
    """What that was made of, by the timeline's reftypes."""
    end_bytes: int
    """The least that was left at the end of one of them."""
    phases: Phase
    """What any of them held."""
    num_ooms: int
    """Allocations that failed during them."""


@dataclass(frozen=True)
class Timeline:
    """What a chart of the last steps shows."""

    reftypes: tuple[str, ...]
    """Those that hold anything, in the order in which they are stacked."""
    columns: tuple[Column, ...]
    steps: tuple[Step, ...]
    """All of them, oldest first."""

    @property
    def top_bytes(self) -> int:
        """The highest value."""
        return max((column.peak_bytes for column in self.columns), default=0)


def timeline(record: Record, device: str) -> Timeline:
    """The steps in a record's ring, of one device by its name."""
    rows = _rows(record, device)
    # Their numbers cannot be told from a hostile record's: all steps are wanted, in whatever order they are.
    found = steps_after(record.ring, _BEFORE_ALL, len(record.reftypes)).get(device, []) if rows else []
    steps = [
        step._replace(peak_bytes=sum(row), end_bytes=max(0, step.end_bytes))
        for step, row in zip(found, rows, strict=False)
    ]
    held = sorted({i for row in rows for i, value in enumerate(row) if value}, key=lambda i: (_order(record, i), i))
    ooms = [event.step + 1 for event in record.oom_events if event.device == device]
    columns = tuple(
        _column(steps[start:end], [tuple(row[i] for i in held) for row in rows[start:end]], ooms)
        for start, end in _cuts(len(steps))
    )
    return Timeline(tuple(record.reftypes[i] for i in held), _with_last_ooms(columns, ooms), tuple(steps))


def ticks(top_bytes: float) -> list[int]:
    """Values worth a line across a chart: powers of two times as few bytes as leave at most ``_TICKS`` of them."""
    distance = 1
    while top_bytes / distance > _TICKS:
        distance *= 2
    return [distance * i for i in range(1, _TICKS + 1) if distance * i <= top_bytes]


def _order(record: Record, reftype: int) -> int:
    return order_of(record.reftypes[reftype])


def _rows(record: Record, device: str) -> list[tuple[int, ...]]:
    """Of each step of the ring the peak's parts by the record's reftypes."""
    width = len(record.reftypes)
    for ring in record.ring.devices:
        if ring.name == device and width:
            values = memoryview(ring.step_peak).cast("q").tolist()
            return [tuple(max(0, v) for v in values[i : i + width]) for i in range(0, len(values), width)]
    return []


def _cuts(num_steps: int) -> list[tuple[int, int]]:
    """Where each column begins and ends; their lengths differ by one at most."""
    num_columns = min(num_steps, MAX_COLUMNS)
    edges = [num_steps * i // num_columns for i in range(num_columns + 1)] if num_columns else []
    return list(pairwise(edges))


def _column(steps: Sequence[Step], rows: Sequence[tuple[int, ...]], ooms: Sequence[int]) -> Column:
    parts = max(rows, key=sum)
    phases = Phase.OTHER
    for step in steps:
        phases |= Phase(step.phases & _KNOWN_PHASES)
    first, last = steps[0].number, steps[-1].number
    return Column(
        first_step=first,
        last_step=last,
        peak_bytes=sum(parts),
        parts=parts,
        end_bytes=min(step.end_bytes for step in steps),
        phases=phases,
        num_ooms=sum(first <= step <= last for step in ooms),
    )


def _with_last_ooms(columns: tuple[Column, ...], ooms: Sequence[int]) -> tuple[Column, ...]:
    """Failures in the step that never finished belong to the last column."""
    if not columns:
        return columns
    last = columns[-1]
    num_later = len(ooms) - bisect_left(sorted(ooms), last.last_step + 1)
    return (*columns[:-1], last._replace(num_ooms=last.num_ooms + num_later))
