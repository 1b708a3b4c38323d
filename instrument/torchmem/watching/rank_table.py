"""The pane of all ranks: state, step, memory against its limit, baseline and drift, alerts.

Invariants: torch-free and pure; columns that the terminal has no room for are left out, the most dispensable first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from rich.table import Table
from rich.text import Text

from torchmem import show
from torchmem.show import Book, binary, cut
from torchmem.watching.choice import window
from torchmem.watching.lines import BAD, GOOD, HEAD, MAX_NAME, QUIET, Page, percent, rank_number
from torchmem.watching.look import DeviceLook, RankLook
from torchmem.wire.record import Identity
from torchmem_exporter.findings import FULL_SHARE
from torchmem_exporter.words import rate

CHOSEN = "reverse"
MAX_WORDS = 12
"""Columns of a rank's alerts in a terminal that is not roomy; of what is longer, the first and the number."""
NARROW, ROOMY, WIDE, WIDEST = 76, 100, 120, 150
"""Columns of the terminal from which on more is shown."""

Align = Literal["left", "right"]


class _Column(NamedTuple):
    name: str
    cell: Callable[[RankLook, DeviceLook | None], str | Text]
    align: Align = "left"
    from_width: int = 0


def ranks(page: Page, width: int, height: int) -> Table:
    """All ranks, or those around the chosen one."""
    choice = page.choice
    rows = choice.ranks(page.look)
    position = choice.position(rows)
    columns = [column for column in _columns(page, width) if width >= column.from_width]
    table = Table.grid(padding=(0, 1, 0, 0), pad_edge=False)
    for column in columns:
        table.add_column(column.name, justify=column.align, no_wrap=True, overflow="ellipsis")
    table.add_row(*(column.name for column in columns), style=HEAD)
    first, end = window(len(rows), position, height - 1)
    for row in range(first, end):
        one = rows[row].device(choice.device)
        mark = ">" if row == position else "^" if row == first > 0 else "v" if row == end - 1 < len(rows) - 1 else " "
        style = CHOSEN if row == position else "" if rows[row].is_alive else QUIET
        table.add_row(mark, *(column.cell(rows[row], one) for column in columns[1:]), style=style)
    return table


def _columns(page: Page, width: int) -> list[_Column]:
    return [_Column(" ", lambda _rank, _one: " "), *_of_ranks(page), *_of_devices(page), _alerts(page, width)]


def _of_ranks(page: Page) -> list[_Column]:
    def of(name: str, text: Callable[[Identity], str], align: Align = "left", from_width: int = 0) -> _Column:
        return _Column(name, lambda rank, _: cut(text(rank.view.record.identity), MAX_NAME), align, from_width)

    def state(rank: RankLook, _one: DeviceLook | None) -> Text:
        return Text(rank.view.state, GOOD if rank.view.state in ("running", "exited") else BAD)

    job = [of("job", lambda identity: identity.train_job)] if len(page.look.jobs) > 1 else []
    return [
        *job,
        _Column("rank", lambda rank, _: rank_number(rank)),
        of("host", lambda identity: identity.host, from_width=WIDEST),
        of("pid", lambda identity: str(identity.pid), "right", WIDEST),
        _Column("state", state),
        _Column("step", lambda rank, _: str(rank.view.record.clock.step), "right"),
    ]


def _of_devices(page: Page) -> list[_Column]:
    def of(name: str, cell: Callable[[DeviceLook], str | Text], align: Align = "right", from_width: int = 0) -> _Column:
        return _Column(name, lambda _, one: "-" if one is None else cell(one), align, from_width)

    is_peak = page.choice.book is Book.PEAK
    book = "step peak" if is_peak else "usage"

    def held(one: DeviceLook) -> int:
        return one.device.step_peak_bytes if is_peak else one.device.usage_bytes

    def share(one: DeviceLook) -> float | None:
        limit = one.device.limit_bytes
        return held(one) / limit if limit is not None and limit > 0 else None

    def whole_percent(one: DeviceLook) -> str:
        ratio = share(one)
        return "-" if ratio is None else f"{ratio:.0%}"

    has_forecast = any(one.device.forecast_bytes is not None for rank in page.look.ranks for one in rank.devices)
    forecast = [of("forecast", lambda one: percent(one.forecast_drift_ratio), from_width=WIDE)] if has_forecast else []
    return [
        of("device", lambda one: cut(one.device.name, MAX_NAME), "left"),
        of("of its limit", lambda one: _track(share(one), page), "left", ROOMY if len(page.look.jobs) > 1 else NARROW),
        of("", whole_percent),
        of(book, lambda one: binary(held(one))),
        of("limit", lambda one: _size(one.device.limit_bytes), from_width=ROOMY),
        of("baseline", lambda one: _size(one.verdict.judgement.baseline_bytes), from_width=ROOMY),
        of("drift", lambda one: percent(one.verdict.judgement.drift_ratio)),
        of("growth", _growth, from_width=WIDE),
        *forecast,
    ]


def _alerts(page: Page, width: int) -> _Column:
    def words(rank: RankLook, _one: DeviceLook | None) -> Text:
        found = list(dict.fromkeys(finding.word for finding in rank.findings(page.look.taken_at)))
        text = " ".join(found)
        is_short = len(text) <= MAX_WORDS or width >= ROOMY
        return Text(text if is_short else f"{found[0]} +{len(found) - 1}", BAD)

    return _Column("alerts", words)


def _track(share: float | None, page: Page) -> Text:
    """A bar in its bounds."""
    if share is None:
        return Text("no limit", QUIET)
    filling = show.bar(min(max(share, 0.0), 1.0), page.encoding)
    rest = ("." if page.is_plain else "\u2591") * (show.BAR_CELLS - len(filling))
    return Text.assemble((filling, BAD if share >= FULL_SHARE else ""), rest)


def _size(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else binary(num_bytes)


def _growth(one: DeviceLook) -> str:
    growth = one.verdict.judgement.growth_bytes_per_second
    return "-" if growth is None else rate(growth)
