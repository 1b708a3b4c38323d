"""Runs rows one after the other and reports each: what ``torchmem validate`` does.

Invariants: rows that cannot run here are skipped with the reason, never silently; a row that fails costs itself only;
a Ctrl-C ends every process and still reports the rows so far.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass

from torchmem import __version__
from torchmem.engine import native
from torchmem.validation import rows, witness
from torchmem.validation.outcome import FAILED, OFF, OK, SKIPPED, RowOutcome, judged
from torchmem.validation.report import Reporter, Summary
from torchmem.validation.worker import DEFAULT_TABLE, RowError, Team

DEFAULT_CPU_RANKS = 2


@dataclass(frozen=True)
class Options:
    """What to run and how."""

    machine: rows.Machine
    rows: Sequence[rows.Row]
    num_steps: int
    """Steps of a block; there are two watched blocks and two bare ones."""
    tolerance: float
    """How far a peak may be from the truth, as a share of it."""
    table: str = DEFAULT_TABLE
    """The module whose ``ROWS`` these are."""


class UnusableError(Exception):
    """What was asked for cannot be run on this host; the message is one line."""


def machine(device_type: str | None, num_ranks: int | None) -> rows.Machine:
    """The device and the number of ranks to use.

    Args:
        device_type: ``cpu`` or ``cuda``; CUDA where there is one if not given.
        num_ranks: how many; at most one a GPU; by default two on the CPU, as many as there are on GPUs.

    Raises:
        UnusableError: there is no such device.
    """
    torch = native.supported_torch()
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device_type == "cuda" and not num_gpus:
        raise UnusableError("torch sees no CUDA device here")
    if device_type == "cpu" or not num_gpus:
        return rows.Machine("cpu", num_ranks or DEFAULT_CPU_RANKS)
    if num_ranks is None or num_ranks <= num_gpus:
        return rows.Machine("cuda", num_ranks or num_gpus)
    have = "there is one GPU" if num_gpus == 1 else f"there are {num_gpus} GPUs"
    return rows.Machine("cuda", num_gpus, f"{have}: {num_gpus} of {num_ranks} ranks are run")


def run(options: Options, reporter: Reporter) -> list[RowOutcome]:
    """Runs the rows and reports them.

    Returns:
        What each row showed, in order.

    Raises:
        BuildError: the engine or the witness cannot be built.
        KeyboardInterrupt: after the rows so far were reported.
    """
    native.build()
    witness.build()
    outcomes: list[RowOutcome] = []
    with Team(options.machine.num_ranks, options.machine.device_type, options.table) as team:
        is_complete = False
        try:
            with reporter.watching(len(options.rows)):
                for row in options.rows:
                    reporter.begins(row.name)
                    outcomes.append(_outcome(row, team, options))
                    reporter.ended(outcomes[-1])
            is_complete = True
        finally:
            team.close()
            reporter.closes(_summary(outcomes, team, options, is_complete=is_complete))
    return outcomes


def is_right(outcomes: Sequence[RowOutcome]) -> bool:
    """True if no row is off or failed, and one at least was run."""
    statuses = {outcome.status for outcome in outcomes}
    return OK in statuses and not statuses & {OFF, FAILED}


def _outcome(row: rows.Row, team: Team, options: Options) -> RowOutcome:
    if reason := row.reason_to_skip(options.machine):
        return RowOutcome(row.name, SKIPPED, [reason])
    began = time.monotonic()
    try:
        ranks = team.run(row.name, options.num_steps, row.seconds)
    except RowError as error:
        return RowOutcome(row.name, FAILED, [str(error)], error.details, time.monotonic() - began)
    return judged(row.name, ranks, options.tolerance, time.monotonic() - began)


def _summary(outcomes: list[RowOutcome], team: Team, options: Options, *, is_complete: bool) -> Summary:
    import torch

    environment: dict[str, str | int | float] = {
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "ranks": options.machine.num_ranks,
        "device": options.machine.device_type,
        "steps": options.num_steps,
        "tolerance": options.tolerance,
    }
    if team.environment is not None:
        found = team.environment
        environment |= {"device_name": found.device, "driver": found.driver, "backend": found.backend}
    num_by_status: dict[str, int] = {}
    for outcome in outcomes:
        num_by_status[outcome.status] = num_by_status.get(outcome.status, 0) + 1
    remarks = [options.machine.remark] if options.machine.remark else []
    if outcomes and num_by_status.keys() == {SKIPPED}:
        remarks.append("nothing was validated: every row was skipped")
    return Summary(
        torchmem_version=__version__,
        environment=environment,
        is_complete=is_complete,
        num_by_status=num_by_status,
        remarks=remarks,
        rows=outcomes,
    )
