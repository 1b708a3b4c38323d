"""Records of the crashed: moved aside after a while, shown as long as they are news, in spite of what lies there."""

from __future__ import annotations

import os

import pytest

from records import STARTED_AT, WRITTEN_AT, leave, living, make_record
from sidecars import Clock
from torchmem.wire.postmortem import buried_name
from torchmem.wire.record import encode
from torchmem.wire.store import RankStore
from torchmem_exporter.reading.lifecycle import State
from torchmem_exporter.reading.reader import Reader

JOB = "llama-pretrain"
ATTEMPT = make_record().identity.attempt
BURIED = f"post-mortem/rank-0.{ATTEMPT}.record"


@pytest.fixture
def clock():
    return Clock(WRITTEN_AT + 1)


@pytest.fixture
def reader(tmp_path, clock):
    return Reader(tmp_path, stale_after=60.0, clock=clock)


def shown(reader, consumer="prometheus"):
    """(attempt, state, has memory) of each rank."""
    ranks = reader.scan(consumer).ranks
    return [(rank.record.identity.attempt, rank.state, rank.has_memory) for rank in ranks]


def files(directory):
    """What lies in the job's folder, locks aside."""
    paths = (path for path in (directory / JOB).rglob("*") if path.is_file() and path.suffix != ".lock")
    return sorted(str(path.relative_to(directory / JOB)) for path in paths)


CRASHED = [(ATTEMPT, State.CRASHED, False)]


def test_crashed_record_is_moved_and_shown_for_a_quarter_of_an_hour(reader, tmp_path, clock):
    """The record of a dead rank would be lost to its next attempt, or the rank vanish with the move."""
    with living(tmp_path, make_record()):
        shown(reader)
    assert shown(reader) == CRASHED
    died_at = clock.now
    assert files(tmp_path) == ["rank-0.record"]
    clock.now = died_at + 5
    assert shown(reader) == CRASHED
    assert files(tmp_path) == [BURIED]
    for age in (6, 900):
        clock.now = died_at + age
        assert shown(reader) == CRASHED
    clock.now = died_at + 901
    assert shown(reader) == []
    assert reader.scan("prometheus").rejections == ()


def test_the_move_costs_no_second_reading(reader, tmp_path, clock, monkeypatch):
    """Each record would be decoded again for having been moved."""
    from torchmem_exporter.reading import checked

    decoded = []
    original = checked.decode
    monkeypatch.setattr(checked, "decode", lambda data: decoded.append(1) or original(data))
    leave(tmp_path, make_record())
    for age in (1, 10, 20, 30):
        clock.now = WRITTEN_AT + age
        first = reader.scan("prometheus").ranks[0]
        assert reader.scan("prometheus").ranks[0] is first
    RankStore(tmp_path, JOB, 0).close()
    assert shown(reader) == CRASHED
    assert len(decoded) == 1


def test_a_look_moves_nothing(reader, tmp_path, clock):
    """Opening the page would change the directory."""
    leave(tmp_path, make_record())
    clock.now = WRITTEN_AT + 100
    assert shown(reader, None) == CRASHED
    clock.now = WRITTEN_AT + 10_000
    assert shown(reader, None) == []
    assert files(tmp_path) == ["rank-0.record"]
    assert shown(reader) == []
    assert files(tmp_path) == [BURIED]


def test_crash_is_shown_over_a_restart_of_the_sidecar(tmp_path, clock):
    """A sidecar restarted after a crash would not say that the rank is down."""
    leave(tmp_path, make_record())
    clock.now = WRITTEN_AT + 30
    for _ in range(3):
        assert shown(Reader(tmp_path, stale_after=60.0, clock=clock)) == CRASHED
    assert files(tmp_path) == [BURIED]
    clock.now = WRITTEN_AT + 901
    assert shown(Reader(tmp_path, stale_after=60.0, clock=clock)) == []


def test_next_attempt_moves_and_replaces_at_once(reader, tmp_path, clock):
    """The dead attempt would be shown beside the living one, counted as an error, or come back after it ends."""
    with living(tmp_path, make_record()):
        shown(reader)
    clock.now = WRITTEN_AT + 2
    second = make_record(attempt="second", start_time=WRITTEN_AT, written_at=clock.now)
    with living(tmp_path, second) as (store,):
        assert files(tmp_path) == [BURIED, "rank-0.record"]
        assert shown(reader) == [("second", State.RUNNING, True)]
        store.write(encode(make_record(attempt="second", start_time=WRITTEN_AT, written_at=clock.now, final=True)))
    assert [len(shown(reader)) for _ in range(3)] == [1, 1, 0]
    assert reader.scan("prometheus").num_errors["duplicate"] == 0


def test_the_latest_of_several_dead_is_shown(reader, tmp_path, clock):
    """A rank that crashes in a loop would be shown with the figures of an old attempt."""
    for index in range(4):
        leave(tmp_path, make_record(attempt=f"attempt-{index}", start_time=STARTED_AT + index))
    clock.now = WRITTEN_AT + 20
    assert shown(reader) == [("attempt-3", State.CRASHED, False)]
    assert len(files(tmp_path)) == 4
    assert reader.scan("prometheus").num_errors["duplicate"] == 0


def test_one_that_was_thought_dead_and_writes_again_lives(reader, tmp_path, clock):
    """A rank whose lock was dropped by foreign code would stay dead."""
    leave(tmp_path, make_record())
    clock.now = WRITTEN_AT + 30
    assert shown(reader) == CRASHED
    with living(tmp_path, make_record(written_at=clock.now)):
        assert shown(reader) == [(ATTEMPT, State.RUNNING, True)]


def test_a_taken_lock_stops_the_move(reader, tmp_path, clock):
    """The sidecar would take a record away from the attempt that is about to start."""
    leave(tmp_path, make_record())
    shown(reader)
    clock.now = WRITTEN_AT + 100
    store = RankStore(tmp_path, JOB, 0)
    store.close()
    (tmp_path / JOB / BURIED).rename(tmp_path / JOB / "rank-0.record")
    store = RankStore(tmp_path, JOB, 1)
    (tmp_path / JOB / "rank-0.lock").unlink()
    (tmp_path / JOB / "rank-0.lock").hardlink_to(tmp_path / JOB / "rank-1.lock")
    assert shown(reader)
    assert files(tmp_path) == ["rank-0.record"]
    store.close()


@pytest.mark.parametrize("in_the_way", ["file", "symlink"])
def test_without_a_folder_of_the_dead_all_else_works(reader, tmp_path, clock, in_the_way, caplog):
    """A sidecar that may not write would stop serving, or fill its log with each scrape."""
    leave(tmp_path, make_record(0))
    leave(tmp_path, make_record(1))
    folder = tmp_path / JOB / "post-mortem"
    folder.write_text("") if in_the_way == "file" else folder.symlink_to(tmp_path)
    clock.now = WRITTEN_AT + 30
    for _ in range(3):
        snapshot = reader.scan("prometheus")
        assert [rank.state for rank in snapshot.ranks] == [State.CRASHED, State.CRASHED]
        assert snapshot.num_unburied == 2
    assert sum("cannot be moved" in line for line in caplog.messages) == 1
    clock.now = WRITTEN_AT + 901
    assert shown(reader) == []


def test_read_only_directory_costs_only_the_move(tmp_path, clock, monkeypatch):
    """A sidecar with a read-only mount of the records would not serve."""
    leave(tmp_path, make_record())
    clock.now = WRITTEN_AT + 30

    def refuse(*_arguments, **_options):
        raise OSError(30, "Read-only file system")

    reader = Reader(tmp_path, stale_after=60.0, clock=clock)
    for name in ("mkdir", "rename"):
        monkeypatch.setattr(os, name, refuse)
    assert shown(reader) == CRASHED
    assert reader.scan("prometheus").num_unburied == 1


@pytest.mark.parametrize(
    ("reason", "plant"),
    [
        pytest.param("not_regular", os.mkfifo, id="fifo"),
        pytest.param("not_regular", lambda path: path.mkdir(), id="folder"),
        pytest.param("symlink", lambda path: path.symlink_to("/etc/passwd"), id="symlink"),
        pytest.param("magic", lambda path: path.write_bytes(b"x" * 100), id="garbage"),
        pytest.param("identity", lambda path: path.write_bytes(encode(make_record(3))), id="another rank's"),
        pytest.param("truncated", lambda path: path.write_bytes(b""), id="empty"),
    ],
)
def test_garbage_among_the_dead_costs_a_count(reader, tmp_path, clock, reason, plant):
    """A bad file among the dead would hide the living, or go unnoticed."""
    with living(tmp_path, make_record(0)):
        (tmp_path / JOB / "post-mortem").mkdir()
        name = buried_name(7, "attempt")
        plant(tmp_path / JOB / "post-mortem" / name)
        clock.now = (tmp_path / JOB / "post-mortem" / name).lstat().st_mtime
        for num_scrapes in (1, 2):
            snapshot = reader.scan("prometheus")
            assert [rank.record.identity.rank for rank in snapshot.ranks] == [0]
            assert {name: number for name, number in snapshot.num_errors.items() if number} == {reason: num_scrapes}


def test_old_files_of_the_dead_are_not_read(tmp_path, monkeypatch):
    """Every start of the sidecar would decode all deaths of two weeks."""
    from torchmem_exporter.reading import checked

    leave(tmp_path, make_record())
    RankStore(tmp_path, JOB, 0).close()
    decoded = []
    monkeypatch.setattr(checked, "decode", decoded.append)
    later = (tmp_path / JOB / BURIED).stat().st_mtime + 901
    assert shown(Reader(tmp_path, stale_after=60.0, clock=Clock(later))) == []
    assert decoded == []


def test_folder_is_pruned_though_nobody_dies(tmp_path):
    """Records of the dead would be kept for longer than they may when no job runs any more."""
    leave(tmp_path, make_record())
    RankStore(tmp_path, JOB, 0).close()
    path = tmp_path / JOB / BURIED
    reader = Reader(tmp_path, stale_after=60.0)
    reader.scan("prometheus")
    assert path.exists()
    old = path.stat().st_mtime - 15 * 86400
    os.utime(path, (old, old))
    reader.scan("prometheus")
    assert path.exists()
    Reader(tmp_path, stale_after=60.0).scan("prometheus")
    assert not path.exists()
