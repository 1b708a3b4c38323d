"""The page's colours: told apart by everybody, and text on them readable."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

import torchmem_exporter
from torchmem.model import REFTYPE_LABELS
from torchmem_exporter.page.palette import INK, STYLES, css, style_of

LEAST_CONTRAST = 4.5
"""WCAG 2, level AA, of text."""
LEAST_DISTANCE = 15.0
"""In CIE Lab; about 2 is the least that can be seen side by side."""
# Viénot, Brettel and Mollon 1999 for two kinds, in linear RGB; the third from Brettel's planes, simplified.
SEEN_BY = {
    "everybody": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopes": ((0.11238, 0.88762, 0), (0.11238, 0.88762, 0), (0.00401, -0.00401, 1)),
    "deuteranopes": ((0.29275, 0.70725, 0), (0.29275, 0.70725, 0), (-0.02234, 0.02234, 1)),
    "tritanopes": ((1, 0.14461, -0.14461), (0, 0.85924, 0.14076), (0, 0.85924, 0.14076)),
}
STYLE = (Path(torchmem_exporter.__file__).parent / "page" / "page.css").read_text()


def linear(colour):
    colour = colour.lstrip("#")
    colour = "".join(c * 2 for c in colour) if len(colour) == 3 else colour
    parts = [int(colour[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    return [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]


def luminance(colour):
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear(colour), strict=True))


def contrast(a, b):
    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def lab(rgb):
    matrix = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
    white = (0.9505, 1.0, 1.089)
    xyz = [sum(m * max(0, v) for m, v in zip(row, rgb, strict=True)) / w for row, w in zip(matrix, white, strict=True)]
    x, y, z = (v ** (1 / 3) if v > 0.008856 else 7.787 * v + 16 / 116 for v in xyz)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def themes():
    """The style sheet's colours by name, light and dark."""
    return [dict(re.findall(r"--(\w+):(#\w+)", block)) for block in re.findall(r":root\{(.*?)\}", STYLE)]


def test_each_reftype_has_a_look_of_its_own():
    """Two reftypes would look the same in treemap, timeline and legend."""
    assert set(STYLES) == set(REFTYPE_LABELS)
    assert len({(style.colour, style.texture) for style in STYLES.values()}) == len(STYLES)
    assert all(f".{style.name}{{fill:" in css() for style in STYLES.values())
    assert style_of("of the future") == STYLES["other"]


@pytest.mark.parametrize("viewer", SEEN_BY)
def test_colours_can_be_told_apart(viewer):
    """A colour-blind operator would take gradients for activations."""
    seen = {
        colour: lab([sum(m * v for m, v in zip(row, linear(colour), strict=True)) for row in SEEN_BY[viewer]])
        for colour in {style.colour for style in STYLES.values()}
    }
    near = {
        (a, b): round(distance, 1)
        for a, b in itertools.combinations(sorted(seen), 2)
        if (distance := sum((x - y) ** 2 for x, y in zip(seen[a], seen[b], strict=True)) ** 0.5) < LEAST_DISTANCE
    }
    assert near == {}


def test_text_on_colours_can_be_read():
    """A treemap's labels would be too faint."""
    faint = {style.name for style in STYLES.values() if contrast(INK, style.colour) < LEAST_CONTRAST}
    assert faint == set()


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_text_can_be_read_in_the_light_and_in_the_dark(theme):
    """Text would be too faint in one of the two."""
    colours = themes()[theme]
    inks = ("ink", "quiet", "link", "good", "warn", "bad")
    faint = [(i, g) for i in inks for g in ("ground", "panel") if contrast(colours[i], colours[g]) < LEAST_CONTRAST]
    assert faint == []
