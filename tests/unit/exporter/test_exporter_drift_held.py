"""Running jobs held against baselines that were kept: which are, which no longer are, and which cannot be."""

from __future__ import annotations

import json
import logging
import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import small_records
import watched
from torchmem.baseline_cli import collect
from torchmem.errors import ConfigError
from torchmem.wire import record as wire
from torchmem_exporter.drift.baseline import Baseline, BaselineError, Baselines, decode, encode
from torchmem_exporter.drift.drift import Drift
from torchmem_exporter.drift.held import held_run
from torchmem_exporter.drift.judge import Judge, learned
from torchmem_exporter.drift.learning import Level
from torchmem_exporter.drift.ring_steps import Step
from torchmem_exporter.drift.sizes import Curve
from torchmem_exporter.reading.lifecycle import State
from torchmem_exporter.reading.reader import Rank
from torchmem_exporter.reading.state import StateFile

MIB = small_records.MIB
CURVE = Curve(
    sizes=[1.0, 2.0], num_bytes=[5.0, 6.0], first_slope=1.0, last_slope=1.0, reference=5.0, lowest=1.0, highest=2.5
)
LEVEL = Level(
    num_bytes=16.0 * MIB,
    spread_bytes=0.1 * MIB,
    highest_bytes=17.0 * MIB,
    is_wandering=False,
    num_steps=128,
    first_step=16,
    last_step=127,
    curve=CURVE,
)


def record(peak_mib=32, num_steps=512, device="cuda:0", **changes):
    """A rank whose ring holds so many steps, all alike; changes are of who it is."""
    ring = watched.ring(1, [peak_mib * MIB] * num_steps, [5 * MIB] * num_steps, device)
    cells = [cell._replace(num_bytes=cell.num_bytes * peak_mib // 16) for cell in small_records.PEAK]
    book = {"step_peak": wire.pack_cells(cells), "step_peak_bytes": peak_mib * MIB}
    devices = [small_records.device(name=device, **book)]
    return small_records.record(identity=small_records.identity(**changes), devices=devices, ring=ring)


def verdict(judge, one):
    """What is known of the record's one device."""
    (found,) = judge.judge(Rank("train/rank-0.record", one, State.RUNNING, has_memory=True)).values()
    return found.judgement


@pytest.fixture
def state(tmp_path):
    return StateFile(tmp_path / "state")


@pytest.fixture
def kept(tmp_path):
    """A file of the baseline of a job that held half as much."""
    run, _ = collect("old", [record(16, attempt="former")], {})
    path = tmp_path / "old.json"
    path.write_bytes(encode(run))
    return path


# -- held no longer


@pytest.fixture
def held(state, kept):
    """What a sidecar leaves that held a job against the file."""
    judge = Judge(state, [held_run(str(kept))], clock=lambda: watched.NOW)
    assert verdict(judge, record()).baseline_bytes == 16 * MIB
    judge.save(is_due=True)
    return StateFile(state.path)


def test_a_job_that_is_held_no_longer_has_its_own_baseline(held):
    """Who leaves --baseline out would be alarmed by it for the rest of the job's life."""
    found = verdict(Judge(held, []), record())
    assert (found.baseline_bytes, found.is_level_drifting) == (32 * MIB, False)
    assert found.num_resets["manual"] == 2


def test_a_baseline_that_was_learned_stays(state):
    """Each restart of a sidecar would forget what it has learned."""
    judge = Judge(state, [], clock=lambda: watched.NOW)
    before = verdict(judge, record())
    judge.save(is_due=True)
    after = verdict(Judge(StateFile(state.path), []), record(64))
    assert after.baseline_bytes == before.baseline_bytes == 32 * MIB


def test_who_looks_beside_a_sidecar_leaves_what_it_holds(held):
    """``torchmem watch`` would show another baseline than the sidecar."""
    assert verdict(Judge(held), record()).baseline_bytes == 16 * MIB


def test_a_run_that_is_held_is_saved_as_it_is(held):
    """A baseline that is refreshed every night would stay for ever what it was on the first."""
    run, unknown = collect("new", [record()], learned(held))
    assert unknown == []
    assert (run.of(0, "cuda:0").level.num_bytes, run.of(0, "cuda:0").usual.total_bytes) == (32 * MIB, 32 * MIB)


def test_a_run_that_is_held_and_too_young_is_left_out(held):
    """Nobody would know why a run of thousands of steps has no baseline of its own."""
    run, (said,) = collect("new", [record(num_steps=100)], learned(held))
    assert run.baselines == []
    assert "rank 0 cuda:0 is left out: after 100 ordinary steps" in said
    assert "--baseline" in said


# -- a file that does not fit


def logged(caplog):
    """What was said, with its fields."""
    return [{"level": one.levelno, **one.torchmem_fields} for one in caplog.records]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"world_size": 16}, "the baseline is of world size 2, the job runs on 16"),
        ({"rank": 1}, "the baseline is of 1 ranks from 0 to 0, without the job's rank 1"),
        ({"device": "cuda:1"}, "the baseline of rank 0 is of cuda:0, the job runs on cuda:1"),
    ],
)
def test_a_file_that_does_not_fit_is_told_of_once(state, kept, caplog, changes, reason):
    """A job would seem to be held against a baseline, and be learned as usual."""
    judge = Judge(state, [held_run(f"tr*={kept}")])
    for attempt in ("first", "second"):
        assert verdict(judge, record(attempt=attempt, **changes)).baseline_bytes == 32 * MIB
    (said,) = logged(caplog)
    assert (said["level"], said["job"], said["reason"]) == (logging.WARNING, "train", reason)
    assert said["baseline"] == f"tr*={kept}"
    assert "torchmem baseline save" in caplog.text
    verdict(judge, record(train_job="trial", **changes))
    assert [said["job"] for said in logged(caplog)] == ["train", "trial"]


@pytest.mark.parametrize("changes", [{}, {"train_job": "other"}, {"device": "cpu", "peak_mib": 0}])
def test_nothing_is_told_where_nothing_is_amiss(state, kept, caplog, changes):
    """A warning that always comes would be read by nobody."""
    verdict(Judge(state, [held_run(str(kept))]), record(**changes))
    assert logged(caplog) == []


def test_of_several_files_one_need_fit(state, kept, tmp_path, caplog):
    """Who keeps a baseline for each world size would be warned of all but one."""
    other = msgspec.structs.replace(held_run(str(kept)).run, world_size=16)
    (tmp_path / "16.json").write_bytes(encode(other))
    held = [held_run(str(tmp_path / "16.json")), held_run(str(kept))]
    assert verdict(Judge(state, held), record()).baseline_bytes == 16 * MIB
    assert logged(caplog) == []


# -- a file that cannot be used


@pytest.mark.parametrize("argument", ["x" * 300, "a/" * 3000, "job=" + "x" * 300])
def test_a_name_that_no_file_can_have_is_refused(argument):
    """A typing error would end in a traceback, and not in a line that names it."""
    with pytest.raises(ConfigError, match=r"^--baseline .*: File name too long$"):
        held_run(argument)


def test_a_folder_that_may_not_be_entered_is_said(monkeypatch, tmp_path):
    """A file of somebody else's would end in a traceback, and not in a line that names it."""

    def refuse(*_arguments, **_options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.stat", refuse)
    monkeypatch.setattr("pathlib.Path.open", refuse)
    with pytest.raises(ConfigError, match=r"^--baseline .*old.json: Permission denied$"):
        held_run(str(tmp_path / "old.json"))


def test_a_pattern_and_a_file_may_be_longer_than_a_name(kept):
    """A file would be refused for the pattern that stands before it."""
    assert held_run(f"{'x' * 300}*={kept}").jobs == "x" * 300 + "*"


def spoilt(kept, part, name, value):
    """The file's text with one number that is another."""
    content = json.loads(kept.read_text())
    one = content["run"]["baselines"][0]
    one["level"]["curve"] = msgspec.to_builtins(CURVE)
    {"level": one["level"], "curve": one["level"]["curve"], "usual": one["usual"]}[part][name] = value
    return json.dumps(content)


@pytest.mark.parametrize(
    ("part", "name", "value", "fault"),
    [
        ("level", "num_bytes", 0.0, "a level of 0 bytes"),
        ("level", "num_bytes", -5.0, "a level of -5 bytes"),
        ("level", "num_bytes", 1e300, "a level of 1e\\+300 bytes"),
        ("level", "spread_bytes", -1.0, "a spread of -1 bytes"),
        ("level", "highest_bytes", -1.0, "a highest step peak of -1 bytes"),
        ("curve", "sizes", [], "a curve that is none"),
        ("curve", "sizes", [1.0], "a curve that is none"),
        ("curve", "sizes", [2.0, 2.0], "a curve that is none"),
        ("curve", "num_bytes", [], "a curve that is none"),
        ("curve", "last_slope", 1e300, "a curve that is none"),
        ("usual", "other_bytes", -1, "a part that holds less than nothing"),
        ("usual", "parts", [["head", "other", 10**400]], "a part that holds less than nothing, or more"),
    ],
)
def test_numbers_that_no_job_can_have_are_refused_at_the_start(kept, part, name, value, fault):
    """One file would cost every scrape of all ranks, long after the sidecar started."""
    kept.write_text(spoilt(kept, part, name, value))
    with pytest.raises(ConfigError, match=rf"^--baseline .*old\.json: the baseline of rank 0 cuda:0 has {fault}"):
        held_run(str(kept))


ANY = st.floats() | st.floats(0, 1e9)
ANYS = st.lists(ANY, max_size=3) | st.just([1.0, 2.0])
CURVES = st.builds(
    Curve, sizes=ANYS, num_bytes=ANYS, first_slope=ANY, last_slope=ANY, reference=ANY, lowest=ANY, highest=ANY
)
LEVELS = st.builds(
    msgspec.structs.replace,
    st.just(LEVEL),
    num_bytes=ANY,
    spread_bytes=ANY,
    highest_bytes=ANY,
    is_wandering=st.booleans(),
    curve=st.none() | CURVES,
)


@settings(deadline=None)
@given(LEVELS | st.just(LEVEL))
def test_what_is_accepted_can_be_judged_by(level):
    """A file that was accepted would fail, or give what is no number, once enough steps were seen."""
    one = Baseline(rank=0, device="cuda:0", level=level)
    try:
        data = encode(Baselines(name="x", train_job="train", world_size=2, saved_at=0.0, baselines=[one]))
        (read,) = decode(data).baselines
    except BaselineError:
        return
    drift = Drift()
    drift.adopt(read.level, read.usual)
    drift.feed(Step(number, number * 1.0, 0, 32 * MIB, 5 * MIB, 1 + number % 7) for number in range(1, 560))
    assert math.isfinite(drift.judge(64 * MIB).drift_ratio)


def test_a_good_curve_is_accepted(kept):
    """A job whose inputs vary could not be held against its baseline."""
    kept.write_text(spoilt(kept, "level", "num_bytes", LEVEL.num_bytes))
    assert held_run(str(kept)).run.of(0, "cuda:0").level.curve == CURVE
