"""A colour and a texture for each reftype, the same wherever the page shows one.

What belongs together has one colour and differs by texture: eighteen colours cannot be told apart, by the colour-blind
least of all. The colours are those of Okabe and Ito, moved apart until each kind of the colour-blind can tell any two,
and light enough for dark text, so that they serve dark and light alike.

Invariants: no two reftypes share both colour and texture; a reftype that is not known here looks like ``other``.
"""

from __future__ import annotations

from typing import NamedTuple

from torchmem.model import RefType

INK = "#111111"
"""Text on any of the colours."""
TILE = 8
"""Side of a texture's tile."""

TEXTURES = {
    "plain": "",
    "rising": "M-2 2l4-4M0 8l8-8M6 10l4-4",
    "falling": "M6-2l4 4M0 0l8 8M-2 6l4 4",
    "dots": "M2 2h0M6 6h0",
    "bars": "M0 2h8M0 6h8",
}
"""Strokes of a tile, by the texture's name."""


class Style(NamedTuple):
    """How a reftype looks."""

    name: str
    """Of its class in the style sheet."""
    colour: str
    texture: str


_BLUE, _GREEN, _ORANGE, _PURPLE = "#60bdf0", "#159272", "#ea9516", "#b46fa7"
_VERMILLION, _YELLOW, _GREY, _SKY, _PALE = "#e15132", "#ffe321", "#b0b0b0", "#b7f6ff", "#f0f5d0"

STYLES: dict[str, Style] = {
    reftype.label: Style(reftype.label.replace("_", "-"), colour, texture)
    for reftype, colour, texture in (
        (RefType.PARAMETER, _BLUE, "plain"),
        (RefType.SHARDED_PARAMETER, _BLUE, "rising"),
        (RefType.UNSHARDED_PARAMETER, _BLUE, "falling"),
        (RefType.BUFFER, _YELLOW, "rising"),
        (RefType.OPTIMIZER_STATE, _GREEN, "plain"),
        (RefType.GRADIENT, _ORANGE, "plain"),
        (RefType.SHARDED_GRADIENT, _ORANGE, "rising"),
        (RefType.UNSHARDED_GRADIENT, _ORANGE, "falling"),
        (RefType.GRADIENT_BUCKET, _ORANGE, "dots"),
        (RefType.INPUT, _YELLOW, "plain"),
        (RefType.ACTIVATION, _PURPLE, "plain"),
        (RefType.RECOMPUTATION, _PURPLE, "rising"),
        (RefType.ALL_GATHER, _VERMILLION, "plain"),
        (RefType.REDUCE_SCATTER, _VERMILLION, "rising"),
        (RefType.ALL_REDUCE, _VERMILLION, "falling"),
        (RefType.TEMPORARY, _GREY, "plain"),
        (RefType.CHECKPOINT, _SKY, "bars"),
        (RefType.OTHER, _PALE, "plain"),
    )
}
"""By label, from what stays longest to what goes first: the order in which they are stacked."""

_ORDER = {label: position for position, label in enumerate(STYLES)}


def style_of(reftype: str) -> Style:
    """How a reftype looks."""
    return STYLES.get(reftype, STYLES[RefType.OTHER.label])


def order_of(reftype: str) -> int:
    """Where it stands in a stack, from the bottom."""
    return _ORDER.get(reftype, len(_ORDER))


def css() -> str:
    """The rules that fill what is of a reftype's class."""
    return "".join(
        f".{style.name}{{fill:{style.colour if style.texture == 'plain' else f'url(#t-{style.name})'}}}"
        for style in STYLES.values()
    )
