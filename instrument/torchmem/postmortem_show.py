"""What ``torchmem post-mortem`` shows: who died when and how, who held the memory, and which allocations failed.

Invariants: torch-free; the rows of a table and the one that sums the rest add up to what the device held; text from a
record is stripped of what could drive a terminal.
"""

from __future__ import annotations

import math
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from torchmem import show
from torchmem.model import Phase
from torchmem.show import Book, By, Holders, binary
from torchmem.wire.deaths import Death
from torchmem.wire.ranks import printable
from torchmem.wire.record import OutOfMemory, Record, cell_columns

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

NUM_OOM_HOLDERS = 10


def as_data(deaths: list[Death], top: int) -> list[dict[str, Any]]:
    """The deaths as plain data, ready for ``json.dumps``; sizes are bytes, times Unix seconds."""
    return [
        {
            "path": death.path,
            "how": death.how,
            "train_job": death.record.identity.train_job,
            "rank": death.record.identity.rank,
            "world_size": death.record.identity.world_size,
            "attempt": death.record.identity.attempt,
            "host": death.record.identity.host,
            "pid": death.record.identity.pid,
            "step": death.record.clock.step,
            "last_seen_at": _finite(death.record.clock.written_at),
            "num_ooms": _num_ooms(death.record),
            "out_of_memory": [_oom_data(death.record, event) for event in death.record.oom_events],
            "devices": [
                show.device_data(death.record, device, show.holders(death.record, device, Book.PEAK, By.BOTH, top))
                for device in death.record.devices
            ],
        }
        for death in deaths
    ]


def draw(console: Console, deaths: list[Death], top: int, *, fold: bool) -> None:
    """Prints, for each dead attempt, who it was, what its devices held and which allocations failed."""
    for index, death in enumerate(deaths):
        if index:
            console.print()
        record = death.record
        console.print(_heading(death))
        for device in record.devices:
            console.print(show.device_heading(record, device))
            held = show.holders(record, device, Book.PEAK, By.BOTH, top, fold=fold)
            if held.total_bytes:
                _print_table(console, "who held the memory at the highest peak of the last steps:", held)
            else:
                has_stepped = record.clock.step > 0
                console.print(f"  {'nothing was held at the peak' if has_stepped else 'no step had finished'}")
        if len(record.oom_events) < _num_ooms(record):
            console.print(f"  {_num_ooms(record)} allocations failed, the last {len(record.oom_events)} are kept")
        for event in record.oom_events:
            console.print(_oom_heading(record, event))
            held = oom_holders(record, event, NUM_OOM_HOLDERS, fold=fold)
            if held.shown:
                _print_table(console, f"who held the {binary(held.total_bytes)} on {printable(event.device)}:", held)


def hint(num_deaths: int, directory: str) -> str:
    """Where to learn more of attempts that died."""
    return f"{num_deaths} attempt{'s' * (num_deaths != 1)} died: torchmem post-mortem {directory}"


def oom_holders(record: Record, event: OutOfMemory, top: int, *, fold: bool = False) -> Holders:
    """Who held the device's memory when the allocation failed; together the rows are all of it.

    Args:
        record: whose names the event indexes.
        event: one of the record's.
        top: rows shown; the rest are summed.
        fold: sum modules that differ only in their indices.
    """
    held = show.holders_of(record, event.holders, By.BOTH, top, fold=fold)
    missing_bytes = event.held_bytes - sum(cell_columns(event.holders)[1])
    if not missing_bytes:
        return held
    return Holders(held.shown, None, held.others_bytes + missing_bytes, event.held_bytes)


def _print_table(console: Console, heading: str, held: Holders) -> None:
    from rich.padding import Padding
    from rich.text import Text

    console.print(Text(f"  {heading}", "italic"))
    console.print(Padding.indent(show.table(held, By.BOTH, console.encoding, console.width), 2))


def _heading(death: Death) -> Text:
    from rich.text import Text

    identity, clock = death.record.identity, death.record.clock
    style = "green" if death.how in ("exited cleanly", "still running") else "red"
    return Text.assemble(
        (f"{printable(identity.train_job)} rank {identity.rank}/{identity.world_size}", "bold"),
        f" on {printable(identity.host)}, pid {identity.pid}, attempt {printable(identity.attempt)}: ",
        (death.how, style),
        f"\n  last seen {moment(clock.written_at)}, after step {clock.step}",
    )


def _oom_heading(record: Record, event: OutOfMemory) -> Text:
    from rich.text import Text

    module, reftype = (printable(name) for name in _asked(record, event))
    return Text.assemble(
        ("  out of memory", "red"),
        f" on {printable(event.device)} {moment(event.time)}, after step {event.step}, in {phase_name(event.phase)}:\n",
        f"  {module} asked for {binary(event.requested_bytes)} ({reftype}) while {binary(event.held_bytes)} were held",
    )


def _oom_data(record: Record, event: OutOfMemory) -> dict[str, Any]:
    held = oom_holders(record, event, NUM_OOM_HOLDERS)
    module, reftype = _asked(record, event)
    return {
        "number": event.number,
        "device": event.device,
        "time": event.time,
        "step": event.step,
        "phase": phase_name(event.phase),
        "module": module,
        "reftype": reftype,
        "requested_bytes": event.requested_bytes,
        "held_bytes": event.held_bytes,
        **show.holders_data(held),
    }


def _asked(record: Record, event: OutOfMemory) -> tuple[str, str]:
    return record.modules[event.module], record.reftypes[event.reftype]


def _num_ooms(record: Record) -> int:
    return max(record.counters.get("num_ooms", 0), len(record.oom_events))


def phase_name(phase: int) -> str:
    """A phase in lower case; the number of one that this release does not know."""
    name = Phase(phase).name if phase in list(Phase) else None
    return name.lower() if name else f"phase {phase}"


def moment(seconds: float) -> str:
    """A Unix time as people read it."""
    try:
        return datetime.fromtimestamp(seconds, tz=timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):
        return "at an unknown time"


def _finite(seconds: float) -> float | None:
    return seconds if math.isfinite(seconds) else None
