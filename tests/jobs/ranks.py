"""Runs a function once per rank, each in a process of its own, and brings the results home.

Invariants: no process outlives ``run_ranks``; the first failure ends the others; a rank that hangs is ended at the
deadline by itself, with the stack of every thread on its standard error, and by the parent in any case.
Known limits: gloo over the loopback interface of one host; functions, arguments and results must be picklable.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import tempfile
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.context import SpawnProcess

# One thread a rank, so that ranks do not compete for cores. Silenced: a torch without NumPy says so in every process,
# and FSDP2 warns of in-place use of the root's output, which these jobs do not make.
_ENVIRONMENT = {
    "GLOO_SOCKET_IFNAME": "lo",
    "MKL_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONWARNINGS": "ignore:Failed to initialize NumPy,ignore:FSDP2-wrapped module",
}
_GRACE_SECONDS = 2.0


class RankError(Exception):
    """A rank failed, died or ran out of time; the message holds each failed rank's own traceback."""


class _Outcome(NamedTuple):
    failed: bool
    value: Any


class _Plan(NamedTuple):
    """What every rank is told."""

    function: Callable[..., Any]
    world_size: int
    args: tuple[Any, ...]
    timeout: float
    store: str
    """Path of the file through which gloo's ranks meet; empty for a world whose collectives move nothing."""


class _Rank(NamedTuple):
    number: int
    process: SpawnProcess
    results: Connection


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 500.0) -> list[Any]:
    """Calls ``function(rank, world_size, *args)`` in ``world_size`` processes of one gloo job.

    Args:
        function: importable by name; runs with the process group initialised, also when there is one rank only.
        world_size: number of processes.
        args: passed on.
        timeout: seconds for everything, starting the processes included.

    Returns:
        What each rank returned, by rank.

    Raises:
        RankError: if any rank failed, died or did not end in time.
    """
    with tempfile.TemporaryDirectory() as folder:
        return _run(_Plan(function, world_size, args, timeout, str(Path(folder) / "store")), world_size)


def run_alone(function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 500.0) -> Any:
    """Calls ``function(0, world_size, *args)`` in one process that believes the other ranks exist.

    Its collectives allocate as real ones do but move nothing, so results are meaningless and memory is the same in
    every run: no communication thread decides when a buffer is let go.

    Raises:
        RankError: as ``run_ranks``.
    """
    return _run(_Plan(function, world_size, args, timeout, store=""), num_processes=1)[0]


def _run(plan: _Plan, num_processes: int) -> list[Any]:
    deadline = time.monotonic() + plan.timeout
    ranks: list[_Rank] = []
    try:
        with mock.patch.dict(os.environ, _ENVIRONMENT):
            ranks.extend(_start(number, plan) for number in range(num_processes))
        return _collect(ranks, deadline)
    finally:
        for rank in ranks:
            _end(rank)


def _start(number: int, plan: _Plan) -> _Rank:
    context = multiprocessing.get_context("spawn")
    results, sender = context.Pipe(duplex=False)
    process = context.Process(target=_rank_main, args=(sender, number, plan))
    process.start()
    sender.close()
    return _Rank(number, process, results)


def _rank_main(sender: Connection, number: int, plan: _Plan) -> None:
    faulthandler.dump_traceback_later(plan.timeout, exit=True)
    torch.set_num_threads(1)
    os.environ.update(RANK=str(number), LOCAL_RANK=str(number), WORLD_SIZE=str(plan.world_size))
    try:
        _join(number, plan)
        outcome = _Outcome(failed=False, value=plan.function(number, plan.world_size, *plan.args))
    except BaseException:  # noqa: BLE001 - whatever it was, the parent shows it
        outcome = _Outcome(failed=True, value=traceback.format_exc())
    sender.send(outcome)
    if dist.is_initialized():
        dist.destroy_process_group()


def _join(number: int, plan: _Plan) -> None:
    if not plan.store:
        dist.init_process_group("fake", store=FakeStore(), rank=number, world_size=plan.world_size)
        return
    store = dist.FileStore(plan.store, plan.world_size)
    limit = timedelta(seconds=plan.timeout)
    dist.init_process_group("gloo", store=store, rank=number, world_size=plan.world_size, timeout=limit)


def _collect(ranks: list[_Rank], deadline: float) -> list[Any]:
    outcomes: dict[int, _Outcome] = {}
    while len(outcomes) < len(ranks):
        pending = {rank.results: rank for rank in ranks if rank.number not in outcomes}
        ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for connection in ready:
            rank = pending[connection]  # type: ignore[index]
            outcomes[rank.number] = _receive(rank)
            if outcomes[rank.number].failed:
                # One rank's failure often makes the others fail too: wait a little for the cause to report as well.
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
    if len(outcomes) == len(ranks) and not any(outcome.failed for outcome in outcomes.values()):
        return [outcomes[rank.number].value for rank in ranks]
    raise RankError("\n".join(_describe(rank.number, outcomes.get(rank.number)) for rank in ranks))


def _receive(rank: _Rank) -> _Outcome:
    try:
        return rank.results.recv()
    except EOFError:
        rank.process.join(_GRACE_SECONDS)
        return _Outcome(failed=True, value=f"died without a word, exit code {rank.process.exitcode}")


def _describe(number: int, outcome: _Outcome | None) -> str:
    if outcome is None:
        return f"rank {number}: still running when it was ended"
    return f"rank {number}: {outcome.value if outcome.failed else 'finished'}"


def _end(rank: _Rank) -> None:
    rank.process.join(_GRACE_SECONDS)
    if rank.process.is_alive():
        rank.process.kill()
        rank.process.join()
    rank.process.close()
    rank.results.close()
