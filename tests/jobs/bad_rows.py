"""Rows that go wrong on purpose, one way each, for the tests of ``torchmem validate``."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from torchmem.validation.models import MLPS
from torchmem.validation.parallel import fsdp2, plain
from torchmem.validation.rows import Machine, Row

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchmem.validation.workloads import Place, Workload


def _then(mishap: Callable[[], object]) -> Callable[[Place], Workload]:
    """A sharded workload in whose step something happens to rank 1, while the others wait for it."""

    def build(place: Place) -> Workload:
        workload = fsdp2(MLPS)(place)
        step = workload.step

        def mishap_then_step() -> None:
            if place.rank == 1:
                mishap()
            step()

        return replace(workload, step=mishap_then_step)

    return build


def _hangs(place: Place) -> Workload:
    """On rank 1 at once, so that however slow the host is, it hangs here when its time is up."""
    if place.rank == 1:
        time.sleep(600)
    return fsdp2(MLPS)(place)


def _fail() -> None:
    raise ValueError("no such\nluck")


def _with_hidden_block(place: Place) -> Workload:
    """Holds a block from before the books begin, which nobody can find."""
    workload = plain(MLPS)(place)
    hidden = torch.ones(1 << 18, device=place.device)
    step = workload.step
    return replace(workload, step=lambda: (step(), hidden.neg_())[0])


def _never(_machine: Machine) -> str:
    return "not on this host"


ROWS = (
    Row("good", plain(MLPS)),
    Row("raises", _then(_fail)),
    Row("good-after-raising", fsdp2(MLPS)),
    Row("hangs", _hangs, seconds=6.0),
    Row("dies", _then(lambda: os.kill(os.getpid(), signal.SIGKILL))),
    Row("off", _with_hidden_block),
    Row("unable", plain(MLPS), unable=_never),
    Row("wide", plain(MLPS), min_ranks=4),
)
