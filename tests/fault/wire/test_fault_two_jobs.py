from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest

from torchmem.wire.store import is_held

JOB = """
import os, sys, time
from pathlib import Path
from torchmem.errors import StoreError
from torchmem.wire.store import RankStore

try:
    store = RankStore(Path(sys.argv[1]), "train", 0)
except StoreError as error:
    sys.exit(str(error))
store.write(b"record")
if sys.argv[2] == "fork" and (worker := os.fork()) == 0:
    time.sleep(120)
    os._exit(0)
print(worker if sys.argv[2] == "fork" else os.getpid(), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def start(tmp_path):
    """Starts jobs of one name and kills what is left of them."""
    started = []

    def start_one(how="plain"):
        command = [sys.executable, "-c", JOB, str(tmp_path), how]
        pipe = subprocess.PIPE
        job = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
        started.append(job)
        return job

    yield start_one
    for job in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
        job.communicate()


def alive(pid):
    """Whether a process is there."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


def test_second_job_of_one_name_is_told_the_fix(start, tmp_path):
    """Two jobs would write over each other's records, and their numbers would alternate."""
    first = start()
    assert int(first.stdout.readline()) == first.pid
    second = start()
    _, message = second.communicate(timeout=60)
    assert second.returncode == 1
    assert message == (
        f"rank 0 of job 'train' is already held by live process {first.pid}: set TORCHMEM_TRAIN_JOB to another name\n"
    )
    assert is_held(tmp_path / "train", "rank-0.lock")


def test_rank_is_free_when_its_holder_has_ended(start):
    """A restarted job would be locked out by its own past."""
    first = start()
    first.stdout.readline()
    first.communicate("")
    second = start()
    assert int(second.stdout.readline()) == second.pid


def test_killed_holder_frees_the_rank_though_a_worker_lives(start, tmp_path):
    """A trainer killed for memory would look alive, and block its restart, as long as a DataLoader worker lingers."""
    first = start("fork")
    worker = int(first.stdout.readline())
    assert is_held(tmp_path / "train", "rank-0.lock")
    os.kill(first.pid, signal.SIGKILL)
    deadline = time.monotonic() + 30
    os.waitid(os.P_PID, first.pid, os.WEXITED | os.WNOWAIT)
    while is_held(tmp_path / "train", "rank-0.lock"):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert alive(worker)
    assert (tmp_path / "train" / "rank-0.record").read_bytes() == b"record"
    second = start()
    assert int(second.stdout.readline()) == second.pid
    assert alive(worker)
