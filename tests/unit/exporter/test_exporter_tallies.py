"""Counters over attempts: never falling, each attempt counted once, kept over restarts of the sidecar."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from records import STARTED_AT, WRITTEN_AT, leave, living, make_record
from sidecars import Clock
from torchmem.wire.record import Allocator, encode
from torchmem_exporter.reading import tallies as tallies_module
from torchmem_exporter.reading.reader import Reader
from torchmem_exporter.reading.state import FILE_NAME, StateFile
from torchmem_exporter.reading.tallies import NOTHING, Tallies

DEVICE = "cuda:0"


def record(attempt="a", num_ooms=0, num_retries=0, written_at=WRITTEN_AT, start_time=STARTED_AT, **changes):
    """A record of rank 0 with these counts."""
    allocator = Allocator(num_ooms=num_ooms, num_retries=num_retries)
    return make_record(
        attempt=attempt, allocator=allocator, written_at=written_at, start_time=start_time, num_modules=1, **changes
    )


@pytest.fixture
def tallies(tmp_path):
    return Tallies(StateFile(tmp_path / "state"))


def totals(tallies, of=None):
    """(failures, retries) of rank 0."""
    ooms, retries = tallies.of((of or record()).identity)
    return ooms.get(DEVICE, 0), retries.get(DEVICE, 0)


def test_attempts_add_up(tallies):
    """A restart would take the failures before it back, and a rate over them would be wrong."""
    for attempt, start_time in (("a", 1.0), ("b", 2.0), ("c", 3.0)):
        for num_ooms in range(4):
            tallies.note(record(attempt, num_ooms, 2 * num_ooms, start_time + num_ooms, start_time), 0.0)
    assert totals(tallies) == (9, 18)


def test_an_attempt_counts_once_wherever_it_is_found(tallies):
    """A record that is moved, copied or read again would count its failures again."""
    tallies.note(record("a", 3, written_at=30.0), 0.0)
    tallies.note(record("a", 1, written_at=10.0), 0.0)
    tallies.note(record("b", 2, written_at=40.0, start_time=STARTED_AT + 1), 0.0)
    tallies.note(record("a", 3, written_at=30.0), 0.0)
    assert totals(tallies) == (5, 0)


def test_a_count_that_is_reset_within_an_attempt_goes_on(tallies):
    """torch.cuda.reset_accumulated_memory_stats() would make a counter fall."""
    for written_at, num_ooms in enumerate((1, 5, 0, 0, 2)):
        tallies.note(record("a", num_ooms, written_at=float(written_at)), 0.0)
    assert totals(tallies) == (7, 0)


def test_a_device_that_a_record_leaves_out_keeps_its_count(tallies):
    """A device that is missing from one record would be counted again when it is back."""
    tallies.note(record("a", 4, written_at=1.0), 0.0)
    tallies.note(record("a", written_at=2.0, devices=[]), 0.0)
    tallies.note(record("a", 4, written_at=3.0), 0.0)
    assert totals(tallies) == (4, 0)


def test_ranks_and_jobs_are_told_apart(tallies):
    """One rank's failures would be another's."""
    tallies.note(record("a", 1), 0.0)
    tallies.note(record("b", 2, train_job="other"), 0.0)
    assert totals(tallies) == (1, 0)
    assert totals(tallies, record(train_job="other")) == (2, 0)
    assert tallies.of(make_record(1).identity) is NOTHING


def test_without_failures_nothing_is_kept(tallies, tmp_path):
    """Thousands of healthy ranks would fill memory and the state file."""
    for attempt in range(100):
        tallies.note(record(str(attempt)), 0.0)
    tallies.save()
    assert tallies.of(record().identity) is NOTHING
    assert not (tmp_path / "state").exists()


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5), st.integers(0, 5), st.booleans()), min_size=1, max_size=40)
)
def test_sums_never_fall(tmp_path_factory, events):
    """A counter would fall for some order of attempts, resets and restarts of the sidecar."""
    path = tmp_path_factory.mktemp("tallies") / "state"
    tallies, before = Tallies(StateFile(path)), (0, 0)
    for index, (attempt, num_ooms, num_retries, is_restarted) in enumerate(events):
        if is_restarted:
            tallies.save()
            tallies = Tallies(StateFile(path))
        assert totals(tallies) == before
        tallies.note(record(str(attempt), num_ooms, num_retries, WRITTEN_AT + index, STARTED_AT + attempt), 0.0)
        now = totals(tallies)
        assert all(new >= old for old, new in zip(before, now, strict=True))
        before = now


def test_many_attempts_are_folded_and_stay_counted(tallies):
    """A rank that crashes for weeks would grow the state without end, or lose its first failures."""
    for attempt in range(100):
        tallies.note(record(str(attempt), 1, start_time=float(attempt)), 0.0)
    assert totals(tallies) == (100, 0)
    tallies.note(record("3", 1, start_time=3.0), 0.0)
    assert totals(tallies) == (100, 0)
    [tally] = tallies._tallies.values()
    assert len(tally.attempts) == tallies_module.MAX_ATTEMPTS


def test_ranks_of_long_ago_are_forgotten(tallies, monkeypatch):
    """The state would hold every rank that ever failed on the host."""
    monkeypatch.setattr(tallies_module, "MAX_RANKS", 3)
    for index in range(5):
        tallies.note(record("a", 1, train_job=f"job-{index}"), float(index))
    assert [totals(tallies, record(train_job=f"job-{index}"))[0] for index in range(5)] == [0, 0, 1, 1, 1]


def test_counts_outlive_the_sidecar(tmp_path):
    """A restart of the sidecar would take the failures of earlier attempts back."""
    clock = Clock(WRITTEN_AT + 1)
    leave(tmp_path, record("a", 2, 1))
    reader = Reader(tmp_path, stale_after=60.0, clock=clock)
    assert shown(reader) == ({DEVICE: 2}, {DEVICE: 1})
    reader.save()
    with living(tmp_path, record("b", 3, written_at=WRITTEN_AT + 1, start_time=WRITTEN_AT)) as (store,):
        for _ in range(2):
            reader = Reader(tmp_path, stale_after=60.0, clock=clock)
            assert shown(reader) == ({DEVICE: 5}, {DEVICE: 1})
            reader.save()
        (tmp_path / "llama-pretrain" / "post-mortem" / "rank-0.a.record").unlink()
        assert shown(Reader(tmp_path, stale_after=60.0, clock=clock)) == ({DEVICE: 5}, {DEVICE: 1})
        store.write(encode(record("b", 4, written_at=WRITTEN_AT + 2, start_time=WRITTEN_AT)))
        assert shown(reader) == ({DEVICE: 6}, {DEVICE: 1})


def test_an_attempt_of_which_only_the_dead_record_was_seen_counts(tmp_path):
    """Failures of an attempt that came and went between two scrapes would be missing."""
    leave(tmp_path, record("a", 2))
    with living(tmp_path, record("b", 1, start_time=WRITTEN_AT)):
        assert shown(Reader(tmp_path, stale_after=60.0, clock=Clock(WRITTEN_AT + 1))) == ({DEVICE: 3}, {})


def test_a_scrape_waits_for_no_disk(tmp_path, monkeypatch):
    """Where attempts fail at each step, each scrape would write the state of all ranks, and wait for a slow disk."""
    saved = []
    monkeypatch.setattr(StateFile, "save", lambda _state, name, _section: saved.append(name))
    reader = Reader(tmp_path, stale_after=60.0, clock=Clock(WRITTEN_AT + 1))
    leave(tmp_path, record("a", 2))
    assert shown(reader) == ({DEVICE: 2}, {})
    assert saved == []
    reader.save()
    reader.save()
    assert saved == ["counters"]


def shown(reader):
    """What the reader says of rank 0."""
    [rank] = reader.scan("prometheus").ranks
    assert reader.scan("prometheus").ranks[0] is rank
    return rank.ooms, rank.retries


@pytest.mark.parametrize(
    "section", [b"\xc1", b"\xc0", msgspec.msgpack.encode([{"train_job": 3}]), msgspec.msgpack.encode({"a": 1})]
)
def test_a_section_that_makes_no_sense_is_counted_anew(tmp_path, section, caplog):
    """A sidecar whose state is damaged would not start, or nobody learn of it."""
    state = StateFile(tmp_path / FILE_NAME)
    state._sections["counters"] = msgspec.Raw(section)
    tallies = Tallies(state)
    assert (state.num_failures, len(caplog.messages)) == (1, 1)
    tallies.note(record("a", 1), 0.0)
    assert totals(tallies) == (1, 0)
