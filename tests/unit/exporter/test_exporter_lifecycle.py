"""The state machine of a rank, with a clock that only the test moves and locks that are real."""

from __future__ import annotations

import pytest

from records import WRITTEN_AT, leave, living, make_record
from sidecars import Clock
from torchmem.wire.record import encode
from torchmem.wire.store import RankStore
from torchmem_exporter.reading.lifecycle import State
from torchmem_exporter.reading.reader import KEEP_CONSUMER_SECONDS, Reader


@pytest.fixture
def clock():
    return Clock(WRITTEN_AT + 1)


@pytest.fixture
def reader(tmp_path, clock):
    return Reader(tmp_path, stale_after=60.0, clock=clock)


def shown(reader, consumer="prometheus"):
    """Rank -> (state, has memory) of one scrape."""
    views = reader.scan(consumer).ranks
    return {view.record.identity.rank: (view.state, view.has_memory) for view in views}


def test_running(reader, tmp_path):
    """A healthy rank would not be shown as one."""
    with living(tmp_path, make_record(0), make_record(1)):
        assert shown(reader) == {0: (State.RUNNING, True), 1: (State.RUNNING, True)}


def test_stale_then_without_memory_then_running_again(reader, tmp_path, clock):
    """A rank that hangs would seem healthy, or its old figures would stay for ever."""
    with living(tmp_path, make_record()) as (store,):
        clock.now = WRITTEN_AT + 60
        assert shown(reader) == {0: (State.RUNNING, True)}
        clock.now = WRITTEN_AT + 60.5
        assert shown(reader) == {0: (State.STALE, True)}
        clock.now = WRITTEN_AT + 600
        assert shown(reader) == {0: (State.STALE, True)}
        clock.now = WRITTEN_AT + 601
        assert shown(reader) == {0: (State.STALE, False)}
        store.write(encode(make_record(written_at=clock.now)))
        assert shown(reader) == {0: (State.RUNNING, True)}


def test_crash_is_shown_for_a_quarter_of_an_hour(reader, tmp_path, clock):
    """A crash would pass unseen between scrapes, or its memory would seem to be held still."""
    with living(tmp_path, make_record()):
        clock.now = WRITTEN_AT + 300
        assert shown(reader) == {0: (State.STALE, True)}
    for age in (0, 1, 900):
        clock.now = WRITTEN_AT + 300 + age
        assert shown(reader) == {0: (State.CRASHED, False)}
    clock.now += 1
    assert shown(reader) == {}


def test_crash_before_the_sidecar_started_counts_from_the_last_record(tmp_path):
    """A restarted sidecar would report every crash of the past again."""
    leave(tmp_path, make_record())
    assert shown(Reader(tmp_path, stale_after=60.0, clock=Clock(WRITTEN_AT + 899))) == {0: (State.CRASHED, False)}
    assert shown(Reader(tmp_path, stale_after=60.0, clock=Clock(WRITTEN_AT + 901))) == {}


def test_exit_is_shown_for_two_scrapes(reader, tmp_path):
    """The last figures of a short job would be lost, or those of an ended one kept."""
    with living(tmp_path, make_record()) as (store,):
        shown(reader)
        store.write(encode(make_record(final=True)))
    assert [shown(reader, consumer) for consumer in (None, "prometheus", None, "prometheus", "prometheus")] == [
        {0: (State.EXITED, True)},
        {0: (State.EXITED, True)},
        {0: (State.EXITED, True)},
        {0: (State.EXITED, True)},
        {},
    ]


def test_exit_is_shown_twice_to_each_consumer(reader, tmp_path):
    """A push every few seconds would use up the last figures of a job before the scrape that comes once a minute."""
    with living(tmp_path, make_record()) as (store,):
        shown(reader)
        shown(reader, "otlp")
        store.write(encode(make_record(final=True)))
    exited = {0: (State.EXITED, True)}
    assert [shown(reader, "otlp") for _ in range(4)] == [exited, exited, {}, {}]
    assert [shown(reader, consumer) for consumer in (None, "prometheus", None, "prometheus")] == [exited] * 4
    assert [shown(reader, consumer) for consumer in (None, "prometheus", "otlp")] == [{}, {}, {}]
    assert [entry.record for entry in reader._entries.values()] == [None]


def test_an_end_that_nobody_scrapes_is_shown_for_an_hour(reader, tmp_path, clock):
    """Where people only look at the page, the jobs of weeks would be on it, and in the sidecar's memory."""
    with living(tmp_path, make_record()) as (store,):
        shown(reader, None)
        store.write(encode(make_record(final=True)))
    clock.now = WRITTEN_AT + 3600
    assert shown(reader, None) == {0: (State.EXITED, True)}
    clock.now += 1
    assert shown(reader, None) == {}
    assert [entry.record for entry in reader._entries.values()] == [None]


def test_who_asks_no_more_is_not_waited_for(reader, tmp_path, clock):
    """After one look by hand the records of all jobs that ended since would stay in a pushing sidecar's memory."""
    shown(reader)
    with living(tmp_path, make_record()) as (store,):
        shown(reader, "otlp")
        store.write(encode(make_record(final=True)))
    for _ in range(3):
        shown(reader, "otlp")
    assert [entry.record is None for entry in reader._entries.values()] == [False]
    clock.now += KEEP_CONSUMER_SECONDS + 1
    assert shown(reader, "otlp") == {}
    assert [entry.record for entry in reader._entries.values()] == [None]


def test_exit_long_ago_is_not_shown(tmp_path):
    """A restarted sidecar would show all jobs that ever ran on the host."""
    leave(tmp_path, make_record(final=True))
    assert shown(Reader(tmp_path, stale_after=60.0, clock=Clock(WRITTEN_AT + 899))) == {0: (State.EXITED, True)}
    assert shown(Reader(tmp_path, stale_after=60.0, clock=Clock(WRITTEN_AT + 901))) == {}


def test_exit_counts_even_while_the_lock_is_held(reader, tmp_path):
    """A rank that has said goodbye would be called stale while its process winds up."""
    with living(tmp_path, make_record(final=True)):
        assert shown(reader) == {0: (State.EXITED, True)}


def test_new_attempt_in_the_same_file(reader, tmp_path):
    """A restarted rank would stay hidden behind the one that ended before it."""
    leave(tmp_path, make_record(attempt="first", final=True))
    assert [bool(shown(reader)) for _ in range(3)] == [True, True, False]
    with living(tmp_path, make_record(attempt="second", start_time=WRITTEN_AT)):
        assert shown(reader) == {0: (State.RUNNING, True)}
    assert shown(reader) == {0: (State.CRASHED, False)}


@pytest.mark.parametrize("names", [("a", "b"), ("b", "a")])
def test_newer_attempt_replaces_the_older_wherever_it_lies(reader, tmp_path, names):
    """The same rank would be shown twice, and Prometheus refuse one of them at random."""
    older, newer = (make_record(train_job=name) for name in names)
    with living(tmp_path, older, newer) as (old_store, new_store):
        old_store.write(encode(make_record(attempt="old")))
        new_store.write(encode(make_record(attempt="new", start_time=WRITTEN_AT)))
        snapshot = reader.scan("prometheus")
    assert [rank.record.identity.attempt for rank in snapshot.ranks] == ["new"]
    assert [(rejection.path, rejection.reason) for rejection in snapshot.rejections] == [
        (f"{names[0]}/rank-0.record", "duplicate")
    ]


def test_crash_is_not_forgotten_when_a_successor_takes_the_lock(reader, tmp_path, clock):
    """Between its start and its first record, a new attempt would show the crashed one's memory as its own."""
    with living(tmp_path, make_record()):
        assert shown(reader) == {0: (State.RUNNING, True)}
    assert shown(reader) == {0: (State.CRASHED, False)}
    store = RankStore(tmp_path, "llama-pretrain", 0)
    assert shown(reader) == {0: (State.CRASHED, False)}
    store.write(encode(make_record(attempt="second", start_time=clock.now, written_at=clock.now)))
    assert shown(reader) == {0: (State.RUNNING, True)}
    store.close()


def test_copy_of_a_record_does_not_hide_the_living(reader, tmp_path):
    """A backup of the directory beside the original would make a healthy rank seem dead."""
    with living(tmp_path, make_record()) as (store,):
        copy = tmp_path / "zz-backup"
        copy.mkdir()
        (copy / "rank-0.record").write_bytes(store.path.read_bytes())
        assert shown(reader) == {0: (State.RUNNING, True)}


def test_unreadable_record_takes_nothing_for_fresh(reader, tmp_path, clock):
    """A damaged record would seem fresh, or take the rank's last good figures with it."""
    with living(tmp_path, make_record()) as (store,):
        assert shown(reader) == {0: (State.RUNNING, True)}
        store.write(b"garbage" * 10)
        assert shown(reader) == {0: (State.STALE, True)}
        clock.now = WRITTEN_AT + 601
        assert shown(reader) == {0: (State.STALE, False)}
        store.write(encode(make_record(written_at=clock.now)))
        assert shown(reader) == {0: (State.RUNNING, True)}
        store.write(b"garbage" * 10)
    assert shown(reader) == {0: (State.CRASHED, False)}


def test_rank_whose_record_is_removed_is_dropped(reader, tmp_path):
    """A rank whose files were cleaned away would be shown for ever."""
    with living(tmp_path, make_record(0), make_record(1)) as (store, _):
        assert sorted(shown(reader)) == [0, 1]
        store.path.unlink()
        assert sorted(shown(reader)) == [1]


def test_books_of_ranks_no_longer_shown_are_forgotten(reader, tmp_path, clock):
    """The records of all jobs that ever ran on the host would pile up in the sidecar's memory."""
    leave(tmp_path, make_record())
    assert shown(reader) == {0: (State.CRASHED, False)}
    clock.now = WRITTEN_AT + 1000
    assert shown(reader) == {}
    assert [entry.record for entry in reader._entries.values()] == [None]
