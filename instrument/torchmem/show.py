"""What ``torchmem show`` shows: who holds the memory of each device of each rank.

Summing and drawing are two steps: ``holders`` gives the rows of one book, and ``draw`` or ``as_data`` the same rows as
a table or as plain data.

Invariants: torch-free; rows and the one that sums the rest add up to the book's total; text from a record is stripped
of what could drive a terminal.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from torchmem.model import folded
from torchmem.wire.ranks import RankView, printable
from torchmem.wire.record import Device, Labeler, Record, forecast_drift_ratio, unpack_cells

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

INDENT = 2
BAR_CELLS = 12
WITH_BARS = 76
"""Columns from which on holders have bars; below it the names need the room."""
LEAST_SIZE, SHARE = len("bytes"), len("100.0%")
EIGHTHS = ("", "\u258f", "\u258e", "\u258d", "\u258c", "\u258b", "\u258a", "\u2589")
UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


class Book(enum.Enum):
    """Which of a device's books to show."""

    PEAK = "peak"
    USAGE = "usage"

    @property
    def description(self) -> str:
        """What the book says, for a heading."""
        return "at the peak of a step" if self is Book.PEAK else "at the end of the last step"


class By(enum.Enum):
    """What a row stands for."""

    MODULE = "module"
    REFTYPE = "reftype"
    BOTH = "both"


@dataclass(frozen=True)
class Holder:
    """One row: bytes held by a module, for a reftype, or both; what the row does not tell apart is ``None``."""

    module: str | None
    reftype: str | None
    num_bytes: int


@dataclass(frozen=True)
class Holders:
    """The rows of one book, largest first, and the sum of those left out; together they are the total."""

    shown: list[Holder]
    num_others: int | None
    """None where the record does not tell how many they are."""
    others_bytes: int
    total_bytes: int


def holders(record: Record, device: Device, book: Book, by: By, top: int, *, fold: bool = False) -> Holders:
    """Who holds the bytes of one book of a device.

    Args:
        record: whose names the book indexes.
        device: one of the record's.
        book: which book.
        by: what a row stands for.
        top: rows shown; the rest are summed.
        fold: sum modules that differ only in their indices.
    """
    return holders_of(record, device.step_peak if book is Book.PEAK else device.usage, by, top, fold=fold)


def holders_of(record: Record, cells: bytes, by: By, top: int, *, fold: bool = False) -> Holders:
    """Who holds the bytes of packed cells; arguments as of ``holders``."""
    names = [folded(name) for name in record.modules] if fold else record.modules
    sums: dict[tuple[str | None, str | None], int] = {}
    for cell in unpack_cells(cells):
        module = None if by is By.REFTYPE else names[cell.module]
        reftype = None if by is By.MODULE else record.reftypes[cell.reftype]
        sums[module, reftype] = sums.get((module, reftype), 0) + cell.num_bytes
    rows = [Holder(module, reftype, num_bytes) for (module, reftype), num_bytes in sums.items()]
    rows.sort(key=lambda row: (-row.num_bytes, row.module or "", row.reftype or ""))
    rest = rows[top:]
    return Holders(
        shown=rows[:top],
        num_others=len(rest),
        others_bytes=sum(row.num_bytes for row in rest),
        total_bytes=sum(row.num_bytes for row in rows),
    )


def as_data(views: list[RankView], book: Book, by: By, top: int) -> list[dict[str, Any]]:
    """The ranks as plain data, ready for ``json.dumps``; sizes are bytes, shares are of the book's total."""
    return [
        {
            "train_job": view.record.identity.train_job,
            "rank": view.record.identity.rank,
            "world_size": view.record.identity.world_size,
            "attempt": view.record.identity.attempt,
            "host": view.record.identity.host,
            "pid": view.record.identity.pid,
            "state": view.state,
            "step": view.record.clock.step,
            "written_at": view.record.clock.written_at if math.isfinite(view.record.clock.written_at) else None,
            "disabled": {labeler.name: labeler.reason for labeler in _disabled(view.record)},
            "book": book.value,
            "devices": [
                device_data(view.record, device, holders(view.record, device, book, by, top))
                for device in view.record.devices
            ],
        }
        for view in views
    ]


def device_data(record: Record, device: Device, held: Holders) -> dict[str, Any]:
    """A device's totals and the rows of one of its books as plain data."""
    return {
        "device": device.name,
        "peak_bytes": device.peak_bytes,
        "step_peak_bytes": device.step_peak_bytes,
        "usage_bytes": device.usage_bytes,
        "unattributed_bytes": device.unattributed_bytes,
        "limit_bytes": device.limit_bytes,
        "forecast_bytes": device.forecast_bytes,
        "forecast_drift_ratio": forecast_drift_ratio(record, device),
        "total_bytes": held.total_bytes,
        **holders_data(held),
    }


def holders_data(held: Holders) -> dict[str, Any]:
    """The rows as plain data."""
    return {
        "holders": [
            {
                "module": row.module,
                "reftype": row.reftype,
                "bytes": row.num_bytes,
                "share": _share(row.num_bytes, held.total_bytes),
            }
            for row in held.shown
        ],
        "others": {
            "num_rows": held.num_others,
            "bytes": held.others_bytes,
            "share": _share(held.others_bytes, held.total_bytes),
        },
    }


def draw(console: Console, views: list[RankView], book: Book, by: By, top: int, *, fold: bool = False) -> None:
    """Prints each device of each rank: a heading, and a table of who holds its memory."""
    from rich.padding import Padding
    from rich.text import Text

    for index, view in enumerate(views):
        if index:
            console.print()
        console.print(_rank_heading(view))
        for labeler in _disabled(view.record):
            console.print(Text(f"  {printable(labeler.name)} is disabled: {printable(labeler.reason)}", "red"))
        if not view.record.devices:
            console.print("  nothing is counted on this rank")
        for device in view.record.devices:
            console.print(device_heading(view.record, device))
            held = holders(view.record, device, book, by, top, fold=fold)
            if held.total_bytes:
                console.print(f"  who holds the memory {book.description}:", style="italic")
                console.print(Padding.indent(table(held, by, console.encoding, console.width), INDENT))
            else:
                console.print(f"  {nothing(view.record, book)}")


def nothing(record: Record, book: Book) -> str:
    """What is said of a device whose book is empty."""
    return f"nothing is held {book.description}" if record.clock.step else "no step has finished yet"


def _disabled(record: Record) -> list[Labeler]:
    return [labeler for labeler in record.labelers if not labeler.up]


def _rank_heading(view: RankView) -> Text:
    from rich.text import Text

    identity, style = view.record.identity, "green" if view.state in ("running", "exited") else "red"
    return Text.assemble(
        (f"{printable(identity.train_job)} rank {identity.rank}/{identity.world_size}", "bold"),
        f" on {printable(identity.host)}, pid {identity.pid}, step {view.record.clock.step}: ",
        (view.state, style),
    )


def device_heading(record: Record, device: Device) -> Text:
    """A device's totals in one line, and how its step peak lies to the forecast."""
    from rich.text import Text

    figures = {
        "peak": device.peak_bytes,
        "step peak": device.step_peak_bytes,
        "usage": device.usage_bytes,
        "unattributed": device.unattributed_bytes or None,
        "limit": device.limit_bytes,
        "forecast": device.forecast_bytes,
    }
    text = ", ".join(f"{name} {binary(value)}" for name, value in figures.items() if value is not None)
    ratio = forecast_drift_ratio(record, device)
    text += "" if ratio is None else f" ({ratio:+.1%})"
    return Text(f"  {printable(device.name)}: {text}")


def table(held: Holders, by: By, encoding: str, width: int = WITH_BARS) -> Table:
    """The rows as a table, with bars of each one's share.

    Args:
        held: the rows.
        by: what a row stands for.
        encoding: of the terminal.
        width: columns of the terminal; where they are few, there are no bars and long names are cut.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    is_narrow = width < WITH_BARS
    names = [name for name in ("module", "reftype") if by in (By.BOTH, By(name))]
    rows = _rows(held, len(names))
    if is_narrow:
        rows = _with_cut_names(rows, width - INDENT)
    drawn = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 0 if is_narrow else 1))
    for name in names:
        drawn.add_column(name, overflow="fold", no_wrap=name == "reftype")
    drawn.add_column("bytes", justify="right", no_wrap=True)
    drawn.add_column("share", justify="right", no_wrap=True)
    if not is_narrow:
        drawn.add_column("", no_wrap=True, min_width=BAR_CELLS)
    for row in rows:
        if row is rows[-1]:
            drawn.add_section()
        share = _share(row.num_bytes, held.total_bytes)
        cells = [*row.names, binary(row.num_bytes), f"{share:.1%}", bar(share, encoding)]
        drawn.add_row(*(Text(cell) for cell in cells[: len(drawn.columns)]), style=row.style)
    return drawn


class _Row(NamedTuple):
    names: list[str]
    num_bytes: int
    style: str = ""


def _rows(held: Holders, num_names: int) -> list[_Row]:
    """The holders, the sum of those left out if any are, and the total."""
    rows = [
        _Row([printable(name) for name in (row.module, row.reftype) if name is not None], row.num_bytes)
        for row in held.shown
    ]
    blanks = [""] * (num_names - 1)
    if held.num_others != 0:
        rest = "(the rest)" if held.num_others is None else f"({held.num_others} more)"
        rows.append(_Row([rest, *blanks], held.others_bytes, "dim"))
    return [*rows, _Row(["total", *blanks], held.total_bytes, "bold")]


def _with_cut_names(rows: list[_Row], width: int) -> list[_Row]:
    """The rows with names so short that the figures have room beside them."""
    from rich.cells import cell_len

    needed = [max(map(cell_len, names)) for names in zip(*(row.names for row in rows), strict=True)]
    room = width - max(LEAST_SIZE, *(len(binary(row.num_bytes)) for row in rows)) - SHARE - len(needed) - 1
    widths = [room]
    if len(needed) > 1:
        reftype_width = min(needed[1], max(room - needed[0], room // 2))
        widths = [room - reftype_width, reftype_width]
    return [row._replace(names=[cut(*one) for one in zip(row.names, widths, strict=True)]) for row in rows]


def cut(text: str, width: int) -> str:
    """The end of a name that is too long, since modules differ there."""
    from rich.cells import cell_len

    text = printable(text)
    if cell_len(text) <= width:
        return text
    while text and cell_len(text) > width - 1:
        text = text[1:]
    return f"~{text}"


def _share(num_bytes: int, total_bytes: int) -> float:
    return num_bytes / total_bytes if total_bytes else 0.0


def bar(share: float, encoding: str) -> str:
    """A bar of a share of one, ``BAR_CELLS`` long when full; in eighths of a cell where the encoding has such."""
    if not encoding.lower().startswith("utf"):
        return "#" * round(share * BAR_CELLS)
    eighths = round(share * BAR_CELLS * 8)
    return "\u2588" * (eighths // 8) + EIGHTHS[eighths % 8]


def binary(num_bytes: int) -> str:
    """A size in binary units: ``1536`` is ``1.50 KiB``."""
    size, unit = float(num_bytes), 0
    while abs(size) >= 1024 and unit < len(UNITS) - 1:  # noqa: PLR2004  # binary units
        size /= 1024
        unit += 1
    return f"{size:.2f} {UNITS[unit]}" if unit else f"{num_bytes} B"
