from __future__ import annotations

import errno
import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from torchmem.wire.publisher import MAX_REASONS, Publisher
from torchmem.wire.store import RankStore, is_held

FAST = 0.01
NEVER = 3600.0


def wait_for(condition, seconds=30.0):
    """Polls, because a thread's progress has no other sign."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.002)


@pytest.fixture
def store(tmp_path):
    """Rank 0 of the job ``train``."""
    store = RankStore(tmp_path, "train", 0)
    yield store
    store.close()


@pytest.fixture
def publish(store):
    """Starts publishers and closes them, whatever the test did."""
    started = []

    def start(build, interval=FAST):
        publisher = Publisher(store, build, interval)
        started.append(publisher)
        publisher.start()
        return publisher

    yield start
    for publisher in started:
        publisher.close()


def kind(final):
    """A record that only says whether it is the last."""
    return b"final" if final else b"running"


def text(store):
    """The record as it lies."""
    return store.path.read_bytes()


def test_writes_the_first_record_at_once(store, publish):
    """A new job would stay unseen for the first interval."""
    publish(kind, NEVER)
    wait_for(store.path.exists)
    assert text(store) == b"running"


def test_writes_at_intervals(store, publish):
    """The record would grow old while the job runs."""
    publisher = publish(kind)
    wait_for(lambda: publisher.num_written >= 5)
    assert text(store) == b"running"
    publisher.close()
    assert [publisher.num_failed, publisher.last_error] == [0, ""]


def test_waits_between_records(publish):
    """The writer would keep a core busy."""
    started = time.monotonic()
    publisher = publish(kind, 0.2)
    wait_for(lambda: publisher.num_written >= 3)
    assert time.monotonic() - started >= 0.35


def test_close_writes_the_last_record_and_frees_the_rank(store, publish):
    """A job that ended well would look crashed, and could not be started again in the same process."""
    publisher = publish(kind, NEVER)
    wait_for(lambda: publisher.num_written == 1)
    publisher.close()
    assert [text(store), publisher.num_written] == [b"final", 2]
    assert not is_held(store.path.parent, "rank-0.lock")
    assert not any(thread.name == "torchmem-publisher" for thread in threading.enumerate())


def test_close_twice_writes_once(store, publish):
    """Leaving a ``with`` block after ``close`` would overwrite the record of the rank's next holder."""
    publisher = publish(kind, NEVER)
    publisher.close()
    written = publisher.num_written
    store.path.write_bytes(b"next")
    publisher.close()
    assert [text(store), publisher.num_written, publisher.num_failed] == [b"next", written, 0]


def test_close_without_start_frees_the_rank(store):
    """An install that failed half-way would raise in its own cleaning up, or keep the rank."""
    publisher = Publisher(store, kind, NEVER)
    publisher.close()
    assert not store.path.exists()
    assert not is_held(store.path.parent, "rank-0.lock")


def test_failures_to_build_are_counted_and_logged_once(publish, caplog):
    """A bug in the library would end publishing silently, end the job, or flood its log."""

    def build(final):
        raise ValueError("no such book")

    with caplog.at_level(logging.WARNING, "torchmem"):
        publisher = publish(build)
        wait_for(lambda: publisher.num_failed >= 5)
        publisher.close()
    assert publisher.last_error == "ValueError: no such book"
    assert publisher.num_written == 0
    messages = [record.getMessage() for record in caplog.records]
    assert messages == ["no record was written: ValueError: no such book"]


def test_distinct_failures_are_logged_up_to_a_bound(publish, caplog):
    """Failures that name an address each would flood the job's log and hold its memory."""
    numbers = iter(range(10_000))

    def build(final):
        raise ValueError(next(numbers))

    with caplog.at_level(logging.WARNING, "torchmem"):
        publisher = publish(build, 0.0001)
        wait_for(lambda: publisher.num_failed >= MAX_REASONS + 10)
        publisher.close()
    assert len(caplog.records) == MAX_REASONS


def test_full_disk_is_counted_and_survived(store, publish, monkeypatch):
    """A disk that was full for a minute would end publishing for the rest of the job."""
    write = os.write

    def full(fd, data):
        if threading.current_thread().name != "torchmem-publisher":
            return write(fd, data)
        raise OSError(errno.ENOSPC, "No space left on device")

    left = []

    def build(final):
        # On the writer's own thread: elsewhere one may see the file that is just being written.
        left.append([path.name for path in store.path.parent.iterdir()])
        return kind(final)

    monkeypatch.setattr(os, "write", full)
    publisher = publish(build)
    wait_for(lambda: publisher.num_failed >= 3)
    assert "No space left on device" in publisher.last_error
    assert left[:3] == [["rank-0.lock"]] * 3
    monkeypatch.undo()
    wait_for(lambda: publisher.num_written >= 1)
    assert text(store) == b"running"


def test_close_is_bounded_where_the_file_system_hangs(store, publish, monkeypatch, caplog):
    """A dead network mount would keep a finished job from ending."""
    writing, go_on = threading.Event(), threading.Event()
    write = store.write

    def hang(data):
        writing.set()
        assert go_on.wait(60)
        write(data)

    monkeypatch.setattr(store, "write", hang)
    publisher = publish(kind, NEVER)
    assert writing.wait(30)
    started = time.monotonic()
    publisher.close(timeout=0.1)
    assert time.monotonic() - started < 5
    assert [publisher.num_failed, publisher.last_error] == [1, "the last record was not written within 0.1 s"]
    assert is_held(store.path.parent, "rank-0.lock")  # the writer may still write, so the rank is not free yet
    go_on.set()
    wait_for(lambda: not publisher._thread.is_alive())
    assert text(store) == b"final"
    assert not is_held(store.path.parent, "rank-0.lock")


PROLOGUE = """
import os, sys
from pathlib import Path
from torchmem.wire.publisher import MAX_REASONS, Publisher
from torchmem.wire.store import RankStore

store = RankStore(Path(sys.argv[1]), "train", 0)
publisher = Publisher(store, lambda final: b"%s of %d" % (b"final" if final else b"running", os.getpid()), 3600.0)
publisher.start()
while publisher.num_written == 0:
    pass
"""


def run(folder, program):
    """Runs a job that publishes; returns the process once it has ended."""
    command = [sys.executable, "-W", "ignore", "-c", PROLOGUE + textwrap.dedent(program), folder]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def record_text(folder):
    """The record that the job left, without the pid."""
    return (folder / "train" / "rank-0.record").read_text().split(" of ")[0]


@pytest.mark.parametrize(("end", "status"), [("", 0), ("sys.exit(3)", 3), ("raise KeyboardInterrupt", -signal.SIGINT)])
def test_a_process_that_ends_without_close_writes_the_last_record(tmp_path, end, status):
    """A job whose script never calls ``close`` would look crashed, even though it ended as it wanted."""
    ended = run(tmp_path, end)
    assert (ended.returncode, record_text(tmp_path)) == (status, "final"), ended.stderr


def test_a_process_that_ends_by_an_exception_does_not_look_well(tmp_path):
    """A training loop that raised would pass for one that ended as it wanted."""
    ended = run(tmp_path, "raise ValueError")
    assert (ended.returncode, record_text(tmp_path)) == (1, "running"), ended.stderr


def test_close_that_is_not_clean_leaves_a_last_record_that_says_so(store, publish):
    """A job that failed inside the ``with`` block would pass for one that ended as it wanted."""
    publisher = publish(kind, NEVER)
    wait_for(lambda: publisher.num_written == 1)
    publisher.close(is_clean=False)
    assert [text(store), publisher.num_written] == [b"running", 2]
    assert not is_held(store.path.parent, "rank-0.lock")


def test_a_killed_process_leaves_its_last_record(tmp_path):
    """A crash would pass for a clean end."""
    ended = run(tmp_path, "os.kill(os.getpid(), 9)")
    assert (ended.returncode, record_text(tmp_path)) == (-signal.SIGKILL, "running")
    assert not is_held(tmp_path / "train", "rank-0.lock")


def test_a_forked_child_is_inert(tmp_path):
    """A DataLoader worker that exits, or closes, would mark a running trainer as ended."""
    ended = run(
        tmp_path,
        """
        for way in ("exit", "close"):
            child = os.fork()
            if child == 0:
                if way == "close":
                    publisher.close()
                sys.exit(0)  # with exit handlers, as a worker of multiprocessing's fork would not even do
            assert os.waitpid(child, 0)[1] == 0
            assert store.path.read_bytes() == b"running of %d" % os.getpid(), store.path.read_bytes()
        publisher.close()
        assert store.path.read_bytes() == b"final of %d" % os.getpid()
        """,
    )
    assert ended.returncode == 0, ended.stderr
