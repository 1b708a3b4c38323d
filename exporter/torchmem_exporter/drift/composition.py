"""What memory is made of, by module and reftype, and what of it has grown.

Invariants: parts and ``other_bytes`` add up to the whole, exactly, and the rows of a comparison to the difference of
the wholes; a composition that was cut holds the largest parts, so that each part it lacks held at most as much as its
smallest.

Known limits: of a part that a cut composition lacks, growth is told from zero or as growth of what was cut; two peaks
at different instants of a step differ in parts that did not grow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from torchmem.wire.record import MODULE_MASK, REFTYPE_SHIFT, cell_columns

MAX_PARTS = 1024
"""Parts kept in a baseline; with names some 60 KB."""
OTHER = "__other__"
"""Module and reftype of the row that stands for what was cut."""


class Part(msgspec.Struct, array_like=True, frozen=True):
    """Bytes held by a module for one purpose."""

    module: str
    reftype: str
    num_bytes: int


class Composition(msgspec.Struct, kw_only=True, frozen=True):
    """What a device held at one instant."""

    parts: list[Part] = []
    """Largest first."""
    other_bytes: int = 0
    """In parts that were cut."""

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return sum(part.num_bytes for part in self.parts) + self.other_bytes

    def cut(self, max_parts: int = MAX_PARTS) -> Composition:
        """The same with fewer parts, the largest."""
        kept, rest = self.parts[:max_parts], self.parts[max_parts:]
        return Composition(parts=kept, other_bytes=self.other_bytes + sum(part.num_bytes for part in rest))


class Growth(NamedTuple):
    """One row of a comparison."""

    module: str
    reftype: str
    before_bytes: int
    after_bytes: int

    @property
    def grown_bytes(self) -> int:
        """By how much it grew; negative where it shrank."""
        return self.after_bytes - self.before_bytes


def composition(book: bytes, modules: Sequence[str], reftypes: Sequence[str]) -> Composition:
    """The composition in a book of a record.

    Args:
        book: packed cells; modules of the same name are one.
        modules: the record's names.
        reftypes: likewise.
    """
    held: dict[tuple[str, str], int] = {}
    for key, num_bytes in zip(*cell_columns(book), strict=True):
        name = modules[key & MODULE_MASK], reftypes[key >> REFTYPE_SHIFT]
        held[name] = held.get(name, 0) + num_bytes
    return Composition(parts=[Part(*name, held[name]) for name in sorted(held, key=lambda name: (-held[name], name))])


def compare(before: Composition, after: Composition) -> list[Growth]:
    """What grew and what shrank, the most grown first; the rows add up to both wholes.

    Where one of the two was cut, a part that it lacks counts as a part of its rest, and the other's as well, unless it
    is larger than any that was cut could have been.
    """
    held = [{(part.module, part.reftype): part.num_bytes for part in one.parts} for one in (before, after)]
    rest = [before.other_bytes, after.other_bytes]
    for this, that in ((0, 1), (1, 0)):
        # What this one lacks may be in its rest, if it was cut.
        limit = min(held[this].values(), default=0) if (before, after)[this].other_bytes else 0
        for name in [n for n, num_bytes in held[that].items() if n not in held[this] and num_bytes <= limit]:
            rest[that] += held[that].pop(name)
    rows = [Growth(*name, held[0].get(name, 0), held[1].get(name, 0)) for name in held[0].keys() | held[1].keys()]
    if any(rest):
        rows.append(Growth(OTHER, OTHER, *rest))
    return sorted(rows, key=lambda row: (-row.grown_bytes, row.module, row.reftype))
