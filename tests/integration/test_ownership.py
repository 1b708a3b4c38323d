"""Every way people train, once more: the books' owners against who really made each block."""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path

import pytest
import torch

import torchmem
from jobs.ownership import Count, Observer
from jobs.ranks import run_ranks
from torchmem.validation.rows import ROWS, Machine
from torchmem.validation.workloads import Place

pytestmark = pytest.mark.slow

NUM_RANKS = 2
MACHINE = Machine("cpu", NUM_RANKS)
UNOBSERVABLE = ("compiled", "state-dict", "thread")
"""In parts of a row's name: compiled code has no operators to see, other threads another dispatcher."""
NAMES = [
    row.name for row in ROWS if not row.reason_to_skip(MACHINE) and not any(part in row.name for part in UNOBSERVABLE)
]


def observe_all(rank: int, world_size: int, folder: str) -> dict[str, Count | str]:
    """Each row's third step, observed."""
    warnings.simplefilter("ignore")
    place = Place(rank, world_size, torch.device("cpu"), Path(folder))
    rows = {row.name: row for row in ROWS}
    return {name: _observe(rows[name].build(place)) for name in NAMES}


def _observe(workload) -> Count:
    with (
        tempfile.TemporaryDirectory() as folder,
        torchmem.install(workload.model, workload.optimizer, dir=folder, depth=100) as monitor,
    ):
        for _ in range(2):
            workload.step()
        observer = Observer(workload.model, monitor)
        handle = workload.optimizer.register_step_post_hook(lambda *_: observer.look_at_gradients())
        with observer.observing():
            workload.step()
        handle.remove()
    workload.close()
    return observer.count


@pytest.fixture(scope="module")
def counts(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Count]]:
    """By rank and row."""
    return run_ranks(observe_all, NUM_RANKS, str(tmp_path_factory.mktemp("rows")))


@pytest.mark.parametrize("name", NAMES)
def test_never_a_wrong_name(counts, name):
    """Somebody would be told that a module holds what another one made."""
    for by_row in counts:
        assert by_row[name].mistakes == ()
        assert by_row[name].wrong == 0


@pytest.mark.parametrize("name", NAMES)
def test_nearly_all_bytes_have_their_module(counts, name):
    """What fills the device would be shown as nobody's."""
    for by_row in counts:
        assert by_row[name].named_share >= 0.95
        assert by_row[name].gradients_right >= 0.99 * by_row[name].gradients > 0
