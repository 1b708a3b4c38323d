"""Readings of a directory of living ranks."""

from __future__ import annotations

import os
import sys
import time
import weakref
from pathlib import Path

import pytest

import records
import watched
from torchmem.watching.look import Watcher
from torchmem.wire import record as wire
from torchmem_exporter.drift.judge import Judge
from torchmem_exporter.reading.lifecycle import State
from torchmem_exporter.reading.reader import Rank
from torchmem_exporter.reading.state import FILE_NAME, StateFile
from watched import LEAKING_MODULE

GROWN = records.module_names(40)[LEAKING_MODULE]


def states(reading):
    """(rank, state) of each rank as it is shown."""
    return [(rank.view.record.identity.rank, rank.view.state) for rank in reading.ranks]


def words(rank):
    """The words of a rank's alerts."""
    return [finding.word for finding in rank.findings(time.time())]


def fingerprint(folder):
    """Everything that a write would change in a directory and below it."""
    paths = [folder, *sorted(folder.rglob("*"))]
    return [(str(path), path.stat().st_mtime_ns, path.stat().st_ino, path.stat().st_size) for path in paths]


def open_files():
    """Descriptors of this process, but for the one that lists them."""
    return sorted(path.name for path in Path("/proc/self/fd").iterdir())


def test_leak_is_found_and_named_from_one_reading_to_the_next(tmp_path):
    """The view would show a leak as a number without a name, or not at all."""
    watcher = Watcher(tmp_path)
    with records.living(tmp_path, watched.trained(0, 520), watched.trained(1, 520)) as (calm, leaky):
        assert [words(rank) for rank in watcher.look().ranks] == [[], []]
        calm.write(wire.encode(watched.trained(0, 1000)))
        leaky.write(wire.encode(watched.trained(1, 1000, leaks_from=520)))
        first, second = watcher.look().ranks
    assert words(first) == []
    assert "leak" in words(second)
    grower = second.devices[0].verdict.growers[0]
    assert (grower.module, grower.reftype) == (GROWN, "activation")


@pytest.mark.parametrize("folder", ["", "llama-pretrain"])
def test_what_a_sidecar_has_learned_is_taken_over(tmp_path, folder):
    """A leak from before the view was opened would have no name, though the sidecar knows it."""
    state = StateFile(tmp_path / FILE_NAME)
    judge = Judge(state)
    judge.judge(Rank("train/rank-1.record", watched.trained(1, 520), State.RUNNING, has_memory=True))
    judge.save(is_due=True)
    with records.living(tmp_path, watched.trained(1, 1000, leaks_from=520)):
        (rank,) = Watcher(tmp_path / folder).look().ranks
    assert [(one.module, one.reftype) for one in rank.devices[0].verdict.growers] == [(GROWN, "activation")]


def test_ranks_come_and_go_and_the_living_are_first(tmp_path):
    """A restarted job would need the view to be restarted, or the dead would hide the living."""
    watcher = Watcher(tmp_path / "later")
    assert (watcher.look().exists, watcher.look().ranks) == (False, ())
    with records.living(tmp_path / "later", watched.trained(0, 20), watched.trained(1, 20)) as (first, _):
        assert states(watcher.look()) == [(0, "running"), (1, "running")]
        first.close()
        assert states(watcher.look()) == [(1, "running"), (0, "crashed")]
        Path(first.path).unlink()
        assert states(watcher.look()) == [(1, "running")]


def test_records_of_ranks_that_are_gone_are_let_go(tmp_path):
    """A view that stays open on a busy host would keep a record of every rank it has ever seen."""
    watcher = Watcher(tmp_path)
    with records.living(tmp_path, watched.trained(0, 20)) as (store,):
        seen = weakref.ref(watcher.look().ranks[0].view)
        record = watcher.look().ranks[0].view.record
        num_holders = sys.getrefcount(record)
        Path(store.path).unlink()
        watcher.look()
        assert seen() is None
        assert sys.getrefcount(record) == num_holders - 1


def test_those_who_died_are_counted_where_nobody_is_left(tmp_path):
    """After a sidecar has moved a crashed rank's record away, the view would say that no job has run."""
    watcher = Watcher(tmp_path)
    counts = [watcher.look().num_deaths]
    records.leave(tmp_path, watched.trained(0, 20))
    counts.append(watcher.look().num_deaths)
    path = tmp_path / "llama-pretrain" / "rank-0.record"
    (path.parent / "post-mortem").mkdir(mode=0o700)
    path.rename(path.parent / "post-mortem" / "rank-0.a.record")
    counts.append(watcher.look().num_deaths)
    with records.living(tmp_path, watched.trained(1, 20)):
        counts.append(watcher.look().num_deaths)
    assert counts == [0, 0, 1, 0]


def test_directory_that_cannot_be_looked_for_is_one_line(tmp_path):
    """A path that is too long or below a closed folder would end in a traceback, or be told not to exist."""
    look = Watcher(tmp_path / ("x" * 300)).look()
    assert [look.exists, len(look.unreadable), look.ranks] == [True, 1, ()]
    assert "File name too long" in look.unreadable[0]


def test_unreadable_records_are_counted_and_hide_nobody(tmp_path):
    """One garbled record would end the view, or hide the other ranks."""
    with records.living(tmp_path, watched.trained(0, 20), watched.trained(1, 20)) as (_, garbled):
        Path(garbled.path).write_bytes(b"garbage")
        os.mkfifo(tmp_path / "llama-pretrain" / "rank-2.record")
        (tmp_path / FILE_NAME).write_bytes(b"garbage, too")
        reading = Watcher(tmp_path).look()
    assert states(reading) == [(0, "running")]
    assert len(reading.unreadable) == 2


def test_only_the_job_asked_for_is_read(tmp_path):
    """Other jobs of the host would be in the way."""
    other = records.make_record(0, train_job="other", labelers=[])
    with records.living(tmp_path, watched.trained(0, 20), other):
        assert [Watcher(tmp_path, job).look().jobs for job in ("other", None)] == [
            ["other"],
            ["llama-pretrain", "other"],
        ]
        assert len(Watcher(tmp_path / "llama-pretrain").look().ranks) == 1


def test_accelerators_come_before_the_host(tmp_path):
    """The first thing seen of a GPU job would be the memory of its host."""
    record = records.make_record(0, devices=[records.make_device(name=name) for name in ("cpu", "cuda:0")])
    with records.living(tmp_path, record):
        (rank,) = Watcher(tmp_path).look().ranks
    assert [one.device.name for one in rank.devices] == ["cuda:0", "cpu"]


def test_forecast_is_compared_with_the_step_peak(tmp_path):
    """The view would not show that a rank misses its forecast."""
    peak = records.make_device().step_peak_bytes
    with records.living(tmp_path, records.make_record(0, forecast_bytes=peak // 2, labelers=[])):
        (rank,) = Watcher(tmp_path).look().ranks
    assert rank.devices[0].forecast_drift_ratio == pytest.approx(1.0)
    assert "forecast" in words(rank)


def test_nothing_is_written_and_no_lock_is_taken(tmp_path):
    """Watching would disturb the jobs, or need the right to write."""
    watcher = Watcher(tmp_path)
    with records.living(tmp_path, watched.trained(0, 520), watched.trained(1, 520)) as (first, _):
        Judge(StateFile(tmp_path / FILE_NAME)).save(is_due=True)
        before = fingerprint(tmp_path)
        open_before = open_files()
        for _ in range(3):
            watcher.look()
        assert fingerprint(tmp_path) == before
        assert open_files() == open_before
        first.write(wire.encode(watched.trained(0, 540)))
