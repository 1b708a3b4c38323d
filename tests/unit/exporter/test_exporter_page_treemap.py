"""The treemap's layout: areas, bounds, overlaps; and that labels are only where they fit."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchmem_exporter.page.detail import Group, Held
from torchmem_exporter.page.drawing import treemap
from torchmem_exporter.page.treemap import Box, squarified

SIZES = st.lists(st.integers(0, 1 << 62), max_size=60)
SIDES = st.floats(1, 5000)
NEGLIGIBLE = 1e-6


@given(SIZES, SIDES, SIDES)
def test_areas_are_in_proportion(sizes, width, height):
    """A picture would show a small holder as a large one."""
    boxes = squarified(sizes, Box(3, 5, width, height))
    assert len(boxes) == len(sizes)
    for size, box in zip(sizes, boxes, strict=True):
        share = size / sum(sizes) if any(sizes) else 0
        assert math.isclose(box.width * box.height, share * width * height, rel_tol=1e-6, abs_tol=NEGLIGIBLE * width)


@given(SIZES, SIDES, SIDES)
def test_rectangles_stay_within_and_apart(sizes, width, height):
    """A rectangle would hide another, or hang out of the picture."""
    boxes = [box for box in squarified(sizes, Box(0, 0, width, height)) if box.width > 0 and box.height > 0]
    slack = NEGLIGIBLE * max(width, height)
    for box in boxes:
        assert min(box.x, box.y) >= 0
        assert box.x + box.width <= width + slack
        assert box.y + box.height <= height + slack
    for i, a in enumerate(boxes):
        for b in boxes[:i]:
            across = min(a.x + a.width, b.x + b.width) - max(a.x, b.x)
            down = min(a.y + a.height, b.y + b.height) - max(a.y, b.y)
            assert min(across, down) <= slack


def test_equal_sizes_are_near_squares():
    """Slivers nobody can compare would be drawn."""
    boxes = squarified([1] * 12, Box(0, 0, 400, 300))
    assert {round(box.width / box.height, 3) for box in boxes} == {1.0}


@pytest.mark.parametrize("box", [Box(0, 0, 0, 10), Box(0, 0, 10, 0)])
def test_no_room_draws_nothing(box):
    """A division by zero would cost the page."""
    assert squarified([1, 2], box) == [Box(0, 0, 0, 0)] * 2


def test_names_are_escaped_in_the_drawing():
    """A module's name could end the drawing and begin a script."""
    drawn = str(treemap([Group("<b>", 10, (Held("<script>", 10),))], 10))
    assert "<script>" not in drawn
    assert drawn.count("&lt;script&gt;") == 2
