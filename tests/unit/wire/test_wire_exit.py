"""How processes end, and what their last record then says of it."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import threading

import pytest

from torchmem.wire import publisher as wire_publisher
from torchmem.wire.publisher import Publisher
from torchmem.wire.store import RankStore, is_held

NEVER = 3600.0
RANK = """
import os, sys, multiprocessing
from pathlib import Path
from torchmem.wire.publisher import Publisher
from torchmem.wire.store import RankStore

def train(folder, end):
    store = RankStore(Path(folder), "train", 0)
    publisher = Publisher(store, lambda is_final: b"final" if is_final else b"running", 3600)
    publisher.start()
    while publisher.num_written == 0:
        pass
    if end == "raise":
        raise RuntimeError("out of memory")
    if end.startswith("exit"):
        sys.exit(int(end.removeprefix("exit")))
    if end == "last error":
        sys.last_value, sys.ps1 = RuntimeError("of an earlier cell"), ">>> "

if __name__ == "__main__":
    folder, method, end = sys.argv[1:]
    if method == "main":
        train(folder, end)
    else:
        child = multiprocessing.get_context(method).Process(target=train, args=(folder, end))
        child.start()
        child.join(60)
"""


@pytest.fixture
def store(tmp_path):
    """Rank 0 of the job ``train``."""
    store = RankStore(tmp_path, "train", 0)
    yield store
    store.close()


def kind(is_final):
    """A record that only says whether it is the last."""
    return b"final" if is_final else b"running"


def last_record(tmp_path, method, end):
    """What the record says after a rank ended, in the main process or in a child of multiprocessing."""
    program = tmp_path / "rank.py"
    program.write_text(RANK)
    command = [sys.executable, "-W", "ignore", str(program), str(tmp_path / "records"), method, end]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert "Traceback" not in ended.stderr or end == "raise", ended.stderr
    assert not is_held(tmp_path / "records" / "train", "rank-0.lock")
    return (tmp_path / "records" / "train" / "rank-0.record").read_text()


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.parametrize(
    ("end", "expected"), [("return", "final"), ("exit0", "final"), ("exit1", "running"), ("raise", "running")]
)
def test_rank_in_a_child_of_multiprocessing(tmp_path, method, end, expected):
    """Ranks started by ``torch.multiprocessing`` would all look crashed, or those that failed would look well."""
    assert last_record(tmp_path, method, end) == expected


def test_interactive_session_is_not_judged_by_an_earlier_error(tmp_path):
    """A notebook in which one cell ever raised would look crashed when it is closed."""
    assert last_record(tmp_path, "main", "last error") == "final"


def test_interrupted_close_can_be_repeated(store, monkeypatch):
    """Ctrl-C while a job ends would cost its last record."""
    publisher = Publisher(store, kind, NEVER)
    publisher.start()
    monkeypatch.setattr(publisher._thread, "join", interrupt)
    with pytest.raises(KeyboardInterrupt):
        publisher.close()
    monkeypatch.undo()
    publisher.close()
    assert store.path.read_bytes() == b"final"
    assert publisher.num_failed == 0


def interrupt(*_):
    """What Ctrl-C does to whatever waits."""
    raise KeyboardInterrupt


def test_close_in_a_signal_handler_while_closing(store):
    """A second SIGTERM while the first one's handler closes the monitor would hang the job."""
    is_building, go_on = threading.Event(), threading.Event()

    def build(is_final):
        is_building.set()
        assert go_on.wait(60)
        return kind(is_final)

    publisher = Publisher(store, build, NEVER)

    def close_again(*_):
        go_on.set()
        publisher.close()

    previous = signal.signal(signal.SIGUSR1, close_again)
    try:
        publisher.start()
        assert is_building.wait(60)
        kicker = threading.Timer(0.1, signal.pthread_kill, (threading.get_ident(), signal.SIGUSR1))
        kicker.start()
        publisher.close(timeout=60)
        kicker.join()
    finally:
        signal.signal(signal.SIGUSR1, previous)
    assert store.path.read_bytes() == b"final"


def test_close_by_the_publisher_itself(store):
    """A monitor that is collected while a record is built would raise on the publisher's thread, or wait for itself."""
    closing = []

    def build(is_final):
        if not closing:
            closing.append(True)
            publisher.close()
        return kind(is_final)

    publisher = Publisher(store, build, NEVER)
    publisher.start()
    publisher._thread.join(60)
    assert [store.path.read_bytes(), publisher.num_failed] == [b"final", 0]


def test_process_without_threads_to_spare_goes_on(store, monkeypatch):
    """A host at its limit of threads would kill the job in ``install``."""

    def refuse(_thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    publisher = Publisher(store, kind, NEVER)
    publisher.start()
    publisher.close()
    assert [publisher.num_failed, publisher.last_error] == [1, "RuntimeError: can't start new thread"]
    assert not is_held(store.path.parent, "rank-0.lock")


class Broken(logging.Handler):
    """A logging handler that fails."""

    def emit(self, record):
        raise RuntimeError("handler of the job")


def test_logging_handler_that_raises_does_not_end_publishing(store):
    """A job whose logging is broken would lose its records too."""
    handler = Broken()
    is_broken = [True]

    def build(is_final):
        if is_broken and is_broken.pop():
            raise ValueError("once\nfailed")
        return kind(is_final)

    wire_publisher.logger.addHandler(handler)
    try:
        publisher = Publisher(store, build, NEVER)
        publisher.start()
        publisher.close()
    finally:
        wire_publisher.logger.removeHandler(handler)
    assert [publisher.num_failed, publisher.last_error] == [1, "ValueError: once failed"]
    assert store.path.read_bytes() == b"final"


def test_closed_publisher_leaves_nothing_to_run_at_exit(store):
    """Each closed monitor would be kept, with its model's books, until the process ends."""
    from multiprocessing import util

    publisher = Publisher(store, kind, NEVER)
    publisher.start()
    finalizer = publisher._at_child_exit
    assert finalizer.still_active()
    publisher.close()
    assert not finalizer.still_active()
    assert not any("_close_at_exit" in repr(entry) for entry in util._finalizer_registry.values())
