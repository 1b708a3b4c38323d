"""One process per rank, kept alive for all rows: importing torch takes longer than a row.

A row that raises on any rank, or does not end in time, ends the whole team, since ranks that disagree about the next
collective are of no use; the next row starts a new one. A team that cannot start is not tried again.

Invariants: no process, and nothing that one started, outlives ``Team.close``, a Ctrl-C, or the parent itself; what
workers write goes to files, so that the table stays a table; torch is imported in the workers only.
Limits: Linux; one host.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib
import multiprocessing
import os
import platform
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torchmem.validation.outcome import RankOutcome

if TYPE_CHECKING:
    from multiprocessing.context import SpawnProcess

    from typing_extensions import Self

    from torchmem.validation.workloads import Place

DEFAULT_TABLE = "torchmem.validation.rows"
START_SECONDS = 180.0
"""For importing torch on a slow host and for the first communication."""
_GRACE_SECONDS = 2.0
_PARENT_DIES = 1  # PR_SET_PDEATHSIG


class RowError(Exception):
    """A row failed; the message is one line.

    Attributes:
        details: a traceback, or where each thread was.
    """

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(message)
        self.details = details


class Environment(NamedTuple):
    """What the rows ran on, as rank 0 sees it."""

    device: str
    """The product's name."""
    driver: str
    """The device driver's version; empty on the CPU."""
    backend: str
    """Of the process group."""


class _Plan(NamedTuple):
    """What every worker is told once."""

    world_size: int
    device_type: str
    folder: str
    table: str


class _Answer(NamedTuple):
    """What a worker says of one row."""

    value: Any = None
    error: str = ""
    details: str = ""


@dataclass
class _Worker:
    """A rank's process and the way to talk to it."""

    rank: int
    process: SpawnProcess
    pipe: Connection
    answer: _Answer | None = None


class Team:
    """The ranks of one job.

    Args:
        world_size: how many.
        device_type: ``cpu`` or ``cuda``.
        table: name of the module whose ``ROWS`` the workers know.
    """

    def __init__(self, world_size: int, device_type: str, table: str = DEFAULT_TABLE) -> None:
        self.environment: Environment | None = None
        self._current = Path()
        self._start_failure: RowError | None = None
        self._workers: list[_Worker] = []
        self._folder = tempfile.TemporaryDirectory(prefix="torchmem-validate-")
        self._plan = _Plan(world_size, device_type, self._folder.name, table)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, name: str, num_steps: int, seconds: float) -> list[RankOutcome]:
        """What each rank saw of one row, by rank.

        Args:
            name: the row's.
            num_steps: steps of a block.
            seconds: how long it may take.

        Raises:
            RowError: it raised or died on a rank, or hung; or the ranks cannot be started.
        """
        if self._start_failure is not None:
            raise RowError(f"not run: {self._start_failure}")
        if not self._workers:
            self._start()
        return self._ask((name, num_steps, seconds), seconds)

    def close(self) -> None:
        """Ends every process; safe to call twice."""
        self._end()
        self._folder.cleanup()

    def _start(self) -> None:
        folder = Path(tempfile.mkdtemp(dir=self._plan.folder))
        plan = self._plan._replace(folder=str(folder))
        try:
            for rank in range(plan.world_size):
                self._workers.append(_started(rank, plan))
            self.environment = self._collect(START_SECONDS, folder)[0]
        except RowError as error:
            self._end()
            # Each further row would wait as long for the same.
            self._start_failure = RowError(f"the ranks cannot be started: {error}", error.details)
            raise self._start_failure from None
        except BaseException:
            self._end()
            raise
        self._current = folder

    def _ask(self, question: Any, seconds: float) -> list[Any]:
        try:
            for worker in self._workers:
                with contextlib.suppress(OSError):  # it has died: collecting says how
                    worker.pipe.send(question)
            return self._collect(seconds, self._current)
        except BaseException:
            self._end()
            raise

    def _collect(self, seconds: float, folder: Path) -> list[Any]:
        deadline = time.monotonic() + seconds + _GRACE_SECONDS  # a rank that hangs notes first where it is
        for worker in self._workers:
            worker.answer = None
        while pending := {w.pipe: w for w in self._workers if w.answer is None}:
            ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                worker = pending[pipe]  # type: ignore[index]  # one of those that were waited for
                worker.answer = _received(worker, folder)
                if worker.answer.error:  # the cause is what came first: the others fail because of it, or wait
                    raise RowError(f"rank {worker.rank}: {worker.answer.error}", worker.answer.details)
        if pending:
            raise _hung(list(pending.values()), seconds, folder)
        return [worker.answer.value for worker in self._workers if worker.answer]

    def _end(self) -> None:
        for worker in self._workers:
            # The group: a compiler that the worker started goes too.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(worker.process.pid or 0, signal.SIGKILL)
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
            worker.process.close()
            worker.pipe.close()
        self._workers.clear()


def _started(rank: int, plan: _Plan) -> _Worker:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_main, args=(theirs, rank, plan), daemon=True)
    with _interrupts_held():
        process.start()
    theirs.close()
    return _Worker(rank, process, ours)


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """Holds back Ctrl-C: a process started meanwhile never sees one, and the parent sees it right after."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _received(worker: _Worker, folder: Path) -> _Answer:
    try:
        answer: _Answer = worker.pipe.recv()
    except (EOFError, OSError):
        worker.process.join(_GRACE_SECONDS)
        code = worker.process.exitcode or 0
        how = signal.Signals(-code).name if code < 0 else f"exit status {code}"
        return _Answer(error=f"the process died: {how}", details=_read(folder / f"output-{worker.rank}"))
    return answer


def _hung(workers: list[_Worker], seconds: float, folder: Path) -> RowError:
    stacks = {worker.rank: _read(folder / f"stacks-{worker.rank}") for worker in workers}
    where = "; ".join(f"rank {rank} {_innermost(stack)}" for rank, stack in stacks.items())
    return RowError(f"no end after {seconds:g} s: {where}", "\n".join(stacks.values()))


def _innermost(stacks: str) -> str:
    """Where the main thread was: faulthandler writes it last, innermost call first."""
    frames = stacks.rpartition("most recent call first):")[2].strip().splitlines()
    return frames[0].strip().replace('File "', "at ").replace('", line ', ":") if frames else "does not answer"


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")[-20_000:]
    except OSError:
        return ""


# -- in the worker


def _main(pipe: Connection, rank: int, plan: _Plan) -> None:
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(_PARENT_DIES, signal.SIGKILL)
    folder = Path(plan.folder)
    _redirect(folder / f"output-{rank}")
    with (folder / f"stacks-{rank}").open("w") as stacks:
        faulthandler.dump_traceback_later(START_SECONDS, file=stacks)
        pipe.send(_answered(lambda: _join(rank, plan)))
        place = _place(rank, plan)
        while True:
            try:
                name, num_steps, seconds = pipe.recv()
            except EOFError:
                return
            faulthandler.dump_traceback_later(seconds, file=stacks)
            pipe.send(_answered(lambda: _run(plan.table, name, place, num_steps)))  # noqa: B023  # called at once
            faulthandler.cancel_dump_traceback_later()


def _answered(work: Callable[[], Any]) -> _Answer:
    try:
        return _Answer(work())
    except BaseException as error:  # noqa: BLE001  # whatever it is, the parent shows it
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        return _Answer(error=reason[:300], details=traceback.format_exc())


def _redirect(path: Path) -> None:
    """Warnings and whatever native libraries say would tear the table."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def _join(rank: int, plan: _Plan) -> Environment:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(plan.world_size))
    if plan.device_type == "cpu":
        # Ranks that compete for cores would measure each other; so would inductor's own processes.
        os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", TORCHINDUCTOR_COMPILE_THREADS="1")
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch
    import torch.distributed as dist

    from torchmem.validation import witness

    witness.install()  # on CUDA too: it knows which of the host's tensors an allocator made
    if plan.device_type == "cpu":
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(rank)
    backend = "gloo" if plan.device_type == "cpu" else "cpu:gloo,cuda:nccl"
    store = dist.FileStore(f"{plan.folder}/store", plan.world_size)  # type: ignore[attr-defined]  # public all the same
    limit = timedelta(seconds=START_SECONDS)
    dist.init_process_group(backend, store=store, rank=rank, world_size=plan.world_size, timeout=limit)
    return _environment(plan.device_type, backend)


def _environment(device_type: str, backend: str) -> Environment:
    import torch

    if device_type == "cpu":
        return Environment(_cpu_name(), "", backend)
    return Environment(torch.cuda.get_device_name(), _driver(), backend)


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _driver() -> str:
    with contextlib.suppress(OSError):
        words = Path("/proc/driver/nvidia/version").read_text().split()
        return next((word for word in words if word[:1].isdecimal()), "")
    return ""


def _place(rank: int, plan: _Plan) -> Place:
    import torch

    from torchmem.validation.workloads import Place

    device = torch.device(plan.device_type, rank) if plan.device_type == "cuda" else torch.device("cpu")
    return Place(rank, plan.world_size, device, Path(plan.folder))


def _run(table: str, name: str, place: Place, num_steps: int) -> RankOutcome:
    from torchmem.validation.watch import run_row

    (row,) = [row for row in importlib.import_module(table).ROWS if row.name == name]
    return run_row(row, place, num_steps)
