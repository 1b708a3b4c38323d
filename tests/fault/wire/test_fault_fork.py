"""Workers forked while the trainer writes: whatever they do, the trainer's record and lock stay its own."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import os, signal, sys
from pathlib import Path
from torchmem.errors import StoreError
from torchmem.wire.publisher import Publisher
from torchmem.wire.store import RankStore, is_held

folder = Path(sys.argv[1])
store = RankStore(folder, "train", 0)
publisher = Publisher(store, lambda is_final: b"%d %d" % (is_final, os.getpid()), 0.0001)
publisher.start()
while publisher.num_written < 10:
    pass


def work(number):
    if number % 4 == 0:
        publisher.close()
        sys.exit(0)
    if number % 4 == 1:
        store.close()
        os._exit(0)
    if number % 4 == 2:  # a worker sees the trainer's lock, and may be a rank of its own
        own = RankStore(folder, f"worker-{number}", 0)
        own.write(b"own")
        own.close()
        seen = is_held(store.path.parent, "rank-0.lock")
        try:
            RankStore(folder, "train", 0)
        except StoreError:
            os._exit(0 if seen else 3)
        os._exit(4)
    os.kill(os.getpid(), signal.SIGKILL)


for number in range(40):
    pid = os.fork()
    if pid == 0:
        work(number)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status == (-9 if number % 4 == 3 else 0), (number, status)
    assert store.path.read_bytes() == b"0 %d" % os.getpid()
    pid = os.fork()  # another process's view of the lock: a process cannot see its own
    if pid == 0:
        os._exit(0 if is_held(store.path.parent, "rank-0.lock") else 1)
    assert os.waitpid(pid, 0)[1] == 0, number
written = publisher.num_written
while publisher.num_written == written:
    pass
publisher.close()
assert publisher.num_failed == 0, publisher.last_error
assert store.path.read_bytes() == b"1 %d" % os.getpid()
assert sorted(os.listdir(store.path.parent)) == ["rank-0.lock", "rank-0.record"]
"""


def test_workers_forked_in_the_middle_of_writes_are_inert(tmp_path):
    """A DataLoader worker's end would mark the trainer as ended, free its rank, or hang on a lock it inherited."""
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert (ended.returncode, ended.stderr) == (0, "")
