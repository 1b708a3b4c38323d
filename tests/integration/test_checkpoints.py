"""Saving and loading on real jobs: bit-identical when watched, every byte named, the peak as another count has it."""

from __future__ import annotations

import array
import functools

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import torchmem
from jobs import books
from jobs.checkpoint_flows import FLOWS, SIZE
from jobs.checkpoints import (
    Comparison,
    compare,
    fail_to_save,
    load_resharded,
    save_for_resharding,
    train_while_saving,
)
from jobs.model import Transformer
from jobs.ranks import run_ranks
from torchmem.model import Phase
from torchmem.wire.record import Record, decode, encode
from torchmem_exporter import catalog
from torchmem_exporter.budget import Budget
from torchmem_exporter.reading.lifecycle import State
from torchmem_exporter.reading.reader import Rank, Snapshot
from torchmem_exporter.sampler import Sampler

QUICK_NAMES = ("plain", "fsdp1_full", "fsdp2_files")
SLOW_NAMES = tuple(flow.name for flow in FLOWS if flow.name not in QUICK_NAMES)
FOUR_RANKS = ("fsdp1_rank_0", "fsdp2_distributed_full", "fsdp2_files_in_background")
CASES = [
    *(pytest.param(2, QUICK_NAMES, name, id=name) for name in QUICK_NAMES),
    *(pytest.param(2, SLOW_NAMES, name, id=name, marks=pytest.mark.slow) for name in SLOW_NAMES),
    *(pytest.param(4, FOUR_RANKS, name, id=f"{name}_on_4", marks=pytest.mark.slow) for name in FOUR_RANKS),
]
ALL_PARAMETERS = sum(parameter.untyped_storage().nbytes() for parameter in Transformer(SIZE).parameters())
NUM_PARAMETERS = len(list(Transformer(SIZE).parameters()))


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What each rank found of the named flows, all of which run in the same processes."""

    @functools.cache
    def run(world_size, names) -> list[dict[str, Comparison]]:
        return run_ranks(compare, world_size, str(tmp_path_factory.mktemp("flows")), list(names))

    return run


@pytest.fixture
def comparisons(results, request):
    """One flow's, by rank."""
    world_size, names, name = request.param
    return [found[name] for found in results(world_size, names)]


def all_cases(test):
    """Runs the test on every flow."""
    indirect = [pytest.param(case.values, id=case.id, marks=case.marks) for case in CASES]
    return pytest.mark.parametrize("comparisons", indirect, indirect=True)(test)


def phases(record: Record) -> list[bool]:
    """Of each step, whether a checkpoint was saved or loaded in it."""
    return [bool(Phase(flags) & Phase.CHECKPOINT) for flags in array.array("q", record.ring.phases)]


@all_cases
def test_saves_and_loads_the_same(comparisons):
    """Watching would change what a checkpoint holds or what training goes on from."""
    assert [comparison.differing for comparison in comparisons] == [[]] * len(comparisons)


@all_cases
def test_every_new_byte_is_the_checkpoints(comparisons):
    """What saving makes would be booked as something else, or other bytes as the checkpoint's."""
    for found in (comparison.watched for comparison in comparisons):
        assert found.checkpoint_bytes == [found.made_bytes, 0, 0]


@all_cases
def test_the_peak_is_the_true_one(comparisons):
    """The published peak of saving would not be what saving takes."""
    for found in (comparison.watched for comparison in comparisons):
        assert found.added_peak_bytes == found.true_added_peak_bytes


@all_cases
def test_what_was_loaded_gets_its_own_name(comparisons):
    """Loaded parameters or optimizer state would stay a checkpoint's, or something else be taken for theirs."""
    for found in (comparison.watched for comparison in comparisons):
        assert found.in_books == found.in_storages
        assert found.unseen_bytes <= 4 * NUM_PARAMETERS  # the optimizer's step numbers, where torch unpickles them


@all_cases
def test_no_label_is_left(comparisons):
    """What the job allocates after saving would be booked as the checkpoint's."""
    assert [comparison.watched.depths for comparison in comparisons] == [[0, 0]] * len(comparisons)


@all_cases
def test_steps_with_a_checkpoint_are_marked(comparisons):
    """Drift would be judged on steps that saved or loaded."""
    for comparison in comparisons:
        assert phases(comparison.watched.record) == [False, True, True]


@all_cases
def test_both_peaks_are_published(comparisons):
    """Nobody would see whether saving, or loading, runs out of memory."""
    for record in (comparison.watched.record for comparison in comparisons):
        assert books.cpu(record).checkpoint_peaks.keys() == {"save", "load"}
        assert max(books.cpu(record).checkpoint_peaks.values()) <= books.cpu(record).peak_bytes


def test_peaks_reach_the_sidecar(tmp_path):
    """What saving takes would be known to the process alone."""
    model = nn.Linear(64, 64)
    with torchmem.install(model, dir=tmp_path, train_job="job", publish_interval=60.0) as monitor:
        model.state_dict()
        monitor.step()
        record = decode(encode(monitor.snapshot()))
    rank = Rank("job/rank-0.record", record, State.RUNNING, has_memory=True)
    snapshot = Snapshot(taken_at=0.0, ranks=(rank,), rejections=(), num_errors={}, problem="")
    block = Sampler(Budget()).blocks(snapshot)[0]
    (peaks,) = [series for series in block.series if series.metric is catalog.CHECKPOINT_PEAK]
    assert peaks.labels == (("job", "0", "cpu", "save"),)
    assert tuple(peaks.values) == (books.cpu(record).usage_bytes,)


def test_making_missing_state_is_no_step(tmp_path):
    """torch's step with zero gradients, which fills an optimizer before it is saved, would count as training."""
    model = nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    with torchmem.install(model, optimizer, dir=tmp_path, publish_interval=60.0) as monitor:
        get_state_dict(model, optimizer)
        assert monitor.snapshot().clock.step == 0
        model(torch.ones(1, 64)).sum().backward()
        optimizer.step()
        record = monitor.snapshot()
    assert record.clock.step == 1
    storages = (value.untyped_storage() for state in optimizer.state.values() for value in state.values())
    assert books.usage(record)["optimizer_state"] == sum(storage.nbytes() for storage in storages)


@pytest.mark.slow
def test_full_state_on_rank_0_alone(results):
    """The rank that keeps the whole model would hold less than the model, or one that keeps nothing still something."""
    first, *others = (found["fsdp1_rank_0"].watched for found in results(4, FOUR_RANKS))
    assert first.checkpoint_bytes[0] >= ALL_PARAMETERS
    assert [found.checkpoint_bytes[0] for found in others] == [0, 0, 0]
    # Each of them has gathered one group of parameters after the other all the same.
    assert all(0 < found.added_peak_bytes < first.made_bytes for found in others)


@pytest.mark.slow
@pytest.mark.parametrize("saves_watched", [True, False])
def test_resharding_from_four_ranks_to_two(tmp_path, saves_watched):
    """A checkpoint written under torchmem could not be loaded on fewer ranks, or would hold other numbers."""
    run_ranks(save_for_resharding, 4, str(tmp_path), saves_watched)
    assert run_ranks(load_resharded, 2, str(tmp_path)) == [[], []]


@pytest.mark.slow
def test_training_goes_on_under_its_own_names(tmp_path):
    """While another thread saves, what training allocates would be booked as the checkpoint's."""
    for record in run_ranks(train_while_saving, 2, str(tmp_path)):
        before, during = books.step_peaks(record).values()
        staged = during.pop("checkpoint")
        assert during == before
        assert staged == before["parameter"] + before["buffer"]
        assert phases(record) == [False, True]


@pytest.mark.slow
def test_failed_checkpoints_leave_nothing(tmp_path):
    """After a full disk or a missing file, everything to come would be booked as a checkpoint's."""
    failures = ["CheckpointException", "CheckpointException", "KeyError"]
    assert run_ranks(fail_to_save, 2, str(tmp_path)) == [(failures, [0, 0, 0], 0)] * 2
