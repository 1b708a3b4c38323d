"""What jobs that ended long ago have left is removed, and nothing else is."""

from __future__ import annotations

import errno
import math
import os
import time

import pytest

from records import leave, living, make_record
from torchmem_exporter.reading.reader import Reader
from torchmem_exporter.reading.sweeper import INTERVAL_SECONDS, MAX_FOLDERS, Sweeper

DAY = 86400.0
KEEP = 14 * DAY


def job(directory, name, age_days, ranks=2):
    """The folder of a job that ended so many days ago, with a record kept post mortem."""
    for rank in range(ranks):
        leave(directory, make_record(rank, train_job=name))
    grave = directory / name / "post-mortem"
    grave.mkdir()
    (grave / "rank-0.0f0f.record").write_bytes(b"dead")
    age(directory / name, age_days)
    return directory / name


def age(folder, days):
    """Makes all in a folder so old."""
    then = time.time() - days * DAY
    for path in (*folder.rglob("*"), folder):
        os.utime(path, (then, then), follow_symlinks=False)


def sweep(directory, now=None, keep=KEEP):
    """A look of a new sidecar."""
    Sweeper(keep).sweep(directory, time.time() if now is None else now)


def left(directory):
    """The folders that are there."""
    return sorted(path.name for path in directory.iterdir())


def test_only_what_is_old_goes(tmp_path):
    """A node would fill up with the records of ended jobs, or lose those that somebody still wants to read."""
    for name, days in (("recent", 13), ("old", 15), ("older", 400)):
        job(tmp_path, name, days)
    sweep(tmp_path)
    assert left(tmp_path) == ["recent"]


def test_one_young_file_keeps_the_folder(tmp_path):
    """A rank of a job that goes on would be removed with those that ended."""
    folder = job(tmp_path, "train", 15)
    os.utime(folder / "rank-1.record")
    sweep(tmp_path)
    grave = job(tmp_path, "other", 15) / "post-mortem" / "rank-0.0f0f.record"
    os.utime(grave)
    sweep(tmp_path)
    assert (left(tmp_path), len(list(folder.iterdir())), grave.exists()) == (["other", "train"], 5, True)


def test_a_live_rank_that_hangs_keeps_its_folder(tmp_path):
    """What a hung job held when it hung would be gone."""
    with living(tmp_path, make_record(train_job="train")):
        age(tmp_path / "train", 15)
        sweep(tmp_path)
        assert (tmp_path / "train" / "rank-0.record").is_file()


@pytest.mark.parametrize("plant", ["notes.txt", "post-mortem/core", "rank-00000000001.record.bak", ".hidden"])
def test_what_is_not_torchmems_keeps_the_folder_whole(tmp_path, plant):
    """A sidecar as root would delete a user's files."""
    folder = job(tmp_path, "train", 15)
    (folder / plant).write_text("mine")
    age(folder, 15)
    before = sorted(folder.rglob("*"))
    sweep(tmp_path)
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize("name", ["rank-7.record", "post-mortem/rank-7.0f0f.record"])
def test_a_link_or_a_folder_under_a_records_name_is_not_followed(tmp_path, name):
    """A link planted by one user would make the sidecar delete what belongs to another."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "rank-0.record").write_bytes(b"theirs")
    records = tmp_path / "records"
    folder = job(records, "train", 15)
    (folder / name).symlink_to(outside)
    (records / "linked").symlink_to(outside)
    age(folder, 15)
    age(outside, 15)
    sweep(records)
    assert (outside / "rank-0.record").is_file()
    assert (folder / name).is_symlink()


def test_an_empty_folder_goes_only_when_it_is_old(tmp_path):
    """A job that is just starting would lose its folder, or empty ones stay for good."""
    for name in ("starting", "abandoned"):
        (tmp_path / name).mkdir()
    age(tmp_path / "abandoned", 15)
    sweep(tmp_path)
    assert left(tmp_path) == ["starting"]


def test_nothing_goes_where_all_is_to_be_kept(tmp_path):
    """``--keep-days 0`` would delete everything."""
    job(tmp_path, "old", 4000)
    sweep(tmp_path, keep=math.inf)
    assert left(tmp_path) == ["old"]


def test_many_folders_are_taken_in_turns_and_looked_at_once_an_hour(tmp_path):
    """The first look of a sidecar on an old node would hold up its scrapes, or each look cost as much."""
    for number in range(MAX_FOLDERS + 3):
        job(tmp_path, f"old-{number}", 15, ranks=1)
    sweeper, now = Sweeper(KEEP), time.time()
    numbers = []
    for _ in range(2):
        sweeper.sweep(tmp_path, now)
        numbers.append(len(left(tmp_path)))
    job(tmp_path, "late", 15)
    sweeper.sweep(tmp_path, now + INTERVAL_SECONDS - 1)
    numbers.append(len(left(tmp_path)))
    sweeper.sweep(tmp_path, now + INTERVAL_SECONDS)
    assert (numbers, left(tmp_path)) == ([3, 0, 1], [])


def test_what_may_not_be_removed_is_said_once(tmp_path, caplog, monkeypatch):
    """A sidecar on a read-only mount would fail at each look, or fill the log."""

    def refuse(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system")

    for name in ("a", "b"):
        job(tmp_path, name, 15)
    monkeypatch.setattr(os, "unlink", refuse)
    sweep(tmp_path)
    assert (left(tmp_path), len(caplog.records)) == (["a", "b"], 1)


def test_a_missing_directory_is_nobodys_fault(tmp_path):
    """A sidecar that starts before the first job would log a traceback."""
    sweep(tmp_path / "nowhere")


def test_what_is_removed_is_no_rejection(tmp_path):
    """An alert on records that cannot be used would fire whenever the sidecar tidies up."""
    job(tmp_path, "old", 15)
    reader = Reader(tmp_path, stale_after=60.0, keep_seconds=KEEP)
    assert reader.scan("prometheus").ranks == ()
    reader.sweep()
    found = reader.scan("prometheus")
    assert (left(tmp_path), found.rejections, sum(found.num_errors.values())) == ([], (), 0)
