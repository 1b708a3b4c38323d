"""Scanning a directory of records: what is read, how often, and what is said about the rest."""

from __future__ import annotations

import os
from pathlib import Path
from unittest.mock import Mock

import pytest

from records import WRITTEN_AT, living, make_device, make_record
from sidecars import Clock
from torchmem.errors import RecordError
from torchmem.wire import record as wire
from torchmem_exporter.reading import checked
from torchmem_exporter.reading.checked import (
    MAX_DEVICES,
    MAX_LABELERS,
    MAX_MODULES,
    MAX_NAME_CHARACTERS,
    MAX_OPERATIONS,
    MAX_REFTYPES,
)
from torchmem_exporter.reading.lifecycle import State
from torchmem_exporter.reading.reader import REASONS, Reader


@pytest.fixture
def reader(tmp_path):
    return Reader(tmp_path, stale_after=60.0, clock=Clock(WRITTEN_AT + 1))


def test_unchanged_files_are_decoded_once(reader, tmp_path, monkeypatch):
    """Each scrape would decode megabytes that it knows already."""
    decoded = []
    monkeypatch.setattr(checked, "decode", lambda data: decoded.append(len(data)) or wire.decode(data))
    with living(tmp_path, make_record(0), make_record(1)) as (store, _):
        for _ in range(3):
            assert len(reader.scan("prometheus").ranks) == 2
        assert len(decoded) == 2
        store.write(wire.encode(make_record(0, step=41)))
        assert [rank.record.clock.step for rank in reader.scan("prometheus").ranks] == [41, 40]
        assert len(decoded) == 3


def test_same_size_and_time_but_other_content_is_seen(reader, tmp_path):
    """A record that was written within one tick of the file system's clock would stay unread."""
    with living(tmp_path, make_record(step=40)) as (store,):
        before = store.path.stat()
        reader.scan("prometheus")
        store.write(wire.encode(make_record(step=41)))
        os.utime(store.path, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert store.path.stat().st_size == before.st_size
        assert [rank.record.clock.step for rank in reader.scan("prometheus").ranks] == [41]


def test_reasons_are_there_at_zero(reader):
    """The first rejection would go unnoticed: an increase is only seen from a sample before it."""
    assert reader.scan("prometheus").num_errors == dict.fromkeys(sorted(REASONS), 0)


def test_a_look_changes_nothing(reader, tmp_path):
    """Whoever opens the page would raise the error counters."""
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "rank-0.record").write_bytes(b"")
    assert reader.scan(None).num_errors["truncated"] == 0
    assert [reader.scan("prometheus").num_errors["truncated"] for _ in range(2)] == [1, 2]


def test_rejections_name_file_and_reason(reader, tmp_path):
    """An operator would know that something is refused, but not which file, nor why."""
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "rank-0.record").write_bytes(b"no record, but long enough to be one")
    for _ in range(2):
        assert reader.scan("prometheus").rejections == (("job/rank-0.record", "magic", "not a torchmem record"),)


def test_a_lack_of_descriptors_passes(reader, tmp_path, monkeypatch):
    """A record that could not be opened for a moment would be refused until its rank writes again."""
    with living(tmp_path, make_record()):
        with monkeypatch.context() as patch:
            refused = RecordError("open", "too many open files")
            patch.setattr(checked, "open_record_bytes", Mock(side_effect=refused))
            assert reader.scan("prometheus").ranks == ()
        assert [rank.state for rank in reader.scan("prometheus").ranks] == [State.RUNNING]


@pytest.mark.parametrize("name", [".rank-0.record.tmp", "rank-0.lock", "notes.txt", ".rank-0.record"])
def test_other_files_are_passed_over(reader, tmp_path, name):
    """A writer's own temporary file would be counted as an error."""
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / name).write_bytes(b"")
    (tmp_path / name).write_bytes(b"")
    assert reader.scan("prometheus").rejections == ()


@pytest.mark.parametrize(
    ("reason", "record"),
    [
        ("identity", make_record(1)),
        ("values", make_record(written_at=float("nan"))),
        ("values", make_record(step_seconds=float("inf"))),
        ("values", make_record(step=-1)),
        ("values", make_record(devices=[make_device(), make_device()])),
        ("values", make_record(modules=[str(i) for i in range(MAX_MODULES + 1)])),
        ("values", make_record(reftypes=[str(i) for i in range(MAX_REFTYPES + 1)], ring=wire.Ring())),
        ("values", make_record(devices=[make_device(name=str(i)) for i in range(MAX_DEVICES + 1)])),
        ("values", make_record(labelers=[wire.Labeler(name=str(i), up=True) for i in range(MAX_LABELERS + 1)])),
        ("values", make_record(checkpoint_peaks={str(i): 1 for i in range(MAX_OPERATIONS + 1)})),
        ("values", make_record(train_job="j" * (MAX_NAME_CHARACTERS + 1))),
        ("values", make_record(attempt="a" * (MAX_NAME_CHARACTERS + 1))),
        ("sums", make_record(step_peak_bytes=1)),
        ("sums", make_record(usage_bytes=1)),
    ],
)
def test_records_that_cannot_be_shown_are_refused(reader, tmp_path, reason, record):
    """A record copied to another rank's name, or with senseless figures, would spoil a whole scrape."""
    with living(tmp_path, make_record(0)) as (store,):
        store.write(wire.encode(record))
        snapshot = reader.scan("prometheus")
    assert (snapshot.ranks, snapshot.num_errors[reason]) == ((), 1)


def test_no_descriptor_is_left_open(reader, tmp_path):
    """The sidecar would run out of descriptors after a day of scrapes."""
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "rank-0.record").write_bytes(b"garbage")
    with living(tmp_path, make_record()):
        reader.scan("prometheus")
        before = list(Path("/proc/self/fd").iterdir())
        for _ in range(5):
            reader.scan("prometheus")
        assert len(list(Path("/proc/self/fd").iterdir())) == len(before)
