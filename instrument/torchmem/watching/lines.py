"""Lines of a terminal: rules, names that are cut, charts, and the page that they are drawn for.

Invariants: torch-free and pure; text that comes from a record goes through ``cut`` or ``printable``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from rich.cells import cell_len
from rich.console import Group
from rich.text import Text

from torchmem.show import cut
from torchmem.watching.choice import Choice
from torchmem.watching.look import Look, RankLook
from torchmem.wire.ranks import printable

BAD, GOOD, QUIET, HEAD = "bold red", "green", "dim", "bold"
MAX_NAME = 20
"""Columns of a job's, a host's or a device's name."""
FLAT_SHARE = 0.02
"""Of the highest value: a chart's scale covers at least that, so that noise looks like noise."""
EIGHTHS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
HALVES = ".|"


class Page(NamedTuple):
    """What is drawn, and for what kind of terminal."""

    look: Look
    choice: Choice
    encoding: str = "utf-8"

    @property
    def is_plain(self) -> bool:
        """Whether the terminal shows ASCII only."""
        return not self.encoding.lower().startswith("utf")


def rank_number(rank: RankLook) -> str:
    """Its number among how many, as ``3/8``."""
    return f"{rank.view.record.identity.rank}/{rank.view.record.identity.world_size}"


def named(look: Look, rank: RankLook) -> str:
    """A rank, with its job where there are several."""
    name = f"rank {rank_number(rank)}"
    return f"{printable(rank.view.record.identity.train_job)} {name}" if len(look.jobs) > 1 else name


def percent(ratio: float | None) -> str:
    """A change, with its sign; a dash where it is unknown."""
    return "-" if ratio is None else f"{round(ratio, 3) + 0.0:+.1%}"


def columns_of_names(pairs: Sequence[tuple[str, str]], width: int) -> list[str]:
    """Modules and reftypes as two columns, together at most so wide unless the reftypes alone are wider."""
    reftype_width = max((cell_len(printable(reftype)) for _, reftype in pairs), default=0)
    module_width = max((cell_len(printable(module)) for module, _ in pairs), default=0)
    module_width = max(1, min(module_width, width - reftype_width - 1))
    return [
        f"{_padded(cut(module, module_width), module_width)} {_padded(printable(reftype), reftype_width)}"
        for module, reftype in pairs
    ]


def _padded(text: str, width: int) -> str:
    return text + " " * (width - cell_len(text))


def rule(title: str, width: int, page: Page) -> Text:
    """A title in a line across the pane."""
    line = "-" if page.is_plain else "\u2500"
    text = Text.assemble((f"{line * 2} ", QUIET), (title, HEAD), " ")
    text.append(line * max(0, width - text.cell_len), QUIET)
    return text


def with_end(text: Text, end: str, width: int) -> Text:
    """A line with something at its right end, where there is room for it."""
    room = width - text.cell_len - len(end)
    return text.append(" " * room + end, QUIET) if room >= 0 else text


def pane(lines: Sequence[Text], width: int, height: int) -> Group:
    """As many of the lines as there is room for, each cut where it is too long."""
    shown = lines[: max(0, height)]
    for line in shown:
        line.no_wrap = True
        line.truncate(max(0, width), overflow="ellipsis")
    return Group(*shown)


def chart(
    values: Sequence[int], of: Callable[[Sequence[int]], int], width: int, height: int, encoding: str
) -> list[str]:
    """Values as columns, the lowest to the highest, in lines of text, the upper first.

    Args:
        values: oldest first, at least one; where they are more than columns, several share one.
        of: what stands for several: the highest, or the lowest.
        width: columns at most.
        height: lines.
        encoding: eighths of a character are drawn where it has such.
    """
    width = max(1, min(width, len(values)))
    columns = [of(values[i * len(values) // width : (i + 1) * len(values) // width]) for i in range(width)]
    low, high = min(columns), max(columns)
    scale = max(high - low, FLAT_SHARE * abs(high), 1)
    glyphs = EIGHTHS if encoding.lower().startswith("utf") else HALVES
    most = len(glyphs) * height
    parts = [1 + round((column - low) / scale * (most - 1)) for column in columns]  # a step is seen at any height
    return ["".join(_glyph(part - line * len(glyphs), glyphs) for part in parts) for line in reversed(range(height))]


def _glyph(num_parts: int, glyphs: str) -> str:
    """What of a column lies in one line."""
    return glyphs[min(num_parts, len(glyphs)) - 1] if num_parts > 0 else " "
