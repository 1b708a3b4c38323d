"""What ``torchmem diff`` shows: for each device that was compared, by how much it grew, and who did.

Invariants: torch-free; the rows of a table and the one that sums the rest add up to the totals of both runs, exactly;
text from a record is stripped of what could drive a terminal.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from torchmem.diff import Held, Matched, Pair, Row, Rows, rows
from torchmem.diff_input import Run
from torchmem.show import BAR_CELLS, Book, By, bar, binary
from torchmem.wire.ranks import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text


@dataclass(frozen=True)
class Comparison:
    """Two runs, matched."""

    before: Run
    after: Run
    book: Book
    matched: Matched
    threshold: Fraction

    @property
    def exceeding(self) -> list[Pair]:
        """The devices that grew by more than the threshold."""
        return [pair for pair in self.matched.pairs if pair.exceeds(self.threshold)]


def as_data(compared: Comparison, by: By, top: int) -> dict[str, Any]:
    """The comparison as plain data, ready for ``json.dumps``; sizes are bytes, ratios of what was held before."""
    matched = compared.matched
    return {
        "before": _run_data(compared.before),
        "after": _run_data(compared.after),
        "book": compared.book.value,
        "matched_by": "rank" if matched.is_by_rank else "highest",
        "threshold_ratio": float(compared.threshold),
        "exceeded": bool(compared.exceeding),
        "devices": [_pair_data(pair, compared, rows(pair, by, top)) for pair in matched.pairs],
        "only_before": [_held_data(held) for held in matched.only_before],
        "only_after": [_held_data(held) for held in matched.only_after],
    }


def _run_data(run: Run) -> dict[str, Any]:
    return {
        "path": run.path,
        "kind": run.kind,
        "train_job": run.train_job,
        "num_ranks": run.num_ranks,
        "remarks": run.remarks,
    }


def _pair_data(pair: Pair, compared: Comparison, found: Rows) -> dict[str, Any]:
    return {
        "before": _held_data(pair.before),
        "after": _held_data(pair.after),
        "grown_bytes": pair.grown_bytes,
        "grown_ratio": pair.grown_ratio,
        "exceeded": pair.exceeds(compared.threshold),
        "rows": [{"module": row.module, "reftype": row.reftype, **_row_data(row)} for row in found.shown],
        "others": {"num_rows": found.num_others, **_row_data(found.others)},
    }


def _held_data(held: Held) -> dict[str, Any]:
    return {"rank": held.rank, "device": held.device, "moment": held.moment, "total_bytes": held.total_bytes}


def _row_data(row: Row) -> dict[str, int]:
    return {"before_bytes": row.before_bytes, "after_bytes": row.after_bytes, "grown_bytes": row.grown_bytes}


def draw(console: Console, compared: Comparison, by: By, top: int, *, fold: bool) -> None:
    """Prints who is compared, a table of what grew for each device, and which grew too much."""
    from rich.padding import Padding
    from rich.text import Text

    matched = compared.matched
    for letter, run in (("A", compared.before), ("B", compared.after)):
        ranks = f"{run.num_ranks} rank{'s' * (run.num_ranks != 1)}"
        console.print(
            Text(f"{letter}: {printable(run.train_job)}, {ranks}, {run.kind} in {printable(run.path)}", "bold")
        )
    if not matched.is_by_rank:
        console.print("the two have not the same ranks: the rank of A that holds most is held against that of B")
    for pair in matched.pairs:
        console.print()
        console.print(_heading(pair, compared))
        found = rows(pair, by, top, fold=fold)
        if found.shown:
            console.print(Padding.indent(_table(pair, found, by, console.encoding), 2))
        else:
            console.print("  nothing grew or shrank")
    console.print()
    for letter, devices in (("A", matched.only_before), ("B", matched.only_after)):
        for held in devices:
            console.print(Text(f"only in {letter}, not compared: {_name(held)}, {binary(held.total_bytes)}", "yellow"))
    console.print(_verdict(compared))


def _verdict(compared: Comparison) -> Text:
    from rich.text import Text

    exceeding = compared.exceeding
    limit = f"{float(100 * compared.threshold):.6g}%"
    if not exceeding:
        return Text(f"no device grew by more than {limit}", "green")
    names = ", ".join(f"{_name(pair.after)} by {_ratio(pair)}" for pair in exceeding)
    return Text(f"grew by more than {limit}: {names}", "red")


def _name(held: Held) -> str:
    return f"rank {held.rank} {printable(held.device)}"


def _ratio(pair: Pair) -> str:
    return "any ratio, from nothing" if pair.grown_ratio is None else f"{pair.grown_ratio:+.1%}"


def _heading(pair: Pair, compared: Comparison) -> Text:
    from rich.text import Text

    before, after = pair.before, pair.after
    names = _name(before) if before.key == after.key else f"{_name(before)} of A, {_name(after)} of B"
    moments = before.moment if before.moment == after.moment else f"{before.moment} in A, {after.moment} in B"
    style = "red" if pair.exceeds(compared.threshold) else "green"
    grown = _ratio(pair) if pair.grown_bytes else "unchanged"
    return Text.assemble(
        (names, "bold"),
        f", {moments}: {binary(before.total_bytes)} in A, {binary(after.total_bytes)} in B: ",
        (grown, style),
    )


def _table(pair: Pair, found: Rows, by: By, encoding: str) -> Table:
    """The rows as a table, with bars of how much each one changed beside the one that changed most."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=box.SIMPLE_HEAD, show_edge=False)
    names = [name for name in ("module", "reftype") if by in (By.BOTH, By(name))]
    for name in names:
        drawn.add_column(name, overflow="fold", no_wrap=name == "reftype")
    for name in ("A", "B", "grown", "of A"):
        drawn.add_column(name, justify="right", no_wrap=True)
    drawn.add_column("", no_wrap=True, min_width=BAR_CELLS)
    most = max(abs(row.grown_bytes) for row in found.shown)

    def add(labels: list[str], row: Row, style: str, length: float | None) -> None:
        total = pair.before.total_bytes
        share = f"{row.grown_bytes / total:+.1%}" if total else ""
        sizes = binary(row.before_bytes), binary(row.after_bytes), signed(row.grown_bytes)
        drawn.add_row(
            *(Text(cell) for cell in (*labels, *sizes, share, "" if length is None else bar(length, encoding))),
            style=style,
        )

    for row in found.shown:
        labels = [printable(name) for name in (row.module, row.reftype) if name is not None]
        add(labels, row, "red" if row.grown_bytes > 0 else "green", abs(row.grown_bytes) / most)
    blanks = [""] * (len(names) - 1)
    if found.num_others:
        add([f"({found.num_others} more)", *blanks], found.others, "dim", None)
    drawn.add_section()
    add(["total", *blanks], Row(None, None, pair.before.total_bytes, pair.after.total_bytes), "bold", None)
    return drawn


def signed(num_bytes: int) -> str:
    """A difference in binary units, with its sign."""
    return f"+{binary(num_bytes)}" if num_bytes > 0 else binary(num_bytes)
