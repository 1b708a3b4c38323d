"""Prints snapshots as torch's own trackers do: line by line, or as a table.

Reftypes that hold nothing are left out, and so are devices that hold nothing. Text goes to standard output; a table is
as wide as it needs to be where the output is no terminal.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from torchmem.snapshots import TOTAL_KEY, Snapshot

if TYPE_CHECKING:
    from rich.table import Table

    from torchmem.labelers.module_stats import ModuleState, ModuleStats

DIVISORS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
NOTHING = "No memory tracked."
_WIDE = 10_000


def check_units(units: str) -> str:
    """The units, or ``ValueError`` naming the choices."""
    if units not in DIVISORS:
        raise ValueError(f"units are {units!r}: choose one of {', '.join(DIVISORS)}")
    return units


def show_snapshot(snapshot: Snapshot, units: str, *, tabulate: bool) -> None:
    """Prints one snapshot."""
    if not snapshot:
        _print_lines([NOTHING])
    elif tabulate:
        _print_table(_snapshot_table(snapshot, units))
    else:
        _print_lines(_snapshot_lines(snapshot, units))


def show_modules(every: Iterable[ModuleStats], depth: int, units: str, *, tabulate: bool) -> None:
    """Prints the snapshots of each module whose qualified name has at most ``depth`` parts, by name."""
    for stats in sorted(every, key=lambda stats: _natural(stats.mod_fqn)):
        if stats.mod_fqn.count(".") < depth:
            _print_lines([f"Module:  {stats.mod_fqn}"])
            if tabulate:
                _print_table(_states_table(stats.snapshots, units))
            else:
                _print_lines([*_state_lines(stats.snapshots, units), ""])


def _state_lines(snapshots: Mapping[ModuleState, list[Snapshot]], units: str) -> Iterator[str]:
    for state, kept in snapshots.items():
        yield state.value
        for number, snapshot in enumerate(kept, 1):
            yield f"# {number}:"
            yield from _snapshot_lines(snapshot, units)


def _snapshot_lines(snapshot: Snapshot, units: str) -> Iterator[str]:
    for device, row in snapshot.items():
        yield f"Device: {device}"
        for name in _held([row]):
            yield f"\t{name}: {_amount(row[name], units)}"


def _snapshot_table(snapshot: Snapshot, units: str) -> Table:
    names = _held(snapshot.values())
    table = _table(["Device", *names])
    for device, row in snapshot.items():
        table.add_row(str(device), *(_amount(row[name], units) for name in names))
    return table


def _states_table(snapshots: Mapping[ModuleState, list[Snapshot]], units: str) -> Table:
    names = _held(row for kept in snapshots.values() for snapshot in kept for row in snapshot.values())
    table = _table(["State & Call", "Device", *names])
    for state, kept in snapshots.items():
        for number, snapshot in enumerate(kept, 1):
            heading = f"{state.value} # {number}"
            for device, row in snapshot.items():
                table.add_row(heading, str(device), *(_amount(row[name], units) for name in names))
                heading = ""
    return table


def _held(rows: Iterable[Mapping[str, int]]) -> list[str]:
    """The keys under which any row holds something, the total last."""
    held = {name: None for row in rows for name, num_bytes in row.items() if num_bytes and name != TOTAL_KEY}
    return [*held, TOTAL_KEY]


def _amount(num_bytes: int, units: str) -> str:
    amount = num_bytes if units == "B" else round(num_bytes / DIVISORS[units], 2)
    return f"{amount} {units}"


def _table(headings: list[str]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False)
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="right" if index and heading != "Device" else "left", overflow="fold")
    return table


def _print_lines(lines: Iterable[str]) -> None:
    print("\n".join(lines))  # noqa: T201  # what the caller asked for


def _print_table(table: Table) -> None:
    from rich.console import Console

    console = Console(highlight=False, width=None if sys.stdout.isatty() else _WIDE)
    console.print(table)


def _natural(text: str) -> list[tuple[int, str]]:
    """Numbers in a name sort as numbers."""
    return [(int(part), "") if part.isdecimal() else (-1, part.lower()) for part in re.split("([0-9]+)", text)]
