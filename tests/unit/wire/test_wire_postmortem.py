"""The post-mortem folder: what is moved there, within which bounds, and what may lie in the way."""

from __future__ import annotations

import os
import stat
import time

import pytest

import small_records
from torchmem.wire import postmortem
from torchmem.wire import record as wire
from torchmem.wire.postmortem import Bounds, buried_name, bury, exceeds, listed, opened, prune
from torchmem.wire.store import RankStore

ATTEMPT = small_records.identity().attempt
NAME = f"rank-0.{ATTEMPT}.record"
DATA = wire.encode(small_records.record())


@pytest.fixture
def job(tmp_path):
    """The folder of a job whose rank 0 has died."""
    store = RankStore(tmp_path, "train", 0)
    store.write(DATA)
    store.close()
    return tmp_path / "train"


@pytest.fixture
def job_fd(job):
    fd = os.open(job, os.O_RDONLY | os.O_DIRECTORY)
    yield fd
    os.close(fd)


def names(folder):
    """The files of a folder."""
    return sorted(path.name for path in folder.iterdir())


def fill(job, num_files, num_bytes=10):
    """Dead attempts, each older than the next by an hour; returns their names, oldest first."""
    (job / "post-mortem").mkdir(exist_ok=True)
    made = []
    for index in range(num_files):
        path = job / "post-mortem" / f"rank-0.attempt-{index:03}.record"
        path.write_bytes(bytes(num_bytes))
        at = time.time() - 3600 * (num_files - index)
        os.utime(path, (at, at))
        made.append(path.name)
    return made


def test_the_next_attempt_keeps_what_the_dead_one_left(job):
    """A restarted rank would overwrite the only trace of why it died."""
    store = RankStore(job.parent, "train", 0)
    assert names(job) == ["post-mortem", "rank-0.lock"]
    store.write(wire.encode(small_records.record(identity=small_records.identity(attempt="next"))))
    store.close()
    assert (job / "post-mortem" / NAME).read_bytes() == DATA


def test_a_clean_end_is_no_death(job):
    """Every finished run would fill the folder of the dead."""
    store = RankStore(job.parent, "train", 1)
    store.write(wire.encode(small_records.record(clock=small_records.clock(final=True))))
    store.close()
    RankStore(job.parent, "train", 1).close()
    assert names(job) == ["rank-0.lock", "rank-0.record", "rank-1.lock", "rank-1.record"]


@pytest.mark.parametrize("content", [b"", b"garbage", DATA[:-1]])
def test_what_cannot_be_read_is_not_kept(job, content):
    """Garbage would take the place of records that tell something."""
    (job / "rank-0.record").write_bytes(content)
    RankStore(job.parent, "train", 0).close()
    assert names(job) == ["rank-0.lock", "rank-0.record"]


@pytest.mark.parametrize(
    "plant",
    [
        pytest.param(lambda path: path.write_text(""), id="file"),
        pytest.param(lambda path: path.symlink_to("/tmp"), id="symlink"),
        pytest.param(os.mkfifo, id="fifo"),
    ],
)
def test_whatever_lies_in_the_folders_place_costs_only_the_record(job, plant, caplog):
    """A planted link would send the record elsewhere, or a training job would not start for its past."""
    plant(job / "post-mortem")
    store = RankStore(job.parent, "train", 0)
    store.write(b"next")
    store.close()
    assert (job / "rank-0.record").read_bytes() == b"next"
    assert not list(job.parent.rglob(NAME))
    assert "the last record of the attempt before is lost" in caplog.text


def test_folder_of_another_user_is_not_used(job, monkeypatch):
    """Another user of the host could take the records of the dead."""
    (job / "post-mortem").mkdir()
    if os.geteuid() != 0:
        pytest.skip("only root can give folders away")
    os.chown(job / "post-mortem", 54321, -1)
    RankStore(job.parent, "train", 0).close()
    assert names(job / "post-mortem") == []


def test_the_folder_is_as_open_as_the_jobs(job, job_fd):
    """A sidecar of the job's group could read the living, but not the dead."""
    job.chmod(0o750)
    with opened(job_fd, makes=True):
        pass
    assert stat.S_IMODE((job / "post-mortem").stat().st_mode) == 0o750
    assert (job / "post-mortem").stat().st_uid == job.stat().st_uid


def test_root_makes_the_folder_for_the_jobs_user(job, job_fd):
    """A sidecar that runs as root would lock the job itself out of its post-mortem folder."""
    if os.geteuid() != 0:
        pytest.skip("only root can give folders away")
    os.chown(job, 54321, 54321)
    with opened(job_fd, makes=True):
        pass
    status = (job / "post-mortem").stat()
    assert (status.st_uid, status.st_gid) == (54321, 54321)


def test_a_record_that_took_the_dead_ones_place_is_put_back(job, job_fd):
    """The record of a new attempt would be filed as the dead one's, and the living rank vanish."""
    seen = (job / "rank-0.record").stat()
    store = RankStore(job.parent, "train", 0)
    store.write(b"of the living")
    assert bury(job_fd, 0, ATTEMPT, seen) == ""
    assert (job / "rank-0.record").read_bytes() == b"of the living"
    assert (job / "rank-0.record").stat().st_nlink == 1
    store.close()


def test_a_second_death_of_one_attempt_replaces_the_first(job, job_fd):
    """A rank thought dead that wrote again and then died would leave its older record."""
    (job / "post-mortem").mkdir()
    (job / "post-mortem" / NAME).write_bytes(b"older")
    assert bury(job_fd, 0, ATTEMPT, (job / "rank-0.record").stat()) == NAME
    assert (job / "post-mortem" / NAME).read_bytes() == DATA


def test_any_attempt_has_a_name():
    """An attempt named by hand could place its record anywhere."""
    hostile = buried_name(3, "../../etc/passwd")
    assert buried_name(3, ATTEMPT) == f"rank-3.{ATTEMPT}.record"
    assert "/" not in hostile
    assert hostile == buried_name(3, "../../etc/passwd")
    assert len({buried_name(3, attempt) for attempt in ("", "a/b", "a.b", "\ud800", "x" * 65)}) == 5


@pytest.mark.parametrize(
    ("bounds", "num_kept"),
    [
        (Bounds(num_files=3), 3),
        (Bounds(num_bytes=45), 4),
        (Bounds(age_seconds=2.5 * 3600), 2),
        (Bounds(), 6),
    ],
)
def test_the_oldest_go_first(job, job_fd, bounds, num_kept):
    """The memory of the host would fill up with the dead, or the latest of them be lost."""
    made = fill(job, 6)
    with opened(job_fd) as folder_fd:
        assert exceeds(listed(folder_fd), time.time(), bounds) == (num_kept < 6)
        prune(folder_fd, bounds)
        assert not exceeds(listed(folder_fd), time.time(), bounds)
    assert names(job / "post-mortem") == made[-num_kept:]


def test_bounds_hold_after_each_death(job, job_fd):
    """A job that crashes in a loop would fill its host's memory."""
    fill(job, 70)
    assert bury(job_fd, 0, ATTEMPT, (job / "rank-0.record").stat()) == NAME
    assert len(names(job / "post-mortem")) == postmortem.BOUNDS.num_files
    assert NAME in names(job / "post-mortem")


def test_garbage_is_neither_counted_nor_removed(job, job_fd):
    """What somebody else put there would be deleted, or push the records out."""
    made = fill(job, 2)
    folder = job / "post-mortem"
    (folder / "notes.txt").write_text("")
    (folder / "rank-0.directory.record").mkdir()
    os.mkfifo(folder / "rank-0.fifo.record")
    (folder / "rank-0.link.record").symlink_to("/nowhere")
    with opened(job_fd) as folder_fd:
        prune(folder_fd, Bounds(num_files=1))
    assert set(names(folder)) == {
        made[1],
        "notes.txt",
        "rank-0.directory.record",
        "rank-0.fifo.record",
        "rank-0.link.record",
    }
