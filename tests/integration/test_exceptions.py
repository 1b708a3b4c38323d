"""An exception anywhere in a step, in whatever kind of job: the next step's books are those of an undisturbed one."""

from __future__ import annotations

import contextlib
import gc
import struct
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook

import torchmem
from jobs import books
from jobs.ranks import run_alone, run_ranks
from torchmem.model import Phase
from torchmem.validation.rows import ROWS
from torchmem.validation.workloads import Place, Workload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

pytestmark = pytest.mark.slow

ALONE = (
    "zoo/transformer-shared/plain",
    "zoo/threads/plain",
    "plain/checkpointing/reentrant",
    "plain/checkpointing/non-reentrant",
    "fsdp2/checkpointing/composable/reshard",
    "fsdp2/multi-group/reshard/device/full",
    "fsdp1/full-shard/orig",
)
"""Rows that run where collectives move nothing, so that every run allocates alike."""
TOGETHER = ("ddp/bucket-view", "ddp/copied")
LOOSE = ("num_unknown_frees", "num_double_allocations", "num_unmatched_pops")


class BoomError(Exception):
    """What is thrown."""


class After(NamedTuple):
    """The books of the second step after the exception."""

    peak: books.Composition
    end: books.Composition
    phases: int
    """What happened in it, as ``Phase``."""
    loose: dict[str, int]
    stack_depth: int
    disabled: list[str]


def _boom(*_: Any) -> None:
    raise BoomError


@contextlib.contextmanager
def _leaves(found: list[nn.Module]) -> Iterator[None]:
    """Notes the modules without children that are called meanwhile."""

    def note(module: nn.Module, _args: Any, output: Any) -> None:
        if not list(module.children()) and isinstance(output, torch.Tensor) and output.requires_grad:
            found.append(module)

    handle = register_module_forward_hook(note)
    yield
    handle.remove()


@contextlib.contextmanager
def in_forward(_workload: Workload, leaf: nn.Module) -> Iterator[None]:
    handle = leaf.register_forward_pre_hook(_boom)
    yield
    handle.remove()


@contextlib.contextmanager
def in_forward_hook(_workload: Workload, leaf: nn.Module) -> Iterator[None]:
    handle = leaf.register_forward_hook(_boom)
    yield
    handle.remove()


@contextlib.contextmanager
def in_backward(_workload: Workload, leaf: nn.Module) -> Iterator[None]:
    def plant(_module: nn.Module, _args: Any, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(_boom)

    handle = leaf.register_forward_hook(plant)
    yield
    handle.remove()


@contextlib.contextmanager
def in_optimizer(workload: Workload, _leaf: nn.Module) -> Iterator[None]:
    kept = [group.pop("betas") for group in workload.optimizer.param_groups]
    yield
    for group, betas in zip(workload.optimizer.param_groups, kept, strict=True):
        group["betas"] = betas


@contextlib.contextmanager
def in_optimizer_hook(workload: Workload, _leaf: nn.Module) -> Iterator[None]:
    handle = workload.optimizer.register_step_pre_hook(_boom)
    yield
    handle.remove()


PLACES: dict[str, Callable[[Workload, nn.Module], contextlib.AbstractContextManager[None]]] = {
    f.__name__: f for f in (in_forward, in_forward_hook, in_backward, in_optimizer, in_optimizer_hook)
}
GIVES_UP = {
    ("fsdp2", "in_backward"),
    ("fsdp1", "in_backward"),
    ("fsdp1", "in_forward"),
    ("fsdp1", "in_forward_hook"),
    ("ddp", "in_backward"),
}
"""Where torch's wrapper itself cannot go on after the exception."""
CASES = [
    (name, place) for name in (*ALONE, *TOGETHER) for place in PLACES if (name.split("/")[0], place) not in GIVES_UP
]


def disturb(rank: int, world_size: int, names: tuple[str, ...]) -> dict[tuple[str, str], After]:
    """Each row undisturbed (place ``""``) and disturbed in every place."""
    warnings.simplefilter("ignore")
    place = Place(rank, world_size, torch.device("cpu"), Path(tempfile.mkdtemp()))
    rows = {row.name: row for row in ROWS}
    cases = [(name, "") for name in names] + [case for case in CASES if case[0] in names]
    return {(name, where): _run(rows[name].build(place), where) for name, where in cases}


def _run(workload: Workload, where: str) -> After:
    with (
        tempfile.TemporaryDirectory() as folder,
        torchmem.install(workload.model, workload.optimizer, dir=folder) as monitor,
    ):
        leaves: list[nn.Module] = []
        workload.step()
        with _leaves(leaves):
            workload.step()
        if where:
            with PLACES[where](workload, leaves[len(leaves) // 2]), contextlib.suppress(BoomError, KeyError):
                workload.step()
                raise AssertionError("nothing was thrown")
            gc.collect()  # the traceback's frames hold what the step had made
        for _ in range(2):
            workload.step()
        record = monitor.snapshot()
        depth = monitor._native.stack_depth()
    workload.close()
    last = max(books.step_peaks(record))
    disabled = [f"{labeler.name}: {labeler.reason}" for labeler in record.labelers if not labeler.up]
    loose = {key: record.counters[key] for key in LOOSE}
    *_, (phases,) = struct.iter_unpack("<q", record.ring.phases)
    return After(books.step_peaks(record)[last], books.step_ends(record)[last], phases, loose, depth, disabled)


@pytest.fixture(scope="module")
def after() -> dict[tuple[str, str], After]:
    """By row and place."""
    return run_alone(disturb, 2, ALONE) | run_ranks(disturb, 1, TOGETHER)[0]


@pytest.mark.parametrize(("name", "where"), CASES)
def test_the_next_steps_books_are_right(after, name, where):
    """One failed step would leave a label, a frame or a phase behind, and every later step be booked wrongly."""
    assert after[name, where] == after[name, ""]
    assert after[name, where].phases == Phase.FORWARD | Phase.BACKWARD | Phase.OPTIMIZER
    assert after[name, where].loose == dict.fromkeys(LOOSE, 0)
    assert after[name, where].stack_depth == 0
    assert after[name, where].disabled == []
