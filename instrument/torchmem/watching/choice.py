"""What the user has chosen to see, and how the terminal is shared among the panes.

Invariants: pure; a chosen rank that has gone is followed by the one in its place; heights are never negative and
together fill the terminal, but where it is too low for one line a pane.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from torchmem.show import Book
from torchmem.watching.look import DeviceLook, Look, RankLook
from torchmem.wire.record import filled_share

WIDE = 110
"""Columns from which on growers stand beside the holders."""
HIGH, HIGHEST = 36, 50
"""Lines from which on a timeline is two and three lines high."""


class Order(enum.Enum):
    """What the ranks are sorted by."""

    RANK = "rank"
    PEAK = "peak"
    DRIFT = "drift"

    def next(self) -> Order:
        """The one after it, around."""
        return {Order.RANK: Order.PEAK, Order.PEAK: Order.DRIFT, Order.DRIFT: Order.RANK}[self]


@dataclass(frozen=True)
class Choice:
    """What is shown of a reading."""

    key: str = ""
    """Of the chosen rank."""
    row: int = 0
    """Where that was when it was chosen."""
    device: int = 0
    """Number of the device shown of each rank."""
    book: Book = Book.PEAK
    unfolds: bool = False
    order: Order = Order.RANK

    def ranks(self, look: Look) -> list[RankLook]:
        """A reading's ranks in the order chosen; those that do not live stay last."""
        if self.order is Order.RANK:
            return list(look.ranks)
        return sorted(look.ranks, key=lambda rank: (not rank.is_alive, -self._weight(rank.device(self.device))))

    def _weight(self, one: DeviceLook | None) -> float:
        if one is None:
            return -math.inf
        if self.order is Order.DRIFT:
            ratio = one.verdict.judgement.drift_ratio
            return -math.inf if ratio is None else ratio
        share = filled_share(one.device)
        return one.device.step_peak_bytes if share is None else share

    def position(self, ranks: list[RankLook]) -> int:
        """Row of the chosen rank; of the one in its place where it has gone."""
        keys = [rank.key for rank in ranks]
        return keys.index(self.key) if self.key in keys else max(0, min(self.row, len(ranks) - 1))

    def chosen(self, look: Look) -> RankLook | None:
        """The chosen rank; None where there are none."""
        ranks = self.ranks(look)
        return ranks[self.position(ranks)] if ranks else None

    def moved(self, look: Look, num_rows: int) -> Choice:
        """The choice so many rows further down, or up where negative."""
        ranks = self.ranks(look)
        if not ranks:
            return self
        row = max(0, min(self.position(ranks) + num_rows, len(ranks) - 1))
        return replace(self, key=ranks[row].key, row=row)

    def with_next_device(self, look: Look) -> Choice:
        """The choice of the next device."""
        rank = self.chosen(look)
        return replace(self, device=(self.device + 1) % max(1, len(rank.devices))) if rank else self

    def unfolded(self) -> Choice:
        """Folded for unfolded, and back."""
        return replace(self, unfolds=not self.unfolds)

    def sorted_anew(self) -> Choice:
        """The choice of the next order."""
        return replace(self, order=self.order.next())

    def with_other_book(self) -> Choice:
        """Peak for usage, usage for peak."""
        return replace(self, book=Book.USAGE if self.book is Book.PEAK else Book.PEAK)


class Heights(NamedTuple):
    """Lines of each pane."""

    ranks: int
    alerts: int
    holders: int
    growers: int
    timeline: int


def heights(width: int, height: int, *, num_ranks: int, num_alerts: int, num_growers: int) -> Heights:
    """How the panes share a terminal.

    Args:
        width: columns.
        height: lines left when the first and the last line are taken.
        num_ranks: all of them.
        num_alerts: lines they want.
        num_growers: likewise.
    """
    ranks = 1 + max(1, min(num_ranks, max(2, height // 4)))
    alerts = 2 + min(num_alerts, max(1, height // 8))
    chart = 1 + (height >= HIGH) + (height >= HIGHEST)
    timeline = 1 + 2 * chart if height >= 16 else 0  # noqa: PLR2004  # below it only who holds what counts
    rest = max(0, height - ranks - alerts - timeline)
    if width >= WIDE:
        return Heights(ranks, alerts, rest, rest, timeline)
    growers = min(1 + max(1, num_growers), rest // 3)
    return Heights(ranks, alerts, rest - growers, growers, timeline)


def window(num_rows: int, position: int, num_shown: int) -> tuple[int, int]:
    """First row shown and the one after the last, with the chosen one in the middle where that can be."""
    num_shown = max(0, min(num_shown, num_rows))
    first = max(0, min(position - num_shown // 2, num_rows - num_shown))
    return first, first + num_shown
