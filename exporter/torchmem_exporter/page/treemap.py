"""A squarified treemap: sizes to rectangles whose areas are in proportion, as square as they can be.

Invariants: pure; rectangles lie within the box, overlap nowhere and fill it, up to rounding; a size of zero has an
empty one. Source: Bruls, Huizing and van Wijk, "Squarified Treemaps", 2000.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Box(NamedTuple):
    """A rectangle; its origin is the corner at the top left."""

    x: float
    y: float
    width: float
    height: float


def squarified(sizes: Sequence[float], box: Box) -> list[Box]:
    """One rectangle for each size, in their order.

    Args:
        sizes: none negative; squarest where the largest come first.
        box: what they fill; nothing is drawn where it or all of the sizes are empty.
    """
    total = sum(sizes)
    if total <= 0 or box.width <= 0 or box.height <= 0:
        return [Box(box.x, box.y, 0.0, 0.0) for _ in sizes]
    scale = box.width * box.height / total
    areas = [size * scale for size in sizes]
    placed: list[Box] = []
    start = 0
    while start < len(areas):
        end = _row_end(areas, start, min(box.width, box.height))
        row, box = _placed(areas[start:end], box, is_last=not any(areas[end:]))
        placed += row
        start = end
    return placed


def _row_end(areas: Sequence[float], start: int, side: float) -> int:
    """Where the row that begins at ``start`` ends: before the area that would make it less square."""
    held = largest = areas[start]
    smallest = areas[start]
    worst = _worst(held, smallest, largest, side)
    for end in range(start + 1, len(areas)):
        area = areas[end]
        held, smallest, largest = held + area, min(smallest, area), max(largest, area)
        now = _worst(held, smallest, largest, side)
        if now > worst:
            return end
        worst = now
    return len(areas)


def _worst(held: float, smallest: float, largest: float, side: float) -> float:
    """The largest ratio of sides in a row of so much area along a side."""
    if smallest <= 0 or side <= 0:
        return float("inf")
    thickness = held / side
    return max(largest / thickness**2, thickness**2 / smallest)


def _placed(areas: Sequence[float], box: Box, *, is_last: bool) -> tuple[list[Box], Box]:
    """The rectangles of one row along the box's shorter side, and what is left of the box."""
    is_column = box.width >= box.height
    side, depth = (box.height, box.width) if is_column else (box.width, box.height)
    held = sum(areas)
    thickness = depth if is_last else min(depth, held / side if side > 0 else 0.0)
    row, offset = [], 0.0
    for area in areas:
        length = side * (area / held) if held > 0 else 0.0
        length = min(length, side - offset)
        if is_column:
            row.append(Box(box.x, box.y + offset, thickness, length))
        else:
            row.append(Box(box.x + offset, box.y, length, thickness))
        offset += length
    if is_column:
        return row, Box(box.x + thickness, box.y, box.width - thickness, box.height)
    return row, Box(box.x, box.y + thickness, box.width, box.height - thickness)
