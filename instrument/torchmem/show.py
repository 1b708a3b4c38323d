"""What ``torchmem show`` shows: each rank's record, and who holds the memory of each of its devices.

Reading, summing and drawing are three steps: ``read_ranks`` gives what the directory says, ``holders`` the rows of one
book, and ``draw`` or ``as_data`` the same rows as a table or as plain data.

Invariants: torch-free; rows and the one that sums the rest add up to the book's total; one bad record never hides the
others; text from a record is stripped of what could drive a terminal.

Limits: a snapshot of the records as they lie; whether a rank is stale is judged by this host's clock.
"""

from __future__ import annotations

import enum
import errno
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchmem.errors import RecordError
from torchmem.wire.record import Device, Record, decode, unpack_cells
from torchmem.wire.store import RECORD_NAME, is_held, lock_name, open_record_bytes

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

STALE_SECONDS = 30.0
"""A held rank whose record is older than this is stale."""

NO_FOLDER = (errno.ENOTDIR, errno.ENOENT, errno.ELOOP)
"""What opening an entry as a folder says when it is a file, has gone, or is a link that is not followed."""

BAR_CELLS = 12
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
class RankView:
    """One rank as its record and its lock show it."""

    record: Record
    state: str
    """``running``, ``stale``, ``crashed`` or ``exited``, as the sidecar has them."""


@dataclass(frozen=True)
class Found:
    """What a directory holds."""

    ranks: list[RankView] = field(default_factory=list)
    """By job and rank."""
    unreadable: list[str] = field(default_factory=list)
    """One line for each record that could not be read."""


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
    num_others: int
    others_bytes: int
    total_bytes: int


def read_ranks(directory: Path, train_job: str | None = None, rank: int | None = None) -> Found:
    """The ranks whose records lie in the folders of a directory, or in the directory itself.

    Args:
        directory: where jobs' folders lie, or the folder of one job.
        train_job: only this job, by its name or by its folder's.
        rank: only this rank.
    """
    found = Found()
    try:
        root_fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return found
    except OSError as error:
        found.unreadable.append(printable(f"{directory}: {error.strerror}"))
        return found
    try:
        # Whoever owns the directory could write anything into it, so root may read a user's records there.
        allowed_uids = frozenset({os.geteuid(), 0, os.fstat(root_fd).st_uid})
        for folder, name, folder_fd in _record_files(root_fd, found):
            _read_one(found, (folder, name, folder_fd), allowed_uids, (train_job, rank))
    finally:
        os.close(root_fd)
    found.ranks.sort(key=lambda view: (view.record.identity.train_job, view.record.identity.rank))
    return found


def _record_files(root_fd: int, found: Found) -> Iterator[tuple[str, str, int]]:
    """(folder, file name, the folder's descriptor) of every record; a folder that cannot be listed is named."""
    yield from ((".", name, root_fd) for name in _record_names(root_fd))
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    for folder in sorted(os.listdir(root_fd)):
        try:
            folder_fd = os.open(folder, flags, dir_fd=root_fd)
        except OSError as error:
            if error.errno not in NO_FOLDER:
                found.unreadable.append(printable(f"{folder}: {error.strerror}"))
            continue
        try:
            yield from ((folder, name, folder_fd) for name in _record_names(folder_fd))
        finally:
            os.close(folder_fd)


def _record_names(folder_fd: int) -> list[str]:
    return sorted(name for name in os.listdir(folder_fd) if RECORD_NAME.fullmatch(name))


def _read_one(
    found: Found, file: tuple[str, str, int], allowed_uids: frozenset[int], wanted: tuple[str | None, int | None]
) -> None:
    folder, name, folder_fd = file
    train_job, rank = wanted
    # Before the record: a clean end between the two must not be taken for a crash.
    held = is_held(folder_fd, lock_name(int(name.removeprefix("rank-").removesuffix(".record"))))
    try:
        data, _ = open_record_bytes(folder_fd, name, allowed_uids)
        record = decode(data)
    except RecordError as error:
        found.unreadable.append(printable(f"{folder}/{name}: {error.reason}: {error}"))
        return
    identity = record.identity
    if train_job not in (None, identity.train_job, folder) or rank not in (None, identity.rank):
        return
    found.ranks.append(RankView(record, _state(record, held=held)))


def _state(record: Record, *, held: bool) -> str:
    if record.clock.final:
        return "exited"
    if not held:
        return "crashed"
    return "running" if time.time() - record.clock.written_at <= STALE_SECONDS else "stale"


def holders(record: Record, device: Device, book: Book, by: By, top: int) -> Holders:
    """Who holds the bytes of one book of a device.

    Args:
        record: whose names the book indexes.
        device: one of the record's.
        book: which book.
        by: what a row stands for.
        top: rows shown; the rest are summed.
    """
    sums: dict[tuple[str | None, str | None], int] = {}
    for cell in unpack_cells(device.step_peak if book is Book.PEAK else device.usage):
        module = None if by is By.REFTYPE else record.modules[cell.module]
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
            "book": book.value,
            "devices": [
                _device_data(device, holders(view.record, device, book, by, top)) for device in view.record.devices
            ],
        }
        for view in views
    ]


def _device_data(device: Device, held: Holders) -> dict[str, Any]:
    return {
        "device": device.name,
        "peak_bytes": device.peak_bytes,
        "step_peak_bytes": device.step_peak_bytes,
        "usage_bytes": device.usage_bytes,
        "unattributed_bytes": device.unattributed_bytes,
        "limit_bytes": device.limit_bytes,
        "total_bytes": held.total_bytes,
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


def draw(console: Console, views: list[RankView], book: Book, by: By, top: int) -> None:
    """Prints each device of each rank: a heading, and a table of who holds its memory."""
    for index, view in enumerate(views):
        if index:
            console.print()
        console.print(_rank_heading(view))
        if not view.record.devices:
            console.print("  nothing is counted on this rank")
        for device in view.record.devices:
            console.print(_device_heading(device))
            held = holders(view.record, device, book, by, top)
            if held.total_bytes:
                console.print(_table(held, book, by, "\u2588" if console.encoding.startswith("utf") else "#"))
            else:
                console.print("  no step has finished yet")


def _rank_heading(view: RankView) -> Text:
    from rich.text import Text

    identity, style = view.record.identity, "green" if view.state in ("running", "exited") else "red"
    return Text.assemble(
        (f"{printable(identity.train_job)} rank {identity.rank}/{identity.world_size}", "bold"),
        f" on {printable(identity.host)}, pid {identity.pid}, step {view.record.clock.step}: ",
        (view.state, style),
    )


def _device_heading(device: Device) -> Text:
    from rich.text import Text

    figures = {
        "peak": device.peak_bytes,
        "step peak": device.step_peak_bytes,
        "usage": device.usage_bytes,
        "unattributed": device.unattributed_bytes or None,
        "limit": device.limit_bytes,
    }
    text = ", ".join(f"{name} {binary(value)}" for name, value in figures.items() if value is not None)
    return Text(f"  {printable(device.name)}: {text}")


def _table(held: Holders, book: Book, by: By, mark: str) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, title=f"who holds the memory {book.description}", title_justify="left")
    names = [name for name in ("module", "reftype") if by in (By.BOTH, By(name))]
    for name in names:
        table.add_column(name, overflow="fold")
    table.add_column("bytes", justify="right", no_wrap=True)
    table.add_column("share", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True, min_width=BAR_CELLS)

    def add(labels: list[str], num_bytes: int, style: str = "") -> None:
        share = _share(num_bytes, held.total_bytes)
        cells = [*labels, binary(num_bytes), f"{share:.1%}", mark * round(share * BAR_CELLS)]
        table.add_row(*(Text(cell) for cell in cells), style=style)

    for row in held.shown:
        add([printable(name) for name in (row.module, row.reftype) if name is not None], row.num_bytes)
    blanks = [""] * (len(names) - 1)
    if held.num_others:
        add([f"({held.num_others} more)", *blanks], held.others_bytes, "dim")
    table.add_section()
    add(["total", *blanks], held.total_bytes, "bold")
    return table


def _share(num_bytes: int, total_bytes: int) -> float:
    return num_bytes / total_bytes if total_bytes else 0.0


def binary(num_bytes: int) -> str:
    """A size in binary units: ``1536`` is ``1.50 KiB``."""
    size, unit = float(num_bytes), 0
    while abs(size) >= 1024 and unit < len(UNITS) - 1:  # noqa: PLR2004  # binary units
        size /= 1024
        unit += 1
    return f"{size:.2f} {UNITS[unit]}" if unit else f"{num_bytes} B"


def printable(text: str) -> str:
    """The text with everything that could drive a terminal, or break a line, replaced."""
    return "".join(character if character.isprintable() else "\ufffd" for character in text)
