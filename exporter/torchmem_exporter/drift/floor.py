"""Whether the floor under a job's memory, what is left at the ends of its steps, keeps growing.

Steps come as blocks. The last 32 blocks are kept, and the last 32 of blocks four times as long, and so on, so that
leaks of very different speeds are seen, each in a window that fits it. A window shows a leak when its Theil-Sen slope
makes up a share of the job's peak, each quarter is above the one before, no one step makes up most of the growth, and
the last third grows about as fast as any: caches that fill and fragmentation that saturates do not.

Invariants: bounded: ``NUM_TIERS`` times ``TIER_BLOCKS`` blocks; a saw tooth that has come down once is no leak again.

Known limits: the first tooth of a saw higher than ``MIN_GROWTH`` looks like a leak until it comes down.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import median

import msgspec

from torchmem_exporter.drift.robust import slope, spread

NUM_TIERS = 5
TIER_BLOCKS = 32
MERGED_BLOCKS = 4
"""Blocks of one tier that make one of the next."""
MIN_GROWTH = 0.035
"""Growth over a window that is a leak, relative to the job's usual peak."""

_WINDOWS = (24, 28, 32)
_LATER_WINDOWS = (12, 16, 24, 32)
"""Blocks looked at in tiers whose blocks are merged ones, which have less noise."""
_MIN_QUARTER = 0.12
"""Least that a quarter is above the one before, relative to the growth over the window; steady growth has 0.25."""
_MAX_QUARTER = 0.6
"""Most of the rise between quarters that one of them may make up; steady growth has a third."""
_MIN_STEADY = 0.6
"""Least speed of the last third, relative to the fastest."""
_MIN_CLEAR = 4.0
"""How many times the spread about the line the growth must be."""
_END_BLOCKS = 3
_HOLD_BLOCKS = 8
"""Blocks for which a leak found stays one, lest noise make it flicker."""
_SMOOTHED_BLOCKS = 7
_FORGET = 1 - 1 / 512
"""What is left after each block of the memory of a rise that came down."""
_ABOVE_RECOVERED = 1.5
"""How many times a rise that came down the growth must be."""


class Tier(msgspec.Struct):
    """Blocks of one length, oldest first."""

    positions: list[float] = []
    """Step in the middle of each."""
    floors: list[float] = []
    waiting: list[tuple[float, float]] = []
    """Blocks of the tier below that will be the next one here."""
    num_held: int = 0
    """Blocks for which a leak that was found still counts."""
    slope: float = 0.0
    """Bytes a step, of the leak that was found."""

    def add(self, position: float, floor: float) -> None:
        """Takes a block, and lets go of the oldest."""
        self.positions.append(position)
        self.floors.append(floor)
        if len(self.positions) > TIER_BLOCKS:
            del self.positions[0], self.floors[0]

    def look(self, windows: Sequence[int], min_growth: float) -> None:
        """Looks for a leak of at least so many bytes over a window."""
        self.num_held = max(0, self.num_held - 1)
        for num_blocks in windows:
            if num_blocks > len(self.positions):
                break
            found = steady_growth(self.positions[-num_blocks:], self.floors[-num_blocks:], min_growth)
            if found is not None:
                self.slope, self.num_held = found, _HOLD_BLOCKS
                break


class Floor(msgspec.Struct):
    """The floor of one device."""

    scale: float
    """The job's usual step peak, in bytes."""
    tiers: list[Tier] = []
    recent: list[float] = []
    low: float = 0.0
    high: float = 0.0
    recovered: float = 0.0
    """The greatest rise that came down again, in bytes, slowly forgotten."""

    def add(self, position: float, floor: float) -> None:
        """Takes a block.

        Args:
            position: step in the middle of the block.
            floor: bytes left at its steps' ends, the lower ones.
        """
        self._note_recovery(floor)
        self._add_to(0, position, floor)

    @property
    def is_growing(self) -> bool:
        """Whether any window shows a leak."""
        return any(tier.num_held for tier in self.tiers)

    @property
    def slope(self) -> float | None:
        """Bytes a step: of the leak, else of the last blocks; None before there are enough."""
        for tier in self.tiers:
            if tier.num_held:
                return tier.slope
        if not self.tiers or len(self.tiers[0].positions) < _WINDOWS[0]:
            return None
        return slope(self.tiers[0].positions, self.tiers[0].floors)

    def _add_to(self, number: int, position: float, floor: float) -> None:
        if number == len(self.tiers):
            self.tiers.append(Tier())
        tier = self.tiers[number]
        tier.add(position, floor)
        min_growth = max(MIN_GROWTH * self.scale, _ABOVE_RECOVERED * self.recovered)
        tier.look(_LATER_WINDOWS if number else _WINDOWS, min_growth)
        if number + 1 == NUM_TIERS:
            return
        tier.waiting.append((position, floor))
        if len(tier.waiting) == MERGED_BLOCKS:
            merged = sum(p for p, _ in tier.waiting) / MERGED_BLOCKS, sorted(f for _, f in tier.waiting)[1]
            tier.waiting = []
            self._add_to(number + 1, *merged)

    def _note_recovery(self, floor: float) -> None:
        """Learns how far the floor rises without being a leak: as far as it has come down again."""
        self.recent.append(floor)
        if len(self.recent) <= _SMOOTHED_BLOCKS:
            self.low = self.high = median(self.recent)
            return
        del self.recent[0]
        now = median(self.recent)
        self.high = max(self.high, now)
        came_down = min(self.high - self.low, self.high - now)
        self.recovered = max(_FORGET * self.recovered, came_down)
        if now < self.low:
            self.low = self.high = now


def steady_growth(xs: Sequence[float], ys: Sequence[float], min_growth: float) -> float | None:
    """The slope of a window that grows steadily by at least so much; None of any other."""
    size = len(xs) // 4
    quarters = [median(ys[start : start + size]) for start in range(len(xs) - 4 * size, len(xs), size)]
    rises = [b - a for a, b in pairwise(quarters)]
    risen = quarters[-1] - quarters[0]
    # Quarters' middles are three quarters of a window apart: most windows of most jobs end here, at little cost.
    if risen < min_growth / 2 or min(rises) <= 0 or max(rises) > _MAX_QUARTER * risen:
        return None
    whole = slope(xs, ys)
    ends = median(ys[-_END_BLOCKS:]) - median(ys[:_END_BLOCKS])
    growth = min(whole * (xs[-1] - xs[0]), ends * (len(ys) - 1) / (len(ys) - _END_BLOCKS))
    if growth < min_growth or min(rises) < _MIN_QUARTER * growth:
        return None
    third = len(xs) // 3
    speeds = [slope(xs[start : start + third], ys[start : start + third]) for start in (-3 * third, -2 * third)]
    if slope(xs[-third:], ys[-third:]) < _MIN_STEADY * max(speeds):
        return None
    residuals = [y - whole * x for x, y in zip(xs, ys, strict=True)]
    return whole if growth > _MIN_CLEAR * spread(residuals) else None
