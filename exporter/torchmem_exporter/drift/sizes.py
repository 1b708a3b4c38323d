"""What a step holds because of the size of its input: a curve through medians, learned from ordinary steps.

Invariants: robust: each knot is a median of many steps; sizes that do not vary, or are mostly unknown, make no curve;
a size above those seen by half their range explains no more than one at that edge, so that inputs longer than any
before are a change of the job and not explained away; one below those seen explains no less than the least of them,
so that a guess of how little it needs makes no alarm.

Known limits: one size a step; what depends on a batch in another way than by its size counts as noise.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from statistics import median

import msgspec

from torchmem_exporter.drift.robust import slope

MAX_KNOTS = 16
_MIN_KNOTS = 3
_KNOT_STEPS = 12
"""Steps in a knot, at least."""
_MIN_KNOWN = 0.9
"""Share of the steps whose size must be known."""
_MIN_RANGE = 0.01
"""Sizes that differ by less, relative to their median, are as good as equal."""
_MARGIN = 0.5
"""How far above the sizes seen the curve goes on, in their range."""


class Curve(msgspec.Struct, kw_only=True, frozen=True):
    """Bytes by size of the input: linear between knots, and going on past them for a margin."""

    sizes: list[float]
    """Of the knots, increasing."""
    num_bytes: list[float]
    first_slope: float
    """Bytes for each unit of size, below the first knot: that of the knots next to it."""
    last_slope: float
    """Likewise past the last."""
    reference: float
    """What the curve says of the usual size."""
    lowest: float
    highest: float
    """Past these sizes nothing more, or less, is explained."""

    def explained(self, size: float) -> float:
        """Bytes that an input of this size costs more than one of the usual size; 0 if the size is unknown."""
        if not size > 0:
            return 0.0
        return self._at(min(max(size, self.lowest), self.highest)) - self.reference

    def _at(self, size: float) -> float:
        sizes, num_bytes = self.sizes, self.num_bytes
        if size <= sizes[0]:
            return num_bytes[0] + self.first_slope * (size - sizes[0])
        if size >= sizes[-1]:
            return num_bytes[-1] + self.last_slope * (size - sizes[-1])
        right = bisect_right(sizes, size)
        x0, x1, y0, y1 = sizes[right - 1], sizes[right], num_bytes[right - 1], num_bytes[right]
        return y0 + (y1 - y0) * (size - x0) / (x1 - x0)


def varies(sizes: Sequence[float]) -> bool:
    """Whether the sizes are known and differ enough to explain anything."""
    known = [size for size in sizes if size > 0]
    if not known or len(known) < _MIN_KNOWN * len(sizes):
        return False
    known.sort()
    return known[-1 - len(known) // 20] - known[len(known) // 20] > _MIN_RANGE * median(known)


def fit(sizes: Sequence[float], num_bytes: Sequence[float]) -> Curve | None:
    """The curve through steps of these sizes; None when they do not vary enough."""
    if not varies(sizes):
        return None
    known = sorted((size, held) for size, held in zip(sizes, num_bytes, strict=True) if size > 0)
    knots = _knots(known)
    if len(knots) < _MIN_KNOTS:
        return None
    xs, ys = [x for x, _ in knots], [y for _, y in knots]
    low, high = known[0][0], known[-1][0]
    near = max(_MIN_KNOTS, len(knots) // 3)
    bare = Curve(
        sizes=xs,
        num_bytes=ys,
        first_slope=slope(xs[:near], ys[:near]),
        last_slope=slope(xs[-near:], ys[-near:]),
        reference=0.0,
        lowest=low,
        highest=high + _MARGIN * (high - low),
    )
    return msgspec.structs.replace(bare, reference=bare.explained(median([size for size, _ in known])))


def _knots(known: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Medians of groups of steps of similar size, of about as many steps each; equal sizes stay together."""
    smallest = max(_KNOT_STEPS, len(known) // MAX_KNOTS)
    groups: list[list[tuple[float, float]]] = [[]]
    for size, held in known:
        if len(groups[-1]) >= smallest and size > groups[-1][-1][0]:
            groups.append([])
        groups[-1].append((size, held))
    if len(groups) > 1 and len(groups[-1]) < smallest:
        rest = groups.pop()
        groups[-1] += rest
    return [(median([size for size, _ in group]), median([held for _, held in group])) for group in groups]
