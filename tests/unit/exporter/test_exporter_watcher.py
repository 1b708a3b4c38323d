"""The thread that looks when nobody scrapes."""

from __future__ import annotations

import os
import time

import pytest

from records import leave, living, make_record
from torchmem_exporter.budget import Budget
from torchmem_exporter.exposition import Exposition
from torchmem_exporter.reading.reader import Reader
from torchmem_exporter.watcher import MAX_TOLD, Watcher


@pytest.fixture
def watcher(tmp_path):
    """Over the test's directory; looks when it is told to."""
    reader = Reader(tmp_path, stale_after=60.0, keep_seconds=86400.0)
    return Watcher(Exposition(reader, Budget()))


def look(watcher, times=2):
    """Looks as its thread would."""
    for _ in range(times):
        watcher._look(is_last=False)


def test_what_cannot_be_used_is_said_once(watcher, tmp_path, caplog):
    """Whoever wonders why a rank is missing would find nothing in the log, or nothing else."""
    with living(tmp_path, make_record(0)):
        (tmp_path / "llama-pretrain" / "rank-1.record").write_bytes(b"of some length, but no record")
        look(watcher)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("'llama-pretrain/rank-1.record' cannot be used (magic): ")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_is_said_with_the_fix(watcher, tmp_path, caplog):
    """A sidecar that runs as the wrong user would show nothing, and seem to be well."""
    (tmp_path / "train").mkdir()
    os.chown(tmp_path / "train", 12345, 12345)
    look(watcher)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "it belongs to uid 12345, and this is uid 0: run the sidecar as who trains" in line


def test_a_flood_of_garbage_does_not_flood_the_log(watcher, tmp_path, caplog):
    """A full disk would follow from a directory full of nonsense."""
    (tmp_path / "job").mkdir()
    for rank in range(MAX_TOLD + 20):
        (tmp_path / "job" / f"rank-{rank}.record").write_bytes(b"")
    look(watcher)
    assert len(caplog.records) == MAX_TOLD + 1
    assert caplog.records[-1].getMessage() == "further records that cannot be used are only counted"


def test_it_removes_what_ended_long_ago(watcher, tmp_path):
    """Only a restart would tidy up."""
    leave(tmp_path, make_record(final=True))
    then = time.time() - 2 * 86400
    for path in (tmp_path / "llama-pretrain").iterdir():
        os.utime(path, (then, then))
    look(watcher)
    assert not (tmp_path / "llama-pretrain").exists()
