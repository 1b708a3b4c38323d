"""What ``torchmem forecast`` prints.

Invariants: text from the job is stripped of what could drive a terminal; the rows of a table sum to its total.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from torchmem.forecasting.advice import candidates
from torchmem.forecasting.outcome import DeviceForecast, Forecast, RankForecast, StepForecast
from torchmem.forecasting.sweep import Sweep
from torchmem.model import folded
from torchmem.show import bar, binary
from torchmem.wire.ranks import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def draw(console: Console, forecast: Forecast, *, capacity_bytes: int | None, top: int, fold: bool) -> None:
    """Prints a forecast: a heading, each rank's peak, what it is made of, and what would have to shrink."""
    from rich.text import Text

    console.print(Text(_heading(forecast), "bold"))
    for rank in forecast.ranks:
        _draw_rank(console, rank)
    largest = forecast.largest
    if len(forecast.ranks) > 1:
        console.print(f"rank {largest.rank}, which holds most, at that moment:", style="italic")
    _draw_step(console, largest.devices[0].highest, top, fold=fold)
    if capacity_bytes is not None:
        _draw_fit(console, forecast.highest, capacity_bytes)
    for note in dict.fromkeys(note for rank in forecast.ranks for note in rank.notes):
        console.print(Text(f"note: {printable(note)}", "yellow"))


def draw_sweep(console: Console, swept: Sweep, capacity_bytes: int | None) -> None:
    """Prints the peaks by value of the argument, and the largest value that fits."""
    from rich.text import Text

    table = _table(printable(swept.name), "peak", *(("fits",) if capacity_bytes is not None else ()))
    for value, forecast in sorted(swept.points, key=lambda point: (str(type(point[0])), point[0])):
        cells = [printable(str(value)), binary(forecast.peak_bytes)]
        if capacity_bytes is not None:
            cells.append("yes" if forecast.peak_bytes <= capacity_bytes else "no")
        table.add_row(*(Text(cell) for cell in cells))
    console.print(table)
    if capacity_bytes is None:
        return
    name = printable(swept.name)
    if swept.largest_fit is None:
        console.print(f"no {name} that was tried fits {binary(capacity_bytes)}")
    else:
        how = "largest" if swept.is_exact else "largest that was tried"
        console.print(f"the {how} {name} that fits {binary(capacity_bytes)} is {swept.largest_fit}", style="bold")


def _heading(forecast: Forecast) -> str:
    arguments = ", ".join(f"{name}={value}" for name, value in forecast.arguments.items())
    mesh = " x ".join(f"{name}={size}" for name, size in forecast.mesh.items())
    ranks = f"{forecast.world_size} rank{'s' if forecast.world_size > 1 else ''}{f' ({mesh})' if mesh else ''}"
    sizes = "blocks as CUDA's caching allocator makes them" if forecast.allocator == "cuda" else "sizes as requested"
    return printable(f"{forecast.function}({arguments}) on {ranks}, {forecast.device}, {sizes}")


def _draw_rank(console: Console, rank: RankForecast) -> None:
    from rich.text import Text

    for device in rank.devices:
        step = device.highest
        line = Text(f"  rank {rank.rank} {device.device}: ")
        line.append(f"peak {binary(step.peak_bytes)}", "bold")
        line.append(f" in the {step.name} step{_place(step)}")
        console.print(line)
        console.print(Text(f"    {_figures(device)}"))


def _place(step: StepForecast) -> str:
    at = step.at
    where = f", {at.phase}" if at.phase else ""
    where += f" of {at.module}" if at.module else ""
    return printable(where + (f", at {at.operator}" if at.operator else ""))


def _figures(device: DeviceForecast) -> str:
    figures = {f"{step.name} step": step.peak_bytes for step in device.steps}
    figures["between steps"] = device.steps[-1].end_bytes
    figures["while it is made"] = device.construction_peak_bytes
    if device.reserved_bytes is not None:
        figures["reserved by the allocator"] = device.reserved_bytes
    return ", ".join(f"{name} {binary(num_bytes)}" for name, num_bytes in figures.items())


def _draw_step(console: Console, step: StepForecast, top: int, *, fold: bool) -> None:
    _draw_holders(console, "reftype", step.by_reftype, len(step.by_reftype))
    by_module: Counter[str] = Counter()
    for module, num_bytes in step.by_module.items():
        by_module[folded(module) if fold else module] += num_bytes
    _draw_holders(console, "module", dict(by_module.most_common()), top)


def _draw_holders(console: Console, name: str, held: dict[str, int], top: int) -> None:
    from rich.padding import Padding
    from rich.text import Text

    total = sum(held.values())
    table = _table(name, "bytes", "share", "")
    rows = list(held.items())
    shown = rows[:top] + ([(f"({len(rows) - top} more)", sum(n for _, n in rows[top:]))] if len(rows) > top else [])
    for label, num_bytes in shown:
        share = num_bytes / total if total else 0.0
        cells = (printable(label), binary(num_bytes), f"{share:.1%}", bar(share, console.encoding))
        table.add_row(*(Text(cell) for cell in cells))
    console.print(Padding.indent(table, 2))


def _draw_fit(console: Console, step: StepForecast, capacity_bytes: int) -> None:
    from rich.text import Text

    over = step.peak_bytes - capacity_bytes
    if over <= 0:
        console.print(f"fits {binary(capacity_bytes)}, with {binary(-over)} to spare", style="green")
        return
    console.print(
        f"does not fit {binary(capacity_bytes)}: {binary(over)} too much. What would have to shrink:", style="red"
    )
    for one in candidates(step, capacity_bytes):
        share = f"{one.share:.0%} less would do" if one.share <= 1 else "not enough alone"
        line = Text(f"  {one.reftype} {binary(one.num_bytes)}", "bold")
        line.append(f", most of it in {printable(one.module)}: {share}; {one.hint}", "not bold")
        console.print(line)


def _table(*columns: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False)
    for column in columns:
        is_figure = column in {"bytes", "share", "peak", "by"}
        table.add_column(column, justify="right" if is_figure else "left", no_wrap=is_figure, overflow="fold")
    return table
