"""Scanning a directory of records: what is read, how often, and what is said about the rest."""

from __future__ import annotations

import logging
import os

import pytest
from records import WRITTEN_AT, living, make_device, make_record
from sidecars import Clock

from torchmem.wire import record as wire
from torchmem_exporter import reader as reader_module
from torchmem_exporter.reader import KNOWN_REASONS, Reader


@pytest.fixture
def reader(tmp_path):
    return Reader(tmp_path, 60.0, Clock(WRITTEN_AT + 1))


def test_unchanged_files_are_decoded_once(reader, tmp_path, monkeypatch):
    """Each scrape would decode megabytes that it knows already."""
    decoded = []
    monkeypatch.setattr(reader_module, "decode", lambda data: decoded.append(len(data)) or wire.decode(data))
    with living(tmp_path, make_record(0), make_record(1)) as (store, _):
        for _ in range(3):
            assert len(reader.read().ranks) == 2
        assert len(decoded) == 2
        store.write(wire.encode(make_record(0, step=41)))
        assert [view.record.clock.step for view in reader.read().ranks] == [41, 40]
        assert len(decoded) == 3


def test_same_size_and_time_but_other_content_is_seen(reader, tmp_path):
    """A record that was written within one tick of the file system's clock would stay unread."""
    with living(tmp_path, make_record(step=40)) as (store,):
        before = os.stat(store.path)
        reader.read()
        store.write(wire.encode(make_record(step=41)))
        os.utime(store.path, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert os.stat(store.path).st_size == before.st_size
        assert [view.record.clock.step for view in reader.read().ranks] == [41]


def test_reasons_are_there_at_zero(reader):
    """The first rejection would go unnoticed: an increase is only seen from a sample before it."""
    assert reader.read().errors == dict.fromkeys(sorted(KNOWN_REASONS), 0)


def test_a_look_changes_nothing(reader, tmp_path):
    """Whoever opens the landing page would raise the error counters."""
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "rank-0.record").write_bytes(b"")
    assert reader.read(advance=False).errors["truncated"] == 0
    assert [reader.read().errors["truncated"] for _ in range(2)] == [1, 2]


def test_a_rejection_is_logged_once(reader, tmp_path, caplog):
    """The log would fill by one line a scrape, or never say which file is meant."""
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "rank-0.record").write_bytes(b"no record, but long enough to be one")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            reader.read()
    assert caplog.messages == ["job/rank-0.record rejected (magic): not a torchmem record"]


def test_names_cannot_forge_lines_of_the_log(reader, tmp_path, caplog):
    """A file's name could write whole lines into the log."""
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "rank-\nsidecar: all is well.record").write_bytes(b"")
    with caplog.at_level(logging.WARNING):
        assert reader.read().errors["name"] == 1
    assert [len(message.splitlines()) for message in caplog.messages] == [1]


@pytest.mark.parametrize("name", [".rank-0.record.tmp", "rank-0.lock", "notes.txt", ".rank-0.record"])
def test_other_files_are_passed_over(reader, tmp_path, name):
    """A writer's own temporary file would be counted as an error."""
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / name).write_bytes(b"")
    (tmp_path / name).write_bytes(b"")
    assert reader.read().rejections == ()


@pytest.mark.parametrize(
    ("reason", "record"),
    [
        ("identity", make_record(1)),
        ("identity", make_record(train_job="")),
        ("clock", make_record(written_at=float("nan"))),
        ("clock", make_record(step_seconds=float("inf"))),
        ("books", make_record(devices=[make_device(), make_device()])),
    ],
)
def test_records_that_cannot_be_shown_are_refused(reader, tmp_path, reason, record):
    """A record copied to another rank's name, or with senseless figures, would spoil a whole scrape."""
    with living(tmp_path, make_record(0)) as (store,):
        store.write(wire.encode(record))
        snapshot = reader.read()
    assert (snapshot.ranks, snapshot.errors[reason]) == ((), 1)


def test_no_descriptor_is_left_open(reader, tmp_path):
    """The sidecar would run out of descriptors after a day of scrapes."""
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "rank-0.record").write_bytes(b"garbage")
    with living(tmp_path, make_record()):
        reader.read()
        before = os.listdir("/proc/self/fd")
        for _ in range(5):
            reader.read()
        assert len(os.listdir("/proc/self/fd")) == len(before)
