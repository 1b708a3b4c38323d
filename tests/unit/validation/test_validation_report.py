"""What the user of ``torchmem validate`` reads."""

from __future__ import annotations

import json

from test_validation_outcome import RANK, STEP, judge

from torchmem.validation.outcome import FAILED, SKIPPED, RowOutcome
from torchmem.validation.report import Json, Summary, Table, row_lines

FULL_PEAK = {
    "activation": 2048,
    "parameter": 1024,
    "gradient": 1024,
    "optimizer_state": 600,
    "buffer": 500,
    "input": 300,
    "other": 80,
}


def summary(*rows, is_complete=True, remarks=()):
    return Summary(
        torchmem_version="1.2",
        environment={"torch": "2.13", "driver": "", "ranks": 2},
        is_complete=is_complete,
        num_by_status={"ok": len(rows)},
        remarks=list(remarks),
        rows=list(rows),
    )


def lines(outcome):
    return [line.plain for line in row_lines(outcome, 8)]


def test_a_row_shows_its_figures_and_its_parts():
    """The user would miss a figure, or bytes would get lost between the parts and the peak."""
    step = STEP.__class__(5576, 200, FULL_PEAK, STEP.end, STEP.storages)
    outcome = judge(RANK.__class__(**{**vars(RANK), "steps": [step, step]}))
    figures, parts = lines(outcome)
    assert figures == "row           5.45 KiB      5.45 KiB       1.00000        0.000%          1.00  ok"
    expected = "activation 2.00 KiB, parameter 1.00 KiB, gradient 1.00 KiB, optimizer_state 600 B, buffer 500 B"
    assert parts == f"  {expected}, 2 more 380 B"


def test_a_row_that_is_off_says_what_is_off():
    """The user would see that a row is off and not why."""
    outcome = judge(RANK.__class__(**{**vars(RANK), "labelers_down": ["ddp is off: no"]}))
    assert [line.split("  ")[-1] for line in lines(outcome)[:2]] == ["off", "rank 0: labeler ddp is off: no"]


def test_rows_without_figures_give_their_reason():
    """A skipped or failed row would show zeros as if it had run."""
    assert lines(RowOutcome("row", SKIPPED, ["needs 4 ranks"])) == ["row       skipped: needs 4 ranks"]
    assert lines(RowOutcome("row", FAILED, ["rank 1: ValueError: x"])) == ["row       failed: rank 1: ValueError: x"]


def test_table_in_a_file_has_no_bar(capsys):
    """A log would be full of a progress bar's control characters."""
    table = Table(["row"])
    with table.watching(1):
        table.begins("row")
        table.ended(RowOutcome("row", SKIPPED, ["no"]))
    table.closes(summary(is_complete=False))
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert [line.split()[0] for line in out.splitlines()] == ["row", "row", "0", "torchmem"]
    assert out.splitlines()[2:] == ["0 ok; interrupted", "torchmem 1.2, torch 2.13, ranks 2"]


def test_remarks_are_shown(capsys):
    """The user would take a run for what was asked for, or for a passed one, though nothing was validated."""
    for reporter in (Table(["row"]), Json()):
        reporter.closes(summary(remarks=["there is one GPU: 1 of 8 ranks are run"]))
        assert "there is one GPU: 1 of 8 ranks are run" in capsys.readouterr().out


def test_json_is_one_document(capsys):
    """A program that reads the result would choke on it, or miss the environment."""
    outcome = judge(RANK)
    reporter = Json()
    with reporter.watching(1):
        reporter.ended(outcome)
    reporter.closes(summary(outcome))
    document = json.loads(capsys.readouterr().out)
    assert document["environment"] == {"torch": "2.13", "driver": "", "ranks": 2}
    assert document["is_complete"] is True
    (row,) = document["rows"]
    assert (row["name"], row["status"], row["ratio"]) == ("row", "ok", 1.0)
    assert row["ranks"][0]["steps"][0]["storages"] == STEP.storages
