"""A reading as lines of a terminal: one function for each pane, used by the live view and the plain snapshot alike.

Invariants: torch-free and pure; what is drawn is at most as wide and as high as it is told; everything that colour says
is said by a word or a mark as well; text from a record is stripped of what could drive a terminal.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from rich.console import Group
from rich.text import Text

from torchmem import show
from torchmem.model import Phase
from torchmem.postmortem_show import hint
from torchmem.show import By, binary, cut
from torchmem.watching.lines import (
    BAD,
    HEAD,
    MAX_NAME,
    QUIET,
    Page,
    chart,
    columns_of_names,
    named,
    pane,
    percent,
    rule,
    with_end,
)
from torchmem.watching.look import DeviceLook, Look, RankLook
from torchmem.watching.rank_table import ranks
from torchmem.wire.ranks import printable, span
from torchmem.wire.record import filled_share
from torchmem_exporter.drift.drift import Judgement
from torchmem_exporter.drift.ring_steps import Step
from torchmem_exporter.findings import FULL_SHARE, WORDS, Finding, is_missed
from torchmem_exporter.words import rate

NUM_GROWERS = 10
MAX_NAMED = 3
"""Ranks that an alert names."""
APART = Phase.CHECKPOINT | Phase.EVAL
LEAST_TIMELINE = 3
"""Lines: a title and two charts."""


def header(page: Page, width: int) -> Text:
    """The first line: where is looked, what was found, and when."""
    look = page.look
    states = [rank.view.state for rank in look.ranks]
    text = Text.assemble(("torchmem watch", HEAD), "  ")
    text.append(", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states)) or "no ranks")
    if len(look.jobs) == 1:
        text.append(f" of {cut(look.jobs[0], MAX_NAME)}")
    if look.unreadable:
        text.append(f"  {len(look.unreadable)} unreadable!", BAD)
    clock = time.strftime("  %H:%M:%S", time.localtime(look.taken_at))
    text.append(f"  {cut(look.directory, max(1, width - text.cell_len - len(clock) - 2))}")
    with_end(text, clock, width)
    text.truncate(max(0, width), overflow="ellipsis")
    return text


def waiting(page: Page) -> Text:
    """What is said while there is no rank to show."""
    look = page.look
    where = f"no records under {look.directory} yet" if look.exists else f"{look.directory} does not exist yet"
    text = Text(f"waiting: {where}\nIs a job running with torchmem.install(...)? Set TORCHMEM_DIR or pass DIR.\n")
    if look.num_deaths:
        text.append(f"\n{hint(look.num_deaths, look.directory)}\n")
    for line in look.unreadable:
        text.append(f"\ncannot be read: {line}", BAD)
    return text


# -- the alerts


def alert_lines(look: Look, chosen: RankLook | None) -> list[Text]:
    """What cannot be read, and what is the matter with the ranks: the chosen one first, then the worst."""
    lines = [Text.assemble(("! unreadable: ", BAD), line) for line in look.unreadable]
    concerned: dict[Finding, list[RankLook]] = {}
    for rank in look.ranks:
        for finding in rank.findings(look.taken_at):
            concerned.setdefault(finding, []).append(rank)
    for finding, those in sorted(concerned.items(), key=lambda one: (chosen not in one[1], WORDS.index(one[0].word))):
        names = ", ".join(named(look, rank) for rank in those[:MAX_NAMED])
        more = f" and {len(those) - MAX_NAMED} more" if len(those) > MAX_NAMED else ""
        lines.append(Text.assemble((f"! {names}{more}: ", BAD), finding.text))
    return lines


def alerts_pane(page: Page, width: int, height: int) -> Group:
    """The state of everything that is judged, for the chosen rank and device, and what is the matter with any."""
    look, chosen = page.look, page.choice.chosen(page.look)
    if chosen is None:
        return Group()
    one, identity = chosen.device(page.choice.device), chosen.view.record.identity
    device = f" {printable(one.device.name)}" if one else ""
    title = f"{named(look, chosen)}{device} on {printable(identity.host)}, pid {identity.pid}"
    found = alert_lines(look, chosen)
    room = max(0, height - 2)
    if len(found) > room > 0:
        found = [*found[: room - 1], Text(f"! {len(found) - room + 1} more alerts", BAD)]
    return pane([rule(title, width, page), _state(chosen, one, look.taken_at), *found], width, height)


def _state(rank: RankLook, one: DeviceLook | None, now: float) -> Text:
    """All that is judged of a rank and a device, in one line; what is bad ends in an exclamation mark."""
    words: list[tuple[str, str, bool]] = []
    if one is not None:
        judgement, share, num_ooms = one.verdict.judgement, filled_share(one.device), one.device.allocator.num_ooms
        words.append(("level", _level(judgement), judgement.is_level_drifting))
        words.append(("floor", _floor(judgement), judgement.is_floor_growing))
        if share is not None:
            words.append(("filled", f"{share:.0%}", share >= FULL_SHARE))
        if one.device.forecast_bytes is not None:
            words.append(("forecast", _forecast(one), is_missed(one.forecast_drift_ratio)))
        words.append(("oom", str(num_ooms), num_ooms > 0))
    age = now - rank.view.record.clock.written_at
    words.append(("age", span(age), rank.view.state in ("stale", "crashed")))
    return Text("  ").join(
        Text.assemble((f"{name} ", QUIET), (f"{value}!", BAD) if is_bad else value) for name, value, is_bad in words
    )


def _level(judgement: Judgement) -> str:
    if judgement.baseline_bytes is None:
        return "learning"
    return _over(judgement.drift_ratio, judgement.baseline_bytes)


def _forecast(one: DeviceLook) -> str:
    return _over(one.forecast_drift_ratio, one.device.forecast_bytes or 0)


def _over(ratio: float | None, num_bytes: int) -> str:
    """How far over what, or that alone while it is not known how far."""
    return binary(num_bytes) if ratio is None else f"{percent(ratio)} of {binary(num_bytes)}"


def _floor(judgement: Judgement) -> str:
    growth = judgement.growth_bytes_per_second
    if judgement.is_floor_growing:
        return "grows" if growth is None else f"+{rate(growth)}"
    return "learning" if growth is None else "steady"


# -- who holds the memory, and who grew


def _chosen(page: Page) -> tuple[RankLook, DeviceLook] | None:
    rank = page.choice.chosen(page.look)
    one = rank.device(page.choice.device) if rank else None
    return (rank, one) if rank and one else None


def holders(page: Page, width: int, height: int, top: int | None = None) -> Group:
    """Who holds the memory of the chosen rank's device, the largest first.

    Args:
        page: what is drawn.
        width: columns.
        height: lines.
        top: rows at most, the rest summed; as many as there is room for where None.
    """
    found = _chosen(page)
    if found is None:
        return pane([rule("nothing is counted on this rank", width, page)], width, height)
    record, device, book = found[0].view.record, found[1].device, page.choice.book
    num_rows = max(0, height - 1 if top is None else min(height - 1, top + 1))
    held = show.holders(record, device, book, By.BOTH, num_rows, fold=not page.choice.unfolds)
    if held.num_others:  # a row for their sum
        held = show.holders(record, device, book, By.BOTH, max(0, num_rows - 1), fold=not page.choice.unfolds)
    if not held.total_bytes:
        return pane([rule(show.nothing(record, book), width, page)], width, height)
    rows = [(row.module or "", row.reftype or "", row.num_bytes) for row in held.shown]
    if held.num_others:
        rows.append((f"({held.num_others} more)", "", held.others_bytes))
    title = f"who holds {binary(held.total_bytes)} {book.description}"
    return pane([rule(title, width, page), *_held(rows, held.total_bytes, width, page)], width, height)


def _held(rows: Sequence[tuple[str, str, int]], total: int, width: int, page: Page) -> list[Text]:
    bar_width = show.BAR_CELLS + 1 if width >= show.WITH_BARS else 0
    names = columns_of_names([(module, reftype) for module, reftype, _ in rows], width - 19 - bar_width)
    lines = []
    for name, (_, _, num_bytes) in zip(names, rows, strict=True):
        share = num_bytes / total
        bar = f" {show.bar(share, page.encoding)}" if bar_width else ""
        lines.append(Text(f"{name} {binary(num_bytes):>11} {share:6.1%}{bar}"))
    return lines


def growers(page: Page, width: int, height: int) -> Group:
    """Who holds more than is usual, on the chosen rank's device."""
    found = _chosen(page)
    lines = [rule("grown over the baseline, at the step peak", width, page)]
    if found is None or found[1].verdict.judgement.baseline_bytes is None:
        lines.append(Text("no baseline yet: still learning what is usual", QUIET))
    elif found[1].verdict.growers is None:
        lines.append(Text("not known yet: of no usual step it was seen what its peak is made of", QUIET))
    elif not found[1].verdict.growers:
        lines.append(Text("nobody, or by less than 1% of it", QUIET))
    else:
        rows = found[1].verdict.growers[:NUM_GROWERS]
        names = columns_of_names([(row.module, row.reftype) for row in rows], width - 13)
        lines += [Text(f"{name} {'+' + binary(row.num_bytes):>12}") for name, row in zip(names, rows, strict=True)]
    return pane(lines, width, height)


# -- the last steps


def timeline(page: Page, width: int, height: int) -> Group:
    """Step peaks and step ends of the chosen rank's device, as far back as its record tells."""
    found = _chosen(page)
    steps = found[0].steps(found[1].device) if found else []
    if not steps or height < LEAST_TIMELINE:
        return pane([rule("no steps yet", width, page)] if not steps else [], width, height)
    num_lines = (height - 1) // 2
    lines = [rule(f"steps {steps[0].number} to {steps[-1].number}{_apart(steps)}", width, page)]
    steps = [step for step in steps if not step.phases & APART] or steps
    lines += _charted("step peak", [step.peak_bytes for step in steps], max, width, num_lines, page)
    lines += _charted("step end", [step.end_bytes for step in steps], min, width, num_lines, page)
    return pane(lines, width, height)


def _apart(steps: Sequence[Step]) -> str:
    """What is said of steps that are no ordinary ones, which would flatten the charts."""
    num_apart = sum(bool(step.phases & APART) for step in steps)
    if num_apart in (0, len(steps)):
        return ""
    return f", without {num_apart} that held a checkpoint or an evaluation"


def _charted(
    name: str, values: Sequence[int], of: Callable[[Sequence[int]], int], width: int, num_lines: int, page: Page
) -> list[Text]:
    """A chart with its lowest and highest value before it."""
    low, high = binary(min(values)), binary(max(values))
    if num_lines == 1:
        labels = [f"{name:<9} {low} to {high}"]
        label_width = 36
    else:
        labels = [f"{name:<9} {high:>11}", *[""] * (num_lines - 2), f"{'':<9} {low:>11}"]
        label_width = 22
    drawn = chart(values, of, width - label_width, num_lines, page.encoding)
    return [Text(f"{label:<{label_width}}{line}") for label, line in zip(labels, drawn, strict=True)]


# -- the plain snapshot


def snapshot(page: Page, width: int, top: int) -> Group:
    """All panes one below the other, as high as they need to be."""
    look = page.look
    if not look.ranks:
        return Group(header(page, width), waiting(page))
    return Group(
        header(page, width),
        ranks(page, width, 1 + len(look.ranks)),
        alerts_pane(page, width, 2 + len(alert_lines(look, None))),
        holders(page, width, 2 + top, top),
        growers(page, width, 1 + NUM_GROWERS),
        timeline(page, width, LEAST_TIMELINE),
    )
