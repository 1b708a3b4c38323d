"""The panes as the terminal shows them."""

from __future__ import annotations

import io
import time

import pytest
from rich.console import Console

import small_records
import watched
from torchmem.watching import drawing
from torchmem.watching.choice import Choice
from torchmem.watching.lines import Page, chart
from torchmem.watching.rank_table import ranks
from torchmem.wire import record as wire
from torchmem_exporter.drift.judge import Grower
from watched import GIB, MIB, device_look, look, rank_look

RANKS = """\
  rank state   step device of its limit      step peak  drift alerts
> 0/2  running  412 cuda:0 ▎░░░░░░░░░░░  2%  16.00 MiB  +0.1%
  1/2  running  412 cuda:0 ███████████▋ 97% 992.00 MiB +12.3% full drift
"""

WIDE_HEAD = "rank host pid state step device of its limit step peak limit baseline drift growth alerts"

ALERTS = """\
── rank 1/2 cuda:0 on node-1, pid 4321 ─────────────────────────────────────────
level +12.3% of 16.00 MiB!  floor steady  filled 97%!  oom 0  age 1 s
! rank 1/2: cuda:0 is 96.9% full at the step peak, of 1.0 GiB
! rank 1/2: cuda:0 +12.3% over its baseline: layers.3.mlp activation +2.0 MiB
"""

HOLDERS = """\
── who holds 16.00 MiB at the peak of a step ───────────────────────────────────
layers.*.attention activation    6.00 MiB  37.5% ████▌
layers.*           activation    4.00 MiB  25.0% ███
(3 more)                         6.00 MiB  37.5% ████▌
"""

GROWERS = """\
── grown over the baseline, at the step peak ─────
layers.3.mlp activation    +2.00 MiB
head         gradient        +1000 B
"""

TIMELINE = """\
-- steps 5 to 12, without 2 that held a checkpoint or an evaluation ----
step peak 10.00 MiB to 20.00 MiB    ...||.
step end  1.00 MiB to 1.00 MiB      ......
"""


def drawn(renderable, width=80, encoding="utf-8"):
    """The lines of a pane, without what pads them."""
    buffer = io.TextIOWrapper(io.BytesIO(), encoding=encoding, newline="\n")
    Console(file=buffer, width=width, highlight=False).print(renderable)
    buffer.flush()
    return "".join(line.rstrip() + "\n" for line in buffer.buffer.getvalue().decode(encoding).splitlines())


def pair():
    """Two ranks, of which the second drifts and is nearly full."""
    device = small_records.device(step_peak_bytes=992 * MIB, unattributed_bytes=0, allocator=wire.Allocator())
    growers = (Grower("layers.3.mlp", "activation", 2 * MIB), Grower("head", "gradient", 1000))
    sick = device_look(device, is_level_drifting=True, drift_ratio=0.123, growers=growers)
    return look(rank_look(), rank_look(1, devices=[sick]))


def page(reading, *, row=0, **changes):
    """A page on which the rank in that row is chosen."""
    return Page(reading, Choice().moved(reading, row), **changes)


def test_ranks_show_state_and_peak_against_limit():
    """The user would not see which rank is in trouble."""
    assert drawn(ranks(page(pair()), 80, 10)) == RANKS


def test_wide_terminal_shows_limit_baseline_growth_and_host():
    """The room of a large terminal would be wasted."""
    head, first, _ = drawn(ranks(page(pair()), 200, 10), 200).splitlines()
    assert " ".join(head.split()) == WIDE_HEAD
    assert first.split()[1:4] == ["0/2", "node-1", "4321"]
    assert "1.00 GiB 16.00 MiB  +0.1%  0 B/h" in first


def test_forecast_has_a_column_and_a_word_where_there_is_one():
    """The user could not see whether a rank keeps to its forecast, or would see an empty column."""
    device = small_records.device(forecast_bytes=12 * MIB, allocator=wire.Allocator())
    reading = look(rank_look(devices=[device_look(device, forecast_drift_ratio=1 / 3)]), rank_look(1))
    head, first, second = drawn(ranks(page(reading), 120, 10), 120).splitlines()
    assert head.split()[-2:] == ["forecast", "alerts"]
    assert (first.split()[-2:], second.split()[-1]) == (["+33.3%", "forecast"], "-")
    assert "  forecast +33.3% of 12.00 MiB!  oom 0" in drawn(drawing.alerts_pane(page(reading), 100, 10), 100)
    assert "forecast" not in drawn(ranks(page(pair()), 120, 10), 120)
    unknown = look(rank_look(devices=[device_look(device)]))
    assert "  forecast 12.00 MiB  oom 0" in drawn(drawing.alerts_pane(page(unknown), 100, 10), 100)


def test_jobs_are_told_apart_where_there_are_several():
    """Two jobs' rank 0 would look the same."""
    other = rank_look(identity=small_records.identity(train_job="a-very-long-name-of-a-job"))
    lines = drawn(ranks(page(look(rank_look(), other)), 80, 10)).splitlines()
    assert [line.split()[:3] for line in lines[1:]] == [
        [">", "train", "0/2"],
        ["~-long-name-of-a-job", "0/2", "running"],
    ]


def test_ranks_beyond_the_pane_are_marked():
    """The user would take the ranks that fit for all of them."""
    reading = look(*(rank_look(rank) for rank in range(9)))
    marks = [line[:6].split() for line in drawn(ranks(page(reading, row=4), 80, 6)).splitlines()[1:]]
    assert marks == [["^", "2/2"], ["3/2"], [">", "4/2"], ["5/2"], ["v", "6/2"]]


def test_alerts_tell_the_state_and_what_is_the_matter():
    """An alert would be a word without a cause."""
    assert drawn(drawing.alerts_pane(page(pair(), row=1), 80, 10)) == ALERTS


def test_alerts_that_do_not_fit_are_counted():
    """A second alert would be cut off without a trace."""
    lines = drawn(drawing.alerts_pane(page(pair()), 80, 3)).splitlines()
    assert lines[2:] == ["! 2 more alerts"]


def test_same_trouble_of_many_ranks_is_one_line():
    """One cause on sixty-four ranks would fill the screen."""
    labeler = wire.Labeler(name="fsdp2", up=False, reason="gone")
    reading = look(*(rank_look(rank, labelers=[labeler]) for rank in range(5)), unreadable=("x: garbage",))
    lines = [line.plain for line in drawing.alert_lines(reading, None)]
    assert lines == ["! unreadable: x: garbage", "! rank 0/2, rank 1/2, rank 2/2 and 2 more: fsdp2 is disabled: gone"]


def test_holders_and_their_rest_are_the_whole():
    """Rows would not add up to the peak."""
    assert drawn(drawing.holders(page(look(rank_look())), 80, 4)) == HOLDERS
    assert drawn(drawing.holders(page(look(rank_look())), 80, 20, top=2)) == HOLDERS


def test_narrow_holders_lose_the_bar_and_the_beginning_of_names():
    """In a narrow pane modules could not be told apart, since their names differ at the end."""
    line = drawn(drawing.holders(page(look(rank_look())), 44, 4), 44).splitlines()[1]
    assert line == "~s.*.attention activation    6.00 MiB  37.5%"


def test_empty_book_is_a_missing_step_only_before_the_first():
    """A device without use would look as if its rank had never finished a step."""
    unused = device_look(small_records.device(step_peak=b""))
    readings = [look(rank_look(devices=[unused], clock=small_records.clock(step=step))) for step in (0, 412)]
    said = [drawn(drawing.holders(page(one), 60, 4)) for one in readings]
    assert ["no step has finished yet" in said[0], "nothing is held at the peak of a step" in said[1]] == [True, True]


def test_growers_are_named_and_none_is_told_from_not_known():
    """A job that is still being learned would look as if nothing had grown."""
    assert drawn(drawing.growers(page(pair(), row=1), 50, 9), 50) == GROWERS
    unknown = look(rank_look(devices=[device_look(baseline_bytes=None, drift_ratio=None)]))
    unseen = look(rank_look(devices=[device_look(growers=None)]))
    said = [drawn(drawing.growers(page(one), 80, 9)).splitlines()[1] for one in (pair(), unknown, unseen)]
    assert said == [
        "nobody, or by less than 1% of it",
        "no baseline yet: still learning what is usual",
        "not known yet: of no usual step it was seen what its peak is made of",
    ]


def test_timeline_leaves_checkpoints_out_and_needs_no_utf8():
    """One checkpoint would flatten the curve of all other steps, or a plain terminal show garbage."""
    peaks = [10, 11, 12, 90, 20, 20, 10, 90]
    ring = watched.ring(5, [peak * MIB for peak in peaks], [MIB] * 8, phases=watched.apart(8, 4))
    reading = look(rank_look(ring=ring))
    text = drawn(drawing.timeline(page(reading, encoding="ascii"), 72, 3), 72, "ascii")
    assert text == TIMELINE


def test_timeline_of_a_rank_without_steps_says_so():
    """A job in its first step would end the view."""
    reading = look(rank_look(ring=wire.Ring()), rank_look(1, devices=[]))
    for row in (0, 1):
        assert drawn(drawing.timeline(page(reading, row=row), 30, 3)) == "── no steps yet ──────────────\n"


def test_chart_shows_a_trend_and_noise_as_noise():
    """A flat job would look wild, or a rise be lost where many steps share a column."""
    assert chart([100, 101, 100], max, 9, 1, "utf-8") == ["▁▄▁"]
    assert chart(list(range(0, 800, 10)), max, 8, 1, "utf-8") == ["▁▂▃▄▅▆▇█"]
    assert chart([0, 50, 100], max, 3, 2, "utf-8") == [" ▁█", "▁██"]
    assert chart([5], min, 0, 1, "ascii") == ["."]


def test_header_counts_states_and_unreadable_records():
    """A record that cannot be read would go unnoticed."""
    reading = look(rank_look(), rank_look(1, "stale"), unreadable=("a", "b"))
    clock = time.strftime("%H:%M:%S", time.localtime(watched.NOW))
    text = drawing.header(page(reading), 80).plain
    assert text.split("  ")[:4] == ["torchmem watch", "1 running, 1 stale of train", "2 unreadable!", "/dev/shm/x"]
    assert (text[-8:], len(text)) == (clock, 80)
    narrow = drawing.header(page(reading), 76).plain
    assert narrow.endswith(f"shm/x  {clock}")
    assert len(narrow) == 76


@pytest.mark.parametrize("exists", [True, False])
def test_waiting_says_what_for(exists):
    """The user would not know whether the directory or the records are missing."""
    text = drawing.waiting(page(look(exists=exists, unreadable=("x: garbage",)))).plain
    missing = "no records under /dev/shm/x yet" if exists else "/dev/shm/x does not exist yet"
    assert text.splitlines()[0] == f"waiting: {missing}"
    assert text.splitlines()[-1] == "cannot be read: x: garbage"
    assert "died" not in text


def test_waiting_points_at_those_who_died():
    """After a crash the view would say that no job has run."""
    text = drawing.waiting(page(look(num_deaths=1))).plain
    assert text.splitlines()[-1] == "1 attempt died: torchmem post-mortem /dev/shm/x"


@pytest.mark.parametrize("size", [(0, 0), (1, 1), (20, 5), (80, 24), (200, 60)])
def test_nothing_is_wider_or_higher_than_its_pane(size):
    """A line too long would break the whole screen."""
    width, height = size
    long = "deep." * 60 + "\u4f4d\u7f6e"
    device = device_look(small_records.device(name="cuda:" + "9" * 50), growers=(Grower(long, "x" * 40, 5 * GIB),))
    reading = look(rank_look(devices=[device], modules=[long] * 5), *(rank_look(rank) for rank in range(1, 70)))
    for draw in (drawing.holders, drawing.growers, drawing.timeline, drawing.alerts_pane, ranks):
        lines = Console(width=max(1, width)).render_lines(draw(page(reading), width, height), pad=False)
        assert len(lines) <= max(height, 1)
        assert all(sum(segment.cell_length for segment in line) <= max(1, width) for line in lines)
