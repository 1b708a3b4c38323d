"""A rank that dies and comes back in a loop, while a sidecar looks on: no record of a dead attempt is lost."""

from __future__ import annotations

import threading
import time

from records import make_record
from torchmem.wire.deaths import read_deaths
from torchmem.wire.record import encode
from torchmem.wire.store import RankStore
from torchmem_exporter.reading import reader as reader_module
from torchmem_exporter.reading.reader import Reader

NUM_ATTEMPTS = 50


def test_both_who_notice_a_death_may_move_the_record(tmp_path, monkeypatch, caplog):
    """A record would be lost, or a living rank's be taken away, when attempt and sidecar act at the same time."""
    monkeypatch.setattr(reader_module, "BURY_AFTER_SECONDS", 0.0)
    reader = Reader(tmp_path, stale_after=60.0, clock=lambda: time.time() + 1)
    done = threading.Event()
    problems = []

    def look():
        while not done.is_set():
            snapshot = reader.scan("prometheus")
            problems.extend(snapshot.rejections)

    looking = threading.Thread(target=look)
    looking.start()
    try:
        for number in range(NUM_ATTEMPTS):
            now = time.time()
            record = make_record(num_modules=1, attempt=f"attempt-{number}", start_time=now, written_at=now)
            store = RankStore(tmp_path, "llama-pretrain", 0)
            for _ in range(3):
                store.write(encode(record))
            deadline = time.monotonic() + 60
            while not store.path.exists():  # taken for the dead one's, and about to be put back
                assert time.monotonic() < deadline
            store.close()
            time.sleep(0.001 * (number % 5))
    finally:
        done.set()
        looking.join()
    assert {death.record.identity.attempt for death in read_deaths(tmp_path).deaths} == {
        f"attempt-{number}" for number in range(NUM_ATTEMPTS)
    }
    assert {problem.reason for problem in problems} <= {"vanished", "open"}
    assert (reader.scan("prometheus").num_unburied, caplog.messages) == (0, [])
