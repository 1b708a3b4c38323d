"""The life of ranks that are real training processes: killed, starved, restarted, moved, side by side."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest

from sidecars import running, series, states, values
from torchmem.model import Phase
from torchmem.wire.deaths import read_deaths
from torchmem_exporter.reading.lifecycle import State
from torchmem_exporter.reading.reader import Reader

pytestmark = pytest.mark.slow

DEADLINE_SECONDS = 60.0
PROGRAM = """
import multiprocessing, sys, time
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, get_worker_info
import torchmem

class Rows(Dataset):
    def __len__(self):
        return 1_000_000
    def __getitem__(self, index):
        if get_worker_info() and index >= 8:  # both workers are busy from here on: idle ones would notice a death
            time.sleep(600)
        return torch.zeros(8)

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.asks_for = 0
    def forward(self, x):
        if self.asks_for:
            torch.empty(self.asks_for, dtype=torch.uint8)
        return self.linear(x)

model = nn.Sequential(Layer(), Layer())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
monitor = torchmem.install(model, optimizer, publish_interval=0.05)
batches = iter(DataLoader(Rows(), batch_size=4, num_workers=int(sys.argv[1])))

def step():
    optimizer.zero_grad()
    model(next(batches)).sum().backward()
    optimizer.step()

step()
print(*(child.pid for child in multiprocessing.active_children()), flush=True)
for command in sys.stdin:
    if command == "end\\n":
        break
    model[1].asks_for = 1 << 50 if "oom" in command else 0
    try:
        step()
    except RuntimeError:
        if "caught" not in command:
            raise
    print("done", flush=True)
monitor.close()
"""


class Job:
    """A training process that does as it is told."""

    def __init__(self, process):
        self.process = process
        self.workers = [int(pid) for pid in process.stdout.readline().split()]

    def tell(self, command):
        """One more step, of a kind."""
        self.process.stdin.write(f"{command}\n")
        self.process.stdin.flush()
        return self.process.stdout.readline() == "done\n"

    def kill(self):
        """Ends it without a chance to say so."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(DEADLINE_SECONDS)

    def end(self):
        """Ends it as told; returns its exit status."""
        self.tell("end")
        return self.process.wait(DEADLINE_SECONDS)


@pytest.fixture
def start(tmp_path):
    """Starts training processes, and kills what is left of them and of their workers."""
    started = []

    def start_some(*ranks, train_job="train", num_workers=0):
        processes = []
        for rank in ranks:
            environment = {
                **os.environ,
                "TORCHMEM_DIR": str(tmp_path),
                "TORCHMEM_TRAIN_JOB": train_job,
                "RANK": str(rank),
                "WORLD_SIZE": "2",
            }
            line = [sys.executable, "-W", "ignore", "-c", PROGRAM, str(num_workers)]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
            processes.append(subprocess.Popen(line, text=True, env=environment, start_new_session=True, **pipes))
        started.extend(processes)
        return [Job(process) for process in processes]

    yield start_some
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(DEADLINE_SECONDS)
        process.stdin.close()
        process.stdout.close()


class Watch:
    """A sidecar's reader whose clock may be put forward."""

    def __init__(self, directory):
        self.ahead = 0.0
        self.reader = Reader(directory, stale_after=60.0, clock=lambda: time.time() + self.ahead)

    def ranks(self):
        """(job, rank) -> what one scrape shows of it."""
        snapshot = self.reader.scan("prometheus")
        assert snapshot.rejections == ()
        return {(rank.record.identity.train_job, rank.record.identity.rank): rank for rank in snapshot.ranks}

    def until(self, is_true):
        """What is shown once it is as it should be."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not is_true(shown := self.ranks()):
            assert time.monotonic() < deadline, shown
            time.sleep(0.02)
        return shown


def is_alive(pid):
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


def test_killed_with_loader_workers_alive(start, tmp_path):
    """A rank killed for memory would seem to live on in its workers, or its restart be locked out."""
    [job] = start(0, num_workers=2)
    watch = Watch(tmp_path)
    watch.until(lambda ranks: ranks)
    job.kill()
    shown = watch.ranks()["train", 0]
    assert (shown.state, shown.has_memory) == (State.CRASHED, False)
    assert [is_alive(worker) for worker in job.workers] == [True, True]
    watch.ahead = 10.0
    assert watch.ranks()["train", 0].path.startswith("train/post-mortem/rank-0.")
    [successor] = start(0)
    watch.ahead = 0.0
    shown = watch.until(lambda ranks: ranks["train", 0].state is State.RUNNING)
    assert shown["train", 0].record.identity.pid == successor.process.pid
    assert [death.how for death in read_deaths(tmp_path).deaths] == ["crashed"]


def test_failures_outlive_attempts_and_sidecars(start, tmp_path):
    """Nobody would learn what filled the device when a rank died, or how often its attempts failed in all."""
    watch = Watch(tmp_path)
    for number in (1, 2):
        [job] = start(0)
        assert job.tell("caught oom")
        assert not job.tell("oom")
        assert job.process.wait(DEADLINE_SECONDS) == 1
        shown = watch.ranks()["train", 0]
        assert (shown.state, shown.ooms) == (State.CRASHED, {"cpu": 2 * number})
        assert Watch(tmp_path).ranks()["train", 0].ooms == {"cpu": 2 * number}
    deaths = read_deaths(tmp_path).deaths
    assert [death.how for death in deaths] == ["out of memory", "out of memory"]
    for death in deaths:
        record, event = death.record, death.record.oom_events[-1]
        assert (record.modules[event.module], event.requested_bytes) == ("1", 1 << 50)
        assert (Phase(event.phase), event.step, len(record.oom_events)) == (Phase.FORWARD, 1, 2)


def test_a_failure_that_is_survived_is_no_death(start, tmp_path):
    """A search for the largest batch would be reported as a crash."""
    [job] = start(0)
    assert job.tell("caught oom")
    assert job.tell("step")
    watch = Watch(tmp_path)
    watch.until(lambda ranks: ranks)
    shown = watch.until(lambda ranks: ranks["train", 0].ooms == {"cpu": 1})
    assert shown["train", 0].state is State.RUNNING
    assert job.end() == 0
    assert [len(watch.ranks()) for _ in range(3)] == [1, 1, 0]
    assert read_deaths(tmp_path).deaths == []


def test_ranks_go_to_other_processes(start, tmp_path):
    """After an elastic restart a rank would be shown with the books of the process that had it before."""
    watch = Watch(tmp_path)
    first = start(0, 1)
    before = watch.until(lambda ranks: len(ranks) == 2)
    for job in first:
        job.kill()
    second = start(1, 0)
    after = watch.until(lambda ranks: len(ranks) == 2 and all(rank.state is State.RUNNING for rank in ranks.values()))
    assert [after["train", number].record.identity.pid for number in (1, 0)] == [job.process.pid for job in second]
    attempts = {rank.record.identity.attempt for rank in (*before.values(), *after.values())}
    assert len(attempts) == 4
    assert {death.record.identity.attempt for death in read_deaths(tmp_path).deaths} == {
        rank.record.identity.attempt for rank in before.values()
    }


def test_two_jobs_on_one_node(start, tmp_path):
    """The death of one job's rank would be another's."""
    [one] = start(0, train_job="one")
    [other] = start(0, train_job="other")
    watch = Watch(tmp_path)
    shown = watch.until(lambda ranks: len(ranks) == 2)
    assert {key: rank.state for key, rank in shown.items()} == {
        ("one", 0): State.RUNNING,
        ("other", 0): State.RUNNING,
    }
    one.kill()
    assert {key: rank.state for key, rank in watch.ranks().items()} == {
        ("one", 0): State.CRASHED,
        ("other", 0): State.RUNNING,
    }
    assert other.end() == 0


def test_sidecar_restarted_in_the_middle(start, tmp_path):
    """A sidecar that is restarted between a crash and the next scrape would forget the crash."""
    [job] = start(0)
    Watch(tmp_path).until(lambda ranks: ranks)
    with running(tmp_path) as sidecar:
        assert states(sidecar.ask().text) == {"0": "running"}
        job.kill()
        assert states(sidecar.ask().text) == {"0": "crashed"}
    for _ in range(2):
        with running(tmp_path) as sidecar:
            text = sidecar.ask().text
            assert states(text) == {"0": "crashed"}
            assert values(text, "torchmem_rank_up", "rank") == {"0": 0}
            assert not any(name.startswith("torchmem_module_memory") for name, _ in series(text))
    start(0)
    Watch(tmp_path).until(lambda ranks: ranks["train", 0].state is State.RUNNING)
    with running(tmp_path) as sidecar:
        assert states(sidecar.ask().text) == {"0": "running"}
