"""What grew from one run to another: devices are matched, and their bytes compared by module and reftype.

Invariants: torch-free; pure; the rows of a comparison and the one that sums the rest add up to what both runs' devices
held, exactly.

Where both runs have the same ranks, a rank is held against the one of its number, and a device against the one of its
name, or else the only other one of its type. Where they do not, the rank that holds most is held against the one that
holds most, for each type of device.

Known limits: of a part too small to be kept in a baseline growth is told from zero or as part of what was not kept
apart, see ``composition``; a device's peak is that of the steps a record spans, a checkpoint among them or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from torchmem.model import folded
from torchmem.show import By

if TYPE_CHECKING:
    from torchmem_exporter.drift.composition import Composition


@dataclass(frozen=True)
class Held:
    """What one device of one rank held at one instant."""

    rank: int
    device: str
    composition: Composition
    moment: str
    """Which instant, in words."""

    @property
    def key(self) -> tuple[int, str]:
        """Rank and device."""
        return self.rank, self.device

    @property
    def device_type(self) -> str:
        """``cuda`` of ``cuda:3``."""
        return self.device.partition(":")[0]

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.composition.total_bytes


@dataclass(frozen=True)
class Row:
    """One row of a comparison; what the row does not tell apart is ``None``."""

    module: str | None
    reftype: str | None
    before_bytes: int
    after_bytes: int

    @property
    def grown_bytes(self) -> int:
        """By how much it grew; negative where it shrank."""
        return self.after_bytes - self.before_bytes


@dataclass(frozen=True)
class Rows:
    """What grew and what shrank, the most grown first, and the sum of what is left out."""

    shown: list[Row]
    num_others: int
    others: Row


@dataclass(frozen=True)
class Pair:
    """A device of one run and the one of the other that it is held against."""

    before: Held
    after: Held

    @property
    def grown_bytes(self) -> int:
        """By how much it grew; negative where it shrank."""
        return self.after.total_bytes - self.before.total_bytes

    @property
    def grown_ratio(self) -> float | None:
        """That as a share of what it held before; None where that was nothing."""
        return self.grown_bytes / self.before.total_bytes if self.before.total_bytes else None

    def exceeds(self, threshold: Fraction) -> bool:
        """Whether it grew by more than this share of what it held before."""
        return self.grown_bytes > threshold * self.before.total_bytes


@dataclass(frozen=True)
class Matched:
    """All that can be compared of two runs, and what cannot."""

    pairs: list[Pair]
    is_by_rank: bool
    """Else by the highest."""
    only_before: list[Held]
    """Not compared; empty if not by rank."""
    only_after: list[Held]


def match(before: Sequence[Held], after: Sequence[Held]) -> Matched:
    """Finds which device is held against which; a device appears once in each run."""
    if {held.rank for held in before} == {held.rank for held in after}:
        return _match_by_rank(before, after)
    return _match_highest(before, after)


def _match_by_rank(before: Sequence[Held], after: Sequence[Held]) -> Matched:
    by_key = {held.key: held for held in after}
    partners = {held.key: by_key[held.key] for held in before if held.key in by_key}
    rest = [[held for held in held_by if held.key not in partners] for held_by in (before, after)]
    for held in rest[0]:
        mine, others = ([o for o in one if (o.rank, o.device_type) == (held.rank, held.device_type)] for one in rest)
        if len(mine) == len(others) == 1:
            partners[held.key] = others[0]
    taken = {held.key for held in partners.values()}
    return Matched(
        pairs=[Pair(held, partners[held.key]) for held in before if held.key in partners],
        is_by_rank=True,
        only_before=[held for held in before if held.key not in partners],
        only_after=[held for held in after if held.key not in taken],
    )


def _match_highest(before: Sequence[Held], after: Sequence[Held]) -> Matched:
    highest = _highest(before), _highest(after)
    types = [kind for kind in highest[0] if kind in highest[1]]
    return Matched(
        pairs=[Pair(highest[0][kind], highest[1][kind]) for kind in types],
        is_by_rank=False,
        only_before=[held for held in before if held.device_type not in types],
        only_after=[held for held in after if held.device_type not in types],
    )


def _highest(devices: Sequence[Held]) -> dict[str, Held]:
    """By type of device, the one that holds most; the first of equals."""
    found: dict[str, Held] = {}
    for held in devices:
        if held.device_type not in found or held.total_bytes > found[held.device_type].total_bytes:
            found[held.device_type] = held
    return found


def rows(pair: Pair, by: By, top: int, *, fold: bool = False) -> Rows:
    """What grew on a device.

    Args:
        pair: the device in both runs.
        by: what a row stands for.
        top: rows shown, those that changed most; the rest, and what did not change, are summed.
        fold: sum modules that differ only in their indices.
    """
    from torchmem_exporter.drift.composition import compare

    before, after = pair.before.composition, pair.after.composition
    # A baseline of many parts keeps them folded, and can be told from nothing finer.
    if any("*" in part.module for one in (before, after) for part in one.parts):
        before, after = _folded(before), _folded(after)
    sums: dict[tuple[str | None, str | None], tuple[int, int]] = {}
    for growth in compare(before, after):
        module = None if by is By.REFTYPE else folded(growth.module) if fold else growth.module
        key = module, None if by is By.MODULE else growth.reftype
        so_far = sums.get(key, (0, 0))
        sums[key] = so_far[0] + growth.before_bytes, so_far[1] + growth.after_bytes
    found = [Row(*key, *amounts) for key, amounts in sums.items()]
    found.sort(key=lambda row: (-abs(row.grown_bytes), -row.after_bytes, row.module or "", row.reftype or ""))
    num_shown = min(top, sum(1 for row in found if row.grown_bytes))
    rest = found[num_shown:]
    others = Row(None, None, sum(row.before_bytes for row in rest), sum(row.after_bytes for row in rest))
    return Rows(sorted(found[:num_shown], key=lambda row: -row.grown_bytes), len(rest), others)


def _folded(one: Composition) -> Composition:
    """With one part for all modules that differ only in their indices."""
    from torchmem_exporter.drift.composition import Composition, Part

    held: dict[tuple[str, str], int] = {}
    for part in one.parts:
        name = folded(part.module), part.reftype
        held[name] = held.get(name, 0) + part.num_bytes
    return Composition(parts=[Part(*name, num_bytes) for name, num_bytes in held.items()], other_bytes=one.other_bytes)
